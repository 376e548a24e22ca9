"""Collectives between the leaders of machines, as steps that never block."""

# torch's stubs lack some of the names of torch.distributed
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ...errors import TransportError
from ..c10d import Store
from ..shm.fold import Fold
from ..shm.waiting import Steps

__all__ = ["Leaders"]

_GLOO_SUMS = (torch.float32, torch.float64, torch.int32, torch.int64, torch.int8, torch.uint8)


class Leaders:
    """One rank of each machine, connected by Gloo.

    Args:
        store: where the leaders meet.
        machine: this leader's machine.
        machines: their number.
        timeout: limit of one operation.
    """

    def __init__(self, store: Store, machine: int, machines: int, timeout: timedelta) -> None:
        self.machine, self.machines = machine, machines
        self._group = dist.ProcessGroupGloo(store, machine, machines, timeout)

    def all_reduce(self, tensor: torch.Tensor, op: Any, fold: Fold) -> Steps:
        """Reduce `tensor` over the machines, in place; the same bits on each.

        Gloo does what it can; for what it cannot, every leader gathers all and folds them in order.
        """
        if tensor.dtype in _GLOO_SUMS and tensor.is_contiguous() and op is not None:
            options = dist.AllreduceOptions()
            options.reduceOp = op
            yield from _until(self._group.allreduce([tensor], options))
            return
        flat = tensor.contiguous().view(-1)
        parts = [torch.empty_like(flat) for _ in range(self.machines)]
        yield from self.all_gather(parts, flat)
        tensor.copy_(_folded(fold, parts).view(tensor.shape))

    def broadcast(self, tensor: torch.Tensor, machine: int) -> Steps:
        """Copy the flat `tensor` of `machine`'s leader to the other leaders', in place."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = machine, 0
        yield from _until(self._group.broadcast([tensor.view(torch.uint8)], options))

    def all_gather(self, parts: list[torch.Tensor], tensor: torch.Tensor) -> Steps:
        """Copy machine i's flat `tensor` into every leader's `parts[i]`; sizes may differ between machines."""
        parts[self.machine].copy_(tensor)
        for machine, part in enumerate(parts):
            yield from self.broadcast(part, machine)

    def barrier(self) -> Steps:
        """Go on when all leaders have come here."""
        yield from _until(self._group.barrier(dist.BarrierOptions()))


def _folded(fold: Fold, parts: list[torch.Tensor]) -> torch.Tensor:
    total = torch.empty_like(parts[0])
    fold(parts, total)
    return total


def _until(work: dist.Work) -> Steps:
    while not work.is_completed():
        yield _others
    try:
        work.wait()
    except RuntimeError as error:
        raise TransportError(f"between machines (Gloo): {error}") from error


def _others() -> Iterable[int]:
    """Ranks on other machines; Gloo itself sees when they are gone."""
    return ()
