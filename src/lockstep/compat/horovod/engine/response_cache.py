"""The response cache: cycles in which ranks only confirm a repeated operation, together with a
small tensor's data.
"""

from __future__ import annotations

import functools
import struct

import torch

from .negotiation import RawCollectives
from .request import KEY_BYTES, Average, Request, Signature, Sum

# Up to this size copying the data twice is faster than one more collective (some 10 µs); measured
# on two cores.
_MAX_DATA_BYTES = 64 << 10
# Up to this number of ranks the sum of squared bytes is exact in float32.
_MAX_RANKS = 256

_NO_KEY = bytes(KEY_BYTES)

CacheEntry = tuple[str, Signature]
"""(kind, signature) of an operation, whatever its name."""


class ResponseCache:
    """Predicts the next operation, so that the ranks need not negotiate it in full.

    When two cycles in a row have had a single operation with the same kind and signature, the next
    cycle is one sum over all ranks instead of an exchange of messages. Each rank contributes a
    mark: that of its request's key if the request has this kind and signature, otherwise that of no
    key. From the sum every rank sees whether all ranks have submitted the same request. If they
    have not, nothing has been executed, and the ranks negotiate in full. The data of a small
    all-reduce is summed together with the marks, so that a hit completes it. Predictions depend
    only on what all ranks know, so that all ranks predict the same.

    A mark consists of the bytes of the key and their squares, as numbers. For N ranks the sums of x
    and of x² equal N·x and N·x² of a rank's own x only if all ranks have the same x, because only
    then their variance is 0.

    Args:
        collectives: the collectives of the ranks; None if they do not run on the CPU: nothing is
            predicted then.
        size: the number of ranks.
    """

    def __init__(self, collectives: RawCollectives | None, size: int) -> None:
        self._collectives = collectives
        self._size = size
        self._last: CacheEntry | None = None  # of the last cycle, if it had a single operation
        self._predicted: CacheEntry | None = None
        self._buffer: _Buffer | None = None

    @property
    def has_prediction(self) -> bool:
        """Whether the next cycle is a confirmation."""
        return self._predicted is not None

    def matches(self, request: Request) -> bool:
        """Return whether `request` has the predicted kind and signature."""
        return (request.kind, request.signature) == self._predicted

    def put(self, request: Request) -> None:
        """Record that `request` was the only operation of a cycle; every rank calls it."""
        if self._collectives is None or not 1 < self._size <= _MAX_RANKS:
            return
        entry = request.kind, request.signature
        if entry == self._last != self._predicted:
            self._buffer = _Buffer(
                request.inputs[0] if _has_small_data(request) else None, self._size
            )
            self._predicted = entry
        self._last = entry

    def clear(self) -> None:
        """Forget the last operation and the prediction."""
        self._last = self._predicted = None

    def confirm(self, key: bytes, request: Request | None) -> bool:
        """Run a confirmation cycle.

        Args:
            key: the key of `request`; any other one if that is None.
            request: the request that this rank has submitted, if it matches the prediction.

        Returns:
            Whether all ranks have submitted the same request. If its data was in the buffer, it has
            its result.
        """
        buffer = self._buffer
        collectives = self._collectives
        assert buffer is not None and collectives is not None
        buffer.fill(_NO_KEY if request is None else key, request)
        collectives.sum(buffer.tensor)
        if request is None or not buffer.all_equal():
            self.clear()
            return False
        if buffer.data is not None:
            _set_result(request, buffer.data, self._size)
        return True


class _Buffer:
    """The tensor of a confirmation: the data of a small all-reduce, if any, followed by the mark.

    Attributes:
        tensor: the whole tensor.
        data: the data, in the shape of the all-reduce; None if the buffer holds only the mark.

    Args:
        like: a tensor with the shape and dtype of the data; None for no data.
        size: the number of ranks.
    """

    def __init__(self, like: torch.Tensor | None, size: int) -> None:
        count, dtype = (0, torch.float32) if like is None else (like.numel(), like.dtype)
        self.tensor = torch.zeros(count + 2 * KEY_BYTES, dtype=dtype)
        self.data = None if like is None else self.tensor[:count].view(like.shape)
        self._mark = memoryview(self.tensor[count:].numpy()).cast("B")  # type: ignore[arg-type]
        self._byte_marks = _marks(dtype, 1)
        self._byte_sums = _marks(dtype, size)
        self._key = self._own_mark = self._expected_sum = b""

    def fill(self, key: bytes, request: Request | None) -> None:
        """Write the data of `request` and the mark of `key`."""
        if key != self._key:
            self._key = key
            self._own_mark = b"".join([self._byte_marks[byte] for byte in key])
            self._expected_sum = b"".join([self._byte_sums[byte] for byte in key])
        if self.data is not None and request is not None:
            self.data.copy_(request.inputs[0])
        self._mark[:] = self._own_mark

    def all_equal(self) -> bool:
        """Return whether the summed mark shows that all ranks have contributed the mark of this
        rank.
        """
        return self._mark.tobytes() == self._expected_sum


@functools.cache
def _marks(dtype: torch.dtype, ranks: int) -> list[bytes]:
    """Return, for each value of a byte, the sum of its marks over `ranks` ranks: the value and its
    square.
    """
    pair = struct.Struct("=ff" if dtype is torch.float32 else "=dd")
    return [pair.pack(ranks * byte, ranks * byte * byte) for byte in range(256)]


def _has_small_data(request: Request) -> bool:
    """Return whether the data of `request` fits into the buffer; the same for all requests of one
    signature.
    """
    if request.kind != "allreduce" or len(request.inputs) != 1:
        return False
    (tensor,) = request.inputs
    options = request.options
    is_float = tensor.is_cpu and tensor.dtype in (torch.float32, torch.float64)
    is_small = 0 < tensor.numel() * tensor.element_size() <= _MAX_DATA_BYTES
    unscaled = options["prescale_factor"] == options["postscale_factor"] == 1.0
    return is_float and is_small and options["op"] in (Sum, Average) and unscaled


def _set_result(request: Request, total: torch.Tensor, size: int) -> None:
    """Set the result of `request`, whose sum over `size` ranks is `total`."""
    (output,) = request.outputs
    if request.options["op"] == Average:
        torch.div(total, size, out=output)
    else:
        output.copy_(total)
    request.result = [output]
