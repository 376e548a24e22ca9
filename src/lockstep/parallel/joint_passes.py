"""Joint passes of several shards: one thread for each shard, and a barrier at each layer that uses
all shards.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from ..communicator import Communicator
from ..errors import ConfigError
from .randomness import generator_states, set_generator_states
from .sync_batchnorm import SyncBatchNorm
from .tree_sum import total

T = TypeVar("T")


class _AbandonedError(Exception):
    """Ends a shard's passes because those of another shard have failed."""


class JointPasses:
    """A barrier for the passes of this worker's shards, with an exchange of values among all shards
    of all workers.

    Each shard has a thread. Only one thread runs at a time: the shards run in order from one
    barrier to the next. A barrier saves and restores each shard's state of the random generators.

    Args:
        comm: communicator over the workers.
        virtual_workers: number of shards of the global batch.
        shards: the numbers of this worker's shards that have samples, in order.
    """

    def __init__(self, comm: Communicator, virtual_workers: int, shards: Sequence[int]) -> None:
        self._comm = comm
        self._virtual_workers = virtual_workers
        self._shards = shards
        self._semaphores = [
            threading.Semaphore(0) for _ in shards
        ]  # released to let a shard's thread run
        self._rows: dict[int, torch.Tensor] = {}  # by position in `shards`
        self._gathered = torch.empty(0)
        self._ended = 0
        self._error: BaseException | None = None
        self._thread = threading.local()

    def is_first(self) -> bool:
        """Return whether the calling thread is that of this worker's first shard."""
        position: int = self._thread.position
        return position == 0

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        """Wait at a barrier, and return the rows of all shards of all workers, in order; zeros for
        an empty shard.

        Called in the pass of each shard.

        Raises:
            ConfigError: if some shards end their passes while others wait at the barrier.
        """
        position: int = self._thread.position
        self._rows[position] = row
        states = generator_states()
        self._run_next(position)
        self._semaphores[position].acquire()
        if self._error is not None:
            raise _AbandonedError
        set_generator_states(states)
        return self._gathered

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the tree sum of all shards' `values`; a barrier as `gather`."""
        summed: torch.Tensor = total(self.gather(values.reshape(-1)), torch.add)
        return summed.view_as(values)

    def run(self, bodies: Sequence[Callable[[], T]], threads: int | None) -> list[T]:
        """Call `bodies`, one for each shard of this worker, in one thread each; returns their
        results.

        Args:
            bodies: the functions, in the order of shards.
            threads: threads within an operation on the CPU, a setting of each calling thread.
        """
        results: list[Any] = [None] * len(bodies)

        def work(position: int) -> None:
            self._thread.position = position
            self._semaphores[position].acquire()
            try:
                if self._error is None:
                    if threads is not None:
                        torch.set_num_threads(threads)
                    results[position] = bodies[position]()
            except BaseException as error:
                self._error = self._error or error
            self._ended += 1
            self._run_next(position)

        workers = [
            threading.Thread(target=work, args=(position,), daemon=True)
            for position in range(len(bodies))
        ]
        for worker in workers:
            worker.start()
        self._semaphores[0].release()
        for worker in workers:
            worker.join()
        if self._error is not None:
            raise self._error
        return results

    def _run_next(self, position: int) -> None:
        """Let the shard after `position` run; after the last shard, exchange the rows and continue
        with the first.
        """
        if self._error is None and position + 1 < len(self._semaphores):
            self._semaphores[position + 1].release()
            return
        if self._error is None and self._rows:
            try:
                self._exchange_rows()
            except BaseException as error:
                self._error = error
            else:
                self._semaphores[0].release()
                return
        if self._error is not None:
            for semaphore in self._semaphores:
                semaphore.release()

    def _exchange_rows(self) -> None:
        if self._ended:
            hint = "Run the same synchronised layers in the same order for every shard."
            raise ConfigError(
                "model",
                "batch norm over all shards in every shard's pass",
                found="some without it",
                hint=hint,
            )
        first = self._rows[0]
        gathered = first.new_zeros(self._virtual_workers, first.numel())
        for position, row in self._rows.items():
            gathered[self._shards[position]] = row
        self._rows = {}
        if self._comm.size > 1:
            self._comm.allreduce(gathered)
        # -0.0 becomes 0.0, as in a sum with the zeros of other workers
        self._gathered = gathered + 0.0


def run_joint_passes(
    joint_passes: JointPasses,
    layers: Sequence[SyncBatchNorm],
    bodies: Sequence[Callable[[], T]],
    threads: Any,
) -> list[T]:
    """Run `bodies` with `joint_passes` as the exchange of `layers`; returns their results."""
    over_workers = [layer.exchange for layer in layers]
    for layer in layers:
        layer.exchange = joint_passes
    try:
        return joint_passes.run(bodies, threads)
    finally:
        for layer, exchange in zip(layers, over_workers, strict=True):
            layer.exchange = exchange
