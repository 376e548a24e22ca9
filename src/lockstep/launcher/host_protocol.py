"""What the launchers of several hosts tell each other: descriptions of hosts, failures, and a
child's messages.

Under `lockstep run -H` the launcher of each host is a child of the one that the user started: it
reads commands (``serve``, ``go``, ``signal``, ``leave``, ``slots``, ``end``) as lines on standard
input, and answers with lines on standard error that begin with `CONTROL_PREFIX` and hold JSON.
Nothing here loads PyTorch.
"""

from __future__ import annotations

import platform
import socket
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import msgspec
from msgspec import structs

from ..errors import ConfigError, WorkerError

__all__ = [
    "CONTROL_PREFIX",
    "WATCHDOG_ERROR_KINDS",
    "HostDescription",
    "HostFailure",
    "ParentMessage",
    "check_compatible",
    "describe_host",
]


# --- Compatibility of hosts (pure), and the description of this one
# ---------------------------------------------------

MUST_MATCH = ("lockstep", "torch", "python")


class HostDescription(msgspec.Struct, frozen=True):
    """What a host reports about itself before the start.

    Attributes:
        host: its name.
        lockstep, torch, python: versions; Python's without its last number, which does not matter.
        workers: how many ranks it will run.
        problem: why it cannot run the program, or "".
        connection: SSH_CONNECTION of the launcher, as sshd sets it; "" without ssh.
    """

    host: str
    lockstep: str
    torch: str
    python: str
    workers: int
    problem: str = ""
    connection: str = ""

    @property
    def address(self) -> str:
        """The host's address in the network of the launcher that connected to it; "" if unknown."""
        return next(iter(self.connection.split()[2:3]), "")

    @property
    def caller(self) -> str:
        """The address of the launcher that connected to the host, as the host sees it; "" if
        unknown.
        """
        return next(iter(self.connection.split()[:1]), "")


def describe_host(workers: int, problem: str = "", connection: str = "") -> HostDescription:
    """Return the description of this host; does not load PyTorch."""
    python = ".".join(platform.python_version_tuple()[:2])
    host = socket.gethostname()
    return HostDescription(
        host, _version("lockstep-train"), _version("torch"), python, workers, problem, connection
    )


def check_compatible(hosts: Sequence[HostDescription]) -> None:
    """Raise ConfigError if a host cannot run the program or versions differ; the message names the
    hosts.
    """
    for each in hosts:
        if each.problem:
            raise ConfigError(
                "host", f"one that can run the program ({each.host})", found=each.problem
            )
    for name in MUST_MATCH:
        versions = Counter(str(getattr(each, name)) for each in hosts)
        if len(versions) > 1:
            got = ", ".join(f"{getattr(each, name)} on {each.host}" for each in hosts)
            hint = "Install the same version on all hosts."
            raise ConfigError(
                "hosts", f"the same version of {name} on all hosts", found=got, hint=hint
            )


def _version(name: str) -> str:
    try:
        found: str = version(name)
        return found
    except PackageNotFoundError:  # run from a folder of sources
        return "unknown"


# --- The failure of a host, as it travels to the others (pure)
# --------------------------------------------------------

WATCHDOG_ERROR_KINDS = ("DesyncError", "RankLostError", "StallError")
"""The errors with which a worker repeats the watchdog's report, if there is one."""


class HostFailure(msgspec.Struct, frozen=True):
    """The first failure of a host's workers.

    Attributes:
        rank: the rank that failed.
        kind: the class name of its exception, or "exit" if it died.
        reason: the message, of one or more lines.
        traceback: as text, "" if there is none.
        exit_code: of the process.
        host: the name of its host.
        others: a summary of workers that failed later.
        time: nanoseconds since the epoch, on the clock of the first host.
        report: the watchdog's report on all ranks, as JSON; "" if there is none.
        repeats_watchdog: whether the worker's error only repeats that report.
        checkpoint: the newest checkpoint that this host's workers have saved; None without one.
    """

    rank: int
    kind: str
    reason: str
    traceback: str = ""
    exit_code: int = 1
    host: str = ""
    others: str = ""
    time: int = 0
    report: str = ""
    repeats_watchdog: bool = False
    checkpoint: str | None = None

    def as_error(self) -> WorkerError:
        """Return the failure as an exception."""
        error = WorkerError(self.rank, self.kind, self.reason, self.traceback, self.exit_code)
        error.host = self.host
        error.others = self.others
        error.time = self.time
        error.report_json = self.report
        error.checkpoint = self.checkpoint
        return error

    @staticmethod
    def from_error(error: WorkerError, host: str = "", clock_offset_ns: int = 0) -> HostFailure:
        """Return the failure described by `error`, on `host`, whose clock is `clock_offset_ns`
        ahead.
        """
        traceback = error.worker_traceback
        code = error.exit_code
        where = error.host or host
        at = error.time - clock_offset_ns
        report = error.report_json
        repeats_watchdog = bool(error.report_json) and error.kind in WATCHDOG_ERROR_KINDS
        texts = error.kind, error.reason, traceback, code, where, error.others
        return HostFailure(error.rank, *texts, at, report, repeats_watchdog, error.checkpoint)

    @staticmethod
    def earliest(failures: Sequence[HostFailure]) -> HostFailure | None:
        """Return the earliest failure, with a summary of the later ones; None if there is none.

        A worker that fails because of a failure on another host fails later than that one. A worker
        whose error repeats the watchdog's report has seen another rank's failure, or failed
        together with all.
        """
        if not failures:
            return None
        first, *rest = sorted(
            failures, key=lambda failure: (failure.repeats_watchdog, failure.time)
        )
        others = [
            first.others,
            *(text for each in rest if not each.repeats_watchdog for text in each._summary()),
        ]
        report = first.report or next((failure.report for failure in rest if failure.report), "")
        checkpoint = next(
            (failure.checkpoint for failure in (first, *rest) if failure.checkpoint), None
        )
        texts = "; ".join(text for text in others if text)
        return structs.replace(first, others=texts, report=report, checkpoint=checkpoint)

    def _summary(self) -> tuple[str, str]:
        return f"rank {self.rank} on {self.host} failed later with {self.kind}", self.others


# --- Messages of a host's launcher to its parent
# ----------------------------------------------------------------------

CONTROL_PREFIX = "\x1eLOCKSTEP "
"""Begins a line on standard error that is meant for the parent launcher."""


class ParentMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a host's launcher reports to the one that has started it; one of its fields at a time.

    Attributes:
        ready: the host can run its workers.
        port: at which it serves the job's store, or listens for the other launchers of an elastic
            job.
        address: at which it does the latter.
        failure: of its workers.
        error: of the launcher itself.
        is_over: an elastic job is over, on all of its hosts.
    """

    ready: HostDescription | None = None
    port: int = 0
    address: str = ""
    failure: HostFailure | None = None
    error: str = ""
    is_over: bool = False
