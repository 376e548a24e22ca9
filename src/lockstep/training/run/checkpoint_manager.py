"""The checkpoint manager: writes the checkpoints of a training run, and finds the one to resume
from.

When to save is decided by the callback `Checkpoints`; whether to resume, and from which run, by
`Trainer.fit` and `run_directory`. The files are those of `lockstep.checkpoint.folder`, and what is
in them is the state of `run_state`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from ... import arguments
from ...checkpoint.folder import (
    FINITE,
    Checkpoint,
    CheckpointStore,
    check_finite,
    open_stored,
    suggest_other,
)
from ...errors import CheckpointError, DivergedError
from ...job.client import note_checkpoint
from ..errors_on_all import call_on_all
from .run_directory import numbered, of_this_job
from .run_state import RunState

_log = logging.getLogger(__name__)


class CheckpointManager:
    """The checkpoints of one training run. All workers call every method together, unless it says
    otherwise.

    Args:
        state: the state of the run.
        run_dir: the run directory; None for a run that writes nothing.
        keep_checkpoints: number of newest checkpoints to keep.
        background: whether to write checkpoints in the background, from a copy of the state in
            memory.

    Attributes:
        run_dir: the run directory.
        last: (step, path) of the newest checkpoint that this run has written or resumed from, if
            any.

    Raises:
        ConfigError: if `keep_checkpoints` is not a whole number of at least 1, or `background` is
            not a bool.
    """

    def __init__(
        self, state: RunState, run_dir: Path | None, keep_checkpoints: int, background: bool = False
    ) -> None:
        self._state = state
        self._comm = state.step.comm
        self.run_dir = run_dir
        self._keep_checkpoints = arguments.whole("keep_checkpoints", keep_checkpoints, least=1)
        self._background = arguments.flag("async_save", background)
        self.last: tuple[int, Path] | None = None
        self._told: tuple[int, Path] | None = None
        self._pending: _PendingSave | None = None
        self._aborting = False  # the run has ended with an error; other workers may have exited

    @property
    def last_path(self) -> Path | None:
        """The path of the newest checkpoint that this run has written or resumed from; None without
        one.
        """
        return None if self.last is None else self.last[1]

    @property
    def newest_step(self) -> int | None:
        """The step of the newest checkpoint, including one that is being written."""
        if self._pending is not None:
            return self._pending.step
        return None if self.last is None else self.last[0]

    def save(
        self,
        state: Mapping[str, Any],
        rank0_state: Callable[[], Mapping[str, Any]],
        best: bool = False,
    ) -> Path:
        """Write a checkpoint, and replace an earlier one of the same step.

        Rank 0 writes it; with a strategy that shards tensors, every worker writes its shards. Only
        one checkpoint is written in the background at a time: this waits for the previous one.

        Args:
            state: the state of the run.
            rank0_state: called on rank 0 only; its return value is added to the state.
            best: wait until it is complete, and keep it as the best one.

        Returns:
            The path of the checkpoint; in the background it exists after `wait`.

        Raises:
            CheckpointError: on every worker, if this or the previous checkpoint cannot be written,
                or the run has no run directory.
        """
        self.wait()
        self._aborting = False
        store = self._store()
        step = self._state.step.steps_done
        if not self._background and not self._state.step.strategy.sharded_state:
            self._comm.on_rank0(partial(self._write, store, state, rank0_state, step, best))
            self._note_complete(step, store.path(step))
            return store.path(step)
        work = self._work(store, state, rank0_state, step)
        self._pending = _PendingSave(work, step, store.path(step), self._background)
        if best or not self._background:
            self.wait()
        if best:
            self._comm.on_rank0(partial(store.mark_best, step))
        return store.path(step)

    def _write(
        self,
        store: CheckpointStore,
        state: Mapping[str, Any],
        rank0_state: Callable[[], Mapping[str, Any]],
        step: int,
        best: bool,
    ) -> None:
        """Write a checkpoint; called on rank 0 alone."""
        store.prepare({**state, **rank0_state()}, **self._options(step))()
        if best:
            store.mark_best(step)

    def _work(
        self,
        store: CheckpointStore,
        state: Mapping[str, Any],
        rank0_state: Callable[[], Mapping[str, Any]],
        step: int,
    ) -> Callable[[], object]:
        """Return the function that writes this worker's files of a checkpoint."""
        comm = self._comm
        if self._state.step.strategy.sharded_state:
            from ...checkpoint.distributed_checkpoint import prepare

            options = self._options(step)
            return prepare(
                store, comm, state, rank0_state, **options, aborting=lambda: self._aborting
            )
        works: list[Callable[[], object]] = []
        comm.on_rank0(
            lambda: works.append(store.prepare({**state, **rank0_state()}, **self._options(step)))
        )
        return works[0] if works else lambda: None

    def _options(self, step: int) -> dict[str, Any]:
        return {
            "step": step,
            "epoch": self._state.epoch,
            "info": {
                "optimizer": type(self._state.step.optimizer).__name__,
                "workers": self._comm.size,
                "global_batch_size": self._state.global_batch_size,
                "torch": str(torch.__version__),
                FINITE: True,  # else it would not be written, see `FiniteWeights`
            },
            "copy": self._background,
        }

    def wait(self) -> None:
        """Wait until the checkpoint that is being written is complete.

        Raises:
            CheckpointError: on every worker, if it could not be written.
        """
        pending = self._pending
        self._pending = None
        if pending is not None:  # the same on all workers
            call_on_all(self._comm, pending.result)
            self._note_complete(pending.step, pending.path)

    def abandon(self) -> None:
        """Forget a checkpoint that is being written: a worker was lost. Called by each worker
        alone.

        One that is written in the background goes on being written by rank 0.
        """
        pending = self._pending
        self._pending = None
        if pending is not None:
            pending.abandon()

    def end(self) -> None:
        """Wait for this worker's files of a checkpoint that is being written, without
        communication.

        For the end of a run after an error, when other workers may have exited. Errors are logged.
        """
        pending = self._pending
        self._pending = None
        if pending is None:
            return
        self._aborting = True
        try:
            pending.result()
        except Exception as error:
            _log.error("the checkpoint of step %d was not saved: %s", pending.step, error)
        else:
            self._note_complete(pending.step, pending.path)

    def _note_complete(self, step: int, path: Path) -> None:
        """Note that a checkpoint is complete; called by this worker alone.

        Every checkpoint that a run writes becomes complete here: `CheckpointStore.writing` has
        given its folder its name, on every worker the parts that it wrote are on disk, and the
        workers know of it. The launcher is told; callbacks are told by the trainer
        (`Callback.on_checkpoint_complete`), as they may communicate.
        """
        self.last = (step, path)
        if self._comm.rank == 0:
            note_checkpoint(str(path))

    def resume_from(self, step: int, path: Path) -> None:
        """Take the checkpoint that the run was resumed from as the newest one; called by this
        worker alone.
        """
        self._note_complete(step, path)
        self._told = self.last  # it was complete before

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written in the background; the same on all workers."""
        return self._pending is not None

    def untold(self) -> Path | None:
        """Return the newest checkpoint if callbacks were not told yet that it is complete; else
        None. The same on all workers.
        """
        return None if self.last == self._told else self.last_path

    def note_told(self) -> None:
        """Note that callbacks were told that the newest checkpoint is complete."""
        self._told = self.last

    def state_dict(self) -> dict[str, Any]:
        """Return which checkpoint is the newest, and whether callbacks were told of it, for another
        worker of an elastic job.
        """
        last = None if self.last is None else [self.last[0], str(self.last[1])]
        return {"last": last, "is_told": self.untold() is None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` has returned on another worker."""
        last = state["last"]
        self.last = None if last is None else (int(last[0]), Path(last[1]))
        self._told = self.last if state["is_told"] else None

    def with_advice(self, error: DivergedError) -> DivergedError:
        """Return the error of a run that has diverged with the checkpoint to go on from, whose
        weights are finite.
        """
        where = (
            f"The last checkpoint is {self.last_path}."
            if self.last_path
            else "There is no checkpoint yet."
        )
        return DivergedError(f"{error} {where}")

    def _store(self) -> CheckpointStore:
        return self._store_in(self.run_dir)

    def _store_in(self, run_dir: Path | None) -> CheckpointStore:
        if run_dir is None:
            raise CheckpointError(
                "this run has no run directory for checkpoints: pass run_dir= to the Trainer"
            )
        return CheckpointStore(run_dir / "checkpoints", keep=self._keep_checkpoints)

    def find(self, which: str | Path | None, restarted: bool = False) -> Checkpoint | None:
        """Return a checkpoint that fits the trainer's model and optimizer; None if there is none to
        resume from yet.

        Tensors are not read from its files yet. Each file is verified by one worker of each host.

        Args:
            which: a checkpoint, a run directory, or "latest" for this run's; None for none. In a
                directory, the newest checkpoint is used that is not damaged and has no NaN in its
                weights; others are logged as errors.
            restarted: whether the workers of this job were all started again, and have not trained
                since. They go on from the newest checkpoint of the directory in which the job was
                training, or from which it was to resume if that is this run's: one may have been
                written that nobody has been told of.

        Raises:
            CheckpointError: on every worker, if the checkpoint or all are damaged or have NaN in
                their weights, or it does not fit on any worker.
        """
        self.wait()
        comm = self._comm
        candidates = comm.on_rank0(lambda: self._candidates(which, restarted))
        first_error = cast(CheckpointError | None, None)
        if comm.is_joining:  # it gets the state from the other workers of an elastic job
            return None
        for number, path in enumerate(candidates, 1):
            try:
                opened = self._open(path)
            except CheckpointError as error:
                # Without its frames, which would keep the files open.
                first_error = first_error or error.with_traceback(None)
                if number < len(candidates) and comm.rank == 0:
                    previous = candidates[number]
                    _log.error(
                        "A CHECKPOINT CANNOT BE USED: %s. Trying the one before it, %s.",
                        error,
                        previous,
                    )
                continue
            call_on_all(comm, partial(self._check, opened))
            return opened
        if first_error is None:
            return None
        suggestion = comm.on_rank0(lambda: suggest_other(candidates[0]))
        raise CheckpointError(f"{first_error}. {suggestion}.") from first_error.__cause__

    def _open(self, path: Path) -> Checkpoint:
        """Open a checkpoint that is undamaged and has no NaN in its weights; called by every
        worker.
        """
        comm = self._comm
        opened = call_on_all(comm, partial(open_stored, path, comm.local_rank, comm.local_size))
        # Not by `on_rank0`, which workers that join an elastic job later would expect as well.
        call_on_all(comm, partial(check_finite, opened) if comm.rank == 0 else lambda: None)
        return opened

    def _candidates(self, which: str | Path | None, restarted: bool) -> list[Path]:
        """Return the checkpoints that `which` may mean, in order of preference."""
        run = self._run_of_this_job(which) if restarted else None
        if run is not None and (own_paths := self._store_in(run).paths()):
            return own_paths[::-1]
        if which is None:
            return []
        if which == "latest":
            runs = [] if self.run_dir is None else numbered(self.run_dir)
            paths_by_run = [paths[::-1] for run in runs if (paths := self._store_in(run).paths())]
            return paths_by_run[0] if paths_by_run else self._store().paths()
        folder = Path(which) / "checkpoints"
        return (
            (CheckpointStore(folder).paths()[::-1] or [folder])
            if folder.is_dir()
            else [Path(which).resolve()]
        )

    def _run_of_this_job(self, which: str | Path | None) -> Path | None:
        """Return the directory in which this job was training before its workers were started
        again, if it is known.
        """
        if self.run_dir is None:
            return None
        if (earlier := of_this_job(self.run_dir)) is not None:
            return earlier
        if which is None or which == "latest" or Path(which).parent.name != "checkpoints":
            return None
        run = Path(which).parent.parent
        return (
            run
            if any(run.resolve() == run_of_job.resolve() for run_of_job in numbered(self.run_dir))
            else None
        )

    def _check(self, checkpoint: Checkpoint) -> None:
        path = checkpoint.path
        try:
            self._state.check_resumable(checkpoint.state)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from None
        saved = checkpoint.info.get("optimizer")
        ours = type(self._state.step.optimizer).__name__
        if saved != ours:
            raise CheckpointError(
                f"{path}: expected a checkpoint of a run with {ours}, got one with {saved}"
            )


class _PendingSave:
    """A checkpoint that is being written: in a thread if in the background, otherwise in
    `result`.
    """

    def __init__(self, work: Callable[[], object], step: int, path: Path, background: bool) -> None:
        self.step = step
        self.path = path
        self._work = work
        self._error = cast(BaseException | None, None)
        self._thread = (
            threading.Thread(target=self._run, name="lockstep-checkpoint") if background else None
        )
        if self._thread is not None:
            self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._error = error

    def abandon(self) -> None:
        """Wait for the thread, if there is one; its error, if any, is that of a checkpoint that is
        written again.
        """
        if self._thread is not None:
            self._thread.join()

    def result(self) -> None:
        """Wait until it is written; raises the error of a failed write."""
        if self._thread is None:
            self._work()
            return
        self._thread.join()
        if self._error is not None:
            raise self._error
