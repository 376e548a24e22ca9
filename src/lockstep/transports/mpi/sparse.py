"""The sum of sparse tensors over all ranks of an MPI communicator."""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import Any

import torch
from torch.distributed import ReduceOp

from ...errors import ConfigError
from ..shm.waiting import Steps
from .moving import all_gather

__all__ = ["all_reduce_sparse"]


def all_reduce_sparse(comm: Any, tensor: torch.Tensor, op: Any) -> Steps:
    """Sum the sparse COO `tensor` over all ranks, in rank order and in place; the result is coalesced.

    Raises:
        ConfigError: for another operation than SUM.
    """
    if op != ReduceOp.SUM:
        raise ConfigError("op", "SUM, the only one for sparse tensors", found=str(op))
    return _sum(comm, tensor)


def _sum(comm: Any, tensor: torch.Tensor) -> Steps:
    mine = tensor.detach().coalesce()
    here, there = mine.indices(), mine.values()
    counts = [here.new_zeros(1) for _ in range(comm.size)]
    yield from all_gather(comm, counts, here.new_full((1,), mine._nnz()))
    lengths = [int(count) for count in counts]
    # MPI brings the parts one behind another, so the index that counts the entries comes first
    indices = [here.new_empty((length, mine.sparse_dim())) for length in lengths]
    values = [there.new_empty((length, *there.shape[1:])) for length in lengths]
    yield from all_gather(comm, indices, here.T.contiguous())
    yield from all_gather(comm, values, there)
    parts = [
        torch.sparse_coo_tensor(i.T, v, mine.shape, check_invariants=False)
        for i, v in zip(indices, values, strict=True)
    ]
    with torch.no_grad():
        tensor.copy_(reduce(add, parts).coalesce())
