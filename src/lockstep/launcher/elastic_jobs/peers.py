"""The hosts of an elastic job as one of them knows them, and the messages between it and the
others.

The connections themselves are in `mesh`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Any

from ..handshake import HostEntry
from .election import Election, ElectionMessage
from .host_messages import HostMessages
from .mesh import Mesh, Wire

WireMessage = Wire | ElectionMessage | HostMessages
"""All messages between the launchers of two hosts."""


class Peers:
    """The hosts of the job, this one included, and the messages to and from them.

    Args:
        own_entry: this host.
        election: knows who leads.
        mesh: the connections to the other hosts; None for a job on one host.

    Attributes:
        me: the number of this host.
        mesh: the connections.
        hosts: the hosts that there are or have been, by number.
        queue: what has come and is not handled yet, in order, each with the number of its sender: a
            message, or a `Link` when what is known of that host has changed.
    """

    def __init__(self, own_entry: HostEntry, election: Election, mesh: Mesh | None) -> None:
        self.me = own_entry.number
        self.mesh = mesh
        self.hosts: dict[int, HostEntry] = {own_entry.number: own_entry}
        self.queue: deque[tuple[int, Any]] = deque()
        self._election = election
        if mesh is not None:
            mesh.on_message = self._receive
            mesh.on_link = self._receive  # after what has come before on that connection

    @property
    def own_entry(self) -> HostEntry:
        """This host."""
        return self.hosts[self.me]

    @property
    def others(self) -> list[HostEntry]:
        """The other hosts that there are or have been."""
        return [host for number, host in self.hosts.items() if number != self.me]

    def add(self, hosts: Collection[HostEntry]) -> None:
        """Get to know hosts, and connect to those of them that this one has to dial."""
        self.hosts |= {host.number: host for host in hosts}
        if self.mesh is not None:
            self.mesh.add_hosts([host for host in hosts if host.number != self.me])

    def send(self, host: int, message: HostMessages) -> None:
        """Send a message to a host, which may be this one."""
        if host == self.me:
            self.queue.append((host, message))
        elif self.mesh is not None:
            self.mesh.send(host, message)

    def send_to_leader(self, message: HostMessages) -> None:
        """Send a message to the host that leads."""
        self.send(self._election.leader, message)

    def silent_s(self, host: int) -> float:
        """Return for how many seconds nothing has come from a host; infinite if it is not
        connected.
        """
        return 0.0 if self.mesh is None or host == self.me else self.mesh.silent_s(host)

    def _receive(self, host: int, message: Any) -> None:
        """Keep what another host has sent, or how its connection has changed."""
        self.queue.append((host, message))
