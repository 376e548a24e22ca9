"""How many workers an elastic job is to have, and on how many slots of which hosts: what users ask
for, and what follows from hosts that come.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from msgspec import structs

from ...errors import LockstepError, counted
from .job_record import JobRecord
from .job_workers import JobWorkers, describe_workers


@dataclass(frozen=True)
class Limits:
    """How many workers an elastic job may have: below `minimum` the training waits, and never more
    than `maximum`.

    Attributes:
        pause_s: seconds for which it waits for workers, or for hosts that do not answer, before it
            ends.
    """

    minimum: int
    maximum: int
    pause_s: float = math.inf


class JobSize:
    """Changes the number of workers that the job is to have; each method that a user asks for
    returns what is done.

    Args:
        limits: of the number of workers.
        record: of the job.
        workers: of the job.
    """

    def __init__(self, limits: Limits, record: JobRecord, workers: JobWorkers) -> None:
        self._limits = limits
        self._record = record
        self._workers = workers

    def resize(self, workers: int) -> str:
        """Let the job have so many workers.

        Raises:
            LockstepError: it cannot.
        """
        state = self._record.state
        coordinator = self._workers.coordinator
        (least, most) = (self._limits.minimum, self._limits.maximum)
        if not least <= workers <= most:
            raise LockstepError(
                f"expected {least} to {most} workers, as the job was started with, got {workers}"
            )
        if workers > coordinator.most:
            why = "each worker needs a virtual worker, or a sample of each global batch"
            raise LockstepError(
                f"expected at most {counted(coordinator.most, 'worker')}, got {workers}: {why}"
            )
        slots = sum(
            host.slots for number, host in self._record.hosts.items() if number not in state.leaving
        )
        if workers > slots:
            raise LockstepError(
                f"expected at most {counted(slots, 'worker')}, the slots of the hosts, got "
                f"{workers}"
            )
        if state.is_ending or state.stops or coordinator.complete:
            raise LockstepError("the job is ending")
        self._workers.failed_starts = 0
        self._record.change(target=workers)
        newest_first = [*coordinator.candidates, *reversed(coordinator.members)]
        staying = [number for number in newest_first if number not in self._workers.dismissed]
        before = len(staying)  # fewer than the job had wanted if a host was lost
        self._workers.let_leave(staying[: max(0, before - workers)])
        return f"{counted(before, 'worker')} before, {workers} after the step in progress"

    def remove_host(self, which: str | int) -> str:
        """Let all workers of a host leave, and then its launcher.

        Raises:
            LockstepError: it cannot leave.
        """
        hosts = self._record.hosts
        leaving = self._record.state.leaving
        minimum = self._limits.minimum
        named = [
            number for number, host in hosts.items() if which in (number, host.name, host.address)
        ]
        if not named:
            names = ", ".join(host.name for host in hosts.values())
            raise LockstepError(f"expected one of the job's hosts, {names}, got {which}")
        number = named[0]
        others = hosts.keys() - {number, *leaving}
        if not others:
            raise LockstepError(f"{hosts[number].name} is the job's last host")
        there = self._workers.staying_on(number)
        left = len(self._workers.staying()) - len(there)
        free = sum(self._workers.free_slots(other) for other in others)
        if left + free < minimum and isinstance(which, str):
            raise LockstepError(
                f"expected at least {counted(minimum, 'worker')}, without {which} there are {left}"
            )
        if number not in leaving:
            target = max(minimum, min(self._record.state.target, left + free))
            self._record.change(leaving=(*leaving, number), target=target)
            self._workers.let_leave(there)
        return (
            f"{hosts[number].name} leaves after the step in progress, with "
            f"{describe_workers(len(there), '', '')}"
        )

    def set_slots(self, host: int, slots: int) -> str:
        """Let a host have more or fewer workers from now on."""
        before = self._record.hosts[host]
        self._record.hosts[host] = structs.replace(before, slots=slots)
        if slots > before.slots:
            self.use_slots(slots - before.slots)
        else:
            self.fit_to_slots(host)
        return f"{before.name} had {counted(before.slots, 'slot')}, and has {slots} now"

    def fit_to_slots(self, host: int) -> None:
        """Let workers of a host leave that has fewer slots now."""
        workers = self._workers
        workers.let_leave(workers.staying_on(host)[self._record.hosts[host].slots :])
        most = len(workers.staying()) + self._free_slots()
        target = max(self._limits.minimum, min(self._record.state.target, most))
        self._record.change(target=target)

    def use_slots(self, more: int) -> None:
        """Let the job have more workers, of which there are as many slots as `more`."""
        workers = self._workers
        living = len(workers.staying())
        wanted = min(
            self._limits.maximum,
            workers.coordinator.most,
            max(self._record.state.target, living + more),
        )
        workers.failed_starts = 0
        self._record.change(target=min(wanted, living + self._free_slots()))

    def _free_slots(self) -> int:
        """Return how many workers more may run on all hosts."""
        return sum(self._workers.free_slots(host) for host in self._record.hosts)
