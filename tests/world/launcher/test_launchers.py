"""Launchers of jobs that train: strangers at their ports, the loss of their fork server, and one
that is stopped.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from lockstep.elastic.control import request
from lockstep.flight_recorder import jobs
from lockstep.launcher.network_interface import interface_with_address
from lockstep.system.heartbeat import address_in_a_network
from support import warm_python
from support.warm_python import WarmProcess

LIMIT = 90.0

PROGRAM = """
import os, time, torch, lockstep
from lockstep.callbacks import Callback
comm = lockstep.init("cpu")
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(48, 8), torch.randint(0, 3, (48,)))
model = torch.nn.Linear(8, 3)
class Tells(Callback):
    every_rank = True
    said = False
    def on_train_step_end(self, trainer, result):
        if not self.said:
            print("pid", os.getpid(), flush=True)
        self.said = True
        time.sleep(0.01)
    def on_row(self, trainer, row):
        if os.path.exists("enough"):
            trainer.stop("it is enough")
optimizer = torch.optim.SGD(model.parameters(), 0.1)
trainer = lockstep.Trainer(model, optimizer, torch.nn.CrossEntropyLoss(), 12, virtual_workers=4, callbacks=[Tells()])
trainer.fit(data, 1000000)
print("done", flush=True)
"""


@dataclass
class Job:
    """Launchers, and what they have written."""

    folder: Path
    launchers: list[WarmProcess] = field(default_factory=list)
    lines: list[tuple[int, str]] = field(default_factory=list)
    readers: list[threading.Thread] = field(default_factory=list)

    def start(self, *words: object) -> None:
        """Start ``lockstep run`` with `words`."""
        self.start_command("run", "-q", *words, "program.py")

    def start_command(self, *words: object) -> None:
        """Start ``lockstep`` with `words`."""
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = warm_python.popen(["-m", "lockstep", *words], self.folder, env)
        for stream in (process.stdout, process.stderr):
            thread = threading.Thread(
                target=self.read, args=(len(self.launchers), stream), daemon=True
            )
            thread.start()
            self.readers.append(thread)
        self.launchers.append(process)

    def read(self, launcher: int, stream: object) -> None:
        for line in stream:  # type: ignore[attr-defined]
            self.lines.append((launcher, line))

    def wait_until(self, is_done: Callable[[], object]) -> None:
        deadline = time.monotonic() + LIMIT
        while not is_done():
            assert time.monotonic() < deadline, self.out()
            time.sleep(0.02)

    def workers(self) -> list[int]:
        """The processes of the workers that have begun to train."""
        found = (
            re.search(r"pid (\d+)$", line) for _, line in list(self.lines)
        )  # Python 3.12 warns of "self.pid ="
        return [int(each[1]) for each in found if each is not None]

    def out(self, launcher: int = -1) -> str:
        return "".join(line for each, line in list(self.lines) if launcher in (-1, each))

    def end(self) -> list[int]:
        """Let the training end; returns the exit codes of the launchers."""
        (self.folder / "enough").touch()
        codes = [launcher.wait(LIMIT) for launcher in self.launchers]
        for reader in self.readers:
            reader.join(LIMIT)
        return codes


@pytest.fixture
def job(tmp_path: Path, warm: None) -> Iterator[Job]:
    (tmp_path / "program.py").write_text(PROGRAM)
    found = Job(tmp_path)
    try:
        yield found
    finally:
        for launcher in found.launchers:
            for process in _tree(launcher.pid):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            launcher.wait(LIMIT)
        for pid in found.workers():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for reader in found.readers:
            reader.join(LIMIT)
        for launcher in found.launchers:
            for stream in (launcher.stdout, launcher.stderr):
                if stream is not None:
                    stream.close()


def _tree(pid: int) -> list[psutil.Process]:
    try:
        return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def start_hosts(job: Job, count: int, *words: object) -> None:
    """Start a job of so many launchers with a worker each, and wait until these train."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    for node in range(count):
        where = (
            "--nnodes",
            count,
            "--node-rank",
            node,
            "--master-addr",
            "127.0.0.1",
            "--master-port",
            port,
        )
        job.start(*words, *where, "-np", 1)
    job.wait_until(lambda: len(job.workers()) == count)


# --- strangers
# --------------------------------------------------------------------------------------------------


def ports(job: Job) -> set[int]:
    """Where the processes of the job listen."""
    found = set()
    for launcher in job.launchers:
        for process in _tree(launcher.pid):
            with suppress(psutil.Error):
                found |= {
                    each.laddr.port
                    for each in process.net_connections("tcp")
                    if each.status == "LISTEN"
                }
    return found


def sockets(job: Job) -> set[str]:
    """The Unix sockets of the launchers, with the sockets of their fork servers left out, which are
    Python's own.
    """
    found = set()
    for launcher in job.launchers:
        for each in psutil.Process(launcher.pid).net_connections("unix"):
            if Path(each.laddr).name in ("control", "workers"):
                found.add(each.laddr)
    return found


@contextmanager
def connections(where: object, count: int) -> Iterator[list[socket.socket]]:
    """So many connections to a port, or a Unix socket."""
    with ExitStack() as stack:
        ends = []
        for _ in range(count):
            end = stack.enter_context(
                socket.socket(socket.AF_UNIX if isinstance(where, str) else socket.AF_INET)
            )
            end.connect(where if isinstance(where, str) else ("127.0.0.1", where))
            ends.append(end)
        yield ends


def send(end: socket.socket, data: bytes) -> None:
    with suppress(OSError):  # it has been closed
        end.settimeout(1.0)
        end.sendall(data)


def molest(where: int | str, garbage: list[bytes]) -> None:
    """Do to a listener what strangers do: garbage, floods, resets, and connections that are half
    open.
    """
    with connections(where, len(garbage)) as ends:
        for end, data in zip(ends, garbage, strict=True):
            send(end, data)
    with connections(where, 64) as idle, connections(where, 70):
        for end in idle:
            send(end, b"x")
    with connections(where, 20) as ends:
        for end in ends if isinstance(where, int) else ():
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with connections(where, 1) as (end,), suppress(OSError):
        end.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("kind", ["fixed", "elastic"])
def test_no_stranger_ends_a_job(kind: str, job: Job) -> None:
    start_hosts(job, 2, *(("--elastic", "1:2") if kind == "elastic" else ()))
    listeners: set[int | str] = {*ports(job), *sockets(job)}
    assert len(listeners) >= (6 if kind == "elastic" else 3), listeners
    garbage = [
        b"\xff" * 4096,
        b"\0" * 4096,
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("!I", 60000) + b"\x91" * 60000,
    ]
    for where in listeners:
        with suppress(ConnectionRefusedError):  # of a group that is no more
            molest(where, garbage)
        for launcher in job.launchers:
            assert launcher.poll() is None, job.out()
    assert job.end() == [0, 0], job.out()
    assert job.out().count("done") == 2 and "lost" not in job.out(), job.out()


@contextmanager
def dribbling(where: object) -> Iterator[None]:
    """Somebody who sends one byte after another, and never a whole message."""
    over = threading.Event()

    def dribble() -> None:
        while not over.wait(0.02):
            with (
                suppress(OSError),
                connections(where, 1) as (end,),
            ):  # it may be closed, and opened again
                while not over.wait(0.02):
                    end.send(b"\0")

    thread = threading.Thread(target=dribble)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_flood_that_stays_keeps_nobody_out(job: Job) -> None:
    start_hosts(job, 2, "--elastic", "1:3")
    listeners: set[int | str] = {*ports(job), *sockets(job)}
    (control,) = [
        found.control for found in jobs.find_jobs().values() if found.pid == job.launchers[0].pid
    ]
    with ExitStack() as stack:
        for where in listeners:
            with suppress(ConnectionRefusedError):  # of a group that is no more
                stack.enter_context(connections(where, 100))
            stack.enter_context(dribbling(where))
        assert request(control, "resize", 2) == "2 workers before, 2 after the step in progress"
        job.start_command("join", request(control, "address").split()[-1], "-np", 1)
        job.wait_until(lambda: len(job.workers()) == 3)
        os.kill(job.workers()[1], signal.SIGKILL)
        job.wait_until(lambda: len(job.workers()) == 4)
    assert job.end() == [0, 0, 0], job.out()
    assert job.out().count("done") == 3, job.out()
    assert job.out().count("was lost") == 1, job.out()


# --- the network interface
# --------------------------------------------------------------------------------------------------


def other_interface() -> str:
    """An interface of this host over which processes here can talk to each other, and which they
    would not choose in a job at 127.0.0.1.
    """
    try:
        found = interface_with_address(address_in_a_network())
    except OSError:
        found = None
    if found is None:
        pytest.skip("there is only a loopback interface")
    return found


@pytest.mark.parametrize("kind", ["fixed", "elastic"])
def test_all_hosts_use_the_interface_that_the_user_has_chosen(kind: str, job: Job) -> None:
    chosen = other_interface()
    names = '("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")'
    says = f'print("over", *(os.environ[name] for name in {names}), flush=True)\n'
    (job.folder / "program.py").write_text(PROGRAM + says)
    elastic = ("--elastic", "1:3") if kind == "elastic" else ()
    start_hosts(job, 2, *elastic, "--network-interface", chosen)
    if kind == "elastic":
        (control,) = [
            found.control
            for found in jobs.find_jobs().values()
            if found.pid == job.launchers[0].pid
        ]
        job.start_command("join", request(control, "address").split()[-1], "-np", 1)
        job.wait_until(lambda: len(job.workers()) == 3)
    assert set(job.end()) == {0}, job.out()
    assert job.out().count(f"over {chosen} {chosen}\n") == len(job.launchers), job.out()


@pytest.mark.parametrize("kind", ["fixed", "elastic"])
def test_an_interface_that_one_host_has_not_is_said_on_all(kind: str, job: Job) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    where = ("--nnodes", 2, "--master-addr", "127.0.0.1", "--master-port", port, "-np", 1)
    elastic = ("--elastic", "1:2") if kind == "elastic" else ()
    job.start(*elastic, *where, "--node-rank", 0)
    job.start(*elastic, *where, "--node-rank", 1, "--network-interface", "nothing0")
    codes = [launcher.wait(LIMIT) for launcher in job.launchers]
    for reader in job.readers:
        reader.join(LIMIT)
    assert codes == [1, 1], job.out()
    for launcher in range(2):
        assert "network_interface: expected one of this host (lo" in job.out(launcher), job.out()
        assert "got 'nothing0'" in job.out(launcher), job.out()


@pytest.mark.parametrize("lacks_it", [0, 1])
def test_a_host_without_the_program_ends_an_elastic_job_before_it_begins_on_all(
    lacks_it: int, job: Job
) -> None:
    """None waits for one that has ended, also if that would be the first: --start-timeout is
    longer than the test may take.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    where = ("--nnodes", 3, "--master-addr", "127.0.0.1", "--master-port", port, "-np", 1)
    words = ("run", "-q", "--elastic", "1:3", "--start-timeout", 10 * LIMIT, *where)

    def start(node: int) -> None:
        program = "nothing.py" if node == lacks_it else "program.py"
        job.start_command(*words, "--node-rank", node, program)

    start(0)
    start(1)
    if lacks_it == 0:  # the second host has been told so, and ends, before the third one begins
        assert job.launchers[1].wait(LIMIT) == 1, job.out()
    start(2)
    codes = [launcher.wait(LIMIT) for launcher in job.launchers]
    for reader in job.readers:
        reader.join(LIMIT)
    assert codes == [1, 1, 1], job.out()
    said = (
        f"error: host: expected one that can run the program ({socket.gethostname()}), got script: "
        f"expected an existing Python file (current folder: {job.folder}), got 'nothing.py'."
    )
    for launcher in range(3):
        assert said in job.out(launcher), job.out()
    for launcher in (1, 2):
        assert job.out(launcher).count("\n") == 1, job.out()


def test_hosts_that_have_come_learn_which_job_does_not_begin(job: Job) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    where = ("--nnodes", 3, "--master-addr", "127.0.0.1", "--master-port", port, "-np", 1)
    for node, seconds in ((0, 8), (1, 10 * LIMIT)):
        job.start("--elastic", "1:3", "--start-timeout", seconds, *where, "--node-rank", node)
    codes = [launcher.wait(LIMIT) for launcher in job.launchers]
    for reader in job.readers:
        reader.join(LIMIT)
    assert codes == [1, 1], job.out()
    for launcher in range(2):
        assert "error: of 3 hosts, only 2 joined within 8 s" in job.out(launcher), job.out()


# --- the fork server
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["fixed", "elastic"])
def test_workers_go_on_when_the_fork_server_is_killed(kind: str, job: Job) -> None:
    job.start(*(("--elastic", "1:2") if kind == "elastic" else ()), "-np", 2)
    job.wait_until(lambda: len(job.workers()) == 2)
    server = psutil.Process(job.workers()[0]).ppid()
    assert server != job.launchers[0].pid
    os.kill(server, signal.SIGKILL)
    if kind == "elastic":  # a worker that is lost then is replaced by one of another fork server
        os.kill(job.workers()[1], signal.SIGKILL)
        job.wait_until(lambda: len(job.workers()) == 3)
        assert "was lost (its exit code is not known)" in job.out()
    assert job.end() == [0], job.out()
    assert job.out().count("done") == 2, job.out()


def test_a_worker_that_dies_without_a_fork_server_is_an_error(job: Job) -> None:
    job.start("-np", 2)
    job.wait_until(lambda: len(job.workers()) == 2)
    os.kill(psutil.Process(job.workers()[0]).ppid(), signal.SIGKILL)
    line = next(line for _, line in job.lines if "pid " in line)
    rank = line[1]  # of "[0] pid 123"
    os.kill(int(line.split()[-1]), signal.SIGKILL)
    assert job.launchers[0].wait(LIMIT) == 1, job.out()
    job.wait_until(lambda: f"rank {rank}: exit: ended without an error message" in job.out())


# --- a launcher that is stopped
# ---------------------------------------------------------------------------------------


def test_a_launcher_that_is_stopped_is_said_and_then_out(job: Job) -> None:
    start_hosts(job, 2, "--launcher-timeout", 8)
    stopped = job.launchers[1]
    (worker,) = [
        int(line.split()[-1]) for launcher, line in job.lines if launcher == 1 and "pid " in line
    ]
    os.kill(stopped.pid, signal.SIGSTOP)
    try:
        job.wait_until(lambda: "has not answered for 4 s" in job.out(0))
        job.wait_until(lambda: not psutil.pid_exists(worker))
        assert job.launchers[0].wait(LIMIT) == 1
    finally:
        os.kill(stopped.pid, signal.SIGCONT)
    assert stopped.wait(LIMIT) == 1
    for reader in job.readers:
        reader.join(LIMIT)
    assert "has not answered for 8 s (LOCKSTEP_LAUNCHER_TIMEOUT)" in job.out(0), job.out()
    assert "it is stopped by a signal" in job.out(1), job.out()  # its workers say so beside it
    assert "this launcher did not answer for" in job.out(1), job.out()


def test_the_launcher_of_the_first_host_is_stopped(job: Job) -> None:
    start_hosts(job, 2, "--launcher-timeout", 8)
    stopped, other = job.launchers
    os.kill(stopped.pid, signal.SIGSTOP)
    try:
        assert other.wait(LIMIT) == 1
        job.wait_until(lambda: not any(map(psutil.pid_exists, job.workers())))
    finally:
        os.kill(stopped.pid, signal.SIGCONT)
    assert stopped.wait(LIMIT) == 1
    for reader in job.readers:
        reader.join(LIMIT)
    assert "has not answered for 8 s (LOCKSTEP_LAUNCHER_TIMEOUT)" in job.out(1), job.out()
    assert "this launcher did not answer for" in job.out(0), job.out()


def test_the_others_go_on_without_a_leader_that_is_stopped_and_it_joins_them_again(
    job: Job,
) -> None:
    start_hosts(job, 3, "--elastic", "1:3", "--launcher-timeout", 8)
    stopped = job.launchers[0]
    os.kill(stopped.pid, signal.SIGSTOP)
    try:
        job.wait_until(lambda: "coordinates the job now" in job.out(1))
    finally:
        os.kill(stopped.pid, signal.SIGCONT)
    job.wait_until(lambda: "the others went on without" in job.out(0))
    job.wait_until(lambda: len(job.workers()) == 4)  # its new one trains
    assert job.end() == [0, 0, 0], job.out()
    assert job.out().count("done") == 3, job.out()


# --- a crash after the training
# ---------------------------------------------------------------------------------------

CRASHES = """
if comm.rank == 1:
    import signal
    os.kill(os.getpid(), signal.SIGSEGV)
else:
    import time
    time.sleep(600)
"""


@pytest.mark.parametrize(
    "words",
    [
        (),
        pytest.param(
            ("--restarts", 1),
            marks=pytest.mark.xfail(
                strict=True, reason="all workers are restarted, and train everything again"
            ),
        ),
        ("--elastic", "1:2"),
    ],
    ids=["fixed", "restarts", "elastic"],
)
def test_a_crash_after_the_training_ends_the_job_with_its_code(
    words: tuple[object, ...], job: Job
) -> None:
    (job.folder / "program.py").write_text(PROGRAM + CRASHES)
    (job.folder / "enough").touch()
    job.start(*words, "-np", 2)
    assert job.launchers[0].wait(LIMIT) == 128 + signal.SIGSEGV, job.out()
    job.wait_until(lambda: "killed by SIGSEGV" in job.out())
    assert job.out().count("done") == 2, job.out()
