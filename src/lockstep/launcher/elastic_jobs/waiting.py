"""What a host of an elastic job waits for: first to be in a view of the hosts, and later for hosts
that may have gone on without it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from ...errors import LockstepError
from ...job.messages import JobEnd
from .election import Election
from .host_knowledge import HostKnowledge
from .peers import Peers

TICK_S = 1.0
"""Seconds between two calls of `Waiting.tick`, in which this launcher has run."""

ALONE_S = 10.0
"""How long a host that the others may have gone on without looks for a launcher of the job."""

_PAUSE_TICKS = 2  # after which a signal to this host does not wait for the others any more
_HUNG_S = 3.0  # after which a launcher that is connected may be one that does not run


class OutsideError(LockstepError):
    """The other hosts of an elastic job have gone on without this one, which may join again."""


class Waiting:
    """Says what this host waits for, and ends what it waits for in vain.

    Args:
        log: prints a message.
        pause_s: seconds for which it waits for hosts that may go on.
        peers: the hosts of the job.
        election: of the one that leads.
        knowledge: of this host.

    Attributes:
        let_in_by: the host that has let this one in; -1 for a host that was there from the start.
    """

    def __init__(
        self,
        log: Callable[[str], None],
        pause_s: float,
        peers: Peers,
        election: Election,
        knowledge: HostKnowledge,
    ) -> None:
        self.let_in_by = -1
        self._log = log
        self._pause_s = pause_s
        self._peers = peers
        self._election = election
        self._knowledge = knowledge
        self._outside_ticks = 0  # since this host was let in
        self._paused_ticks = 0
        self._said = ""
        self._alone_since = math.inf

    @property
    def is_alone(self) -> bool:
        """Whether nobody seems to be left who could tell this host how the others have gone on."""
        return self._alone_since < math.inf

    @property
    def has_paused(self) -> bool:
        """Whether the hosts have not agreed who leads for some time."""
        return self._paused_ticks >= _PAUSE_TICKS

    def tick(self) -> JobEnd | None:
        """Note that `TICK_S` has passed; returns how the part of this host ends, if it waits in
        vain.
        """
        paused = self._say_what_it_waits_for()
        alone = self._end_if_all_others_have()
        return alone or paused

    def tick_outside(self) -> None:
        """Note that `TICK_S` has passed, in which this host may have been in no view.

        Raises:
            OutsideError, LockstepError: this has lasted too long.
        """
        is_let_in = self._knowledge.view is None and bool(self._peers.others)
        self._outside_ticks = self._outside_ticks + 1 if is_let_in else 0
        if self._outside_ticks * TICK_S >= ALONE_S:
            self._end_outside()

    def disconnected(self, host: int) -> None:
        """A host is not connected any more.

        Raises:
            OutsideError, LockstepError: it has let this host in, and the others do not know of it.
        """
        if host == self.let_in_by and self._election.view is None:
            self._end_outside()

    def _end_outside(self) -> None:
        """The host that has let this one in was lost, or leads no more, before the others knew of
        this one.
        """
        name = self._peers.own_entry.name
        if self._peers.others:
            raise OutsideError(
                f"the host that let {name} in leads no more; {name} joins the others again"
            )
        raise LockstepError(f"the host that let {name} in was lost before the job had begun")

    def _say_what_it_waits_for(self) -> JobEnd | None:
        """Say once that this side of a cut network does not go on; end when it has waited for too
        long.
        """
        election = self._election
        hosts = self._peers.hosts
        this_host = self._peers.own_entry.name
        is_paused = self._knowledge.view is not None and not election.is_settled
        names = ", ".join(hosts[host].name for host in election.unanswered if host in hosts)
        text = ""
        if is_paused and names:
            text = f"the training is paused on {this_host}, because {names} may go on"
        if text and text != self._said:
            self._log(f"lockstep: {text}")
        self._said = text
        self._paused_ticks = self._paused_ticks + 1 if is_paused else 0
        if self._paused_ticks * TICK_S < self._pause_s:
            return None
        return JobEnd(
            f"the training was paused on {this_host} for {self._pause_s:g} s, because "
            f"{names or 'the other hosts'} may go on (--pause-timeout)"
        )

    def _end_if_all_others_have(self) -> JobEnd | None:
        """End what this host waits for in vain: nobody is left who could tell it how the others
        have gone on.
        """
        election = self._election
        mesh = self._peers.mesh
        now = time.monotonic()
        waits = not election.is_settled and (election.unanswered or election.lost)
        others = [host for host in election.hosts if host != self._peers.me]
        connected = [host for host in others if election.is_connected(host)]
        # which holds up the election
        may_hang = any(self._peers.silent_s(host) > _HUNG_S for host in connected)
        if not waits or may_hang or mesh is None or not mesh.have_ended(election.unanswered):
            self._alone_since = math.inf
            return None
        self._alone_since = min(self._alone_since, now)
        if now - self._alone_since < ALONE_S:
            return None
        return JobEnd(describe_ended(self._peers.own_entry.name))


def describe_ended(name: str) -> str:
    """Return why a host that was cut off does not go on."""
    hint = "`lockstep run --resume` goes on from the newest checkpoint"
    return (
        f"the other hosts have ended while {name} was cut off, and may have finished; if they "
        f"have not, {hint}"
    )
