"""The two collectives that every round needs, asked of the group with as little as possible in between."""

# torch's stubs lack some of the names of torch.distributed
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from lockstep import Communicator

__all__ = ["Calls"]

# What every backend for the CPU sums as it is. Others go the long way, which knows how each backend takes them.
SUMMED = (torch.float32, torch.float64, torch.int32, torch.int64)


class Calls:
    """Blocking collectives of tensors that lie in memory in one piece, on the CPU.

    `torch.distributed` asks a group for the same, some 5 µs later: it looks for the group, and at all arguments.

    Args:
        comm: the ranks; one without others has no group.
    """

    def __init__(self, comm: Communicator) -> None:
        self._group: Any = comm.group
        self._sum, self._gather = dist.AllreduceOptions(), c10d.AllgatherOptions()
        self._sum.asyncOp = self._gather.asyncOp = False

    def sum(self, tensor: torch.Tensor) -> None:
        """Sum `tensor`, of a dtype of SUMMED, over the ranks, in place."""
        if self._group is not None:
            _wait(self._group.allreduce([tensor], self._sum))

    def gather(self, parts: Sequence[torch.Tensor], own: torch.Tensor) -> None:
        """Fill ``parts[i]`` with what rank i passes as `own`."""
        _wait(self._group.allgather([parts], [own], self._gather))

    def close(self) -> None:
        """Let go of the group, whose connections end with its last holder."""
        self._group = None


def _wait(work: Any) -> None:
    if work is not None:
        work.wait()
