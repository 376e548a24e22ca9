"""How a host comes to take part in an elastic job on several hosts: it founds the job or joins it,
again when the others go on without it.

What it does in the job is in `elastic_host`.

A job is found by the address of any of its launchers, and by its key: LOCKSTEP_JOB_KEY, which
`lockstep run -H` chooses and sends to all hosts.
"""

from __future__ import annotations

import math
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from typing_extensions import override

from ... import environment, messages
from ...activity import Activity
from ...errors import ConfigError, LockstepError, counted
from ...job.connection import Connection, take_turn
from ...job.messages import Failure, HostDescription, MeetingPoint, Request
from ..handshake import ANY_HOST, HostEntry, HostHello, HostRefused, HostWelcome
from ..host_rendezvous import ask_until_let_in, check_address, listen_for_hosts
from ..network_interface import check_interface, choose_interface, own_address
from ..node import HostPart, failure_of, run_as_node
from ..options import JobOptions
from ..output.log_multiplexer import LogMultiplexer
from ..remote_hosts.host_description import check_compatible
from ..worker_process.fork_server import default_workers, prepare_workers, wait_until_loaded
from ..worker_process.script import HOROVOD_SETUP, Script
from .elastic_host import ElasticHost
from .elastic_workers import ElasticSetup, elastic_setup
from .mesh import ASKS, NEW, WAITS_TO_JOIN, Mesh, WaitsToJoinError, ask_to_join
from .peers import WireMessage
from .waiting import ALONE_S, OutsideError, describe_ended

T = TypeVar("T")

__all__ = ["ElasticPart", "JobSpec", "Listener", "join_running_job", "run_elastic_host"]

_ASK_S = 5.0
_RETRY_S = 0.5
_ANSWER_S = 0.02
# that the other hosts have to come before it is said on this one that the job cannot begin
_OTHERS_S = 1.0
# in which the kernel of another host must answer; a host that is dropped in vain joins again
_LIMIT_S = 3.0


class JobSpec(msgspec.Struct, frozen=True):
    """What a host that joins has to run, and where: the program's words, and options as texts."""

    program: tuple[str, ...]
    options: dict[str, str | bool]
    folder: str
    variables: dict[str, str]

    @staticmethod
    def of(config: JobOptions) -> JobSpec:
        """Return what other hosts have to run for `config`."""
        variables = {
            name: value for name, value in environment.variables().items() if name == "PYTHONPATH"
        }
        return JobSpec(config.program, config.texts(), str(Path.cwd()), variables)


class Listener:
    """Where this launcher listens for those of other hosts, as they know it.

    Args:
        end: the socket at which it listens, from `listen_for_hosts`.
        address: of this host, as the others reach it.
        name: of this host; "" for its own.

    Attributes:
        numbers: that this host has had in the job, the newest last.
    """

    def __init__(self, end: socket.socket, address: str, name: str = "") -> None:
        self.socket = end
        self.address = address
        self.port = int(end.getsockname()[1])
        self.name = name or socket.gethostname()
        self.numbers: list[int] = []

    def entry(self, number: int, slots: int) -> HostEntry:
        """Return this host as the others know it."""
        return HostEntry(number, self.name, self.address, self.port, slots)

    def take_part(self, host: ElasticHost, setup: ElasticSetup) -> list[tuple[str, int]]:
        """Run the part of `host`; returns where to join again, if the others have gone on without
        it.

        Otherwise nothing listens here any more, before the host's connections end: the others take
        it for one that does not answer if it still listens a second later.
        """
        try:
            host.run()
        except OutsideError as error:
            setup.multiplexer.write_message(f"lockstep: {error}")
            listening = {(other.address, other.port) for other in host.other_hosts}
            # this host may have taken part under another number
            return sorted(listening - {(self.address, self.port)})
        except BaseException:
            self.socket.close()
            raise
        self.socket.close()
        return []


class ElasticPart(HostPart):
    """This host's part of an elastic job, which goes on without its starter."""

    def __init__(self, script: Script, workers: int, problem: str) -> None:
        super().__init__(script, workers, problem)
        self._host: ElasticHost | None = None  # None as long as this host takes no part

    @override
    def run(self, config: JobOptions, log: LogMultiplexer, address: str, port: int) -> None:
        setup = elastic_setup(self.script, config, self.description.workers, log)
        at = [(address, port)]
        try:
            run_elastic_host(at, self.description, config, setup, self.listener, self._watch)
        finally:
            log.close()

    def _watch(self, host: ElasticHost | None) -> None:
        """Pass signals and requests on to `host`, and tell the starter where it listens."""
        self._host = host
        if host is not None and self.starter is not None:
            entry = host.mesh.own_entry
            self.starter.send(MeetingPoint(entry.address, entry.port))

    @override
    def take(self, request: Request) -> None:
        if request.what in ("signal", "end"):
            super().take(request)
        elif self._host is not None:
            self._host.user.requests.append((request.what, request.count))
        elif request.what == "leave":  # it tries to join again
            self.signal(signal.SIGTERM)

    @override
    def signal(self, number: int) -> None:
        if self._host is None:
            super().signal(number)
        else:
            self._host.user.job_signals.append(number)

    @override
    def lose_starter(self) -> None:
        if self.is_ended or self.starter is None:
            return
        _write_to_file()
        self.starter.log.keep()
        if self._host is not None:
            self._host.has_new_reader = True

    @override
    def failure_of(self, error: LockstepError) -> Failure | None:
        return failure_of(error)

    @property
    @override
    def knows_outcome(self) -> bool:
        return self._host is not None and self._host.knows_outcome


Watch = Callable[[ElasticHost | None], None]
"""Called with this host before its part begins, and with None when it has ended and joins again."""


def _write_to_file() -> None:
    """Write all further output of this launcher into a file: nobody reads it any more."""
    path = Path(f"lockstep-{socket.gethostname()}-{os.getpid()}.log").absolute()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
    os.write(
        2,
        "lockstep: the launcher that started this job is gone; the job goes on "
        f"({time.ctime()})\n".encode(),
    )


def run_elastic_host(
    addresses: list[tuple[str, int]],
    description: HostDescription,
    config: JobOptions,
    setup: ElasticSetup,
    end: socket.socket | None,
    watch: Watch,
) -> None:
    """Run one host's part of an elastic job on several: found the job, or join it.

    When the others go on without this host, because the network between them was cut, it joins
    again.

    Args:
        addresses: where launchers of the job listen; that of this one, if it founds the job.
        description: of this host.
        config: of the run; `node_rank` is the number that a host that joins wants at the beginning.
        setup: how to run workers.
        end: where the others ask, if this host founds the job.
        watch: called with this host.

    Raises:
        ConfigError: not all hosts have joined in time, or are incompatible; nobody lets this host
            in in time.
        LockstepError: this host cannot run workers, or the job refuses it.
        as `ElasticHost.run`.
    """
    address, port = addresses[0]
    choose_interface(config.network_interface, address)
    if end is not None:
        listener = Listener(end, address)
        again = _found_job(listener, description, config, setup, watch)
    else:
        here = _checked_own_address(address)
        listener = Listener(listen_for_hosts(here, 0), here)
        hello = HostHello(
            node=config.node_rank if config.nnodes > 1 else ANY_HOST,
            description=description,
            host=listener.entry(NEW, description.workers),
        )
        key = environment.job_key()
        ask = partial(ask_to_join, address, port, key, hello, WireMessage, _ASK_S)
        let_in = ask_until_let_in(ask, address, port, config.start_timeout)
        again = _take_part(listener, *let_in, setup, watch)
    while again:
        watch(None)
        let_in = _ask_again(again, listener, description, setup.limits.pause_s)
        again = _take_part(listener, *let_in, setup, watch)


def _found_job(
    listener: Listener,
    description: HostDescription,
    config: JobOptions,
    setup: ElasticSetup,
    watch: Watch,
) -> list[tuple[str, int]]:
    """Wait until all hosts of `config` are there, and run the job; returns as
    `Listener.take_part`.

    Raises:
        LockstepError: a host cannot run the program, or has not come in time; all hosts that have
            come are told so.
    """
    if description.problem and config.nnodes == 1:
        raise LockstepError(description.problem)
    own_entry = listener.entry(0, description.workers)
    with _opened(setup, own_entry, listener) as host:
        watch(host)
        porter = _Porter(host, config, description, setup.multiplexer.write_message)
        host.mesh.on_hello = porter.answer
        try:
            others = porter.wait_for(config.nnodes - 1, config.start_timeout)
        except LockstepError as error:
            host.call_off(str(error))
            raise
        slots = description.workers + sum(other.slots for other in others)
        workers = min(config.elastic_start or slots, setup.limits.maximum)
        host.found_job([own_entry, *others], workers, porter.spec)
        return listener.take_part(host, setup)


def _take_part(
    listener: Listener,
    connection: Connection[Any, Any],
    welcome: HostWelcome,
    setup: ElasticSetup,
    watch: Watch,
) -> list[tuple[str, int]]:
    """Run the part of this host in a job that has let it in; returns as `Listener.take_part`."""
    own_entry = listener.entry(welcome.number, setup.options.workers)
    with _opened(setup, own_entry, listener) as host:
        watch(host)
        host.join(connection, welcome)
        return listener.take_part(host, setup)


def _opened(
    setup: ElasticSetup, own_entry: HostEntry, listener: Listener
) -> AbstractContextManager[ElasticHost]:
    def open_mesh(selector: selectors.BaseSelector) -> Mesh:
        limit_s = min(_LIMIT_S, environment.heartbeat_timeout())
        key = environment.job_key()
        former = listener.numbers
        listener.numbers = [*former, own_entry.number]
        return Mesh(own_entry, key, listener.socket.dup(), selector, WireMessage, limit_s, former)

    return ElasticHost.opened(setup, own_entry, open_mesh)


class _Porter:
    """Lets the hosts in with which a job begins, or tells each of them why it cannot.

    Args:
        host: this one.
        config: of the run.
        description: of this host.
        log: prints a message.

    Attributes:
        spec: what a host that joins later has to run.
    """

    def __init__(
        self,
        host: ElasticHost,
        config: JobOptions,
        description: HostDescription,
        log: Callable[[str], None],
    ) -> None:
        self._host = host
        self._log = log
        self._others: dict[int, HostEntry] = {}
        self._refused: set[tuple[str, int]] = set()  # where the hosts listen that were told why
        self._problem = ""  # why the job cannot begin, the same on all hosts
        try:
            check_compatible([description])
        except ConfigError as error:
            self._problem = str(error)
        self.spec = messages.encode(JobSpec.of(config))

    def answer(self, hello: HostHello) -> HostWelcome | HostRefused:
        """Answer a host that wants to take part."""
        assert hello.host is not None  # which `Mesh` has seen
        if hello.host.number == ASKS:
            return HostRefused("the job has not begun yet")
        try:
            self._host.admission.check(hello)
        except ConfigError as error:
            self._problem = self._problem or str(error)
        except ValueError as error:
            return HostRefused(str(error))
        if self._problem:
            self._refused.add((hello.host.address, hello.host.port))
            return HostRefused(self._problem)
        number = hello.node if hello.node > 0 else max([0, *self._others]) + 1
        if number in self._others:
            return HostRefused(
                f"expected a number that no other host has, got --node-rank {number}"
            )
        self._others[number] = msgspec.structs.replace(hello.host, number=number)
        return HostWelcome(number=number, leader=0, spec=self.spec)

    def wait_for(self, count: int, seconds: float) -> list[HostEntry]:
        """Wait until so many other hosts have come.

        Raises:
            LockstepError: one of them, or this one, cannot run the program; or they have not come
                in time.
            KeyboardInterrupt: this launcher has received a signal.
        """
        began = time.monotonic()
        is_said = False
        while len(self._others) + len(self._refused) < count:
            self._host.wait()
            waited_s = time.monotonic() - began
            if self._host.user.signals:
                raise KeyboardInterrupt
            if self._problem and waited_s > _OTHERS_S and not is_said:
                # who looks at this host need not wait for those who come later
                self._log(f"lockstep: the job cannot begin: {self._problem}")
                self._log("lockstep: the other hosts are told so as they come")
                is_said = True
            if waited_s > seconds:
                raise LockstepError(
                    self._problem
                    or f"of {counted(count + 1, 'host')}, only {len(self._others) + 1} joined "
                    f"within {seconds:g} s"
                )
        if self._problem:
            raise LockstepError(self._problem)
        return list(self._others.values())


def _checked_own_address(job: str) -> str:
    """Return the address of this host in the network of the launcher of a job at `job`.

    Raises:
        ConfigError: that is unknown, or there is no way to it.
    """
    check_address(job)
    try:
        return own_address(job)
    except OSError as error:
        hint = "--network-interface, where the job is started, chooses the network."
        unreached = f"{job} ({error.strerror or error})"
        expected = f"an address that {socket.gethostname()} reaches"
        raise ConfigError("master_addr", expected, found=unreached, hint=hint) from None


def _ask_again(
    addresses: list[tuple[str, int]],
    listener: Listener,
    description: HostDescription,
    pause_s: float,
) -> tuple[Connection[Any, Any], HostWelcome]:
    """Ask at one address after another until one lets this host in again, which has taken part
    before.

    Meanwhile this host says to those who ask here that it takes no part: of hosts that were all cut
    off, and wait to join again, none would ever let another in. It gives up when nobody has been
    left for `ALONE_S` who takes part, or after `pause_s`.
    """
    own_entry = listener.entry(NEW, description.workers)
    hello = HostHello(description=description, host=own_entry)
    key = environment.job_key()
    kind = WireMessage
    began = time.monotonic()
    nobody_since = math.inf
    with selectors.DefaultSelector() as selector:
        mesh = Mesh(
            own_entry, key, listener.socket.dup(), selector, kind, _LIMIT_S, listener.numbers
        )
        mesh.on_hello = lambda hello: HostRefused(WAITS_TO_JOIN)
        try:
            while True:
                others = 0
                for address, port in addresses:
                    ask = partial(ask_to_join, address, port, key, hello, kind, _ASK_S, _ASK_S)
                    try:
                        return _answering(mesh, selector, ask)
                    except (OSError, LockstepError) as error:
                        others += not isinstance(error, ConnectionRefusedError | WaitsToJoinError)
                now = time.monotonic()
                nobody_since = math.inf if others else min(nobody_since, now)
                if now - nobody_since >= ALONE_S:
                    # who still waits would take this host for one that may answer
                    listener.socket.close()
                    raise LockstepError(describe_ended(own_entry.name))
                if now - began >= pause_s:
                    raise LockstepError(
                        f"no host of the job has let {own_entry.name} in again for {pause_s:g} s "
                        "(--pause-timeout)"
                    )
                _answering(mesh, selector, partial(time.sleep, _RETRY_S))
        finally:
            mesh.close()


def _answering(mesh: Mesh, selector: selectors.BaseSelector, call: Callable[[], T]) -> T:
    """Return what `call` returns, in a thread, and answer meanwhile who asks this host."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(
        target=run, name="lockstep join", daemon=True
    ).start()  # a signal does not wait for it
    while not future.done():
        take_turn(selector, _ANSWER_S)
        mesh.tick()
    return future.result()


def join_running_job(address: str, port: int, workers: int | None) -> None:
    """Add this machine to a running job, and run its part until the job is over.

    Args:
        address, port: of any launcher of the job.
        workers: the most to run here; None for one per GPU, or 1.

    Raises:
        ConfigError: nobody answers there, or this machine lacks what the job runs.
        LockstepError: it is no job, has another key, or refuses this machine.
        as `ElasticHost.run`.
    """
    try:
        spec = _read_spec(address, port, _ASK_S)
    except OSError as error:
        place = f"{address}:{port}"
        raise ConfigError(
            "HOST:PORT", "a launcher of a running job", found=place, hint=f"{error}."
        ) from None
    if not Path(spec.folder).is_dir():
        raise ConfigError(
            "folder",
            "the folder of the program at the same path on this machine",
            found=spec.folder,
        )
    os.chdir(spec.folder)
    environment.set_variables(spec.variables)
    options = {
        **spec.options,
        "program": spec.program,
        "master_addr": address,
        "master_port": str(port),
    }
    config = JobOptions.parse(options)
    environment.set_variables(config.variables())
    config = replace(
        config,
        node_rank=ANY_HOST,
        start_timeout=min(config.start_timeout, ALONE_S),  # the job runs already, or is over
        metrics_port=None,  # the first host serves them
        metrics_file=None,
    )
    check_interface(config.network_interface)
    with Activity("lockstep join: loading PyTorch", shown=True):
        count = workers or default_workers()
        prepare_workers(config, count)
        wait_until_loaded(config)
    script = Script(
        config.program[0], config.program[1:], config.module, HOROVOD_SETUP * config.as_horovod
    )
    script.check()
    run_as_node(ElasticPart(script, count, problem=""), config, None)


def _read_spec(address: str, port: int, seconds: float) -> JobSpec:
    """Ask a job what its hosts run.

    Raises:
        OSError: no launcher answers there.
        LockstepError: it is no job, or has another key.
    """
    asks = HostHello(host=HostEntry(ASKS, socket.gethostname(), "", 0, 0))
    key = environment.job_key()
    connection, welcome = ask_to_join(address, port, key, asks, WireMessage, seconds, seconds)
    connection.close()
    return messages.decode(welcome.spec, JobSpec)
