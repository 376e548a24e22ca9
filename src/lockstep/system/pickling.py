"""Pickles functions and classes by value, for another process of this program."""

from __future__ import annotations

import io
from collections import ChainMap
from types import CodeType
from typing import Any

import cloudpickle

__all__ = ["Pickler", "pickled"]


def _code(file: str, *arguments: Any) -> CodeType:
    return CodeType(*arguments).replace(co_filename=file)


def _reduce_code(code: CodeType) -> tuple[Any, ...]:
    _, arguments = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return _code, (code.co_filename, *arguments)


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Cloudpickle's pickler; functions keep the name of their file, for tracebacks and for the watchdog's call sites.

    Cloudpickle 3.1.3 replaces it by "<dynamic-code>".
    """

    dispatch_table = ChainMap({CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table)


def pickled(value: object, pickler: type[Pickler] = Pickler) -> bytes:
    """Return `value` as bytes, which plain `pickle.loads` reads where cloudpickle is installed.

    Raises:
        pickle.PicklingError, TypeError: when it cannot be pickled.
    """
    buffer = io.BytesIO()
    pickler(buffer).dump(value)
    return buffer.getvalue()
