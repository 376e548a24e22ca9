"""Finds the checkpoint to go on from, the run that it belongs to, and the folder to write to."""

from __future__ import annotations

import secrets
import shlex
from datetime import datetime
from pathlib import Path

from ..errors import ConfigError

__all__ = ["RUNS", "choose_folder", "find_checkpoint"]

RUNS = Path("runs")


def find_checkpoint(resume: str, out: str | None) -> tuple[Path, Path | None]:
    """(what to go on from, the folder of the run that it belongs to if there is one).

    Where `resume` means a run, that is the run's folder: training takes the newest checkpoint in it that is not
    damaged, which only reading them can tell.

    Args:
        resume: a run folder, a checkpoint, or "latest" for the latest run in ``runs/``.
        out: the folder to write to, if it is given.

    Raises:
        ConfigError: when there is no such thing, or the run has gone on from there and `out` is None or that run.
    """
    try:
        path = _latest_run() if resume == "latest" else Path(resume).expanduser()
        if not path.is_dir():
            raise ConfigError(
                "resume", "a checkpoint, a run folder, or latest", found=f"{resume} (there is no such folder)"
            )
        if (path / "checkpoints").is_dir() or (path / "config.yaml").exists():
            _check_any(path)
            return path, path
        run = path.parent.parent if path.parent.name == "checkpoints" else None
        if run is not None and (out is None or _same(run, Path(out).expanduser())):
            from ..training.out_folder import check_newest

            check_newest(path, "To go on from an earlier one, add --out DIR: a new folder.")
        return path, run
    except OSError as error:
        raise ConfigError("resume", "a folder that can be read", found=f"{resume} ({error.strerror})") from None


def _latest_run() -> Path:
    runs = [path.parent.parent for path in RUNS.glob("*/checkpoints/step-*")]
    if not runs:
        raise ConfigError(
            "resume",
            "an earlier run with a checkpoint in runs/",
            found="a folder without one",
            hint="Name it: --resume DIR.",
        )
    return max(set(runs), key=lambda run: max(path.stat().st_mtime for path in (run / "checkpoints").iterdir()))


def _check_any(run: Path) -> None:
    from ..checkpoint import CheckpointStore

    if CheckpointStore(run / "checkpoints").latest() is None:
        hint = "Start it again without --resume, and with another --out."
        raise ConfigError(
            "resume", f"a checkpoint in {run / 'checkpoints'}", found="an empty folder or none", hint=hint
        )


def choose_folder(out: str | None, run: Path | None, name: str) -> Path:
    """The folder to write to: `out`, or that of the `run` that goes on, or a new one in ``runs/``.

    Args:
        out: as given.
        run: the folder of the run that goes on, if any.
        name: what the run is about, for the name of a new folder.

    Raises:
        ConfigError: when `out` holds another run, or cannot be looked into.
    """
    if out is None:
        return run or _new_folder(name)
    folder = Path(out).expanduser()
    if run is None or not _same(run, folder):
        from ..training.out_folder import check_unused

        check_unused(folder, f"Go on with --resume {shlex.quote(out)}, or choose another folder.")
    return folder


def _same(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()


def _new_folder(name: str) -> Path:
    """A folder that does not exist: by time, name, and a mark that runs begun in the same second do not share."""
    tidy = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name)[:100]
    return RUNS / f"{datetime.now():%Y%m%d-%H%M%S}-{tidy}-{secrets.token_hex(2)}"
