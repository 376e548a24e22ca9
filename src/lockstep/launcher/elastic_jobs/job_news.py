"""What an elastic job tells its users: who has joined, was lost or has left, and whom it waits
for.
"""

from __future__ import annotations

import math
import time

from .job_record import JobRecord
from .job_workers import JobWorkers, describe_workers

_WAITING_S = 2.0  # after which it is said that the members wait for others


class JobNews:
    """Tells what has become of workers.

    Args:
        minimum: the number of workers below which the training waits.
        record: of the job.
        workers: of the job.

    Attributes:
        view: the members that were told last.
    """

    def __init__(self, minimum: int, record: JobRecord, workers: JobWorkers) -> None:
        self.view: tuple[int, ...] = ()
        self._minimum = minimum
        self._record = record
        self._workers = workers
        self._losses: list[str] = []  # since the last view of as many workers as are needed
        self._waits_since = math.inf
        self._is_waiting_said = False

    @property
    def waited_s(self) -> float:
        """The seconds for which the members have waited because they are too few."""
        return max(0.0, time.monotonic() - self._waits_since)

    def tell_view(self) -> None:
        """Say who has joined with a new view."""
        view = self._workers.coordinator.view
        joined = [
            str(view.index(number)) for number in view if self.view and number not in self.view
        ]
        if joined:
            self._workers.failed_starts = 0
            self._record.change(joined=self._record.state.joined + len(joined))
            self._record.tell(
                f"rank{'s'[: len(joined) != 1]} {', '.join(joined)} joined; "
                f"{describe_workers(len(view))} on"
            )
        if view != self.view:
            if len(view) >= self._minimum:
                self._losses.clear()
            self._workers.note_view()
        self.view = view

    def tell_loss(self, what: str, lost: int, left: int) -> None:
        """Say who was lost or has left, and what the workers that are left do.

        Args:
            what: in words.
            lost: the number of workers that were lost or have left.
            left: the number of those that go on.
        """
        self._record.change(lost=self._record.state.lost + lost)
        self._losses.append(f"{what} at {time.strftime('%H:%M:%S')}")
        if left >= self._minimum or self._workers.coordinator.complete:
            self._record.tell(f"{what}; {describe_workers(left)} on")
            return
        are_left = describe_workers(left, "is", "are")
        few = f"{are_left} left of the {self._minimum} that the training needs"
        self._record.tell(f"{what}; {few}")

    def tell_waiting(self) -> None:
        """Say once that the members wait because they are too few."""
        coordinator = self._workers.coordinator
        if not coordinator.waiting:
            self._waits_since = math.inf
            self._is_waiting_said = False
            return
        self._waits_since = min(self._waits_since, time.monotonic())
        if self.waited_s < _WAITING_S or self._is_waiting_said:
            return
        self._is_waiting_said = True
        leave = [
            f"rank {self._workers.rank_of(number)}{self._workers.place_of(number)} is to leave"
            for number in coordinator.leaving
        ]
        why = "; ".join([*self._losses, *leave])
        count = len(coordinator.members) - len(coordinator.leaving)
        missing = f"{self._minimum - count} more"
        if why:
            missing += f" ({why})"
        self._record.tell(f"{describe_workers(count, 'waits', 'wait')} for {missing}")
