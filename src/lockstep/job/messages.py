"""The messages between the processes of a job: workers and the launcher of their host, and the
launcher typed in.

Messages of launchers of several hosts to each other are in `launcher/coordinator.py`, those of
elastic jobs in `elastic/membership.py` and `launcher/elastic_jobs/host_messages.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import structs

from ..errors import WorkerError
from ..messages import Integer, List, Tagged

__all__ = [
    "WATCHDOG_ERROR_KINDS",
    "Failure",
    "Finished",
    "FromAgent",
    "FromAnyWorker",
    "Hello",
    "HostDescription",
    "JobEnd",
    "MeetingPoint",
    "Note",
    "Output",
    "Peers",
    "Reply",
    "Request",
    "Say",
    "ToAgent",
    "ToAnyWorker",
]


class Hello(Tagged, frozen=True):
    """The first message of a worker: which one it is."""

    worker: Integer


WATCHDOG_ERROR_KINDS = ("DesyncError", "RankLostError", "StallError")
"""The errors with which a worker repeats the watchdog's report, if there is one."""


class Failure(Tagged, frozen=True):
    """A worker has ended early, because of an exception or a signal: as it says itself, and as the
    first failure of a host's workers, or of all hosts'.

    Attributes:
        rank: the rank that failed; as a worker says it, its number on its host.
        time: nanoseconds since the epoch, when the exception was caught; between hosts on the clock
            of the first one.
        kind: class name of the exception, or "exit" if the worker died.
        reason: its message, of one or more lines.
        traceback: its traceback as text, "" if there is none.
        exit_code: the process's exit code.
        host: the name of its host.
        others: a summary of workers that failed later.
        report: the watchdog's report on all ranks, as JSON; "" if there is none.
        repeats_watchdog: whether the error only repeats that report.
        checkpoint: the newest one that this worker, or its host's workers, have saved; None without
            one.
        dead_peers: the workers of its host that had ended by then, so that this failure probably
            follows from theirs; its launcher fills it in.
        signal_number: the signal on which the worker shut down cleanly; 0 if it failed.
        pickled: the exception, pickled, in Base64, if it is one of Lockstep's; else "". It stays on
            its host.
        in_collective: whether it was raised in communication with other ranks, as happens after one
            of them exits.
        call_site: where the user's program was, e.g. ``train.py:31 in main``; "" if that is not
            known.
    """

    rank: Integer
    time: Integer
    kind: str
    reason: str
    traceback: str = ""
    exit_code: Integer = 1
    host: str = ""
    others: str = ""
    report: str = ""
    repeats_watchdog: bool = False
    checkpoint: str | None = None
    dead_peers: List[Integer] = ()
    signal_number: Integer = 0
    pickled: str = ""
    in_collective: bool = False
    call_site: str = ""

    @property
    def stopped(self) -> bool:
        """Whether the worker shut down cleanly on a signal."""
        return self.signal_number > 0

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
    def from_error(error: WorkerError, host: str = "", clock_offset_ns: int = 0) -> Failure:
        """Return the failure described by `error`, on `host`, whose clock is `clock_offset_ns`
        ahead.
        """
        traceback = error.worker_traceback
        code = error.exit_code
        where = error.host or host
        at = error.time - clock_offset_ns
        report = error.report_json
        repeats_watchdog = bool(error.report_json) and error.kind in WATCHDOG_ERROR_KINDS
        return Failure(
            error.rank,
            at,
            error.kind,
            error.reason,
            traceback,
            code,
            where,
            error.others,
            report,
            repeats_watchdog,
            error.checkpoint,
        )

    @staticmethod
    def earliest(failures: Sequence[Failure]) -> Failure | None:
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
            *(
                text
                for failure in rest
                if not failure.repeats_watchdog
                for text in failure._summary()
            ),
        ]
        report = first.report or next((failure.report for failure in rest if failure.report), "")
        checkpoint = next(
            (failure.checkpoint for failure in (first, *rest) if failure.checkpoint), None
        )
        texts = "; ".join(text for text in others if text)
        return structs.replace(first, others=texts, report=report, checkpoint=checkpoint)

    def _summary(self) -> tuple[str, str]:
        return f"rank {self.rank} on {self.host} failed later with {self.kind}", self.others


class Finished(Tagged, frozen=True):
    """The work is done: of a worker, so that the end of its process is no failure; from a launcher
    to the coordinator, that of all workers of its host, and back, that of all hosts. To a worker:
    nothing more is to be expected from any other one of its host, and one that has failed need not
    wait any longer for them to report the same error.
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


FromAnyWorker = Hello | Failure | Finished | Note
"""From any worker to its launcher."""

ToAnyWorker = Peers | Finished
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


class MeetingPoint(Tagged, frozen=True):
    """Where the launchers of the hosts meet: to the launcher of a host, that it shall listen there,
    if there is no port, and else take part in the job of the launcher that listens there; from it,
    where it listens, said again when it takes part in an elastic job.

    Attributes:
        address: from a launcher the one by which others may join the job there; "" as long as it
            takes no part.
        port: 0 for one that the system chooses.
    """

    address: str
    port: Integer = 0


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


class JobEnd(Tagged, frozen=True):
    """The job is over, or cannot go on; from the launcher of a host to the coordinator, and with a
    reason to the starter: there.

    Attributes:
        reason: why it does not end well; "" if it does.
        signal: after which it ends; 0 for none.
        failure: of workers, if that is the reason.
    """

    reason: str = ""
    signal: Integer = 0
    failure: Failure | None = None


class Request(Tagged, frozen=True):
    """What a user asks of a job: a command asks a launcher, the starter asks the launcher of a
    host, and either launcher the one that leads an elastic job.

    Attributes:
        number: of the request, which the reply repeats; 0 where there is one request only, or no
            reply.
        what: "resize" to `count` workers; "remove" the host `host`; "address", for how another host
            can join; "leave", of the host that is asked; "slots", that it shall have `count` of
            them; "signal", forward the signal `count` to the job; "stop" by the signal `count`,
            in a job of fixed size that of the launcher on `host`; "end" the job.
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


FromAgent = HostDescription | MeetingPoint | Output | Say | Failure | JobEnd
"""From the launcher of a host to the one that was typed in, and has started it; the failure is the
first one of its workers.
"""

ToAgent = MeetingPoint | Request
"""Back."""
