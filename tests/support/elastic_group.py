"""A membership of two workers, one of which runs at a time: what the one that is ahead has sent
reaches the other.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch

from lockstep.elastic.membership import View

__all__ = ["Client", "Group", "share"]


class Client:
    """A membership in which nothing happens of itself."""

    wants_to_regroup = leaving = False
    stop_signal = 0
    generation = 1

    def __init__(self) -> None:
        self.entered: list[int] = []

    def enter(self, fit: int, most: int, folder: str) -> None:
        self.entered.append(fit)

    def check(self) -> None:
        """Do nothing."""

    def wait_for_lease(self) -> None:
        """Return at once, as in a job on one host."""

    def complete(self) -> bool:
        return True


class Group:
    """A communicator whose next view consists of a worker that is ahead, rank 0, and another one.

    Args:
        rank: which of them this is.
        sent: what the first has sent.
        behind: the commit of the other one, () if it joins.
    """

    def __init__(self, rank: int, sent: list[Any], behind: Any = ()) -> None:
        self.rank, self.size, self.device, self.client = rank, 1, torch.device("cpu"), Client()
        self.is_joining, self.keeps_values, self.trainings, self.sent = (
            rank == 1 and not behind,
            True,
            0,
            sent,
        )
        self.commits: list[Any] = []
        self.behind = behind

    has_earlier_result = False

    def joins_before_result(self) -> bool:
        return True

    def note_result(self, training: int, result: object) -> None:
        """Do nothing."""

    def forget_results(self, training: int) -> None:
        """Do nothing."""

    def publish_results(self) -> None:
        """Do nothing."""

    def barrier(self) -> None:
        """Do nothing."""

    def broadcast_object(self, value: Any, root: int) -> Any:
        if self.rank == root:
            self.sent.append(pickle.dumps(value))
        return pickle.loads(self.sent.pop(0) if self.rank != root else self.sent[-1])

    def regroup_until(
        self,
        commit: Any,
        adapt: Any,
        reason: str = "",
        at_boundary: bool = False,
        check: Any = None,
    ) -> None:
        ahead = commit() if self.rank == 0 else self.commits[0]
        self.commits.append(ahead)
        self.is_joining = False
        self.client.wants_to_regroup = False
        behind = commit() if self.rank == 1 else self.behind
        assert behind == self.behind and at_boundary == (not self.behind and self.rank == 0)
        adapt(View(1, (0, 1), (0, 0), (ahead, behind), 0))


def share(comm: Any, source: int, state: Any, wanted: bool) -> Any:
    if comm.rank == source:
        comm.sent.append(pickle.dumps(state))
        return {}
    return pickle.loads(comm.sent.pop(0))
