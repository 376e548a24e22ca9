"""Wires loader, step, evaluation, checkpoints and callbacks into a training run."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from signal import Signals
from typing import Any, NoReturn

from torch import nn
from torch.optim import Optimizer
from typing_extensions import TypedDict, Unpack

from ..communicator import init
from ..data.loader import Loader
from ..errors import ConfigError, DivergedError, InterruptedRunError
from ..strategies import STRATEGIES
from .callbacks import defaults
from .callbacks.base import Callback, Row
from .callbacks.group import CallbackGroup
from .epoch import EpochTotals
from .evaluate import Metric, default_metrics, evaluate
from .losses import Forward, LossFn
from .saving import Saver
from .schedules import Schedule
from .signals import StopSignals
from .step import StepResult, TrainStep

__all__ = ["StepOptions", "Trainer"]

# Off the CPU a loss is looked at when this many younger steps are queued, so that the device never waits for the host.
_STEPS_IN_FLIGHT = 4


class StepOptions(TypedDict, total=False):
    """What a `Trainer` hands on to its `TrainStep`; see there."""

    precision: str
    accumulate: int
    clip_norm: float | None
    schedule: Schedule | None
    forward: Forward | None


class Trainer:
    """Trains a model on all workers of the job.

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
        callbacks: `lockstep.training.callbacks.defaults` when None.
        strategy: "distributed"; see `lockstep.strategies`.
        metrics: of the evaluation, see `lockstep.training.evaluate.Metric`; accuracy for classification when None.
        num_workers: processes that load data ahead, for each worker.
        step: precision, accumulate, clip_norm, schedule and forward, see `TrainStep`.

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
        callbacks: Sequence[Callback] | None = None,
        strategy: str = "distributed",
        metrics: Mapping[str, Metric] | None = None,
        num_workers: int = 0,
        **step: Unpack[StepOptions],
    ) -> None:
        self.comm = init()
        self.model, self.optimizer, self.loss_fn = model, optimizer, loss_fn
        self.global_batch, self.seed, self._num_workers = global_batch, seed, num_workers
        self.metrics = default_metrics(loss_fn) if metrics is None else metrics
        self.out = None if out is None else Path(out)
        made = STRATEGIES.load(strategy)(self.comm)
        self.step = TrainStep(model, optimizer, loss_fn, strategy=made, seed=seed, **step)
        self._forward = step.get("forward")
        chosen = defaults(self.out is not None) if callbacks is None else callbacks
        self._callbacks = CallbackGroup(chosen, self.comm.rank)
        self._saver = Saver(self)
        self._loader: Loader | None = None
        self._stop_reason, self._in_mid_epoch = "", False
        self._unsettled: deque[StepResult] = deque()
        self.history: list[Row] = []
        self.epoch, self.epochs, self.total_steps = 0, 0, 0
        self.totals = EpochTotals(self.comm.device)

    def fit(self, train: Any, epochs: int, validate: Any = None, resume: str | Path | None = None) -> list[Row]:
        """Train for `epochs` epochs in all, counted from the very beginning of the run.

        Ctrl-C and SIGTERM, on any worker, end the run after the step it is in, with a checkpoint.

        Args:
            train: a map-style data set, or a `Loader`.
            epochs: 1 or more.
            validate: a data set, or a `Loader`, to evaluate on after each epoch.
            resume: a checkpoint to go on from, or "latest": the newest in `out`, which is fine to have none.

        Returns:
            The history: one row an epoch.

        Raises:
            ConfigError: for values that cannot be used.
            CheckpointError: when `resume` is damaged, or of another model, optimizer or data set.
            DivergedError: when the loss is not finite, with the step and the learning rate.
            InterruptedRunError: after a signal, naming the checkpoint.
        """
        if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
            raise ConfigError("epochs", "a whole number of at least 1", epochs)
        loader = self._loader = self.loader(train)
        held_out = None if validate is None else self.loader(validate, shuffle=False)
        self.epochs, self.total_steps = epochs, epochs * len(loader)
        if resume is not None:
            self.resume(resume)
        self._make_folder()
        self.model.train()
        with StopSignals() as signals, self._callbacks.running(self), self._naming_the_last_checkpoint():
            for self.epoch in range(loader.position[0], epochs):
                self._train_epoch(loader, signals)
                self._end_epoch(held_out)
                if self._agree_to_stop(signals):
                    break
        return self.history

    def _make_folder(self) -> None:
        folder = self.out
        if folder is not None:
            try:
                self.comm.on_rank0(lambda: folder.mkdir(parents=True, exist_ok=True))
            except OSError as error:
                raise ConfigError("out", "a folder that can be written", f"{folder} ({error.strerror})") from None

    def _train_epoch(self, loader: Loader, signals: StopSignals) -> None:
        if not self._in_mid_epoch:
            self.totals = EpochTotals(self.comm.device)
        self._in_mid_epoch = False
        for batch in loader.epoch(self.epoch):
            result = self.step.run(batch, stop=signals.received is not None)
            self.totals.add(result.loss, batch.global_size)
            # Before the callbacks: one of them may save, and must then look at this step's loss as well.
            self._unsettled.append(result)
            self._callbacks.on_step(self, result)
            if self._settle():
                self._interrupt(signals)

    def _settle(self) -> bool:
        """Look at the losses of this step or, off the CPU, of an earlier one; whether a worker wanted to stop."""
        in_flight = 0 if self.comm.device.type == "cpu" else _STEPS_IN_FLIGHT
        stop = False
        while len(self._unsettled) > in_flight:
            settled = self._unsettled.popleft()
            settled.check()
            stop = stop or bool(settled.stop > 0)
        return stop

    def _interrupt(self, signals: StopSignals) -> NoReturn:
        numbers = [number for number in self.comm.allgather_object(signals.received) if number is not None]
        number = numbers[0] if numbers else int(Signals.SIGTERM)
        where = f"{Signals(number).name} after step {self.step.steps_done} (epoch {self.epoch + 1} of {self.epochs})"
        path = None if self.out is None else self.save()
        saved = "nothing was saved, as the run has no folder" if path is None else f"saved {path}"
        raise InterruptedRunError(f"stopped by {where}; {saved}", number, None if path is None else str(path))

    def _agree_to_stop(self, signals: StopSignals) -> bool:
        wishes = self.comm.allgather_object((signals.received, self._stop_reason))
        if any(number is not None for number, _ in wishes) and self.epoch + 1 < self.epochs:
            self._interrupt(signals)
        self._stop_reason = next((reason for _, reason in wishes if reason), "")
        return bool(self._stop_reason)

    @contextmanager
    def _naming_the_last_checkpoint(self) -> Iterator[None]:
        try:
            yield
            self.check_losses()
        except DivergedError as error:
            raise DivergedError(f"{error} {self._last_checkpoint()}") from None

    def _last_checkpoint(self) -> str:
        return f"The last checkpoint is {self._saver.last}." if self._saver.last else "There is no checkpoint yet."

    def check_losses(self) -> None:
        """See that the losses of all steps so far are finite; waits for the device.

        Raises:
            DivergedError: naming the step and the learning rate.
        """
        for result in self._unsettled:  # they stay: whether a worker wanted to stop is still to be seen
            result.check()

    def _end_epoch(self, held_out: Loader | None) -> None:
        row: Row = {
            "epoch": self.epoch + 1,
            "step": self.step.steps_done,
            "train_loss": self.totals.loss,
            "lr": float(self.optimizer.param_groups[0]["lr"]),
            "seconds": self.totals.seconds,
            "samples_per_second": self.totals.samples_per_second,
        }
        if held_out is not None:
            measured = self.evaluate(held_out)
            row |= {f"test_{name}": value for name, value in measured.items()}
            if not math.isfinite(measured["loss"]):
                step, lr = self.step.steps_done, row["lr"]
                raise DivergedError(f"the test loss is {measured['loss']} after step {step} with learning rate {lr:g}.")
        self.check_losses()
        self.history.append(row)
        self._callbacks.on_epoch(self, row)

    def evaluate(self, dataset: Any) -> dict[str, float]:
        """Loss and metrics over a data set or `Loader`, every sample once, the same on every worker."""
        self.step.strategy.sync_buffers()
        loader = self.loader(dataset, shuffle=False)
        return evaluate(
            self.model, loader, self.loss_fn, self.metrics, precision=self.step.precision, forward=self._forward
        )

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
        )

    def stop(self, reason: str) -> None:
        """End the run after this epoch, in good order; any worker may ask for it."""
        self._stop_reason = self._stop_reason or reason

    def save(self) -> Path:
        """Write a checkpoint of this step; called by every worker, written by rank 0.

        Raises:
            CheckpointError: when it cannot be written, or the run has no folder.
            DivergedError: rather than saving a model with a loss that is not finite.
        """
        self.check_losses()
        self.step.strategy.sync_buffers()
        return self._saver.save(self.state_dict())

    def resume(self, which: str | Path) -> None:
        """Go on from a checkpoint, taken with any number of workers; see `fit`."""
        found = self._saver.load(which)
        if found is not None:
            self.load_state_dict(found.state)

    def state_dict(self) -> dict[str, Any]:
        """All that another process needs to go on from here, with any number of workers."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step.state_dict(),
            "loader": None if self._loader is None else self._loader.state_dict(),
            "totals": self.totals.state_dict(),
            "history": self.history,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a saved state."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step.load_state_dict(state["step"])
        self.history = list(state["history"])
        self.totals = EpochTotals(self.comm.device)
        if self._loader is not None and state["loader"] is not None:
            self._loader.load_state_dict(state["loader"])
            # Also behind the last step of an epoch: its evaluation is still to be made.
            self._in_mid_epoch = self._loader.position[1] > 0
        if self._in_mid_epoch:
            self.totals.load_state_dict(state["totals"])
