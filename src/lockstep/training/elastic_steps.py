"""`steps`: the batches for a training loop of one's own, which goes on in an elastic job after the
loss of a worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

from typing_extensions import override

from .. import arguments
from ..data.loader import Batch, Loader
from ..errors import ConfigError
from .feed import Feed
from .in_flight import StepsInFlight
from .model_state import StateOfStep, UserState
from .recovery import REGROUP, interrupt
from .step.step_result import StepResult
from .step.train_step import TrainStep

__all__ = ["Steps", "steps"]

T = TypeVar("T")


def steps(
    loader: Loader, step: TrainStep, epochs: int = 1, *, state: Mapping[str, Any] | None = None
) -> Steps:
    """Return the batches of a training whose loop is one's own, and which survives the loss of
    workers.

    In an elastic job (``lockstep run --elastic``) `step` repeats what the loss of a worker has
    interrupted, on the workers that are left; those that join do so between two batches, and get
    the state from the others. Anywhere else the loop is an ordinary one:

        training = lockstep.elastic.steps(loader, step, epochs=5, state={"scheduler": scheduler})
        for batch in training:
            loss = step(batch)
            scheduler.step()
            if training.ends_epoch:
                measured = training.call(lockstep.evaluate, model, test_loader, loss_fn)

    The body has to do the same on all workers. It changes model and optimizer's state by `step`
    alone; hyperparameters and what is in `state` it may change anywhere. It communicates in `step`
    and in `Steps.call`, as the end of any other collective by a loss ends the job.

    Experimental: may change in any release.

    Args:
        loader: of the global batches; training begins at its position.
        step: the training step, with the `virtual_workers` of the loader.
        epochs: number of epochs in total, counted from the loader's epoch 0.
        state: what else the training changes, by name, and workers that join need: objects with
            ``state_dict()`` and ``load_state_dict()``, or dicts.

    Returns:
        An iterable over this worker's parts of the global batches of all epochs.

    Raises:
        ConfigError: for invalid arguments.
    """
    _check(loader, step, epochs)
    return Steps(loader, step, epochs, UserState(state))


def _check(loader: Any, step: Any, epochs: Any) -> None:
    hint = "A loop over a loader of prepare() goes on after a loss without steps()."
    arguments.instance("loader", loader, Loader, "a lockstep.Loader", hint)
    if loader.is_iterable:
        hint = "Trainer.fit reads an iterable data set in an elastic job as well."
        raise ConfigError(
            "loader",
            "one whose samples have indices",
            found="one of an iterable data set",
            hint=hint,
        )
    arguments.instance("step", step, TrainStep, "a lockstep.TrainStep")
    arguments.whole("epochs", epochs, least=1)
    if loader.virtual_workers != (virtual_workers := step.strategy.virtual_workers):
        hint = f"Make it with Loader(..., virtual_workers={virtual_workers})."
        raise ConfigError(
            "virtual_workers",
            f"{virtual_workers}, the step's, in the Loader as well",
            loader.virtual_workers,
            hint,
        )


class Steps:
    """The batches of a training, see `steps`.

    Experimental: may change in any release.

    Args:
        loader, step, epochs, state: see `steps`.
    """

    def __init__(self, loader: Loader, step: TrainStep, epochs: int, state: UserState) -> None:
        self._loader = loader
        self._step = step
        self._epochs = epochs
        self._user_state = state
        epoch, number = loader.position
        self._at = (epoch + 1, 0) if loader.ended else (epoch, number)
        self._ends = False
        self._in_flight = StepsInFlight(step.comm.device)
        self._feed = Feed(loader, self._seek, step.recovery)
        self._feed.regroup()  # the loader may be used for something else before the loop begins

    @property
    def epoch(self) -> int:
        """The epoch of the current batch, from 0."""
        return self._at[0]

    @property
    def ends_epoch(self) -> bool:
        """Whether the current batch is the last one of its epoch."""
        return self._at[1] == len(self._loader) - 1

    def call(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Return ``fn(*args, **kwargs)``, for what communicates beside the step, such as an
        evaluation.

        All workers call it. In an elastic job it is called again if a worker is lost meanwhile, so
        it must change nothing that the training uses, and return the same on all workers.

        Args:
            fn: the function.
            args: its positional arguments.
            kwargs: its keyword arguments.
        """
        return self._step.recovery.run(partial(fn, *args, **kwargs), meets=False)

    def stop(self) -> None:
        """End the loop after the current batch; called by all workers."""
        self._ends = True

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over the batches that are left; once.

        Raises:
            InterruptedRunError: the launcher of an elastic job has received a signal to stop.
        """
        recovery = self._step.recovery
        size = self._loader.global_batch_size
        most = min(size, self._step.strategy.virtual_workers or size)
        with recovery.training(_StateOfSteps(self), most) as takes_part:
            if takes_part:
                with recovery.until_all_have_ended():
                    while not self._is_over:
                        yield from self._rest_of_epoch()

    def _rest_of_epoch(self) -> Iterator[Batch]:
        for batch in self._feed.epoch(self.epoch):
            yield batch
            self._end_body()
            if self._is_over:
                return

    def _end_body(self) -> None:
        epoch, number = self._at
        self._at = (epoch + 1, 0) if self.ends_epoch else (epoch, number + 1)
        requests = self._in_flight.settle_at_boundary()
        if requests % REGROUP:
            interrupt(self._step.recovery, f"step {self._step.steps_done}")
        self._step.recovery.boundary(requests)

    @property
    def _is_over(self) -> bool:
        return self._ends or self._at[0] >= self._epochs

    def _seek(self, of: int) -> bool:
        epoch, number = self._at
        if epoch != of:
            return False
        self._loader.load_state_dict({**self._loader.state_dict(), "epoch": epoch, "step": number})
        return True


class _StateOfSteps(StateOfStep):
    """What the workers of a loop of `steps` have alike, see `recovery.TrainingState`.

    Args:
        steps: the loop.
    """

    def __init__(self, steps: Steps) -> None:
        super().__init__(steps._step)
        self._steps = steps

    def part_of(self, batch: Batch) -> Batch:
        """Return this worker's part of the batch of the body that runs.

        Raises:
            ConfigError: for another batch than that of the body in which the step is called.
        """
        if (batch.epoch, batch.step) != self._steps._at:
            got = f"batch {batch.step} of epoch {batch.epoch}"
            raise ConfigError(
                "batch", "the batch of lockstep.elastic.steps in the body of its loop", found=got
            )
        return self._steps._feed.current()

    @override
    def commit(self, result: Any) -> None:
        super().commit(result)
        if isinstance(result, StepResult):
            self._steps._in_flight.add(result)

    @override
    def of_program(self) -> dict[str, Any]:
        steps = self._steps
        users = steps._user_state.of_program()
        return {**super().of_program(), "at": list(steps._at), "ends": steps._ends, "users": users}

    @override
    def load_program(self, state: dict[str, Any]) -> None:
        super().load_program(state)
        steps = self._steps
        steps._at = tuple(state["at"])
        steps._ends = state["ends"]
        steps._user_state.load_program(state["users"], self.comm.device)

    @override
    def regroup(self, states: bytes | None, all_seen: bool) -> None:
        super().regroup(states, all_seen)
        self._steps._in_flight.regroup()
        self._steps._feed.regroup()
