"""A backend for tensors of the device "meta", which are without data: it notes what it is asked to
do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["CALLS", "GROUPS", "Recorder", "meta", "world"]

GROUPS: list[Recorder] = []  # those made in this process


class Recorder(dist.ProcessGroup):
    """A backend for tensors without data: it notes the calls, and answers that all is done."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self.calls: list[str] = []
        self.ended: list[str] = []
        GROUPS.append(self)

    def __getattribute__(self, name: str) -> Any:
        if name not in NAMES:
            return super().__getattribute__(name)

        def call(*arguments: Any) -> Any:
            self.calls.append(name)
            return Done()

        return call

    def shutdown(self) -> None:
        self.ended.append("shutdown")


class Done(dist.Work):
    """What has ended."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def meta(length: int = 4) -> torch.Tensor:
    return torch.empty(length, device="meta")


def parts() -> list[torch.Tensor]:
    return [meta() for _ in range(dist.get_world_size())]


def whole() -> torch.Tensor:
    return meta(4 * dist.get_world_size())


# c10d's name of what the backend is to be asked, with the call that asks it
CALLS: dict[str, Callable[[], Any]] = {
    "allreduce": lambda: dist.all_reduce(meta()),
    "broadcast": lambda: dist.broadcast(meta(), 0),
    "reduce": lambda: dist.reduce(meta(), 0),
    "allgather": lambda: dist.all_gather(parts(), meta()),
    "gather": lambda: dist.gather(meta(), parts() if dist.get_rank() == 0 else None, 0),
    "scatter": lambda: dist.scatter(meta(), parts() if dist.get_rank() == 0 else None, 0),
    "reduce_scatter": lambda: dist.reduce_scatter(meta(), parts()),
    "alltoall": lambda: dist.all_to_all(parts(), parts()),
    "send": lambda: dist.send(meta(), 1 - dist.get_rank()),
    "recv": lambda: dist.recv(meta(), 1 - dist.get_rank()),
    "recv_anysource": lambda: world().recv_anysource([meta()], 0),
    "alltoall_base": lambda: world().alltoall_base(whole(), whole(), [], []),
    "_allgather_base": lambda: world()._allgather_base(whole(), meta()),
    "_reduce_scatter_base": lambda: world()._reduce_scatter_base(meta(), whole()),
    "allreduce_coalesced": lambda: world().allreduce_coalesced([meta(), meta()]),
}
NAMES = tuple(CALLS)


def world() -> Any:
    return dist.group.WORLD
