"""What an argument must be: each function checks a value, returns it, and raises one kind of error
that names it.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from numbers import Integral, Real
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from .errors import ConfigError, MissingPackageError, unknown_name

T = TypeVar("T")


def whole(
    argument: str,
    value: Any,
    *,
    least: int | None = None,
    most: int | None = None,
    expected: str = "",
    hint: str = "",
) -> int:
    """Check a whole number, and return it as an `int`, which NumPy's integers are not.

    Args:
        argument: the argument's name.
        value: its value.
        least: the smallest valid number; None for no limit.
        most: the largest one; None for no limit.
        expected: the valid numbers in words, if the limits alone do not say it: "a whole number
            from 1 to 9, or None".
        hint: what to do about an invalid one, a full sentence.

    Raises:
        ConfigError: for another type, among them `bool`, or a number outside of these limits.
    """
    is_whole = isinstance(value, (int, Integral)) and not isinstance(value, bool)
    if not is_whole or (least is not None and value < least) or (most is not None and value > most):
        raise ConfigError(
            argument, expected or _in_words("a whole number", least, most=most), value, hint
        )
    return int(value)


def number(
    argument: str,
    value: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    finite: bool = False,
    expected: str = "",
    hint: str = "",
) -> float:
    """Check a number that is not NaN, and return it as it is.

    Args:
        argument: the argument's name.
        value: its value.
        least: the smallest valid number; None for no such limit.
        above: what the number must be greater than; None for no such limit.
        most: the largest valid number; None for no such limit.
        below: what the number must be less than; None for no such limit.
        finite: whether infinity is invalid.
        expected: the valid numbers in words, if the limits alone do not say it: "a probability from
            0 to below 1".
        hint: what to do about an invalid one, a full sentence.

    Raises:
        ConfigError: for another type, among them `bool`, or another number.
    """
    is_number = isinstance(value, Real) and not isinstance(value, bool) and not math.isnan(value)
    is_valid = (
        is_number
        and (least is None or value >= least)
        and (above is None or value > above)
        and (most is None or value <= most)
        and (below is None or value < below)
        and not (finite and math.isinf(value))
    )
    if not is_valid:
        kind = "a finite number" if finite else "a number"
        raise ConfigError(
            argument, expected or _in_words(kind, least, above, most, below), value, hint
        )
    checked: float = value
    return checked


def parse_whole(
    argument: str,
    text: object,
    *,
    least: int | None = None,
    most: int | None = None,
    expected: str = "",
    hint: str = "",
) -> int:
    """Return the whole number that a text stands for, such as an option's; arguments and error as
    those of `whole`.
    """
    try:
        if "_" in str(text):  # which Python allows between digits
            raise ValueError(text)
        return whole(argument, int(str(text)), least=least, most=most, expected=expected, hint=hint)
    except ValueError:  # the error shows the text itself
        raise ConfigError(
            argument, expected or _in_words("a whole number", least, most=most), text, hint
        ) from None


def parse_number(
    argument: str,
    text: object,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    finite: bool = False,
    expected: str = "",
    hint: str = "",
) -> float:
    """Return the number that a text stands for, such as an option's; arguments and error as those
    of `number`.
    """
    try:
        return number(
            argument,
            float(str(text)),
            least=least,
            above=above,
            most=most,
            below=below,
            finite=finite,
        )
    except ValueError:
        kind = "a finite number" if finite else "a number"
        raise ConfigError(
            argument, expected or _in_words(kind, least, above, most, below), text, hint
        ) from None


def parse_host(argument: str, text: object, expected: str = "a host's name or address") -> str:
    """Return the name or address of a host, which may be unknown here.

    Args:
        argument: the argument's name.
        text: its value.
        expected: what it stands for, in words.

    Raises:
        ConfigError: it can be none: it is empty, or a part between two dots is empty or too long.
    """
    host = str(text).strip()
    try:
        host.encode("idna")  # as Python does to look it up, with an error of another type
    except UnicodeError:
        raise ConfigError(argument, expected, text) from None
    if not host or "\0" in host:
        raise ConfigError(argument, expected, text)
    return host


def _in_words(
    kind: str,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
) -> str:
    """Return the valid numbers of a kind, such as "a number of at least 1", "from 0 to below 1", or
    "above 0".
    """
    if least is not None and most is not None:
        return f"{kind} from {least} to {most}"
    if least is not None and below is not None:
        return f"{kind} from {least} to below {below}"
    limits = {"of at least": least, "above": above, "of at most": most, "below": below}
    limits_in_words = [f"{words} {limit}" for words, limit in limits.items() if limit is not None]
    return f"{kind} {' and '.join(limits_in_words)}" if limits_in_words else kind


def flag(argument: str, value: T, none: str = "") -> T:
    """Check a switch, True or False, also as 1 or 0 or as NumPy has them, and return it.

    Args:
        argument: the argument's name.
        value: its value.
        none: what None means, if it is valid.

    Raises:
        ConfigError: for anything else, such as the text "False", which Python takes for true.
    """
    if value is None and none:
        return value
    is_numpy = type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_")
    if not (isinstance(value, int) and value in (0, 1)) and not is_numpy:
        raise ConfigError(
            argument, "True or False" + (f", or None for {none}" if none else ""), value
        )
    return value


def choice(
    argument: str,
    value: Any,
    known: Iterable[str],
    expected: str = "",
    elsewhere: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Check one of a few texts, and return it.

    Args:
        argument: the argument's name.
        value: its value.
        known: the valid texts.
        expected: them in words, in place of the list of all.
        elsewhere: a text that is valid elsewhere, such as in another library → its name here, for
            the error.

    Raises:
        ConfigError: for anything else; it suggests similar ones.
    """
    choices = list(known)
    if not isinstance(value, str) or value not in choices:
        listed = " or ".join(filter(None, (", ".join(choices[:-1]), *choices[-1:])))
        raise unknown_name(
            argument, value, choices, expected=expected or listed, elsewhere=elsewhere
        )
    return value


def text(argument: str, value: Any, expected: str) -> str:
    """Check a text that is not empty, and return it.

    Args:
        argument: the argument's name.
        value: its value.
        expected: the valid texts, in words.

    Raises:
        ConfigError: for another type, or an empty text.
    """
    if not isinstance(value, str) or not value:
        raise ConfigError(argument, expected, value)
    return value


def texts(argument: str, value: Any, expected: str) -> list[str]:
    """Check a list of texts, which a single text is not, and return it.

    Args:
        argument: the argument's name.
        value: its value, any iterable.
        expected: the texts, in words.

    Raises:
        ConfigError: for anything else.
    """
    items = (
        list(value)
        if isinstance(value, Iterable) and not isinstance(value, (str, bytes))
        else [None]
    )
    if not all(isinstance(item, str) for item in items):
        raise ConfigError(argument, expected, value)
    return items


def path(argument: str, value: Any, expected: str, hint: str = "") -> Path:
    """Check the path of a file or a folder, and return it.

    Args:
        argument: the argument's name.
        value: its value, a text or an object such as `pathlib.Path`.
        expected: what it is the path of, in words.
        hint: what to do about an invalid one, a full sentence.

    Raises:
        ConfigError: for another type, or a text that is no path.
    """
    as_text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(as_text, str) or not as_text or "\0" in as_text:
        raise ConfigError(argument, expected, value, hint)
    return Path(as_text)


def output_file(argument: str, value: str | os.PathLike[str]) -> Path:
    """Check the path of a file to write, before the work whose result it gets, and return it.

    Args:
        argument: the argument's name.
        value: its value.

    Raises:
        ConfigError: if it is a folder, or in a folder that does not exist.
    """
    file = path(argument, value, "a file in an existing folder")
    if not file.absolute().parent.is_dir():
        raise ConfigError(
            argument, "a file in an existing folder", str(value), "Make the folder first."
        )
    if file.is_dir():
        raise ConfigError(argument, "a file in an existing folder", str(value))
    return file


def instance(
    argument: str, value: T, kind: type | tuple[type, ...], expected: str, hint: str = ""
) -> T:
    """Check that a value is an instance of a class, and return it.

    Args:
        argument: the argument's name.
        value: its value.
        kind: the class, or several of them.
        expected: an instance, in words.
        hint: what to do about an invalid one, a full sentence.

    Raises:
        ConfigError: for another type; of a class in the place of an instance it says so.
    """
    if isinstance(value, kind):
        return value
    if isinstance(value, type) and issubclass(value, kind):
        raise _class_error(argument, expected, value)
    raise ConfigError(argument, expected, found=type(value).__name__, hint=hint)


def function(
    argument: str,
    value: T,
    expected: str,
    *,
    takes: int | None = None,
    of_class: bool = True,
    hint: str = "",
) -> T:
    """Check a function, or another object that can be called, and return it.

    Args:
        argument: the argument's name.
        value: its value.
        expected: the function, in words.
        takes: the number of positional arguments that it is called with; None if that is not
            checked.
        of_class: whether a class is valid, which makes an object when it is called.
        hint: what to do about an invalid one, a full sentence.

    Raises:
        ConfigError: for an object that cannot be called, or not with so many arguments.
    """
    if isinstance(value, type) and not of_class:
        raise _class_error(argument, expected, value)
    if not callable(value):
        raise ConfigError(argument, expected, value, hint)
    if takes is None:
        return value
    try:
        # A decorator such as functools.wraps shows the signature of what it calls, perhaps with
        # further arguments.
        signature = inspect.signature(value, follow_wrapped=False)
    except (TypeError, ValueError):  # written in C
        return value
    try:
        signature.bind(*[None] * takes)
    except TypeError:
        name = getattr(value, "__name__", type(value).__name__)
        raise ConfigError(argument, expected, found=f"{name}{signature}", hint=hint) from None
    return value


def _class_error(argument: str, expected: str, value: type) -> ConfigError:
    name = value.__name__
    return ConfigError(
        argument, expected, found=f"the class {name}", hint=f"Create an instance: {name}(...)."
    )


def require_package(package: str, needed_by: str, extra: str, module: str = "") -> None:
    """Check that a package is installed that only a part of Lockstep needs.

    Args:
        package: its name on an index.
        needed_by: what needs it, as the error begins: an argument, or a call such as "Curve()".
        extra: the extra of Lockstep that installs it.
        module: the module that it installs, if that has another name.

    Raises:
        MissingPackageError: if it is not; the message says how to install it.
    """
    if find_spec(module or package) is None:
        raise MissingPackageError(needed_by, package, extra)


def keyword_names(called: Callable[..., Any]) -> list[str]:
    """Return the names of the arguments of a function, or of a class, that may be given by
    keyword.
    """
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [
        parameter.name
        for parameter in inspect.signature(called).parameters.values()
        if parameter.kind in kinds
    ]
