"""The loop of an elastic job: after the loss of a worker the others repeat the step in flight, and go on."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from ..checkpoint.serialization import pack, unpack
from ..communicator import Communicator
from ..communicator.elastic_communicator import ElasticCommunicator, failure_reason
from ..data.loader import Batch, Loader
from ..elastic.client import MembershipClient, WorkerLeft
from ..elastic.membership import NO_STATE, Commit, View
from ..errors import ConfigError, InterruptedRunError, MembershipChangedError
from ..flight_recorder import named
from ..parallel.module_sync import expanded_dimensions
from .callbacks.base import Callback, TrainingContext
from .callbacks.checkpoints import Checkpoints
from .callbacks.group import CallbackGroup
from .loop import Loop, Run
from .recovery import REGROUP, Recovery
from .step import StepResult
from .stop_signals import StopSignals

__all__ = [
    "ElasticCallbacks",
    "ElasticLoop",
    "ElasticRun",
    "JobSignals",
    "buffers_beside",
    "leave_later",
    "load_buffers_beside",
    "load_modes",
    "modes_of",
    "share",
    "without_check",
]

_OWN = f"{__name__.partition('.')[0]}."


# --- Callbacks, of which those of rank 0 may move to another worker ---------------------------------------------------

_AFTER_COMMIT = ("on_train_step_end", "on_loss", "on_row", "on_train_epoch_end")
_REPEATED = ("on_checkpoint_start", "on_checkpoint_end")  # a checkpoint may be written again at the same step


class ElasticCallbacks(CallbackGroup):
    """Callbacks of an elastic job: an event that a repeated step brings again is not called again.

    Args:
        callbacks: see `CallbackGroup`.
        rank: the first rank of this worker.

    Raises:
        ConfigError: for a callback on rank 0 that could not go on on another worker.
    """

    def __init__(self, callbacks: Iterable[Callback], rank: int) -> None:
        callbacks = list(callbacks)
        super().__init__(callbacks, rank)
        self._rank = rank
        self._all = list(self._by_name.values())
        self._seen: set[tuple[Any, ...]] = set()
        self._after_commit: list[tuple[str, tuple[Any, ...]]] = []
        self._at: tuple[int, int] = (-1, -1)
        self._last_states = b""
        for name, member in self._by_name.items():
            _check_movable(name, member)

    def call(self, hook: str, trainer: TrainingContext, *arguments: Any) -> None:
        """See `CallbackGroup.call`; does nothing for an event that was called before."""
        at = trainer.step.steps_done, len(trainer.history)
        if at != self._at:
            self._at, self._after_commit = at, []
            self._seen = {key for key in self._seen if key[0] == self._epoch_key(trainer)}
        of = self._epoch_key(trainer) if hook == "on_train_epoch_start" else at
        key = (of, hook, getattr(arguments[0], "step", None) if arguments else None)
        if key in self._seen and hook not in _REPEATED:
            return
        self._seen.add(key)
        if hook in _AFTER_COMMIT:
            self._after_commit.append((hook, tuple(map(without_check, arguments))))
        super().call(hook, trainer, *arguments)

    @staticmethod
    def _epoch_key(trainer: TrainingContext) -> tuple[str, int]:
        return "epoch", trainer.epoch

    @property
    def events(self) -> list[tuple[str, tuple[Any, ...]]]:
        """The events since the last commit, which belong to it."""
        return list(self._after_commit)

    def set_events(self, trainer: TrainingContext, events: list[tuple[str, tuple[Any, ...]]]) -> None:
        """Take over the events of a commit that this worker was given."""
        self._at, self._after_commit = (trainer.step.steps_done, len(trainer.history)), list(events)
        self._seen = {(self._at, hook, getattr(of[0], "step", None) if of else None) for hook, of in events}
        self._seen.add((self._epoch_key(trainer), "on_train_epoch_start", None))

    def catch_up(self, trainer: TrainingContext, done: int) -> None:
        """Call what `set_events` was given, if this is the worker of rank 0 and was so before.

        Args:
            trainer: the run.
            done: steps that this worker had done itself, whose events it has called.
        """
        if self._rank != 0:
            return  # `take_rank` does so
        for hook, arguments in self._after_commit:
            step = getattr(arguments[0], "step", None) if arguments else None
            for member in self._members if step is None or step >= done else ():
                if not member.every_rank:  # else it has been given its state
                    self._run(member, hook, trainer, *arguments)

    def changed_states(self) -> bytes | None:
        """Return the states of the callbacks that run on rank 0 only, if they have changed since the last call."""
        states = {
            name: state
            for name, member in self._by_name.items()
            if not member.every_rank and (state := member.state_dict())
        }
        if not states:
            return None
        data = pickle.dumps(pack(states))
        if data == self._last_states:
            return None
        self._last_states = data
        return data

    def forget_states(self) -> None:
        """Let `changed_states` return the states again."""
        self._last_states = b""

    def shared_states(self) -> dict[str, Any]:
        """Return the states of the callbacks that run on every rank."""
        return {name: member.state_dict() for name, member in self._by_name.items() if member.every_rank}

    def load_shared_states(self, states: Mapping[str, Any]) -> None:
        """Load what `shared_states` returned on another worker."""
        for name, state in states.items():
            if state:
                self._by_name[name].load_state_dict(state)

    def take_rank(self, rank: int, trainer: TrainingContext, states: bytes | None, repeat: bool) -> None:
        """Adapt to this worker's new rank; the first one runs the callbacks of rank 0 from here on.

        Args:
            rank: the new rank.
            trainer: the run.
            states: the states of rank 0's callbacks, as its predecessor sent them last.
            repeat: whether the predecessor has not called the events of the last commit.
        """
        before, self._rank = self._rank, rank
        if rank != 0 or before == 0:
            return
        self._logs = True
        new = [member for member in self._all if not member.every_rank]
        self._members = self._all
        self._by_hook.clear()
        if states is not None:
            loaded = unpack(*pickle.loads(states))
            for name, member in self._by_name.items():
                if name in loaded and member in new:
                    member.load_state_dict(loaded[name])
        epoch_has_begun = self._epoch_key(trainer) in {key[0] for key in self._seen}
        for member in new:
            self._start(member, trainer)
            if epoch_has_begun:
                self._run(member, "on_train_epoch_start", trainer)
        for hook, arguments in self._after_commit if repeat else ():
            for member in new:
                self._run(member, hook, trainer, *arguments)

    def _end(self, member: Callback, trainer: TrainingContext, error: BaseException | None) -> None:
        if not isinstance(error, WorkerLeft):  # the run goes on elsewhere
            super()._end(member, trainer, error)

    def final_save_is_due(self, trainer: TrainingContext) -> bool:
        """Return whether a checkpoint is to be written at the end of the run, as `Checkpoints.on_train_end` does."""
        saves = any(isinstance(member, Checkpoints) and member.saves_at_end for member in self._members)
        return saves and trainer.newest_checkpoint_step != trainer.step.steps_done


def _check_movable(name: str, member: Callback) -> None:
    kind = type(member)
    if member.every_rank or kind.__module__.startswith(_OWN) or kind.state_dict is not Callback.state_dict:
        return
    hint = (
        "Give it state_dict() and load_state_dict(), which may return {} and do nothing if it keeps nothing, or set "
        "every_rank = True."
    )
    expected = "a callback with state_dict(): in an elastic job rank 0's callbacks go on on another worker when it goes"
    raise ConfigError(f"callbacks.{name}", expected, found="one without", hint=hint)


def without_check(argument: Any) -> Any:
    """Return an argument of a hook without what cannot be sent to another worker."""
    return argument.replaced(replicas=None) if isinstance(argument, StepResult) else argument


# --- State for workers that are behind --------------------------------------------------------------------------------


# Bytes of one broadcast. Who does not need the state receives each into the same memory, and a group that has just been
# formed needs little of its own. On 4 workers and 2 cores 164 MB took 0.31 s over shm and 0.44 s over Gloo in whole
# tensors, 0.21 and 0.36 s in pieces of 4 MiB, and 0.16 and 0.30 s in these.
_PIECE = 16 << 20


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8)


def share(comm: Communicator, source: int, state: Mapping[str, Any] | None, wanted: bool) -> dict[str, Any]:
    """Send a state, tensor by tensor, from rank `source` to all; every worker calls this.

    Args:
        comm: of the workers.
        source: the rank that has it.
        state: plain values and tensors; ignored on the others.
        wanted: whether this worker needs it.

    Returns:
        The state; {} where it is not wanted.
    """
    tensors: dict[str, torch.Tensor] = {}
    described: Any = None
    if comm.rank == source:
        values, tensors = pack(dict(state or {}))
        described = values, [(name, tuple(t.shape), t.dtype) for name, t in tensors.items()]
    with named("state for workers that joined"):
        values, layout = comm.broadcast_object(described, source)
        scratch = torch.empty(0 if wanted else _PIECE, dtype=torch.uint8, device=comm.device)
        received: dict[str, torch.Tensor] = {}
        for name, shape, dtype in layout:
            own = tensors.get(name)
            if own is not None:
                own = own.detach().to(comm.device).contiguous()
            elif wanted:
                own = received[name] = torch.empty(shape, dtype=dtype, device=comm.device)
            size = math.prod(shape) * dtype.itemsize
            for start in range(0, size, _PIECE):
                end = min(size, start + _PIECE)
                comm.broadcast(scratch[: end - start] if own is None else _bytes(own)[start:end], source)
        if comm.rank == source:
            received = tensors
    return dict(unpack(values, received)) if wanted else {}


def buffers_beside(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers of a model that are not in its state dict."""
    persistent = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in model.named_buffers() if name not in persistent}


def load_buffers_beside(model: nn.Module, buffers: Mapping[str, torch.Tensor]) -> None:
    """Load what `buffers_beside` returned on another worker, where a buffer may have another shape by now."""
    for full_name, value in buffers.items():
        path, _, name = full_name.rpartition(".")
        module = model.get_submodule(path)
        buffer = module._buffers.get(name)
        fits = buffer is not None and (buffer.shape, buffer.dtype) == (value.shape, value.dtype)
        if buffer is not None and fits and not expanded_dimensions(buffer):
            with torch.no_grad():
                buffer.copy_(value)
        else:
            module.register_buffer(name, value, persistent=False)


def modes_of(model: nn.Module) -> dict[str, dict[str, bool]]:
    """Return which parameters of a model are trained, and which modules are in training mode."""
    return {
        "trained": {name: parameter.requires_grad for name, parameter in model.named_parameters()},
        "training": {name: module.training for name, module in model.named_modules()},
    }


def load_modes(model: nn.Module, modes: Mapping[str, Mapping[str, bool]]) -> None:
    """Set what `modes_of` returned on another worker."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(modes["trained"].get(name, parameter.requires_grad))
    for name, module in model.named_modules():
        module.training = modes["training"].get(name, module.training)


# --- The loop ---------------------------------------------------------------------------------------------------------


class ElasticRun(Run, Protocol):
    """What the elastic loop needs of a training run besides `Run`; the `Trainer` has it."""

    def hold_run_directory(self) -> None:
        """Lock the run directory on rank 0, which may be another worker than before."""

    def leave_run_directory(self) -> None:
        """Unlock it."""


class _Boundary(Exception):  # noqa: N818 - no error
    """All members have agreed to regroup after this step."""


def leave_later(signals: StopSignals, client: MembershipClient) -> None:
    """Note that this worker was told to leave a training that is complete by now: it leaves the next one, if any.

    The signal would end the program around the training, while the other workers may need this one.
    """
    if signals.received is not None:
        client.leaving, signals.received = True, None


class JobSignals(StopSignals):
    """The signals of the whole job; one to this worker alone means that it leaves."""

    def __init__(self, client: MembershipClient) -> None:
        super().__init__()
        self._client = client

    @property
    def received(self) -> int | None:
        """The signal after which the whole job saves and ends."""
        return self._client.stop_signal or None

    @received.setter
    def received(self, _: int | None) -> None:
        """Ignore what `StopSignals` sets."""


class _Requests(Recovery):
    """Lets a step request what a worker wants."""

    def __init__(self, client: MembershipClient) -> None:
        self._client = client

    @property
    def requests(self) -> float:
        """See `Recovery.requests`."""
        return REGROUP * self._client.wants_to_regroup


class ElasticLoop(Loop):
    """The loop over epochs of an elastic job, see `lockstep.elastic.membership` for the protocol.

    A worker's *commit* is (number of the fit, steps done, rows of the history). Between two commits it changes nothing
    that it cannot restore, and only waits in collectives are interrupted, so that a step is done or not.

    Args:
        trainer, callbacks: see `Loop`.
        signals: the signals that this worker has received: the first means that it leaves.
        comm: the communicator of the trainer.
        fit: the number of this call of `fit`, from 0.
        most: the largest number of workers that the training can have.
    """

    def __init__(
        self,
        trainer: ElasticRun,
        callbacks: ElasticCallbacks,
        signals: StopSignals,
        comm: ElasticCommunicator,
        fit: int,
        most: int,
    ) -> None:
        super().__init__(trainer, callbacks, JobSignals(comm.client))
        self._run, self._events, self._signals = trainer, callbacks, signals
        self._comm, self._client, self._fit, self._most = comm, comm.client, fit, most
        trainer.step.recovery = _Requests(comm.client)
        self._has_state = not comm.is_joining
        self._save_due: bool | None = None  # whether an interrupted checkpoint was the best one

    def run(self, loader: Loader, held_out: Loader | None, validate_every: int | None = None) -> None:
        """See `Loop.run`.

        Raises:
            WorkerLeft: this worker has left the job, which goes on.
        """
        self._held_out, self._validate_every = held_out, validate_every
        trainer = self._trainer
        self._comm.keeps_values = False
        try:
            if self._comm.is_joining:
                self._regroup()
            else:
                folder = "" if trainer.run_dir is None else str(trainer.run_dir.absolute())
                self._client.enter(self._fit, self._most, folder)
            with self._naming_checkpoint(), self._events.running(trainer):
                self._run_until_complete(loader)
            leave_later(self._signals, self._client)
        finally:
            self._comm.keeps_values = True
        self._comm.note_result(trainer.history)

    def _run_until_complete(self, loader: Loader) -> None:
        stopped: InterruptedRunError | None = None
        while True:
            reason, at_boundary = "", False
            try:
                if stopped is None:
                    self._continue(loader)
                if self._client.complete():
                    break
            except _Boundary:
                at_boundary = True
            except InterruptedRunError as error:
                stopped = error
                continue
            except RuntimeError as error:
                reason = failure_reason(error)
            self._regroup(reason, at_boundary)
        if stopped is not None:
            raise stopped

    def _continue(self, loader: Loader) -> None:
        """Train from the last commit to the end."""
        trainer = self._trainer
        state = trainer.state
        state.epoch = state.position.last_epoch
        while not self._agree_to_stop():
            state.epoch = state.position.epoch
            state.position.seek(loader)
            self._train_epoch(loader)
            self._end_epoch()
        trainer.step.check_weights()
        if self._events.final_save_is_due(trainer):
            trainer.save()
        trainer.checkpoint_manager.wait()
        if self.stop_requests.agree()[0] is not None:
            self._interrupt()

    # --- steps --------------------------------------------------------------------------------------------------------

    def _run_step(self, batch: Batch) -> StepResult:
        trainer = self._trainer
        self._note_events()
        self._leave_if_signalled()
        strategy = trainer.step.strategy
        strategy.begin_step()
        try:
            self._client.check()  # a worker that is alone waits in no collective
            return trainer.step.run(batch, stop=self.stop_requests.signalled)
        except BaseException:
            strategy.abandon_step()
            raise

    def _settle(self) -> None:
        requests = self._trainer.steps_in_flight.settle()
        if requests % REGROUP:
            self._interrupt()
        if requests >= REGROUP:
            raise _Boundary

    def _agree_to_stop(self) -> bool:
        self._note_events()
        return super()._agree_to_stop()

    def _leave_if_signalled(self) -> None:
        if self._signals.received is not None and not self._client.leaving and not self._client.stop_signal:
            self._client.leave()

    def _note_events(self) -> None:
        """Let the coordinator know, on rank 0, what its callbacks have seen."""
        if self._comm.rank != 0:
            return
        try:
            self._client.note_events(self._commit(), self._events.changed_states())
        except MembershipChangedError:
            self._events.forget_states()  # not all hosts have them
            raise

    # --- regrouping ---------------------------------------------------------------------------------------------------

    def _commit(self) -> Commit:
        if not self._has_state:
            return NO_STATE
        return (self._fit, self._trainer.step.steps_done, len(self._trainer.history))

    def _regroup(self, reason: str = "", at_boundary: bool = False) -> None:
        """Take part in the next view, again and again until its group is complete and all have the same state."""
        self._trainer.checkpoint_manager.abandon()
        self._run.leave_run_directory()
        self.stop_requests.forget_polls()

        def commit() -> Commit:
            self._leave_if_signalled()
            return self._commit()

        self._comm.regroup_until(commit, self._adapt, reason, at_boundary)

    def _adapt(self, view: View) -> None:
        trainer, best = self._trainer, max(view.commits)
        if best[:1] > (self._fit,):  # the others are in a later training than this worker, which has just joined
            raise WorkerLeft
        trainer.steps_in_flight.regroup()
        if any(commit != best for commit in view.commits):
            self._share(view, best)
        trainer.step.regroup()
        repeat = tuple(view.events) < self._commit()
        self._events.take_rank(self._comm.rank, trainer, view.states, repeat)
        self._run.hold_run_directory()
        due = self._comm.allgather_object(self._save_due)
        if any(each is not None for each in due):
            trainer.save(best=any(due))
        self._save_due = None

    def _share(self, view: View, best: Commit) -> None:
        """Give the state of the most advanced worker to those behind it."""
        trainer, source = self._trainer, view.members.index(view.source)
        behind = self._commit() != best
        state = None
        if self._has_state:
            trainer.steps_in_flight.check()  # those who are behind forget them
        if self._comm.rank == source:
            last = trainer.checkpoint_manager.last
            state = trainer.state.state_dict(full=False) | {
                "callbacks": self._events.shared_states(),
                "last_checkpoint": None if last is None else [last[0], str(last[1])],
                "before_epoch": trainer.steps_before_epoch,
                "buffers": buffers_beside(trainer.model),
                "modes": modes_of(trainer.model),
                "events": list(pickle.dumps(self._events.events)),
            }
        received = share(self._comm, source, state, behind)
        if not behind:
            return
        done = trainer.step.steps_done
        self._has_state = False  # as long as it is loaded, which an error may interrupt
        trainer.steps_in_flight.clear()
        load_buffers_beside(trainer.model, received["buffers"])
        load_modes(trainer.model, received["modes"])
        trainer.state.load_state_dict(received)
        trainer.state.epoch = trainer.state.position.last_epoch
        trainer.steps_before_epoch = received["before_epoch"]
        self._events.load_shared_states(received["callbacks"])
        self._events.set_events(trainer, pickle.loads(bytes(received["events"])))
        if self._comm.rank == 0:
            self._events.catch_up(trainer, done)
        last = received["last_checkpoint"]
        trainer.checkpoint_manager.last = None if last is None else (last[0], Path(last[1]))
        self._save_due, self._has_state = None, True

    def note_interrupted_save(self, best: bool) -> None:
        """Remember that a checkpoint was not completed, so that it is written after the next view."""
        self._save_due = best or bool(self._save_due)
