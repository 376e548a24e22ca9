"""Collectives that reduce, over an MPI communicator, with MPI's own operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ReduceOp

from ..shm.fold import factor_of, fold_for
from ..shm.moving import flat_of, put_back
from ..shm.waiting import Steps
from .following import follow
from .library import load
from .memory import gathered, room_for, span

__all__ = ["Reduction", "all_reduce", "reduce", "reduce_scatter", "reduction_for"]

_OPERATIONS = {
    "SUM": "SUM",
    "AVG": "SUM",
    "PREMUL_SUM": "SUM",
    "PRODUCT": "PROD",
    "MIN": "MIN",
    "MAX": "MAX",
    "BAND": "BAND",
    "BOR": "BOR",
    "BXOR": "BXOR",
}
_NAMES = {int(getattr(ReduceOp.RedOpType, name)): name for name in _OPERATIONS}
_OF_BOOLS = {"SUM": "BOR", "MAX": "BOR", "PRODUCT": "BAND", "MIN": "BAND"}
_DATATYPES = {
    torch.bool: "UINT8_T",
    torch.uint8: "UINT8_T",
    torch.uint16: "UINT16_T",
    torch.uint32: "UINT32_T",
    torch.uint64: "UINT64_T",
    torch.int8: "INT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.complex64: "C_FLOAT_COMPLEX",
    torch.complex128: "C_DOUBLE_COMPLEX",
}
_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
# Open MPI 5 adds these with saturation where the processor can; cut off from wider sums they wrap around, as elsewhere
_SHORT = (torch.int8, torch.uint8, torch.int16, torch.uint16)


@dataclass(frozen=True)
class Reduction:
    """What a reduce operation of torch.distributed is in MPI.

    Attributes:
        op: MPI's operation.
        datatype: MPI's datatype of what is reduced.
        dtype: torch's, wider than the tensors' where that counts: half types are reduced in float32 and rounded once.
        factor: what each rank's values are multiplied by first; None for nothing.
        mean: whether the sum is divided by the number of ranks.
    """

    op: Any
    datatype: Any
    dtype: torch.dtype
    factor: float | torch.Tensor | None
    mean: bool

    def terms(self, flat: torch.Tensor) -> torch.Tensor:
        """What this rank gives to MPI: `flat` itself where nothing has to be done to it."""
        wide = flat.to(self.dtype)
        return wide if self.factor is None else (wide * self.factor).to(self.dtype)

    def result(self, total: torch.Tensor, ranks: int) -> torch.Tensor:
        """What comes of MPI's result."""
        return total / ranks if self.mean else total


def reduction_for(op: Any, dtype: torch.dtype) -> Reduction:
    """The reduction that `op` (a `torch.distributed.ReduceOp`) means for `dtype`.

    Raises:
        ConfigError: when the operation is not defined for `dtype`.
    """
    fold_for(op, dtype)  # the same fit as in shm
    name, mpi = _NAMES[hash(op)], load()
    native = _OF_BOOLS.get(name, name) if dtype is torch.bool else _OPERATIONS[name]
    wide = torch.int32 if name == "SUM" and dtype in _SHORT else _WIDER.get(dtype, dtype)
    factor = factor_of(op) if name == "PREMUL_SUM" else None
    return Reduction(getattr(mpi, native), getattr(mpi, _DATATYPES[wide]), wide, factor, name == "AVG")


def all_reduce(comm: Any, tensor: torch.Tensor, reduction: Reduction) -> Steps:
    """Reduce `tensor` over all ranks, in place, any shape and strides."""
    terms = reduction.terms(flat_of(tensor))
    in_out = [span(terms), reduction.datatype]
    yield from follow(lambda: comm.Iallreduce(load().IN_PLACE, in_out, reduction.op), terms)
    put_back(reduction.result(terms, comm.size), tensor)


def reduce(comm: Any, tensor: torch.Tensor, root: int, reduction: Reduction) -> Steps:
    """Reduce `tensor` over all ranks into rank `root`'s, in place; the others' tensors stay as they are."""
    terms = reduction.terms(flat_of(tensor))
    memory = [span(terms), reduction.datatype]
    given, taken = (load().IN_PLACE, memory) if comm.rank == root else (memory, None)
    yield from follow(lambda: comm.Ireduce(given, taken, reduction.op, root), terms)
    if comm.rank == root:
        put_back(reduction.result(terms, comm.size), tensor)


def reduce_scatter(comm: Any, output: torch.Tensor, inputs: Sequence[torch.Tensor], reduction: Reduction) -> Steps:
    """Reduce `inputs[i]` over all ranks into rank i's `output`; sizes may differ between i, not between ranks."""
    counts = [part.numel() for part in inputs]
    terms = reduction.terms(gathered(inputs))
    if output.dtype == reduction.dtype:
        room = room_for([output], apart_from=terms)
    else:
        room = terms.new_empty(output.numel())
    given, taken = [span(terms), reduction.datatype], [span(room), reduction.datatype]
    yield from follow(lambda: comm.Ireduce_scatter(given, taken, counts, reduction.op), (terms, room))
    put_back(reduction.result(room, comm.size), output)
