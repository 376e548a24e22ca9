"""The training step: one optimizer update from one global batch, computed by all workers
together.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import Never

from ... import arguments, other_names
from ...communicator import Communicator
from ...data.loader import Batch
from ...errors import ConfigError, LockstepError, TransportError, counted, unexpected_argument
from ...flight_recorder import named, note_samples, note_step
from ...parallel.distributed import Distributed
from ...parallel.fingerprints import mix_bits
from ...parallel.invariant import Invariant
from ...parallel.nested import split, tensors_of
from ...parallel.optimizer_parts import check_whole, refuse_other_parts
from ...parallel.randomness import seed_torch
from ...parallel.replicas_strategy import Replicas
from ...parallel.shards import local_range, mix
from ...parallel.strategy import Strategy, Sums
from ...parallel.sync_batchnorm import convert
from ...parallel.unchanged_parameters import UnchangedParameters
from ..check_schedule import is_due
from ..divided_batches import FirstBatch, describe_division
from ..divided_update import update_by_owners
from ..errors_on_all import call_on_all, raise_on_all
from ..formats import REPLICA_CHECK
from ..losses.loss import Forward, Loss, LossFn, LossModule
from ..losses.mean_check import raise_problem
from ..model_state import StateOfStep
from ..recovery import STOP, TrainingState, recovery_of
from ..replica_check import ReplicaCheck
from ..schedules import Schedule, learning_rate_factor
from ..torch_schedulers import rates_of
from .finite_weights import FiniteWeights
from .guards import Decision, Guard, PendingStep
from .loss_scale import agree_on_loss_scale
from .model_changes import ModelChanges, are_same
from .out_of_memory import explained, is_out_of_memory
from .precision import Number, Precision, clip, scale_gradients
from .separable_updates import check_separable
from .step_arguments import (
    check_functions,
    check_step,
    make_scheduler,
    parameters_of,
    resolve_strategy,
)
from .step_result import StepNumbers, StepResult
from .torch_calls import clear_gradients
from .totals import StepInputs, as_float, make_totals
from .virtual_worker_passes import ShardPasses

__all__ = ["DIGEST_BITS", "Passes", "TrainStep", "make_passes"]


class Passes(Protocol):
    """The forward and backward passes of a step."""

    @property
    def gives_means(self) -> bool:
        """Whether gradients are those of the mean over what the loss counts already, and need no
        correction.
        """

    @property
    def averaged_over(self) -> int:
        """The number of workers over which gradients are averaged; 1 if they are summed."""

    def parts(self, batch: Batch) -> list[tuple[Any, int]]:
        """Return (data, samples) of each of this worker's passes."""

    def run(self, step: StepInputs) -> Sums:
        """Run the passes; gradients are then sums over the global batch, divided by its number of
        samples.

        With fp16 they are scaled otherwise, see `Precision.correction`.

        Returns:
            Totals over the global batch: (sum of the loss, count, sum of the requests, *marks).
        """


def make_passes(
    strategy: Strategy, seed: int, gradient_accumulation_steps: int, precision: Precision
) -> Passes:
    """Return the passes for `strategy`; `seed` is that of dropout."""
    if isinstance(strategy, Invariant):
        return ShardPasses(strategy, seed)
    if _is_alone(strategy):
        if strategy.comm.device.type == "cpu":
            return AlonePasses(gradient_accumulation_steps)
        if gradient_accumulation_steps == 1 and precision.name != "fp16":
            return SinglePass()
    return AccumulatedPasses(strategy, gradient_accumulation_steps)


def _is_alone(strategy: Strategy) -> bool:
    """Return whether a single worker trains with a strategy that has no part in its passes.

    An elastic job may get more workers.
    """
    comm = strategy.comm
    return type(strategy) is Distributed and type(comm) is Communicator and comm.size == 1


def _parts(batch: Batch, passes: int) -> list[tuple[Any, int]]:
    """Return (data, samples) of each of so many passes over a worker's part of a batch."""
    size = batch.size if batch.collated is None else batch.collated[0]
    return split(batch.data, size, passes)


class AlonePasses:
    """The passes of a single worker on the CPU: nothing is sent, and all numbers are on the host.

    Args:
        gradient_accumulation_steps: number of passes.
    """

    averaged_over = 1
    gives_means = False

    def __init__(self, gradient_accumulation_steps: int) -> None:
        self._accumulation_steps = gradient_accumulation_steps

    def parts(self, batch: Batch) -> list[tuple[Any, int]]:
        """Return (data, samples) of each of so many passes over the whole batch."""
        return _parts(batch, self._accumulation_steps)

    def run(self, step: StepInputs) -> Sums:
        """Run the passes; gradients are then sums over the batch, divided by its number of samples.

        Returns:
            Totals: (sum of the loss, count, the requests).
        """
        loss_sum = counted = 0.0
        loss = step.loss
        precision = step.precision
        factor = precision.pass_scale(step.batch.global_size)
        for data, size in self.parts(step.batch):
            total, count = precision.run_forward(loss.on, loss.model, data, size)
            loss_sum += as_float(total)
            counted += as_float(count)
            precision.backward(total, factor)
        return loss_sum, counted, step.requests


class SinglePass:
    """The pass of a single worker over its whole batch on another device: nothing is sent, and
    nothing is read.

    What the loss counts is known before the backward pass, which begins with the mean's gradient,
    as in a loop by hand.
    """

    averaged_over = 1
    gives_means = True

    def parts(self, batch: Batch) -> list[tuple[Any, int]]:
        """Return (data, samples) of the one pass."""
        return _parts(batch, 1)

    def run(self, step: StepInputs) -> Sums:
        """Run the pass; gradients are then those of the mean over what the loss counts.

        Returns:
            Totals: (sum of the loss, count, the requests), on the device.
        """
        loss = step.loss
        precision = step.precision
        ((data, size),) = self.parts(step.batch)
        total, count = precision.run_forward(loss.on, loss.model, data, size)
        if isinstance(count, torch.Tensor) and count.is_cpu:
            count = count.item()
        precision.backward_of_mean(total, count)
        return total.detach(), count, step.requests


class AccumulatedPasses:
    """One pass over this worker's part of a batch, or several to save memory; the last one reduces
    the gradients.

    Args:
        strategy: the prepared strategy.
        gradient_accumulation_steps: number of passes.
    """

    gives_means = False

    def __init__(self, strategy: Strategy, gradient_accumulation_steps: int) -> None:
        self._strategy = strategy
        self._accumulation_steps = gradient_accumulation_steps

    @property
    def averaged_over(self) -> int:
        """The number of workers: reductions of DDP and FSDP average over them."""
        return self._strategy.comm.size

    def parts(self, batch: Batch) -> list[tuple[Any, int]]:
        """Return (data, samples) of each of so many passes over this worker's part of a batch."""
        return _parts(batch, self._accumulation_steps)

    def run(self, step: StepInputs) -> Sums:
        """Run the passes; in the last one gradients are reduced, and the totals summed.

        Returns:
            Totals over the global batch: (sum of the loss, count, sum of the requests, *marks).
        """
        strategy = self._strategy
        precision = step.precision
        global_size = step.batch.global_size
        parts = self.parts(step.batch)
        # The reduction averages over workers; the mean over samples needs the sum.
        factor = precision.pass_scale(global_size, self.averaged_over)
        totals = make_totals(step.marks)
        for index, (data, size) in enumerate(parts):
            last = index == len(parts) - 1
            with strategy.gradient_sync(now=last):
                total, count = precision.run_forward(step.loss, data, size)
                totals.add(total, count)
                if last:
                    with named(strategy.totals_name):
                        weight = sum(size for _, size in parts) / global_size
                        own_totals = partial(totals.tensor, step.requests)
                        add_up = step.batch.collated is None
                        finish = strategy.reduce_totals(own_totals, weight, add_up=add_up)
                with named(strategy.backward_name):
                    precision.backward(total, factor)
        return finish()


_RANDOM = 2  # the purpose of the seed's key, see `lockstep.parallel.randomness`


class TrainStep:
    """Runs the model on this worker's part of a batch, and updates it with the gradients of all
    workers.

    The loss and the gradient are means over the *global* batch, weighted by samples, independent of
    the workers' parts. A parameter that a step does not use has a gradient of zeros. Parameters may
    be frozen and unfrozen between steps, in the same way on all workers. The mode of the model
    (training or evaluation) is not changed.

    Args:
        model: the model; moved to the worker's device, with rank 0's values on all workers.
        optimizer: over parameters of `model`; optimizers whose step needs a closure, such as LBFGS,
            are not supported.
        loss_fn: (output, target) → the mean over the samples, one value for each, or (sum, count),
            see `lockstep.training.losses.loss.LossFn`. When None, the model computes its loss
            itself.
        strategy: how the model is distributed over the workers; data parallelism over those of
            `init()` when None.
        precision: "fp32", or that of the forward passes under autocast: "bf16" or "fp16" (with a
            scaled loss). Weights and optimizer stay in float32.
        gradient_accumulation_steps: number of passes over a worker's part, to save memory. Each
            draws its own dropout masks, and batch norm has the statistics of each; otherwise it
            changes nothing but rounding.
        max_grad_norm: maximum 2-norm of the whole gradient; infinity measures it without clipping.
        schedule: number of steps done → factor of the learning rate, such as those of
            `make_schedule`; when None, the learning rate is not changed by it.
        scheduler: a scheduler of `torch.optim.lr_scheduler`, of `optimizer`, which is stepped here,
            once for each step of all workers together, or once for each epoch. Its state is part of
            `state_dict`.
        scheduler_interval: "step" or "epoch", at the ends of the epochs of `Trainer.fit`; when
            None, "epoch" for `ReduceLROnPlateau`, and "step" for all others.
        scheduler_metric: for `ReduceLROnPlateau`: the column of `Trainer.history` that it gets;
            when None, "val_loss", or "train_loss" without validation data.
        seed: the seed of dropout and the like, keyed with the step and the rank.
        forward: (model, data) → (output, target), for data that is no pair (inputs, targets), see
            `lockstep.training.losses.loss.Forward`.
        virtual_workers: compute what so many workers compute, with the same bits at any number of
            workers: a global batch is cut into as many shards, each with its own pass. The batches
            come from a `Loader` with the same number. Dropout is then keyed by the shard, not by
            the rank.
        threads: with virtual workers, threads within an operation on the CPU; 1 when None.
        replica_check: steps between two comparisons of sampled weights among workers; 0 compares
            neither weights nor hyperparameters.
        sync_batchnorm: batch norm has the statistics of the global batch; its layers are replaced
            in the model, with the same parameters. With virtual workers on the CPU only.
        shard_optimizer: divide the optimizer's state among the workers: each updates the tensors
            that it owns, and gives their values to the others, with the same bits as without and
            less memory; with virtual workers each also has the summed gradients of its tensors
            alone. After a step a worker has no gradients, and ``optimizer.state_dict()`` is a part
            of the state; `full_optimizer_state` returns all of it.

    Raises:
        ConfigError: for invalid arguments; with `shard_optimizer`, for an optimizer whose update of
            one tensor depends on others, sparse gradients, and strategies other than data
            parallelism.
        MismatchError: if the workers' models differ.
        TypeError: for an argument of another name; the error says what it is here.

    Examples:
        >>> import torch, lockstep
        >>> train, _ = lockstep.data.digits()
        >>> model = lockstep.models.mlp()
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        >>> step = lockstep.TrainStep(model, optimizer, torch.nn.CrossEntropyLoss())
        >>> with lockstep.Loader(train, global_batch_size=64) as loader:
        ...     for batch in loader.epoch(0):
        ...         loss = step(batch)  # the mean over the global batch, the same on every worker
        >>> loss.shape, step.steps_done
        (torch.Size([]), 23)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: LossFn = None,
        *,
        strategy: Strategy | None = None,
        precision: str = "fp32",
        gradient_accumulation_steps: int = 1,
        max_grad_norm: float | None = None,
        schedule: Schedule | None = None,
        scheduler: LRScheduler | None = None,
        scheduler_interval: str | None = None,
        scheduler_metric: str | None = None,
        seed: int = 0,
        forward: Forward | None = None,
        virtual_workers: int | None = None,
        threads: int | None = None,
        replica_check: int = REPLICA_CHECK,
        sync_batchnorm: bool = False,
        shard_optimizer: bool = False,
        **unknown: Never,
    ) -> None:
        if unknown:
            name = next(iter(unknown))
            raise unexpected_argument(
                "TrainStep",
                name,
                other_names.in_training(name, "TrainStep"),
                arguments.keyword_names(TrainStep),
            )
        check_step(model, optimizer, gradient_accumulation_steps, max_grad_norm, schedule)
        check_functions(loss_fn, forward)
        seed = arguments.whole("seed", seed)
        arguments.flag("sync_batchnorm", sync_batchnorm, none="False")
        arguments.flag("shard_optimizer", shard_optimizer, none="False")
        self.model = model
        self.optimizer = optimizer
        self.schedule = schedule
        self.scheduler = make_scheduler(
            scheduler, optimizer, schedule, scheduler_interval, scheduler_metric
        )
        self.strategy = resolve_strategy(
            strategy, virtual_workers, threads, gradient_accumulation_steps
        )
        self.comm = self.strategy.comm
        self.recovery = recovery_of(self.comm, self.strategy.can_regroup)
        # what the workers have alike between two trainings, with that of the run which it is for
        self.shared_state: Callable[[], TrainingState] | None = None
        self.precision = Precision(precision, self.comm.device)
        self._max_grad_norm = max_grad_norm
        self.seed = seed
        self._key = mix((seed, _RANDOM))
        self.steps_done = 0
        # by hooks of the step in progress, for its result
        self.measured: dict[str, torch.Tensor] = {}
        self.strategy.check(optimizer, precision)
        self.shards_optimizer = shard_optimizer
        if shard_optimizer:
            self.strategy.shard_optimizer(optimizer)
            check_separable(optimizer)
        if not self.strategy.divides_optimizer:
            check_whole(optimizer)
        refuse_other_parts(optimizer)
        if sync_batchnorm:
            _synchronise_batch_norm(model, self.strategy)
        self.loss = Loss(loss_fn, self.comm.device, forward, model)
        self.strategy.loss_modules = self.loss.modules
        self._prepare()
        self._loss = LossModule(
            model, self.loss, collective_forward=self.strategy.collective_forward
        )
        self.finite_weights = FiniteWeights(model, self.comm)
        self._has_described = False
        self._module = self.strategy.wrap(self._loss)
        self._accumulation_steps = gradient_accumulation_steps
        self._passes = make_passes(self.strategy, seed, gradient_accumulation_steps, self.precision)
        self._trained = [p.requires_grad for p in self._changes.parameters]
        self._parameters: list[nn.Parameter] = []
        self._refresh_param_groups()
        self._guards: tuple[Guard, ...] = ()
        self._replicas = ReplicaCheck(
            self.comm,
            model,
            optimizer,
            every=replica_check,
            weights=not self.strategy.sharded_state,
            exact=self.strategy.virtual_workers is not None,
        )

    def _prepare(self) -> None:
        self.strategy.prepare(self.model)
        self.loss.modules.synchronise(self.comm)
        self.strategy.update_optimizer(self.optimizer)
        self._changes = ModelChanges(self.model)
        self._unchanged = (
            UnchangedParameters(self.model) if type(self.strategy) is Distributed else None
        )

    @property
    def guards(self) -> tuple[Guard, ...]:
        """The guards, which are asked in every step, in order, on every worker; none by default."""
        return self._guards

    @guards.setter
    def guards(self, guards: Sequence[Guard]) -> None:
        """Set the guards, between two steps, on every worker alike.

        Raises:
            ConfigError: for one that may undo a step, with a strategy that cannot.
        """
        if any(guard.may_undo for guard in guards):
            if not self.strategy.can_regroup:
                expected = (
                    "a strategy whose steps can be undone, with a guard that skips or repeats steps"
                )
                hint = "Use strategy='distributed', with or without virtual_workers."
                raise ConfigError(
                    "strategy", expected, found=type(self.strategy).__name__.lower(), hint=hint
                )
            self.strategy.allow_undo(self.model)
        self._guards = tuple(guards)

    def __call__(self, batch: Batch) -> torch.Tensor:
        """Run one step; returns the loss, a 0-dim tensor, the mean over the global batch."""
        return self.run(batch).loss

    def run(self, batch: Batch, stop: bool = False) -> StepResult:
        """Run one step; called by all workers.

        Args:
            batch: this worker's part of the global batch.
            stop: whether this worker requests a stop; `StepResult.stop` tells all workers.

        Raises:
            DivergedError: on the CPU, before the update, if the loss is not finite. On other
                devices the check would wait for the device at every step; call `StepResult.check`
                instead.
            DataError: likewise, if the loss counts nothing in the whole global batch.
            MismatchError: likewise, on every worker, if the workers' hyperparameters or weights
                differ.
            ConfigError: if output, labels and loss do not fit, or a batch norm gets a single value;
                also on every worker, before the update, if a comparison shows that the loss is not
                a mean over samples, see `lockstep.training.losses.mean_check`.
            OutOfMemoryError: the memory of this worker's device is full; says what to try.
        """
        self.follow()
        return self.recovery.run(self._attempt, batch, stop)

    def follow(self) -> None:
        """Adapt to the workers that there are now, if they have changed in another training of an
        elastic job; called by all workers.

        Raises:
            ConfigError, LockstepError: see `Recovery.follow`.
        """
        if self.recovery.is_behind:
            self.recovery.follow(self.shared_state or partial(StateOfStep, self))

    def _attempt(self, batch: Batch, stop: bool) -> StepResult:
        """Run one step; in an elastic job, an attempt that the loss of a worker may end."""
        batch = self.recovery.part_of(batch)
        step = self.steps_done
        try:
            with self.strategy.deterministic():
                return self._run(batch, STOP * stop + self.recovery.requests)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            samples = counted(batch.global_size, "sample")
            what = f"step {step}, with {batch.size:,} of the {samples} of the global batch"
            raise explained(error, self.comm, what, self._less_memory()) from error

    def _less_memory(self) -> str:
        """Return what makes a step need less memory."""
        if self.strategy.virtual_workers is None:
            number = 2 * self._accumulation_steps
            same = (
                "" if describe_division(self.model, 1, number, 1) else ", which changes no result"
            )
            passes = f"gradient_accumulation_steps={number}{same}"
        else:
            passes = "more virtual workers, each of which computes its part in a pass of its own"
        lower = "" if self.precision.name != "fp32" else ', precision="bf16"'
        return f"Try {passes}{lower}, a smaller global batch, or more workers."

    def regroup(self) -> None:
        """Adapt to the communicator's new workers, after a step or in the place of one that was not
        completed.

        All of them have the same state by now.
        """
        if self.strategy.shards is not None:
            self.strategy.shards.regroup(self.optimizer)
        self.strategy.regroup(self.model)
        self._module = self.strategy.wrap(self._loss)
        self._passes = make_passes(
            self.strategy, self.seed, self._accumulation_steps, self.precision
        )
        self._trained = [p.requires_grad for p in self._changes.parameters]
        self._replicas.regroup()
        if not self.recovery.is_updating:  # else the step in progress is completed
            self.measured = {}
        for guard in self._guards:
            guard.on_regroup()

    def _run(self, batch: Batch, requests: float) -> StepResult:
        if self._guards:
            return self._run_with_guards(batch, requests)
        lr, totals, problem, _ = self._run_passes(batch, requests)
        result = self._result(lr, totals, problem, batch)
        self._finish_gradients(self._correction(batch.global_size, result))
        norm = self._update()
        return self._completed(result, norm, batch)

    def _run_with_guards(self, batch: Batch, requests: float) -> StepResult:
        """Run a step in which guards decide, once the gradients are reduced, whether its update is
        made.
        """
        may_undo = any(guard.may_undo for guard in self._guards)
        versions = _versions_of(batch) if may_undo else []
        for guard in self._guards:
            guard.before_passes(self.steps_done, batch)
        for attempt in itertools.count():
            if may_undo:
                self.strategy.begin_step()
            lr, totals, problem, samples = self._run_passes(batch, requests)
            if self.comm.device.type == "cpu":
                totals = totals.tolist() if isinstance(totals, torch.Tensor) else totals
                if not totals[1]:
                    # raises the error of a loss that counts nothing
                    self._checked_result(lr, totals, problem)
            loss_sum, count, stops = totals[:3]
            numbers = StepNumbers(loss_sum / count, count, stops)
            seen = StepResult(self.steps_done, numbers, lr, self._samples_of(batch))
            self._finish_gradients(self._correction(batch.global_size, seen))
            pending = PendingStep(
                step=self.steps_done,
                batch=batch,
                loss=seen.on_hand.loss,
                count=count,
                learning_rate=lr,
                model=self.model,
                layers_with_buffers=self._changes.layers_with_buffers(),
                gradients=[p.grad for p in self._parameters if p.grad is not None],
                sharded_norms=self._sharded_norms(),
                may_overflow=self.precision.name == "fp16",
                attempt=attempt,
                samples=samples,
                has_changed_batch=lambda: versions != _versions_of(batch),
            )
            try:
                pending.decision = self._ask_guards(pending)
                if pending.decision is Decision.REPEAT:
                    self._abandon()
                    if versions != _versions_of(batch):
                        raise _changed_batch()
                    continue
                result = self._result(lr, totals, problem, batch, pending.decision is Decision.SKIP)
            except TransportError:  # in an elastic job the step is run again by other workers
                raise
            except LockstepError as error:
                pending.error = error
                for guard in self._guards:
                    guard.after_step(pending)
                raise
            break
        norm = None
        if result.is_skipped:
            self._abandon()
        else:
            norm = self._update()
        result = self._completed(result, norm, batch)
        for guard in self._guards:
            guard.after_step(pending)
        return result

    def _ask_guards(self, pending: PendingStep) -> Decision:
        """Return the strongest decision of the guards; after one that repeats the step, the others
        are not asked.
        """
        strongest = Decision.GO
        for guard in self._guards:
            decision = guard.before_update(pending)
            if decision is Decision.REPEAT:
                return decision
            if decision is Decision.SKIP:
                strongest = decision
        return strongest

    def _abandon(self) -> None:
        """Undo what the passes of a step have changed, of which no update is made."""
        self.strategy.abandon_step()
        self.precision.abandon_step()

    def key_of_draws(self) -> int:
        """Return the key of the random draws of the step in progress; without virtual workers the
        rank follows.
        """
        return mix((self.steps_done,), self._key)

    def _run_passes(self, batch: Batch, requests: float) -> tuple[Number, Sums, Any, Number | None]:
        """Run the passes of a step.

        Returns:
            The learning rate, the totals, what is wrong with the loss, and the digest of the
            samples' numbers.
        """
        key = self.key_of_draws()
        lr = self._begin(key)
        unchanged = self._unchanged if self.comm.size > 1 and is_due(self.steps_done) else None
        if unchanged is not None:
            unchanged.note()
        marks = self._replicas.marks(self.steps_done)
        is_compared = self.loss.expect(self.steps_done)
        # Joint passes refuse fp16 themselves: there is no scale to agree upon.
        joint = isinstance(self.strategy, Invariant) and self.strategy.joint_layers
        if self.precision.is_new and not joint:
            parts = self._passes.parts(batch)
            agree_on_loss_scale(self.precision, self._loss, self.strategy, parts, batch.global_size)
        first = self._first_batch(batch)
        versions = self.loss.modules.versions() if len(self.strategy.devices) > 1 else None
        samples: Number | None = None
        if self._guards and marks.dtype is torch.float64:
            samples = digest_of_samples(batch, self.comm)
            marks = torch.cat([marks, marks.new_full((1,), samples)])
        totals = self._passes.run(
            StepInputs(self._module, self.precision, batch, self.steps_done, requests, marks)
        )
        if samples is not None and len(totals) > 3:  # else this worker is the only one
            samples = totals[-1]
            totals = totals[:-1]
        if unchanged is not None:
            unchanged.check()
        if first is not None:
            first.tell()
        if self.strategy.virtual_workers is None:
            # The passes have drawn by rank. What the program draws after the step is the same on
            # every worker.
            seed_torch(key & 0xFFFFFFFF, self.comm.device)
        if versions is not None and versions != self.loss.modules.versions():
            raise _changed_by_replicas()
        problem = self._loss.check(self.precision.autocast)
        if is_compared or (problem is not None and self.comm.size == 1):
            raise_problem(problem, self.comm)
        return lr, totals, problem, samples

    def parts(self, batch: Batch) -> list[tuple[Any, int]]:
        """Return (data, samples) of each of this worker's passes over its part of a batch.

        Args:
            batch: this worker's part of a global batch, as a `Loader` yields it.
        """
        return self._passes.parts(batch)

    def repeat_shard(self, shard: int, part: tuple[Any, int], global_size: int) -> None:
        """Run the pass of one virtual worker of the step in progress once more; called by a guard
        before its update.

        The pass has the bits of that in the step, also if another worker has made that. Hooks of
        parameters see its gradients; all else is as it was before.

        Args:
            shard: the number of the virtual worker, which may be one of another worker.
            part: the data of its part of the batch, and the number of samples in it, at least one.
            global_size: samples in the global batch.

        Raises:
            ConfigError: without virtual workers.
        """
        if not isinstance(self._passes, ShardPasses):
            raise ConfigError(
                "virtual_workers", "a number, for passes that can be repeated", found="none"
            )
        self._passes.repeat(self._loss, self.precision, self.steps_done, shard, part, global_size)

    def _completed(self, result: StepResult, norm: torch.Tensor | None, batch: Batch) -> StepResult:
        """Count a step that is done; returns its result with what was measured."""
        _, count, _ = result.on_hand
        self.precision.end_step(count, batch.global_size)
        self.steps_done += 1
        if self.scheduler is not None:
            self.scheduler.end_step()
        note_samples(batch.size)
        note_step(self.steps_done)
        if self.measured:
            result = replace(result, measured=self.measured)
            self.measured = {}
        return result if norm is None else replace(result, grad_norm=norm)

    def _result(
        self, lr: Number, totals: Sums, problem: Any, batch: Batch, is_skipped: bool = False
    ) -> StepResult:
        """Return the result of a step whose update is about to be made, or left out."""
        if self.comm.device.type == "cpu":
            return self._checked_result(lr, totals, problem, is_skipped)
        return self._unchecked_result(lr, totals, batch, is_skipped)

    def _checked_result(
        self, lr: Number, totals: Sums, problem: Any, is_skipped: bool = False
    ) -> StepResult:
        """Return the result of a step on the CPU, where its numbers can be checked before the
        update.
        """
        numbers = totals.tolist() if isinstance(totals, torch.Tensor) else totals
        loss_sum, count, stops, *marks = map(float, numbers)
        loss = loss_sum / count if count else math.nan
        on_hand = StepNumbers(loss, count, stops)
        result = StepResult(self.steps_done, on_hand, lr, is_skipped=is_skipped)
        if not math.isfinite(loss):
            raise_problem(problem, self.comm)  # rather than the loss, which is that of all workers
        if marks:
            self._replicas.settle(self.steps_done, marks)
        result.check()
        return result

    def _unchecked_result(
        self, lr: Number, totals: Sums, batch: Batch, is_skipped: bool = False
    ) -> StepResult:
        """Return the result of a step on a device, which nothing waits for; it is checked later."""
        # of a single worker
        marks = None
        replicas = None
        if isinstance(totals, torch.Tensor):
            marks = totals[3:]
            replicas = self._replicas
        loss_sum, count, stops = totals[:3]
        samples = self._samples_of(batch)
        return StepResult(
            self.steps_done,
            StepNumbers(loss_sum / count, count, stops),
            lr,
            samples,
            marks,
            replicas,
            is_skipped=is_skipped,
        )

    def _samples_of(self, batch: Batch) -> int | None:
        """Return the samples of a global batch if the loss is taken to count them on all workers;
        None on the CPU, where the count is on hand.

        Reading the count of another device would wait for it, so a loss that counts samples here is
        assumed to count them on all workers. `StepResult.check` detects a wrong assumption.
        """
        is_on_host = self.comm.device.type == "cpu"
        if is_on_host or not self.loss.counts_samples or batch.collated is not None:
            return None
        return batch.global_size

    def _first_batch(self, batch: Batch) -> FirstBatch | None:
        """Return what watches the passes of the first step, if they divide a global batch; virtual
        workers do not.
        """
        passes = self._accumulation_steps
        devices = len(self.strategy.devices)
        is_divided = self.comm.size * passes * devices > 1
        if self._has_described or self.strategy.virtual_workers is not None or not is_divided:
            return None
        self._has_described = True
        return FirstBatch(
            self.model,
            self.comm,
            batch.global_size,
            loss=self.loss.modules,
            passes=passes,
            devices=devices,
        )

    def _correction(self, samples: int, result: StepResult) -> Number | None:
        """Return the factor that makes the reduced gradients those of the mean; None if they
        are.
        """
        if self._passes.gives_means:
            return None
        if result.samples is not None and self.precision.name != "fp16":
            return None
        _, count, _ = result.on_hand
        correction = self.precision.correction(samples, count, self._passes.averaged_over)
        return None if isinstance(correction, float) and correction == 1 else correction

    @property
    def learning_rates(self) -> list[float]:
        """The learning rate of each group of parameters in the last step."""
        rates = rates_of(self.optimizer) if self.scheduler is None else self.scheduler.last_rates
        return [float(rate) for rate in rates]

    def end_epoch(self, row: Mapping[str, float]) -> None:
        """Adapt the learning rate to the row of the history with which an epoch ends, if a
        scheduler does so.

        Args:
            row: the names and values of the row, such as `val_loss`.
        """
        if self.scheduler is not None:
            self.recovery.run(self.scheduler.end_epoch, row, meets=False)

    def _refresh_param_groups(self) -> None:
        """Read the optimizer's parameter groups, again if the user has given it, or the model,
        other parameters.
        """
        groups = self.optimizer.param_groups
        of_optimizer = (
            groups[0]["params"]
            if len(groups) == 1
            else [*itertools.chain(*(group["params"] for group in groups))]
        )
        if not self._changes.has_changed() and are_same(of_optimizer, self._parameters):
            return
        parameters = parameters_of(self.model, self.optimizer)
        for group in groups:
            group.setdefault("initial_lr", group["lr"])
        _forget_others(self.optimizer, parameters)
        self.sync_model()
        # asked for again, as the strategy may have replaced parameters of the model
        self._parameters = parameters_of(self.model, self.optimizer)
        if self.strategy.shards is not None:
            self.strategy.shards.forget_others(self.optimizer)

    def sync_model(self) -> None:
        """Give all workers rank 0's values, if the model has other parameters than before; called
        by all workers.

        The next step does so itself.
        """
        self.follow()
        if not self._changes.has_changed(looks=True):
            return
        self._prepare()
        self._parameters = []  # whether the optimizer has them is checked before the next step
        self._trained = []  # a wrapper such as DistributedDataParallel is made anew
        self.precision.forget_cast()

    def check_replicas(self, model: nn.Module | None = None) -> None:
        """Compare all hyperparameters and all weights of the workers, bit by bit; called by all of
        them.

        Args:
            model: another model to compare the weights of, the same one on each worker; the trained
                one when None.

        Raises:
            ConfigError: if a worker has found since the last comparison that the loss is no mean
                over samples.
            MismatchError: on every worker, naming what differs, on which rank, and the values.
        """
        self.follow()
        (has_problem,) = self._replicas.compare(
            model=model, problems=[self.loss.problem is not None]
        )
        if has_problem:
            raise_problem(self.loss.problem, self.comm)

    @property
    def compares_replicas(self) -> bool:
        """Whether differences between workers are looked for at all: not with `replica_check=0`."""
        return self._replicas.every > 0

    def check_weights(self) -> None:
        """Check that training has left the trained parameters finite; called by all workers, waits
        for the device.

        `Trainer.save` calls it. A loop of one's own calls it before it saves the weights.

        Raises:
            DivergedError: on every worker, naming a parameter; buffers, frozen parameters and
                values that were not finite before the first step do not count.
        """
        self.follow()
        self.finite_weights.check(self.steps_done)

    def check_state(self) -> None:
        """Do what `check_weights` and `check_replicas` do, by one message; called by all workers.

        With `shard_optimizer` also try again whether the optimizer updates each tensor by itself,
        from the state that it has by now.

        Raises:
            DivergedError, ConfigError, MismatchError: see there.
        """
        self.follow()
        shards = self.strategy.shards
        if shards is not None:
            call_on_all(self.comm, partial(check_separable, self.optimizer, shards.owns))
        error = self.finite_weights.error(self.steps_done)
        diverged, has_problem = self._replicas.compare(
            problems=[error is not None, self.loss.problem is not None]
        )
        if diverged:
            raise_on_all(self.comm, error)
        if has_problem:
            raise_problem(self.loss.problem, self.comm)

    def _begin(self, key: int) -> Number:
        """Prepare a step, of which the random draws follow from `key`; returns the learning
        rate.
        """
        self._refresh_param_groups()
        self.finite_weights.note()
        if (trained := [p.requires_grad for p in self._changes.parameters]) != self._trained:
            # A wrapper such as DistributedDataParallel reduces the parameters that required
            # gradients when it was made.
            self._module = self.strategy.wrap(self._loss)
            self._trained = trained
        seed_torch(mix((self.comm.rank,), key) & 0xFFFFFFFF, self.comm.device)
        clear_gradients(self.optimizer, self._parameters)
        if self.schedule is not None:
            factor = learning_rate_factor(self.schedule, self.steps_done)
            for group in self.optimizer.param_groups:
                group["lr"] = group["initial_lr"] * factor
        lr = self.optimizer.param_groups[0]["lr"]
        # Reading a tensor on a device would wait for it; it is cloned, because it may be changed in
        # place.
        on_device = isinstance(lr, torch.Tensor) and lr.device.type != "cpu"
        return lr.detach().clone() if on_device else float(lr)

    def _finish_gradients(self, correction: Number | None) -> None:
        """Make the reduced gradients those of the mean, unscaled and times `correction`."""
        shards = self.strategy.shards
        if shards is not None:
            if self.strategy.divides_gradients:
                shards.copy_gradients()
            else:
                shards.drop_gradients()
        _fill_missing_gradients([p for p in self._parameters if shards is None or shards.holds(p)])
        if cast := self.precision.cast:
            converted = [
                p.grad for number, p in enumerate(self._changes.parameters) if number in cast
            ]
            present = [
                gradient
                for gradient in converted
                if gradient is not None and not gradient.is_sparse
            ]
            self.precision.mark_overflows(present, self._passes.averaged_over)
        self.precision.unscale(self.optimizer, None if shards is None else self.comm)
        if correction is not None:
            scale_gradients([p.grad for p in self._parameters if p.grad is not None], correction)

    def _update(self) -> torch.Tensor | None:
        """Update the parameters with the gradients; returns their norm if it is limited."""

        def take_step(_: torch.Tensor | None) -> None:
            self.precision.step(self.optimizer)
            clear_gradients(self.optimizer, self._parameters)

        shards = self.strategy.shards
        if shards is not None:
            return update_by_owners(
                shards, self.recovery, self._parameters, self._max_grad_norm, take_step
            )
        norm = None
        if self._max_grad_norm is not None:
            norm = clip(self._parameters, self._max_grad_norm)
        self.precision.step(self.optimizer)
        if self.shards_optimizer:
            clear_gradients(self.optimizer, self._parameters)
        return norm

    def _sharded_norms(self) -> Callable[[], torch.Tensor] | None:
        """Return what computes the norms of all gradients, if a worker has only those of its
        own.
        """
        shards = self.strategy.shards
        return None if shards is None else partial(shards.gradient_norms, self._parameters)

    def full_optimizer_state(self) -> dict[str, Any]:
        """Return the optimizer's state dict with the tensors of all workers, on every worker;
        called by all.
        """
        return self.strategy.optimizer_state(self.model, self.optimizer)

    def fingerprint(self) -> str:
        """Return `lockstep.fingerprint` of the model and of the optimizer's whole state, the same
        on every worker; called by all.
        """
        return self.strategy.fingerprint(self.model, self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps done and the state of the gradient scaler, without model and
        optimizer.

        If there is a scheduler, its state is in it as well; those of guards; the buffers and
        parameters of a loss that is a module; and if the model computes its loss, what that counts,
        once it is known.
        """
        state: dict[str, Any] = {
            "steps_done": self.steps_done,
            "precision": self.precision.state_dict(),
        }
        if self.scheduler is not None:
            state |= {"scheduler": self.scheduler.state_dict(), "rates": self.learning_rates}
        if of_guards := {
            guard.name: saved for guard in self._guards if (saved := guard.state_dict())
        }:
            state["guards"] = of_guards
        return state | self.loss.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned.

        Args:
            state: what `state_dict` has returned.
        """
        self.finite_weights.forget()
        self.steps_done = int(state["steps_done"])
        self.precision.load_state_dict(state["precision"])
        if self.scheduler is not None and "scheduler" in state:
            self.scheduler.load_state_dict(state["scheduler"])
            self.scheduler.last_rates = list(state["rates"])
        self.loss.load_state_dict(state, self.comm.rank == 0)
        for guard in self._guards:
            if guard.name in state.get("guards", {}):
                guard.load_state_dict(state["guards"][guard.name])


DIGEST_BITS = 40


def digest_of_samples(batch: Batch, comm: Communicator) -> int:
    """Return a digest of the numbers and places of this worker's samples of a global batch.

    Those of all workers add up, modulo 2 to the power of `DIGEST_BITS`, to that of the global
    batch, at any number of workers. In float64 their sum is exact for up to 4,096 workers.
    """
    low, _ = local_range(batch.global_size, comm.size, comm.rank, batch.virtual_workers)
    numbers = batch.indices + (batch.epoch << DIGEST_BITS)
    mixed = mix_bits(numbers, torch.arange(low, low + len(numbers)))
    mixed ^= mixed >> 29
    return int(mixed.sum()) & ((1 << DIGEST_BITS) - 1)


def _synchronise_batch_norm(model: nn.Module, strategy: Strategy) -> None:
    """Replace the batch-norm layers of a model by those of the global batch.

    Raises:
        ConfigError: if the model is such a layer itself, or the strategy does not support them.
    """
    if isinstance(strategy, Replicas):
        hint = (
            "Threads of replicas have no common order of collectives; use strategy='distributed'."
        )
        raise ConfigError("sync_batchnorm", "False with strategy='replicas'", True, hint)
    if convert(model, strategy.comm) is not model:
        raise ConfigError("model", "a module that has batch norm in it", found=type(model).__name__)


def _changed_by_replicas() -> ConfigError:
    hint = "All replicas would change the same buffer. Use strategy='distributed'."
    return ConfigError(
        "loss_fn",
        "a loss that changes no buffer, with strategy='replicas'",
        found="one that does",
        hint=hint,
    )


def _versions_of(batch: Batch) -> list[int]:
    """Return numbers that differ once a pass has changed the data of a batch in place."""
    return [tensor._version for tensor in tensors_of(batch.data) if not tensor.is_inference()]


def _changed_batch() -> ConfigError:
    hint = "Change a copy of its inputs: a step that a guard repeats needs them once more."
    return ConfigError(
        "model", "passes that do not change the batch", found="one that does, in place", hint=hint
    )


def _fill_missing_gradients(parameters: list[nn.Parameter]) -> None:
    """Set missing gradients to zero.

    On one worker, torch leaves None for an unused parameter, and optimizers skip it. Among several
    workers another one may have used it, and its gradient is a sum. With zero in both cases, weight
    decay and momentum are the same.
    """
    for p in parameters:
        if p.grad is None and p.requires_grad:
            p.grad = torch.zeros_like(p)


def _forget_others(optimizer: Optimizer, parameters: list[nn.Parameter]) -> None:
    """Drop the state of parameters that the optimizer has no longer; it could not be saved."""
    known = {id(p) for p in parameters}
    for key in [
        key for key in optimizer.state if isinstance(key, torch.Tensor) and id(key) not in known
    ]:
        del optimizer.state[key]
