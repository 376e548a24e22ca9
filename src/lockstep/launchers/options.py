"""How workers are run; data only."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GRACE", "PATIENCE", "Options", "Watch"]

GRACE = 120.0
"""Seconds to finish a step and save. At the 100 MB/s of a slow disk that is a checkpoint of 12 GB; who does not want to
wait for it sends a second signal."""

PATIENCE = 1.0
"""Seconds to leave for a program that does not say that it needs time."""


@dataclass(frozen=True)
class Watch:
    """What has been chosen for the watch over ranks that wait for each other; None: what the environment says.

    Attributes:
        mode: "on", "strict" or "off".
        stall_timeout: seconds after which ranks that do not come are an error.
        timeline: a folder for the records of all collectives.
        folder: the folder for the workers' output, for those who look for the job by it.
    """

    mode: str | None = None
    stall_timeout: float | None = None
    timeline: str | None = None
    folder: str = ""


@dataclass(frozen=True)
class Options:
    """How to run the workers of this machine.

    Attributes:
        workers: how many.
        threads: threads that PyTorch may use within one operation, in each worker.
        grace: seconds that workers may take to leave after a signal where one of them has asked for time.
        patience: the same where none has.
        restarts: how often workers are started afresh when some have failed.
        start_method: "forkserver", or "spawn" for processes that begin from nothing.
        debug_rank: the rank that has the terminal to itself.
        watch: the watch over them.
    """

    workers: int
    threads: int
    grace: float = GRACE
    patience: float = GRACE
    restarts: int = 0
    start_method: str = "forkserver"
    debug_rank: int | None = None
    watch: Watch = Watch()
