"""JSON as frozen dataclasses, whatever has been written into it (pure)."""

from __future__ import annotations

import functools
import json
import math
import types
from dataclasses import MISSING, fields
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

__all__ = ["build"]

T = TypeVar("T")

_LONGEST = 10_000  # members of a list: more ranks than any job has
_NUMBERS = 1 << 63  # whole numbers beyond this were never written by us


def build(kind: type[T], value: object, name: str = "") -> T:
    """`value`, which JSON has given, as a `kind`: a dataclass of texts, numbers, tuples and dataclasses.

    Fields that are not known are passed over; those that are missing get their default.

    Args:
        kind: its fields may be of `str`, `int`, `float`, `bool`, `X | None`, `tuple[X, ...]` and such dataclasses.
        value: what was read.
        name: what it is called in errors.

    Raises:
        ValueError: naming what is not as it must be.
    """
    built: T = _value(kind, value, name)
    return built


def _value(kind: Any, value: object, name: str) -> Any:
    if hasattr(kind, "__dataclass_fields__"):
        return _dataclass(kind, value, name)
    if get_origin(kind) is tuple:
        return _tuple(get_args(kind)[0], value, name)
    if get_origin(kind) is types.UnionType:
        return None if value is None else _value(get_args(kind)[0], value, name)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) < _NUMBERS else math.inf
    if type(value) is not kind or _is_beyond(value):
        raise ValueError(f"{name}: expected {_WORDS[kind]}, got {_short(value)}")
    return value


_WORDS = {str: "a text", int: "a whole number", float: "a finite number", bool: "true or false"}


def _is_beyond(value: object) -> bool:
    if isinstance(value, float):
        return not math.isfinite(value)
    return isinstance(value, int) and not -_NUMBERS <= value < _NUMBERS


def _dataclass(kind: Any, value: object, name: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{name or kind.__name__}: expected an object, got {_short(value)}")
    hints, found = _hints(kind), {}
    for field in fields(kind):
        inner = f"{name}.{field.name}" if name else field.name
        if field.name in value:
            found[field.name] = _value(hints[field.name], value[field.name], inner)
        elif field.default is MISSING:
            raise ValueError(f"{inner}: it is missing")
    return kind(**found)


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _tuple(kind: Any, value: object, name: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{name}: expected a list, got {_short(value)}")
    if len(value) > _LONGEST:
        raise ValueError(f"{name}: expected at most {_LONGEST} members, got {len(value)}")
    return tuple(_value(kind, each, f"{name}[{i}]") for i, each in enumerate(value))


def _short(value: object) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    if isinstance(value, int) and not isinstance(value, bool):
        return "a number"  # it may have more digits than can be shown
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
