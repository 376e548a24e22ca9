"""The workers of a host: who connects, what they tell, how their processes end, and when they are
ended.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from lockstep.elastic.keys import StoreRequest
from lockstep.job.client import JobClient
from lockstep.job.connection import Connection, connect_to_launcher, take_turn
from lockstep.job.messages import Failure, Finished, Hello, Note, Peers, ToAnyWorker
from lockstep.launcher.supervisor import WorkerSupervisor
from lockstep.launcher.workers import Workers

DEADLINE = 60.0


class Program:
    """A program as `multiprocessing` would have started it, as far as `Workers` knows a process."""

    _popen = None

    def __init__(self, *command: str) -> None:
        pipe = subprocess.PIPE
        self.popen = subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True)
        self.pid = self.popen.pid
        self.sentinel = os.pidfd_open(self.pid)

    def join(self, seconds: float | None = None) -> None:
        self.popen.wait(seconds)

    @property
    def exitcode(self) -> int | None:
        return self.popen.poll()

    def close(self) -> None:
        os.close(self.sentinel)
        for pipe in (self.popen.stdin, self.popen.stdout):
            assert pipe is not None
            pipe.close()


class Launcher:
    """The loop of a launcher with its workers. Attributes: other, the messages that are not those
    of every job.
    """

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.selector = stack.enter_context(selectors.DefaultSelector())
        self.other: list[tuple[int, Any]] = []
        self.workers = Workers(
            folder, self.selector, lambda number, message: self.other.append((number, message))
        )
        self.stack = stack
        stack.callback(self.workers.close)

    def turn_until(self, is_done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE
        while not is_done():
            assert time.monotonic() < deadline
            take_turn(self.selector, 0.01)

    def connect(self, number: int) -> Connection[Any, Any]:
        """Connect as a worker that was started by somebody else."""
        self.workers.add(number, None)
        connection = connect_to_launcher(self.workers.path, ToAnyWorker)
        self.stack.callback(connection.close)
        connection.send(Hello(number))
        self.turn_until(lambda: self.workers[number].connection is not None)
        return connection

    def start(self, number: int, *command: str) -> Program:
        """Start a program as a worker, which does not connect."""
        program = Program(*command)
        self.stack.callback(self.end, number, program)
        self.workers.add(number, program)  # type: ignore[arg-type]
        return program

    def end(self, number: int, program: Program) -> None:
        if self.workers[number].code is None:
            program.popen.kill()
            self.turn_until(lambda: self.workers[number].code is not None)


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    with ExitStack() as stack:
        yield Launcher(tmp_path, stack)


def failure(number: int, **more: Any) -> Failure:
    return Failure(number, 7, "RuntimeError", "text\nof two lines", "trace", 4, **more)


# --- strangers
# --------------------------------------------------------------------------------------------------


def received(end: socket.socket) -> bytes | None:
    """What has come; None for nothing."""
    try:
        return end.recv(4096)
    except BlockingIOError:
        return None


def is_closed(end: socket.socket) -> bool:
    try:
        return received(end) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize(
    "data",
    [b"\xff\xff\xff\xff", b"\0\0\0\2\xc1\xc1", b"\0\0\xea\x60" + b"\x91" * 60000, b"\0" * 100],
    ids=["too long", "no message", "nested", "pings"],
)
def test_who_is_no_worker_is_closed(
    data: bytes, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(launcher.workers._strangers, "_clock", lambda: now)
    garbage, idle, late = (
        launcher.stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(3)
    )
    for end in (garbage, idle):
        end.connect(launcher.workers.path)
        end.setblocking(False)
    with suppress(BlockingIOError, OSError):
        garbage.sendall(data)
    launcher.turn_until(lambda: is_closed(garbage))
    Connection[Any, Any](idle, ToAnyWorker).send(
        StoreRequest(0, "set", ("key",), (b"",))
    )  # not what a worker sends first
    launcher.turn_until(lambda: is_closed(idle))
    late.connect(launcher.workers.path)
    late.setblocking(False)
    launcher.turn_until(lambda: len(launcher.workers._strangers) == 1)
    now = 10.1
    launcher.workers.tick()
    assert is_closed(late)


def test_a_number_that_nobody_has_or_that_is_taken_is_refused(launcher: Launcher) -> None:
    launcher.connect(0)
    for number in (0, 1):
        second = connect_to_launcher(launcher.workers.path, ToAnyWorker)
        launcher.stack.callback(second.close)
        second.send(Hello(number))
        launcher.turn_until(lambda end=second: end.is_at_end)  # type: ignore[misc]


# --- what workers tell
# ------------------------------------------------------------------------------------------------


def test_what_a_worker_tells_is_known(launcher: Launcher) -> None:
    worker = launcher.connect(3)
    assert launcher.workers[3].pid == os.getpid()
    for message in (Note("needs time"), Note("checkpoint", "runs/é"), failure(3), Finished()):
        worker.send(message)
    launcher.turn_until(lambda: launcher.workers[3].is_finished)
    assert launcher.workers[3].needs_time and launcher.workers.checkpoint == "runs/é"
    assert launcher.workers.failures == [failure(3)]
    assert launcher.other == [(3, Hello(3))]


def test_what_a_worker_has_said_is_read_though_it_takes_nothing_more(launcher: Launcher) -> None:
    worker = launcher.connect(0)
    launcher.workers.send(
        0, StoreRequest(0, "set", ("key",), (bytes(8 << 20),))
    )  # more than the socket holds
    connection = launcher.workers[0].connection
    assert connection is not None and connection.has_unsent
    worker.send(failure(0))
    worker.send(Finished())
    worker.close()
    launcher.turn_until(lambda: launcher.workers[0].has_ended)
    assert launcher.workers[0].is_finished and launcher.workers.failures == [failure(0)]


@pytest.mark.parametrize("is_read_first", [True, False])
def test_a_failure_that_follows_from_a_death_names_it(
    launcher: Launcher, is_read_first: bool
) -> None:
    """The launcher may look at the survivor's connection before that of the dead worker."""
    first, second, third = (launcher.connect(number) for number in range(3))
    first.close()
    if is_read_first:
        launcher.turn_until(lambda: launcher.workers[0].has_ended)
    second.send(failure(1))
    connection = launcher.workers[1].connection
    assert connection is not None
    launcher.selector.get_key(connection.socket).data()
    assert launcher.workers.failures == [failure(1, dead_peers=(0,))]
    third.send(Finished())
    third.close()
    launcher.turn_until(lambda: launcher.workers[2].has_ended)
    assert launcher.workers.dead == [0]


def test_one_that_has_failed_is_released_when_nothing_more_is_to_come(launcher: Launcher) -> None:
    first, second, third = (launcher.connect(number) for number in range(3))
    told: dict[int, list[Any]] = {}
    for number, end in enumerate((first, second, third)):
        told[number] = list(end.receive_available())  # their peers
    first.send(failure(0))
    second.send(Finished())
    launcher.turn_until(lambda: launcher.workers[1].is_finished)
    assert list(first.receive_available()) == []
    third.close()
    launcher.turn_until(lambda: launcher.workers[2].has_ended)
    assert Finished() in list(first.receive_available())


def test_workers_know_the_processes_of_all_once_all_have_connected(launcher: Launcher) -> None:
    first = launcher.connect(0)
    assert list(first.receive_available()) == [Peers((os.getpid(),))]
    program = launcher.start(1, "cat")
    second = connect_to_launcher(launcher.workers.path, ToAnyWorker)
    launcher.stack.callback(second.close)
    second.send(Hello(1))
    launcher.turn_until(lambda: launcher.workers[1].connection is not None)
    assert (
        list(first.receive_available())
        == [Peers((os.getpid(), program.pid))]
        == list(second.receive_available())
    )


def test_a_client_counts_pings_passes_messages_on_and_knows_the_end(
    launcher: Launcher, tmp_path: Path
) -> None:
    launcher.workers.add(0, None)
    taken: list[Any] = []
    lost: list[str] = []
    client = JobClient(
        launcher.workers.path, 0, ToAnyWorker | StoreRequest, on_lost=lambda: lost.append("process")
    )
    launcher.turn_until(lambda: launcher.workers[0].connection is not None)
    launcher.workers.send(0, StoreRequest(1, "set", ("a",), (b"",)))
    launcher.workers.ping()
    launcher.turn_until(lambda: client.pings == 1)
    client.subscribe(taken.append, lambda: lost.append("membership"))  # gets what has come before
    launcher.workers.send(0, StoreRequest(1, "set", ("b",), (b"",)))
    launcher.turn_until(lambda: len(taken) == 2)
    launcher.workers.close()
    launcher.turn_until(lambda: len(lost) == 2)
    assert [message.keys for message in taken] == [("a",), ("b",)] and lost == [
        "membership",
        "process",
    ]


# --- processes
# --------------------------------------------------------------------------------------------------


def test_the_end_of_a_process_comes_after_what_it_has_sent(launcher: Launcher) -> None:
    program = launcher.start(0, "sh", "-c", "read line; exit 3")
    worker = connect_to_launcher(launcher.workers.path, ToAnyWorker)
    launcher.stack.callback(worker.close)
    worker.send(Hello(0))
    launcher.turn_until(lambda: launcher.workers[0].connection is not None)
    worker.send(failure(0))
    assert program.popen.stdin is not None
    program.popen.stdin.write(b"\n")
    program.popen.stdin.flush()
    os.waitid(os.P_PID, program.pid, os.WEXITED | os.WNOWAIT)
    launcher.workers._note_end(0)  # before the loop looks at the connection
    assert (launcher.workers[0].code, launcher.workers[0].failure) == (3, failure(0))
    assert launcher.workers.ended == [0] and not launcher.workers.living


def test_a_worker_may_connect_finish_and_end_before_the_launcher_looks(launcher: Launcher) -> None:
    """The launcher starts others meanwhile."""
    for number in range(40):  # more than are accepted at once
        launcher.start(number, "true")
    for number in range(40):
        worker = connect_to_launcher(launcher.workers.path, ToAnyWorker)
        worker.send(Hello(number))
        worker.send(Finished())
        worker.close()
    silent = launcher.stack.enter_context(socket.socket(socket.AF_UNIX))
    silent.connect(launcher.workers.path)
    os.waitid(os.P_PID, launcher.workers[39].pid, os.WEXITED | os.WNOWAIT)
    launcher.workers._note_end(39)
    assert launcher.workers[39].is_finished and launcher.workers[39].code == 0
    launcher.turn_until(lambda: not launcher.workers.living)
    assert not launcher.workers.dead


def test_workers_that_are_stopped_are_not_waited_for_when_the_job_is_over(
    launcher: Launcher,
) -> None:
    stopped, other = (launcher.start(number, "cat") for number in range(2))
    os.kill(stopped.pid, signal.SIGSTOP)
    os.waitpid(stopped.pid, os.WUNTRACED)
    supervisor = WorkerSupervisor(launcher.workers, [], 100.0, 100.0)
    supervisor.check()
    assert not launcher.workers[0].is_ended_here
    supervisor.check(is_over=True)
    launcher.turn_until(lambda: launcher.workers[0].code == -signal.SIGKILL)
    assert launcher.workers[0].is_ended_here and list(launcher.workers.living) == [1]
    assert not launcher.workers[1].is_ended_here and other.exitcode is None


def test_workers_whose_time_is_up_may_clear_up_before_they_are_killed(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.launcher.supervisor.FAILURE_GRACE", 0.0)
    monkeypatch.setattr("lockstep.launcher.supervisor.TERM_GRACE_S", 0.5)
    clears_up = launcher.start(
        0, "sh", "-c", "trap 'exit 7' TERM; echo; while true; do sleep 0.05; done"
    )
    does_not = launcher.start(1, "sh", "-c", "trap '' TERM; echo; while true; do sleep 0.05; done")
    for program in (clears_up, does_not):
        assert program.popen.stdout is not None and program.popen.stdout.readline()
    supervisor = WorkerSupervisor(launcher.workers, [], 100.0, 100.0)
    launcher.turn_until(lambda: not supervisor.check(is_over=True))
    assert [launcher.workers[number].code for number in (0, 1)] == [7, -signal.SIGKILL]
    assert supervisor.killed and all(launcher.workers[number].is_ended_here for number in (0, 1))


def test_only_workers_that_have_connected_get_a_signal_before_their_time_is_up(
    launcher: Launcher,
) -> None:
    silent = launcher.start(
        0, "sh", "-c", "trap 'exit 7' INT; echo; while true; do sleep 0.05; done"
    )
    assert silent.popen.stdout is not None and silent.popen.stdout.readline()
    supervisor = WorkerSupervisor(launcher.workers, [signal.SIGINT], 100.0, 100.0)
    supervisor.check()
    assert silent.exitcode is None
    worker = connect_to_launcher(launcher.workers.path, ToAnyWorker)
    launcher.stack.callback(worker.close)
    worker.send(Hello(0))
    launcher.turn_until(lambda: launcher.workers[0].connection is not None)
    supervisor.check()
    launcher.turn_until(lambda: launcher.workers[0].code == 7)


def test_one_that_has_asked_for_time_gets_it_unless_there_is_a_second_signal(
    launcher: Launcher,
) -> None:
    launcher.start(0, "cat")
    signals = [signal.SIGTERM]
    supervisor = WorkerSupervisor(launcher.workers, signals, exit_grace=0.0, save_grace=100.0)
    launcher.workers[0].needs_time = True
    supervisor.check()
    assert not supervisor.deadline_passed
    signals.append(signal.SIGTERM)
    supervisor.check()
    assert supervisor.deadline_passed and supervisor.killed
