"""The connections between the launchers of a job whose hosts are fixed: each to that of the first
host.

Hosts of an elastic job are connected each to each, see `lockstep.launcher.elastic_jobs.mesh`.

The connections themselves are in `host_connections`. The kernels notice the loss of a
host or of the network (`system.heartbeat`), the end of a connection that of a launcher; missing
pings show one that is stopped or hangs.
"""

from __future__ import annotations

import selectors
import socket
import time
from functools import partial
from typing import Any

from .. import environment
from ..errors import ConfigError, LockstepError, counted
from ..job.connection import take_turn
from ..job.messages import Failure, Finished, HostDescription, JobEnd, Request, Say
from ..stores import LOOPBACK, serve_store
from .coordinator import (
    Coordinator,
    FromCoordinator,
    Join,
    Round,
    ToCoordinator,
)
from .handshake import HostHello, HostRefused, HostWelcome
from .host_connections import HostConnection, HostConnections
from .host_rendezvous import HostRefusedError, ask_launcher, ask_until_let_in
from .options import JobOptions, check_debug_rank
from .pulse import Patience, SilenceWatch
from .remote_hosts.host_description import check_compatible

__all__ = ["FIRST", "FixedHosts", "OneHost"]

FIRST = 0
"""The number of the host whose launcher coordinates."""


Wire = HostHello | HostWelcome | HostRefused | ToCoordinator | FromCoordinator
"""All messages between two launchers."""


class OneHost:
    """The hosts of a job on this host alone: there is nobody to wait for.

    Attributes:
        selector: of the launcher's loop; the data of each key is a function to call when it is
            ready.
        node, nodes: the number of this host, and of all.
        address: of the workers' store.
        run_id: the name of the job.
        clock_offset_ns: nanoseconds by which this host's clock is ahead of the first host's.
        place: where the workers of this host are to start; None as long as that is not known.
        next_is_open: whether another host starts all workers again.
        all_done: whether the workers of all hosts have finished.
        reason: why the job cannot go on, because of another host; "" while it can.
        failure: of another host's workers, if that is why.
        interruption: the request of the host that has received a signal first.
        signals: that this launcher has received, in order; who starts it in another way than by a
            command may append some, from any thread.
    """

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.node = FIRST
        self.nodes = 1
        self.address = LOOPBACK
        self.run_id = "lockstep"
        self.clock_offset_ns = 0
        self.place: Round | None = None
        self.next_is_open = False
        self.all_done = False
        self.reason = ""
        self.failure: Failure | None = None
        self.interruption: Request | None = None
        self.signals: list[int] = []
        self._store: Any = None
        self._rounds = 0

    def join(self, workers: int) -> None:
        """Ask for the ranks of so many workers of this host, which are to be started, for the first
        time or again.
        """
        self._store = serve_store(self.address)
        self.place = Round(self._rounds, 0, workers, self._store.port)
        self._rounds += 1

    def done(self) -> None:
        """Say that all workers of this host have finished."""
        self.all_done = True

    def interrupt(self, number: int) -> None:
        """Say that this launcher has received a signal, before its workers get it and exit."""

    def tick(self) -> list[str]:
        """Look at the other hosts; returns what is to be said of them."""
        return []

    def ping(self) -> None:
        """Show the other launchers that this one runs; another thread may call this."""

    def turn(self, seconds: float) -> None:
        """Wait for messages, so long at most, and take them."""
        take_turn(self.selector, seconds)

    def close(self) -> None:
        """End the loop."""
        self.selector.close()


_TURN_S = 0.05
_FLUSH_S = 2.0
_VERDICT_S = 5.0  # that others wait longer than the first host does


class FixedHosts(OneHost):
    """The hosts of a job on several: this launcher is connected to that of the first host, or as
    the first to all.

    Args:
        address: by which all hosts reach the first.
        port: at which its launcher listens.
        node: the number of this host.
        nodes: how many there are.

    Attributes:
        is_disconnected: whether the launcher of the first host is gone.
        outcome: the first failure of all hosts, once the parts of all are over; None without one.
    """

    def __init__(self, address: str, port: int, node: int, nodes: int) -> None:
        super().__init__()
        self.address = address
        self.node = node
        self.nodes = nodes
        self.port = port
        self.run_id = f"{address}-{port}"
        self.is_disconnected = False
        self.outcome: Failure | None = None
        self._key = environment.job_key()
        self._limit_s = environment.heartbeat_timeout()
        self._silence = SilenceWatch(Patience.of(several_hosts=True))
        self._connections = HostConnections(
            self._key, self.selector, Wire, self._limit_s, self._greet, self._handle, self._end
        )
        self._descriptions: dict[int, HostDescription] = {}
        self._coordinator: Coordinator | None = None
        self._ended_at: dict[int, float] = {}
        self._notes: list[str] = []

    def meet(
        self, description: HostDescription, config: JobOptions, listener: socket.socket | None
    ) -> None:
        """Wait until the launchers of all hosts are connected.

        Args:
            description: of this host.
            config: of the run.
            listener: where the others connect, if this host is the first.

        Raises:
            ConfigError: the first host does not answer in time, or another host has the number of
                this one.
            LockstepError: not all have come in time, or they cannot run the program together.
        """
        if listener is None:
            self._connect(description, config)
        else:
            self._wait_for_hosts(listener, description, config)

    def _wait_for_hosts(
        self, listener: socket.socket, description: HostDescription, config: JobOptions
    ) -> None:
        """As the first host, wait until all others are there, and check that they can run the
        program together.
        """
        self._connections.listen(listener)
        deadline = time.monotonic() + config.start_timeout
        try:
            while len(self._connections.of_host) < self.nodes - 1 and time.monotonic() < deadline:
                self.turn(_TURN_S)
                self._connections.tick()
            descriptions = [
                description,
                *(self._descriptions[node] for node in sorted(self._connections.of_host)),
            ]
            self._check(descriptions, config)
        except LockstepError as error:
            verdict = str(error)  # the same on all hosts
            for link in self._connections.of_host.values():
                self._connections.send(link, HostRefused(verdict))
            raise LockstepError(verdict) from None
        finally:
            self._connections.stop_listening()
        for link in self._connections.of_host.values():
            self._connections.send(link, HostWelcome(link.handshake.proof, time.time_ns()))
        names = {node: host.host for node, host in enumerate(descriptions)}
        self._coordinator = Coordinator(names, self._tell, self._serve)

    def _check(self, descriptions: list[HostDescription], config: JobOptions) -> None:
        joined = self._connections.of_host
        missing = [str(node) for node in range(1, self.nodes) if node not in joined]
        if missing:
            nodes = counted(self.nodes, "node")
            late = ", ".join(missing)
            raise LockstepError(
                f"of {nodes}, these did not join within {config.start_timeout:g} s: {late}"
            )
        check_compatible(descriptions)
        check_debug_rank(config, sum(host.workers for host in descriptions))

    def _connect(self, description: HostDescription, config: JobOptions) -> None:
        """As another host, connect to the first one, which answers when all hosts are there."""
        hello = HostHello(node=self.node, description=description)
        answer_s = config.start_timeout + _VERDICT_S
        ask = partial(ask_launcher, self.address, self.port, self._key, hello, Wire, answer_s)
        try:
            connection, welcome = ask_until_let_in(
                ask, self.address, self.port, config.start_timeout
            )
        except HostRefusedError as error:
            if not error.answer.is_number:
                raise
            raise ConfigError("node_rank", "a number that no other host has", self.node) from None
        self._connections.assign(self._connections.adopt(connection), FIRST)
        self.clock_offset_ns = time.time_ns() - welcome.sent_at_ns

    def _greet(self, link: HostConnection, hello: HostHello) -> None:
        """Take what another host has said of itself.

        Raises:
            OSError: it is none of the job's hosts.
        """
        if hello.description is None:
            raise OSError("a stranger")
        if hello.node in self._connections.of_host or not FIRST < hello.node < self.nodes:
            self._connections.send(link, HostRefused("", is_number=True))
            self._connections.close(link)
            return
        self._descriptions[hello.node] = hello.description
        self._connections.assign(link, hello.node)

    def tick(self) -> list[str]:
        """Look at the other hosts; returns what is to be said of them."""
        names = {} if self._coordinator is None else self._coordinator.names
        patience = self._silence.patience
        for link, is_over in self._connections.look_for_silence(self._silence):
            text = f"the launcher of host {names.get(link.host, self.address)} has not answered for"
            if is_over:
                reason = f"{text} {patience.limit_s:g} s (LOCKSTEP_LAUNCHER_TIMEOUT)"
                self._say(reason)
                self._lose(link, reason)
            else:
                self._say(f"{text} {patience.warning_s:g} s")
        self._look_for_hosts_that_have_left()
        notes = self._notes
        self._notes = []
        return notes

    def _look_for_hosts_that_have_left(self) -> None:
        """End the job if a host has left it long ago, as one that was interrupted has, while this
        one goes on.
        """
        coordinator = self._coordinator
        if coordinator is None or FIRST in coordinator.ended:
            return
        now = time.monotonic()
        for node in coordinator.ended:
            if now - self._ended_at.setdefault(node, now) > self._limit_s:
                coordinator.end_job(f"the launcher on {coordinator.names[node]} has ended")

    def _say(self, text: str) -> None:
        if self._coordinator is not None:
            self._coordinator.say(text)
        else:
            self._notes.append(text)

    def ping(self) -> None:
        """Show the other launchers that this one runs; another thread may call this."""
        self._connections.ping_all()

    def _handle(self, link: HostConnection, message: Any) -> None:
        if not self._connections.counts(link):
            return
        if isinstance(message, ToCoordinator) and self._coordinator is not None:
            self._coordinator.receive(link.host, message)
        elif isinstance(message, FromCoordinator) and link.host == FIRST:
            self._take(message)

    def _end(self, link: HostConnection, error: Exception) -> None:
        """A connection has ended."""
        reason = "the launcher on {} has ended"
        if isinstance(error, OSError) and not isinstance(error, ConnectionError):
            reason = f"no heartbeat from {{}} for {self._limit_s:g} s"  # of the other kernel
        coordinator = self._coordinator
        if not self._connections.counts(link):
            self._connections.close(link)
        elif coordinator is None:
            self._lose(link, f"the first host ({self.address}) no longer answers")
        else:
            self._lose(link, reason.format(coordinator.names[link.host]))

    def _lose(self, link: HostConnection, reason: str) -> None:
        """The launcher of a host, or the host, is gone."""
        del self._connections.of_host[link.host]
        self._connections.close(link)
        if self._coordinator is not None:
            self._coordinator.lost(link.host, reason)
        elif self.node != FIRST and not self.all_done and self.outcome is None:
            self.is_disconnected = True
            self.reason = self.reason or reason

    def join(self, workers: int) -> None:
        """Ask for the ranks of so many workers of this host, which are to be started, for the first
        time or again.
        """
        number = self._rounds if self.place is None or self.next_is_open else self.place.number + 1
        self.place = None
        self.next_is_open = False
        self._rounds = number
        self._to_coordinator(Join(number, workers))

    def done(self) -> None:
        """Say that all workers of this host have finished."""
        self._to_coordinator(Finished())

    def interrupt(self, number: int) -> None:
        """Say that this launcher has received a signal, before its workers get it and exit."""
        self._to_coordinator(Request(0, "stop", number, socket.gethostname()))

    def end(self, failure: Failure | None, seconds: float) -> Failure | None:
        """Say that this host's part is over; returns the first failure on any host.

        Args:
            failure: of this host's workers.
            seconds: how long to wait for the other hosts, if there is a failure.
        """
        self._to_coordinator(JobEnd(failure=failure))
        known = failure or self.failure
        deadline = time.monotonic() + seconds
        while known is not None and self.outcome is None and not self.is_disconnected:
            self.turn(_TURN_S)
            self.tick()
            if time.monotonic() > deadline and self._coordinator is not None:
                self._coordinator.give_up()
            elif time.monotonic() > deadline:
                break
        return known if self.outcome is None else self.outcome

    def _to_coordinator(self, message: ToCoordinator) -> None:
        if self._coordinator is not None:
            self._coordinator.receive(FIRST, message)
        else:
            self._connections.send_to(FIRST, message)

    def _tell(self, node: int, message: FromCoordinator) -> None:
        if node == FIRST:
            self._take(message)
        else:
            self._connections.send_to(node, message)

    def _take(self, message: FromCoordinator) -> None:
        match message:
            case Round():
                self.place = message
            case Join(number):
                self.next_is_open = number > self._rounds
                self._rounds = max(self._rounds, number)
            case Finished():
                self.all_done = True
            case Request():
                self.interruption = message
            case JobEnd(reason, _, failure):
                self.reason = self.reason or reason
                self.failure = self.failure or failure
            case Failure():
                self.outcome = message
            case Say(text):
                self._notes.append(text)

    def _serve(self) -> int:
        """Open the store of the next round's workers: a new one each time, as the last one still
        holds the old keys.
        """
        self._store = serve_store(self.address, several_hosts=True)
        return int(self._store.port)

    def close(self) -> None:
        """Let the last messages reach the others, and close all connections."""
        deadline = time.monotonic() + _FLUSH_S
        while time.monotonic() < deadline and self._connections.has_unsent:
            self.turn(_TURN_S)
        for link in self._connections.of_host.values():
            self._connections.close(link)
        self._connections.of_host.clear()
        self._connections.stop_listening()
        super().close()
