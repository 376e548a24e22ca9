"""Puts the state of a training run into checkpoints, and finds the one to go on from."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from ..checkpoint import Checkpoint, CheckpointStore, offer, open_stored
from ..communicator import Communicator
from ..errors import CheckpointError, ConfigError, LockstepError, WorkerError
from .compatibility import check_conditions, check_fits

if TYPE_CHECKING:
    from .trainer import Trainer

__all__ = ["Saver", "on_all"]

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Saver:
    """The checkpoints of one training run; every method is called by all workers together, if it does not say else.

    Args:
        trainer: whose state it is.
        keep: so many of the newest checkpoints stay.
        background: whether a checkpoint is written beside the training, from a copy of the state in memory.

    Attributes:
        last: (step, path) of the newest checkpoint that this run has written or gone on from, if any.

    Raises:
        ConfigError: `keep` is no whole number of at least 1, or `background` no bool.
    """

    def __init__(self, trainer: Trainer, keep: int, background: bool = False) -> None:
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise ConfigError("keep", "a whole number of at least 1", keep)
        if not isinstance(background, bool):
            raise ConfigError("async_save", "True or False", background)
        self._trainer, self._keep, self._background = trainer, keep, background
        self.last: tuple[int, Path] | None = None
        self._writing: _Writing | None = None
        self._leaving = False  # the run has ended with an error

    @property
    def last_path(self) -> Path | None:
        """Where that is."""
        return None if self.last is None else self.last[1]

    @property
    def newest_step(self) -> int | None:
        """The step of the newest checkpoint, also of one that is being written."""
        if self._writing is not None:
            return self._writing.step
        return None if self.last is None else self.last[0]

    def save(self, state: Mapping[str, Any], more: Callable[[], Mapping[str, Any]]) -> Path:
        """Write a checkpoint, over one of this step if there is one.

        Rank 0 does the writing, or with a strategy whose tensors are in parts each worker writes its own. In the
        background one is written at a time: this waits for the one before.

        Args:
            state: the state of the run.
            more: called on rank 0 alone: what it adds to that.

        Returns:
            Where the checkpoint is; in the background, where it will be, see `wait`.

        Raises:
            CheckpointError: on every worker, when it cannot be written, or the run has no folder; also for the one
                before.
        """
        self.wait()
        self._leaving = False
        store, step = self._store(), self._trainer.step.steps_done
        work = self._work(store, state, more, step)
        self._writing = _Writing(work, step, store.path(step), self._background)
        if not self._background:
            self.wait()
        return store.path(step)

    def _work(
        self, store: CheckpointStore, state: Mapping[str, Any], more: Callable[[], Mapping[str, Any]], step: int
    ) -> Callable[[], object]:
        """What this worker has to do for a checkpoint."""
        trainer = self._trainer
        comm, copy = trainer.comm, self._background
        told: dict[str, Any] = {"step": step, "epoch": trainer.epoch, "info": self._info(), "copy": copy}
        if trainer.step.strategy.in_parts:
            from ..distributed_checkpoint import prepare

            return prepare(store, comm, state, more, **told, leaving=lambda: self._leaving)
        works: list[Callable[[], object]] = []
        comm.on_rank0(lambda: works.append(store.prepare({**state, **more()}, **told)))
        return works[0] if works else lambda: None

    def wait(self) -> None:
        """Wait until a checkpoint that is being written is there.

        Raises:
            CheckpointError: on every worker, when it could not be written.
        """
        writing, self._writing = self._writing, None
        if writing is not None:  # on one worker, and so on all
            on_all(self._trainer.comm, writing.result)
            self.last = (writing.step, writing.path)

    def end(self) -> None:
        """Wait for this worker's part of a checkpoint that is being written; no other worker is asked anything.

        For the end of a run after an error, when others may be gone. What goes wrong is logged.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return
        self._leaving = True
        try:
            writing.result()
        except Exception as error:
            _log.error("the checkpoint of step %d was not saved: %s", writing.step, error)
        else:
            self.last = (writing.step, writing.path)

    def _store(self) -> CheckpointStore:
        if self._trainer.out is None:
            raise CheckpointError("this run has no folder for checkpoints: give the Trainer out=")
        return CheckpointStore(self._trainer.out / "checkpoints", keep=self._keep)

    def _info(self) -> dict[str, Any]:
        trainer = self._trainer
        return {
            "optimizer": type(trainer.optimizer).__name__,
            "workers": trainer.comm.size,
            "global_batch": trainer.global_batch,
            "torch": str(torch.__version__),
        }

    def find(self, which: str | Path) -> Checkpoint | None:
        """A checkpoint that fits the trainer's model and optimizer; None for "latest" where there is none yet.

        Its tensors are in its files still. Each file is checked by one worker of each machine.

        Args:
            which: a checkpoint, or the folder of a run, or "latest" for this run's: of these the newest that is not
                damaged. What is passed over is logged as an error.

        Raises:
            CheckpointError: on every worker, when it is damaged, or none is good, or it does not fit, for one worker at
                least.
        """
        self.wait()
        comm = self._trainer.comm
        found, first = comm.on_rank0(lambda: self._candidates(which)), cast(CheckpointError | None, None)
        for number, path in enumerate(found, 1):
            try:
                opened = on_all(comm, partial(open_stored, path, comm.local_rank, comm.local_size))
            except CheckpointError as error:
                first = first or error
                if number < len(found) and comm.rank == 0:
                    _log.error("A CHECKPOINT CANNOT BE USED: %s. Trying the one before it, %s.", error, found[number])
                continue
            on_all(comm, partial(self._check, opened))
            return opened
        if first is None:
            return None
        raise CheckpointError(f"{first}. {comm.on_rank0(lambda: offer(found[0]))}.") from first.__cause__

    def _candidates(self, which: str | Path) -> list[Path]:
        """The checkpoints that `which` may mean, the first choice first."""
        if which == "latest":
            return self._store().paths()[::-1]
        folder = Path(which) / "checkpoints"
        return (CheckpointStore(folder).paths()[::-1] or [folder]) if folder.is_dir() else [Path(which)]

    def _check(self, found: Checkpoint) -> None:
        trainer, path = self._trainer, found.path
        try:
            check_fits(found.state, trainer.model, trainer.hyperparameters)
            saved, speaks = found.state.get("conditions", {}), trainer.comm.rank == 0
            check_conditions(saved, trainer.conditions, trainer.allow_different, speaks)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from None
        kind, ours = found.info.get("optimizer"), type(trainer.optimizer).__name__
        if kind != ours:
            raise CheckpointError(f"{path}: expected a checkpoint of a run with {ours}, got one with {kind}")


class _Writing:
    """A checkpoint that is being written: at once when its result is asked for, or in a thread from now on."""

    def __init__(self, work: Callable[[], object], step: int, path: Path, background: bool) -> None:
        self.step, self.path = step, path
        self._work, self._error = work, cast(BaseException | None, None)
        self._thread = threading.Thread(target=self._run, name="lockstep-checkpoint") if background else None
        if self._thread is not None:
            self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._error = error

    def result(self) -> None:
        """Return when it is done; raise what went wrong."""
        if self._thread is None:
            self._work()
            return
        self._thread.join()
        if self._error is not None:
            raise self._error


def on_all(comm: Communicator, fn: Callable[[], T]) -> T:
    """What `fn` returns; where it fails on any worker it fails on all, so that none goes on alone."""
    value, error, sent = None, cast(BaseException | None, None), cast(BaseException | None, None)
    try:
        value = fn()
    except BaseException as raised:
        known = isinstance(raised, LockstepError)
        error, sent = raised, raised if known else WorkerError(comm.rank, type(raised).__name__, str(raised))
    errors = [each for each in comm.allgather_object(sent) if each is not None]
    if errors:
        raise error or errors[0]
    return cast(T, value)
