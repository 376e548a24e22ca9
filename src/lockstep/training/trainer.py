"""Wires loader, step, evaluation, checkpoints and callbacks into a training run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from typing_extensions import Unpack

from ..checkpoint import Checkpoint, read_tensors
from ..communicator import init
from ..data.loader import Loader
from ..errors import CheckpointError, ConfigError
from ..replicas import Device
from ..strategies.base import Strategy
from . import out_folder
from .arguments import StepOptions, make_strategy
from .callbacks import defaults
from .callbacks.base import Callback, Row
from .callbacks.group import CallbackGroup
from .compatibility import conditions_of
from .epoch import EpochTotals
from .evaluate import Measures, Metric, default_metrics
from .formats import IN_FLIGHT
from .hyperparameters import constructed
from .loop import Loop
from .losses import LossFn
from .modes import TrainingModes
from .position import Position, check_epochs
from .saving import Saver, on_all
from .settling import Unsettled, check_in_flight
from .signals import StopSignals
from .state import load_state, state_of
from .step import TrainStep

__all__ = ["StepOptions", "Trainer"]


class Trainer:
    """Trains a model on all workers of the job. One trainer is one run, however many calls of `fit` it takes.

    The loop, in short::

        for epoch in range(epochs):
            for batch in loader.epoch(epoch):       # this worker's part of each global batch
                result = step.run(batch)            # forward, backward, sum of gradients, update
            row = evaluate(model, validation)       # every sample once over all workers
            callbacks, checkpoint

    Args:
        model: moved to the worker's device; rank 0's values are used by all.
        optimizer: over parameters of `model`.
        loss_fn: see `lockstep.training.losses.LossFn`.
        global_batch: samples in one update, over all workers.
        seed: of the order of samples and of dropout.
        out: the run's folder, for checkpoints and what callbacks write; None keeps everything in memory.
        keep: so many of the newest checkpoints stay.
        callbacks: `lockstep.training.callbacks.defaults` when None.
        strategy: "distributed", "replicas" or "sharded"; see `lockstep.strategies`.
        devices: with "replicas" alone, see `lockstep.strategies.replicas`; the same may come several times.
        metrics: of the evaluation, see `lockstep.training.evaluate.Metric`; accuracy for classification when None.
        num_workers: processes that load data ahead, for each worker.
        in_flight: on an accelerator, so many steps may be queued before the host waits for the oldest of them; their
            losses come late, and in order. On the CPU a step has ended when the call for it returns.
        async_save: checkpoints are written beside the training, from a copy of the state that `save` makes in memory,
            one at a time; `fit` ends when the last of them is there.
        allow_different: with shards, go on from a checkpoint also under conditions that give other bits.
        step: precision, accumulate, clip_norm, schedule, forward, shards, threads and replica_check, see `TrainStep`.

    Raises:
        ConfigError: for values that cannot be used.
        MismatchError: when the workers' models differ.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: LossFn,
        global_batch: int,
        *,
        seed: int = 0,
        out: str | Path | None = None,
        keep: int = 3,
        callbacks: Sequence[Callback] | None = None,
        strategy: str | Strategy = "distributed",
        devices: Sequence[Device] | None = None,
        metrics: Mapping[str, Metric] | None = None,
        num_workers: int = 0,
        in_flight: int = IN_FLIGHT,
        async_save: bool = False,
        allow_different: bool = False,
        **step: Unpack[StepOptions],
    ) -> None:
        self.comm = init()
        self.model, self.optimizer, self.loss_fn = model, optimizer, loss_fn
        self.global_batch, self.seed, self._num_workers = global_batch, seed, num_workers
        self.metrics = default_metrics(loss_fn) if metrics is None else metrics
        self.out = None if out is None else Path(out)
        made = make_strategy(strategy, self.comm, global_batch, devices)
        self.step = TrainStep(model, optimizer, loss_fn, strategy=made, seed=seed, **step)
        self._measures = Measures(model, loss_fn, self.metrics, self.comm.device, step.get("forward"))
        self.allow_different = allow_different
        self.hyperparameters = constructed(model, optimizer)
        chosen = defaults(self.out is not None) if callbacks is None else callbacks
        self._callbacks = CallbackGroup(chosen, self.comm.rank)
        self.in_flight = check_in_flight(in_flight)
        self.saver, self.modes = Saver(self, keep, async_save), TrainingModes(model)
        self.unsettled = self._none_queued()
        self.position, self.totals = Position(), EpochTotals(self.comm.device)
        self._begun = False
        self.made_folders: list[Path] = []  # those of `out` that were made for this run
        self._loop: Loop | None = None  # while `fit` runs
        self.history: list[Row] = []
        self.stop_reason = ""
        self.epoch, self.epochs, self.total_steps = 0, 0, 0

    def fit(self, train: Any, epochs: int, validate: Any = None, resume: str | Path | None = None) -> list[Row]:
        """Train until `epochs` epochs are done in all, counted from the very beginning of the run.

        Called again, it goes on where it ended. Ctrl-C and SIGTERM, on any worker, end the run after the step it is in,
        or in the middle of an evaluation, with a checkpoint. Layers that are in evaluation mode while the model as a
        whole is in training mode are taken to be frozen, and stay as they are.

        Args:
            train: a map-style data set, or a `Loader` of the trainer's global batch.
            epochs: 1 or more.
            validate: a data set, or a `Loader`, to evaluate on after each epoch.
            resume: a checkpoint to go on from, or the folder of a run, for the newest one in it, or "latest": the
                newest in `out`, which is fine to have none. Of these two the newest that is not damaged; what is
                passed over is logged as an error. Model, optimizer and callbacks get its state; hyperparameters that
                the optimizer is constructed with otherwise than then are as they are now, which is logged.

        Returns:
            The history: one row an epoch.

        Raises:
            ConfigError: for values that cannot be used, among them an `out` with another run, and fewer epochs than
                are done.
            CheckpointError: when `resume` is damaged, or of another model, optimizer or data set. Nothing has been
                changed then.
            DivergedError: when the loss is not finite, with the step and the learning rate.
            MismatchError: when the workers' hyperparameters or weights are no longer the same; on every worker.
            InterruptedRunError: after a signal, naming the checkpoint.
        """
        with ExitStack() as opened:
            loader = opened.enter_context(self._opened(train))
            held_out = None if validate is None else opened.enter_context(self._opened(validate, shuffle=False))
            self._begin(loader, epochs, resume)
            opened.callback(self._release_folder)
            with StopSignals() as signals, self.step.strategy.determined():
                self._loop = Loop(self, self._callbacks, signals)
                try:
                    self._loop.run(loader, held_out)
                    self.saver.wait()
                finally:
                    self._loop = None
                    self.saver.end()
        return self.history

    @contextmanager
    def _opened(self, dataset: Any, shuffle: bool = True) -> Iterator[Loader]:
        loader = self.loader(dataset, shuffle)
        try:
            yield loader
        finally:
            if loader is not dataset:
                loader.close()

    def _begin(self, loader: Loader, epochs: int, resume: str | Path | None) -> None:
        """Check everything, and only then take up the checkpoint."""
        if loader.global_batch != self.global_batch:
            hint = "Give both the same number, or fit the data set itself."
            raise ConfigError("global_batch", f"{self.global_batch}, the trainer's", loader.global_batch, hint)
        if loader.shards != self.step.strategy.shards:
            raise ConfigError("shards", f"{self.step.strategy.shards}, the trainer's", loader.shards)
        found = None if resume is None else self.saver.find(resume)
        position = self.position if found is None else Position(found.state["loader"])
        check_epochs(epochs, position, again=self._begun and resume is None)
        _take_to(position, loader, found)
        self._prepare_folder(found, fresh=not self._begun and resume != "latest")
        if found is not None:
            self._take_up(found)
        self._begun, self.stop_reason, self.unsettled = True, "", self._none_queued()
        self.epochs, self.total_steps = epochs, epochs * len(loader)

    def _none_queued(self) -> Unsettled:
        return Unsettled(self.comm.device, self.in_flight, partial(self._callbacks.on_loss, self))

    def _prepare_folder(self, found: Checkpoint | None, fresh: bool) -> None:
        out, from_path = self.out, self.saver.last_path if found is None else found.path
        if out is not None:
            self.made_folders += self.comm.on_rank0(lambda: out_folder.prepare(out, from_path, fresh))

    def _release_folder(self) -> None:
        if self.out is not None and self.comm.rank == 0:
            out_folder.release(self.out)

    @property
    def done(self) -> bool:
        """Whether the epochs that were asked for are done, or there was a reason to stop before."""
        return bool(self.stop_reason) or self.position.epoch >= self.epochs

    @property
    def conditions(self) -> dict[str, Any]:
        """What the bits of a run with shards depend on beside the program; empty for other runs."""
        return conditions_of(self.step.strategy, self.global_batch, self.step.precision.name)

    def check_losses(self) -> None:
        """See that the losses of all steps so far are finite; waits for the device.

        Raises:
            DivergedError: naming the step and the learning rate.
        """
        self.unsettled.check()

    def evaluate(self, dataset: Any) -> dict[str, float]:
        """Loss and metrics over a data set or `Loader`, every sample once, the same on every worker.

        Raises:
            ConfigError: for the very `Loader` that training is taking batches from, or a metric that returns what is
                no mean over samples.
            InterruptedRunError: after a signal while `fit` runs, naming the checkpoint.
        """
        self.step.strategy.sync_buffers()
        with self._opened(dataset, shuffle=False) as opened, self.step.strategy.determined():
            loader = opened if self._loop is None else self._loop.stoppable(opened)
            return self._measures.over(loader, self.step.precision, self.step.strategy, self.in_flight)

    def loader(self, dataset: Any, shuffle: bool = True) -> Loader:
        """A loader of this run's global batches over `dataset`; a `Loader` is returned as it is."""
        if isinstance(dataset, Loader):
            return dataset
        return Loader(
            dataset,
            self.global_batch,
            seed=self.seed,
            shuffle=shuffle,
            num_workers=self._num_workers,
            comm=self.comm,
            shards=self.step.strategy.shards,
        )

    def stop(self, reason: str) -> None:
        """End the `fit` that is running after this epoch, in good order; any worker may ask for it."""
        if self._loop is not None:
            self._loop.stopping.reason = self._loop.stopping.reason or reason

    def save(self) -> Path:
        """Write a checkpoint of this step; called by every worker.

        Rank 0 writes it, or with strategy="sharded" every worker its part. With `async_save` this returns when the
        state has been copied; `trainer.saver.wait()`, called by every worker, waits for the files.

        Raises:
            CheckpointError: when it cannot be written, or the run has no folder; with `async_save` also when the one
                before could not be.
            ConfigError: when a callback's state cannot be stored; names the callback and the place in its state.
            DivergedError: rather than saving a model with a loss that is not finite.
            MismatchError: likewise, where the workers have other weights or hyperparameters.
        """
        self.check_losses()
        self.step.check_replicas()
        self.step.strategy.sync_buffers()
        state = state_of(self, whole=False)
        return self.saver.save(state, lambda: {"callbacks": self._callbacks.state_dict()})

    def resume(self, which: str | Path) -> None:
        """Take up a checkpoint, taken with any number of workers, from which `fit` will go on; see there."""
        found = self.saver.find(which)
        if found is not None:
            self._take_up(found)

    def _take_up(self, found: Checkpoint) -> None:
        # Agreed on each time: workers read for themselves, and a strategy may make collectives in between.
        on_all(self.comm, partial(self._callbacks.load_state_dict, read_tensors(found.state.get("callbacks", {}))))
        on_all(self.comm, partial(load_state, self, found.state))
        self.saver.last = (found.step, found.path)

    def state_dict(self) -> dict[str, Any]:
        """All that another process needs to go on from here, with any number of workers; called by every worker."""
        return {**state_of(self), "callbacks": self._callbacks.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a saved state.

        Raises:
            CheckpointError: before anything is changed, when it is of another model or optimizer; when a callback
                cannot load its state.
        """
        load_state(self, state)
        self._callbacks.load_state_dict(state.get("callbacks", {}))


def _take_to(position: Position, loader: Loader, found: Checkpoint | None) -> None:
    """Let `loader` begin at `position`; an error names the checkpoint that it is from, if any."""
    try:
        position.take_to(loader)
    except CheckpointError as error:
        raise error if found is None else CheckpointError(f"{found.path}: {error}") from None
