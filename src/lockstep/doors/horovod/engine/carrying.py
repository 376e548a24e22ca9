"""Rounds in which ranks only confirm that they ask for what comes again and again, if need be with its numbers."""

from __future__ import annotations

import functools
import struct

import torch

from .calls import Calls
from .request import KEY_BYTES, Average, Form, Request, Sum

__all__ = ["Carrying"]

# Up to here copying the numbers twice is quicker than another meeting of the ranks (some 10 µs); on two cores.
_MOST_BYTES = 64 << 10
# The squares of as many bytes add up exactly in float32.
_MOST_RANKS = 256

_NOTHING = bytes(KEY_BYTES)

Kind = tuple[str, Form]


class Carrying:
    """Foresees which operation comes next, so that the ranks need not tell it at length.

    When an operation of one form has come alone in two rounds, the next round is a sum of marks over all ranks: each
    gives that of its operation if that is of the same form, or else none. What comes out tells all ranks in the same
    way whether all have meant the same. If not, nothing has happened, and the ranks tell each other what they ask for.
    In front of the marks travel the numbers of a small all-reduce, which is done then. All that decides is known to all
    ranks, so that all foresee the same.

    A mark is the key's bytes, each with its square, as numbers: the sum over N ranks of x, and that of x², are N·x and
    N·x² for a rank's own x only if all ranks have the same, as their variance is 0 then.

    Args:
        calls: the ranks' collectives; None where these are not for the CPU, and nothing is ever foreseen.
        size: the number of ranks.
    """

    def __init__(self, calls: Calls | None, size: int) -> None:
        self._calls, self._size = calls, size
        self._seen: Kind | None = None  # of the last round, if one operation came alone
        self._foreseen: Kind | None = None
        self._room: _Room | None = None

    @property
    def is_next(self) -> bool:
        """Whether the next round is such a one."""
        return self._foreseen is not None

    def fits(self, request: Request) -> bool:
        """Whether it can confirm this operation."""
        return (request.kind, request.form) == self._foreseen

    def learn(self, request: Request) -> None:
        """Note that all ranks have agreed on this, and nothing else, in a round; on all of them."""
        if self._calls is None or not 1 < self._size <= _MOST_RANKS:
            return
        kind = request.kind, request.form
        if kind == self._seen != self._foreseen:
            self._room = _Room(request.inputs[0] if _is_small(request) else None, self._size)
            self._foreseen = kind
        self._seen = kind

    def forget(self) -> None:
        """Begin anew."""
        self._seen = self._foreseen = None

    def confirm(self, key: bytes, request: Request | None) -> bool:
        """A round. Whether all ranks have asked for `key`; if its numbers have travelled, it has its result then.

        Args:
            key: of the operation that this rank asks for.
            request: its; None where there is none that fits.
        """
        room, calls = self._room, self._calls
        assert room is not None and calls is not None
        room.fill(_NOTHING if request is None else key, request)
        calls.sum(room.whole)
        if request is None or not room.agrees():
            self.forget()
            return False
        if room.numbers is not None:
            _put(room.numbers, request, self._size)
        return True


class _Room:
    """What is summed: the numbers of an all-reduce, perhaps, and behind them a mark.

    Attributes:
        whole: all of it.
        numbers: in the shape of the all-reduce; None where only the mark travels.

    Args:
        like: what the numbers are like; None without any.
        ranks: how many there are.
    """

    def __init__(self, like: torch.Tensor | None, ranks: int) -> None:
        count, dtype = (0, torch.float32) if like is None else (like.numel(), like.dtype)
        self.whole = torch.zeros(count + 2 * KEY_BYTES, dtype=dtype)
        self.numbers = None if like is None else self.whole[:count].view(like.shape)
        self._mark = memoryview(self.whole[count:].numpy()).cast("B")  # type: ignore[arg-type]
        self._values, self._sums = _marks(dtype, 1), _marks(dtype, ranks)
        self._key = self._own = self._sum = b""

    def fill(self, key: bytes, request: Request | None) -> None:
        """Put in what this rank gives."""
        if key != self._key:
            self._key = key
            self._own = b"".join([self._values[byte] for byte in key])
            self._sum = b"".join([self._sums[byte] for byte in key])
        if self.numbers is not None and request is not None:
            self.numbers.copy_(request.inputs[0])
        self._mark[:] = self._own

    def agrees(self) -> bool:
        """Whether the sum of all marks is that of this rank's, so many times."""
        return self._mark.tobytes() == self._sum


@functools.cache
def _marks(dtype: torch.dtype, ranks: int) -> list[bytes]:
    """Of each byte, what `ranks` of it add up to, and their squares."""
    pair = struct.Struct("=ff" if dtype is torch.float32 else "=dd")
    return [pair.pack(ranks * byte, ranks * byte * byte) for byte in range(256)]


def _is_small(request: Request) -> bool:
    """Whether the numbers are to travel with the mark; says the same of all requests of one form."""
    if request.kind != "allreduce" or len(request.inputs) != 1:
        return False
    (tensor,), how = request.inputs, request.options
    plain = tensor.is_cpu and tensor.dtype in (torch.float32, torch.float64)
    few = 0 < tensor.numel() * tensor.element_size() <= _MOST_BYTES
    return plain and few and how["op"] in (Sum, Average) and how["prescale_factor"] == how["postscale_factor"] == 1.0


def _put(numbers: torch.Tensor, request: Request, ranks: int) -> None:
    """Let `request` have what has been summed."""
    (output,) = request.outputs
    if request.options["op"] == Average:
        torch.div(numbers, ranks, out=output)
    else:
        output.copy_(numbers)
    request.result = [output]
