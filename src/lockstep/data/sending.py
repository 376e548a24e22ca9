"""Sends a data set to loader processes, also one whose class only this process knows."""

from __future__ import annotations

import copyreg
import io
import pickle
from collections import ChainMap
from multiprocessing.reduction import ForkingPickler
from typing import Any, ClassVar

import numpy as np
import torch

__all__ = ["Sent"]


class Sent:
    """Something that is pickled by value where plain pickle cannot find its class or a function of it by name.

    Classes of a script or a notebook are such in a launched worker, which has another main module than the program.

    Args:
        value: anything that plain pickle or cloudpickle can send.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> tuple[Any, ...]:
        if _is_found_by_name(self.value):
            return Sent, (self.value,)
        return _unpack, (_pack(self.value),)


class _Trial(pickle.Pickler):
    """Goes through everything that would be pickled but the numbers in it."""

    dispatch_table: ClassVar[dict[type, Any]] = {**copyreg.dispatch_table, **ForkingPickler._extra_reducers}  # type: ignore[attr-defined, misc]

    def persistent_id(self, obj: Any) -> str | None:
        array = type(obj) is np.ndarray and obj.dtype != object
        return "numbers" if array or isinstance(obj, torch.Tensor) else None


class _Nowhere:
    def write(self, data: Any) -> int:
        return len(data)


def _is_found_by_name(value: Any) -> bool:
    try:
        _Trial(_Nowhere()).dump(value)
    except (pickle.PicklingError, AttributeError):
        return False
    except TypeError:
        return True  # what has no state that could be sent; let plain pickle say so
    return True


def _pack(value: Any) -> bytes:
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        # torch's own reducers are among the first: tensors go through shared memory.
        dispatch_table = ChainMap(ForkingPickler._extra_reducers, cloudpickle.Pickler.dispatch_table)  # type: ignore[attr-defined]

    buffer = io.BytesIO()
    Pickler(buffer).dump(value)
    return buffer.getvalue()


def _unpack(data: bytes) -> Sent:
    """What `_pack` packed, on its way from one process of this program to another."""
    return Sent(pickle.loads(data))
