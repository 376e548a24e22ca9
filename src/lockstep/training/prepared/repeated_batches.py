"""Batches of a prepared loop in an elastic job: which run again, and the state they share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from ...communicator import Communicator
from ...data.loader import Batch, Loader
from ...errors import ConfigError
from ...flight_recorder import recorded_collectives
from ...parallel.optimizer_shards import OptimizerShards
from ..batch_parts import BatchParts
from ..feed import Feed, copied
from ..in_flight import LAG, HostCopy
from ..model_state import ModelState, UserState
from ..recovery import REGROUP, Recovery, as_bytes, from_bytes, interrupt, repeat_by
from .batch_buffers import BatchBuffers
from .body_losses import BodyLosses

_log = logging.getLogger(__name__)

T = TypeVar("T")


class PreparedSteps(Protocol):
    """What is asked of the only optimizer of a loop whose batches can be repeated."""

    optimizer: Optimizer
    steps_done: int
    owners: OptimizerShards | None


class Loop(Protocol):
    """What is asked of a loop whose batches can be repeated.

    Attributes:
        once_a_step: schedulers and averages, which have a state.
    """

    comm: Communicator
    model: nn.Module
    parts: BatchParts
    buffers: BatchBuffers
    losses: BodyLosses
    once_a_step: Sequence[Any]
    user_state: UserState

    @property
    def optimizers(self) -> Mapping[int, PreparedSteps]:
        """Its optimizers."""
        ...

    def regroup(self) -> None:
        """Adapt to the communicator's new workers."""
        ...


class RepeatedBatches:
    """The batches of a loop, whose bodies run again if the workers change before the step.

    That needs one optimizer, which steps once in each batch, and bodies that communicate and change
    the model in that step alone. Whether a loop is so, its first batch shows: where it is not, the
    loss of a worker starts all workers again from the beginning of the program, which rank 0 says.
    A loop that is so must stay so.

    In a job of fixed size nothing is repeated.

    Args:
        loop: what was prepared together.
        recovery: of the job.
        optimizers: how many optimizers the loop has.

    Attributes:
        recovery: of the job.
        most_workers: how many workers the loop can have.
    """

    def __init__(self, loop: Loop, recovery: Recovery, optimizers: int) -> None:
        self.recovery = recovery
        self.most_workers = loop.parts.virtual_workers if loop.parts.exact else 1 << 30
        self._loop = loop
        self._why_not = ""  # why batches are not repeated, though the workers of the job may change
        # whether a batch has shown that the loop can be repeated
        self._is_tried = loop.comm.is_joining
        self._state: OwnLoopState | None = None  # of the loop that runs
        self._regroups = 0  # how often the workers have changed
        self._regroups_before = 0  # the bodies that run
        self._has_bodies = False  # whether bodies run
        self._has_stepped = False  # whether their step is done
        self._is_repeated = False  # whether they are, so that the buffers are summed up in the step
        self._collectives_of_operations = 0  # in the running body
        self._requests: list[HostCopy] = []  # of steps that have not been read yet
        if recovery.is_missing:
            self._say_not_repeated(f"{optimizers} optimizers" if optimizers != 1 else "no loader")
        elif not recovery.has_fixed_workers:
            repeat_by(self._repeat)  # evaluations before the first loop, too

    def _say_not_repeated(self, why: str) -> None:
        comm = self._loop.comm
        if comm.rank == 0 and not comm.is_joining:
            _log.warning(
                "lockstep.prepare() in an elastic job, with %s: no worker can join or leave, and "
                "the loss of a worker starts all workers again, from the beginning of the program",
                why,
            )

    def do_not_repeat(self, why: str) -> None:
        """Let the loss of a worker start all workers again from here on, because of something that
        the loop does.

        Args:
            why: what it does.

        Raises:
            ConfigError: if a batch that is being repeated does it, and the first one did not.
        """
        if self.recovery.has_fixed_workers or self._why_not:
            return
        if self.is_abandoned:
            expected = (
                "a loop that does in each batch of an elastic job what it does in the first one"
            )
            raise ConfigError("loop", expected, found=f"{why}, in a batch that is repeated")
        self._why_not = why
        self.recovery.suspend()
        self._say_not_repeated(why)

    @property
    def is_within_batch(self) -> bool:
        """Whether bodies of a batch run whose step has not been done."""
        return self._has_bodies and not self._has_stepped

    @property
    def is_abandoned(self) -> bool:
        """Whether the running body is one of a batch that has not been done before the workers have
        changed.
        """
        return self.is_within_batch and self._regroups != self._regroups_before

    @property
    def sums_buffers(self) -> bool:
        """Whether the step of the batch sums up the buffers, so that both are done or neither
        is.
        """
        return self._is_repeated and self._has_bodies

    def regroup(self) -> None:
        """Note that the workers have changed: the bodies that run are those of a batch that was not
        done.
        """
        self._regroups += 1
        self._requests.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return what is known of the loop, for a worker that has not run its first batch."""
        return {"is_tried": self._is_tried, "why_not": self._why_not}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned on another worker."""
        self._is_tried = state["is_tried"]
        self._why_not = state["why_not"]

    # The batches of an epoch, and what is done beside them.

    def batches(self, loader: Loader) -> Iterator[Batch]:
        """Yield the global batches of the next epoch of a loader."""
        if self.recovery.is_running and torch.is_grad_enabled():
            self.do_not_repeat("several loaders in one loop")
        if (
            self.recovery.has_fixed_workers
            or self.recovery.is_running
            or not torch.is_grad_enabled()
        ):
            yield from copied(loader, iter(loader))
            return
        self.follow(loader)
        if loader.is_iterable:
            self.do_not_repeat("an iterable data set")
        repeat_by(self._repeat)
        state = OwnLoopState(self._loop, self, loader)
        self._state = state
        repeats = self._is_tried and not self._why_not
        with self.recovery.training(
            state, self.most_workers, repeats=repeats, is_one_of_many=True
        ) as takes_part:
            if takes_part:
                # the loop may be left
                with suppress(GeneratorExit), self.recovery.until_all_have_ended():
                    yield from self._until_end(state)
        self._state = None

    def _until_end(self, state: OwnLoopState) -> Iterator[Batch]:
        """Yield the batches from the position of the loop on, and let workers join and leave after
        each of them.
        """
        for batch in state.feed.epoch(state.at[0]):
            state.at = batch.epoch, batch.step
            self._has_stepped = False
            yield batch
            state.at = batch.epoch, batch.step + 1
            if not self._is_tried and not self._has_stepped:
                self.do_not_repeat("a batch without a step of the optimizer")
            if not self._is_tried and not self._why_not:
                self.recovery.resume()
            self._is_tried = True
            requests = self._read_requests()
            if requests % REGROUP:
                interrupt(self.recovery, f"step {state.prepared.steps_done}")
            self.recovery.boundary(requests)

    def follow(self, loader: Loader | None = None) -> None:
        """Adapt to the workers that there are now, if they have changed in another training; called
        by all workers.

        Args:
            loader: of the loop that is about to begin, if any.

        Raises:
            ConfigError, LockstepError: see `Recovery.follow`.
        """
        if self.recovery.is_behind:
            self.recovery.follow(lambda: OwnLoopState(self._loop, self, loader))

    def note_requests(self, requests: torch.Tensor) -> None:
        """Note the sum of the workers' requests in a step, a 0-dim tensor."""
        if self.recovery.repeats:
            self._requests.append(HostCopy(requests.detach().reshape(1)))

    def _read_requests(self) -> float:
        """Return the requests that have arrived; on a device those of a step that nothing waits
        for.
        """
        lag = 0 if self._loop.comm.device.type == "cpu" else LAG
        most = 0.0
        while len(self._requests) > lag:
            most = max(most, self._requests.pop(0).read()[0])
        return most

    def _repeat(self, operation: Callable[[], Any]) -> Any:
        """Return the result of an evaluation, within a loop or beside loops; see `repeat_by`."""
        if self.recovery.is_running:
            before = recorded_collectives()
            result = self.recovery.run(operation, meets=False)
            self._note_collectives(before)
            return result
        if getattr(self._loop.comm, "keeps_values", True) is False:  # a part of another training
            return operation()
        state = OwnLoopState(self._loop, self, None)
        repeats = not self._why_not
        with self.recovery.training(
            state, self.most_workers, repeats=repeats, is_one_of_many=True
        ) as takes_part:
            if takes_part:
                with self.recovery.until_all_have_ended():
                    state.result = self.recovery.run_only(operation)
        return state.result

    def _note_collectives(self, before: int | None) -> None:
        now = recorded_collectives()
        if now is not None and before is not None:
            self._collectives_of_operations += now - before

    # The bodies of a batch.

    def begin_bodies(self) -> None:
        """Begin the bodies of a batch, for the first time or again."""
        if self._regroups != self._regroups_before:
            self._loop.buffers.renew()
        self._regroups_before = self._regroups
        self._has_bodies = True
        self._has_stepped = False
        self._is_repeated = self.recovery.repeats
        if self._state is not None and self._is_repeated:
            self._state.begin_batch()
        self._loop.buffers.begin()

    def begin_body(self) -> None:
        """Begin the body of a shard."""
        self._collectives_of_operations = 0

    def end_body(self) -> None:
        """Look whether a body that has ended, and that is not abandoned, can be repeated.

        Raises:
            ConfigError: if it has changed buffers after its step, and the first one did not.
        """
        if self.recovery.has_fixed_workers or self._why_not:
            return
        shard = self._loop.parts.current
        now = recorded_collectives()
        before = None if shard is None else shard.collectives
        are_known = (
            now is not None and before is not None and self._regroups == self._regroups_before
        )
        if are_known and now - before > self._collectives_of_operations:  # type: ignore[operator]
            self.do_not_repeat("collectives in its bodies")
        if self._loop.buffers.have_changed_since_step():
            if self._is_repeated:
                raise ConfigError(
                    "model",
                    "forward passes before optimizer.step() in each batch of an elastic job, as "
                    "in the first one",
                    found="one after it, in training mode, which has changed buffers",
                )
            self.do_not_repeat("forward passes after the optimizer's step")

    def abandon_bodies(self) -> None:
        """End the bodies of a batch that run again, and restore what they have changed."""
        self._has_bodies = False
        assert self._state is not None
        self._state.begin_again()

    def end_bodies(self) -> bool:
        """End the bodies of a batch; returns whether the buffers have been set in the step."""
        self._has_bodies = False
        if self._is_repeated and not self._has_stepped:
            self.do_not_repeat("a batch without a step of the optimizer")
        return self._is_repeated and self._has_stepped

    def leave_bodies(self) -> None:
        """Note that no bodies run any more, whether they were ended or left."""
        self._has_bodies = False

    def attempt(self, step: Callable[[], T]) -> T | None:
        """Take the step of a batch; None if the workers have changed before it."""
        if self.recovery.has_fixed_workers:
            return step()
        if not self._has_bodies:
            self.do_not_repeat("a step outside of its bodies")
            return step()
        before = recorded_collectives()
        done = self.recovery.attempt(step) if self._is_repeated else step()
        self._note_collectives(before)
        if done is not None:
            self._has_stepped = True
            self._loop.buffers.note_step()
        return done


class OwnLoopState(ModelState):
    """The `recovery.TrainingState` of a loop over a prepared loader, or of an evaluation beside
    such loops.

    The bodies of a batch compute before the step that is repeated, and run again after a loss. So
    what they have changed before the step is restored for that: buffers, and hyperparameters. What
    they change after it, where ``optimizer.stepped`` is true, is the program's.

    Args:
        loop: what was prepared together.
        repeats: its batches that can be repeated.
        loader: that of the loop; None for an evaluation.

    Attributes:
        at: (epoch, number) of the batch in progress, or of the next one.
        feed: the batches.
        prepared: the loop's only optimizer.
    """

    def __init__(self, loop: Loop, repeats: RepeatedBatches, loader: Loader | None) -> None:
        (self.prepared,) = loop.optimizers.values()
        super().__init__(loop.model, self.prepared.optimizer, loop.comm)
        self._loop = loop
        self._repeats = repeats
        self._loader = loader
        self.at = (0, 0)
        self._measured: Any = None
        # the hyperparameters when the batch in progress began
        self._begun: list[dict[str, Any]] = []
        if loader is not None:
            self.at = loader.next_start
            self.feed = Feed(loader, self._seek, repeats.recovery)

    @property
    def result(self) -> Any:
        """The epoch after the loop, or the result of the evaluation."""
        return self._measured if self._loader is None else self._loader.position[0]

    @result.setter
    def result(self, value: Any) -> None:
        if self._loader is None:
            self._measured = value
        else:
            self._move(value, 0)

    def _move(self, epoch: int, step: int) -> None:
        assert self._loader is not None
        self._loader.load_state_dict({**self._loader.state_dict(), "epoch": epoch, "step": step})

    def _seek(self, epoch: int) -> bool:
        """Move the loader to the position of the loop, if it is one before a batch of `epoch`."""
        assert self._loader is not None
        _, number = self.at
        ended = number >= len(self._loader)
        if ended:
            self._move(epoch + 1, 0)
        else:
            self._move(epoch, number)
        return not ended

    def part_of(self, batch: Any) -> Any:
        """Return this worker's present part of the loop's batch; other batches are whole ones,
        which every worker has.
        """
        if (
            isinstance(batch, Batch)
            and (batch.epoch, batch.step) == self.at
            and self._loader is not None
        ):
            return self.feed.current()
        return batch

    def begin_batch(self) -> None:
        """The bodies of a batch begin, for the first time or again."""
        self._look_for_changes()
        if self.has_changed_parameters:
            self._repeats.do_not_repeat("parameters that are changed beside the step")
        self._begun = self._hyperparameters()

    def begin_again(self) -> None:
        """The bodies of a batch have ended without its step, and run again: restore what they have
        changed.
        """
        self._loop.buffers.restore()
        self._set_hyperparameters(self._begun)
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                p.grad = None
        self._versions = self._current_versions()

    def begin(self) -> None:
        """Look for changes, except within a batch: there they were looked for before the bodies,
        whose passes change buffers.
        """
        if not self._repeats.is_within_batch:
            self._look_for_changes()
            self._generators = self._generator_states()

    def undo(self) -> None:
        """Restore buffers, and outside of a batch the generators: draws in bodies are keyed, and
        bodies that run again begin anew.
        """
        if self._repeats.is_within_batch:
            self._loop.buffers.restore()
            self._versions = self._current_versions()
        else:
            super().undo()

    @property
    @override
    def shards(self) -> OptimizerShards | None:
        return self.prepared.owners

    @override
    def of_operations(self) -> dict[str, Any]:
        return {**super().of_operations(), "steps": self.prepared.steps_done}

    def load_operations(self, state: dict[str, Any]) -> None:
        """Load the state of another worker and clear the gradients: none are sent, so that nobody
        takes those of an attempt for the sums.
        """
        super().load_operations(state)
        self.prepared.steps_done = state["steps"]
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                p.grad = None

    @override
    def of_program(self) -> dict[str, Any]:
        loop = self._loop
        return {
            **super().of_program(),
            "at": list(self.at),
            "repeats": self._repeats.state_dict(),
            "parts": as_bytes(loop.parts.state_dict()),
            "losses": as_bytes(loop.losses.state_dict()),
            "once a step": as_bytes([acting.state_dict() for acting in loop.once_a_step]),
            "users": loop.user_state.of_program(),
        }

    @override
    def load_program(self, state: dict[str, Any]) -> None:
        super().load_program(state)
        loop = self._loop
        epoch, number = state["at"]
        self.at = epoch, number
        self._repeats.load_state_dict(state["repeats"])
        loop.parts.load_state_dict(from_bytes(state["parts"], self.comm.device))
        loop.losses.load_state_dict(from_bytes(state["losses"], self.comm.device))
        for acting, saved in zip(
            loop.once_a_step, from_bytes(state["once a step"], torch.device("cpu")), strict=True
        ):
            acting.load_state_dict(saved)
        loop.user_state.load_program(state["users"], self.comm.device)

    @override
    def regroup(self, states: bytes | None, all_seen: bool) -> None:
        self._repeats.regroup()
        self._loop.regroup()
        if self._loader is not None and not self._loader.is_iterable:
            self.feed.regroup()
        super().regroup(states, all_seen)
