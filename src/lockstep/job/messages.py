"""The messages between the processes of a job: workers and the launcher of their host, and the
launcher typed in.

Messages of launchers of several hosts to each other are in `launcher/coordinator.py`, those of
elastic jobs in `elastic/membership.py` and `launcher/elastic_jobs/elastic_job.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import structs

from ..errors import WorkerError
from ..messages import Integer, List, Tagged

__all__ = [
    "WATCHDOG_ERROR_KINDS",
    "Begin",
    "Failure",
    "Finished",
    "FromAgent",
    "FromAnyWorker",
    "Hello",
    "HostDescription",
    "HostFailure",
    "JobEnd",
    "Listen",
    "Listening",
    "Note",
    "Outcome",
    "Output",
    "Peers",
    "Release",
    "Reply",
    "Request",
    "Say",
    "ToAgent",
    "ToAnyWorker",
]


class Hello(Tagged, frozen=True):
    """The first message of a worker: which one it is."""

    worker: Integer


class Failure(Tagged, frozen=True):
    """A worker ends early, because of an exception or a signal.

    Attributes:
        rank: its number on its host; where failures of several hosts are combined, its rank.
        time: nanoseconds since the epoch, when the exception was caught.
        kind: class name of the exception.
        reason: its message.
        traceback: its traceback as text.
        exit_code: the process's exit code.
        dead_peers: the workers of its host that had ended by then, so that this failure probably
            follows from theirs; its launcher fills it in.
        signal_number: the signal on which the worker shut down cleanly; 0 if it failed.
        checkpoint: the checkpoint that it saved before it stopped.
        pickled: the exception, pickled, in Base64, if it is one of Lockstep's; else "".
        in_collective: whether it was raised in communication with other ranks, as happens after one
            of them exits.
        repeats_watchdog: whether it only repeats the watchdog's report on all ranks.
        call_site: where the user's program was, e.g. ``train.py:31 in main``; "" if that is not
            known.
    """

    rank: Integer
    time: Integer
    kind: str
    reason: str
    traceback: str = ""
    exit_code: Integer = 1
    dead_peers: List[Integer] = ()
    signal_number: Integer = 0
    checkpoint: str | None = None
    pickled: str = ""
    in_collective: bool = False
    repeats_watchdog: bool = False
    call_site: str = ""

    @property
    def stopped(self) -> bool:
        """Whether the worker shut down cleanly on a signal."""
        return self.signal_number > 0


class Finished(Tagged, frozen=True):
    """The work of the sender is done: of a worker, so that the end of its process is no failure; of
    a launcher, that of all workers of its host; from the coordinator, that of all hosts.
    """


class Note(Tagged, frozen=True):
    """What a worker tells its launcher.

    Attributes:
        what: "needs time": to save, after a signal; "checkpoint": it has saved one.
        text: the path of the checkpoint.
    """

    what: Literal["needs time", "checkpoint"]
    text: str = ""


class Peers(Tagged, frozen=True):
    """The processes of all workers of this host, which each of them needs if the launcher is
    killed.
    """

    pids: List[Integer]


class Release(Tagged, frozen=True):
    """A worker that has failed need not wait any longer for the others to report the same error."""


FromAnyWorker = Hello | Failure | Finished | Note
"""From any worker to its launcher."""

ToAnyWorker = Peers | Release
"""From a launcher to any of its workers."""


class HostDescription(Tagged, frozen=True):
    """What a host reports about itself before the start; the first message of its launcher to the
    starter.

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


class Listening(Tagged, frozen=True):
    """The launcher of a host listens for those of the other hosts: the answer to `Listen`, and said
    again when it takes part in an elastic job.

    Attributes:
        port: where it listens.
        address: by which others may join the job there; "" as long as it takes no part.
    """

    port: Integer
    address: str = ""


class Output(Tagged, frozen=True):
    """A line of a worker's output, or the state of its progress bar.

    Attributes:
        rank: of the worker.
        stream: 0 for standard output, 1 for standard error.
        text: without line end.
        is_bar: whether it is a progress bar.
        is_complete: whether the line is complete; a progress bar that is not will be drawn over.
    """

    rank: Integer
    stream: Literal[0, 1]
    text: bytes
    is_bar: bool
    is_complete: bool


class Say(Tagged, frozen=True):
    """A message for whoever reads the output of a launcher; from the launcher that leads an elastic
    job to the others what has happened, for `lockstep top`.
    """

    text: str


class Outcome(Tagged, frozen=True):
    """The part of the sender is over, or its workers have failed: of one host, or from the
    coordinator of all.

    Attributes:
        failure: the first one of its workers, if there is one.
        error: another error with which a launcher ends; "" without one.
    """

    failure: HostFailure | None = None
    error: str = ""


class JobEnd(Tagged, frozen=True):
    """The job is over, or cannot go on.

    Attributes:
        reason: why it does not end well; "" if it does.
        signal: after which it ends; 0 for none.
        failure: of workers, if that is the reason.
    """

    reason: str = ""
    signal: Integer = 0
    failure: HostFailure | None = None


class Listen(Tagged, frozen=True):
    """Listen at this address for the launchers of the other hosts."""

    address: str


class Begin(Tagged, frozen=True):
    """Take part in the job of the launcher that listens there."""

    address: str
    port: Integer


class Request(Tagged, frozen=True):
    """What a user asks of a job: a command asks a launcher, the starter asks the launcher of a
    host, and either launcher the one that leads an elastic job.

    Attributes:
        number: of the request, which the reply repeats; 0 where there is one request only, or no
            reply.
        what: "resize" to `count` workers; "remove" the host `host`; "address", for how another host
            can join; "leave", of the host that is asked; "slots", that it shall have `count` of
            them; "signal", forward the signal `count` to the job; "stop" by the signal `count`;
            "end" the job.
    """

    number: Integer
    what: str
    count: Integer = 0
    host: str = ""


class Reply(Tagged, frozen=True):
    """What the job does on a request, or why it does not."""

    number: Integer
    text: str
    accepted: bool


FromAgent = HostDescription | Listening | Output | Say | Outcome | JobEnd
"""From the launcher of a host to the one that was typed in, and has started it."""

ToAgent = Listen | Begin | Request
"""Back."""
