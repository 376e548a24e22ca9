"""The forward and backward passes of one step, a pair for each of this worker's shards."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ..data.loader import Batch
from ..data.nested import map_tensors, narrow
from ..errors import ConfigError
from ..randomness import seed_shard
from ..shards import bounds
from ..strategies.invariant import Invariant
from ..strategies.meeting import Meeting, run_together
from .losses import LossModule
from .precision import Precision

__all__ = ["ShardPasses"]

# Bytes at which torch's own allocations begin on the CPU; libraries choose kernels by how their input lies in memory.
_ALIGN = 64

Parts = list[tuple[Any, int]]
"""(data, samples) of each of this worker's shards."""


class ShardPasses:
    """Runs the shards of a global batch that are this worker's, and sums what they give over all workers.

    Args:
        strategy: prepared.
        seed: of dropout and the like, with the step and the shard.
    """

    def __init__(self, strategy: Invariant, seed: int) -> None:
        self._strategy, self._seed = strategy, seed

    def run(
        self, loss: LossModule, precision: Precision, batch: Batch, step: int, stop: bool, marks: torch.Tensor
    ) -> torch.Tensor:
        """Make the passes; gradients are then the sums over the global batch, divided by its samples.

        Args:
            loss: the model with its loss.
            precision: of the passes.
            batch: this worker's part of the global batch.
            step: its number.
            stop: whether this worker wants to stop.
            marks: numbers that are summed over the workers too, 1-d.

        Returns:
            (sum of the loss, what it is a sum over, workers that want to stop, sums of marks) over the global batch:
            1-d.

        Raises:
            ConfigError: for a batch that is cut otherwise.
        """
        strategy, reducer = self._strategy, self._strategy.reducer
        parts = self._parts(batch)
        strategy.begin()
        if strategy.meeting_layers:
            self._together(loss, precision, parts, batch.global_size, step, stop, marks)
        else:
            self._one_by_one(loss, precision, parts, batch.global_size, step, stop, marks)
        # Whoever draws numbers between steps draws the same on every worker.
        seed_shard(self._seed, step, strategy.shards, strategy.comm.device)
        assert reducer.sums is not None
        own = 3 + len(marks)
        strategy.end(reducer.sums[own + 1 :], batch.global_size, reducer.sums[own])
        return reducer.sums[:own]

    def _one_by_one(
        self,
        loss: LossModule,
        precision: Precision,
        parts: Parts,
        global_size: int,
        step: int,
        stop: bool,
        marks: torch.Tensor,
    ) -> None:
        strategy, device = self._strategy, self._strategy.comm.device
        reducer, buffers = strategy.reducer, strategy.buffers
        for shard, (data, size) in zip(reducer, parts, strict=True):
            if shard > reducer.here.start:
                buffers.restore()
            seed_shard(self._seed, step, shard, device)
            own = _own(marks)
            scaled = self._forward(loss, precision, (data, size), global_size, own) if size else None
            if shard == reducer.here[-1]:
                self._add(own, stop, marks)
            reducer.add(torch.cat([own, buffers.numbers(size, shard == 0)]))
            if scaled is not None:
                precision.backward(scaled)

    def _together(
        self,
        loss: LossModule,
        precision: Precision,
        parts: Parts,
        global_size: int,
        step: int,
        stop: bool,
        marks: torch.Tensor,
    ) -> None:
        """All shards at once, which wait for each other where a layer looks at all of them; then they are summed."""
        strategy, comm = self._strategy, self._strategy.comm
        reducer, buffers, trained = strategy.reducer, strategy.buffers, strategy.reducer.trained()
        self._check_together(precision, global_size)
        here = [shard for shard, (_, size) in zip(reducer.here, parts, strict=True) if size]

        def passes(shard: int) -> tuple[torch.Tensor, Sequence[torch.Tensor | None]]:
            seed_shard(self._seed, step, shard, comm.device)
            own = _own(marks)
            part = parts[shard - reducer.here.start]
            scaled = self._forward(loss, precision, part, global_size, own)
            numbers = torch.cat([own, buffers.numbers(part[1], shard == 0)])
            # In this very thread, which the others wait for; not into .grad, where all shards' would come together.
            with torch.autograd.set_multithreading_enabled(False):
                return numbers, torch.autograd.grad(scaled, trained, allow_unused=True)

        meeting = Meeting(comm, strategy.shards, here)
        bodies = [partial(passes, shard) for shard in here]
        found = dict(zip(here, run_together(meeting, strategy.meeting_layers, bodies, strategy.threads), strict=True))
        if buffers.others_moved():
            hint = "Leave sync_batchnorm out, or the layer."
            expected = "no layer but batch norm that changes buffers, with sync_batchnorm and shards"
            raise ConfigError("model", expected, found="another one", hint=hint)
        nothing = torch.zeros_like(found[here[0]][0]), [None] * len(trained)
        for shard in reducer:
            numbers, gradients = found.get(shard, nothing)
            if shard == reducer.here[-1]:
                self._add(numbers, stop, marks)
            reducer.add(numbers.clone())
            for p, gradient in zip(trained, gradients, strict=True):
                if gradient is not None:
                    p.grad = gradient if p.grad is None else p.grad.add_(gradient)

    def _add(self, own: torch.Tensor, stop: bool, marks: torch.Tensor) -> None:
        """Put into its last shard's numbers what a worker has to say once."""
        own[2], own[3 + len(marks)] = float(stop), float(self._strategy.news())
        own[3 : 3 + len(marks)] = marks

    def _check_together(self, precision: Precision, global_size: int) -> None:
        shards, size = self._strategy.shards, self._strategy.comm.size
        if precision.name == "fp16":
            raise ConfigError("precision", "fp32 or bf16, with sync_batchnorm and shards", precision.name)
        if (least := bounds(shards, size, size - 1)[0] + 1) > global_size:
            hint = "Use fewer workers, or drop_last=True of the Loader."
            expected = f"at least {least} samples in each batch, one for each worker, with sync_batchnorm and shards"
            raise ConfigError("global_batch", expected, global_size, hint)

    @staticmethod
    def _forward(
        loss: LossModule, precision: Precision, part: tuple[Any, int], global_size: int, own: torch.Tensor
    ) -> torch.Tensor:
        """The part's share of the mean over the global batch; its sum and count are put into `own`."""
        with precision.autocast():
            total, count = loss(*part)
        own[0] = total.detach()
        own[1] = count
        share: torch.Tensor = total * (1 / global_size)
        return share

    def _parts(self, batch: Batch) -> Parts:
        """(data, samples) of each of this worker's shards."""
        reducer, comm = self._strategy.reducer, self._strategy.comm
        if batch.shards != reducer.shards and (batch.shards is not None or comm.size > 1):
            hint = "Make the Loader with the same shards= as the training."
            raise ConfigError(
                "batch", f"one in {reducer.shards} shards", found=f"one in {batch.shards or 'none'}", hint=hint
            )
        cuts = [reducer.part(batch.global_size, shard) for shard in reducer.here]
        sizes = [cut.stop - cut.start for cut in cuts]
        data = batch.data if batch.shards else [narrow(batch.data, cut.start, cut.stop) for cut in cuts]
        return [(map_tensors(_aligned, part), size) for part, size in zip(data, sizes, strict=True)]


def _own(marks: torch.Tensor) -> torch.Tensor:
    """Of a shard: the sum of its loss, what that is a sum over, a wish to stop, marks, buffers that begin to move."""
    return marks.new_zeros(4 + len(marks))


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, or a copy where it lies otherwise in memory than a tensor of its own would."""
    strided = tensor.layout is torch.strided
    return tensor.clone() if strided and tensor.numel() and tensor.data_ptr() % _ALIGN else tensor
