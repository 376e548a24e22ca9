"""The parts of a global batch in a prepared loop: which shards there are, which this worker has,
and their data.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ..communicator import Communicator
from ..data.loader import Batch, Loader
from ..errors import ConfigError
from ..parallel.nested import narrow, sample_count
from ..parallel.shards import bounds, check_virtual_workers, mix

# In place of (epoch, step) for batches of no loader; no loader has as many epochs.
_NO_LOADER = (1 << 32, 1 << 32)


@dataclass(slots=True)
class Shard:
    """The shard whose passes are running.

    Attributes:
        number: its number.
        samples: its samples; 0 if its data is a sample that stands in for none.
        weight: its share of the samples of the global batch.
        last: whether it is this worker's last one, in which optimizers update the parameters.
        one_of_several: whether this worker has other shards of the same batch.
        total: samples of the global batch.
        left_out: in the last shard, the samples that a collate function has left out of this
            worker's shards; None if there is no such function.
        whole_batch: whether its loss is one of the whole batch, on each worker.
        divisors: what the losses of its backward passes are divided by, where steps have a count;
            see `divisor`.
        collectives: how many this process had called before its body; None if they are not
            recorded.
    """

    number: int
    samples: int
    weight: float
    last: bool
    one_of_several: bool
    total: int = 1
    left_out: int | None = None
    whole_batch: bool = False
    divisors: list[torch.Tensor | None] = field(default_factory=list)
    collectives: int | None = None


def parts_of(batch: Batch, comm: Communicator) -> list[tuple[int, Any, int]]:
    """Return (shard, data, samples) of each of this worker's shards of a loader's batch.

    Without virtual workers each worker has one shard, which has the number of its rank.

    Args:
        batch: this worker's part of a global batch.
        comm: of the workers.
    """
    if batch.virtual_workers is None:
        shards = range(comm.rank, comm.rank + 1)
        data = [batch.data]
        sizes = [batch.size]
    else:
        shards = range(*bounds(batch.virtual_workers, comm.size, comm.rank))
        data = batch.data
        cuts = [bounds(batch.global_size, batch.virtual_workers, shard) for shard in shards]
        sizes = [stop - start for start, stop in cuts]
    if batch.collated is not None:  # a collate function may leave samples out
        sizes = list(batch.collated)
    return list(zip(shards, data, sizes, strict=True))


class BatchParts:
    """The shards into which each global batch of a prepared loop is divided.

    Args:
        comm: of the workers.
        virtual_workers: number of shards of a global batch; as many as there are workers when None.

    Attributes:
        comm: of the workers.
        exact: whether the shards are those of virtual workers, and so the same at any number of
            workers.
        virtual_workers: number of shards of a global batch.
        local: the numbers of this worker's shards.
        current: the shard whose passes are running; None outside of the bodies of a batch.
        source: the loader of the latest batch.
    """

    virtual_workers: int
    local: range

    def __init__(self, comm: Communicator, virtual_workers: int | None) -> None:
        self.comm = comm
        self.exact = virtual_workers is not None
        self.current: Shard | None = None
        self.source: Loader | None = None
        self._fixed_number = virtual_workers
        # how many over the current batch have begun, from 0
        self._passes: dict[tuple[int, int] | None, int] = {}
        self.regroup()

    def regroup(self) -> None:
        """Divide batches among the workers that the communicator has now."""
        size = self.comm.size
        self.virtual_workers = (
            size if self._fixed_number is None else check_virtual_workers(self._fixed_number, size)
        )
        self.local = range(*bounds(self.virtual_workers, size, self.comm.rank))

    def of(self, batch: Any) -> tuple[list[tuple[int, Any, int]], int]:
        """Return (number, data, samples) of each of this worker's shards that has samples, and the
        batch's samples.

        Args:
            batch: of a loader; or tensors, nested in tuples, lists and mappings; or a number of
                samples.
        """
        if isinstance(batch, Batch):
            parts = parts_of(batch, self.comm)
            return [part for part in parts if part[2]], batch.global_size
        total = batch if isinstance(batch, int) else sample_count(batch)
        cuts = [(shard, *bounds(total, self.virtual_workers, shard)) for shard in self.local]
        if isinstance(batch, int):
            parts = [(shard, slice(start, stop), stop - start) for shard, start, stop in cuts]
        else:
            parts = [
                (shard, narrow(batch, start, stop, total), stop - start)
                for shard, start, stop in cuts
            ]
        return [part for part in parts if part[2]], total

    def left_out(self, batch: Any) -> int | None:
        """Return how many samples a collate function has left out of this worker's shards; None
        without one.
        """
        collated = batch.collated if isinstance(batch, Batch) else None
        return None if collated is None else batch.size - sum(collated)

    def stand_in(self, batch: Any) -> Any:
        """Return data for a worker without samples; its gradients count nothing.

        Raises:
            ConfigError: for a batch of no loader that this process knows.
        """
        if isinstance(batch, int):
            return slice(0, 0)
        if not isinstance(batch, Batch):
            return narrow(batch, 0, 2, sample_count(batch))
        if self.source is None:
            raise ConfigError(
                "batch",
                "a sample for each worker in every batch",
                found=f"{batch.global_size} samples for {self.comm.size} workers",
                hint="Use drop_last=True, or fewer workers.",
            )
        return self.source.stand_in()

    # A loop may run several passes over one batch, as a GAN does: each has random draws of its own.

    def begin_pass(self, batch: Any) -> int:
        """Begin a pass over `batch`; returns the key of its random draws."""
        where = (batch.epoch, batch.step) if isinstance(batch, Batch) else None
        if where is not None and where not in self._passes:
            self._passes = {key: count for key, count in self._passes.items() if key is None}
        number = self._passes.get(where, -1) + 1
        self._passes[where] = number
        return mix((*(where or _NO_LOADER), number)) >> 1

    def passes_before(self, batch: Any) -> int:
        """Return how many passes over a loader's batch were before the one that has begun; 0 for
        other batches.
        """
        return self._passes.get((batch.epoch, batch.step), 0) if isinstance(batch, Batch) else 0

    def state_dict(self) -> dict[str, Any]:
        """Return how many passes over batches of no loader there were, on which their random draws
        depend.
        """
        return {"passes": {key: count for key, count in self._passes.items() if key is None}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned on another worker."""
        self._passes |= state["passes"]
