"""Pickles functions and classes by value, for another process of this program."""

from __future__ import annotations

import copyreg
import io
import pickle
from collections import ChainMap
from contextlib import suppress
from types import CodeType, FunctionType
from typing import Any

from .errors import MissingPackageError

__all__ = ["Pickler", "pickled"]


class _PicklerByName(pickle.Pickler):
    """Stands in for cloudpickle's pickler where that is not installed: for what another process can
    import by name.

    Pickle itself would also take a function of the program that runs as ``__main__``, and leave it
    to the other process, which runs another one, to fail or to find another function of that name.
    """

    dispatch_table = copyreg.dispatch_table

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (FunctionType, type)):
            name = f"{obj.__module__}.{obj.__qualname__}"
            # <lambda>, or in the <locals> of a function
            if obj.__module__ == "__main__" or "<" in obj.__qualname__:
                needs = f"{name}, which another process cannot import by its name,"
                raise MissingPackageError(needs, "cloudpickle", "launch")
        return NotImplemented


_Base: Any = _PicklerByName
with suppress(ImportError):
    import cloudpickle

    _Base = cloudpickle.Pickler


def _code(file: str, *arguments: Any) -> CodeType:
    return CodeType(*arguments).replace(co_filename=file)


def _reduce_code(code: CodeType) -> tuple[Any, ...]:
    _, arguments = _Base.dispatch_table[CodeType](code)
    return _code, (code.co_filename, *arguments)


class Pickler(_Base):  # type: ignore[misc]
    """Cloudpickle's pickler; functions keep the name of their file, for tracebacks and for the
    watchdog's call sites.

    Cloudpickle 3.1.3 replaces it by "<dynamic-code>".
    """

    dispatch_table = ChainMap({CodeType: _reduce_code}, _Base.dispatch_table)


def pickled(value: object, pickler: type[Pickler] = Pickler) -> bytes:
    """Return `value` as bytes, which plain `pickle.loads` reads where cloudpickle is installed.

    Raises:
        MissingPackageError: for a function or class that cannot be imported by its name, without
            cloudpickle.
        pickle.PicklingError, TypeError: when it cannot be pickled.
    """
    buffer = io.BytesIO()
    pickler(buffer).dump(value)
    return buffer.getvalue()
