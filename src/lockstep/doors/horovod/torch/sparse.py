"""Sums of sparse tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lockstep.errors import ConfigError

from ..common.process_sets import ProcessSet, checked_set, global_process_set
from ..engine.request import Average, Sum
from . import handles
from .moving import allgather_async
from .requests import shown

__all__ = ["sparse_allreduce_async"]


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Begin the sum or average of sparse tensors.

    Args:
        tensor: a sparse COO tensor, of the same shape and dtype on all ranks; each may have other elements.
        name: as for `allreduce`.
        op: Sum or Average.
        process_set: the ranks.

    Returns:
        What waits and gives the result, in which an element may come several times until it is coalesced.

    Raises:
        ConfigError: a ValueError, for a dense tensor or another `op`.
    """
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.sparse_coo:
        raise ConfigError("tensor", "a sparse COO tensor", found=getattr(tensor, "layout", type(tensor).__name__))
    if op not in (Average, Sum):
        raise ConfigError("op", "Average or Sum of a sparse tensor", found=shown(op))
    name = name or checked_set(process_set).engine.name_for("sparse_allreduce")
    indices = allgather_async(tensor._indices().t(), f"{name}.indices", process_set)
    values = allgather_async(tensor._values(), f"{name}.values", process_set)

    def finish() -> torch.Tensor:
        found, where = handles.synchronize(values), handles.synchronize(indices)
        if op == Average:
            found = found / process_set.size()
        return torch.sparse_coo_tensor(where.t(), found, tensor.shape, check_invariants=True)

    return finish
