"""The workers of an elastic job: which there are, on which hosts, and which of them stay."""

from __future__ import annotations

from collections.abc import Iterable

from ...elastic.membership import Coordinator
from .host_messages import Kill, Start
from .job_record import JobRecord


class JobWorkers:
    """The workers of the job, and the places for more of them.

    Args:
        record: of the job.
        minimum: the number of workers below which the training waits.

    Attributes:
        coordinator: of the membership.
        living: the workers, with their hosts.
        dismissed: those that were told to leave.
        killed: those that were killed from here.
        failed_starts: how many, one after the other, have ended before they became members.
    """

    def __init__(self, record: JobRecord, minimum: int) -> None:
        self.living: dict[int, int] = {}
        self.dismissed: set[int] = set()
        self.killed: set[int] = set()
        self.failed_starts = 0
        self._record = record
        self._minimum = minimum
        self._plan: list[int] = []  # hosts for the first workers
        self._ranks: dict[int, int] = {}  # in the newest view that has the worker
        self.coordinator = self._new_coordinator(0)

    def _new_coordinator(self, generation: int) -> Coordinator:
        """Return a coordinator that knows no workers."""
        state = self._record.state
        return Coordinator(state.target, self._minimum, generation, folder=state.folder)

    def forget_members(self) -> None:
        """Begin with a coordinator that knows no workers, in the generation of the last one."""
        self.coordinator = self._new_coordinator(self.coordinator.generation)

    def begin_again(self) -> None:
        """All workers have ended, and are to be started again."""
        self.coordinator = self._new_coordinator(0)
        self.failed_starts = 0

    def note_view(self) -> None:
        """Remember the ranks of the newest view."""
        self._ranks |= {member: rank for rank, member in enumerate(self.coordinator.view)}

    def rank_of(self, number: int) -> int:
        """Return the rank of a worker in the newest view that has it; its number if none has."""
        self.note_view()
        return self._ranks.get(number, number)

    def place_of(self, number: int) -> str:
        """Return where a worker is, in a message; "" if there is one host only."""
        return self._record.on_host(self.living.get(number, -1))

    def on(self, host: int) -> list[int]:
        """Return the workers on a host."""
        return [worker for worker, at in self.living.items() if at == host]

    def staying(self) -> set[int]:
        """Return the workers that have not been told to leave, and do not wait to be replaced so
        that they may.
        """
        return self.living.keys() - self.dismissed - set(self.coordinator.leaving)

    def staying_on(self, host: int) -> list[int]:
        """Return the workers on a host that stay."""
        staying = self.staying()
        return [worker for worker in self.on(host) if worker in staying]

    def free_slots(self, host: int) -> int:
        """Return how many workers more may run on a host."""
        if host in self._record.state.leaving:
            return 0
        return max(0, self._record.hosts[host].slots - len(self.staying_on(host)))

    def missing(self) -> int:
        """Return how many workers are to be started."""
        leavers = self.living.keys() & set(self.coordinator.leaving) - self.dismissed
        target = self._record.state.target
        if leavers:
            target = max(self._minimum, target - len(leavers))
        return target - len(self.staying())

    def start(self) -> bool:
        """Start a worker on a host that has a slot for it; returns whether there is one."""
        record = self._record
        state = record.state
        coordinator = self.coordinator
        if state.started == state.first:
            self._plan = self._places(state.target)
        host = self._plan.pop(0) if self._plan else next(iter(self._places(1)), None)
        if host is None:
            return False
        number = state.started
        joins = coordinator.formed >= 0
        before = len(coordinator.members) + len(coordinator.candidates)
        last = min(before, coordinator.most - 1)  # the view may have a lost worker still
        rank = last if joins else (number - state.first) % state.target
        size = rank + 1 if joins else state.target
        self.living[number] = host
        local_size = len(self.staying_on(host)) + self._plan.count(host)
        record.change(started=number + 1)
        coordinator.started(number, host)
        folder = state.folder if state.restarts else ""
        record.send(
            host, Start(number, rank, size, local_size, joins, state.restarts, state.resume, folder)
        )
        return True

    def _places(self, count: int) -> list[int]:
        """Return hosts for so many workers, in order: each time the one with the most free
        slots.
        """
        free = {number: self.free_slots(number) for number in sorted(self._record.hosts)}
        places = []
        for _ in range(min(count, sum(free.values()))):
            host = max(free, key=lambda number: free[number])
            free[host] -= 1
            places.append(host)
        return sorted(places)

    def kill(self, numbers: Iterable[int], gently: bool = False) -> None:
        """Let hosts kill workers, or `gently` let them leave after their step."""
        by_host: dict[int, list[int]] = {}
        for number in numbers:
            if gently or number not in self.killed:
                by_host.setdefault(self.living.get(number, -1), []).append(number)
        if not gently:
            self.killed.update(number for some in by_host.values() for number in some)
        for host, some in by_host.items():
            self._record.send(host, Kill(tuple(some), gently))

    def let_leave(self, numbers: list[int]) -> None:
        """Let workers leave after the step in progress."""
        self.dismissed.update(numbers)
        self.kill(numbers, gently=True)


def describe_workers(count: int, one: str = "goes", several: str = "go") -> str:
    """Return ``1 worker goes`` or ``3 workers go``."""
    verb = one if count == 1 else several
    return f"{count} worker{'s'[: count != 1]} {verb}".rstrip()
