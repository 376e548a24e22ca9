"""Forward and backward passes of several shards that advance together, for layers that look at all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from ..communicator import Communicator
from ..errors import ConfigError
from ..randomness import draw_on, drawn_so_far
from ..tree import total

__all__ = ["Meeting", "run_together"]

T = TypeVar("T")


class _AbandonedError(Exception):
    """Ends a shard's passes because another shard's have failed."""


class Meeting:
    """Where the shards of this worker wait for each other, and for those of the other workers.

    Each shard has a thread, of which one alone runs at any time: in the order of shards, from one meeting to the next.
    Each finds the random generators as it has left them.

    Args:
        comm: the workers.
        shards: of the global batch, on all workers.
        here: those of this worker that have samples, in order.
    """

    def __init__(self, comm: Communicator, shards: int, here: Sequence[int]) -> None:
        self._comm, self._shards, self._here = comm, shards, here
        self._turns = [threading.Semaphore(0) for _ in here]
        self._brought: dict[int, torch.Tensor] = {}  # by place in `here`
        self._table = torch.empty(0)
        self._ended = 0
        self._error: BaseException | None = None
        self._place = threading.local()

    def is_first(self) -> bool:
        """Whether it is this worker's first shard that asks: of what is the same for all, it does it for all."""
        place: int = self._place.number
        return place == 0

    def table(self, row: torch.Tensor) -> torch.Tensor:
        """Called in each shard's pass: the rows of all shards, of all workers, in order; zeros without samples.

        Raises:
            ConfigError: when some shards come to a meeting that others do not come to.
        """
        place: int = self._place.number
        self._brought[place] = row
        drawn = drawn_so_far()
        self._next(place)
        self._turns[place].acquire()
        if self._error is not None:
            raise _AbandonedError
        draw_on(drawn)
        return self._table

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of all shards' `values`, in the association of `tree`."""
        summed: torch.Tensor = total(self.table(values.reshape(-1)), torch.add)
        return summed.view_as(values)

    def run(self, bodies: Sequence[Callable[[], T]], threads: int | None) -> list[T]:
        """Call `bodies`, one for each shard of this worker; they meet each other. Returns what they return.

        Args:
            bodies: in the order of shards.
            threads: within an operation on the CPU: a setting of each thread.
        """
        found: list[Any] = [None] * len(bodies)

        def work(place: int) -> None:
            self._place.number = place
            self._turns[place].acquire()
            try:
                if self._error is None:
                    if threads is not None:
                        torch.set_num_threads(threads)
                    found[place] = bodies[place]()
            except BaseException as error:
                self._error = self._error or error
            self._ended += 1
            self._next(place)

        workers = [threading.Thread(target=work, args=(place,), daemon=True) for place in range(len(bodies))]
        for worker in workers:
            worker.start()
        self._turns[0].release()
        for worker in workers:
            worker.join()
        if self._error is not None:
            raise self._error
        return found

    def _next(self, place: int) -> None:
        """Give the turn to the shard behind `place`; behind the last one the meeting takes place."""
        if self._error is not None:
            for turn in self._turns:
                turn.release()
        elif place + 1 < len(self._turns):
            self._turns[place + 1].release()
        elif self._brought:
            try:
                self._meet()
            except BaseException as error:
                self._error = error
                return self._next(place)
            self._turns[0].release()
        return None

    def _meet(self) -> None:
        if self._ended:
            hint = "Let every shard go through the same synchronised layers in the same order."
            raise ConfigError(
                "model", "batch norm over all shards in every shard's pass", found="some without it", hint=hint
            )
        first = self._brought[0]
        table = first.new_zeros(self._shards, first.numel())
        for place, row in self._brought.items():
            table[self._here[place]] = row
        self._brought = {}
        if self._comm.size > 1:
            self._comm.allreduce(table)
        self._table = table + 0.0  # as where it is a sum with zeros: -0.0 becomes 0.0


def run_together(meeting: Meeting, layers: Sequence[Any], bodies: Sequence[Callable[[], T]], threads: Any) -> list[T]:
    """Run `bodies` with `layers` that meet in `meeting`."""
    for layer in layers:
        layer.meeting = meeting
    try:
        return meeting.run(bodies, threads)
    finally:
        for layer in layers:
            layer.meeting = None
