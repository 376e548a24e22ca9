"""One optimizer update from one global batch, made by all workers together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..data.loader import Batch
from ..errors import ConfigError, DataError, DivergedError
from ..randomness import seed_torch
from ..recorder import note_samples
from ..shards import mix
from ..strategies.base import Strategy
from .arguments import check_step, choose, learning_rate_factor, parameters_of
from .formats import REPLICA_CHECK
from .losses import Forward, LossFn, LossModule, LossSum
from .passes import make_passes
from .precision import Precision, clip
from .replica_check import ReplicaCheck
from .schedules import Schedule
from .sums import raise_together

__all__ = ["StepResult", "TrainStep"]

_RANDOM = 2  # the purpose of this key, beside `lockstep.data.loader`'s


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step gave; the same on every worker.

    Attributes:
        step: the number of this step, from 0.
        loss: 0-dim tensor on the device, the mean over the global batch.
        stop: 0-dim tensor on the device, above zero when some worker asked to stop.
        learning_rate: that of the first parameter group; a tensor where it is one on a device.
        count: 0-dim tensor on the device, what `loss` is the mean over: samples, or what the loss function counts.
            Means of several steps are weighted by it.
        samples: of the global batch, where gradients have been taken for those of a mean over them; None where `count`
            was looked at.
        marks: 1-d, the workers' sums of what `replicas` compares; None where that has been done.
        replicas: what compares the workers' hyperparameters and weights.
    """

    step: int
    loss: torch.Tensor
    stop: torch.Tensor
    learning_rate: float | torch.Tensor
    count: torch.Tensor
    samples: int | None = None
    marks: torch.Tensor | None = None
    replicas: ReplicaCheck | None = None

    @property
    def lr(self) -> float:
        """The learning rate of the first parameter group; waits for the device where it is a tensor there."""
        return float(self.learning_rate)

    def check(self) -> None:
        """See that the loss is finite, and that the workers are alike; waits for the device. Called by all of them.

        Raises:
            DivergedError: where it is not.
            DataError: where it is a mean over nothing, as all labels of the global batch are ignored.
            ConfigError: where some workers' losses were means over samples, and others' over something else.
            MismatchError: where the workers have other hyperparameters or weights.
        """
        if self.marks is not None and self.replicas is not None:
            self.replicas.settle(self.step, self.marks.tolist())
        if not torch.isfinite(self.loss):
            if self.count == 0:
                raise DataError(
                    f"step {self.step}: expected a global batch with something that the loss counts, got only e.g. "
                    "labels that are ignored. Use a larger global batch, or leave such samples out of the data set."
                )
            raise DivergedError(
                f"the loss is {float(self.loss)} at step {self.step} with learning rate {self.lr:g}. "
                "Lower the learning rate, warm it up, or clip the gradients."
            )
        if self.samples is not None and self.count != self.samples:
            hint = "Return (sum, count) for every batch, or a mean over the samples for every batch."
            got = f"one over {float(self.count):g} of {self.samples} samples at step {self.step}"
            raise ConfigError("loss_fn", "a mean over the same on all workers", found=got, hint=hint)


class TrainStep:
    """Calls the model on this worker's part of a batch and updates it with everyone's gradients.

    The loss and the gradient are means over the *global* batch, weighted by samples, whatever part of it a worker has.
    A parameter that takes no part in a step has a gradient of zeros. Parameters may be frozen and unfrozen between
    steps, on all workers alike. The model is left in the mode (training or evaluation) that it is in.

    Args:
        model: moved to the worker's device; rank 0's values are used by all.
        optimizer: over parameters of `model`; one whose step needs a closure, such as LBFGS, cannot be used.
        loss_fn: see `lockstep.training.losses.LossFn`.
        strategy: how the model is spread over the workers; data parallelism over those of `init()` when None.
        precision: "fp32", "bf16" or "fp16".
        accumulate: passes into which a worker's part is cut to save memory; changes nothing else.
        clip_norm: upper bound of the 2-norm of the whole gradient.
        schedule: learning-rate factor by step; None leaves the learning rate to the user.
        seed: of dropout and the like, with the step and the rank.
        forward: how data becomes output and target, see `lockstep.training.losses.Forward`.
        shards: make the same bits at any number of workers: a global batch is cut into so many shards, each with a
            pass of its own, see `lockstep.strategies.invariant`; True is 8. Batches are those of a `Loader` with as
            many. Dropout is keyed by the shard then, not by the rank.
        threads: with shards, within an operation on the CPU; 1 when None.
        replica_check: steps between two looks at a few weights of all workers, see
            `lockstep.training.replica_check`; 0 compares neither weights nor hyperparameters.

    Raises:
        ConfigError: for values that cannot be used.
        MismatchError: when the workers' models differ.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: LossFn,
        *,
        strategy: Strategy | None = None,
        precision: str = "fp32",
        accumulate: int = 1,
        clip_norm: float | None = None,
        schedule: Schedule | None = None,
        seed: int = 0,
        forward: Forward | None = None,
        shards: int | None = None,
        threads: int | None = None,
        replica_check: int = REPLICA_CHECK,
    ) -> None:
        check_step(model, optimizer, accumulate, clip_norm, schedule)
        self.model, self.optimizer, self.schedule = model, optimizer, schedule
        self.strategy = choose(strategy, shards, threads, accumulate)
        self.comm = self.strategy.comm
        self.precision = Precision(precision, self.comm.device)
        self._clip_norm, self._seed = clip_norm, seed
        self.steps_done = 0
        self.strategy.check(optimizer, precision)
        self._prepare()
        loss = LossSum(loss_fn, self.comm.device)
        self._loss, self._loss_checked = LossModule(model, loss, forward, in_step=self.strategy.in_step), False
        self._module = self.strategy.wrap(self._loss)
        self._passes = make_passes(self.strategy, seed, accumulate)
        self._trained = [p.requires_grad for p in self._every]
        self._parameters: list[nn.Parameter] = []
        self._take_groups()
        self._replicas = ReplicaCheck(
            self.comm,
            model,
            optimizer,
            every=replica_check,
            weights=not self.strategy.in_parts,
            exact=self.strategy.shards is not None,
        )

    def _prepare(self) -> None:
        self.strategy.prepare(self.model)
        self.strategy.adopt(self.optimizer)
        self._every = list(self.model.parameters())

    def __call__(self, batch: Batch) -> torch.Tensor:
        """Make one step; returns the loss, a 0-dim tensor, the mean over the global batch."""
        return self.run(batch).loss

    def run(self, batch: Batch, stop: bool = False) -> StepResult:
        """Make one step, and learn whether any worker wants to stop.

        Raises:
            DivergedError: on the CPU, before anything is updated, when the loss is not finite. On other devices
                this would wait for the device at every step; call `StepResult.check` when it suits.
            DataError: likewise, when the loss counts nothing in the whole global batch.
            MismatchError: likewise, when the workers have other hyperparameters or weights; on every worker.
            ConfigError: when output, labels and loss do not fit, or a batch norm gets a single value; at the first step
                also when the loss returns what is no mean over samples, on every worker, before anything is updated.
        """
        with self.strategy.determined():
            return self._run(batch, stop)

    def _run(self, batch: Batch, stop: bool) -> StepResult:
        lr = self._begin()
        marks = self._replicas.marks(self.steps_done)
        totals = self._passes.run(self._module, self.precision, batch, self.steps_done, stop, marks)
        if not self._loss_checked:
            raise_together(self._loss.check(self.precision.autocast), self.comm)
            self._loss_checked = True
        loss_sum, count, stops = totals[:3].unbind()
        on_cpu = self.comm.device.type == "cpu"
        # To ask whether the loss counts other things than samples is free on the CPU; elsewhere it would wait for the
        # device, but where it is known. A wrong guess is found by `check`.
        samples = batch.global_size if self._loss.counts_samples and not on_cpu else None
        alike = (totals[3:], self._replicas)
        result = StepResult(self.steps_done, loss_sum / count, stops, lr, count, samples, *alike)
        if on_cpu:
            result.check()
        correction = batch.global_size / count
        self._update(None if samples is not None or (on_cpu and correction == 1) else correction)
        self.steps_done += 1
        note_samples(batch.size)
        return result

    def _take_groups(self) -> None:
        """Look at the optimizer's groups, again where the user has added to them."""
        groups = self.optimizer.param_groups
        if sum(len(group["params"]) for group in groups) == len(self._parameters):
            return
        self._parameters = parameters_of(self.model, self.optimizer)
        for group in groups:
            group.setdefault("initial_lr", group["lr"])
        if len(list(self.model.parameters())) != len(self._every):  # a layer that was not there before
            self._prepare()

    def check_replicas(self) -> None:
        """Compare all hyperparameters and all weights of the workers, bit by bit; called by all of them.

        Raises:
            MismatchError: on every worker, naming what differs, on which rank, and the values.
        """
        self._replicas.compare()

    def _begin(self) -> float | torch.Tensor:
        self._take_groups()
        if (trained := [p.requires_grad for p in self._every]) != self._trained:
            # What reduces gradients counts on the parameters that there were when it was made.
            self._module, self._trained = self.strategy.wrap(self._loss), trained
        seed_torch(mix((self._seed, _RANDOM, self.steps_done, self.comm.rank)) & 0xFFFFFFFF, self.comm.device)
        self.optimizer.zero_grad(set_to_none=True)
        if self.schedule is not None:
            factor = learning_rate_factor(self.schedule, self.steps_done)
            for group in self.optimizer.param_groups:
                group["lr"] = group["initial_lr"] * factor
        lr = self.optimizer.param_groups[0]["lr"]
        # A tensor on a device is not looked at here, and may be changed in place.
        on_device = isinstance(lr, torch.Tensor) and lr.device.type != "cpu"
        return lr.detach().clone() if on_device else float(lr)

    def _update(self, correction: torch.Tensor | None) -> None:
        _fill(self._parameters)
        self.precision.unscale(self.optimizer)
        if correction is not None:
            _multiply([p.grad for p in self._parameters if p.grad is not None], correction)
        if self._clip_norm is not None:
            clip(self._parameters, self._clip_norm)
        self.precision.step(self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Steps made and the gradient scale; model and optimizer have their own."""
        return {"steps_done": self.steps_done, "precision": self.precision.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved step."""
        self.steps_done = int(state["steps_done"])
        self.precision.load_state_dict(state["precision"])


def _fill(parameters: list[nn.Parameter]) -> None:
    # On one worker torch leaves None where a parameter took no part, and an optimizer passes it by; among several it
    # may have taken part on another worker, and its gradient is a sum. Zero is the gradient in both cases, so that
    # weight decay and momentum go on alike.
    for p in parameters:
        if p.grad is None and p.requires_grad:
            p.grad = torch.zeros_like(p)


def _multiply(gradients: list[torch.Tensor], factor: torch.Tensor) -> None:
    if factor.device.type == "cpu":
        torch._foreach_mul_(gradients, float(factor))
        return
    for dtype in {gradient.dtype for gradient in gradients}:
        # A factor of another dtype than the gradients takes them one by one; half formats are too coarse for it.
        own = factor.to(torch.promote_types(dtype, torch.float32))
        torch._foreach_mul_([gradient for gradient in gradients if gradient.dtype == dtype], own)
