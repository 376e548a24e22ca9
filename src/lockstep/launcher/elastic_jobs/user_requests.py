"""What users ask of an elastic job at one of its hosts: by signals, by commands, and through the
launcher that was typed in.
"""

from __future__ import annotations

import selectors
import signal
from collections import deque
from collections.abc import Callable
from pathlib import Path

from ... import environment
from ...elastic.control import ControlSocket
from ...job.messages import JobEnd, Reply, Request
from .election import Election
from .host_knowledge import HostKnowledge
from .peers import Peers

TakeReply = Callable[[str, bool], None]
"""Called with what the job does, or why it does not, and whether it does."""


def _ignore(text: str, accepted: bool) -> None:
    """Take a reply for which nobody waits."""


class UserRequests:
    """Passes on what is asked of this host to the host that leads, and its replies back.

    Args:
        folder: the private directory in which commands find this launcher.
        selector: of the launcher's loop.
        peers: the hosts of the job.
        election: of the one that leads.
        knowledge: of this host.

    Attributes:
        signals: to this launcher: the first lets this host leave, or ends the job if it is alone.
        job_signals: to the whole job, which another thread may add to.
        requests: "leave" or "slots" with a number, of the launcher that was typed in; another
            thread may add to them.
    """

    def __init__(
        self,
        folder: Path,
        selector: selectors.BaseSelector,
        peers: Peers,
        election: Election,
        knowledge: HostKnowledge,
    ) -> None:
        self.signals: list[int] = []
        self.job_signals: list[int] = []
        self.requests: deque[tuple[str, int]] = deque()
        self._peers = peers
        self._election = election
        self._knowledge = knowledge
        self._control = ControlSocket(str(folder / "control"), self._ask_by_command, selector)
        self._wants_to_leave = False
        self._asked = 0
        self._replies: dict[int, TakeReply] = {}
        self._passed_on = [0, 0]  # of the signals to this launcher, and of those to the job

    def take_signals(self, gives_up: bool) -> JobEnd | None:
        """Ask who leads to do what the signals say that have come.

        Args:
            gives_up: whether to end the part of this host if nobody leads; else it waits.

        Returns:
            How that part ends then.
        """
        for kind, numbers in enumerate((self.signals, self.job_signals)):
            for number in numbers[self._passed_on[kind] :]:
                is_settled = self._election.is_settled
                takes_part = self._knowledge.view is not None
                if not is_settled and takes_part and not gives_up:
                    return None  # the hosts may be about to agree
                self._passed_on[kind] += 1
                if not is_settled:
                    when = "before this host had joined the job"
                    if takes_part:
                        when = "while the training was paused; nothing was saved"
                    return JobEnd(f"stopped by {signal.Signals(number).name} {when}", number)
                is_alone = len(self._election.hosts) < 2
                is_to_job = kind == 1 or number == signal.SIGINT
                if is_to_job or is_alone or self._knowledge.job.stops:
                    self._ask("stop", number)
                else:
                    self._wants_to_leave = True
                    self._ask("leave", number)
        return None

    def take_requests(self) -> None:
        """Ask for what the launcher that was typed in asks of this host, once somebody leads who
        can answer.
        """
        while self.requests and self._election.is_settled:
            what, number = self.requests.popleft()
            if what == "leave" and len(self._election.hosts) < 2:
                continue  # the others have gone in the meantime: the job stays here
            self._wants_to_leave = self._wants_to_leave or what == "leave"
            self._ask(what, number)

    def repeat(self) -> None:
        """Ask who leads now to let this host leave, if it wants to."""
        if self._wants_to_leave:
            self._ask("leave")

    def take_reply(self, reply: Reply) -> None:
        """Pass on the reply of who leads."""
        take = self._replies.pop(reply.number, _ignore)
        take(reply.text, reply.accepted)

    def tick(self) -> None:
        """Close the connections on which no request has come in time."""
        self._control.tick()

    def close(self) -> None:
        """Take no more requests."""
        self._control.close()

    def _ask(self, what: str, count: int = 0, name: str = "", reply: TakeReply = _ignore) -> None:
        """Ask who leads."""
        self._asked += 1
        self._replies[self._asked] = reply
        self._peers.send_to_leader(Request(self._asked, what, count, name))

    def _ask_by_command(self, what: str, number: int, name: str, reply: TakeReply) -> None:
        """Take what a command asks for."""
        if what == "address":
            reply(*self._address())
        elif what in ("resize", "remove"):
            self._ask(what, number, name, reply)
        else:
            reply(f"unknown request {what[:100]!r}", False)

    def _address(self) -> tuple[str, bool]:
        """Return how another machine joins the job, or why none can; and whether one can."""
        if self._peers.mesh is None:
            return (
                "expected a job that was started with -H, --nnodes or --master-addr: this one is "
                "on one host",
                False,
            )
        entry = self._peers.mesh.own_entry
        key = environment.job_key()
        with_key = f"LOCKSTEP_JOB_KEY={key} " if key else ""
        return f"{with_key}lockstep join {entry.address}:{entry.port}", True
