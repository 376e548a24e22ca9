"""The folder that a run writes to: made when it is needed, and not another run's."""

from __future__ import annotations

import tempfile
from pathlib import Path

from ..checkpoint import CheckpointStore
from ..errors import ConfigError

__all__ = ["check_newest", "check_unused", "prepare"]

_SIGNS_OF_A_RUN = ("config.yaml", "result.json", "checkpoints")


def prepare(out: Path, checkpoint: Path | None, fresh: bool) -> None:
    """Make the folder of a run, and see that it is this run's.

    Args:
        out: the folder.
        checkpoint: the newest that the run has written, or is to go on from, if any.
        fresh: whether the run has not lived here before, unless `checkpoint` is from here.

    Raises:
        ConfigError: when it cannot be written, belongs to another run, or to this run at a later time.
    """
    if checkpoint is not None and checkpoint.parent.resolve() == (out / "checkpoints").resolve():
        check_newest(checkpoint)
    elif fresh:
        check_unused(out)
    _make(out)


def check_unused(out: Path, hint: str = 'Go on with resume="latest", or choose another folder.') -> None:
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
        raise ConfigError("out", "a folder without an earlier run", str(out), hint)


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
        raise ConfigError("resume", f"the newest checkpoint of that run, {newest}", str(checkpoint), hint)


def _make(out: Path) -> None:
    # The file shows that files can be made, before hours have gone into what they shall hold.
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise _not_writable(out, error) from None


def _not_writable(out: Path, error: OSError) -> ConfigError:
    return ConfigError("out", "a folder that can be written", f"{out} ({error.strerror})")
