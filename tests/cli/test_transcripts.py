"""What a user sees of a job from its start to its end: whole outputs, compared with golden files.

Process IDs, times, ports, paths and step numbers are replaced. How to accept a change:
`support.golden_texts`.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import torch

import lockstep
from lockstep.cli import main
from support import golden_texts, warm_python
from support.command import Ended, Here
from support.elastic_program import write_program
from support.warm_python import WarmProcess

DEADLINE = 90.0

HEAD = """
import os, pathlib, signal, sys, time
rank, attempt = int(os.environ["RANK"]), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))

def wait_until_waits(other, what):
    from lockstep.flight_recorder import open_job
    while True:
        for reader in open_job(pathlib.Path(os.environ["LOCKSTEP_WATCHDOG_DIR"])).values():
            state = reader.state()
            if state.rank == other and state.phase == "waits" and what in state.call.what:
                return
            reader.close()
        time.sleep(0.01)
"""

GROUP = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
ones = torch.ones(2)
"""


@pytest.fixture(autouse=True)
def _only_these_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the user's are shown, or change what is shown."""
    for name in os.environ:
        if (
            name.startswith(("LOCKSTEP_", "TORCH", "NCCL_", "GLOO_", "PYTHON"))
            and name != "LOCKSTEP_PROGRESS"
        ):
            monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv(
        "LOCKSTEP_STALL_WARNING", "100"
    )  # no warning depends on how busy the host is


# --- What is compared
# -------------------------------------------------------------------------------------------------

_REPLACED = (
    (
        r"\[W\d+ [^\n]*\[c10d\][^\n]*(\n(Exception raised|frame #|<omitting)[^\n]*)*\n*",
        "",
    ),  # torch tells of lost peers
    (r"\x1b\[[0-9;]*m", ""),
    (r"\b(pid|process|PID) \d+", r"\1 PID"),
    (r"ended processes that .*", lambda found: re.sub(r"\d+", "PID", found[0])),
    (r"127\.0\.0\.1:\d+", "127.0.0.1:PORT"),
    (r"step-\d+", "step-N"),
    (r"\bstep \d+", "step N"),
    (r"\bepoch \d+", "epoch N"),
    (r"reports/\S+-program\b\S*?/", "reports/TIME-program/"),
    (r"\(\d+ cores?\)", "(N cores)"),
    (r" *\b\d+\.\d s\b", " N.N s"),
    (r"( < <string>:\d+ in \S+)+", ""),  # of the process of which the program is a fork
)

_ORDERED = r"(rank 1 called .*), (rank 0 called .*)\.", r"\2, \1."
"""Whoever has noticed a difference names itself first."""

_FREE = r"[\s~^]*[~^][\s~^]*|lockstep: \d workers? waits? for .*"
"""Lines that may be there or not: marks in tracebacks, and what is said if something takes longer.
"""

_FIRST = r"lockstep|restarting|rank +(\d|host|waiting|batch)|Rank |\d[\d,-]* |#\d|(\w+ )*\w+:$|Traceback|  File "
"""How lines begin in a report that do not go on with the one before: how it is wrapped depends on
numbers and names.
"""


def normalised(text: str, folder: Path) -> list[str]:
    """The lines of what was shown, without what differs from run to run or from host to host."""
    for known, name in (
        (str(folder.resolve()), "FOLDER"),
        (str(golden_texts.PACKAGE.parent), "PACKAGES"),
        (sys.executable, "PYTHON"),
        (socket.gethostname(), "HOST"),
        (torch.__version__, "VERSION"),
    ):
        text = text.replace(known, name)
    for pattern, shown in _REPLACED:
        text = re.sub(pattern, shown, text)  # type: ignore[call-overload]
    return [line for line in text.splitlines() if not re.fullmatch(_FREE, line)]


def unwrapped(lines: list[str]) -> Iterator[str]:
    """The lines of standard error, those of a report as if it were not wrapped; tracebacks as they
    are.
    """
    whole, is_traceback = "", False
    for line in [*lines, ""]:
        is_traceback = bool(line) and (is_traceback or line.startswith(("Traceback (", "  File ")))
        if is_traceback or not line or re.match(_FIRST, line.strip()):
            if whole:
                yield re.sub(*_ORDERED, whole)
            whole = line.rstrip() if is_traceback else " ".join(line.split())
        else:
            whole = f"{whole} {' '.join(line.split())}".strip()
        if not line:
            yield ""


def pin(name: str, folder: Path, *said: tuple[str, str | Ended]) -> None:
    """Compare what was said with a golden file.

    Args:
        name: of the file.
        folder: in which the job ran.
        said: what was typed, and what was shown, or how that has ended; standard output is sorted,
            as the order of ranks is open.
    """
    lines = []
    for typed, shown in said:
        lines += [f"$ {typed}"]
        if isinstance(shown, str):
            lines += normalised(shown, folder)
        else:
            lines += sorted(normalised(shown.stdout, folder))
            lines += [
                f"2> {line}".rstrip() for line in unwrapped(normalised(shown.stderr, folder))
            ][:-1]
            lines += [f"exit code {shown.returncode}"]
    golden_texts.compare(golden_texts.GOLDEN / "transcripts" / f"{name}.txt", lines)


def write(folder: Path, *parts: str) -> None:
    """Write the program of these parts."""
    (folder / "program.py").write_text(HEAD + "".join(map(textwrap.dedent, parts)))


# --- One host
# --------------------------------------------------------------------------------------------------

WAIT = "time.sleep(1000)"

PROGRAMS: dict[str, tuple[str, ...]] = {
    "a rank raises": (
        "-np 2",
        f"""
        def work():
            raise ValueError("on purpose\\nin two lines")
        if rank == 1:
            work()
        {WAIT}
        """,
    ),
    "a rank raises while the others wait for it": (
        "-np 3",
        GROUP,
        """
        if rank == 1:
            wait_until_waits(0, "all_reduce")
            wait_until_waits(2, "all_reduce")
            raise ValueError("on purpose")
        dist.all_reduce(ones)
        """,
    ),
    "a rank exits with a code": ("-np 2", f"if rank == 1: sys.exit(7)\n{WAIT}"),
    "a rank is killed": ("-np 2", f"if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n{WAIT}"),
    "a rank is killed while the others wait for it": (
        "-np 2",
        GROUP,
        """
        if rank == 1:
            wait_until_waits(0, "all_reduce")
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(ones)
        """,
    ),
    "all ranks raise the same error": (
        "-np 2",
        """
        import lockstep, torch
        model = torch.nn.Linear(2, 2)
        lockstep.Trainer(model, torch.optim.SGD(model.parameters(), 0.1), torch.nn.MSELoss(), 8, precision="half")
        """,
    ),
    "ranks are restarted": (
        "-np 2 --restarts 2",
        """
        if attempt == 0 and rank == 1:
            raise ValueError("the first time")
        while attempt == 0:
            time.sleep(1)
        print("fine in attempt", attempt)
        """,
    ),
    "restarts are exhausted": (
        "-np 2 --restarts 1",
        """
        if rank == 1:
            sys.exit(3 + attempt)
        time.sleep(1000)
        """,
    ),
    "ranks call different collectives": (
        "-np 2",
        GROUP,
        """
        for step in range(3):
            dist.all_reduce(ones)
        if rank == 0:
            dist.all_reduce(ones)
        else:
            dist.broadcast(ones, 0)
        """,
    ),
    "a rank stalls": (
        "-np 2 --stall-timeout 4",
        GROUP,
        """
        dist.all_reduce(ones)
        if rank == 1:
            while True:
                time.sleep(0.1)
        dist.barrier()
        """,
    ),
    "a rank is stopped": (
        "-np 2",
        GROUP,
        """
        if rank == 1:
            wait_until_waits(0, "barrier")
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.barrier()
        """,
    ),
    "a rank leaves early": (
        "-np 2",
        GROUP,
        """
        if rank == 1:
            wait_until_waits(0, "barrier")
            sys.exit(0)
        dist.barrier()
        """,
    ),
    "elastic, a rank raises": (
        "--elastic 1:2 -np 2",
        f"""
        import lockstep
        lockstep.init("cpu")
        if rank == 1:
            raise ValueError("on purpose")
        {WAIT}
        """,
    ),
    "output in files": (
        "-np 2 --output-dir logs",
        "print('out of', rank); print('err of', rank, file=sys.stderr)",
    ),
    "output in files and here": ("-np 2 --output-dir logs --tee", "print('out of', rank)"),
    "workers leave processes": (
        "-np 2 --quiet",
        """
        import subprocess
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
        """,
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_one_host(name: str, tmp_path: Path, here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    options, *parts = PROGRAMS[name]
    if "--stall-timeout" in options:
        monkeypatch.setenv(
            "LOCKSTEP_STALL_WARNING", "4"
        )  # nothing is an error before it is a warning
    write(tmp_path, *parts)
    monkeypatch.chdir(tmp_path)
    ended = here("run", *options.split(), "program.py")
    files = "\n".join(
        sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    )
    pin(name, tmp_path, (f"lockstep run {options} program.py", ended), ("files", files))


def test_a_straggler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_STALL_WARNING", "0.3")
    body = """
    dist.all_reduce(ones)
    if rank == 1:
        while not pathlib.Path("go").exists():
            time.sleep(0.01)
    dist.barrier()
    """
    write(tmp_path, GROUP, body)
    with started(tmp_path, "run", "-np", 2, "program.py") as job:
        assert job.stderr is not None
        seen = job.stderr.readline()
        while "straggler" not in seen:
            seen += job.stderr.readline()
        (tmp_path / "go").touch()
        pin("a rank is late", tmp_path, ("lockstep run -np 2 program.py", ended(job, err=seen)))


def test_launch(tmp_path: Path) -> None:
    def work() -> None:
        import torch.distributed as dist

        if lockstep.init("cpu").rank == 1:
            raise ValueError("on purpose")
        dist.barrier()

    with pytest.raises(lockstep.errors.WorkerError) as caught:
        lockstep.launch(work, workers=2)
    pin(
        "launch",
        tmp_path,
        ("launch(work, workers=2)", re.sub(r'File ".*", line .*,', "File ...", str(caught.value))),
    )


def test_dry_run(tmp_path: Path, here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = "-H alpha:2,beta --dry-run -x MINE=secret --stall-timeout 30 -q program.py --lr 0.1"
    pin("dry run", tmp_path, (f"lockstep run {words}", here("run", *words.split())))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_a_signal(number: signal.Signals, tmp_path: Path) -> None:
    write(tmp_path, f"print('ready', flush=True)\n{WAIT}")
    with started(tmp_path, "run", "-np", 2, "program.py") as job:
        job.read_until("ready")
        job.read_until("ready")
        job.send_signal(number)
        pin(
            f"{number.name} to the launcher",
            tmp_path,
            ("lockstep run -np 2 program.py", ended(job)),
        )


def test_a_signal_to_a_training(tmp_path: Path) -> None:
    write_program(tmp_path, 1000, tmp_path / "run")
    with started(tmp_path, "run", "-np", 2, "program.py") as job:
        job.read_until("step 9 of 2")
        job.send_signal(signal.SIGTERM)
        pin(
            "SIGTERM to a training",
            tmp_path,
            ("lockstep run -np 2 program.py", without_output(ended(job))),
        )


# --- Several launchers of one job
# -------------------------------------------------------------------------------------


@contextmanager
def started(
    folder: Path, *words: object, code: str = "", **variables: str
) -> Iterator[WarmProcess]:
    """A running command, of which nothing is left afterwards."""
    program = ["-c", code] if code else ["-m", "lockstep"]
    with warm_python.popen([*program, *words], folder, {**os.environ, **variables}) as job:
        try:
            yield job
        finally:
            if job.poll() is None:
                kill(job)


def kill(job: WarmProcess) -> None:
    """Kill a launcher with all that it has started, as the loss of its host does."""
    with suppress(psutil.NoSuchProcess):
        tree = [psutil.Process(job.pid), *psutil.Process(job.pid).children(recursive=True)]
        for process in tree:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
        for process in tree:
            with suppress(psutil.NoSuchProcess):
                process.kill()


def ended(job: WarmProcess, out: str = "", err: str = "") -> Ended:
    """How a job ends, with what it has written already."""
    more_out, more_err = job.communicate(DEADLINE)
    assert job.returncode is not None
    return Ended(job.returncode, out + more_out, err + more_err)


def without_output(how: Ended) -> Ended:
    """The same without what the program has printed, which ends somewhere."""
    return Ended(how.returncode, "", how.stderr)


@contextmanager
def two(
    folder: Path, *options: object, code: str = "", **variables: str
) -> Iterator[tuple[WarmProcess, WarmProcess]]:
    """The launchers of a job with a worker each."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    words = (
        "run",
        *options,
        "--nnodes",
        2,
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        port,
        "-np",
        1,
    )
    with ExitStack() as stack:
        second = stack.enter_context(
            started(folder, *words, "--node-rank", 1, "program.py", code=code)
        )
        first = stack.enter_context(started(folder, *words, "--node-rank", 0, "program.py"))
        yield first, second


def by_hand(*options: object) -> list[str]:
    """How the two launchers of `two` were typed in."""
    given = " ".join(map(str, options))
    words = (
        f"lockstep run {given}{' ' * bool(given)}--nnodes 2 --master-addr 127.0.0.1 -np 1 "
        "--node-rank"
    )
    return [f"{words} {node} program.py" for node in range(2)]


def pin_two(
    name: str, folder: Path, options: tuple[object, ...], first: Ended, second: Ended
) -> None:
    pin(name, folder, *zip(by_hand(*options), (first, second), strict=True))


def test_a_rank_of_another_host_raises(tmp_path: Path) -> None:
    write(tmp_path, f"if rank == 1: raise ValueError('on purpose')\n{WAIT}")
    with two(tmp_path) as (first, second):
        pin_two("two hosts, a rank raises", tmp_path, (), ended(first), ended(second))


def test_a_rank_of_another_host_is_killed_in_a_collective(tmp_path: Path) -> None:
    body = """
    dist.all_reduce(ones)
    if rank == 1:
        while not pathlib.Path("waits").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    wait = dist.barrier(async_op=True)
    pathlib.Path("waits").touch()
    wait.wait()
    """
    write(tmp_path, GROUP, body)
    with two(tmp_path) as (first, second):
        pin_two("two hosts, a rank is killed", tmp_path, (), ended(first), ended(second))


@pytest.mark.parametrize("lost", [0, 1], ids=["the first", "the other"])
def test_a_host_is_lost(lost: int, tmp_path: Path) -> None:
    write(tmp_path, f"print('ready', flush=True)\n{WAIT}")
    with two(tmp_path) as launchers:
        for launcher in launchers:
            launcher.read_until("ready")
        kill(launchers[lost])
        pin(
            f"two hosts, host {lost} is lost",
            tmp_path,
            (by_hand()[1 - lost], ended(launchers[1 - lost])),
        )


OTHER_TORCH = """
import sys, lockstep.launcher.remote_hosts.host_description as host_description
from lockstep.cli.main import main
known = host_description._version
host_description._version = lambda name: "2.0.1" if name == "torch" else known(name)
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("options", [(), ("--elastic", "1:2")], ids=["fixed", "elastic"])
def test_hosts_that_differ(options: tuple[str, ...], tmp_path: Path) -> None:
    write(tmp_path, "")
    with two(tmp_path, *options, code=OTHER_TORCH) as (first, second):
        pin_two(
            f"two hosts of other versions{', elastic' * bool(options)}",
            tmp_path,
            options,
            ended(first),
            ended(second),
        )


# --- Elastic jobs
# --------------------------------------------------------------------------------------------------


def pids(seen: str) -> dict[int, int]:
    """The processes of workers, by their first rank."""
    return {int(rank): int(pid) for rank, pid in re.findall(r"\[(\d)\] pid (\d+)", seen)}


def training(folder: Path, shared: bool = True) -> None:
    """Write a program that trains until there is a file "enough"."""
    write_program(folder, 1000, folder / "run" if shared else None)


def test_workers_are_lost_leave_and_are_added(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    training(tmp_path)
    said = []
    with started(tmp_path, "run", "--elastic", "1:3", "-np", 2, "program.py") as job:

        def ask(*words: object) -> None:
            capfd.readouterr()
            code = main([str(word) for word in words])
            typed = " ".join(
                ["lockstep", *("PID" if word == job.pid else str(word) for word in words)]
            )
            said.append((typed, Ended(code, *capfd.readouterr())))

        seen = job.read_until("step 5 of 2")
        os.kill(pids(seen)[1], signal.SIGKILL)
        again = job.read_until(r"pid \d+")
        again += job.read_until(r"step \d+ of 2")
        ask("resize", job.pid, 3)
        more = job.read_until(r"step \d+ of 3")
        ask("resize", job.pid, 3)
        ask("resize", job.pid, 4)
        ask("resize", "--remove", "nowhere", job.pid)
        ask("join", "--show", job.pid)
        newest = int(re.findall(r"pid (\d+)", more)[-1])
        os.kill(newest, signal.SIGTERM)
        job.read_until(r"step \d+ of 2")
        (tmp_path / "enough").touch()
        typed = "lockstep run --elastic 1:3 -np 2 program.py"
        pin("elastic, workers come and go", tmp_path, *said, (typed, without_output(ended(job))))


def test_all_workers_are_lost(tmp_path: Path) -> None:
    training(tmp_path)
    with started(tmp_path, "run", "--elastic", "1:2", "-np", 2, "program.py") as job:
        workers = pids(job.read_until("step 9 of 2")).values()
        for number in (signal.SIGSTOP, signal.SIGKILL):  # so that none goes on without the other
            for pid in workers:
                os.kill(pid, number)
        job.read_until(r"step \d+ of 2")
        (tmp_path / "enough").touch()
        how = without_output(ended(job))
    said = re.sub(
        r"lockstep: rank \d was lost .*; 1 worker goes on\n", "", how.stderr
    )  # if one is seen to end first
    typed = "lockstep run --elastic 1:2 -np 2 program.py"
    pin("elastic, all workers are lost", tmp_path, (typed, how._replace(stderr=said)))


def test_too_few_workers_are_left(tmp_path: Path) -> None:
    training(tmp_path)
    with started(tmp_path, "run", "--elastic", "2:2", "-np", 2, "program.py") as job:
        workers = pids(job.read_until("step 9 of 2"))
        os.kill(workers[1], signal.SIGKILL)
        assert job.stderr is not None
        seen = ""
        while "joined" not in seen:
            seen += job.stderr.readline()
        job.send_signal(signal.SIGINT)
        typed = "lockstep run --elastic 2:2 -np 2 program.py"
        pin(
            "elastic, the least number of workers",
            tmp_path,
            (typed, without_output(ended(job, err=seen))),
        )


def test_the_first_host_leaves(tmp_path: Path) -> None:
    training(tmp_path, shared=False)
    options = ("--elastic", "1:2")
    with two(tmp_path, *options) as (first, second):
        first.read_until("step 5 of 2")
        first.send_signal(signal.SIGTERM)
        first_end = ended(first)
        second.read_until(r"step \d+ of 1")
        (tmp_path / "enough").touch()
        ends = [without_output(each) for each in (first_end, ended(second))]
    # unless its host has left before that is known
    told = "lockstep: rank 0 has left; 1 worker goes on\n"
    ends = [end._replace(stderr=end.stderr.replace(told, "")) for end in ends]
    pin_two("elastic, the first host leaves", tmp_path, options, *ends)


@pytest.mark.parametrize("lost", [0, 1], ids=["the first", "the other"])
def test_a_host_of_an_elastic_job_is_lost(lost: int, tmp_path: Path) -> None:
    training(tmp_path, shared=False)
    options = ("--elastic", "1:2")
    with two(tmp_path, *options) as launchers:
        launchers[0].read_until("step 5 of 2")
        kill(launchers[lost])
        left = launchers[1 - lost]
        left.read_until(r"step \d+ of 1")
        (tmp_path / "enough").touch()
        how = without_output(ended(left))
        pin(f"elastic, host {lost} is lost", tmp_path, (by_hand(*options)[1 - lost], how))
