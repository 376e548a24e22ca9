"""What Lockstep's launcher and its workers say to each other through variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

__all__ = [
    "ask_for_time",
    "attempt",
    "debug_rank",
    "preset",
    "put",
    "run_id",
    "threads",
    "variables_for_workers",
    "wants_colours",
]


def attempt() -> int:
    """How often this job's workers have been started before, because some had failed."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def ask_for_time() -> None:
    """Ask the launcher, if there is one, not to end this worker soon: it has heard the signal and is clearing up."""
    path = os.environ.get("LOCKSTEP_ASK_FOR_TIME", "")
    if path:
        with suppress(OSError):  # the launcher is gone
            Path(path).touch()


def debug_rank() -> int | None:
    """The rank that has the terminal, so that the others must wait for it however long it takes."""
    text = os.environ.get("LOCKSTEP_DEBUG_RANK", "")
    return int(text) if text else None


def threads() -> int:
    """The number of threads that OMP_NUM_THREADS asks for; 0 without one."""
    text = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(text) if text.isdecimal() else 0


def run_id() -> str:
    """The mark of the run that this process, or the launcher that it is, belongs to; "" without one."""
    return os.environ.get("LOCKSTEP_RUN_ID", "")


def variables_for_workers(run_id: str, threads: int, ask_for_time: Path, debug_rank: int | None) -> dict[str, str]:
    """What each worker of a run finds in its environment beside what PyTorch's agent puts there.

    Args:
        run_id: marks the run's processes, and those that they start.
        threads: that one worker may use within an operation.
        ask_for_time: the file that a worker makes to say that it is clearing up.
        debug_rank: the rank that has the terminal.
    """
    own = {"LOCKSTEP_LAUNCHED": "1", "LOCKSTEP_RUN_ID": run_id, "LOCKSTEP_ASK_FOR_TIME": str(ask_for_time)}
    if debug_rank is not None:
        own["LOCKSTEP_DEBUG_RANK"] = str(debug_rank)
    return {**own, "OMP_NUM_THREADS": str(threads)}


def preset(variables: Mapping[str, str]) -> None:
    """Set `variables` where they are not set, for this process and what it starts."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def put(variables: Mapping[str, str]) -> None:
    """Set `variables` for this process and what it starts, as the user has asked for."""
    os.environ.update(variables)


def wants_colours() -> bool:
    """Whether a terminal may be written to in colours (https://no-color.org)."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
