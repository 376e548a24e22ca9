"""The `Trainer`: a training run of loader, training step, evaluation, checkpoints and callbacks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from typing_extensions import Never, Unpack

from .. import arguments, environment, flight_recorder, observers
from ..activity import Activity
from ..checkpoint.folder import Checkpoint, read_tensors
from ..checkpoint.numerics import NUMERICS, changes_since
from ..communicator import init
from ..data.loader import Loader
from ..errors import CheckpointError, ConfigError, DivergedError, unexpected_argument
from ..extension_points import EXTENSION_POINTS
from ..other_names import in_training
from ..parallel.replicas.scatter import Device
from ..parallel.strategy import Strategy
from .callbacks import defaults
from .callbacks.base import Callback
from .callbacks.group import CallbackGroup, check_callbacks
from .errors_on_all import call_on_all
from .evaluate import Evaluation, Metric, default_metrics, predict
from .formats import IN_FLIGHT
from .in_flight import StepsInFlight, check_in_flight
from .loaders import TrainerLoaders
from .loop import Loop, StateOfRun
from .losses.loss import LossFn
from .losses.own_loss import OwnLoss
from .modes import TrainingModes
from .rank0_changes import Rank0Changes
from .run.checkpoint_manager import CheckpointManager
from .run.epoch_totals import EpochTotals, Row
from .run.position import Position, check_epochs, check_max_steps, check_validate_every
from .run.run_directory import HeldRunDirectory
from .run.run_guard import run_guard
from .run.run_state import RunState
from .step.guards import Guard
from .step.step_arguments import StepOptions, check_functions, make_strategy
from .step.train_step import TrainStep
from .stop_signals import StopSignals

__all__ = ["StepOptions", "Trainer"]

_log = logging.getLogger(__name__)


class Trainer:
    """Trains a model on all workers of the job. A trainer is one run, with any number of calls of
    `fit`.

    The loop, in short:

        for epoch in range(epochs):
            for batch in loader.epoch(epoch):       # this worker's part of each global batch
                result = step.run(batch)            # passes, reduction of gradients, update
            row = evaluate(model, validation)       # every sample once over all workers
            callbacks, checkpoint

    Args:
        model: the model; moved to the worker's device, with rank 0's values on all workers.
        optimizer: over parameters of `model`.
        loss_fn: (output, target) → the mean over the samples, one value for each, or (sum, count),
            see `lockstep.training.losses.loss.LossFn`; such as `torch.nn.CrossEntropyLoss()`. When
            None, the model computes its loss from the batch, as those of Hugging Face do from
            "labels".
        global_batch_size: samples in one step, over all workers; must be given.
        seed: the seed of the order of samples and of dropout.
        run_dir: the run directory, for checkpoints and the files of callbacks; when None, nothing
            is written.
        keep_checkpoints: number of newest checkpoints to keep.
        callbacks: the callbacks; when None, a progress display, and with a run directory
            checkpoints, `metrics.csv` and `curve.png` as well.
        strategy: "distributed" (each worker has the whole model), "replicas" (one worker has
            several devices, each with the whole model) or "sharded" (each worker has a part of
            weights, gradients and optimizer state).
        devices: only with "replicas": the devices of this worker; one may be listed several times.
        metrics: name → function (output, target), for evaluations, see
            `lockstep.training.evaluate.Metric`; when None, accuracy for a loss of classification.
        num_workers: data loader processes for each worker.
        max_steps_in_flight: number of steps that may be queued on an accelerator before the host
            waits for the oldest; losses arrive later, in order. On the CPU a step has ended when
            its call returns.
        async_save: write checkpoints in the background, one at a time, from a copy of the state in
            memory; `fit` waits for the last one.
        allow_different_hardware: with virtual workers, resume even under determinism settings that
            give other bits.
        ledger: whether a run with a run directory keeps a ledger of what each step has computed,
            see `lockstep.ledger`.
        fingerprint_every: steps between two fingerprints of the whole state in the ledger; 0 takes
            none.
        save_frozen: whether checkpoints have the parameters that are not trained as well; when
            None, unless the model is one of PEFT. Without them, a run resumes with the same
            pretrained weights only, which is checked.
        on_spike: what to do about a step that stands out by its loss, or the norm of its gradient
            or buffers: "stop", "skip", "rollback", or a `lockstep.OnSpike`; nothing when None. Not
            with strategy="sharded" or "replicas".
        cross_check: with virtual workers, steps between two in which each worker repeats a pass of
            another one, to find devices that compute wrong numbers; weights are then compared at
            every step. Nothing is compared when None.
        step: precision, gradient_accumulation_steps, max_grad_norm, schedule, scheduler,
            scheduler_interval, scheduler_metric, forward, virtual_workers, threads, replica_check,
            sync_batchnorm and shard_optimizer, see `TrainStep`.

    Raises:
        ConfigError: for invalid arguments.
        MismatchError: if the workers' models differ.
        TypeError: for an argument of another name; the error says where it belongs.

    Examples:
        >>> import torch, lockstep
        >>> train, test = lockstep.data.digits()
        >>> model = lockstep.models.mlp()
        >>> trainer = lockstep.Trainer(
        ...     model,
        ...     torch.optim.Adam(model.parameters(), lr=1e-3),
        ...     torch.nn.CrossEntropyLoss(),
        ...     global_batch_size=64,
        ...     callbacks=[],  # without a progress bar
        ... )
        >>> history = trainer.fit(train, epochs=2, validate=test)
        >>> history[-1]["val_accuracy"] > 0.8
        True
        >>> sorted(trainer.evaluate(test))
        ['accuracy', 'loss']
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: LossFn = None,
        global_batch_size: int | None = None,
        *,
        seed: int = 0,
        run_dir: str | Path | None = None,
        keep_checkpoints: int = 3,
        callbacks: Sequence[Callback] | None = None,
        strategy: str | Strategy = "distributed",
        devices: Sequence[Device] | None = None,
        metrics: Mapping[str, Metric] | None = None,
        num_workers: int = 0,
        max_steps_in_flight: int = IN_FLIGHT,
        async_save: bool = False,
        allow_different_hardware: bool = False,
        save_frozen: bool | None = None,
        on_spike: Any = None,
        cross_check: int | None = None,
        ledger: bool = True,
        fingerprint_every: int = 50,
        **step: Unpack[StepOptions],
    ) -> None:
        if unknown := [name for name in step if name not in StepOptions.__annotations__]:
            raise unexpected_argument(
                "Trainer", unknown[0], _instead(unknown[0]), _trainer_arguments()
            )
        self.comm = init()
        if global_batch_size is None:
            raise ConfigError(
                "global_batch_size",
                "the number of samples in one step, over all workers",
                found="none",
            )
        global_batch_size = arguments.whole("global_batch_size", global_batch_size, least=1)
        seed = arguments.whole("seed", seed, least=0)
        num_workers = arguments.whole("num_workers", num_workers, least=0)
        check_in_flight(max_steps_in_flight)
        arguments.flag("allow_different_hardware", allow_different_hardware, none="False")
        arguments.flag("save_frozen", save_frozen, none="True, unless the model is one of PEFT")
        check_callbacks(callbacks)
        check_functions(loss_fn, step.get("forward"))
        if loss_fn is None:
            loss_fn = OwnLoss(step.get("forward"))
        self.model = model
        self.optimizer = optimizer
        self.loss_fn = loss_fn
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.metrics = default_metrics(loss_fn) if metrics is None else metrics
        if run_dir is not None:
            run_dir = arguments.path("run_dir", run_dir, "the path of a folder, or None")
            run_dir = observers.active().run_directory(run_dir)
        arguments.flag("ledger", ledger, none="True")
        fingerprint_every = arguments.whole(
            "fingerprint_every", fingerprint_every, least=0, hint="0 takes none."
        )
        self._run_guard = run_guard(run_dir, ledger, fingerprint_every)
        if self._run_guard is not None:
            run_dir = self._run_guard.run_dir
            callbacks = self._run_guard.callbacks(callbacks)
        self.directory = HeldRunDirectory(run_dir, self.comm)
        chosen_strategy = make_strategy(strategy, self.comm, global_batch_size, devices)
        self.step = TrainStep(
            model, optimizer, loss_fn, strategy=chosen_strategy, seed=seed, **step
        )
        self.step.guards = _guards_of(self.step, on_spike, cross_check)
        if self._run_guard is not None:
            self.step.guards = [*self.step.guards, self._run_guard]  # it sees what they decide
        self._forward = step.get("forward")
        self._evaluation = Evaluation(model, loss_fn, self.metrics, self.comm.device, self._forward)
        virtual_workers = self.step.strategy.virtual_workers
        self._loaders = TrainerLoaders(
            self.comm, global_batch_size, seed, num_workers, virtual_workers
        )
        save_frozen = (
            not hasattr(model, "peft_config") if save_frozen is None else bool(save_frozen)
        )
        self.state = RunState(self.step, global_batch_size, allow_different_hardware, save_frozen)
        if callbacks is None:
            callbacks = defaults(self.run_dir is not None, hasattr(model, "save_pretrained"))
        if self.step.recovery.is_missing and self.comm.rank == 0:
            where = "the beginning" if run_dir is None else "the newest checkpoint"
            consequence = (
                "no worker can join or leave, and the loss of a worker starts all workers again"
            )
            _log.warning("strategy %r in an elastic job: %s, from %s", strategy, consequence, where)
        self._callbacks = CallbackGroup(callbacks, self.comm.rank, self.step.recovery)
        if self.run_dir is not None:
            self._callbacks.warn_of_missing()
        self.step.shared_state = partial(StateOfRun, self, None, self._callbacks)
        self.max_steps_in_flight = max_steps_in_flight
        self.checkpoint_manager = CheckpointManager(
            self.state, self.run_dir, keep_checkpoints, async_save
        )
        self.modes = TrainingModes(model)
        self.steps_in_flight = self._new_steps_in_flight()
        self._begun = False
        self._loop: Loop | None = None  # while `fit` runs
        self.stop_reason = ""
        self.epochs: int | None = 0
        self.total_steps: int | None = 0
        self.steps_per_epoch: int | None = 0
        self.steps_before_epoch = 0

    def fit(
        self,
        train: Any,
        epochs: int | None = None,
        validate: Any = None,
        resume: str | Path | None = None,
        *,
        max_steps: int | None = None,
        validate_every: int | None = None,
        **unknown: Never,
    ) -> list[Row]:
        """Train until `epochs` epochs or `max_steps` steps are done in total, counted from the
        beginning of the run.

        A further call continues where the last one ended; with another data set, at the beginning
        of the next epoch. Ctrl-C and SIGTERM, on any worker, end the run after the step in
        progress, or during an evaluation, with a checkpoint. Layers in evaluation mode while the
        model as a whole is in training mode are considered frozen, and stay in evaluation mode.

        Args:
            train: a map-style data set, a `Loader` with the trainer's global batch size, or a
                `DataLoader` of torch, all of which is used except its batch size.
            epochs: total number of epochs, 1 or more; as many as `max_steps` needs when None.
            validate: a data set, a `Loader` or a `DataLoader`, to evaluate on after each epoch.
            resume: a checkpoint to resume from, or a run directory, for its newest checkpoint, or
                "latest": the newest checkpoint in `run_dir`, if any. Damaged checkpoints in a
                directory are skipped and logged as errors. Model, optimizer and callbacks load its
                state; hyperparameters with which the optimizer is now constructed differently keep
                their new values, which is logged; so is what differs from here on if it was written
                by a Lockstep that computes otherwise. When None, the environment variable
                LOCKSTEP_RESUME counts, if it names a directory of this run, or is "latest";
                `lockstep run --resume` sets it.
            max_steps: total number of steps, 1 or more, at which the run ends, also within an
                epoch.
            validate_every: number of steps between evaluations within an epoch, besides the one
                after it; each adds a row to the history.

        Returns:
            The history: one row for each epoch, and for each validation within one.

        Raises:
            ConfigError: for invalid arguments, such as a `run_dir` with another run, or fewer
                epochs than are done; on rank 0, if a callback that runs on it alone changes what
                the others have as well.
            CheckpointError: if `resume` is damaged, or of another model, optimizer or data set;
                nothing is changed.
            DivergedError: if the loss is not finite, naming the step and the learning rate, or the
                trained parameters are not when the run saves or ends; names the newest checkpoint.
            MismatchError: on every worker, if the workers' hyperparameters or weights differ.
            InterruptedRunError: after a signal, naming the checkpoint.
            TypeError: for an argument of another name; the error says where it belongs.
        """
        if unknown:
            name = next(iter(unknown))
            raise unexpected_argument(
                "fit", name, _instead(name), arguments.keyword_names(self.fit)
            )
        self.step.follow()
        if resume is None and not self._begun:
            resume = self.directory.requested_resume()
        elif resume is not None:
            hint = (
                'resume="latest" continues the newest run in run_dir, and begins one if there is '
                "none."
            )
            arguments.path("resume", resume, '"latest", or the path of a run or a checkpoint', hint)
        if self._run_guard is not None:
            if not self._run_guard.trains():
                return self.history
            resume = self._run_guard.resumes(resume)
        with ExitStack() as opened:
            loader = opened.enter_context(self._loaders.opened(train, "train"))
            held_out = (
                None
                if validate is None
                else opened.enter_context(self._loaders.opened(validate, "validate"))
            )
            check_validate_every(validate_every, held_out is not None)
            results = None if held_out is None else self._evaluation.names
            several = self._evaluation.may_be_several
            columns = self._callbacks.check(results, several, self.run_dir is not None)
            if self.step.scheduler is not None and not several:
                self.step.scheduler.check_columns(columns)
            opened.callback(self.directory.leave)
            preparing = Activity(
                "lockstep: preparing the run", shown=self._callbacks.shows_progress
            )
            with preparing, flight_recorder.in_method("Trainer.fit"):
                self._begin(loader, epochs, max_steps, resume)
            opened.callback(self.directory.release)
            if self._run_guard is not None:
                opened.enter_context(self._run_guard.fit(self, loader))
            with StopSignals() as signals, self.step.strategy.deterministic():
                self._loop = Loop(self, self._callbacks, signals, loader, held_out, validate_every)
                try:
                    self._callbacks.watch(self._changes_of_rank0(loader, held_out))
                    self._loop.run()
                finally:
                    self._loop = None
                    self._callbacks.watch(None)
                    self.checkpoint_manager.end()
        return self.history

    def _changes_of_rank0(self, loader: Loader, held_out: Loader | None) -> Rank0Changes | None:
        """Return what refuses changes by callbacks of rank 0 alone; None where the ranks are not
        compared.
        """
        if not self.step.compares_replicas:
            return None
        roots = {"loss_fn": self.loss_fn, "forward": self._forward}
        for argument, held_loader in (("train", loader), ("validate", held_out)):
            if held_loader is not None:
                roots |= {
                    argument: held_loader.dataset,
                    **{f"{argument}.{name}": part for name, part in held_loader.parts.items()},
                }
        return Rank0Changes(self.model, self.optimizer, self.step.loss.modules, roots)

    def _begin(
        self, loader: Loader, epochs: int | None, max_steps: int | None, resume: str | Path | None
    ) -> None:
        """Check the arguments of `fit`, prepare the run directory, and load the checkpoint to
        resume from.
        """
        if loader.global_batch_size != self.global_batch_size:
            hint = "Give both the same number, or fit the data set itself."
            raise ConfigError(
                "global_batch_size",
                f"{self.global_batch_size}, the trainer's",
                loader.global_batch_size,
                hint,
            )
        if loader.virtual_workers != (virtual_workers := self.step.strategy.virtual_workers):
            hint = (
                f"Make it with Loader(..., virtual_workers={virtual_workers}), or fit the data set "
                "itself."
            )
            raise ConfigError(
                "virtual_workers",
                f"{virtual_workers}, the trainer's, in the Loader as well",
                loader.virtual_workers,
                hint,
            )
        self.step.sync_model()
        restarted = not self._begun and environment.restart_count() > 0
        checkpoint = (
            None
            if resume is None and not restarted
            else self.checkpoint_manager.find(resume, restarted)
        )
        position = self.position if checkpoint is None else Position(checkpoint.state["loader"])
        again = self._begun and resume is None
        if again:
            position = position.in_data_of(loader)
        steps_done = self.step.steps_done if checkpoint is None else checkpoint.step
        check_max_steps(max_steps, steps_done, again)
        if epochs is None:
            if max_steps is None:
                raise ConfigError("epochs", "a number of epochs, or max_steps=", found="neither")
            if loader.steps is not None:
                left = max_steps - (steps_done - position.step)
                epochs = position.epoch + max(1, -(-left // loader.steps))
        if epochs is not None:
            check_epochs(epochs, position, again)
        _seek(position, loader, checkpoint)
        if again:
            self.state.position = position
        newest = self.checkpoint_manager.last_path if checkpoint is None else checkpoint.path
        self.directory.prepare(newest, fresh=not self._begun and resume != "latest")
        self.checkpoint_manager.run_dir = self.run_dir
        if checkpoint is not None:
            self._load_checkpoint(checkpoint)
        self.step.finite_weights.forget()
        self._begun = True
        self.stop_reason = ""
        self.steps_in_flight = self._new_steps_in_flight()
        self.epochs = epochs
        self.steps_per_epoch = loader.steps
        self.total_steps = max_steps
        # epochs of an iterable data set may have other lengths
        if epochs is not None and not loader.is_iterable:
            before = self.step.steps_done - self.position.step
            steps = before + (epochs - self.position.epoch) * len(loader)
            self.total_steps = steps if max_steps is None else min(steps, max_steps)
        if self.done and self.comm.rank == 0:
            _log.warning("%s", self._nothing_to_train())

    def _nothing_to_train(self) -> str:
        by_epochs = self.epochs is not None and self.position.epoch >= self.epochs
        done, of = (
            (self.position.epoch, self.epochs)
            if by_epochs
            else (self.step.steps_done, self.total_steps)
        )
        unit = "epoch" if by_epochs else "step"
        return (
            f"nothing is left to train: {done} of {of} {unit}s are done already. The number of "
            f"{unit}s counts from the beginning of the run"
        )

    def _new_steps_in_flight(self) -> StepsInFlight:
        return StepsInFlight(
            self.comm.device,
            self.max_steps_in_flight,
            partial(self._callbacks.call, "on_loss", self),
        )

    @property
    def done(self) -> bool:
        """Whether all requested epochs or steps are done, or a stop was requested."""
        done = self.step.steps_done
        # The row of the last step may be missing in a run that was interrupted in its evaluation.
        steps_done = self.total_steps is not None and done >= self.total_steps
        ended = steps_done and bool(self.history) and self.history[-1]["step"] == done
        epochs_done = self.epochs is not None and self.position.epoch >= self.epochs
        return bool(self.stop_reason) or epochs_done or ended

    @property
    def run_dir(self) -> Path | None:
        """The run directory; None for a run that writes nothing."""
        return self.directory.path

    @property
    def position(self) -> Position:
        """The position in the training data."""
        return self.state.position

    @property
    def steps_in_epoch(self) -> int:
        """The steps done of the epoch in progress, or of the one that has just ended."""
        return self.step.steps_done - self.steps_before_epoch

    @property
    def epoch_ended(self) -> bool:
        """Whether all steps of the epoch in progress are done."""
        return self.position.ended or (self.position.step == 0 and self.steps_in_epoch > 0)

    @property
    def totals(self) -> EpochTotals:
        """Loss and speed of the epoch in progress."""
        return self.state.totals

    @property
    def history(self) -> list[Row]:
        """One row for each completed epoch, and for each validation within one."""
        return self.state.history

    @property
    def epoch(self) -> int:
        """The epoch in progress, from 0."""
        return self.state.epoch

    @property
    def newest_checkpoint_step(self) -> int | None:
        """The step of the newest checkpoint, including one that is being written; None without
        one.
        """
        return self.checkpoint_manager.newest_step

    def check_losses(self) -> None:
        """Check that the losses of all steps so far are finite; waits for the device.

        Raises:
            DivergedError: naming the step and the learning rate.
        """
        self.steps_in_flight.check()

    def evaluate(self, dataset: Any, model: nn.Module | None = None) -> dict[str, float]:
        """Return loss and metrics over all samples of a data set or `Loader`, the same on every
        worker.

        Args:
            dataset: the data set, `Loader` or `DataLoader`.
            model: another model, with the same weights on each worker, such as an average of the
                trained ones; the trainer's when None.

        Raises:
            ConfigError: for the `Loader` that training is iterating over, or a metric that is not a
                mean over samples.
            InterruptedRunError: after a signal while `fit` runs, naming the checkpoint.
            MismatchError: on every worker, if the workers' hyperparameters or weights differ.
        """
        if self._loop is None:
            return self._evaluate(dataset, model, lambda loader: loader)
        return self._loop.evaluate(partial(self._evaluate, dataset, model))

    def _evaluate(
        self, dataset: Any, model: nn.Module | None, stoppable: Callable[[Loader], Loader]
    ) -> dict[str, float]:
        with self._evaluating("Trainer.evaluate", dataset, model) as opened:
            loader = stoppable(opened)
            if model is None:
                return self._evaluation.run(
                    loader, self.step.precision, self.step.strategy, self.max_steps_in_flight
                )
            other = Evaluation(model, self.loss_fn, self.metrics, self.comm.device, self._forward)
            return other.run(loader, self.step.precision, None, self.max_steps_in_flight)

    @contextmanager
    def _evaluating(
        self, method: str, dataset: Any, model: nn.Module | None = None
    ) -> Iterator[Loader]:
        with flight_recorder.in_method(method):
            self.step.sync_model()
            self.step.check_replicas(model)
            self.step.strategy.sync_buffers()
            with (
                self._loaders.opened(dataset, "dataset") as opened,
                self.step.strategy.deterministic(),
            ):
                yield opened

    def predict(self, dataset: Any, forward: Callable[[nn.Module, Any], Any] | None = None) -> Any:
        """Return the model's outputs for all samples of a data set or `Loader`, in order, the same
        on every worker.

        It is `lockstep.predict` with this trainer's model and precision.

        Args:
            dataset: a data set, a `Loader` or a `DataLoader`.
            forward: (model, data) → output; that of the inputs when None.
        """
        return self.step.recovery.run(self._predict, dataset, forward, meets=False)

    def _predict(self, dataset: Any, forward: Callable[[nn.Module, Any], Any] | None) -> Any:
        with self._evaluating("Trainer.predict", dataset) as opened:
            return predict(self.model, opened, precision=self.step.precision, forward=forward)

    def loader(self, dataset: Any, shuffle: bool = True) -> Loader:
        """Return a loader of this run's global batches over `dataset`; a `Loader` is returned
        unchanged.

        Args:
            dataset: a data set, a `Loader` or a `DataLoader`.
            shuffle: whether samples come in another order in each epoch.
        """
        return self._loaders.make(dataset, "train" if shuffle else "dataset")

    def stop(self, reason: str) -> None:
        """Request that the running `fit` ends after this epoch or validation; any worker may call
        it.

        Args:
            reason: why, as in "the loss grows"; it becomes `stop_reason`.
        """
        if self._loop is not None:
            self._loop.stop_requests.reason = self._loop.stop_requests.reason or reason

    def save(self, best: bool = False) -> Path:
        """Write a checkpoint of this step; called by every worker.

        Rank 0 writes it; with strategy="sharded" every worker writes its shards. With `async_save`
        this returns when the state has been copied; `trainer.complete_checkpoint()`, called by
        every worker, waits for the files.

        Args:
            best: keep this checkpoint besides the newest ones, as the one that the link
                ``checkpoints/best`` leads to, until another is the best; it is complete when this
                returns.

        Raises:
            CheckpointError: if it cannot be written, or the run has no run directory; with
                `async_save` also if the previous checkpoint could not be written.
            ConfigError: if a callback's state cannot be stored, naming the callback and the entry
                of its state.
            DivergedError: if a loss or a trained parameter is not finite; nothing is written.
            MismatchError: if the workers' weights or hyperparameters differ; nothing is written.
        """
        try:
            return self._save(best)
        except DivergedError as error:
            raise (
                error if self._loop is not None else self.checkpoint_manager.with_advice(error)
            ) from None

    def _save(self, best: bool) -> Path:
        recovery = self.step.recovery
        self.step.follow()
        self.check_losses()
        if self.checkpoint_manager.is_writing:
            self.complete_checkpoint()
        recovery.run(self._prepare_to_save, meets=False)
        self._callbacks.call("on_checkpoint_start", self)
        path = recovery.run(self._write_checkpoint, best, meets=False)
        for guard in self.step.guards:
            guard.on_checkpoint()
        self._callbacks.call("on_checkpoint_end", self, path)
        self._tell_complete()
        return path

    def complete_checkpoint(self) -> None:
        """Wait for the checkpoint that is being written in the background, if there is one, and
        tell the callbacks that it is complete; called by every worker.

        Raises:
            CheckpointError: on every worker, if it could not be written.
        """
        self.step.recovery.run(self.checkpoint_manager.wait, meets=False)
        self._tell_complete()

    def _tell_complete(self) -> None:
        path = self.checkpoint_manager.untold()
        if path is not None:
            self._callbacks.call("on_checkpoint_complete", self, path)
            self.checkpoint_manager.note_told()

    def _prepare_to_save(self) -> None:
        with flight_recorder.in_method("Trainer.save"):
            self.step.check_state()
            self.step.strategy.sync_buffers()

    def _write_checkpoint(self, best: bool) -> Path:
        state = self.state.state_dict(full=False)
        return self.checkpoint_manager.save(
            state, lambda: {"callbacks": self._callbacks.state_dict()}, best
        )

    def resume(self, which: str | Path) -> None:
        """Load a checkpoint, written by any number of workers, for `fit` to continue from; see
        `fit`.

        Args:
            which: a checkpoint, a run directory, or "latest".
        """
        self.step.follow()
        checkpoint = self.checkpoint_manager.find(which)
        if checkpoint is not None:
            self._load_checkpoint(checkpoint)

    def _load_checkpoint(self, checkpoint: Checkpoint) -> None:
        # Errors are exchanged after each part: every worker reads files, and a strategy may call
        # collectives.
        callbacks_state = read_tensors(checkpoint.state.get("callbacks", {}))
        call_on_all(self.comm, partial(self._callbacks.load_state_dict, callbacks_state))
        call_on_all(self.comm, partial(self._load_state, checkpoint.state, checkpoint.numerics))
        self.checkpoint_manager.resume_from(checkpoint.step, checkpoint.path)

    def _load_state(self, state: Mapping[str, Any], numerics: int) -> None:
        self.state.load_state_dict(state)
        if (changes := changes_since(numerics)) and self.comm.rank == 0:
            _log.warning("%s", changes)
        self.checkpoint_manager.last = None  # belongs to the previous state

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume from in another process, with any number of workers; called by
        every worker.
        """
        self.step.follow()
        return {
            **self.state.state_dict(),
            "callbacks": self._callbacks.state_dict(),
            "numerics": NUMERICS,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state. If the Lockstep that saved it computes otherwise, a line in rank 0's
        log says what.

        Args:
            state: what `state_dict` has returned.

        Raises:
            CheckpointError: before anything is changed, if it is of another model or optimizer; if
                a callback cannot load its state.
        """
        self.step.follow()
        self._load_state(state, state.get("numerics", 0))
        self._callbacks.load_state_dict(state.get("callbacks", {}))


def _guards_of(step: TrainStep, on_spike: Any, cross_check: int | None) -> list[Guard]:
    """Return the guards of a trainer: the bits are checked before anything is decided from them."""
    guards: list[Guard] = []
    if cross_check is not None:
        guards.append(EXTENSION_POINTS.load("cross-check of a training")(step, cross_check))
    if on_spike is not None:
        guards.append(EXTENSION_POINTS.load("spikes of a training")(step, on_spike))
    return guards


def _trainer_arguments() -> list[str]:
    return [*arguments.keyword_names(Trainer), *StepOptions.__annotations__]


def _instead(name: str) -> str | None:
    """Return what to do instead of an argument that a trainer, or its `fit`, does not have; None if
    unknown.
    """
    if name in _trainer_arguments():
        return "it belongs to Trainer(...)"
    if name in ("epochs", "validate", "resume", "max_steps", "validate_every"):
        return "it belongs to fit()"
    in_loader = (
        "it belongs to a DataLoader or lockstep.Loader(...), which fit() and validate= take as data"
    )
    return in_training(name, "Trainer") or (
        in_loader if name in arguments.keyword_names(Loader) else None
    )


def _seek(position: Position, loader: Loader, checkpoint: Checkpoint | None) -> None:
    """Move `loader` to `position`; an error names the checkpoint that the position is from, if
    any.
    """
    try:
        position.seek(loader)
    except CheckpointError as error:
        raise (
            error if checkpoint is None else CheckpointError(f"{checkpoint.path}: {error}")
        ) from None
