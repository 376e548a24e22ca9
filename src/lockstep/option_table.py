"""What an option of a command is: one entry of a table, of which everything else about the option
is made.

A table is a dataclass of which `option` makes the fields. An entry says how the option is typed,
what the help says, how its text becomes a value, and who else gets the value: the launchers of
other hosts, the workers in a variable of their environment, or the file for a scheduler.
`values_of` makes the attributes of the dataclass from texts; `cli.parser` makes the parser and the
help.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from . import arguments
from .errors import ConfigError

__all__ = [
    "Option",
    "Parse",
    "Typed",
    "choice",
    "integer",
    "names",
    "number",
    "option",
    "options_of",
    "switch",
    "text",
    "values_of",
]

Parse = Callable[[str, Any], Any]
"""Makes an option's value of its name and what was given: a text, or a value in a file. Raises
ConfigError.
"""


@dataclass(frozen=True)
class Typed:
    """How an option is typed in another command than that of its table.

    Attributes:
        flags: as typed, the first one in messages.
        group: its group in the help; "" for the same.
        help: what it sets, in a phrase; "" for the same.
    """

    flags: tuple[str, ...]
    group: str = ""
    help: str = ""


@dataclass(frozen=True)
class Option:
    """An option of a command.

    Attributes:
        name: the attribute that has its value.
        default: its value when it is not given.
        flags: how it is typed; the first one is that of messages and of command lines that are
            made.
        group: its group in the help; "" for none.
        help: what it sets, in a phrase, without the default; "" hides the option.
        metavar: the placeholder of its value in the help; "" for a switch, which has none.
        parse: makes the value.
        write: makes a text of the value, which `parse` reads.
        opposites: the flags that turn a switch off, which a file of options may have turned on.
        repeats: whether it may be given several times; `parse` then gets a list.
        to_hosts: whether the launchers of other hosts get it, those of hosts that join later among
            them.
        variable: the variable of their environment in which workers on all hosts get it; "" for
            none.
        to_scheduler: whether it is an option of `lockstep submit` too, which writes it into the
            file for a scheduler.
        horovodrun: how it is typed for `lockstep horovodrun`; None if that does not have it.
    """

    name: str
    default: Any
    flags: tuple[str, ...]
    group: str
    help: str
    metavar: str
    parse: Parse
    write: Callable[[Any], str]
    opposites: tuple[str, ...]
    repeats: bool
    to_hosts: bool
    variable: str
    to_scheduler: bool
    horovodrun: Typed | None

    def words(self, value: Any) -> list[str]:
        """Return the option with `value`, or with a text, as words of a command line; none for the
        default.
        """
        if value == self.default:
            return []
        if not self.metavar:
            return [self.flags[0]]
        return [self.flags[0], value if isinstance(value, str) else self.write(value)]


def option(
    default: Any,
    *flags: str,
    group: str = "",
    help: str = "",
    metavar: str = "",
    parse: Parse | None = None,
    write: Callable[[Any], str] = str,
    opposites: tuple[str, ...] = (),
    repeats: bool = False,
    to_hosts: bool = False,
    variable: str = "",
    to_scheduler: bool = False,
    horovodrun: Typed | None = None,
) -> Any:
    """Return a field of a table; the arguments are the attributes of `Option`.

    Without `flags` it is typed as it is named, with dashes. Without `parse` its value is a text or,
    where `metavar` is "", True or False.
    """
    entry = {
        "flags": flags,
        "group": group,
        "help": help,
        "metavar": metavar,
        "parse": parse or (text if metavar else switch),
        "write": write,
        "opposites": opposites,
        "repeats": repeats,
        "to_hosts": to_hosts,
        "variable": variable,
        "to_scheduler": to_scheduler,
        "horovodrun": horovodrun,
    }
    return field(default=default, metadata=entry)


def options_of(table: type) -> tuple[Option, ...]:
    """Return the options of a table, in the order of its help."""
    entries = []
    for attribute in fields(table):
        if attribute.metadata:
            flags = attribute.metadata["flags"] or ("--" + attribute.name.replace("_", "-"),)
            entries.append(
                Option(attribute.name, attribute.default, **{**attribute.metadata, "flags": flags})
            )
    return tuple(entries)


def values_of(table: type, parsed_values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the options of a table that are among `parsed_values`: texts, or values
    of a file, by name.

    A value of None, null in a file, stands for an option that is not given.

    Raises:
        ConfigError: a value is invalid; names the option.
    """
    values = {}
    for entry in options_of(table):
        if entry.name in parsed_values:
            value = parsed_values[entry.name]
            is_null = value is None and entry.default is None
            values[entry.name] = None if is_null else entry.parse(entry.name, value)
    return values


def integer(least: int, most: int | None = None, *, expected: str = "") -> Parse:
    """Return the `Parse` of whole numbers within limits."""
    return partial(arguments.parse_whole, least=least, most=most, expected=expected)


def number(expected: str = "", **limits: Any) -> Parse:
    """Return the `Parse` of numbers within `limits`, arguments of `arguments.parse_number`."""
    return partial(arguments.parse_number, expected=expected, **limits)


def text(name: str, value: Any) -> str:
    """Return a text; a whole number in a file stands for its digits.

    Raises:
        ConfigError: it is empty, or of another type.
    """
    if isinstance(value, bool) or not isinstance(value, str | int):
        hint = "" if value is None or isinstance(value, bool) else "Put it in quotes."
        raise ConfigError(name, "a text", value, hint)
    if not str(value).strip() or "\0" in str(value):
        raise ConfigError(name, "a text", value)
    return str(value)


def switch(name: str, value: Any) -> bool:
    """Return True or False.

    Raises:
        ConfigError: it is neither.
    """
    if not isinstance(value, bool):
        raise ConfigError(name, "true or false", value)
    return value


def choice(known: Iterable[str]) -> Parse:
    """Return the `Parse` of one of a few texts."""
    return partial(arguments.choice, known=tuple(known))


def names(_: str, value: str | Sequence[str]) -> tuple[str, ...]:
    """Return names, in one text with commas or in several texts."""
    texts = value.split(",") if isinstance(value, str) else value
    return tuple(text.strip() for text in texts if text.strip())
