"""What the doctor says about what it finds, on hosts that are simulated."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep import devices, environment
from lockstep.doctor import backends, remote, this_host
from lockstep.doctor.findings import Problem, Section, as_json
from lockstep.hosts import Host
from lockstep.launcher.options import JobOptions

HERE = {"python": "3.11.7", "torch": "2.13.0", "lockstep": "0.1.0"}


def text_of(section: Section, name: str) -> str:
    return next(fact.text for fact in section.facts if fact.name == name)


def is_good(section: Section, name: str) -> bool | None:
    return next(fact.good for fact in section.facts if fact.name == name)


def fixes(section: Section) -> str:
    return " | ".join(f"{problem.what}: {problem.fix}" for problem in section.problems)


def test_a_report_for_programs() -> None:
    section = Section("a")
    section.add("x", "1")
    section.add("y", "2", Problem("bad", "Do this."))
    assert as_json([section, Section("b", problems=[Problem("worse", "Do that.")])]) == {
        "sections": {
            "a": {"x": {"text": "1", "good": None}, "y": {"text": "2", "good": False}},
            "b": {},
        },
        "problems": [{"what": "bad", "fix": "Do this."}, {"what": "worse", "fix": "Do that."}],
    }


# --- this host
# ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (64 << 20, "64 MiB"),
        (3 << 29, "1.5 GiB"),
        (250 << 30, "250 GiB"),
        (1 << 41, "2.0 TiB"),
    ],
)
def test_sizes(count: int, text: str) -> None:
    assert this_host.size(count) == text


def test_a_small_or_full_shared_memory_is_to_be_fixed() -> None:
    small, full = this_host._small_shm(64 << 20, 64 << 20), this_host._small_shm(8 << 30, 1 << 20)
    assert small is not None
    assert "--shm-size" in small.fix
    assert full is not None
    assert "nearly full" in full.what
    assert this_host._small_shm(8 << 30, 1 << 30) is None


def test_few_open_files_and_little_locked_memory_are_to_be_fixed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    limits = {
        this_host.resource.RLIMIT_NOFILE: (256, 4096),
        this_host.resource.RLIMIT_MEMLOCK: (8 << 20, 8 << 20),
    }
    monkeypatch.setattr(this_host.resource, "getrlimit", limits.__getitem__)
    section = Section("host")
    this_host._add_limits(section)
    assert (
        "a process may open 256 files only: Run `ulimit -n 1024` before (at most 4096)."
        in fixes(section)
    )
    assert ("memlock" in fixes(section)) == this_host.INFINIBAND.is_dir()
    monkeypatch.setattr(this_host, "INFINIBAND", tmp_path)
    section = Section("host")
    this_host._add_limits(section)
    assert "InfiniBand needs locked memory, of which 8 MiB is allowed" in fixes(section)
    unlimited = (this_host.resource.RLIM_INFINITY,) * 2
    monkeypatch.setattr(this_host.resource, "getrlimit", lambda which: unlimited)
    section = Section("host")
    this_host._add_limits(section)
    assert (section.problems, section.facts) == ([], [])


def test_a_memory_file_that_does_not_work_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "memfd" not in [fact.name for fact in this_host.examine_host().facts]
    monkeypatch.setattr(this_host, "_memfd_works", lambda: False)
    assert "uses files in /dev/shm" in text_of(this_host.examine_host(), "memfd")


def test_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "usable_cores", lambda: 6)
    monkeypatch.setattr(this_host.os, "cpu_count", lambda: 64)
    monkeypatch.setattr(environment, "variables", lambda: {"OMP_NUM_THREADS": "1"})
    section = Section("host")
    this_host._add_cores(section)
    assert text_of(section, "cores") == (
        "6 usable of 64 (affinity, or the container's quota); OMP_NUM_THREADS=1 is set"
    )


# --- devices
# ------------------------------------------------------------------------------------------------


def fake_torch(
    cuda: str | None, gpus: int = 0, busy: Callable[[int], int] | None = None, memory: Any = None
) -> Any:
    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0)
    gpu = SimpleNamespace(
        is_available=lambda: gpus > 0,
        device_count=lambda: gpus,
        get_device_properties=lambda index: properties,
        mem_get_info=memory or (lambda index: (130 << 30, 140 << 30)),
        utilization=busy or (lambda index: 1 // 0),
    )
    mps = SimpleNamespace(mps=SimpleNamespace(is_available=lambda: False))
    return SimpleNamespace(
        cuda=gpu, backends=mps, version=SimpleNamespace(cuda=cuda), __version__="2.13.0"
    )


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file that NVIDIA's driver has its version in."""
    path = tmp_path / "version"
    path.write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23\nGCC version: "
        "12.2.0\n"
    )
    monkeypatch.setattr(this_host, "_DRIVER", path)
    return path


def devices_with(
    torch: Any, monkeypatch: pytest.MonkeyPatch, accelerator: str | None = None
) -> Section:
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(devices, "accelerator", lambda: accelerator)
    return this_host.examine_devices()


def test_gpus_with_memory_load_and_driver(monkeypatch: pytest.MonkeyPatch, driver: Path) -> None:
    section = devices_with(fake_torch("12.8", 2, busy=lambda index: 37), monkeypatch)
    assert (
        text_of(section, "cuda:1")
        == "NVIDIA H200, 10 GiB used of 140 GiB, 37 % busy, capability 9.0"
    )
    assert text_of(section, "driver") == "NVIDIA 570.86.15"
    assert fixes(section) == ""
    without = devices_with(fake_torch("12.8", 1), monkeypatch)
    assert text_of(without, "cuda:0") == "NVIDIA H200, 10 GiB used of 140 GiB, capability 9.0"


def test_a_gpu_that_cannot_be_used_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, driver: Path
) -> None:
    def memory(index: int) -> tuple[int, int]:
        raise RuntimeError("CUDA error: out of memory\nmore")

    section = devices_with(fake_torch("12.8", 1, memory=memory), monkeypatch)
    assert "cuda:0 cannot be used: CUDA error: out of memory: Look for other programs" in fixes(
        section
    )
    assert "built without CUDA: Install a build" in fixes(
        devices_with(fake_torch(None), monkeypatch)
    )
    assert "torch (CUDA 12.8) cannot use it: Check CUDA_VISIBLE" in fixes(
        devices_with(fake_torch("12.8"), monkeypatch)
    )


def test_other_accelerators_are_named(monkeypatch: pytest.MonkeyPatch, driver: Path) -> None:
    driver.unlink()
    assert (
        text_of(devices_with(fake_torch(None), monkeypatch, "mps"), "mps")
        == "Apple GPU, for one worker"
    )
    monkeypatch.setattr(devices, "count", lambda kind: 2)
    monkeypatch.setattr(devices, "name_of", lambda device: f"the one {device}")
    torch_with_devices = fake_torch(None)
    torch_with_devices.device = lambda kind, index: f"{kind} {index}"
    assert text_of(devices_with(torch_with_devices, monkeypatch, "npu"), "npu:1") == "the one npu 1"


def test_no_gpu_is_nothing_to_fix(monkeypatch: pytest.MonkeyPatch, driver: Path) -> None:
    driver.unlink()
    section = devices_with(fake_torch(None), monkeypatch)
    assert (fixes(section), text_of(section, "GPU")) == (
        "",
        "none that torch can use; workers compute on the CPU",
    )


# --- versions, network, job
# ---------------------------------------------------------------------------------


def test_old_versions_are_to_be_fixed() -> None:
    assert this_host._too_old("torch", "2.13.0+cpu") is this_host._too_old("numpy", "1.0") is None
    old = this_host._too_old("torch", "2.8.1")
    assert old == Problem("torch is 2.8.1", "Install torch 2.10 or newer, as Lockstep needs it.")


def test_a_name_that_cannot_be_looked_up_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise OSError

    monkeypatch.setattr(this_host.socket, "getaddrinfo", fail)
    assert "cannot resolve its own name" in fixes(this_host.examine_network())


def test_a_slow_name_lookup_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 5.0])
    monkeypatch.setattr(this_host, "time", SimpleNamespace(monotonic=lambda: next(times)))
    monkeypatch.setattr(
        this_host.socket, "getaddrinfo", lambda *arguments: [(0, 0, 0, "", ("10.0.0.2", 0))]
    )
    assert "takes 5.0 s: Add a line" in fixes(this_host.examine_network())


STEP = {
    "SLURM_JOB_ID": "70",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NODELIST": "n[1-2]",
}
MPICH = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}


@pytest.mark.parametrize(
    ("variables", "launcher", "rendezvous"),
    [
        (STEP, "slurm", "at n1:16790, the first node of the step"),
        (MPICH, "mpich", "on this host, at a port that rank 0 publishes"),
        (
            {**MPICH, "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            "mpich",
            "at MASTER_ADDR and MASTER_PORT: a:1",
        ),
    ],
)
def test_what_init_would_do(
    variables: dict[str, str], launcher: str, rendezvous: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    section = this_host.examine_job()
    assert (text_of(section, "launcher"), text_of(section, "rendezvous"), fixes(section)) == (
        launcher,
        rendezvous,
        "",
    )


def test_what_init_would_refuse_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    assert "WORLD_SIZE: expected a whole number, got nothing" in fixes(this_host.examine_job())


# --- backends
# -----------------------------------------------------------------------------------------------


def test_the_text_about_a_backend() -> None:
    assert backends.describe("shm", "compiled", {"small": 5e-6, "large": 1.5e-3}) == (
        "4 B in    5 µs, 4 MiB in  1.5 ms, compiled",
        None,
    )
    assert backends.describe("nccl", "not tested: why", None) == ("not tested: why", None)
    text, problem = backends.describe("gloo", "", {"error": "no answer within 3 s"})
    assert text == "failed: no answer within 3 s"
    assert problem is not None
    assert "GLOO_SOCKET_IFNAME" in problem.fix


AS_ROOT = "mpiexec has detected an attempt to run as root."


@pytest.fixture
def mpi_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """mpi4py is the only backend, and its test fails as Open MPI does for root."""
    monkeypatch.setattr(backends, "_available_backends", lambda: {"mpi4py": (True, "")})
    monkeypatch.setattr(backends, "_test_launched", lambda *arguments: {})
    monkeypatch.setattr(backends, "_test_under_mpiexec", lambda *arguments: {"error": AS_ROOT})
    monkeypatch.setattr(backends, "_not_compiled", list)


def test_mpi_that_nobody_asked_for_is_nothing_to_fix(mpi_fails: None) -> None:
    section = backends.examine_backends(1)
    assert fixes(section) == ""
    assert is_good(section, "mpi4py") is None
    text = text_of(section, "mpi4py")
    assert text.startswith("does not work here: mpiexec has detected an attempt to run as root. ")
    assert 'Only transport="mpi4py" needs it. Run as another user; or, in a container, set' in text


@pytest.mark.parametrize(
    "variables",
    [{"LOCKSTEP_TRANSPORT": "mpi4py"}, MPICH, {"LOCKSTEP_TRANSPORT": "mpi4py", "RANK": "x"}],
)
def test_mpi_that_was_asked_for_is_to_be_fixed(
    mpi_fails: None, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    section = backends.examine_backends(1)
    assert is_good(section, "mpi4py") is False
    assert "two ranks cannot sum over mpi4py: mpiexec has detected" in fixes(section)


def test_mpi_that_was_asked_for_and_is_not_installed_is_to_be_fixed(
    mpi_fails: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "_available_backends", dict)
    assert fixes(backends.examine_backends(1)) == ""
    monkeypatch.setenv("LOCKSTEP_TRANSPORT", "mpi4py")
    assert "pip install 'lockstep-train[mpi]'" in fixes(backends.examine_backends(1))


PROGRAM = """
import json, os, subprocess, sys
path, *names = sys.argv[1:]
for name in names:
    if name == "hangs":
        subprocess.run("exec sleep 600 > alive", shell=True)
    if name == "dies":
        sys.exit("first line\\nthe reason")
    with open(path, "a") as file:
        file.write(json.dumps({"backend": name, "rank": os.environ.get("RANK")}) + "\\n")
"""


def test_a_trial_that_hangs_or_dies_is_given_up_and_the_others_are_tried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(backends, "_START", PROGRAM.replace("{", "{{").replace("}", "}}"))
    monkeypatch.setenv("RANK", "7")  # a trial is a job of its own
    os.mkfifo(tmp_path / "alive")
    reader = os.open(tmp_path / "alive", os.O_RDONLY | os.O_NONBLOCK)
    assert backends._test_launched(
        ["one", "dies", "two", "hangs", "three"], str(tmp_path), 1.5
    ) == {
        "one": {"rank": None},
        "dies": {"error": "the reason"},
        "two": {"rank": None},
        "hangs": {"error": "no answer within 1.5 s"},
        "three": {"rank": None},
    }
    assert select.select([reader], [], [], 20)[
        0
    ]  # nothing that it has started holds the other end any more
    os.close(reader)


def test_a_missing_compiled_extension_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_available_backends", lambda: {"shm": (False, "not compiled")})
    monkeypatch.setattr(backends, "_not_compiled", lambda: ["shm"])
    assert "Install a C compiler" in fixes(backends.examine_backends(1))
    monkeypatch.setattr(backends, "_not_compiled", list)
    assert fixes(backends.examine_backends(1)) == ""


# --- other hosts
# --------------------------------------------------------------------------------------------


def test_how_ssh_is_called(tmp_path: Path) -> None:
    job = JobOptions((), hosts=(Host("a", 4, "me"),), ssh_port=2222, identity=str(tmp_path / "key"))
    command = remote.login_command(job, job.hosts[0], "echo 'x'", 3)
    options = [
        "-p",
        "2222",
        "-i",
        str(tmp_path / "key"),
        "-o",
        "BatchMode=yes",
        "-o",
        "ConnectTimeout=3",
    ]
    assert command[:-1] == ["ssh", *options, "--", "me@a"]
    # the shell of the login, whichever it is, hands one word on to sh
    assert (
        subprocess.run(["sh", "-c", command[-1]], capture_output=True, text=True, check=True).stdout
        == "x\n"
    )


@pytest.fixture
def ssh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A stand-in for ssh, which runs this file of sh; $2 is the login, $3 the command."""
    path = tmp_path / "ssh"
    path.write_text('#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\n')
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return path


def test_a_host_with_the_same_versions_is_good(ssh: Path) -> None:
    ssh.write_text(ssh.read_text() + 'echo Welcome\nexec sh -c "$3"\n')
    section = remote.examine_hosts(JobOptions((), hosts=(Host("a", 2),)), 30)
    assert fixes(section) == ""
    assert is_good(section, "a") is True
    assert f"torch {this_host.versions()['torch']}" in text_of(section, "a")


@pytest.mark.parametrize(
    ("told", "fix"),
    [
        ("me@a: Permission denied (publickey).", "ssh-copy-id me@a"),
        ("ssh: connect to host a port 22: Connection refused", "Start sshd there"),
        ("ssh: Could not resolve hostname a: Name or service not known", "Check the name"),
        ("Host key verification failed.", "Log in once by hand (ssh me@a)"),
        (
            "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.",
            "ssh-keygen -R a.",
        ),
        ("sh: 1: python3: not found", "Try `ssh me@a python3 --version` by hand."),
    ],
)
def test_a_host_that_cannot_be_reached_is_a_problem(ssh: Path, told: str, fix: str) -> None:
    ssh.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{told}\nEND\nexit 255\n")
    section = remote.examine_hosts(JobOptions((), hosts=(Host("a", 1, "me"),)), 30)
    assert is_good(section, "a") is False
    assert fix in fixes(section)
    assert told.splitlines()[-1] in fixes(section)


def test_a_host_without_the_folder_or_the_python_of_the_job_cannot_run_it(
    ssh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As `lockstep run` would find out: another Python there is of no use to it."""
    ssh.write_text(ssh.read_text() + 'exec sh -c "$3"\n')
    hosts = (Host("a"),)
    missing = remote.examine_hosts(JobOptions((), hosts=hosts, remote_python="/no/python"), 30)
    assert "a has no Python at /no/python" in fixes(missing) and "--remote-python" in fixes(missing)
    named = remote.examine_hosts(JobOptions((), hosts=hosts, remote_python=sys.executable), 30)
    assert fixes(named) == ""
    here_alone = tmp_path / "here alone"
    monkeypatch.setattr(remote.Path, "cwd", lambda: here_alone)
    elsewhere = remote.examine_hosts(JobOptions((), hosts=hosts), 30)
    assert f"a has no folder {here_alone}" in fixes(elsewhere)
    assert is_good(elsewhere, "a") is False


def test_nobody_logs_in_on_this_host(ssh: Path) -> None:
    ssh.write_text("#!/bin/sh\nexit 255\n")
    section = remote.examine_hosts(JobOptions((), hosts=(Host("localhost", 2),)), 30)
    assert fixes(section) == ""
    assert text_of(section, "localhost").startswith("2 slots on ")


@pytest.mark.parametrize(
    "answer", ["[1]", "{}", '{"python": 3}', '{"python": "3.11", "cores": "many"}', "{"]
)
def test_a_damaged_answer_of_a_host_is_a_problem(ssh: Path, answer: str) -> None:
    ssh.write_text(f"#!/bin/sh\necho 'lockstep-doctor {answer}'\n")
    section = remote.examine_hosts(JobOptions((), hosts=(Host("a", 1, "me"),)), 30)
    assert is_good(section, "a") is False
    assert "a: the answer of its Python is damaged" in fixes(section)


def test_a_host_that_does_not_answer_is_skipped(ssh: Path) -> None:
    ssh.write_text("#!/bin/sh\nexec sleep 600\n")
    section = remote.examine_hosts(JobOptions((), hosts=(Host("a"),)), 0.2)
    assert "a: no answer within 0.4 s" in fixes(section)


def test_without_ssh_there_is_something_to_fix(ssh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ssh.unlink()
    monkeypatch.setenv("PATH", str(ssh.parent))
    assert "openssh-client" in fixes(remote.examine_hosts(JobOptions((), hosts=(Host("a"),))))


def test_other_versions_are_problems() -> None:
    there = {"python": "3.11.7", "torch": "2.9.0", "cores": 64}
    text, problems = remote.compare(Host("a", 2), there, HERE)
    assert text == "2 slots on 64 cores: python 3.11.7, torch 2.9.0, lockstep missing"
    assert [problem.what for problem in problems] == [
        "a has torch 2.9.0, this host 2.13.0",
        "a has no lockstep, this host 0.1.0",
    ]
    assert remote.compare(Host("a"), json.loads(json.dumps(HERE)), HERE)[1] == []
    # the launcher does not mind another release of the same Python
    assert remote.compare(Host("a"), {**HERE, "python": "3.11.9"}, HERE)[1] == []
    assert len(remote.compare(Host("a"), {**HERE, "python": "3.12.0"}, HERE)[1]) == 1


def test_the_line_of_an_error_output_that_says_what_went_wrong() -> None:
    framed = (
        "------\nmpiexec has detected an attempt to run as root.\n\nRunning as root is "
        "discouraged.\n------\n"
    )
    assert backends.error_line(framed) == "mpiexec has detected an attempt to run as root."
    assert (
        backends.error_line("Traceback (most recent call last):\n  line\nValueError: 3\n")
        == "ValueError: 3"
    )
    assert backends.error_line("") == ""
