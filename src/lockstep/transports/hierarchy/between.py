"""Collectives between the leaders of machines, as steps that never block."""

# torch's stubs lack some of the names of torch.distributed
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..shm.fold import Fold
from ..shm.waiting import Steps
from .connection import Connection

__all__ = ["Leaders"]

_GLOO_SUMS = (torch.float32, torch.float64, torch.int32, torch.int64, torch.int8, torch.uint8)


class Leaders:
    """One rank of each machine, connected by Gloo. All tensors are contiguous, of shape (numel,).

    Args:
        connection: between them; its ranks are the machines.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def all_reduce(self, flat: torch.Tensor, op: Any, fold: Fold) -> Steps:
        """Reduce `flat` over the machines, in place; the same bits on each.

        Gloo does what it can; for what it cannot, every leader gathers all and folds them in order.
        """
        if flat.dtype in _GLOO_SUMS:
            options = dist.AllreduceOptions()
            options.reduceOp = op
            yield from self.connection.finish(self.connection.group.allreduce([flat], options))
            return
        parts = [torch.empty_like(flat) for _ in range(self.connection.size)]
        parts[self.connection.rank].copy_(flat)
        yield from self.all_gather(parts)
        fold(parts, flat)

    def broadcast(self, flat: torch.Tensor, machine: int) -> Steps:
        """Copy `flat` of `machine`'s leader to the other leaders', in place."""
        if not flat.numel():
            return
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = machine, 0
        yield from self.connection.finish(self.connection.group.broadcast([flat.view(torch.uint8)], options))

    def all_gather(self, parts: Sequence[torch.Tensor]) -> Steps:
        """Copy `parts[i]` of machine i's leader to the other leaders', in place; sizes may differ between machines."""
        for machine, part in enumerate(parts):
            yield from self.broadcast(part, machine)

    def barrier(self) -> Steps:
        """Go on when all leaders have come here."""
        yield from self.connection.finish(self.connection.group.barrier(dist.BarrierOptions()))
