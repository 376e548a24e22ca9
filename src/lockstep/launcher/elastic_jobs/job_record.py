"""What all hosts of an elastic job are told and keep: its state, what has happened, and what rank 0
has sent for workers that join later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from msgspec import structs

from ...elastic.membership import Keep
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


class KeptValues:
    """The values that rank 0 has sent for workers that join later: which hosts have not kept them
    yet.

    A value is named as `Keep.name` says.
    """

    def __init__(self) -> None:
        self._known: set[tuple[int, int]] = set()
        self._missing: dict[tuple[int, int], set[int]] = {}

    def resume(self, kept: Iterable[Keep]) -> None:
        """This host begins to lead: hosts keep these values, and workers ask again for others."""
        self._known |= {message.name for message in kept if not message.is_of_callbacks}
        self._missing.clear()

    def forget_waits(self) -> None:
        """No worker waits any more: all are started again."""
        self._missing.clear()

    def is_known(self, message: Keep) -> bool:
        """Return whether the hosts had been sent a value before this host led."""
        return message.name in self._known

    def sent(self, message: Keep, hosts: Iterable[int]) -> None:
        """A value is sent to the hosts."""
        if message.request >= 0:
            self._missing[message.name] = set(hosts)

    def kept_by(self, host: int, name: tuple[int, int]) -> bool:
        """A host has kept a value, or is lost; returns whether now all hosts have kept it."""
        missing = self._missing.get(name)
        if missing is None:
            return False
        missing.discard(host)
        if not missing:
            del self._missing[name]
        return not missing

    @property
    def awaited(self) -> list[tuple[int, int]]:
        """The values that not all hosts have kept."""
        return list(self._missing)
