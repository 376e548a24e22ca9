"""The folder that a run writes to: made when it is needed, and not another run's."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path

from ..checkpoint import CheckpointStore
from ..errors import ConfigError

__all__ = ["check_newest", "check_unused", "prepare", "release"]

_SIGNS_OF_A_RUN = ("config.yaml", "result.json", "checkpoints")


def prepare(out: Path, checkpoint: Path | None, fresh: bool) -> list[Path]:
    """Make the folder of a run, and see that it is this run's, also where several begin at once.

    Args:
        out: the folder.
        checkpoint: the newest that the run has written, or is to go on from, if any.
        fresh: whether the run has not lived here before, unless `checkpoint` is from here.

    Returns:
        The folders that were made for it, the outermost first: this run's own, which it may remove again.

    Raises:
        ConfigError: when it cannot be written, belongs to another run, or to this run at a later time.
    """
    here = checkpoint is not None and checkpoint.parent.resolve() == (out / "checkpoints").resolve()
    if checkpoint is not None and here:
        check_newest(checkpoint)
    elif fresh:
        check_unused(out)
    made: list[Path] = []
    try:
        _make(out, made)
        if fresh and not here:
            _claim(out)
    except ConfigError:
        for path in reversed(made):
            with suppress(OSError):  # another run lives in it
                path.rmdir()
        raise
    return made


def release(out: Path) -> None:
    """Take back what `prepare` has marked the folder with, unless there are checkpoints by now."""
    with suppress(OSError):
        (out / "checkpoints").rmdir()


def check_unused(out: Path, hint: str = "Go on with that run (resume), or choose another folder.") -> None:
    """See that no run has lived in the folder, whose files would be mixed up with those of a new one.

    Args:
        out: the folder; it need not exist.
        hint: what the caller's user can do about it.

    Raises:
        ConfigError: when one has, or the folder cannot be looked into.
    """
    try:
        used = any((out / name).exists() for name in _SIGNS_OF_A_RUN)
    except OSError as error:
        raise _not_writable(out, error) from None
    if used:
        raise ConfigError("out", "a folder without an earlier run", got=str(out), hint=hint)


def check_newest(checkpoint: Path, hint: str = "Give another folder as out, or remove the newer ones.") -> None:
    """See that a run which goes on in the folder of `checkpoint` leaves no later checkpoints of another course there.

    Args:
        checkpoint: one of the checkpoints in a run's folder.
        hint: what the caller's user can do about it.

    Raises:
        ConfigError: when there is a later good one. A damaged one does not count: it is what one goes back for.
    """
    store = CheckpointStore(checkpoint.parent)
    if store.latest() in (None, checkpoint):  # without reading them
        return
    newest = store.newest_good()
    if newest is not None and newest.name > checkpoint.name:
        raise ConfigError("resume", f"the newest checkpoint of that run, {newest}", got=str(checkpoint), hint=hint)


def _make(out: Path, made: list[Path]) -> None:
    try:
        for path in [path for path in (out, *out.parents) if not path.exists()][::-1]:
            with suppress(FileExistsError):  # another run was faster
                path.mkdir()
                made.append(path)
        # The file shows that files can be made, before hours have gone into what they shall hold.
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise _not_writable(out, error) from None


def _claim(out: Path) -> None:
    """Of all runs that have found the folder unused at once, let one have it: making a folder succeeds for one only."""
    try:
        (out / "checkpoints").mkdir()
    except FileExistsError:
        hint = "Another one has begun there just now: choose another folder."
        raise ConfigError("out", "a folder without another run", got=str(out), hint=hint) from None
    except OSError as error:
        raise _not_writable(out, error) from None


def _not_writable(out: Path, error: OSError) -> ConfigError:
    return ConfigError("out", "a folder that can be written", found=f"{out} ({error.strerror})")
