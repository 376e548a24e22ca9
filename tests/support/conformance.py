"""What every rank of a case holds, and the results that follow from it: the truth for every
transport.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from .pool import Pool

__all__ = [
    "FITS",
    "HALF",
    "LAYOUTS",
    "MOVABLE",
    "PURE",
    "REDUCE_OPS",
    "REDUCIBLE",
    "TRANSPORTS",
    "Case",
    "Ranks",
    "fold",
    "lay_out",
    "offered",
]

TRANSPORTS = ("gloo", "shm", "mpi4py")
PURE = "shm in Python"  # ranks from the second on do without its compiled part

BOOL = (torch.bool,)
INTEGER = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
HALF = (torch.half, torch.bfloat16)
FLOATING = (*HALF, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
WHOLE = (*BOOL, *INTEGER, *UNSIGNED)
REDUCIBLE = (*WHOLE, *FLOATING, *COMPLEX)
MOVABLE = (*REDUCIBLE, *FLOAT8)

# reduce operation → the dtypes that it fits
FITS: dict[str, tuple[torch.dtype, ...]] = {
    "SUM": REDUCIBLE,
    "AVG": (*FLOATING, *COMPLEX),
    "PRODUCT": (*WHOLE, *FLOATING),
    "MIN": (*WHOLE, *FLOATING),
    "MAX": (*WHOLE, *FLOATING),
    "BAND": WHOLE,
    "BOR": WHOLE,
    "BXOR": WHOLE,
    "PREMUL_SUM": (*FLOATING, *COMPLEX),
}
REDUCE_OPS = tuple(FITS)
FACTOR = 0.75  # of PREMUL_SUM; exact in every floating dtype

# "mixed": another one on each rank
LAYOUTS = ("contiguous", "transposed", "strided", "offset", "channels_last", "mixed")


@dataclass(frozen=True)
class Ranks:
    """A job's ranks over one transport: ``ranks.run(fn, *args)``."""

    pool: Pool
    transport: str
    size: int

    def run(self, fn: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """What `fn` returned on every rank; the default process group is of this transport."""
        if self.transport == PURE:
            # the pool looks at the outer function only
            cloudpickle.register_pickle_by_value(sys.modules[fn.__module__])
            return self.pool.run(
                _without_native, fn, *args, workers=self.size, init=False, **options
            )
        return self.pool.run(fn, *args, workers=self.size, backend=self.transport, **options)


def _without_native(fn: Callable[..., Any], *args: Any) -> Any:
    """Call `fn` where rank 0 has the native extension of shm and the others have only the Python
    form.
    """
    state = importlib.import_module("lockstep.transports.shm.rank_states")
    native = state._native
    try:
        if int(os.environ["RANK"]) > 0:
            state._native = None
        dist.init_process_group("shm")
        return fn(*args)
    finally:
        state._native = native


@dataclass(frozen=True)
class Case:
    """One call of a collective: what each rank of `group` holds follows from the case alone.

    Attributes:
        shape: of what each rank holds, or of each part of it.
        dtype: of all tensors.
        op: a reduce operation's name.
        root: a rank of the group.
        seed: another seed, other values.
        layout: how the tensors lie in memory; one of LAYOUTS.
        group: None is the default group.
    """

    shape: tuple[int, ...] = (4, 3)
    dtype: torch.dtype = torch.float32
    op: str = "SUM"
    root: int = 0
    seed: int = 0
    layout: str = "contiguous"
    group: Any = None

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        """The number of ranks in the group."""
        return dist.get_world_size(self.group)

    def global_rank(self, rank: int) -> int:
        """The number by which torch.distributed's functions know a rank of the group."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    @property
    def reduce_op(self) -> Any:
        """The operation as torch.distributed wants it."""
        return (
            dist._make_nccl_premul_sum(FACTOR)
            if self.op == "PREMUL_SUM"
            else getattr(dist.ReduceOp, self.op)
        )

    def bits(self, rank: int, part: int = 0, shape: Sequence[int] | None = None) -> Tensor:
        """Any bits at all, as `rank` of the group holds them: for what is moved and must not
        change.
        """
        shape = self.shape if shape is None else tuple(shape)
        if self.dtype == torch.bool:
            return torch.randint(0, 2, shape, generator=self._source(rank, part)).bool()
        count = math.prod(shape) * self.dtype.itemsize
        words = torch.randint(
            -(2**63), 2**63 - 1, (count // 8 + 1,), generator=self._source(rank, part)
        )
        return words.view(torch.uint8)[:count].view(self.dtype).view(shape)

    def numbers(self, rank: int, part: int = 0, shape: Sequence[int] | None = None) -> Tensor:
        """Whole numbers, whose sums and products are exact: any integers, and small ones of a
        floating dtype.
        """
        if self.dtype in WHOLE:
            return self.bits(rank, part, shape)
        shape = self.shape if shape is None else tuple(shape)
        small = torch.randint(-3, 4, (*shape, 2), generator=self._source(rank, part))
        if self.dtype.is_complex:
            return torch.view_as_complex(small.to(self.dtype.to_real()))
        return small[..., 0].to(self.dtype, memory_format=torch.contiguous_format)

    def _source(self, rank: int, part: int) -> torch.Generator:
        return torch.Generator().manual_seed((self.seed * 1009 + rank) * 1013 + part)

    def place(self, values: Tensor) -> Tensor:
        """The values in a tensor of the case's layout."""
        own = LAYOUTS[(self.seed + self.rank) % (len(LAYOUTS) - 1)]
        return lay_out(values, own if self.layout == "mixed" else self.layout)

    def blank(self, shape: Sequence[int] | None = None) -> Tensor:
        """A tensor to be overwritten, full of other values."""
        return self.place(self.bits(self.size, part=7, shape=shape))

    def folded(self, parts: Sequence[Tensor]) -> Tensor:
        """The reduction of what the ranks hold, in rank order."""
        return fold(self.op, parts)

    def expect(self, got: Tensor, expected: Tensor, what: str = "result") -> None:
        """Compare a result: by its bits, or within rounding where the operation rounds."""
        told = f"{what} of {self} on rank {self.rank} of {self.size}"
        assert (got.shape, got.dtype) == (expected.shape, expected.dtype), told
        if self.op in ("AVG", "PREMUL_SUM"):
            torch.testing.assert_close(got, expected, msg=lambda message: f"{told}: {message}")
        else:
            assert torch.equal(_bytes(got), _bytes(expected)), (
                f"{told}: {got.flatten()[:9]}, not {expected.flatten()[:9]}"
            )


def offered(transport: str, operation: str, cases: Iterable[Case]) -> list[Case]:
    """The cases that the transport offers: all, but for Gloo."""
    return [case for case in cases if transport != "gloo" or not _gloo_lacks(operation, case)]


def _gloo_lacks(name: str, case: Case) -> bool:
    """Whether Gloo refuses the case or gets it wrong; each line says how."""
    between_two = name in ("ring", "batch")
    in_place = name.startswith(("all_reduce", "reduce", "broadcast", "scatter"))
    dense = case.layout in ("contiguous", "offset")
    return any(
        (
            case.dtype in (torch.int16, *UNSIGNED, *FLOAT8)
            and not between_two,  # "Invalid scalar type"
            # the same; it is the one operation to which c10d passes complex tensors as they are
            case.dtype in COMPLEX and name == "gather",
            case.op == "PREMUL_SUM",  # "Cannot use ReduceOp.PREMUL_SUM"
            case.op == "SUM" and case.dtype == torch.bool,  # leaves bytes of 2 and more
            name.endswith("_rows"),  # "invalid tensor size"
            in_place
            and case.layout
            in ("strided", "mixed"),  # wrong results, or "operation was not well-formed"
            (between_two or name.startswith("all_to_all_")) and not dense,  # "has to be contiguous"
        )
    )


def _bytes(tensor: Tensor) -> Tensor:
    dense = tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return dense.view(-1).view(torch.uint8)


def lay_out(values: Tensor, layout: str) -> Tensor:
    """The values in new memory, laid out so; shapes that a layout does not fit are contiguous.

    Sentinels lie between the elements of "strided" and around those of "offset": see
    `tensor._base`.
    """
    if layout == "transposed" and values.dim() > 1:
        return values.mT.contiguous().mT
    if layout == "channels_last" and values.dim() == 4:
        return values.clone(memory_format=torch.channels_last)
    if layout == "strided":
        room = torch.ones(*values.shape, 2).to(values.dtype)
        return room[..., 0].copy_(values)
    if layout == "offset":
        room = torch.ones(values.numel() + 6).to(values.dtype)
        return room[3 : 3 + values.numel()].view(values.shape).copy_(values)
    return values.clone(memory_format=torch.contiguous_format)


def fold(op: str, parts: Sequence[Tensor]) -> Tensor:
    """The left fold in rank order; half types are summed in float32 and rounded once."""
    dtype = parts[0].dtype
    if dtype in UNSIGNED:  # torch does not calculate with them
        return torch.from_numpy(functools.reduce(_UFUNCS[op], [part.numpy() for part in parts]))
    wide = [part.float() if dtype in HALF else part for part in parts]
    if op == "PREMUL_SUM":
        wide = [part * FACTOR for part in wide]
    total = functools.reduce(_PAIRS[op], wide)
    if op == "AVG":
        total = total / len(parts)
    return total.to(dtype)


_PAIRS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PREMUL_SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
_UFUNCS: dict[str, Any] = {
    "SUM": np.add,
    "PRODUCT": np.multiply,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}
