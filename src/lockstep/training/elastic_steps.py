"""`steps`: the batches for a training loop of one's own, which goes on in an elastic job after the loss of a worker."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from signal import Signals
from typing import Any, TypeVar, cast

import torch

from .. import arguments, interruption
from ..communicator import init
from ..communicator.elastic_communicator import ElasticCommunicator, failure_reason
from ..data.loader import Batch, Loader
from ..elastic.client import WorkerLeft
from ..elastic.membership import NO_STATE, Commit, View
from ..errors import ConfigError, InterruptedRunError
from ..flight_recorder import named
from ..parallel.nested import map_tensors
from .elastic_loop import (
    JobSignals,
    buffers_beside,
    leave_later,
    load_buffers_beside,
    load_modes,
    modes_of,
    share,
    without_check,
)
from .in_flight import StepsInFlight
from .step import REGROUP, StepResult, TrainStep
from .stopping import StopSignals

__all__ = ["Steps", "steps"]

T = TypeVar("T")


def steps(loader: Loader, step: TrainStep, epochs: int = 1, *, state: Mapping[str, Any] | None = None) -> Steps:
    """Return the batches of a training whose loop is one's own, and which survives the loss of workers.

    In an elastic job (``lockstep run --elastic``) `step` repeats what the loss of a worker has interrupted, on the
    workers that are left; those that join get the state from the others, and begin with the body of the loop that is
    being run. Anywhere else the loop is an ordinary one::

        training = lockstep.elastic.steps(loader, step, epochs=5, state={"scheduler": scheduler})
        for batch in training:
            loss = step(batch)
            scheduler.step()
            if training.ends_epoch:
                measured = training.call(lockstep.evaluate, model, test_loader, loss_fn)

    The body has to do the same on all workers. It changes model and optimizer's state by `step` alone; hyperparameters
    and what is in `state` it may change anywhere. It communicates in `step` and in `Steps.call`, as the end of any
    other collective by a loss ends the job.

    Experimental: may change in any release.

    Args:
        loader: of the global batches; training begins at its position.
        step: the training step, with the `virtual_workers` of the loader.
        epochs: number of epochs in total, counted from the loader's epoch 0.
        state: what else the training changes, by name, and workers that join need: objects with ``state_dict()`` and
            ``load_state_dict()``, or dicts. In an elastic job they are copied before each batch.

    Returns:
        An iterable over this worker's parts of the global batches of all epochs.

    Raises:
        ConfigError: for invalid arguments.
    """
    _check(loader, step, epochs, state)
    comm = init()
    if isinstance(comm, ElasticCommunicator) and step.strategy.can_regroup:
        return _ElasticSteps(loader, step, epochs, dict(state or {}), comm)
    return Steps(loader, step, epochs)


def _check(loader: Any, step: Any, epochs: Any, state: Any) -> None:
    hint = "A loop with prepare() restarts from a checkpoint after a loss; TrainStep and Loader go on."
    arguments.instance("loader", loader, Loader, "a lockstep.Loader", hint)
    if loader.is_iterable:
        hint = "Trainer.fit reads an iterable data set in an elastic job as well."
        raise ConfigError("loader", "one whose samples have indices", found="one of an iterable data set", hint=hint)
    arguments.instance("step", step, TrainStep, "a lockstep.TrainStep")
    arguments.whole("epochs", epochs, least=1)
    if loader.virtual_workers != (own := step.strategy.virtual_workers):
        hint = f"Make it with Loader(..., virtual_workers={own})."
        raise ConfigError("virtual_workers", f"{own}, the step's, in the Loader as well", loader.virtual_workers, hint)
    if state is not None:
        arguments.instance("state", state, Mapping, "a dict of objects by name")
    for name, value in (state or {}).items():
        if not isinstance(value, dict) and not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
            expected = "an object with state_dict() and load_state_dict(), or a dict"
            raise ConfigError(f"state[{name!r}]", expected, found=type(value).__name__)


class Steps:
    """The batches of a training, see `steps`; outside of elastic jobs nothing more than that.

    Experimental: may change in any release.

    Args:
        loader, step, epochs: see `steps`.
    """

    def __init__(self, loader: Loader, step: TrainStep, epochs: int) -> None:
        self._loader, self._step, self._epochs = loader, step, epochs
        epoch, number = loader.position
        self._at = (epoch + 1, 0) if loader.ended else (epoch, number)
        self._ends = False
        self._stream: Iterator[Batch] | None = None
        self._batch: Batch | None = None  # the last one that was loaded

    @property
    def epoch(self) -> int:
        """The epoch of the current batch, from 0."""
        return self._at[0]

    @property
    def ends_epoch(self) -> bool:
        """Whether the current batch is the last one of its epoch."""
        return self._at[1] == len(self._loader) - 1

    def call(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Return ``fn(*args, **kwargs)``, for what communicates beside the step, such as an evaluation.

        All workers call it. In an elastic job it is called again if a worker is lost meanwhile, so it must change
        nothing that the training uses, and return the same on all workers; who joins gets the result.

        Args:
            fn: the function.
            args: its positional arguments.
            kwargs: its keyword arguments.
        """
        return fn(*args, **kwargs)

    def stop(self) -> None:
        """End the loop after the current batch; called by all workers."""
        self._ends = True

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over the batches that are left; once.

        Raises:
            InterruptedRunError: the launcher of an elastic job has received a signal to stop.
        """
        while not self._is_over:
            yield self._load()
            self._advance()

    @property
    def _is_over(self) -> bool:
        return self._ends or self._at[0] >= self._epochs

    def _advance(self) -> None:
        epoch, number = self._at
        self._at = (epoch + 1, 0) if self.ends_epoch else (epoch, number + 1)

    def _load(self) -> Batch:
        """Return this worker's part of the current batch."""
        if self._batch is None or (self._batch.epoch, self._batch.step) != self._at:
            epoch, number = self._at
            if self._stream is None or number == 0:
                self._loader.load_state_dict({**self._loader.state_dict(), "epoch": epoch, "step": number})
                self._stream = self._loader.epoch(epoch)
            self._batch = next(self._stream)
        return self._batch


# --- In an elastic job ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Progress:
    """Where a worker is in its program, as far as workers behind it need it.

    Attributes:
        at: the epoch and the number of the current batch.
        ends: whether the loop ends before that batch.
        signal: after which the whole job stops; 0 if there is none.
        last: the last operation.
        results: all operations in the current body.
        hyperparameters: of the optimizer's parameter groups at the beginning of the body.
        state: the user's at the beginning of the body.
        modes: which parameters were trained, and which modules in training mode, at the beginning of the body.
    """

    at: tuple[int, int]
    ends: bool
    signal: int
    last: _Operation
    results: list[_Operation]
    hyperparameters: list[dict[str, Any]]
    state: dict[str, Any]
    modes: dict[str, Any]


_Operation = tuple[Any, list[dict[str, Any]]]
"""The result of an operation, and the hyperparameters as it has left them: a scheduler of the step changes them, and
the program of who has not run it must not."""


class _ElasticSteps(Steps):
    """The batches of a training in an elastic job, see `lockstep.elastic.membership` for the protocol.

    An *operation* is a step, or a call of `call`. A worker's *commit* is (number of the training, operations done).
    Only operations are interrupted, and each is done or not done. Members are at most one operation apart: who is
    behind gets its result, and what a step has changed. Who joins runs the current body from its beginning, with the
    state as it was there; the operations that the others have done return their results.

    Args:
        loader, step, epochs, state: see `steps`.
        comm: the communicator of the workers.
    """

    def __init__(
        self, loader: Loader, step: TrainStep, epochs: int, state: dict[str, Any], comm: ElasticCommunicator
    ) -> None:
        super().__init__(loader, step, epochs)
        self._state, self._comm, self._client = state, comm, comm.client
        self._strategy, self._optimizer = step.strategy, step.optimizer
        self._in_flight = StepsInFlight(comm.device)
        self._training = -1  # its number in the program
        self._has_state = not comm.is_joining
        self._operations = 0  # done since the beginning of the training
        self._results: list[_Operation] = []  # of the current body
        self._returned = 0  # how many of them this worker's body has been given
        self._last: _Operation = None, []
        self._signal = 0
        self._signals = StopSignals()
        self._job_signals = JobSignals(self._client)

    def __iter__(self) -> Iterator[Batch]:
        comm = self._comm
        self._training, comm.trainings = comm.trainings, comm.trainings + 1
        if comm.earlier_result() is not None:
            return  # the others have completed this training before this worker joined
        comm.keeps_values = False
        self._step.replacement = self._run_step
        try:
            with self._signals:
                self._enter()
                while not self._is_over:
                    yield self._loaded()
                    self._end_body()
                self._complete()
                leave_later(self._signals, self._client)
        finally:
            self._step.replacement, comm.keeps_values = None, True
        comm.note_result(True)

    def _enter(self) -> None:
        self._note_beginning()
        if self._comm.is_joining:
            self._regroup()
            return
        size = self._loader.global_batch_size
        self._client.enter(self._training, min(size, self._strategy.virtual_workers or size))

    def _complete(self) -> None:
        """Wait until all members have completed the training; they may need this worker's state until then."""
        while not self._client.complete():
            self._regroup()
        if self._signal:
            name = Signals(self._signal).name
            interruption.install()
            raise InterruptedRunError(f"stopped by {name} after step {self._step.steps_done}", self._signal)

    # --- the body of the loop -----------------------------------------------------------------------------------------

    def _loaded(self) -> Batch:
        while True:
            try:
                return self._load()
            except RuntimeError as error:
                self._regroup(failure_reason(error))

    def _end_body(self) -> None:
        requests = self._in_flight.settle()
        self._advance()
        self._results, self._returned = [], 0
        self._note_beginning()
        if requests % REGROUP:
            self._signal = self._job_signals.received or Signals.SIGTERM
            self._ends = True
        elif requests >= REGROUP:
            self._regroup(at_boundary=True)

    def _note_beginning(self) -> None:
        """Copy what the body may change, for workers that join while it runs."""
        state = copy.deepcopy({name: _read(value) for name, value in self._state.items()})
        self._beginning = self._hyperparameters(), state, modes_of(self._step.model)

    def _hyperparameters(self) -> list[dict[str, Any]]:
        """Return a copy of the hyperparameters of the optimizer's parameter groups."""
        groups = [{name: value for name, value in g.items() if name != "params"} for g in self._optimizer.param_groups]
        return copy.deepcopy(groups)

    def _set_hyperparameters(self, groups: list[dict[str, Any]]) -> None:
        for group, values in zip(self._optimizer.param_groups, groups, strict=True):
            for name, value in values.items():
                own = group.get(name)
                is_tensor = isinstance(own, torch.Tensor) and isinstance(value, torch.Tensor)
                group[name] = value.to(own.device) if is_tensor else value  # type: ignore[union-attr]

    def call(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """See `Steps.call`."""
        result: T = self._operate(lambda: fn(*args, **kwargs))
        return result

    def _run_step(self, batch: Batch) -> StepResult:
        """Run a step in the place of `TrainStep.run`."""
        if (batch.epoch, batch.step) != self._at:
            got = f"batch {batch.step} of epoch {batch.epoch}"
            raise ConfigError("batch", "the batch of lockstep.elastic.steps in the body of its loop", found=got)
        result: StepResult = self._operate(self._attempt_step)
        return result

    def _attempt_step(self) -> StepResult:
        batch = self._load()  # again, if there are other workers than when the body began
        self._leave_if_signalled()
        self._strategy.begin_step()
        try:
            self._client.check()  # a worker that is alone waits in no collective
            stop = self._job_signals.received is not None
            result = self._step.run_once(batch, stop=stop, regroup=self._client.wants_to_regroup)
        except BaseException:
            self._strategy.abandon_step()
            raise
        self._in_flight.add(result)
        return cast(StepResult, without_check(result))

    def _operate(self, attempt: Callable[[], Any]) -> Any:
        """Return the result of the body's next operation, from whoever has done it."""
        number = self._returned
        was_done = len(self._results) > number  # by others, before this worker joined
        while len(self._results) == number:
            try:
                result = attempt()
            except RuntimeError as error:
                self._regroup(failure_reason(error))
            else:
                self._note((result, self._hyperparameters()))
        self._returned += 1
        result, hyperparameters = self._results[number]
        if was_done:
            self._set_hyperparameters(hyperparameters)
        return result

    def _note(self, operation: _Operation) -> None:
        self._operations += 1
        self._results.append(operation)
        self._last = operation

    # --- regrouping ---------------------------------------------------------------------------------------------------

    def _leave_if_signalled(self) -> None:
        if self._signals.received is not None and not self._client.leaving and not self._client.stop_signal:
            self._client.leave()

    def _commit(self) -> Commit:
        self._leave_if_signalled()
        return (self._training, self._operations) if self._has_state else NO_STATE

    def _regroup(self, reason: str = "", at_boundary: bool = False) -> None:
        self._comm.regroup_until(self._commit, self._adapt, reason, at_boundary)

    def _adapt(self, view: View) -> None:
        best = max(view.commits)
        if best[:1] > (self._training,):  # the others are in a later training than this worker, which has just joined
            raise WorkerLeft
        comm, source, joins = self._comm, view.members.index(view.source), NO_STATE in view.commits
        with named("position in the loop"):  # which ranks get to from different places
            progress: _Progress = comm.broadcast_object(self._progress(joins) if comm.rank == source else None, source)
        if any(commit != best for commit in view.commits):
            self._share(source, progress, best)
        self._step.regroup()
        self._in_flight.clear()
        self._stream = self._batch = None
        self._load_for(progress)

    def _load_for(self, progress: _Progress) -> None:
        """Load the batch of the most advanced worker, on all: a loader may compare its order among the workers."""
        own, self._at = self._at, progress.at
        try:
            if not progress.ends and self._at[0] < self._epochs:
                self._load()
        finally:
            self._at = own

    def _progress(self, joins: bool) -> _Progress:
        groups, state, modes = self._beginning if joins else ([], {}, {})
        results = self._results if joins else []
        last, results, groups, state = _on(torch.device("cpu"), (self._last, results, groups, state))
        return _Progress(self._at, self._ends, self._signal, last, results, groups, state, modes)

    def _share(self, source: int, progress: _Progress, best: Commit) -> None:
        """Give the state of the most advanced worker to those behind it."""
        step, behind, state = self._step, self._commit() != best, None
        if self._comm.rank == source:
            state = {"model": step.model.state_dict(), "optimizer": self._optimizer.state_dict()}
            state |= {"step": step.state_dict(), "buffers": buffers_beside(step.model)}
        received = share(self._comm, source, state, behind)
        if not behind:
            return
        device = self._comm.device
        load_buffers_beside(step.model, received["buffers"])
        self._strategy.load_model_state(step.model, received["model"])
        self._strategy.load_optimizer_state(step.model, self._optimizer, received["optimizer"])
        # The source's own program may have changed them since.
        self._set_hyperparameters(progress.last[1] if self._has_state else progress.hyperparameters)
        step.load_state_dict(received["step"])
        if self._has_state:
            self._note((_on(device, progress.last[0]), progress.last[1]))
            self._ends, self._signal = self._ends or bool(progress.signal), progress.signal
            return
        self._at, self._ends, self._signal = progress.at, progress.ends, progress.signal
        self._last = progress.last
        self._results = [(_on(device, result), groups) for result, groups in progress.results]
        self._operations, self._has_state = best[1], True
        load_modes(step.model, progress.modes)
        for name, value in _on(device, progress.state).items():
            _write(self._state[name], value)
        self._note_beginning()


def _read(value: Any) -> Any:
    return value if isinstance(value, dict) else value.state_dict()


def _write(value: Any, saved: Any) -> None:
    if isinstance(value, dict):
        value.clear()
        value.update(saved)
    else:
        value.load_state_dict(saved)


def _on(device: torch.device, value: Any) -> Any:
    """Return a value with its tensors on `device`, and without their graphs."""
    return map_tensors(lambda tensor: tensor.detach().to(device), value)
