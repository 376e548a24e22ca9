"""What all hosts are told of an elastic job: its state, and what has happened."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import structs

from ...job.messages import Say
from ..handshake import HostEntry
from .host_messages import HostMessages, JobState


class JobRecord:
    """The state of the job, which each host has to know in order to lead next.

    Args:
        state: what the launcher that led before knew.
        hosts: that take part.
        send: sends a message to the launcher of a host.
        log: prints a message of the job.

    Attributes:
        state: of the job; put another one in its place only to take over a newer one.
        hosts: that take part, by number.
        send: see above.
    """

    def __init__(
        self,
        state: JobState,
        hosts: dict[int, HostEntry],
        send: Callable[[int, HostMessages], None],
        log: Callable[[str], None],
    ) -> None:
        self.state = state
        self.hosts = hosts
        self.send = send
        self._log = log

    def change(self, **values: object) -> None:
        """Change the state of the job, and tell all hosts."""
        version = self.state.version + 1
        hosts = tuple(self.hosts.values())
        self.state = structs.replace(self.state, version=version, hosts=hosts, **values)
        for host in self.hosts:
            self.send(host, self.state)

    def tell(self, text: str) -> None:
        """Print what has happened, and let all hosts know."""
        self._log(f"lockstep: {text}")
        for host in self.hosts:
            self.send(host, Say(text))

    def on_host(self, number: int) -> str:
        """Return where a worker is, in a message; "" if there is one host only."""
        several = len(self.hosts) > 1 and number in self.hosts
        return f" on {self.hosts[number].name}" if several else ""
