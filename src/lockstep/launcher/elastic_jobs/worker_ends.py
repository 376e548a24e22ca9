"""What the end of a worker's process means for an elastic job: the worker is done, has left, or was
lost, or the job ends with its error.
"""

from __future__ import annotations

import math
import signal
import time
from dataclasses import dataclass, field

from msgspec import structs

from ...job.messages import Failure
from ...system.processes import UNKNOWN_EXIT_CODE, signal_name
from .host_messages import Ended
from .job_news import JobNews
from .job_record import JobRecord
from .job_workers import JobWorkers

_MOST_FAILED_STARTS = 3  # workers, one after the other, that have ended before they became members
_SAME_ERROR_S = 1.0  # in which all workers raise the same error, if the input is bad


@dataclass
class JobOutcome:
    """Why a job ends that does not end well.

    Attributes:
        reports, codes: of the workers that ended because of an error, by rank.
        places: the names of their hosts, if there are several.
        failure: why the job does not go on, though no worker has failed; "" as long as it does.
    """

    reports: dict[int, Failure] = field(default_factory=dict)
    codes: dict[int, int] = field(default_factory=dict)
    places: dict[int, str] = field(default_factory=dict)
    failure: str = ""


class WorkerEnds:
    """Decides what the ends of workers mean.

    Args:
        minimum: the number of workers below which the training waits.
        record: of the job.
        workers: of the job.
        news: tells of them.

    Attributes:
        outcome: why the job ends.
        kill_at: when the workers are killed that are left after an error; infinite without one.
    """

    def __init__(self, minimum: int, record: JobRecord, workers: JobWorkers, news: JobNews) -> None:
        self.outcome = JobOutcome()
        self.kill_at = math.inf
        self._minimum = minimum
        self._record = record
        self._workers = workers
        self._news = news

    def take(self, host: int, end: Ended) -> None:
        """Decide what the end of a worker's process means."""
        number = end.number
        code = end.code
        report = end.report
        workers = self._workers
        if workers.living.pop(number, None) is None:
            return
        state = self._record.state
        coordinator = workers.coordinator
        rank = workers.rank_of(number)
        was_member = number in coordinator.members
        was_candidate = number in coordinator.candidates
        is_error = (
            was_member and report is not None and not report.stopped and not coordinator.failure
        )
        is_error = is_error or (was_member and self._has_crashed_after_the_training(end))
        if state.is_ending or state.stops or is_error:
            self._note(host, end)
            if is_error and not state.stops:
                self._end_with_error()
                return  # and the others do not go on
        # told to leave when the training was complete
        was_told = number in workers.dismissed and coordinator.complete and code == -signal.SIGTERM
        if (code == 0 and end.is_finished) or was_told:
            coordinator.left(number)
            self._note_good_end(number, rank, was_member, was_candidate)
            return
        coordinator.lost(number)
        if state.is_ending or state.stops or coordinator.failure or number in workers.dismissed:
            return
        if was_candidate:
            self._note_failed_start(host, end)
        elif was_member:
            lost = f"rank {rank}{self._record.on_host(host)} was lost ({_how(code)})"
            self._news.tell_loss(lost, 1, len(coordinator.members))

    def _has_crashed_after_the_training(self, end: Ended) -> bool:
        """Return whether a worker has crashed, as native libraries may at exit, when all had
        completed the training.

        To start all workers again would train everything again, and most likely end in the same
        crash. One that was killed before the end of its program is lost, though, as the program may
        have more to do.
        """
        workers = self._workers
        if (
            not workers.coordinator.complete
            or workers.coordinator.failure
            or end.number in {*workers.killed, *workers.dismissed}
        ):
            return False
        return end.code != 0 and (
            end.is_finished or end.code not in (-signal.SIGKILL, -signal.SIGTERM)
        )

    def _end_with_error(self) -> None:
        """End the job because of an error of the program, which other workers may be about to
        report as well.
        """
        self._record.change(is_ending=True)
        self.kill_at = min(self.kill_at, time.monotonic() + _SAME_ERROR_S)

    def _note(self, host: int, end: Ended) -> None:
        """Note how a worker has ended, which is to be told at the end of the job."""
        rank = self._workers.rank_of(end.number)
        hosts = self._record.hosts
        if end.code and end.number not in self._workers.killed:
            self.outcome.codes[rank] = end.code
        if end.report is not None:
            self.outcome.reports[rank] = structs.replace(end.report, rank=rank)
        if len(hosts) > 1 and host in hosts:
            self.outcome.places[rank] = hosts[host].name

    def _note_good_end(self, number: int, rank: int, was_member: bool, was_candidate: bool) -> None:
        """Note that a worker's program has ended, or that the worker has left."""
        workers = self._workers
        if was_member or (was_candidate and workers.coordinator.formed < 0):
            self._record.change(is_ending=True)
        elif not was_candidate:
            if number not in workers.dismissed:
                self._record.change(target=max(self._minimum, self._record.state.target - 1))
            self._news.tell_loss(f"rank {rank} has left", 1, len(workers.coordinator.members))

    def _note_failed_start(self, host: int, end: Ended) -> None:
        """Note that a worker has ended before it became a member; too many end the attempts."""
        self._workers.failed_starts += 1
        failed_starts = self._workers.failed_starts
        report = end.report
        why = f"{report.kind}: {report.reason}" if report is not None else _how(end.code)
        members = len(self._workers.coordinator.members)
        if members < self._minimum:  # which would wait for others for ever
            if (report is not None and not members) or failed_starts > _MOST_FAILED_STARTS:
                self._note(host, end)
                self._end_with_error()
        elif failed_starts == _MOST_FAILED_STARTS:
            self._record.change(target=members)
            self._record.tell(
                f"no more workers are started, as {failed_starts} could not join ({why})"
            )


def _how(code: int) -> str:
    if code == UNKNOWN_EXIT_CODE:
        return "its exit code is not known"
    return f"killed by {signal_name(-code)}" if code < 0 else f"exit code {code}"
