"""The rendezvous of a job's hosts: their launchers, the agents in them, and then the workers meet at one store.

The launcher of node 0 serves a `TCPStore`. `join_rendezvous` connects to it, `check_hosts` compares the hosts before
anything starts, and `HostRendezvous` is the rendezvous handler of PyTorch's agents. A `HostMonitor` polls the store in
a thread and detects, by the heartbeats of `system.heartbeat`, hosts that are gone.
"""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import msgspec
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from .. import environment, messages
from ..errors import ConfigError, LockstepError, TransportError, counted
from ..messages import Integer
from ..stores import LOOPBACK, get_available, read_message, serve_store
from ..system.heartbeat import HeartbeatClient, HeartbeatServer, address_towards
from .host_protocol import HostDescription, HostFailure, check_compatible
from .options import JobOptions, check_debug_rank
from .pulse import Patience, SilenceWatch

__all__ = [
    "HostMonitor",
    "HostRendezvous",
    "address_towards",
    "check_hosts",
    "interface_with_address",
    "join_rendezvous",
    "serve_job_store",
    "single_host_rendezvous",
]


# --- Addresses and network interfaces of this host --------------------------------------------------------------------


def interface_with_address(address: str) -> str | None:
    """Return the name of the network interface with `address`; None if it cannot be determined (IPv4, Linux)."""
    try:
        import fcntl
        import struct
    except ImportError:
        return None
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                found = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()))  # SIOCGIFADDR
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None


# --- Monitoring of the other hosts ------------------------------------------------------------------------------------

_PERIOD_S = 0.25
_EXCHANGE_S = 1.0
_ANSWER_S = 4.0  # in which the store answers, as long as its host's launcher runs


class HostMonitor:
    """Polls the job's store, and connects heartbeats to the other hosts, in a thread until `stop`.

    It has its own connection to the store, because a request that waits for its answer blocks all others on the same
    connection, and if the first host has vanished, it waits for many minutes whatever the store's timeout. Liveness is
    therefore not derived from the store; see `system.heartbeat`.

    Args:
        address, port: of the store.
        node: this host's number, 0 ≤ node < nodes.
        nodes: number of hosts.
        beats: returns whether this host's launcher answers.

    Attributes:
        round: number of restarts that any host has started.
        is_disconnected: whether the store can no longer be reached.
        interruption: the message of the first host that received a signal; "" if none did.
        failures: the failures that hosts had published when the first of them was seen.
    """

    def __init__(
        self, address: str, port: int, node: int, nodes: int, beats: Callable[[], bool] = lambda: True
    ) -> None:
        self.round = 0
        self.is_disconnected = False
        self.interruption = ""
        self.failures: list[str] = []
        self._reason = ""
        self._address, self._port, self._node, self._nodes = address, port, node, nodes
        limit_s = environment.heartbeat_timeout()
        self._beats = beats
        self._silent = _SilentLaunchers(node, nodes)
        self._liveness: _OtherHosts | _FirstHost
        self._liveness = _OtherHosts(nodes, limit_s) if node == 0 else _FirstHost(address, node, limit_s)
        self._store: TCPStore
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lockstep host monitor", daemon=True)
        self._thread.start()

    def failure_reason(self) -> str:
        """Return why the job cannot continue because of another host; "" while it can."""
        if isinstance(self._liveness, _FirstHost):
            self.is_disconnected = self.is_disconnected or self._liveness.is_gone()
        else:
            self._reason = self._reason or self._liveness.failure_reason()
        silent, is_first = self._silent.failure_reason()
        self._reason = self._reason or silent
        self.is_disconnected = self.is_disconnected or is_first  # whose store is not to be asked any more
        return self._reason or (f"the first host ({self._address}) no longer answers" if self.is_disconnected else "")

    def take_notes(self) -> list[str]:
        """Return what is to be said of other hosts, once."""
        return self._silent.take_notes()

    def stop(self) -> None:
        """Stop polling. A request in flight may still wait for its answer."""
        self._stopping.set()
        self._thread.join(2 * _PERIOD_S)
        self._liveness.close()

    def _run(self) -> None:
        try:
            self._store = TCPStore(self._address, self._port, is_master=False, timeout=timedelta(seconds=10))
            self._store.set(f"name/{self._node}", socket.gethostname())
            while not self._stopping.wait(_PERIOD_S):
                self._liveness.connect(self._store)
                self._silent.exchange(self._store, self._beats())
                self._reason = self._reason or self._poll_store()
        except Exception:  # torch raises another class in each version
            self.is_disconnected = True

    def _poll_store(self) -> str:
        self.round = int(self._store.add("round", 0))
        if not self.interruption and self._store.check(["interruption"]):
            self.interruption = self._store.get("interruption").decode()
        if not int(self._store.add("failures", 0)):
            return ""
        keys = [f"failure/{node}" for node in range(self._nodes)]
        self.failures = [text.decode() for text in get_available(self._store, keys).values()]
        return "another host's workers have failed"


class _SilentLaunchers:
    """Which launchers do not answer though their hosts do: they are stopped, or hang.

    Each of them counts in the store as long as its loop turns. That of the first host, which serves the store, is also
    silent if the store does not answer.

    Args:
        node: this host's number.
        nodes: number of hosts.
    """

    def __init__(self, node: int, nodes: int) -> None:
        self._node, self._nodes = node, nodes
        self._watch = SilenceWatch(Patience.of(several_hosts=True))
        self._names: list[str] = []
        self._pulses: list[int] = []
        self._answered = time.monotonic()
        self._next = 0.0
        self._notes: list[str] = []
        self._is_out = False

    def exchange(self, store: TCPStore, beats: bool) -> None:
        """Once a second tell that this launcher answers, if it does, and read what the others tell; in a thread."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _EXCHANGE_S
        store.add(f"pulse/{self._node}", int(beats))
        keys = [f"pulse/{node}" for node in range(self._nodes)]
        if self._names or store.check(keys):
            self._names = self._names or [
                name.decode() for name in store.multi_get([f"name/{node}" for node in range(self._nodes)])
            ]
            self._pulses = [int(text) for text in store.multi_get(keys)]
        self._answered = time.monotonic()

    def failure_reason(self) -> tuple[str, bool]:
        """Return which launcher has not answered for too long, and whether it is the first; "" if none."""
        self._watch.tick()
        pulses, reason, is_first = self._pulses, "", False
        answers = time.monotonic() - self._answered < _ANSWER_S
        for node, pulse in enumerate(pulses):
            if node == self._node or (node > 0 and not answers):
                continue
            text = f"the launcher of host {self._names[node]} has not answered for"
            limits = self._watch.patience
            if self._watch.is_due(node, pulse):
                self._notes.append(f"{text} {limits.warning_s:g} s")
            if self._watch.is_over(node, pulse) and not reason:
                reason, is_first = f"{text} {limits.limit_s:g} s (LOCKSTEP_LAUNCHER_TIMEOUT)", node == 0
                if not self._is_out:
                    self._notes.append(reason)  # also where another error follows from it
                self._is_out = True
        return reason, is_first

    def take_notes(self) -> list[str]:
        """Return what is to be said, once."""
        notes, self._notes = self._notes, []
        return notes


class _OtherHosts:
    """Liveness of all other hosts, as the first one monitors it.

    Args:
        nodes: number of hosts.
        limit_s: seconds within which a host must answer.
    """

    def __init__(self, nodes: int, limit_s: float) -> None:
        self._nodes, self._limit_s, self._heartbeat = nodes, limit_s, HeartbeatServer(limit_s)
        self._names: dict[int, str] = {}
        self._published: set[int] = set()
        self._unreachable: set[int] = set()
        self._complete_since = 0.0  # when all hosts had joined

    def connect(self, store: TCPStore) -> None:
        """Publish where to connect for each host that has not yet connected."""
        for node in (node for node in range(1, self._nodes) if self._heartbeat.state(node) == "unknown"):
            if node not in self._published and store.check([f"address/{node}"]):
                self._names[node] = store.get(f"name/{node}").decode()
                self._published.add(node)
                self._publish_endpoint(node, store)
            if store.check([f"unreachable/{node}"]):
                self._unreachable.add(node)
        if not self._complete_since and int(store.add("round/0/nodes", 0)) >= self._nodes:
            self._complete_since = time.monotonic()

    def _publish_endpoint(self, node: int, store: TCPStore) -> None:
        try:
            endpoint = self._heartbeat.listen_for(store.get(f"address/{node}").decode())
        except OSError:
            self._unreachable.add(node)
        else:
            store.set(f"heartbeat/{node}", f"{self._heartbeat.token} {endpoint}")

    def failure_reason(self) -> str:
        """Return a message about hosts that are gone; "" while there are none."""
        self._heartbeat.poll()
        states = {node: self._heartbeat.state(node) for node in range(1, self._nodes)}
        ended = [node for node, state in states.items() if state == "ended"]
        if ended:
            return f"the launcher on {self._host_names(ended)} has ended"
        silent = [node for node, state in states.items() if state == "lost" or self._is_silent(node)]
        return f"no heartbeat from {self._host_names(silent)} for {self._limit_s:g} s" if silent else ""

    def _is_silent(self, node: int) -> bool:
        """Return whether a host left long ago while this one continues, or joined and never connected."""
        if self._heartbeat.state(node) == "left":
            return self._heartbeat.seconds_in_state(node) > self._limit_s
        is_expected = self._heartbeat.state(node) == "unknown" and node not in self._unreachable
        return is_expected and self._complete_since > 0 and time.monotonic() - self._complete_since > self._limit_s

    def _host_names(self, nodes: list[int]) -> str:
        return ", ".join(self._names.get(node, f"node {node}") for node in nodes)

    def close(self) -> None:
        """Disconnect cleanly."""
        self._heartbeat.close()


class _FirstHost:
    """Liveness of the first host, as another one monitors it.

    Args:
        address: of the first host.
        node: number of this host.
        limit_s: seconds within which the first host must answer.
    """

    def __init__(self, address: str, node: int, limit_s: float) -> None:
        self._address, self._node, self._limit_s = address, node, limit_s
        self._heartbeat: HeartbeatClient | None = None
        self._has_published = False
        self._last_answer = time.monotonic()

    def connect(self, store: TCPStore) -> None:
        """Connect as soon as the first host publishes where; if that is impossible, its store must answer."""
        try:
            self._try_to_connect(store)
        except OSError:
            store.set(f"unreachable/{self._node}", "")
        self._last_answer = time.monotonic()

    def _try_to_connect(self, store: TCPStore) -> None:
        if not self._has_published:
            store.set(f"address/{self._node}", address_towards(self._address))
            self._has_published = True
        if self._heartbeat is None and store.check([f"heartbeat/{self._node}"]):
            token, _, endpoint = store.get(f"heartbeat/{self._node}").decode().partition(" ")
            self._heartbeat = HeartbeatClient(endpoint, token, self._node, self._limit_s)
        elif self._heartbeat is not None and self._heartbeat.has_failed:
            store.set(f"unreachable/{self._node}", "")

    def is_gone(self) -> bool:
        """Return whether the first launcher, or its host, is gone."""
        if self._heartbeat is not None:
            self._heartbeat.poll()
            if self._heartbeat.state(0) in ("alive", "ended", "lost"):
                return self._heartbeat.state(0) != "alive"
        return time.monotonic() - self._last_answer > self._limit_s

    def close(self) -> None:
        """Disconnect cleanly."""
        if self._heartbeat is not None:
            self._heartbeat.close()


# --- The rendezvous of the agents -------------------------------------------------------------------------------------

_POLL_S = 0.02
_LEAVE_S = 2.0
_PUBLISH_S = 0.5


class HostRendezvous(RendezvousHandler):
    """The rendezvous of agents whose number and order are known from the start.

    PyTorch's static rendezvous cannot be repeated when workers are restarted, and its dynamic one numbers the hosts in
    the order of their arrival. Here a host that restarts its workers opens the next round, and the others follow.

    Args:
        store: served by node 0, reached by all hosts; its port is bound from the start.
        address: the name or address by which all hosts reach it.
        node: this host's number, 0 ≤ node < nodes.
        nodes: number of hosts.
        run_id: a unique name of the job.

    Attributes:
        round: number of restarts so far; -1 before the first start.
        stopping: set when this host no longer waits for the others.
        clock_offset_ns: nanoseconds by which this host's clock is ahead of the first host's.
        beats: returns whether this host's launcher answers; another thread calls it.
    """

    def __init__(self, store: TCPStore, address: str, node: int = 0, nodes: int = 1, run_id: str = "lockstep") -> None:
        self.store, self.address, self.node, self.nodes = store, address, node, nodes
        self.round = -1
        self.clock_offset_ns = 0
        self.stopping = threading.Event()
        self.beats: Callable[[], bool] = lambda: True
        self._run_id = run_id
        self._workers_store = store
        self._monitor: HostMonitor | None = None

    def get_backend(self) -> str:
        """Return the name of this kind of rendezvous."""
        return "lockstep"

    @property
    def use_agent_store(self) -> bool:
        """True: the workers use the agent's store as clients; rank 0 serves no other."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round; returns this host's place in it."""
        current = self._count("round")
        if current == self.round:
            self.store.compare_set("round", str(current), str(current + 1))
            current += 1
        self.round = current
        if self.node == 0:
            self.store.set(f"round/{current}/port", str(self._serve_workers().port))
        self._join()
        port = int(self.store.get(f"round/{current}/port"))
        agents = PrefixStore(f"round/{current}", self.store)
        return RendezvousInfo(agents, self.node, self.nodes, RendezvousStoreInfo(self.address, port))

    def num_nodes_waiting(self) -> int:
        """Return 1 if another host has opened the next round, else 0."""
        return int(self._monitor is not None and self._monitor.round > self.round)

    def finish(self) -> None:
        """Wait until the workers of all hosts have finished, or some have failed, or this host is `stopping`."""
        if self.nodes == 1:
            return
        self.store.add("done", 1)
        while self._count("done") < self.nodes and not self._count("failures") and not self.stopping.is_set():
            time.sleep(_POLL_S)

    @contextmanager
    def monitored(self) -> Iterator[None]:
        """Monitor the other hosts during the body; `failure_reason` returns what was found."""
        if self.nodes == 1:
            yield
            return
        # the first host's store has the address at which it listens, which may differ from the one that others use
        address = self.store.host if self.node == 0 else self.address
        self._monitor = HostMonitor(address, self.store.port, self.node, self.nodes, lambda: self.beats())
        try:
            yield
        finally:
            self._monitor.stop()
            if not self._monitor.is_disconnected:
                self._leave()

    def failure_reason(self) -> str:
        """Return why the job cannot continue because of another host; "" while it can."""
        return self._monitor.failure_reason() if self._monitor is not None else ""

    def take_notes(self) -> list[str]:
        """Return what is to be said of other hosts, once."""
        return self._monitor.take_notes() if self._monitor is not None else []

    def first_failure(self, own: HostFailure | None, seconds: float) -> HostFailure | None:
        """Return the first failure on any host; every host that was not interrupted calls this at its end.

        Args:
            own: the failure of this host's workers, which is published to the others.
            seconds: how long to wait for the others.
        """
        if self._monitor is None or self._monitor.is_disconnected:
            return own
        with suppress(Exception):  # the first host is gone, and the store with it
            if own is not None:
                self.publish_failure(own)
            self._mark_ended()
            if self._count("failures"):
                self.wait_for([f"ended/{node}" for node in range(self.nodes)], seconds)
            return HostFailure.earliest(self.read_failures())
        return own

    def publish_interruption(self, number: int) -> None:
        """Tell all hosts that this one received the signal `number`, before its workers get it and exit.

        It gives up soon if the first host has vanished, so that it cannot delay the end of an interrupted job.
        """
        if self._monitor is not None:
            message = f"{socket.gethostname()} {number}"
            thread = threading.Thread(target=self._publish_interruption, args=(message,), daemon=True)
            thread.start()
            thread.join(_PUBLISH_S)

    def interruption(self) -> tuple[str, int] | None:
        """Return the host that was interrupted first, and the signal; None if none was."""
        if self._monitor is None:
            return None
        message = self._monitor.interruption
        with suppress(Exception):  # the first host is gone, and the store with it
            if not message and not self._monitor.is_disconnected and self.store.check(["interruption"]):
                message = self.store.get("interruption").decode()
        host, _, number = message.partition(" ")
        return (host, int(number)) if message else None

    def publish_failure(self, failure: HostFailure) -> None:
        """Tell all hosts that this one's workers have failed and are not restarted."""
        self.store.set(f"failure/{self.node}", messages.encode(failure))
        self.store.add("failures", 1)

    def read_failures(self) -> list[HostFailure]:
        """Return the failures that all hosts have published."""
        keys = [f"failure/{node}" for node in range(self.nodes)]
        texts = get_available(self.store, keys)
        return [read_message(text, HostFailure, key) for key, text in texts.items()]

    def remote_failures(self) -> list[HostFailure]:
        """Return the failures of other hosts that the monitor has seen; sends no request."""
        texts = self._monitor.failures if self._monitor is not None else ()
        return [messages.decode(text, HostFailure) for text in texts]

    def wait_for(self, keys: Sequence[str], seconds: float) -> bool:
        """Wait until all `keys` are in the store; returns whether they are. A signal can interrupt it."""
        deadline = time.monotonic() + seconds
        while not self.store.check(list(keys)):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def is_closed(self) -> bool:
        """Return False; required by PyTorch."""
        return False

    def set_closed(self) -> None:
        """Do nothing; required by PyTorch."""

    def get_run_id(self) -> str:
        """Return the job's name."""
        return self._run_id

    def shutdown(self) -> bool:
        """Do nothing; the store ends with this object."""
        return True

    def _serve_workers(self) -> TCPStore:
        """Return the store for this round's workers: a new one each time, as the last one still holds the old keys."""
        if self.round > 0:
            self._workers_store = serve_store(self.address, several_hosts=self.nodes > 1)
        return self._workers_store

    def _join(self) -> None:
        """Wait for all hosts of the round; unlike the agent's own wait, this can be aborted."""
        joined = self.store.add(f"round/{self.round}/nodes", 1)
        while joined < self.nodes:
            if self._count("done"):
                raise LockstepError("workers cannot be restarted, because another host's have finished already")
            if self.stopping.wait(_POLL_S):
                raise LockstepError("stopped waiting for the other hosts")
            joined = self._count(f"round/{self.round}/nodes")

    def _publish_interruption(self, message: str) -> None:
        with suppress(Exception):  # the first host is gone, and the store with it
            self.store.compare_set("interruption", "", message)

    def _mark_ended(self) -> None:
        self.store.compare_set(f"ended/{self.node}", "", "yes")

    def _leave(self) -> None:
        with suppress(Exception):  # the first host is gone, and the store with it
            self._mark_ended()  # an interrupted host has not done so
            self.store.add("left", 1)
            if self.node == 0:  # the store must outlive the others' last request
                self._wait_for_all("left", _LEAVE_S)

    def _count(self, key: str) -> int:
        return int(self.store.add(key, 0))

    def _wait_for_all(self, key: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._count(key) < self.nodes and time.monotonic() < deadline:
            time.sleep(_POLL_S)


def single_host_rendezvous() -> HostRendezvous:
    """Return the rendezvous of a job on one host, at a port of the loopback interface that the system chooses.

    A port that was found free may be taken by the time it is used; this store has bound its own from the start.
    """
    return HostRendezvous(serve_store(), LOOPBACK)


# --- The rendezvous of the launchers ----------------------------------------------------------------------------------

_RETRY_S = 0.1


def serve_job_store(address: str, port: int, config: JobOptions) -> Any:
    """Return the job's store, served by this host, which the others reach at `address`; port 0: the system chooses one.

    Raises:
        ConfigError: the port is in use.
    """
    limit = timedelta(seconds=config.start_timeout)
    try:
        return serve_store(address, port, limit, several_hosts=config.nnodes > 1)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError("master_port", "a port that is free on the first host", port) from None
        raise


def join_rendezvous(config: JobOptions, address: str, port: int, store: Any = None) -> HostRendezvous:
    """Connect to the store of the first host, or serve it if this is the first.

    Raises:
        ConfigError: the first host is unknown, or does not answer in time.
    """
    if store is None and config.node_rank == 0:
        _look_up(address, port)  # the workers, and the other hosts, will need it
        store = serve_job_store(address, port, config)
    if store is None:
        _wait_for_server(address, port, config.start_timeout)
        store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=config.start_timeout))
    return HostRendezvous(store, address, config.node_rank, config.nnodes, run_id=f"{address}-{port}")


class _Verdict(msgspec.Struct, frozen=True):
    """Why the hosts cannot run the program together, or "", and when the first host has sent it."""

    problem: str
    sent_at_ns: Integer


def check_hosts(rendezvous: HostRendezvous, own: HostDescription, config: JobOptions) -> None:
    """Check on the first host that all hosts are compatible; every host gets the verdict.

    Raises:
        LockstepError: they are not.
        TransportError: what is in the store is damaged.
    """
    store, limit = rendezvous.store, config.start_timeout
    text = messages.encode(own)
    if store.compare_set(f"description/{rendezvous.node}", "", text).decode() != text:
        raise ConfigError("node_rank", "a number that no other host has", rendezvous.node)
    if rendezvous.node == 0:
        verdict = _compare_all(rendezvous, config)
        store.set("verdict", messages.encode(_Verdict(verdict, time.time_ns())))
        if verdict:
            rendezvous.wait_for([f"received/{node}" for node in range(1, rendezvous.nodes)], 2.0)
    elif not rendezvous.wait_for(["verdict"], limit + 5):
        verdict = f"no answer from the first host within {limit + 5:g} s"
    else:
        found = read_message(store.get("verdict"), _Verdict, "the first host's verdict on all hosts")
        verdict, rendezvous.clock_offset_ns = found.problem, time.time_ns() - found.sent_at_ns
        store.set(f"received/{rendezvous.node}", "")
    if verdict:
        raise LockstepError(verdict)


def _compare_all(rendezvous: HostRendezvous, config: JobOptions) -> str:
    """Return why the hosts cannot run the program together; "" if they can."""
    keys = [f"description/{node}" for node in range(rendezvous.nodes)]
    if not rendezvous.wait_for(keys, config.start_timeout):
        available = get_available(rendezvous.store, keys)
        missing = ", ".join(str(node) for node, key in enumerate(keys) if key not in available)
        return (
            f"of {counted(rendezvous.nodes, 'node')}, these did not join within {config.start_timeout:g} s: {missing}"
        )
    try:
        hosts = [
            read_message(text, HostDescription, f"the description of node {node}")
            for node, text in enumerate(rendezvous.store.multi_get(keys))
        ]
        check_compatible(hosts)
        check_debug_rank(config, sum(host.workers for host in hosts))
    except (ConfigError, TransportError) as error:
        return str(error)
    return ""


def _look_up(address: str, port: int) -> None:
    try:
        socket.getaddrinfo(address, port)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        expected = "a name that this host can resolve, or an address"
        raise ConfigError("master_addr", expected, address, f"{reason}.") from None


def _wait_for_server(address: str, port: int, seconds: float) -> None:
    """Wait until a server listens there; torch would wait too, but with warnings, and could not be interrupted."""
    deadline = time.monotonic() + seconds
    while True:
        _look_up(address, port)
        try:
            socket.create_connection((address, port), timeout=max(0.1, deadline - time.monotonic())).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                hint = f"The last attempt failed with: {error}. Is the launcher of node 0 running, and the port open?"
                expected = f"a host that answers within {seconds:g} s"
                raise ConfigError("master_addr", expected, found=f"{address}:{port}", hint=hint) from None
        time.sleep(_RETRY_S)
