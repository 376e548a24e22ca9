"""The launcher's watch over its running workers: signals passed on, and an end to every wait."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from ..watch.health import is_stopped
from .folder import Folder, Report
from .sweep import MOMENT

__all__ = ["FAILURE_GRACE", "Supervision"]

FAILURE_GRACE = 5.0
"""Seconds that the other workers have left once one has failed. They cannot go on, only clear up."""


@dataclass
class Supervision:
    """What the launcher has seen of its workers, and what it does about it at every `check`.

    Attributes:
        folder: where the workers report.
        ranks: the local ranks of this machine.
        signals: what this process was sent, in order; another thread or a handler appends.
        patience: seconds that workers may take to leave after a signal.
        grace: the same where one of them has asked for time, to save what it has.
        lost: the ranks that had died, at the first check at which any had.
        ended: the ranks that have been ended here, whose exit codes therefore say nothing.
        checked: when the check before that was made, in nanoseconds since the epoch: they were alive then.
        killed: whether time ran out and the rest was ended.
    """

    folder: Folder
    ranks: Sequence[int]
    signals: Sequence[int]
    patience: float
    grace: float
    lost: list[int] = field(default_factory=list)
    killed: bool = False
    ended: set[int] = field(default_factory=set)
    checked: int = field(default_factory=time.time_ns)
    _told: set[int] = field(default_factory=set)
    _deadline: float = float("inf")
    _killing: float = float("inf")
    _asked: bool = False

    def reports(self) -> list[Report]:
        """Every report that there is, the earliest first."""
        found = [report for rank in self.ranks if (report := self.folder.read(rank)) is not None]
        return sorted(found, key=lambda report: report.time)

    def check(self, agent_is_gone: bool = False, is_over: bool = False) -> bool:
        """Do now what is due, and say whether any worker is still there.

        Args:
            agent_is_gone: the agent no longer looks after the workers, so that they must end.
            is_over: the job cannot go on for another reason, so that they must end.
        """
        present = self.folder.present(self.ranks)
        self._pass_on(present)
        reports = self.reports()
        now = time.time_ns()
        self.lost = self.lost or self.folder.lost(self.ranks)
        self.checked = self.checked if self.lost else now
        self._asked = self._asked or bool(self.signals) or any(report.stopped for report in reports)
        failed = is_over or bool(self.lost) or any(not report.stopped for report in reports)
        self._set_deadline(failed or (agent_is_gone and not self._asked))
        if failed:
            self.end([rank for rank, pid in present.items() if is_stopped(pid)])  # it cannot clear up
        if agent_is_gone:
            # it would have told them that they may leave
            self.end(rank for rank in present if self.folder.is_finished(rank))
        if present and self.is_late:
            self._end_late(present)
        return bool(present)

    @property
    def is_late(self) -> bool:
        """Whether the time that the workers had to leave is over."""
        extra = self.grace - self.patience if self._asked and self.folder.needs_time else 0.0
        return time.monotonic() >= self._deadline + max(0.0, extra) * (len(self.signals) < 2)

    def kill(self) -> None:
        """End every worker that is there, and the processes that it has started, at once."""
        self.killed = True
        self.end(self.ranks)

    def end(self, ranks: Iterable[int]) -> None:
        """The same for some of them."""
        for rank, pid in self.folder.present(ranks).items():
            self.ended.add(rank)
            # The group holds what the worker has started. A worker makes its group just after it has shown up.
            for send in (os.killpg, os.kill):
                with suppress(ProcessLookupError):
                    send(pid, signal.SIGKILL)

    def _end_late(self, present: dict[int, int]) -> None:
        """End those whose time is up; who has been sent no signal gets SIGTERM first, and a moment."""
        now = time.monotonic()
        if self.signals or now >= self._killing:
            self.kill()
        elif self._killing == float("inf"):
            self.killed, self._killing = True, now + MOMENT
            self.ended.update(present)
            for pid in present.values():
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGTERM)

    def _pass_on(self, present: dict[int, int]) -> None:
        if self.signals:
            for rank in present.keys() - self._told:
                with suppress(ProcessLookupError):
                    os.kill(present[rank], self.signals[0])
                self._told.add(rank)

    def _set_deadline(self, failed: bool) -> None:
        now = time.monotonic()
        if len(self.signals) > 1:
            self._deadline = now
        elif self._deadline == float("inf") and (failed or self._asked):
            self._deadline = now + (self.patience if self._asked else FAILURE_GRACE)
