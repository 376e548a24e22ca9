"""A callback that estimates how large a global batch still pays: the gradient noise scale."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ... import arguments
from ...errors import ConfigError
from ...parallel.invariant import Invariant
from ...parallel.strategy import accumulation_dtype
from .base import Callback, Row, TrainingContext

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from ...data.loader import Batch
    from ..step.step_result import StepResult
    from ..step.train_step import TrainStep


class GradientNoise(Callback):
    """Adds the column `noise_scale`: about the global batch size, in samples, up to which a larger
    one pays.

    At a batch size equal to the noise scale, a run needs twice the fewest steps, and twice the
    fewest samples, for the same progress; far below it steps are cheap and noisy, far above it
    samples are wasted. It compares the gradients of the virtual workers with that of the global
    batch, which are there anyway, and costs a norm for each of them in every `every`-th step. It
    grows during a training. The estimate is that of the steps since the last row; it is nan where
    these are too few to tell the gradient from its noise.

    Needs `virtual_workers` of at least 2, and is then the same at any number of workers. For a loss
    that counts something else than samples, such as tokens, samples are assumed to have equally
    many.

    Source: McCandlish, Kaplan, Amodei et al., "An empirical model of large-batch training", 2018,
    section 2.2 and appendix A.1: the simple noise scale, tr(Σ) / |G|², of unbiased estimates of
    both.

    Args:
        every: number of steps between two that are measured.

    Raises:
        ConfigError: for an invalid argument; when `fit` starts, without virtual workers, or where
            their gradients are not separate: with sync_batchnorm, fp16, shard_optimizer or
            strategy="sharded".
    """

    every_rank = True
    adds_columns = ("noise_scale",)

    def __init__(self, every: int = 10) -> None:
        self._every = arguments.whole("every", every, least=1)
        self._hooks: list[RemovableHandle] = []
        # of each parameter's gradient in each virtual worker's pass, in this attempt of the step
        self._squares = torch.zeros(0, 0)
        self._reducer: Any = None  # of that attempt
        self._sums: Any = 0.0  # of the estimates (tr(Σ), |G|²), since the last row
        self._batch: Batch | None = None

    def on_train_start(self, trainer: TrainingContext) -> None:
        """Check that the gradients of virtual workers can be measured."""
        strategy = trainer.step.strategy
        obstacle = ""
        if not isinstance(strategy, Invariant) or strategy.virtual_workers < 2:
            obstacle = "none, or 1"
        elif strategy.sharded_state:
            obstacle = 'strategy="sharded"'
        elif strategy.joint_layers:
            obstacle = "sync_batchnorm, whose passes run at once"
        elif trainer.step.shards_optimizer:
            obstacle = "shard_optimizer, with which no worker has the whole gradient"
        elif trainer.step.precision.name == "fp16":
            obstacle = "fp16, whose gradients are scaled"
        if obstacle:
            expected = (
                "GradientNoise() with virtual_workers of at least 2, each with a pass of its own"
            )
            raise ConfigError("callbacks", expected, found=obstacle)

    def on_train_step_start(self, trainer: TrainingContext, batch: Batch) -> None:
        """Watch the gradients of the step, if it is time."""
        self._stop_watching()
        self._reducer = None
        if trainer.step.steps_done % self._every:
            return
        device = trainer.comm.device
        strategy = trainer.step.strategy
        assert isinstance(strategy, Invariant)
        self._batch = batch
        trained = [
            p
            for group in trainer.optimizer.param_groups
            for p in group["params"]
            if p.requires_grad
        ]
        self._squares = torch.zeros(
            (len(trained), strategy.virtual_workers),
            dtype=accumulation_dtype(device),
            device=device,
        )
        self._hooks = [
            p.register_hook(partial(self._note, strategy, number))
            for number, p in enumerate(trained)
        ]
        measure = partial(self._measure, trainer.step, strategy)
        self._hooks.append(trainer.optimizer.register_step_pre_hook(measure))

    def _note(self, strategy: Invariant, number: int, gradient: torch.Tensor) -> None:
        """Note the square of a parameter's gradient in a backward pass.

        A pass may be repeated, and one of another worker's virtual workers computed here
        (`TrainStep.repeat_shard`): nothing is added up before the update.
        """
        # the workers have changed: the passes before were in vain
        if self._reducer is not strategy.reducer:
            self._reducer = strategy.reducer
            self._squares.zero_()
        self._squares[number, strategy.reducer.shard] = _square(gradient)

    def _measure(
        self, step: TrainStep, strategy: Invariant, optimizer: torch.optim.Optimizer, *_: Any
    ) -> None:
        """Sum up over the workers, as a part of the step, which in an elastic job is repeated with
        it.
        """
        trained = [
            p.grad
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        total = torch.stack([_square(gradient) for gradient in trained]).sum()
        # Sums of one shape at any number of workers, so that they have the same bits.
        local_squares = self._squares.sum(0)
        shards = strategy.reducer.local_shards
        first = shards[0] if shards else 0
        local_squares[:first] = 0.0
        local_squares[first + len(shards) :] = 0.0
        squares = step.comm.allreduce(local_squares)
        step.measured["gradient noise"] = torch.cat([squares, total.to(squares.dtype).reshape(1)])

    def _stop_watching(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def on_train_step_end(self, trainer: TrainingContext, result: StepResult) -> None:
        """Add the estimates of the step that was measured; nothing waits for the device."""
        if not self._hooks or self._batch is None:
            return
        self._stop_watching()
        if result.is_skipped:  # there was no update, before which it is measured
            return
        samples = self._batch.global_size
        # the sizes of `shards.sizes`, made on the device: a copy of them would be waited for
        least, larger = divmod(samples, self._squares.shape[1])
        by_shard = (
            least
            + (torch.arange(self._squares.shape[1], device=self._squares.device) < larger).long()
        )
        has_samples = by_shard > 0
        counts = by_shard.clamp(min=1).to(self._squares.dtype)
        # A pass is that of the sum of its samples' losses divided by `samples`; the step then
        # divides by what counts.
        scale = (samples / counts) * (samples / result.count)
        *_, total = measured = result.measured["gradient noise"]
        squares = measured[:-1] * scale.square() * has_samples
        small = squares.sum() / has_samples.sum()
        inverse = (has_samples / counts).sum() / has_samples.sum()
        if result.grad_norm is not None:  # the gradient was clipped
            total = result.grad_norm.to(squares.dtype).square()
        noise = (small - total) / (inverse - 1 / samples)
        self._sums = self._sums + torch.stack((noise, total - noise / samples))

    def on_row(self, trainer: TrainingContext, row: Row) -> None:
        """Add the column."""
        noise, gradient = self._values()
        is_estimated = noise > 0 and gradient > 0
        row["noise_scale"] = noise / gradient if is_estimated else math.nan
        self._sums = 0.0

    def _values(self) -> list[float]:
        sums = self._sums
        return sums.tolist() if isinstance(sums, torch.Tensor) else [0.0, 0.0]

    def state_dict(self) -> dict[str, Any]:
        """Return the estimates since the last row."""
        return {"sums": self._values()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self._sums = torch.tensor(state["sums"], dtype=torch.float64)


def _square(gradient: torch.Tensor) -> torch.Tensor:
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    norm: torch.Tensor = torch.linalg.vector_norm(gradient.detach(), dtype=dtype)
    return norm.square()
