"""Checks of the types and values of arguments, and of packages that they need, with one error for each kind."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from numbers import Real
from pathlib import Path
from typing import Any

from .errors import ConfigError, MissingPackageError

__all__ = [
    "check_callable",
    "check_flag",
    "check_instance",
    "check_number",
    "check_package",
    "check_path",
    "check_text",
    "check_texts",
    "check_whole",
    "keyword_names",
]


def keyword_names(function: Callable[..., Any]) -> list[str]:
    """Return the names of the arguments of a function, or of a class, that may be given by keyword."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [each.name for each in inspect.signature(function).parameters.values() if each.kind in kinds]


def check_whole(argument: str, value: Any, least: int, most: int | None = None, hint: str = "") -> None:
    """Check a whole number.

    Args:
        argument: the argument's name.
        value: its value.
        least: the smallest valid number.
        most: the largest one; None for no limit.
        hint: what to do about an invalid one, a full sentence.

    Raises:
        ConfigError: for another type, among them `bool`, or a number outside of these limits.
    """
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or value < least or (most is not None and value > most):
        limits = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ConfigError(argument, f"a whole number {limits}", value, hint)


def check_number(argument: str, value: Any, expected: str, is_valid: Callable[[float], bool]) -> None:
    """Check a number that is not NaN.

    Args:
        argument: the argument's name.
        value: its value.
        expected: the valid numbers, in words.
        is_valid: whether a number is one of them.

    Raises:
        ConfigError: for another type, among them `bool`, or another number.
    """
    is_number = isinstance(value, Real) and not isinstance(value, bool) and not math.isnan(value)
    if not is_number or not is_valid(float(value)):
        raise ConfigError(argument, expected, value)


def check_flag(argument: str, value: Any, also: str = "") -> None:
    """Check a switch: True or False, also as 1 or 0 or as NumPy has them.

    Args:
        argument: the argument's name.
        value: its value.
        also: what None means, if it is valid.

    Raises:
        ConfigError: for anything else, such as the text "False", which Python takes for true.
    """
    if value is None and also:
        return
    is_numpy = type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_")
    if not (isinstance(value, int) and value in (0, 1)) and not is_numpy:
        raise ConfigError(argument, "True or False" + (f", or None for {also}" if also else ""), value)


def check_text(argument: str, value: Any, expected: str) -> None:
    """Check a text that is not empty.

    Args:
        argument: the argument's name.
        value: its value.
        expected: the valid texts, in words.

    Raises:
        ConfigError: for another type, or an empty text.
    """
    if not isinstance(value, str) or not value:
        raise ConfigError(argument, expected, value)


def check_texts(argument: str, value: Any, expected: str) -> None:
    """Check a list of texts, which a single text is not.

    Args:
        argument: the argument's name.
        value: its value.
        expected: the texts, in words.

    Raises:
        ConfigError: for anything else.
    """
    is_list = isinstance(value, Iterable) and not isinstance(value, (str, bytes))
    if not is_list or not all(isinstance(each, str) for each in value):
        raise ConfigError(argument, expected, value)


def check_package(package: str, needed_by: str, extra: str, module: str = "") -> None:
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


def check_path(argument: str, value: Any, expected: str, hint: str = "") -> Path:
    """Check the path of a file or a folder, and return it.

    Args:
        argument: the argument's name.
        value: its value.
        expected: what it is the path of, in words.
        hint: what to do about an invalid one, a full sentence.

    Raises:
        ConfigError: for another type, or a text that is no path.
    """
    text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise ConfigError(argument, expected, value, hint)
    return Path(text)


def check_callable(argument: str, value: Any, expected: str, hint: str = "", arguments: int | None = None) -> None:
    """Check a function, or another object that can be called.

    Args:
        argument: the argument's name.
        value: its value.
        expected: the function, in words.
        hint: what to do about an invalid one, a full sentence.
        arguments: the number of positional arguments that it is called with; None if that is not checked.

    Raises:
        ConfigError: for an object that cannot be called, or not with so many arguments.
    """
    if not callable(value):
        raise ConfigError(argument, expected, value, hint)
    if arguments is None:
        return
    try:
        # A decorator such as functools.wraps shows the signature of what it calls, perhaps with further arguments.
        signature = inspect.signature(value, follow_wrapped=False)
    except (TypeError, ValueError):  # written in C
        return
    try:
        signature.bind(*[None] * arguments)
    except TypeError:
        name = getattr(value, "__name__", type(value).__name__)
        raise ConfigError(argument, expected, found=f"{name}{signature}", hint=hint) from None


def check_instance(argument: str, value: Any, kind: type | tuple[type, ...], expected: str, hint: str = "") -> None:
    """Check that a value is an instance of a class.

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
        return
    if isinstance(value, type) and issubclass(value, kind):
        name = value.__name__
        raise ConfigError(argument, expected, found=f"the class {name}", hint=f"Create an instance: {name}(...).")
    raise ConfigError(argument, expected, found=type(value).__name__, hint=hint)
