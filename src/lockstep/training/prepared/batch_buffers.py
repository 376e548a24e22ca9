"""The buffers of a prepared loop's models within a batch: each shard begins with the same, and all
shards count.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from ...parallel.buffers import Buffers
from ...parallel.reducer import Reducer
from ..batch_parts import BatchParts, Shard


class BatchBuffers:
    """The buffers that forward passes change, and what the shards of the running batch have made of
    them.

    Args:
        model: the models that are trained.
        averages: averages of models, which have buffers of their own.
        parts: the shards of each batch.
        is_elastic: whether the bodies of a batch may run again, with the buffers that it began
            with.
    """

    _buffers: Buffers
    _reducer: Reducer

    def __init__(
        self,
        model: nn.Module,
        averages: Sequence[AveragedModel],
        parts: BatchParts,
        is_elastic: bool,
    ) -> None:
        self._model = model
        self._with_averages = nn.ModuleList([model, *(average.module for average in averages)])
        self._parts = parts
        self._is_elastic = is_elastic
        self._of_shards: dict[int, torch.Tensor] = {}
        self._seen: list[int] | None = None  # versions after the step of a body
        self.renew()

    def renew(self) -> None:
        """Take the buffers that the models have now, and the shards that this worker has now."""
        comm = self._parts.comm
        saves = len(self._parts.local) > 1 or self._is_elastic
        self._buffers = Buffers(self._with_averages, comm, saves=saves, at_once=self._parts.exact)
        # of numbers alone
        self._reducer = Reducer(comm, self._parts.virtual_workers, one_pass=False)
        self._of_shards = {}
        self._seen = None

    def begin(self) -> None:
        """Save the buffers before a batch."""
        self._buffers.begin()
        self._of_shards = {}
        self._seen = None

    def restore(self) -> None:
        """Restore them before the next shard, or before the bodies of the batch run again."""
        self._buffers.restore()
        self._seen = None

    def note_step(self) -> None:
        """Note that the step of a body was done, or put off."""
        self._seen = self._versions() if self._is_elastic else None

    def have_changed_since_step(self) -> bool:
        """Return whether passes of the running body have changed them after its step."""
        return self._seen is not None and self._seen != self._versions()

    def _versions(self) -> list[int]:
        return [buffer._version for buffer in self._model.buffers()]

    def of_shard(self, shard: Shard) -> torch.Tensor:
        """Return what the passes of a shard have made of them so far; empty if there are none."""
        self.end_shard(shard)
        return self._of_shards[shard.number] if self._buffers else torch.zeros(0)

    def end_shard(self, shard: Shard) -> None:
        """Keep what the passes of a shard have made of them, unless that was done in its step."""
        number = shard.number
        if number not in self._of_shards:
            self._of_shards[number] = self._buffers.of_shard(
                shard.samples, first=number == 0, last=shard.last
            )

    def end(self, samples: int, left_out: int | None) -> None:
        """Set them after the last shard, equally on every worker.

        Args:
            samples: samples of the global batch.
            left_out: those of this worker's shards that were left out, see `Shard`.
        """
        if not self._buffers:
            return
        zeros = torch.zeros_like(next(iter(self._of_shards.values())))
        self._reducer.begin([])
        for shard in self._parts.local:
            self._reducer.open(shard)
            is_last = shard == self._parts.local[-1]
            missing = left_out if is_last and left_out is not None else 0
            self._reducer.add(
                torch.cat([self._of_shards.get(shard, zeros), zeros.new_full((1,), missing)])
            )
            self._reducer.close()
        self._reducer.finish()
        sums = self._reducer.sums
        assert sums is not None
        self.set(sums[:-1], samples if left_out is None else samples - sums[-1])

    def set(self, sums: torch.Tensor, samples: float | torch.Tensor) -> None:
        """Set them to the sums over all shards, equally on every worker.

        Args:
            sums: of what `of_shard` has returned for each.
            samples: of the global batch.
        """
        if self._buffers:
            self._buffers.set(sums, samples)
