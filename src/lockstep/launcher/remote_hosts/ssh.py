"""`lockstep run -H`: a launcher on every host over ssh, controlled from this process.

What runs on each host is in `starter`; what the two say to each other, in `lockstep.job.messages`.
The hosts of an elastic job may change while it runs, as a list says (`_ListedHosts`).
"""

from __future__ import annotations

import json
import queue
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from ... import environment
from ...environment.variable_table import JOB_KEY
from ...errors import ConfigError, InterruptedRunError, LockstepError
from ...hosts import Host
from ...interruption import collect_signals
from ...job.connection import START, Connection
from ...job.messages import (
    Failure,
    FromAgent,
    HostDescription,
    JobEnd,
    MeetingPoint,
    Output,
    Request,
    Say,
    ToAgent,
)
from ...system.heartbeat import address_in_a_network
from ..options import JobOptions, check_debug_rank
from ..output.log_multiplexer import LogMultiplexer
from ..output.output_lines import LineSplitter, OutputLine
from ..start_line import write_start_line_of_hosts
from ..worker_options import EXIT_GRACE, FAILURE_GRACE
from .host_description import check_compatible
from .remote_command import (
    assign_workers,
    host_command,
    host_commands,
    remote_environment,
    ssh_command,
)

_POLL_S = 0.1
_READ_S = 1.0
_LOOPBACK = "127.0.0.1"
_FOLLOW_S = 1.0
_OVER_S = 5.0  # in which the launchers of an elastic job end that have been told that it is over
_SSH_FAILED = 255  # exit code of ssh itself


@dataclass
class _HostLauncher:
    """The launcher on one host.

    Attributes:
        host: with the slots that it was told last.
        process: of ssh, or of the launcher itself on this host.
        end: of the connection to it.
        started: when.
        ready, failure, error, is_over: what it has reported.
        port: where it serves the job store, or in an elastic job listens for the other launchers; 0
            until it does.
        address: where it listens in an elastic job; "" until it takes part.
        has_begun: whether it was told to take part.
        last_lines: what ssh or a login shell has written, or it itself after its end.
        readers: the threads that read what it sends and writes.
        connection: to it.
    """

    host: Host
    process: subprocess.Popen[bytes]
    end: socket.socket
    started: float = field(default_factory=time.monotonic)
    ready: HostDescription | None = None
    port: int = 0
    address: str = ""
    has_begun: bool = False
    failure: Failure | None = None
    error: str = ""
    is_over: bool = False
    last_lines: list[str] = field(default_factory=list)
    readers: list[threading.Thread] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.connection: Connection[FromAgent, ToAgent] = Connection(self.end, FromAgent)
        self.connection.is_strange = True

    @property
    def takes_part(self) -> bool:
        """Whether it takes part in an elastic job."""
        return bool(self.address) and self.process.poll() is None

    @property
    def has_crashed(self) -> bool:
        """Whether it ended without reporting a worker's failure, and not because of a signal."""
        code = self.exit_code()
        return (
            code not in (None, 0, 128 + signal.SIGINT, 128 + signal.SIGTERM)
            and self.failure is None
        )

    @property
    def is_disconnected(self) -> bool:
        """Whether it was killed, or the connection to it broke, since it has begun."""
        code = self.exit_code() if self.has_begun else None
        return (
            code is not None
            and (code == _SSH_FAILED or code < 0)
            and not (self.failure or self.error)
        )

    def begin(self, address: str, port: int) -> None:
        """Let it begin, as another launcher of the job serves or listens there."""
        self.has_begun = True
        self.send(MeetingPoint(address, port))

    def exit_code(self) -> int | None:
        """Return the exit code once the launcher has ended and all its output is read; None
        before.
        """
        code = self.process.poll()
        if code is not None:
            for thread in self.readers:
                # a process that it has started may hold its pipes open forever
                thread.join(_READ_S)
            self.readers.clear()
        return code

    def send(self, message: ToAgent) -> None:
        """Send a message; ignored if it has ended."""
        with suppress(OSError):
            self.connection.send(message)

    def disconnect(self) -> None:
        """Let it end its workers and itself, which a launcher of an elastic job does not if this
        one is lost.
        """
        self.send(Request(0, "end"))
        with suppress(OSError):
            self.end.shutdown(socket.SHUT_WR)

    def note_lines(self, lines: Iterable[OutputLine]) -> None:
        """Keep lines that are shown only if it does not start, or is lost."""
        self.last_lines += [line.text.decode(errors="replace") for line in lines]


def run_on_hosts(config: JobOptions, listed: Callable[[], Sequence[Host]] | None = None) -> None:
    """Run the program on all hosts of `config.hosts`, to completion.

    Args:
        config: of the run.
        listed: as for `start.start`.

    Raises:
        ConfigError: a host cannot be reached, or is incompatible.
        as `start.start`.
    """
    hosts = assign_workers(config)
    check_debug_rank(config, sum(host.slots for host in hosts))
    if config.debug_rank is not None:
        raise ConfigError(
            "debug_rank", "one host, whose terminal the rank can use", found="-H or --hostfile"
        )
    commands = host_commands(config, hosts)
    variables = remote_environment(config, environment.variables())
    if config.dry_run:
        for command in commands:
            print(shlex.join(command))
        if variables:
            print(
                "# with these variables, sent to standard input:",
                *(f"{name}=..." for name in sorted(variables)),
            )
        return
    _RemoteRun(config, hosts, commands, variables, listed).run()


def _terminate(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(EXIT_GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class _RemoteRun:
    """The launchers of all hosts, from start to end."""

    def __init__(
        self,
        config: JobOptions,
        hosts: Sequence[Host],
        commands: Sequence[Sequence[str]],
        variables: Mapping[str, str],
        listed: Callable[[], Sequence[Host]] | None,
    ) -> None:
        self._config = config
        self._hosts = hosts
        self._commands = commands
        self._variables = {JOB_KEY.name: secrets.token_hex(16), **variables}
        # as on one host: the lines of a single worker have no prefix
        alone = (
            config.elastic is None
            and config.output_dir is None
            and sum(host.slots for host in hosts) == 1
        )
        prefixes = not config.no_prefix and not alone
        self._multiplexer = LogMultiplexer(
            (1, 2), colours=environment.wants_colours(), prefixes=prefixes
        )
        self._events: queue.Queue[None] = queue.Queue()
        self._launchers: list[_HostLauncher] = []
        self._listed = (
            None
            if listed is None
            else _ListedHosts(listed, self._launchers, config, self._add, self._say)
        )
        self._signals: list[int] = []
        self._disconnected: list[_HostLauncher] = []

    def run(self) -> None:
        """Run to completion; raises the error of the run."""
        with collect_signals(self._signals):
            try:
                for host, command in zip(self._hosts, self._commands, strict=True):
                    self._launchers.append(self._start(host, command))
                self._rendezvous()
                self._supervise()
            finally:
                self._stop()
        self._raise_failure()

    def _start(self, host: Host, command: Sequence[str]) -> _HostLauncher:
        own_end, its_end = socket.socketpair()
        with its_end:
            streams: dict[str, Any] = {
                "stdin": its_end,
                "stdout": its_end,
                "stderr": subprocess.PIPE,
            }
            try:
                # in its own session, so that Ctrl-C at the terminal reaches it only from here, and
                # once
                process = subprocess.Popen(command, start_new_session=True, **streams)
            except FileNotFoundError as error:
                own_end.close()
                raise ConfigError("hosts", "an installed ssh", found=str(error)) from None
        launcher = _HostLauncher(host, process, own_end)
        with suppress(OSError):
            own_end.sendall(json.dumps(dict(self._variables)).encode() + b"\n")
        for read in (self._read_messages, self._read_errors):
            thread = threading.Thread(target=read, args=(launcher,), daemon=True)
            thread.start()
            launcher.readers.append(thread)
        return launcher

    def _read_messages(self, launcher: _HostLauncher) -> None:
        """Read what a launcher sends; before that, a login shell may write."""
        connection, lines = launcher.connection, LineSplitter()
        try:
            for text in connection.skip_to_start():
                launcher.note_lines(lines.feed(text))
            launcher.note_lines(lines.end())
            while (message := connection.receive()) is not None:
                self._take(launcher, message)
        except msgspec.DecodeError as error:
            launcher.error = launcher.error or f"its launcher has sent what is no message: {error}"
        except OSError:  # the connection is broken, which ssh says
            pass
        finally:
            launcher.end.close()
            self._events.put(None)

    def _take(self, launcher: _HostLauncher, message: FromAgent) -> None:
        if isinstance(message, Output):
            line = OutputLine(message.text, message.is_bar, message.is_complete)
            self._multiplexer.write(message.rank, message.stream, line)
            return
        match message:
            case HostDescription():
                launcher.ready = message
                launcher.last_lines.clear()  # from ssh or a login shell
                launcher.connection.is_strange = False
            case MeetingPoint(address, port):
                launcher.port = port
                launcher.address = address
            case Say(text):
                self._multiplexer.write_message(text)
            case Failure():
                launcher.failure = message
            case JobEnd(""):
                launcher.is_over = True
            case JobEnd(reason):
                launcher.error = reason
        self._events.put(None)

    def _read_errors(self, launcher: _HostLauncher) -> None:
        """Show what a launcher, or a process that it has started, writes to its standard error
        itself.
        """
        assert launcher.process.stderr is not None
        lines = LineSplitter()
        has_begun = False  # before, ssh and a login shell write
        with launcher.process.stderr as pipe:
            while data := pipe.read1():  # type: ignore[attr-defined]
                for line in lines.feed(data):
                    if not has_begun and line.text.endswith(START.rstrip()):
                        has_begun = True
                    elif (
                        not has_begun
                        or launcher.ready is None
                        or launcher.failure
                        or launcher.error
                    ):
                        launcher.note_lines([line])
                    elif line.is_complete:
                        self._multiplexer.write_message(line.text.decode(errors="replace"))
        launcher.note_lines(lines.end())
        self._events.put(None)

    def _rendezvous(self) -> None:
        """Wait until all launchers are ready, check that their hosts are compatible, and start the
        workers.
        """
        self._wait_until(self._launchers, lambda launcher: launcher.ready is not None)
        descriptions = [
            launcher.ready for launcher in self._launchers if launcher.ready is not None
        ]
        check_compatible(descriptions)
        address = self._address(descriptions)
        write_start_line_of_hosts(self._multiplexer, self._config, self._hosts)
        first = self._launchers[0]
        first.send(MeetingPoint(address))
        self._wait_until([first], lambda launcher: launcher.port > 0)
        for launcher in self._launchers:
            launcher.begin(address, first.port)

    def _wait_until(
        self, launchers: Sequence[_HostLauncher], is_done: Callable[[_HostLauncher], bool]
    ) -> None:
        deadline = time.monotonic() + self._config.start_timeout
        while not all(map(is_done, launchers)):
            self._wait()
            for launcher in launchers:
                if not is_done(launcher) and launcher.exit_code() is not None:
                    raise _start_error(launcher, self._config)
            if self._signals:
                raise KeyboardInterrupt
            if time.monotonic() > deadline:
                late = ", ".join(
                    launcher.host.name for launcher in launchers if not is_done(launcher)
                )
                expected = f"hosts that answer within {self._config.start_timeout:g} s"
                raise ConfigError("hosts", expected, found=f"no answer from {late}")

    def _address(self, descriptions: Sequence[HostDescription]) -> str:
        """Return the address by which all other hosts reach the first; only this user's ssh may
        know its name.
        """
        if len(descriptions) == 1 and self._listed is None:
            return _LOOPBACK
        callers = [description.caller for description in descriptions if description.caller]
        seen = descriptions[0].address or next(iter(callers), "")
        return self._config.master_addr or seen or self._own_address()

    def _own_address(self) -> str:
        """Return this host's address for hosts that are listed later."""
        if self._listed is None:
            return _LOOPBACK
        try:
            return address_in_a_network(self._config.network_interface or "")
        except OSError as error:
            if self._config.network_interface:
                raise ConfigError(
                    "network_interface", "one of this host", found=str(error)
                ) from None
            return _LOOPBACK

    def _supervise(self) -> None:
        """Forward signals until all launchers have ended."""
        forwarded = 0
        deadline = float("inf")
        while any(launcher.process.poll() is None for launcher in self._launchers):
            self._wait()
            if self._listed is not None and not (
                self._signals or any(launcher.is_over for launcher in self._launchers)
            ):
                self._listed.follow()
            while forwarded < len(self._signals):
                for launcher in self._launchers:
                    launcher.send(Request(0, "signal", self._signals[forwarded]))
                forwarded += 1
                if forwarded > 1:
                    deadline = time.monotonic() + EXIT_GRACE
            self._disconnected = self._disconnected or [
                launcher for launcher in self._launchers if launcher.is_disconnected
            ]
            goes_on = self._config.elastic is not None
            if (
                not goes_on
                and deadline == float("inf")
                and any(launcher.has_crashed for launcher in self._launchers)
            ):
                self._disconnect()  # the others may be waiting for its ranks
                deadline = time.monotonic() + FAILURE_GRACE + EXIT_GRACE
            if deadline == float("inf") and any(launcher.is_over for launcher in self._launchers):
                deadline = time.monotonic() + _OVER_S  # a host that is cut off does not know it
            if time.monotonic() > deadline:
                return

    def _add(self, host: Host) -> _HostLauncher:
        """Start the launcher on one more host."""
        launcher = self._start(
            host, host_command(self._config, host, len(self._launchers), len(self._launchers) + 1)
        )
        self._launchers.append(launcher)
        return launcher

    def _say(self, text: str) -> None:
        self._multiplexer.write_message(f"lockstep run: {text}")

    def _wait(self) -> None:
        with suppress(queue.Empty):
            self._events.get(timeout=_POLL_S)

    def _disconnect(self) -> None:
        """Let the launchers end their workers, and themselves."""
        for launcher in self._launchers:
            launcher.disconnect()

    def _stop(self) -> None:
        self._disconnect()
        deadline = time.monotonic() + EXIT_GRACE + 1
        for launcher in self._launchers:
            try:
                launcher.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                _terminate(launcher.process)
        for launcher in self._launchers:
            launcher.exit_code()
        self._multiplexer.close()

    def _raise_failure(self) -> None:
        """Raise the error of the run, if it failed."""
        first = Failure.earliest(
            [launcher.failure for launcher in self._launchers if launcher.failure is not None]
        )
        failed = next(
            (
                launcher
                for launcher in self._launchers
                if launcher.process.returncode and not launcher.failure
            ),
            None,
        )
        over = [launcher for launcher in self._launchers if launcher.is_over]
        if any(launcher.process.returncode == 0 for launcher in over) and not self._signals:
            return
        if self._disconnected and not (self._signals or over):
            names = ", ".join(launcher.host.name for launcher in self._disconnected)
            text = " ".join(
                " ".join(launcher.last_lines[-3:]) for launcher in self._disconnected
            ).strip()
            raise LockstepError(
                f"lost {names}: the connection broke, or the launcher there was killed. {text}"
            )
        if first is not None:
            raise first.as_error()
        if self._signals and failed is not None:
            number = self._signals[0]
            how = failed.error or "the workers have exited"
            raise (
                KeyboardInterrupt(how)
                if number == signal.SIGINT
                else InterruptedRunError(how, number)
            )
        if failed is not None:
            text = failed.error or " ".join(failed.last_lines[-3:]) or "its launcher has ended"
            error = LockstepError(f"{failed.host.name}: {text}")
            error.exit_code = failed.process.returncode
            raise error


def _start_error(launcher: _HostLauncher, config: JobOptions) -> LockstepError:
    last_lines = " ".join(" ".join(launcher.last_lines[-4:]).split())
    text = launcher.error or last_lines or f"exit code {launcher.process.returncode}"
    name = launcher.host.name
    if launcher.process.returncode == _SSH_FAILED:
        command = shlex.join([*ssh_command(config), launcher.host.login, "true"])
        hint = f"`{command}` must work without asking for input."
        return ConfigError("hosts", f"a host that ssh reaches ({name})", found=text, hint=hint)
    hint = f"Lockstep must be installed there for {config.remote_python or sys.executable}."
    return ConfigError(
        "hosts", f"a host on which the launcher starts ({name})", found=text, hint=hint
    )


class _ListedHosts:
    """Adds the hosts to an elastic job that a list names, and lets those leave that it does not
    name any more.

    A host whose launcher cannot start or is lost is left alone, until the list has been without it.

    Args:
        listed: returns the list.
        launchers: of all hosts; those that could not begin are taken out.
        config: of the run.
        add: starts the launcher on a host, and puts it among the launchers.
        say: prints a message.
    """

    def __init__(
        self,
        listed: Callable[[], Sequence[Host]],
        launchers: list[_HostLauncher],
        config: JobOptions,
        add: Callable[[Host], _HostLauncher],
        say: Callable[[str], None],
    ) -> None:
        self._listed = listed
        self._launchers = launchers
        self._config = config
        self._add = add
        self._say = say
        self._starting: list[_HostLauncher] = []
        self._running: set[str] = set()  # names of hosts, and so are these
        self._leaving: set[str] = set()
        self._given_up: set[str] = set()
        self._kept = ""
        self._next = 0.0

    def follow(self) -> None:
        """Do what is to be done, once a second."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _FOLLOW_S
        listed = {host.name: host for host in self._listed()}
        self._begin_or_give_up(listed)
        running = {
            launcher.host.name: launcher
            for launcher in self._launchers
            if launcher.process.poll() is None
        }
        lost = (
            (self._running or {launcher.host.name for launcher in self._launchers})
            - running.keys()
            - self._leaving
        )
        self._given_up = (self._given_up | lost) & listed.keys()
        self._leaving &= running.keys()
        self._running = set(running)
        for name, host in listed.items():
            if name in running:
                self._set_slots(running[name], host.slots)
            elif name not in self._given_up:
                self._starting.append(self._add(host))
        self._let_leave(listed)

    def _begin_or_give_up(self, listed: Mapping[str, Host]) -> None:
        """Let new launchers join the job that are ready; do without those that have failed."""
        self._starting = [launcher for launcher in self._starting if not launcher.address]
        for launcher in list(self._starting):
            try:
                self._check(launcher, listed)
            except LockstepError as error:
                self._say(f"{launcher.host.name} is not added: {error}")
                launcher.process.terminate()
                self._launchers.remove(launcher)
                self._starting.remove(launcher)
                self._given_up.add(launcher.host.name)

    def _check(self, launcher: _HostLauncher, listed: Mapping[str, Host]) -> None:
        """Let a launcher begin if it can.

        Raises:
            LockstepError: it cannot.
        """
        code = launcher.exit_code()
        limit_s = self._config.start_timeout
        if launcher.error or launcher.failure:
            raise LockstepError(launcher.error or "its workers have failed")
        if code is not None:
            raise _start_error(launcher, self._config)
        stay_first = sorted(self._launchers, key=lambda other: other.host.name not in listed)
        known = next((other for other in stay_first if other.takes_part), None)
        if launcher.ready is not None and not launcher.has_begun and known is not None:
            check_compatible(
                [other.ready for other in (known, launcher) if other.ready is not None]
            )
            launcher.begin(known.address, known.port)
        if launcher.ready is None and time.monotonic() > launcher.started + limit_s:
            raise LockstepError(f"expected an answer within {limit_s:g} s")

    def _set_slots(self, launcher: _HostLauncher, slots: int) -> None:
        if launcher.takes_part and slots != launcher.host.slots:
            launcher.host = replace(launcher.host, slots=slots)
            launcher.send(Request(0, "slots", slots))

    def _let_leave(self, listed: Mapping[str, Host]) -> None:
        """Tell hosts to leave, if enough slots remain without them; repeatedly, as one may not take
        part yet.
        """
        running = [launcher for launcher in self._launchers if launcher.takes_part]
        unlisted = [launcher for launcher in running if launcher.host.name not in listed]
        remaining = sum(launcher.host.slots for launcher in running if launcher.host.name in listed)
        least = self._config.elastic[0] if self._config.elastic is not None else 0
        names = ", ".join(launcher.host.name for launcher in unlisted)
        is_enough = remaining >= least
        if not is_enough and names and names != self._kept:
            self._say(
                f"{names} would leave, but the other hosts have {remaining} slots, and at least "
                f"{least} are needed"
            )
        self._kept = "" if is_enough else names
        for launcher in unlisted if is_enough else ():
            self._leaving.add(launcher.host.name)
            launcher.send(Request(0, "leave"))
