"""`lockstep run` on one host: what the program sees, what is shown, how it ends, and that nothing
stays behind.
"""

from __future__ import annotations

import os
import platform
import pty
import select
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from lockstep.cli import main
from support import warm_python
from support.command import Here

DEADLINE = 60.0  # seconds that a test waits for what must happen

HEAD = """
import os, sys, signal, subprocess, time
from pathlib import Path
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
"""


def write(folder: Path, body: str, name: str = "program.py") -> Path:
    path = folder / name
    path.write_text(HEAD + textwrap.dedent(body))
    return path


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "lockstep", "run", *map(str, words)]


def run(
    *words: object, cwd: Path | None = None, stdin: str = "", **env: str
) -> subprocess.CompletedProcess[str]:
    variables = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    variables |= env
    return warm_python.run(["-m", "lockstep", "run", *words], cwd, variables, stdin, DEADLINE)


def run_as_process(*words: object) -> subprocess.CompletedProcess[str]:
    """As `run`, but not as a fork: /proc has its command line and variables."""
    variables = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return subprocess.run(
        command(*words),
        env=variables,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )


def wait_for(path: Path, count: int) -> list[Path]:
    """The files in `path`, once there are `count` of them."""
    deadline = time.monotonic() + DEADLINE
    while (
        len(found := [each for each in path.iterdir() if not each.name.endswith(".draft")]) < count
    ):
        assert time.monotonic() < deadline, f"{len(found)} of {count} came"
        time.sleep(0.01)
    return found


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(pids: list[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while left := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.01)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="an option of glibc")
def test_workers_keep_freed_memory(tmp_path: Path, here: Here) -> None:
    """By glibc's default, freed memory from twice the largest freed block on is given back."""
    program = write(
        tmp_path,
        """
        def resident():
            return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        before = resident()
        for _ in range(3):
            blocks = [b"x" * (24 << 20) for _ in range(4)]
            del blocks
        print((resident() - before) >> 20)
        """,
    )
    ended = here("run", "-np", 1, "--quiet", "--no-prefix", program)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) > 80


# --- who else can see and reach it
# ---------------------------------------------------------------------------


def test_a_job_on_one_host_listens_on_the_loopback_interface_only(
    tmp_path: Path, here: Here
) -> None:
    program = write(
        tmp_path,
        """
        import torch, torch.distributed as dist
        def places(name):  # of all that listens here, by inode
            lines = [line.split() for line in Path("/proc/net", name).read_text().splitlines()[1:]]
            return {line[9]: line[1].split(":") for line in lines if line[3] == "0A"}
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        listening = places("tcp") | places("tcp6")
        own = {os.readlink(path)[8:-1] for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}
        ranks = [address for inode, (address, _) in listening.items() if inode in own]
        stores = [address for address, port in listening.values() if int(port, 16) == int(os.environ["MASTER_PORT"])]
        print(ranks, stores, os.environ.get("GLOO_SOCKET_IFNAME"))
        """,
    )
    ended = here("run", "-np", 2, "--quiet", "--no-prefix", program)
    assert ended.returncode == 0, ended.stderr
    loopback = "['0100007F']"  # 127.0.0.1, as /proc writes it
    assert ended.stdout.splitlines() == [f"{loopback} {loopback} lo"] * 2


SECRET = "s3cret of the user"

SEEN = """
import psutil
secret = " ".join(["s3cret", "of", "the", "user"])
assert os.environ["TOKEN"] == os.environ["OTHER"] == os.environ["NCCL_TOKEN"] == secret
lines = [" ".join(each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"])]
print([line for line in lines if secret in line], sum(os.environ["SSH_HERE"] in line for line in lines))
"""


@pytest.mark.parametrize("far", [False, True], ids=["here", "over ssh"])
def test_values_of_variables_stand_in_no_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, far: bool
) -> None:
    """`ps` shows command lines to every user of a host."""
    ssh = (
        tmp_path / "bin" / "ssh"
    )  # as far as command lines are concerned: it stays, with all its words
    ssh.parent.mkdir()
    ssh.write_text('#!/bin/sh\n# fake ssh\nfor last; do :; done\nsh -c "$last"\nexit $?\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{ssh.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SSH_HERE", str(ssh))  # other tests beside this one have an ssh of their own
    monkeypatch.setenv("OTHER", SECRET)
    monkeypatch.setenv("NCCL_TOKEN", SECRET)
    program = write(tmp_path, SEEN)
    hosts = ("-H", "203.0.113.77:2") if far else ("-np", 2)  # reserved for examples
    ended = run(*hosts, "-x", f"TOKEN={SECRET}", "-x", "OTHER", "--quiet", "--no-prefix", program)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == [f"[] {int(far)}"] * 2


# --- what the program sees
# ----------------------------------------------------------------------------------


def test_a_program_finds_what_python_would_give_it_and_its_rank(tmp_path: Path) -> None:
    write(tmp_path, "NAME = 'a module beside it'", "beside.py")
    program = write(
        tmp_path,
        """
        import atexit, concurrent.futures, multiprocessing, threading
        import torch, torch.distributed as dist
        import beside
        assert __name__ == "__main__" and sys.modules["__main__"].rank == rank
        assert sys.argv[1:] == ["--lr", "0.1", "a b", "--", "-x"], sys.argv
        assert Path(sys.path[0]) == Path(__file__).parent
        assert multiprocessing.get_start_method(allow_none=True) is None
        names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
        assert all(name in os.environ for name in names)
        assert torch.get_num_threads() == int(os.environ["OMP_NUM_THREADS"])
        shown = Path("/proc/self/cmdline").read_text().split(chr(0))[0]  # by ps
        assert shown == f"lockstep rank {rank}: program.py", shown
        assert b"LOCKSTEP_RUN_ID=" in Path("/proc/self/environ").read_bytes()  # by which orphans are found
        dist.init_process_group("gloo")
        total = torch.tensor([float(rank)])
        dist.all_reduce(total)
        atexit.register(print, f"at exit of {rank}")
        kept = concurrent.futures.ThreadPoolExecutor(1)  # that nobody shuts down keeps no program from ending
        kept.submit(int).result()
        threading.Timer(0.1, print, [f"thread of {rank}"]).start()
        print(f"sum {total.item()}")
        sys.exit(0)
        """,
    )
    ended = run_as_process("-np", 2, program, "--lr", "0.1", "a b", "--", "-x")
    assert ended.returncode == 0, ended.stderr
    for rank in range(2):
        wanted = [f"[{rank}] sum 1.0", f"[{rank}] thread of {rank}", f"[{rank}] at exit of {rank}"]
        assert [
            line for line in ended.stdout.splitlines() if line.startswith(f"[{rank}]")
        ] == wanted
    assert ended.stderr.count("lockstep run: 2 workers, ") == 1


def test_a_master_address_that_the_launcher_was_given_is_not_that_of_its_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a Slurm allocation, or in a shell that was used for torchrun."""
    for name, value in (
        ("MASTER_ADDR", "203.0.113.7"),
        ("MASTER_PORT", "1"),
        ("TORCHELASTIC_RESTART_COUNT", "7"),
    ):
        monkeypatch.setenv(name, value)
    program = write(
        tmp_path,
        """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.tensor([float(rank)])
        dist.all_reduce(total)
        print(os.environ["MASTER_ADDR"], os.environ["TORCHELASTIC_RESTART_COUNT"], total.item())
        """,
    )
    ended = run_as_process("-np", 2, program)
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == ["[0] 127.0.0.1 0 1.0", "[1] 127.0.0.1 0 1.0"]


def test_a_module_runs_and_one_worker_has_the_streams_to_itself(tmp_path: Path) -> None:
    write(tmp_path, "print('module', sys.argv[1:], __name__, end='')", "some_module.py")
    ended = run("-np", 1, "--quiet", "-m", "some_module", "--flag", cwd=tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "module ['--flag'] __main__", "")


def test_processes_that_the_program_spawns_find_its_functions(tmp_path: Path, here: Here) -> None:
    program = write(
        tmp_path,
        """
        import multiprocessing
        def square(x):
            return x * x
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(square, [3]))
        """,
    ).read_text()
    (tmp_path / "program.py").write_text(program.replace(HEAD, ""))
    ended = here("run", "-np", 2, "--quiet", tmp_path / "program.py")
    assert sorted(ended.stdout.splitlines()) == ["[0] [9]", "[1] [9]"], ended.stderr


@pytest.mark.parametrize("method", ["spawn"])
def test_workers_may_begin_from_nothing(tmp_path: Path, method: str) -> None:
    ended = run(
        "-np", 1, "--start-method", method, write(tmp_path, "print('torch' in sys.modules, rank)")
    )
    assert (ended.returncode, ended.stdout) == (0, "True 0\n"), ended.stderr


# --- what is shown
# ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [0, 1])
def test_an_exception_of_a_data_set_is_one_line_and_nothing_waits(
    processes: int, tmp_path: Path, here: Here
) -> None:
    body = f"""
        import torch, lockstep

        class Photos(torch.utils.data.Dataset):
            def __len__(self):
                return 16
            def __getitem__(self, index):
                if index == 7:
                    open("img7.png")
                return torch.randn(4), 0

        model = torch.nn.Linear(4, 2)
        data = torch.utils.data.DataLoader(Photos(), 8, num_workers={processes})
        model, optimizer, loader = lockstep.prepare(model, torch.optim.SGD(model.parameters(), 0.1), data)
        for inputs, labels in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    """
    ended = here("run", "-np", 2, "--quiet", write(tmp_path, body))
    where = " (in loader process 0)" if processes else ""
    said = (
        "lockstep run: error: sample 7 of Photos: FileNotFoundError: [Errno 2] No such file or "
        "directory: 'img7.png', "
    )
    of_prepare, *others, error = ended.stderr.strip().splitlines()
    # on a busy host, where reading samples takes long
    assert all("samples were compared among the workers" in line for line in others), ended.stderr
    assert of_prepare.startswith("[0] lockstep.prepare() on 2 workers: a global batch of 8")
    assert error == f"{said}at program.py:13 in __getitem__{where} [rank 1]"
    assert ended.returncode == 2


def test_each_rank_may_have_a_file(tmp_path: Path, here: Here) -> None:
    program = write(tmp_path, "print('out of', rank); print('err of', rank, file=sys.stderr)")
    ended = here("run", "-np", 2, "--output-dir", tmp_path / "logs", program)
    assert (ended.returncode, ended.stdout) == (0, "")
    for rank in range(2):
        words = (tmp_path / "logs" / f"rank-{rank}.log").read_text().splitlines()
        assert sorted(words) == [f"err of {rank}", f"out of {rank}"]


def test_the_first_failure_comes_last_and_whole_with_its_exit_code(
    tmp_path: Path, here: Here
) -> None:
    program = write(
        tmp_path,
        """
        import torch, torch.distributed as dist
        import lockstep
        dist.init_process_group("shm")
        print("before", flush=True)
        class Failed(Exception):
            pass
        def work():
            raise Failed("the reason")
        if rank == 1:
            work()
        dist.barrier()
        """,
    )
    ended = here("run", "-np", 3, program)
    assert ended.returncode == 1
    assert sorted(ended.stdout.splitlines()) == ["[0] before", "[1] before", "[2] before"]
    lines = ended.stderr.splitlines()
    assert lines[1].startswith("lockstep run: error: rank 1: Failed: the reason")
    assert lines[-1].endswith("Failed: the reason") and any("in work" in line for line in lines)
    assert ended.stderr.count("Traceback (most recent call last)") == 1
    assert "runpy" not in ended.stderr and "lockstep/launcher" not in ended.stderr


@pytest.mark.parametrize(
    ("end", "code"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), signal.SIGKILL)", 137)]
)
def test_the_exit_code_is_that_of_the_first_failure(
    tmp_path: Path, here: Here, end: str, code: int
) -> None:
    ended = here(
        "run", "-np", 2, "--quiet", write(tmp_path, f"if rank == 1: {end}\ntime.sleep(100)")
    )
    assert ended.returncode == code
    assert "rank 1" in ended.stderr


# --- how it ends
# --------------------------------------------------------------------------------------------

STUBBORN = """
    folder = Path(sys.argv[1])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    draft = folder / f"{rank}.draft"
    draft.write_text(f"{os.getpid()} {child.pid}")
    draft.rename(folder / f"{rank}")
    time.sleep(1000)
"""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_no_process_survives_a_signal_to_the_launcher(
    tmp_path: Path, number: int, code: int
) -> None:
    folder = tmp_path / "pids"
    folder.mkdir()
    program = write(tmp_path, STUBBORN)
    with warm_python.popen(["-m", "lockstep", "run", "-np", 2, program, folder]) as launcher:
        pids = [int(word) for path in wait_for(folder, 2) for word in path.read_text().split()]
        assert all(map(is_alive, pids))
        launcher.send_signal(number)
        assert launcher.wait(DEADLINE) == code
    wait_until_gone(pids, 10.0)


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_in_the_users_program_names_its_line_and_no_flag(
    tmp_path: Path, here: Here, workers: int
) -> None:
    program = tmp_path / "train.py"
    program.write_text(
        """
import torch, lockstep
model = torch.nn.Linear(2, 2)
def make():
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return lockstep.Trainer(model, optimizer, torch.nn.MSELoss(), 8, precision="bfloat16")
make()
"""
    )
    ended = here("run", "-np", workers, "--quiet", program)
    assert ended.returncode == 2
    assert ended.stderr.splitlines() == [
        f"lockstep run: error: {program}:6 in make: precision: expected fp32, bf16 or fp16, got "
        "'bfloat16'. Did you mean bf16?"
    ]


def test_what_ranks_leave_behind_may_clear_up_and_is_named(
    tmp_path: Path, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when all has gone well. It may be a program that others use, which its user has
    forgotten.
    """
    monkeypatch.setattr("lockstep.launcher.host_workers.TERM_GRACE_S", 0.5)
    program = write(
        tmp_path,
        """
        done = Path(sys.argv[1], "done")
        polite = f"trap 'rm {done}; exit' TERM; touch {done}; while true; do sleep 0.05; done"
        stubborn = "trap '' TERM; while true; do sleep 0.05; done"
        words = ["sh", "-c", stubborn if rank else polite]
        child = subprocess.Popen(words, start_new_session=True, stderr=subprocess.DEVNULL)
        Path(sys.argv[1], f"{rank}").write_text(str(child.pid))
        while not done.exists():
            time.sleep(0.01)
        """,
    )
    ended = here("run", "-np", 2, "--quiet", program, tmp_path)
    polite, stubborn = (int((tmp_path / rank).read_text()) for rank in "01")
    assert ended.returncode == 0
    assert not (tmp_path / "done").exists()
    (told,) = ended.stderr.splitlines()
    assert told.startswith("lockstep: ended processes that the ranks left running: ")
    assert f"{polite} sh" in told and f"{polite} sh (killed)" not in told
    assert f"{stubborn} sh (killed)" in told
    wait_until_gone([polite, stubborn], 10.0)


def test_what_a_failed_attempt_has_left_is_gone_when_the_next_one_starts(
    tmp_path: Path, here: Here
) -> None:
    program = write(
        tmp_path,
        """
        left = Path(sys.argv[1], "left")
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            child = subprocess.Popen(["sleep", "600"], start_new_session=True)
            left.write_text(str(child.pid))
            sys.exit(3)
        stat = Path("/proc", left.read_text(), "stat")
        assert not stat.exists() or stat.read_text().split()[2] == "Z"
        """,
    )
    ended = here("run", "-np", 1, "--restarts", 1, "--quiet", program, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "lockstep: ended processes that the ranks left running: " in ended.stderr


def test_a_job_without_orphan_processes_prints_no_message_about_them(
    tmp_path: Path, here: Here
) -> None:
    program = write(
        tmp_path, "subprocess.Popen(['sleep', '0.1'])"
    )  # it is about to leave by itself
    assert here("run", "-np", 2, "--quiet", program) == (0, "", "")


def test_a_trainer_saves_after_ctrl_c_however_long_it_takes(tmp_path: Path) -> None:
    program = write(
        tmp_path,
        """
        from lockstep.training.stop_signals import StopSignals
        with StopSignals() as stop:
            Path(sys.argv[1], f"{rank}").touch()
            while stop.received is None:
                time.sleep(0.01)
            time.sleep(3)  # longer than programs get that do not ask for time
            print("saved", flush=True)
        """,
    )
    folder = tmp_path / "there"
    folder.mkdir()
    with warm_python.popen(["-m", "lockstep", "run", "-np", 2, program, folder]) as launcher:
        wait_for(folder, 2)
        launcher.send_signal(signal.SIGINT)
        assert sorted(launcher.communicate(timeout=DEADLINE)[0].splitlines()) == [
            "[0] saved",
            "[1] saved",
        ]
        assert launcher.returncode == 130


def test_all_ranks_are_started_afresh_when_one_fails(tmp_path: Path, here: Here) -> None:
    program = write(
        tmp_path,
        """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        if attempt == 0 and rank == 1:
            raise RuntimeError("the first time")
        total = torch.ones(1)
        dist.all_reduce(total)
        print(f"attempt {attempt}: {total.item()}")
        """,
    )
    ended = here("run", "-np", 2, "--restarts", 1, program)
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == ["[0] attempt 1: 2.0", "[1] attempt 1: 2.0"]
    assert "restarting the workers after rank 1: RuntimeError: the first time" in ended.stderr


def test_two_launchers_on_one_host_run_one_job(tmp_path: Path) -> None:
    program = write(
        tmp_path,
        """
        import torch, lockstep
        comm = lockstep.init()
        print(comm.rank, comm.nodes, comm.allreduce(torch.tensor([rank + 1.0])).item())
        """,
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["-m", "lockstep", "run", "--no-prefix", "-q", "-np", 1, "--master-port", port]
    by_hand = [*words, "--nnodes", 2, "--node-rank", 0, "--master-addr", "127.0.0.1", program]
    placed = {
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2",
    }
    by_scheduler = [*words, "--nodes", "auto", program]
    with (
        warm_python.popen(by_hand) as first,
        warm_python.popen(by_scheduler, env={**os.environ, **placed}) as second,
    ):
        outputs = [node.communicate(timeout=DEADLINE) for node in (first, second)]
    assert outputs == [("0 2 3.0\n", ""), ("1 2 3.0\n", "")]


# --- bad input
# ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nothing.py"], "script: expected an existing Python file"),
        (["-np", "0", "x.py"], "-np: expected a whole number from 1 to"),
        (
            ["-np", "2", "--debug-rank", "2", __file__],
            "--debug-rank: expected a rank from 0 to 1, got 2",
        ),
        (
            ["--start-method", "fork", "x.py"],
            "--start-method: expected forkserver or spawn, got 'fork'",
        ),
        (
            ["-H", "a:2", "--hostfile", "b", "x.py"],
            "--hostfile: expected either -H or --hostfile, got both",
        ),
        (
            ["-H", "a:2,b:1", "-np", "4", "x.py"],
            "-np: expected at most 3, the slots of a:2, b:1, got 4",
        ),
        (["--nodes", "auto", "x.py"], "--nodes: expected a node of SkyPilot, "),
        (
            ["--nodes", "all", "x.py"],
            "--nodes: expected auto, or a whole number from 1 to 65536, got 'all'",
        ),
        (
            ["--nodes", "auto", "--node-rank", "1", "x.py"],
            "--node-rank: expected not to be given with --nodes auto",
        ),
        (
            ["--nnodes", "2", "x.py"],
            "--master-addr: expected the name or address of the first host",
        ),
        (
            ["--nnodes", "2", "--node-rank", "2", "--master-addr", "a", "x.py"],
            "--node-rank: expected a number from 0",
        ),
        (["--hots", "a", "x.py"], "--hosts"),
    ],
)
def test_bad_input_is_one_line_that_names_it(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *words]) == 2
    text = capsys.readouterr().err
    assert said in text and len(text.splitlines()) == 1


# --- a debugger in one rank
# ---------------------------------------------------------------------------------


def test_one_rank_may_have_the_terminal_while_the_others_wait(tmp_path: Path) -> None:
    program = write(
        tmp_path,
        """
        from datetime import timedelta
        import torch, torch.distributed as dist
        dist.init_process_group("gloo", timeout=timedelta(seconds=2))
        total = torch.tensor([float(rank)])
        if rank == 1:
            breakpoint()
        dist.all_reduce(total)
        print(f"sum {total.item()}")  # at once: the other rank writes to the same terminal
        """,
    )
    child, terminal = pty.fork()
    if child == 0:
        os.execv(sys.executable, command("-np", 2, "--debug-rank", 1, program))
    try:
        seen = read_until(terminal, "(Pdb) ")
        time.sleep(3)  # longer than the program lets a collective wait
        os.write(terminal, b"total[0] = 41\nc\n")
        seen += read_until(terminal, "")
    finally:
        os.close(terminal)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == 0, seen
    assert (
        "\r\nsum 41.0" in seen and "] \x1b[0m" not in seen
    )  # the rank at the terminal has no mark
    assert "sum 41.0" in seen.partition("[0]")[2]


def read_until(terminal: int, text: str) -> str:
    """What is shown up to `text`, or to the end where it is empty."""
    seen = b""
    deadline = time.monotonic() + DEADLINE
    while not text or text.encode() not in seen:
        assert time.monotonic() < deadline, seen
        try:
            data = os.read(terminal, 1 << 16) if select.select([terminal], [], [], 0.1)[0] else None
        except OSError:  # what a terminal gives when its last program has ended
            data = b""
        if data == b"":
            assert not text, seen
            break
        seen += data or b""
    return seen.decode(errors="replace")
