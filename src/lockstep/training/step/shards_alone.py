"""The passes of a step, each on its own outside of the step: the same bits, and no trace in the
training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...data.loader import Batch
from ...errors import ConfigError
from ...parallel.invariant import Invariant
from ...parallel.nested import map_tensors, narrow
from ...parallel.randomness import preserve_generators, seed_shard, seed_torch
from ...parallel.shards import bounds, local_range, mix
from ..pass_effects import preserving_buffers
from .train_step import TrainStep

__all__ = ["ShardAlone", "shards_of", "why_not_alone"]


@dataclass(frozen=True, eq=False)
class ShardAlone:
    """One shard of a global batch, and its pass as the step in progress runs it.

    Random draws, modes, precision and determinism settings are those of the step, and the buffers
    those of its beginning. Generators, buffers and gradients are afterwards as before. It
    communicates with nobody.

    Args:
        step: of the training, which has begun but has not run its passes yet, or has undone them.
        number: of the shard; without virtual workers the rank, whose part of the batch it is.
        data: the collated samples.
        indices: the samples' indices in the data set.
        global_size: samples in the global batch.
        earlier: with gradient accumulation, the data of the worker's passes before this one, whose
            random draws come first.
    """

    step: TrainStep
    number: int
    data: Any
    indices: Sequence[int]
    global_size: int
    earlier: tuple[Any, ...] = ()

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that are trained, by name."""
        return {name: p for name, p in self.step.model.named_parameters() if p.requires_grad}

    def gradients(self) -> tuple[float, float, list[torch.Tensor]]:
        """Return the sum of the loss, what it is a sum over, and the gradient of each of
        `parameters`.

        The gradients are those that the pass adds to the step's sum: of the sum of the loss,
        divided by the number of samples in the global batch; zeros where the pass does not use the
        parameter. Waits for the device.
        """
        parameters = list(self.parameters.values())
        with self.as_in_step():
            total, count = self._loss(self.data, len(self.indices))
            first = torch.full_like(total, 1 / self.global_size, requires_grad=False)
            by_parameter = torch.autograd.grad(total, parameters, first, allow_unused=True)
        gradients = [
            torch.zeros_like(p) if g is None else g
            for p, g in zip(parameters, by_parameter, strict=True)
        ]
        return float(total.detach()), float(count), gradients

    def losses(self, rows: Sequence[int] | None = None) -> torch.Tensor:
        """Return the sum of the loss of each sample, with the graph of one forward pass over all of
        them.

        Args:
            rows: places in the shard of the samples to compute; all of them when None. Batch norm
                and dropout are then those of a pass over these samples alone.

        Returns:
            1-d tensor. A model that computes its loss itself is called for each sample alone.
        """
        data = self.data
        size = len(self.indices)
        if rows is not None:
            data = self._rows(rows)
            size = len(rows)
        loss = self.step.loss.without_comparison()
        with self.as_in_step(), self.step.precision.autocast():
            if loss.is_of_model:
                parts = [narrow(data, place, place + 1, size) for place in range(size)]
                pairs = [loss.forward(self.step.model, part) for part in parts]
            else:
                output, target = loss.forward(self.step.model, data)
                pairs = [
                    (narrow(output, place, place + 1), narrow(target, place, place + 1))
                    for place in range(size)
                ]
            return torch.stack([loss(output, target, 1)[0].reshape(()) for output, target in pairs])

    def _rows(self, rows: Sequence[int]) -> Any:
        """Return the data of some samples, by their places in the shard; a place may be there
        several times.
        """
        chosen = list(rows)
        return map_tensors(lambda tensor: tensor[chosen] if tensor.dim() else tensor, self.data)

    def buffers_norm(self, rows: Sequence[int]) -> float:
        """Return the norm of all floating buffers after a forward pass over some samples, by their
        places.
        """
        with self.as_in_step(), torch.no_grad(), self.step.precision.autocast():
            data = self._rows(rows)
            self.step.loss.without_comparison().forward(self.step.model, data)
            buffers = [buffer for buffer in self.step.model.buffers() if buffer.is_floating_point()]
            return float(torch.nn.utils.get_total_norm(buffers)) if buffers else 0.0

    def _loss(self, data: Any, size: int) -> tuple[torch.Tensor, Any]:
        loss = self.step.loss.without_comparison()
        with self.step.precision.autocast():
            output, target = loss.forward(self.step.model, data)
            total, count = loss(output, target, size)
        return total, count

    @contextmanager
    def as_in_step(self) -> Iterator[None]:
        """Let the block run as this shard's pass does, and leave no trace of it."""
        step = self.step
        device = step.comm.device
        everything = step.strategy.with_loss(step.model)
        with (
            preserve_generators(device),
            preserving_buffers(everything),
            step.strategy.deterministic(),
        ):
            if isinstance(step.strategy, Invariant):
                seed_shard(step.seed, step.steps_done, self.number, device)
            else:
                seed_torch(mix((self.number,), step.key_of_draws()) & 0xFFFFFFFF, device)
            for data in self.earlier:
                with torch.no_grad(), preserving_buffers(everything), step.precision.autocast():
                    step.loss.without_comparison().forward(step.model, data)
            yield


def why_not_alone(step: TrainStep) -> str:
    """Return why the passes of a training cannot be run alone, a clause; "" if they can."""
    strategy = step.strategy
    if strategy.collective_forward or strategy.sharded_state:
        return f"with strategy {type(strategy).__name__.lower()}, a forward pass communicates"
    if isinstance(strategy, Invariant) and strategy.joint_layers:
        return "with sync_batchnorm, the shards of a step are computed together"
    if len(strategy.devices) > 1:
        return "with several devices in a process, a pass is that of all of them"
    return ""


def shards_of(step: TrainStep, batch: Batch) -> list[ShardAlone]:
    """Return this worker's shards of a batch that have samples, in the order in which the step
    computes them.

    Without virtual workers this worker's part of the batch is one, or with gradient accumulation
    several.

    Raises:
        ConfigError: the passes cannot be run alone, see `why_not_alone`.
    """
    why = why_not_alone(step)
    if why:
        raise ConfigError("strategy", "one whose passes can be run alone", found=f"this one: {why}")
    comm = step.comm
    size = batch.global_size
    indices = batch.indices.tolist()
    virtual_workers = step.strategy.virtual_workers
    first, _ = local_range(size, comm.size, comm.rank, virtual_workers)
    numbers = [comm.rank]
    if virtual_workers is not None:
        numbers = list(range(*bounds(virtual_workers, comm.size, comm.rank)))
    shards: list[ShardAlone] = []
    done = 0
    earlier: list[Any] = []
    for place, (data, samples) in enumerate(step.parts(batch)):
        number = numbers[place] if virtual_workers is not None else comm.rank
        before = tuple(earlier) if virtual_workers is None else ()
        end = done + samples
        if virtual_workers is not None:
            low, high = bounds(size, virtual_workers, number)
            done = low - first
            end = high - first
        if samples:
            shards.append(ShardAlone(step, number, data, indices[done:end], size, before))
        earlier.append(data)
        done = end
    return shards
