"""The messages between the launchers of an elastic job: what the host that leads has to know, and
what it tells the others.

Those of workers are in `elastic.membership`, those of the election in `election`.
"""

from __future__ import annotations

from msgspec import structs

from ...elastic.membership import NO_STATE, Commit, CoordinatorMessage, HostReport, Keep, Up
from ...job.messages import Failure, JobEnd, Reply, Request, Say
from ...messages import Integer, List, Tagged
from ..handshake import HostEntry


class JobState(Tagged, frozen=True):
    """What a launcher that takes over has to know; the one that leads sends each change to all.

    Attributes:
        target: the number of workers that the job shall have.
        hosts: that take part.
        first: the number of the first worker since all were started.
        started: how many workers have been started.
        restarts: how often all workers have been started again.
        fruitless: how often in succession without progress.
        progress: the greatest commit before the last start of all workers.
        resume: the checkpoint from which all workers were started again; "" without one.
        folder: of the run; "" as long as it is not known, or if there is none.
        claims: the folder in which views are claimed once all hosts see it; "" without one.
        checkpoint: the newest one.
        stops: the signals with which the job was asked to end.
        is_ending: whether the job ends.
        leaving: the hosts that leave.
        lost: how many workers were lost, or have left.
        joined: how many joined the training later.
        faulty: the workers that computed wrong numbers, whose devices are used no more.
        version: how often it has changed; of two states the one that has more often is newer.
    """

    target: Integer
    hosts: List[HostEntry] = ()
    first: Integer = 0
    started: Integer = 0
    restarts: Integer = 0
    fruitless: Integer = 0
    progress: Commit = NO_STATE
    resume: str = ""
    folder: str = ""
    claims: str = ""
    checkpoint: str = ""
    stops: List[Integer] = ()
    is_ending: bool = False
    leaving: List[Integer] = ()
    lost: Integer = 0
    joined: Integer = 0
    faulty: List[Integer] = ()
    version: Integer = 0


class Start(Tagged, frozen=True):
    """Start a worker.

    Attributes:
        number: of the worker.
        rank, size: its rank, and of how many, until it is a member.
        local_size: the number of workers on its host.
        joins: whether the training runs already.
        attempt: how often all workers have been started again.
        resume: the checkpoint from which they begin then; "" without one.
        folder: where they have begun to train before; "" if they have not.
    """

    number: Integer
    rank: Integer
    size: Integer
    local_size: Integer
    joins: bool
    attempt: Integer
    resume: str
    folder: str


class Kill(Tagged, frozen=True):
    """Kill workers, or let them leave after their step."""

    numbers: List[Integer]
    gently: bool = False


class ToWorker(Tagged, frozen=True):
    """Pass this on to a worker; -1 for none, but remember it."""

    number: Integer
    message: CoordinatorMessage


class AgentState(Tagged, frozen=True):
    """All that a host knows, for who leads; sent again at each new view of the hosts and
    connection, and when anything else than `report` has changed.

    Attributes:
        view: the number of the newest view that the sender knows.
        host: the sender.
        job: the newest state of the job that it has been told.
        report: on its workers, which say themselves what changes.
        saved: the newest checkpoint that its workers have saved; "" if the job knows of it, or of
            a newer one.
        sees_claims: whether it sees the folder in which views are to be claimed.
        unreachable: the hosts of the view that it does not reach.
    """

    view: Integer
    host: HostEntry
    job: JobState
    report: HostReport
    saved: str = ""
    sees_claims: bool = False
    unreachable: List[Integer] = ()


class FromWorker(Tagged, frozen=True):
    """A worker of this host has sent a message."""

    number: Integer
    message: Up


class Ended(Tagged, frozen=True):
    """A worker's process has ended; `code` is 0, too, if it was killed from here."""

    number: Integer
    code: Integer
    is_finished: bool
    report: Failure | None

    def without_pickle(self) -> Ended:
        """Return it as another host may read it, which unpickles nothing that it has not pickled
        itself.
        """
        report = None if self.report is None else structs.replace(self.report, pickled="")
        return structs.replace(self, report=report)


class Kept(Tagged, frozen=True):
    """This host has kept what a worker has sent with the number `request`."""

    worker: Integer
    request: Integer


ForLeader = AgentState | FromWorker | Ended | Kept | Request
"""What the launchers of all hosts send to the one that leads."""

HostMessages = ForLeader | JobState | Start | Kill | ToWorker | Keep | Say | JobEnd | Reply
"""All messages between them."""
