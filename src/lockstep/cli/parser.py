"""The argument parser of the command: options of a table, Lockstep's errors, and pictures that may
be missing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from .. import arguments
from ..errors import LockstepError, MissingPackageError
from ..option_table import Option


class Help(argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of description and examples."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26)


class UsageError(LockstepError):
    """The command line cannot be parsed."""

    exit_code = 2


class Parser(argparse.ArgumentParser):
    """A parser that raises UsageError with a message of one line, where argparse would print and
    exit.
    """

    def error(self, message: str) -> NoReturn:
        """Raise UsageError for argparse's `message`."""
        message = message.removeprefix("argument ")
        flag, _, problem = message.partition(": ")
        required = "the following arguments are required: "
        if message.startswith(required):
            missing = message.removeprefix(required).split(", ")
            missing_names = ", ".join(missing[:1] if missing[0] == "script" else missing)
            expected = (
                "a Python file or, with -m, a module" if missing_names == "script" else "a value"
            )
            message = f"{missing_names}: expected {expected}, got none"
        if problem == "expected one argument":
            first, *_, last = flag.split("/") * 2
            message = (
                f"{first}: expected a value, got none (one that begins with a dash is written "
                f"{last}=VALUE)"
            )
        raise UsageError(f"{message}. `{self.prog} --help` explains it.")

    def add_options(self, entries: Iterable[Option], *, are_shown: bool = True) -> None:
        """Add options of a table. What is given for one becomes an attribute of the namespace; what
        is not, none.

        Args:
            entries: the options.
            are_shown: whether the help has them.
        """
        for entry in entries:
            text = _help(entry) if are_shown else argparse.SUPPRESS
            settings = {
                "dest": entry.name,
                "help": text,
                "action": _Given,
                "repeats": entry.repeats,
            }
            group = self.group(entry.group)
            if entry.metavar:
                group.add_argument(*entry.flags, metavar=entry.metavar, **settings)
            else:
                group.add_argument(
                    *entry.flags, *entry.opposites, nargs=0, opposites=entry.opposites, **settings
                )

    def add_debug(self) -> None:
        """Add ``--debug``, by which `main` shows the traceback of an error."""
        self.add_argument("--debug", action="store_true", help="print the traceback of an error")

    def group(self, title: str) -> Any:
        """Return the group of the help with this title, a new one at first; for "" the parser
        itself.
        """
        if not title:
            return self
        titles = {group.title: group for group in self._action_groups}
        return titles.get(title) or self.add_argument_group(title)

    def set_command(
        self,
        run: Callable[[argparse.Namespace], int],
        elsewhere: Mapping[str, str] | None = None,
        **defaults: Any,
    ) -> None:
        """Set the function that runs this subcommand, and further values of the namespace.

        The attribute `sources` of the namespace has the flag of each option, by the option's name:
        as it was typed, and the first one of those that were not.

        Args:
            run: the function.
            elsewhere: options of other commands → what they are here, a clause; names have dashes,
                no underscores.
            defaults: the further values.
        """
        # suggested for unknown options
        known = [flag for action in self._actions for flag in action.option_strings]
        first = {
            action.dest: action.option_strings[0]
            for action in self._actions
            if action.option_strings
        }
        self.set_defaults(
            run=run, known=known, elsewhere=elsewhere or {}, sources=first, **defaults
        )


def _help(entry: Option) -> str:
    """Return what the help says about an option: its phrase, and its default."""
    if not entry.help:
        return argparse.SUPPRESS
    if not entry.metavar or entry.default is None or entry.default == ():
        return entry.help
    default = (
        f"{entry.default:g}" if isinstance(entry.default, float) else entry.write(entry.default)
    )
    return f"{entry.help} (default: {default})"


class _Given(argparse.Action):
    """Keeps what is given for an option, and in `sources` of the namespace the flag that was typed.

    Args:
        repeats: whether all values are kept, in a list, and not the last one.
        opposites: the flags by which a switch is turned off.
        settings: those of `argparse.Action`.
    """

    def __init__(self, *, repeats: bool, opposites: Sequence[str] = (), **settings: Any) -> None:
        super().__init__(**settings)
        self._repeats = repeats
        self._opposites = opposites

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Set the attributes."""
        if self.nargs == 0:
            values = option_string not in self._opposites
        elif self._repeats:
            values = [*getattr(namespace, self.dest, []), values]
        setattr(namespace, self.dest, values)
        namespace.sources = {**namespace.sources, self.dest: option_string}


def can_draw(command: str) -> bool:
    """Return whether the picture that `command` draws unasked can be drawn; if not, a line says
    what is missing.
    """
    try:
        arguments.require_package("matplotlib", "the picture", "plots")
    except MissingPackageError as error:
        print(f"{command}: without a picture: {error}", file=sys.stderr)
        return False
    return True
