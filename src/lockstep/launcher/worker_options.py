"""How the workers of a host are run, and how long they may take to end (data only)."""

from __future__ import annotations

from dataclasses import dataclass

from .. import arguments
from ..network import VirtualNetwork

__all__ = [
    "EXIT_GRACE",
    "FAILURE_GRACE",
    "METRICS_HOST",
    "SAVE_GRACE",
    "MetricsOptions",
    "WatchdogOptions",
    "WorkerOptions",
]

SAVE_GRACE = 120.0
"""Seconds to finish a step and save. At the 100 MB/s of a slow disk that is a checkpoint of 12 GB;
a second signal ends the wait."""

EXIT_GRACE = 1.0
"""Seconds to exit for a program that does not ask for time to save."""

FAILURE_GRACE = 5.0
"""Seconds until the other workers are killed after one has failed. They cannot continue, only clean
up.
"""

METRICS_HOST = "127.0.0.1"
"""Where metrics are served unless the user says otherwise: to programs of this host only."""


@dataclass(frozen=True)
class MetricsOptions:
    """Where a job's metrics go.

    Attributes:
        port: where they are served over HTTP; 0 for any that is free, None for none.
        host: the address of this host at which they are served.
        file: that is written for node exporters; "" for none.
    """

    port: int | None = None
    host: str = METRICS_HOST
    file: str = ""

    def check(self) -> None:
        """Check that what is needed is installed.

        Raises:
            MissingPackageError: it is not.
        """
        name = "--metrics-file" if self.port is None else "--metrics-port"
        arguments.require_package("prometheus-client", name, "metrics", "prometheus_client")


@dataclass(frozen=True)
class WatchdogOptions:
    """The user's settings of the watchdog; None: the value in the environment.

    Attributes:
        mode: "on", "strict" or "off".
        stall_timeout: seconds of waiting for a rank after which it is an error.
        timeline: a folder for the records of all collectives.
        folder: the folder for the workers' output, by which `lockstep top` can find the job.
        metrics: where the job's metrics go; None if nowhere.
    """

    mode: str | None = None
    stall_timeout: float | None = None
    timeline: str | None = None
    folder: str = ""
    metrics: MetricsOptions | None = None


@dataclass(frozen=True)
class WorkerOptions:
    """How to run the workers of this host.

    Attributes:
        workers: their number.
        threads: intra-op threads of PyTorch in each worker.
        grace: seconds that workers may take to exit after a signal if one of them has asked for
            time to save.
        exit_grace: the same if none has.
        restarts: how often to restart all workers after a failure.
        start_method: "forkserver", or "spawn" for new interpreters.
        debug_rank: the rank that has the terminal.
        watch: settings of the watchdog.
        network: that is emulated between the workers, its dilation resolved; None for none.
    """

    workers: int
    threads: int
    grace: float = SAVE_GRACE
    exit_grace: float = SAVE_GRACE
    restarts: int = 0
    start_method: str = "forkserver"
    debug_rank: int | None = None
    watch: WatchdogOptions = WatchdogOptions()
    network: VirtualNetwork | None = None
