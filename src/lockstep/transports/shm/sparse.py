"""The sum of sparse tensors over all ranks, in rank order."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ReduceOp

from ...errors import ConfigError
from .arena import Arena
from .moving import all_gather
from .waiting import Steps

__all__ = ["all_reduce_sparse"]


def all_reduce_sparse(arena: Arena, tensor: torch.Tensor, op: Any) -> Steps:
    """Sum the sparse COO `tensor` over all ranks, in place; the result is coalesced.

    Raises:
        ConfigError: for another operation than SUM.
    """
    if op != ReduceOp.SUM:
        raise ConfigError("op", "SUM, the only one for sparse tensors", found=str(op))
    return _sum(arena, tensor)


def _sum(arena: Arena, tensor: torch.Tensor) -> Steps:
    mine = tensor.detach().coalesce()
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(arena.size)]
    yield from all_gather(arena, counts, torch.tensor([mine._nnz()]))
    lengths = [int(count) for count in counts]
    indices = [torch.empty((mine.sparse_dim(), length), dtype=torch.int64) for length in lengths]
    values = [torch.empty((length, *mine.values().shape[1:]), dtype=mine.dtype) for length in lengths]
    yield from all_gather(arena, indices, mine.indices())
    yield from all_gather(arena, values, mine.values())
    parts = [
        torch.sparse_coo_tensor(i, v, mine.shape, check_invariants=False) for i, v in zip(indices, values, strict=True)
    ]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    with torch.no_grad():
        tensor.copy_(total.coalesce())
