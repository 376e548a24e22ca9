"""The run directory: creates it, checks that it belongs to no other run, and locks it while a
process trains there.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import socket
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from ... import environment, messages
from ...checkpoint.folder import CheckpointStore
from ...communicator import Communicator
from ...errors import ConfigError
from ...messages import Integer
from ...system.terminal_text import plain
from ..options import CONFIGS

_log = logging.getLogger(__name__)

_FILES_OF_A_RUN = (*CONFIGS, "result.json", "checkpoints")


def choose(run_dir: Path, checkpoint: Path | None, fresh: bool) -> Path:
    """Return the directory of a run that was given `run_dir`, which may have an earlier run.

    Args:
        run_dir: the directory that the user has given.
        checkpoint: as for `prepare`.
        fresh: as for `prepare`.

    Returns:
        The directory of `checkpoint`, if it is `run_dir` or one that was numbered after it;
        otherwise `run_dir`, or if it has an earlier run, the first unused of ``run_dir-2``,
        ``run_dir-3`` and so on.
    """
    if checkpoint is not None:
        resumed = checkpoint.parent.parent
        if any(resumed.resolve() == run.resolve() for run in numbered(run_dir)):
            return resumed
    if not fresh or not _is_used(run_dir):
        return run_dir
    number = 2
    while _is_used(chosen := run_dir.with_name(f"{run_dir.name}-{number}")):
        number += 1
    hint = 'fit(..., resume="latest") continues the newest run instead'
    _log.warning("%s has an earlier run: this run writes to %s (%s)", run_dir, chosen, hint)
    return chosen


def of_this_job(run_dir: Path) -> Path | None:
    """Return the directory in which this job was training before all its workers were started
    again.

    Args:
        run_dir: the directory that the user has given.

    Returns:
        It, or one that `choose` has numbered after it; None if this job has not begun to train
        there.
    """
    earlier = environment.earlier_run_dir()
    is_of_job = earlier is not None and any(
        earlier.resolve() == run.resolve() for run in numbered(run_dir)
    )
    return earlier if is_of_job else None


def numbered(run_dir: Path) -> list[Path]:
    """Return `run_dir` and the directories that `choose` has numbered after it, those that exist,
    the newest first.
    """
    pattern = re.compile(re.escape(run_dir.name) + r"-([1-9]\d*)")
    try:
        runs = [
            (int(match[1]), path)
            for path in run_dir.parent.iterdir()
            if (match := pattern.fullmatch(path.name))
        ]
    except OSError:  # it does not exist yet
        return []
    unnumbered = [run_dir] if run_dir.exists() else []
    return [path for _, path in sorted(runs, reverse=True)] + unnumbered


def prepare(run_dir: Path, checkpoint: Path | None, fresh: bool) -> list[Path]:
    """Create a run directory, and check that it belongs to this run, even if several runs start at
    once.

    Args:
        run_dir: the run directory.
        checkpoint: the newest checkpoint that the run has written, or the one that it resumes from,
            if any.
        fresh: whether the run has not used this directory before, unless `checkpoint` is in it.

    Returns:
        The directories that were created, the outermost first; the run may remove them again.

    Raises:
        ConfigError: if it cannot be written, belongs to another run, or has newer checkpoints.
    """
    resumes_here = (
        checkpoint is not None
        and checkpoint.parent.resolve() == (run_dir / "checkpoints").resolve()
    )
    if checkpoint is not None and resumes_here:
        check_newest(checkpoint)
    elif fresh:
        check_unused(run_dir)
    created: list[Path] = []
    try:
        _create(run_dir, created)
        if fresh and not resumes_here:
            _claim(run_dir)
    except ConfigError:
        for path in reversed(created):
            with suppress(OSError):  # another run uses it
                path.rmdir()
        raise
    return created


def release(run_dir: Path) -> None:
    """Remove the empty checkpoint folder with which `prepare` has claimed the directory."""
    with suppress(OSError):
        (run_dir / "checkpoints").rmdir()


_RETRY_S = 0.05


class RunLock:
    """A lock on a run directory while a process trains there; it ends with the process.

    Args:
        run_dir: the run directory, which exists.
        patience_s: seconds after which the lock is taken from who holds it: in an elastic job the
            worker that wrote before may be on a host that is cut off, and only one side of a cut
            network goes on.

    Raises:
        ConfigError: if another process holds it, naming its host and process.
    """

    def __init__(self, run_dir: Path, patience_s: float | None = None) -> None:
        self._path = run_dir / ".lock"
        self._run_dir = run_dir
        self._descriptor: int | None = None
        deadline = time.monotonic() + (patience_s or 0.0)
        try:
            while True:
                try:
                    if self._acquire():
                        return
                except ConfigError:
                    if patience_s is None:
                        raise
                    if time.monotonic() > deadline:
                        # its holder keeps the lock of a file that has no name
                        self._path.unlink(missing_ok=True)
                    time.sleep(_RETRY_S)
        except OSError:  # a file system without locks; two runs at once are then the user's affair
            self.release()

    def _acquire(self) -> bool:
        """Take the lock; returns False if its file has been removed meanwhile by the process that
        held it.
        """
        # flock and not a file that exists: the kernel gives the lock back however its holder ends.
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            description = f"{self._run_dir}, where {_describe_holder(descriptor)}"
            os.close(descriptor)
            hint = "Wait for it, stop it, or give another folder as run_dir."
            raise ConfigError(
                "run_dir", "a run that no other process continues", found=description, hint=hint
            ) from None
        except OSError:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        with suppress(FileNotFoundError):
            if os.fstat(descriptor).st_ino == self._path.stat().st_ino:
                holder = _LockHolder(socket.gethostname(), os.getpid(), time.time())
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, messages.encode(holder).encode(), 0)
                return True
        self._close()
        return False

    def release(self) -> None:
        """Release the lock, and remove its file."""
        if self._descriptor is not None:
            with suppress(OSError):
                if os.fstat(self._descriptor).st_ino == self._path.stat().st_ino:
                    self._path.unlink()
            self._close()

    def _close(self) -> None:
        assert self._descriptor is not None
        # Explicitly, because loader processes have inherited the descriptor.
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        os.close(self._descriptor)
        self._descriptor = None


class _LockHolder(msgspec.Struct, frozen=True):
    """The process that holds the lock, and since when, in seconds since the epoch."""

    host: str
    pid: Integer
    time: float


def _describe_holder(descriptor: int) -> str:
    try:
        holder = messages.decode(os.pread(descriptor, 4096, 0), _LockHolder)
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.time))
        return f"process {holder.pid} on {plain(holder.host)[:100]} has been training since {since}"
    except (ValueError, OverflowError, OSError):
        return "another process is training"


def check_unused(
    run_dir: Path, hint: str = "Continue with that run (resume), or choose another folder."
) -> None:
    """Check that the directory has no files of an earlier run, which would mix with those of a new
    one.

    Args:
        run_dir: the directory; it need not exist.
        hint: the remedy that the error names.

    Raises:
        ConfigError: if it has, or cannot be read.
    """
    if _is_used(run_dir):
        raise ConfigError("run_dir", "a folder without an earlier run", got=str(run_dir), hint=hint)


def _is_used(run_dir: Path) -> bool:
    try:
        return any((run_dir / name).exists() for name in _FILES_OF_A_RUN)
    except OSError as error:
        raise _not_writable(run_dir, error) from None


def check_newest(
    checkpoint: Path, hint: str = "Give another folder as run_dir, or remove the newer ones."
) -> None:
    """Check that `checkpoint` is the newest in its run directory; a run that resumes from it would
    replace newer ones.

    Args:
        checkpoint: a checkpoint in a run directory.
        hint: the remedy that the error names.

    Raises:
        ConfigError: if there is a newer one. Damaged checkpoints do not count: they are a reason to
            resume from an older one.
    """
    store = CheckpointStore(checkpoint.parent)
    if store.latest() in (None, checkpoint):  # without reading them
        return
    newest = store.newest_good()
    if newest is not None and newest.name > checkpoint.name:
        raise ConfigError(
            "resume", f"the newest checkpoint of that run, {newest}", got=str(checkpoint), hint=hint
        )


def _create(run_dir: Path, created: list[Path]) -> None:
    """Create the directory and its parents, append those to `created`, and check that files can be
    written.
    """
    try:
        for path in [path for path in (run_dir, *run_dir.parents) if not path.exists()][::-1]:
            with suppress(FileExistsError):  # another run has created it
                path.mkdir()
                created.append(path)
        # Fail now if files cannot be written, not after hours of training.
        with tempfile.TemporaryFile(dir=run_dir):
            pass
    except OSError as error:
        raise _not_writable(run_dir, error) from None


def _claim(run_dir: Path) -> None:
    """Claim an unused directory by creating its checkpoint folder, which succeeds for one of
    several runs only.
    """
    try:
        (run_dir / "checkpoints").mkdir()
    except FileExistsError:
        hint = "Another run has just started there: choose another folder."
        raise ConfigError(
            "run_dir", "a folder without another run", got=str(run_dir), hint=hint
        ) from None
    except OSError as error:
        raise _not_writable(run_dir, error) from None


def _not_writable(run_dir: Path, error: OSError) -> ConfigError:
    return ConfigError(
        "run_dir", "a folder that can be written", found=f"{run_dir} ({error.strerror})"
    )


# Seconds that a worker waits for the lock of the one before it, which may be on a host that is cut
# off and never gives it back.
_PATIENCE_S = 3.0


class HeldRunDirectory:
    """The directory of a run, in which one process at a time trains, the one that has rank 0.

    Args:
        path: the directory that the user has given; None for a run that writes nothing.
        comm: of the workers.

    Attributes:
        path: it, or the one that was chosen when it was prepared.
        numbers: whether a run beside an earlier one gets a directory of its own.
        created: the directory and its parents, as far as this run has created them, the outermost
            first.
    """

    def __init__(self, path: Path | None, comm: Communicator) -> None:
        self.path = path
        self.numbers = True
        self.created: list[Path] = []
        self._comm = comm
        self._lock: RunLock | None = None

    def requested_resume(self) -> str | None:
        """Return what LOCKSTEP_RESUME requests, if it is for this directory."""
        if self.path is None:
            return None
        requested = environment.resume()
        if requested is None or requested == "latest":
            return requested
        run = Path(requested)
        run = run.parent.parent if run.parent.name == "checkpoints" else run
        is_own = any(run.resolve() == directory.resolve() for directory in numbered(self.path))
        return requested if is_own else None

    def prepare(self, checkpoint: Path | None, fresh: bool) -> None:
        """Choose, create and lock the directory; called by every worker.

        Args:
            checkpoint: as for `prepare`.
            fresh: as for `prepare`.

        Raises:
            ConfigError: if it cannot be written, or belongs to another run.
        """
        path = self.path
        if path is None:
            return

        def on_rank0() -> tuple[Path, list[Path]]:
            earlier = of_this_job(path)
            chosen = earlier or (choose(path, checkpoint, fresh) if self.numbers else path)
            created = prepare(chosen, checkpoint, fresh and earlier is None)
            self._lock = RunLock(chosen, None if earlier is None else _PATIENCE_S)
            return chosen, created

        self.path, created = self._comm.on_rank0(on_rank0)
        self.created += created

    def hold(self) -> None:
        """Lock the directory on rank 0, which may be another worker than before."""
        if self.path is not None and self._comm.rank == 0 and self._lock is None:
            self._lock = RunLock(self.path, _PATIENCE_S)

    def leave(self) -> None:
        """Unlock it: at the end, and before there are other workers."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def release(self) -> None:
        """Remove on rank 0 what has claimed the directory, if the run has written no checkpoint."""
        if self.path is not None and self._comm.rank == 0:
            release(self.path)
