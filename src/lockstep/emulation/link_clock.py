"""The link clocks in shared memory: every rank moves the same clocks, and waits until its messages
have arrived.
"""

from __future__ import annotations

import array
import fcntl
import mmap
import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from ..errors import TransportError
from ..network import VirtualNetwork
from .message_schedules import BUSY_TIMES, ROUNDS, Cards, finish_times
from .virtual_time import VirtualTime


class _SharedNumbers:
    """Doubles in a file that processes map, and a lock that they share; the kernel frees it when
    its owner dies.
    """

    def __init__(self, path: Path, count: int) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if os.fstat(self._descriptor).st_size < 8 * count:
            os.ftruncate(self._descriptor, 8 * count)  # zeros, whoever comes first
        self._map = mmap.mmap(self._descriptor, 8 * count)
        self._bytes = memoryview(self._map)
        self.numbers = self._bytes.cast("d")
        self._lock = threading.Lock()  # the kernel's is one of processes

    @contextmanager
    def locked(self) -> Iterator[memoryview[float]]:
        """Hold the lock during the body."""
        with self._lock:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
            try:
                yield self.numbers
            finally:
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        self.numbers.release()
        self._bytes.release()
        self._map.close()
        os.close(self._descriptor)


_BEHIND = 0.02  # of the duration of the job


class Statistics(NamedTuple):
    """How well this host keeps up with the network that it emulates.

    Attributes:
        waits: the collectives and messages between virtual hosts that ranks have waited for.
        behind_s: by how many seconds real time was behind the virtual time of the rank that waited
            last.
    """

    waits: int
    behind_s: float


_CARD = 1 + 2 * BUSY_TIMES  # how many numbers are in use, and the times
_STARTED, _WAITS, _BEHIND_S, _HEAD = range(4)


class LinkClock:
    """The clocks of all virtual network cards, shared by the processes of a job.

    Args:
        folder: of the job, on this host; the clocks are a file in it.
        network: with its dilation resolved, the same in all processes.

    Attributes:
        virtual: the virtual times of this process's threads.
    """

    def __init__(self, folder: Path, network: VirtualNetwork) -> None:
        self.folder = folder
        self.network = network
        self.virtual = VirtualTime(network.dilation)
        self._shared = _SharedNumbers(folder / "cards", _HEAD + 2 * network.hosts * _CARD)
        with self._shared.locked() as numbers:
            if not numbers[_STARTED]:
                numbers[_STARTED] = time.monotonic()
            self._cards = Cards(network, numbers[_STARTED])

    @contextmanager
    def cards(self) -> Iterator[Cards]:
        """Give the body the clocks of all cards; nobody else moves them meanwhile."""
        with self._shared.locked() as numbers:
            clocks = [*self._cards.sends, *self._cards.receives]
            places = [_HEAD + i * _CARD for i in range(len(clocks))]
            for at, busy in zip(places, clocks, strict=True):
                busy[:] = numbers[at + 1 : at + 1 + int(numbers[at])]
            yield self._cards
            for at, busy in zip(places, clocks, strict=True):
                numbers[at] = len(busy)
                numbers[at + 1 : at + 1 + len(busy)] = array.array("d", busy)

    def note_wait(self) -> None:
        """Record that this process has waited, and how far behind its virtual time it is since."""
        with self._shared.locked() as numbers:
            numbers[_WAITS] += 1
            numbers[_BEHIND_S] = self.virtual.behind_s

    def statistics(self) -> Statistics:
        """Return how well this host keeps up so far."""
        with self._shared.locked() as numbers:
            return Statistics(int(numbers[_WAITS]), numbers[_BEHIND_S])

    def elapsed(self) -> float:
        """Return the seconds since the job began, in real time."""
        with self._shared.locked() as numbers:
            return time.monotonic() - numbers[_STARTED]

    def close(self) -> None:
        """Unmap the clocks."""
        self.virtual.close()
        self._shared.close()


def emulation_summary(folder: Path, network: VirtualNetwork) -> str:
    """Return in words how well this host has kept up with `network`, whose clocks are in
    `folder`.
    """
    clock = LinkClock(folder, network)
    statistics = clock.statistics()
    real_s = clock.elapsed()
    clock.close()
    text = (
        f"lockstep run: emulated network: {statistics.waits} messages and collectives between hosts"
    )
    if statistics.behind_s > _BEHIND * real_s:
        text += (
            f"; this host was {statistics.behind_s:.2f} s behind at the end, "
            f"{statistics.behind_s / real_s:.0%} of the time"
        )
        text += f' (a larger dilation helps: --network "..., dilation {2 * network.dilation:.3g}")'
    if network.dilation != 1:
        text += f"\nlockstep run: time dilation {network.dilation:.4g}: {real_s:.2f} s here are "
        text += (
            f"{real_s / network.dilation:.2f} s on the emulated hosts; divide times that the "
            "program prints "
        )
        text += "by it (a Trainer has done so)"
    return text


_SLOTS = 256  # collectives of a group that may be pending at a time
_TAG, _TIME, _SIZE, _DONE, _FIELDS = range(5)


class GroupClock:
    """When the collectives of one process group complete, for each of its ranks.

    The ranks call the same collectives in the same order. Each notes when it calls one; the last to
    do so sends the messages of all, as only then all times are known, and writes down when each
    rank will have its own.

    Args:
        clock: of the job.
        name: of the group, the same on all of its ranks and of no other group of the job.
        rank: of this process in the group.
        size: number of ranks.
        host: this process's virtual host.
    """

    def __init__(self, clock: LinkClock, name: str, rank: int, size: int, host: int) -> None:
        self.clock = clock
        self._rank = rank
        self._size = size
        self._host = host
        self._shared = _SharedNumbers(
            clock.folder / f"group-{name}", size + _SLOTS * (1 + size * _FIELDS)
        )
        self._called = 0
        with self._shared.locked() as numbers:
            numbers[rank] = host + 1

    def call(self) -> int:
        """Return the number of the next collective, from 1."""
        self._called += 1
        return self._called

    def arrive(self, number: int, operation: str, size: float, root: int, now: float) -> None:
        """Note that this rank has called collective `number`, a key of `ROUNDS`, with a tensor of
        `size` bytes.

        Raises:
            TransportError: more collectives are pending than there is room for.
        """
        at = self._slot(number)
        with self._shared.locked() as numbers:
            at_rank = at + 1 + self._rank * _FIELDS
            if numbers[at_rank + _TAG] > numbers[at]:
                raise TransportError(
                    f"emulated network: more than {_SLOTS} collectives of one group are pending"
                )
            numbers[at_rank + _TIME] = now
            numbers[at_rank + _SIZE] = size
            numbers[at_rank + _TAG] = number
            ranks = [at + 1 + rank * _FIELDS for rank in range(self._size)]
            if any(numbers[rank + _TAG] != number for rank in ranks):
                return
            arrivals, sizes = (
                [numbers[rank + field] for rank in ranks] for field in (_TIME, _SIZE)
            )
            hosts = [int(numbers[rank]) - 1 for rank in range(self._size)]
            for rank, done in zip(
                ranks, self._send(number, operation, sizes, root, hosts, arrivals), strict=True
            ):
                numbers[rank + _DONE] = done
            numbers[at] = number

    def _send(
        self,
        number: int,
        operation: str,
        sizes: list[float],
        root: int,
        hosts: Sequence[int],
        arrivals: list[float],
    ) -> list[float]:
        network = self.clock.network
        draws = random.Random(f"{network.seed} {self._size} {number}") if network.jitter else None
        with self.clock.cards() as cards:
            return finish_times(cards, ROUNDS[operation](sizes, root), hosts, arrivals, draws)

    def done_at(self, number: int) -> float | None:
        """Return when collective `number` completes on this rank; None while some rank has not
        called it.
        """
        at = self._slot(number)
        if self._shared.numbers[at] < number:
            return None
        # so that what was written before is seen, on every processor
        with self._shared.locked() as numbers:
            return float(numbers[at + 1 + self._rank * _FIELDS + _DONE])

    def _slot(self, number: int) -> int:
        return self._size + (number % _SLOTS) * (1 + self._size * _FIELDS)

    def host_of(self, rank: int) -> int:
        """Return the virtual host of `rank`, which has made its group clock; -1 if it has not."""
        with self._shared.locked() as numbers:
            return int(numbers[rank]) - 1

    def close(self) -> None:
        """Unmap the memory."""
        self._shared.close()
