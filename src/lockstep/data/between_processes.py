"""What travels between this process and loader processes: data sets on their way there, samples on
their way back.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections import ChainMap
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any, ClassVar

import numpy as np
import torch
from typing_extensions import Self


class PickledByValue:
    """Wraps an object, to pickle it by value if plain pickle cannot find its class or functions by
    name.

    This applies to classes of a script or notebook in a launched worker, whose main module is not
    the program.

    Args:
        value: any object that plain pickle or cloudpickle can pickle.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> tuple[Any, ...]:
        if _pickles_by_name(self.value):
            return PickledByValue, (self.value,)
        return _unpack, (_pack(self.value),)


class _PickleProbe(pickle.Pickler):
    """Pickles an object without the numbers in it, to see whether that works."""

    dispatch_table: ClassVar[dict[type, Any]] = {  # type: ignore[misc]
        **copyreg.dispatch_table,
        **ForkingPickler._extra_reducers,  # type: ignore[attr-defined]
    }

    def persistent_id(self, obj: Any) -> str | None:
        array = type(obj) is np.ndarray and obj.dtype != object
        return "numbers" if array or isinstance(obj, torch.Tensor) else None


class _NullFile:
    def write(self, data: Any) -> int:
        return len(data)


def _pickles_by_name(value: Any) -> bool:
    try:
        _PickleProbe(_NullFile()).dump(value)
    except (pickle.PicklingError, AttributeError):
        return False
    except TypeError:
        return True  # the object cannot be pickled; plain pickle raises the error
    return True


def _pack(value: Any) -> bytes:
    from ..pickling import Pickler, pickled

    class SharingPickler(Pickler):
        # ForkingPickler's reducers include torch's, which send tensors through shared memory.
        dispatch_table = ChainMap(ForkingPickler._extra_reducers, Pickler.dispatch_table)  # type: ignore[attr-defined]

    return pickled(value, SharingPickler)


def _unpack(data: bytes) -> PickledByValue:
    """Restore an object from `_pack`; the bytes come from another process of this program."""
    return PickledByValue(pickle.loads(data))


class _Tree(pickle.Pickler):
    """Pickles samples without the numbers of their tensors, which become buffers."""

    def reducer_override(self, obj: Any) -> Any:
        plain = (
            type(obj) is torch.Tensor and obj.device.type == "cpu" and obj.layout is torch.strided
        )
        # What more there is to a tensor than its numbers, torch's own pickling keeps.
        if not plain or obj.requires_grad or obj.is_conj() or obj.is_neg() or obj.is_quantized:
            return NotImplemented
        # NumPy does not have all types of torch
        numbers = obj.contiguous().reshape(-1).view(torch.uint8).numpy()
        return _from_bytes, (numbers, obj.dtype, obj.shape)


def _from_bytes(
    numbers: np.ndarray[Any, Any], dtype: torch.dtype, shape: Sequence[int]
) -> torch.Tensor:
    return torch.from_numpy(numbers).view(dtype).reshape(shape)


@dataclass(frozen=True, slots=True)
class PackedSamples:
    """Samples on their way from a loader process, with all their numbers in one piece of shared
    memory.

    Sent one by one, each tensor would take an open file. The samples are those of this program:
    they are pickled as torch pickles batches.

    Attributes:
        tree: the pickled samples without their numbers.
        numbers: the numbers of all tensors and arrays, uint8.
        sizes: number of bytes of each tensor or array.
    """

    tree: bytes
    numbers: torch.Tensor
    sizes: list[int]

    _ALIGNMENT: ClassVar[int] = 64

    @classmethod
    def of(cls, samples: list[Any]) -> Self:
        """Return samples as they travel.

        Raises:
            PicklingError, AttributeError, TypeError: if they cannot be pickled.
        """
        buffers: list[pickle.PickleBuffer] = []
        tree = io.BytesIO()
        _Tree(tree, protocol=5, buffer_callback=buffers.append).dump(samples)
        views = [buffer.raw() for buffer in buffers]
        sizes = [view.nbytes for view in views]
        numbers = torch.empty(sum(map(cls._padded, sizes)), dtype=torch.uint8)
        target = memoryview(numbers.numpy())  # type: ignore[arg-type]
        at = 0
        for view, size in zip(views, sizes, strict=True):
            target[at : at + size] = view
            at += cls._padded(size)
        return cls(tree.getvalue(), numbers, sizes)

    @classmethod
    def _padded(cls, size: int) -> int:
        return -(-size // cls._ALIGNMENT) * cls._ALIGNMENT

    def samples(self) -> list[Any]:
        """Return the samples, whose tensors share the memory of `numbers`."""
        source = memoryview(self.numbers.numpy())  # type: ignore[arg-type]
        at = 0
        views = []
        for size in self.sizes:
            views.append(source[at : at + size])
            at += self._padded(size)
        samples: list[Any] = pickle.loads(self.tree, buffers=views)
        return samples


def copies_of(samples: list[Any]) -> list[Any]:
    """Return copies of samples. `copy.deepcopy` would copy the whole data set, if their tensors are
    views of its.
    """
    return PackedSamples.of(samples).samples()
