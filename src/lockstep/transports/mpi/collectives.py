"""Collectives over an MPI communicator: without reduction, as bytes; with MPI's reductions; and
sparse sums.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from operator import add
from typing import Any

import torch
from torch.distributed import ReduceOp

from ...errors import ConfigError
from ..runtime.backoff import Steps
from ..runtime.reduce_ops import premul_factor, reduce_fn_for
from ..runtime.tensor_arguments import Tensors, copy_back, flatten
from .context import request_steps
from .library import buffer_for, counts_and_displacements, flatten_all, load_mpi, mpi_buffer


def barrier(comm: Any) -> Steps:
    """Wait until all ranks have arrived."""
    yield from request_steps(comm.Ibarrier, None)


def broadcast(comm: Any, tensor: torch.Tensor, root: int) -> Steps:
    """Copy rank `root`'s `tensor` to every rank's, in place."""
    flat = flatten(tensor)
    yield from request_steps(lambda: comm.Ibcast(_as_bytes(flat), root), flat)
    if comm.rank != root:
        copy_back(flat, tensor)


def all_gather(comm: Any, outputs: Tensors, tensor: torch.Tensor) -> Steps:
    """Copy rank i's `tensor` into every rank's `outputs[i]`; sizes may differ between ranks."""
    buffer = buffer_for(outputs)
    _copy_own(buffer, outputs, comm.rank, tensor)
    received = [mpi_buffer(buffer), counts_and_displacements(outputs), load_mpi().BYTE]
    yield from request_steps(lambda: comm.Iallgatherv(load_mpi().IN_PLACE, received), buffer)
    _copy_out(buffer, outputs)


def gather(comm: Any, outputs: Tensors, tensor: torch.Tensor, root: int) -> Steps:
    """Copy rank i's `tensor` into `outputs[i]` of rank `root`; all tensors have the same number of
    elements.
    """
    if comm.rank != root:
        flat = flatten(tensor)
        yield from request_steps(lambda: comm.Igather(_as_bytes(flat), None, root), flat)
        return
    buffer = buffer_for(outputs)
    _copy_own(buffer, outputs, root, tensor)
    yield from request_steps(
        lambda: comm.Igather(load_mpi().IN_PLACE, _as_bytes(buffer), root), buffer
    )
    _copy_out(buffer, outputs)


def scatter(comm: Any, tensor: torch.Tensor, inputs: Tensors, root: int) -> Steps:
    """Copy `inputs[i]` of rank `root` into rank i's `tensor`; all tensors have the same number of
    elements.
    """
    if comm.rank != root:
        buffer = buffer_for([tensor])
        yield from request_steps(lambda: comm.Iscatter(None, _as_bytes(buffer), root), buffer)
        copy_back(buffer, tensor)
        return
    flat = flatten_all(inputs)
    yield from request_steps(
        lambda: comm.Iscatter(_as_bytes(flat), load_mpi().IN_PLACE, root), flat
    )
    copy_back(flatten(inputs[root]), tensor)


def all_to_all(comm: Any, outputs: Tensors, inputs: Tensors) -> Steps:
    """Copy rank i's `inputs[j]` into rank j's `outputs[i]`; sizes may differ everywhere."""
    flat = flatten_all(inputs)
    own_part = flatten(inputs[comm.rank])
    buffer = buffer_for(outputs, apart_from=flat)
    sent = [mpi_buffer(flat), _without(comm.rank, inputs), load_mpi().BYTE]
    received = [mpi_buffer(buffer), _without(comm.rank, outputs), load_mpi().BYTE]
    yield from request_steps(lambda: comm.Ialltoallv(sent, received), (flat, buffer))
    _copy_own(buffer, outputs, comm.rank, own_part)
    _copy_out(buffer, outputs)


def _without(rank: int, parts: Tensors) -> tuple[list[int], list[int]]:
    """Return counts and displacements of all parts but this rank's, as MPI is slow to send to the
    same rank.
    """
    counts, displacements = counts_and_displacements(parts)
    return [0 if other == rank else count for other, count in enumerate(counts)], displacements


def _as_bytes(flat: torch.Tensor) -> list[Any]:
    return [mpi_buffer(flat), load_mpi().BYTE]


def _copy_own(buffer: torch.Tensor, outputs: Tensors, rank: int, tensor: torch.Tensor) -> None:
    begin = sum(output.numel() for output in outputs[:rank])
    own_part = buffer[begin : begin + outputs[rank].numel()]
    flat = flatten(tensor)
    if own_part.data_ptr() != flat.data_ptr():
        own_part.copy_(flat)


def _copy_out(buffer: torch.Tensor, outputs: Tensors) -> None:
    parts = torch.split(buffer, [output.numel() for output in outputs])
    for part, output in zip(parts, outputs, strict=True):
        copy_back(part, output)


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
_BOOL_OPERATIONS = {"SUM": "BOR", "MAX": "BOR", "PRODUCT": "BAND", "MIN": "BAND"}
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
# Open MPI 5 adds these with saturation where the processor can; truncated from wider sums they wrap
# around as elsewhere
_SHORT = (torch.int8, torch.uint8, torch.int16, torch.uint16)


@dataclass(frozen=True)
class Reduction:
    """A reduce operation of torch.distributed in MPI's terms.

    Attributes:
        op: MPI's operation.
        datatype: MPI's datatype of the values that are reduced.
        dtype: torch's; wider than the tensors' dtype where needed: half types are reduced in
            float32 and rounded once.
        factor: each rank's values are multiplied by it first; None for no factor.
        mean: whether the sum is divided by the number of ranks.
    """

    op: Any
    datatype: Any
    dtype: torch.dtype
    factor: float | torch.Tensor | None
    mean: bool

    def terms(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the values that this rank passes to MPI: `flat` itself where it needs no
        conversion.
        """
        wide = flat.to(self.dtype)
        return wide if self.factor is None else (wide * self.factor).to(self.dtype)

    def result(self, total: torch.Tensor, ranks: int) -> torch.Tensor:
        """Return the result of the operation, from MPI's."""
        return total / ranks if self.mean else total


def reduction_for(op: Any, dtype: torch.dtype) -> Reduction:
    """Return the reduction that `op` (a `torch.distributed.ReduceOp`) means for `dtype`.

    Raises:
        ConfigError: when the operation is not defined for `dtype`.
    """
    reduce_fn_for(op, dtype)  # the same check as in shm
    name = _NAMES[hash(op)]
    mpi = load_mpi()
    native = _BOOL_OPERATIONS.get(name, name) if dtype is torch.bool else _OPERATIONS[name]
    wide = torch.int32 if name == "SUM" and dtype in _SHORT else _WIDER.get(dtype, dtype)
    factor = premul_factor(op) if name == "PREMUL_SUM" else None
    return Reduction(
        getattr(mpi, native), getattr(mpi, _DATATYPES[wide]), wide, factor, name == "AVG"
    )


def all_reduce(comm: Any, tensor: torch.Tensor, reduction: Reduction) -> Steps:
    """Reduce `tensor` over all ranks, in place, any shape and strides."""
    terms = reduction.terms(flatten(tensor))
    in_out = [mpi_buffer(terms), reduction.datatype]
    yield from request_steps(
        lambda: comm.Iallreduce(load_mpi().IN_PLACE, in_out, reduction.op), terms
    )
    copy_back(reduction.result(terms, comm.size), tensor)


def reduce(comm: Any, tensor: torch.Tensor, root: int, reduction: Reduction) -> Steps:
    """Reduce `tensor` over all ranks into rank `root`'s, in place; the others' tensors stay as they
    are.
    """
    terms = reduction.terms(flatten(tensor))
    memory = [mpi_buffer(terms), reduction.datatype]
    sent, received = (load_mpi().IN_PLACE, memory) if comm.rank == root else (memory, None)
    yield from request_steps(lambda: comm.Ireduce(sent, received, reduction.op, root), terms)
    if comm.rank == root:
        copy_back(reduction.result(terms, comm.size), tensor)


def reduce_scatter(comm: Any, output: torch.Tensor, inputs: Tensors, reduction: Reduction) -> Steps:
    """Reduce `inputs[i]` over all ranks into rank i's `output`; sizes may differ between i, not
    between ranks.
    """
    counts = [part.numel() for part in inputs]
    terms = reduction.terms(flatten_all(inputs))
    if output.dtype == reduction.dtype:
        buffer = buffer_for([output], apart_from=terms)
    else:
        buffer = terms.new_empty(output.numel())
    sent = [mpi_buffer(terms), reduction.datatype]
    taken = [mpi_buffer(buffer), reduction.datatype]
    yield from request_steps(
        lambda: comm.Ireduce_scatter(sent, taken, counts, reduction.op), (terms, buffer)
    )
    copy_back(reduction.result(buffer, comm.size), output)


def all_reduce_sparse(comm: Any, tensor: torch.Tensor, op: Any) -> Steps:
    """Sum the sparse COO `tensor` over all ranks, in rank order and in place; the result is
    coalesced.

    Raises:
        ConfigError: for another operation than SUM.
    """
    if op != ReduceOp.SUM:
        raise ConfigError("op", "SUM, the only one for sparse tensors", found=str(op))
    return _sum_sparse(comm, tensor)


def _sum_sparse(comm: Any, tensor: torch.Tensor) -> Steps:
    mine = tensor.detach().coalesce()
    here = mine.indices()
    there = mine.values()
    counts = [here.new_zeros(1) for _ in range(comm.size)]
    yield from all_gather(comm, counts, here.new_full((1,), mine._nnz()))
    lengths = [int(count) for count in counts]
    # MPI places the parts one after another, so the index that counts the entries is the first
    # dimension
    indices = [here.new_empty((length, mine.sparse_dim())) for length in lengths]
    values = [there.new_empty((length, *there.shape[1:])) for length in lengths]
    yield from all_gather(comm, indices, here.T.contiguous())
    yield from all_gather(comm, values, there)
    parts = [
        torch.sparse_coo_tensor(i.T, v, mine.shape, check_invariants=False)
        for i, v in zip(indices, values, strict=True)
    ]
    with torch.no_grad():
        tensor.copy_(functools.reduce(add, parts).coalesce())
