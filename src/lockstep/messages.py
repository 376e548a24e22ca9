"""Messages between processes as JSON: typed structs, which are validated when they are read."""

from __future__ import annotations

import json
import threading
from typing import Annotated, NoReturn, TypeVar

import msgspec

__all__ = ["Integer", "List", "Tagged", "convert", "decode", "encode"]

T = TypeVar("T")
Member = TypeVar("Member")

Integer = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
"""An integer from outside: Lockstep writes none that needs more than 64 bits."""

List = Annotated[tuple[Member, ...], msgspec.Meta(max_length=10_000)]
"""A list from outside: no job has more ranks."""


class Tagged(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One of several kinds of messages that come over the same connection: the name of its kind,
    and its fields.
    """


def encode(message: object) -> str:
    """Return `message`, a struct or a dataclass, as JSON in ASCII.

    Raises:
        ValueError: a number is infinite or not a number.
    """
    # msgspec's own encoder refuses text that is no UTF-8, such as some names of files
    return json.dumps(msgspec.to_builtins(message, str_keys=True), allow_nan=False)


def decode(text: str | bytes, kind: type[T]) -> T:
    """Return the message of the type `kind` that `encode` has written.

    Fields that `kind` does not have are ignored, and those that are missing get their default.

    Raises:
        ValueError: `text` is not JSON, or not a `kind`; names what was expected and where.
    """
    try:
        value = json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return convert(value, kind)


_ANALYSED: set[object] = set()
_LOCK = threading.Lock()


def convert(value: object, kind: type[T]) -> T:
    """Return parsed JSON as the message of the type `kind` that it encodes.

    Raises:
        ValueError: `value` is not a `kind`; names what was expected and where.
    """
    if kind not in _ANALYSED:
        # msgspec 0.22 crashes if two threads analyse the fields of a struct at the same time
        with _LOCK:
            msgspec.json.Decoder(kind)
            _ANALYSED.add(kind)
    return msgspec.convert(value, kind, str_keys=True)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"expected a finite number, got {constant}")
