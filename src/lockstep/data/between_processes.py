"""What travels between this process and loader processes: data sets on their way there, samples on
their way back.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections import ChainMap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any, BinaryIO, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import Self

from .batch_memory import Place, padded


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
    """Pickles samples without the numbers of their tensors and arrays.

    Args:
        file: where the rest goes.

    Attributes:
        numbers: what has the numbers of each tensor or array, in order.
    """

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file, protocol=5, buffer_callback=self._add)
        self.numbers: list[torch.Tensor | pickle.PickleBuffer] = []
        self._tensor: torch.Tensor | None = None

    def _add(self, buffer: pickle.PickleBuffer) -> None:
        # the buffer of a tensor comes at once after `reducer_override`
        self.numbers.append(buffer if self._tensor is None else self._tensor)
        self._tensor = None

    def reducer_override(self, obj: Any) -> Any:
        plain = (
            type(obj) is torch.Tensor and obj.device.type == "cpu" and obj.layout is torch.strided
        )
        # What more there is to a tensor than its numbers, torch's own pickling keeps.
        if not plain or obj.requires_grad or obj.is_conj() or obj.is_neg() or obj.is_quantized:
            return NotImplemented
        self._tensor = obj
        return _from_bytes, (pickle.PickleBuffer(bytearray()), obj.dtype, obj.shape)


def _from_bytes(numbers: memoryview, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    if not numbers.nbytes:
        return torch.empty(shape, dtype=dtype)
    # NumPy does not have all types of torch
    return torch.frombuffer(numbers, dtype=torch.uint8).view(dtype).view(shape)


def _write(target: torch.Tensor, numbers: torch.Tensor | pickle.PickleBuffer) -> None:
    """Write the numbers of a tensor or array into `target`, uint8 of as many bytes."""
    if isinstance(numbers, pickle.PickleBuffer):
        memoryview(target.numpy())[:] = numbers.raw()  # type: ignore[arg-type]
    elif numbers.numel():
        # in the order of its indices, whatever that of its memory
        target.view(numbers.dtype).view(numbers.shape).copy_(numbers)


def _cuts(sizes: Iterable[int]) -> Iterator[slice]:
    """Yield where tensors of so many bytes lie, one behind another."""
    start = 0
    for size in sizes:
        yield slice(start, start + size)
        start += padded(size)


@dataclass(frozen=True, slots=True)
class PackedSamples:
    """Samples on their way from a loader process, with all their numbers in shared memory.

    Sent one by one, each tensor would take an open file. The samples are those of this program:
    they are pickled as torch pickles batches.

    Attributes:
        tree: the pickled samples without their numbers.
        count: number of samples.
        sizes: number of bytes of each tensor or array.
        numbers: the numbers of all tensors and arrays, uint8; or where they are in the memory of
            their batch.
    """

    tree: bytes
    count: int
    sizes: tuple[int, ...]
    numbers: torch.Tensor | Place

    @classmethod
    def of(
        cls, samples: list[Any], place: Place | None = None, memory: torch.Tensor | None = None
    ) -> Self:
        """Return samples as they travel.

        Args:
            samples: the samples.
            place: where to write their numbers, if their tensors have the sizes that it says.
            memory: the memory that the place is in, if this process has it.

        Raises:
            PicklingError, AttributeError, TypeError: if they cannot be pickled.
        """
        file = io.BytesIO()
        tree = _Tree(file)
        tree.dump(samples)
        sizes = tuple(
            numbers.nbytes if isinstance(numbers, torch.Tensor) else numbers.raw().nbytes
            for numbers in tree.numbers
        )
        count = len(samples)
        if place is None or memory is None or sizes != place.sizes * count:
            memory = torch.empty(sum(map(padded, sizes)), dtype=torch.uint8)
            place = None
        cuts = _cuts(sizes) if place is None else place.cuts(count)
        for numbers, cut in zip(tree.numbers, cuts, strict=True):
            _write(memory[cut], numbers)
        return cls(file.getvalue(), count, sizes, memory if place is None else place)

    @property
    def sizes_of_sample(self) -> tuple[int, ...]:
        """The bytes of each tensor or array of a sample; empty if samples are not alike."""
        sizes = self.sizes[: len(self.sizes) // max(1, self.count)]
        return sizes if sizes * self.count == self.sizes else ()

    def samples(self, memory: NDArray[np.uint8] | None = None) -> list[Any]:
        """Return the samples, whose tensors share the memory of `numbers`.

        Args:
            memory: that of the batch, which they may have been written into.
        """
        if isinstance(self.numbers, Place):
            assert memory is not None
            source = memoryview(memory)  # type: ignore[arg-type]
            cuts = self.numbers.cuts(self.count)
        else:
            source = memoryview(self.numbers.numpy())  # type: ignore[arg-type]
            cuts = _cuts(self.sizes)
        samples: list[Any] = pickle.loads(self.tree, buffers=[source[cut] for cut in cuts])
        return samples


def copies_of(samples: list[Any]) -> list[Any]:
    """Return copies of samples. `copy.deepcopy` would copy the whole data set, if their tensors are
    views of its.
    """
    return PackedSamples.of(samples).samples()
