"""Elastic jobs on several hosts that are killed, cut off or told to leave: network namespaces with
a real sshd.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from support import warm_python
from support.elastic_program import fingerprint, rows, write_program
from support.hosts import or_skip
from support.remote_python import remote_python
from support.sshd import Hosts, make_hosts

DEADLINE = 90.0


def write(folder: Path, epochs: int, shared: bool) -> Path:
    return write_program(folder, epochs, folder / "run" if shared else None)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory, warm: None) -> Iterator[Path]:
    """The Python of the hosts."""
    with remote_python(tmp_path_factory.mktemp("python")) as program:
        yield program


@pytest.fixture(scope="module")
def three_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Alpha, beta and gamma."""
    with or_skip(make_hosts(3, tmp_path_factory.mktemp("hosts"))) as found:
        yield found


@pytest.fixture
def hosts(three_hosts: Hosts, python: Path) -> Iterator[Hosts]:
    """The hosts, on which the test leaves no processes, and no folders but those of hosts that were
    killed.
    """
    three_hosts.killed.clear()
    _private.clear()
    yield three_hosts
    try:
        wait_until(
            lambda: not left(three_hosts) and len(folders()) <= len(three_hosts.killed),
            lambda: f"{left(three_hosts)} {folders()}",
        )
        assert _private
    finally:
        for name in three_hosts.namespaces:
            three_hosts.link(name, "up")
            three_hosts.kill(name)


def left(hosts: Hosts) -> list[str]:
    return [f"{name}: {program}" for name in hosts.namespaces for program in hosts.programs(name)]


_private: set[str] = set()
"""The names of the launchers' private folders that were seen, with their sockets and what workers
share.
"""


def note_folders(hosts: Hosts) -> None:
    for process in hosts.servers.values():
        sockets = Path(f"/proc/{process}/net/unix").read_text()
        _private.update(re.findall(r"/(lockstep-[^/\s]+)/control", sockets))


def folders() -> set[str]:
    """Those that are left: tests that run at the same time have their own."""
    found = {
        path.name
        for path in (*Path("/tmp").glob("lockstep-*"), *Path("/dev/shm").glob("lockstep*/*"))
    }
    return found & _private


def wait_until(is_done: object, describe: object) -> None:
    assert callable(is_done) and callable(describe)
    deadline = time.monotonic() + DEADLINE
    while not is_done():
        assert time.monotonic() < deadline, describe()
        time.sleep(0.02)


@dataclass
class Job:
    """A launcher that was typed in, and what it and those that go on without it have written."""

    process: subprocess.Popen[bytes]
    folder: Path
    name: str
    hosts: Hosts

    def out(self) -> str:
        """Standard output, and the files of launchers that go on without the typed one."""
        return self._read(f"out-{self.name}") + "".join(
            path.read_text() for path in self.folder.glob("lockstep-*.log")
        )

    def err(self) -> str:
        return self._read(f"err-{self.name}")

    def _read(self, name: str) -> str:
        return (self.folder / name).read_text()

    def wait_for(self, pattern: str, since: int = 0) -> str:
        """Wait until a line that it writes has `pattern`, after the first `since` characters."""
        wait_until(
            lambda: re.search(pattern, self.out()[since:]), lambda: f"no {pattern!r}:\n{self}"
        )
        note_folders(self.hosts)
        return self.out()

    def wait_for_error(self, pattern: str) -> None:
        """Wait until it has written `pattern` to standard error."""
        wait_until(lambda: re.search(pattern, self.err()), lambda: f"no {pattern!r}:\n{self}")

    def end(self) -> int:
        """Wait for its end; returns the exit code."""
        wait_until(lambda: self.process.poll() is not None, lambda: f"it does not end:\n{self}")
        return self.process.returncode

    def __str__(self) -> str:
        return f"{self.out()[-9000:]}\n--- err\n{self.err()[-9000:]}"


Start = Callable[..., AbstractContextManager[Job]]


@pytest.fixture
def lockstep(hosts: Hosts, python: Path, tmp_path: Path) -> Start:
    """Starts `lockstep` with the given words, on the host `on` or on this one."""

    @contextmanager
    def started(*words: object, on: str = "") -> Iterator[Job]:
        command = [
            *(hosts.inside(on) if on else ()),
            str(python),
            "-m",
            "lockstep",
            *map(str, words),
        ]
        variables = {**os.environ, "PATH": hosts.path, "OMP_NUM_THREADS": "1"}
        name = on or "typed"
        with (
            (tmp_path / f"out-{name}").open("wb") as out,
            (tmp_path / f"err-{name}").open("wb") as err,
            subprocess.Popen(
                command, cwd=tmp_path, env=variables, stdout=out, stderr=err
            ) as process,
        ):
            try:
                yield Job(process, tmp_path, name, hosts)
            finally:
                process.kill()

    return started


@pytest.fixture
def start(lockstep: Start, python: Path) -> Start:
    """Starts `lockstep run --elastic` with the given words."""

    def started(limits: str, *words: object, on: str = "") -> AbstractContextManager[Job]:
        return lockstep("run", "--elastic", limits, "--remote-python", python, *words, on=on)

    return started


def assert_undisturbed(job: Job, shared: bool) -> None:
    """The training has ended once, as one worker alone would have done it."""
    epochs, bits = fingerprint(job.out())
    alone = job.folder / "alone"
    alone.mkdir()
    program = write(alone, int(epochs), shared)
    done = warm_python.run([program], alone, {**os.environ, "OMP_NUM_THREADS": "1"})
    assert fingerprint(done.stdout) == (epochs, bits), done.stderr
    if shared:
        assert (job.folder / "run" / "metrics.csv").exists(), (
            f"{sorted(job.folder.rglob('*'))}\n{job}"
        )
        assert rows(job.folder / "run") == rows(alone / "run")


def enough(folder: Path) -> None:
    """Let the training end with the epoch in progress."""
    (folder / "enough").touch()


@contextmanager
def by_hand(hosts: Hosts, start: Start, program: Path) -> Iterator[tuple[Job, Job]]:
    """The launchers of a job with a worker each, typed in on alpha and on beta."""
    words = ("1:2", "--nnodes", 2, "--master-addr", hosts.addresses["alpha"], "-np", 1)
    with (
        start(*words, "--node-rank", 1, program, on="beta") as other,
        start(*words, "--node-rank", 0, program, on="alpha") as first,
    ):
        yield first, other


def launcher(hosts: Hosts, name: str) -> psutil.Process:
    """The launcher on a host."""
    for program in hosts.programs(name):
        words, parent = program.cmdline(), program.parent()
        if "lockstep" in words and (parent is None or "lockstep" not in parent.cmdline()):
            return program
    raise AssertionError(left(hosts))


def test_hosts_are_killed_one_after_another_the_first_with_the_typed_launcher(
    hosts: Hosts, start: Start, tmp_path: Path
) -> None:
    program = write(tmp_path, 1000, shared=True)
    with start("1:3", "-H", "alpha,beta,gamma", "-np", 3, program, on="alpha") as job:
        job.wait_for(r"step 4 of 3")
        hosts.kill("alpha")
        job.wait_for(r"step \d+ of 2")
        job.wait_for("alpha was lost")
        hosts.kill("beta")
        job.wait_for(r"step \d+ of 1")
        job.wait_for("beta was lost")
        enough(tmp_path)
        job.wait_for("fingerprint")
        wait_until(lambda: not left(hosts), lambda: left(hosts))
    assert_undisturbed(job, shared=True)


def test_the_majority_goes_on_without_a_host_that_is_cut_off_and_joins_again(
    hosts: Hosts, start: Start, tmp_path: Path
) -> None:
    program = write(tmp_path, 1000, shared=False)
    with start("1:3", "-H", "alpha,beta,gamma", "-np", 3, program) as job:
        job.wait_for(r"step 4 of 3")
        hosts.link("gamma", "down")
        seen = job.wait_for(r"step \d+ of 2")
        hosts.link("gamma", "up")
        seen = job.wait_for(
            r"\[0\] step \d+ of 3", since=len(seen)
        )  # gamma's own lines may be late
        hosts.kill("alpha")
        job.wait_for(r"step \d+ of 2", since=len(seen))
        enough(tmp_path)
        assert job.end() == 0, job
    assert_undisturbed(job, shared=False)
    assert "the others went on without gamma, which joins them again" in job.err()
    assert "gamma joined the job" in job.err()


def test_of_two_hosts_that_do_not_reach_each_other_one_is_left_out_until_they_do(
    hosts: Hosts, start: Start, tmp_path: Path
) -> None:
    program = write(tmp_path, 2000, shared=False)
    with start("1:3", "-H", "alpha,beta,gamma", "-np", 3, program) as job:
        job.wait_for(r"step 4 of 3")
        hosts.cut("beta", "gamma")
        try:
            # which of the two joined last is open
            job.wait_for_error(
                r"(beta|gamma) and (beta|gamma) do not reach each other; the job goes on without \2"
            )
            seen = job.wait_for(r"\[0\] step \d+ of 2")
        finally:
            hosts.cut("beta", "gamma", "del")
        job.wait_for(r"\[0\] step \d+ of 3", since=len(seen))
        enough(tmp_path)
        assert job.end() == 0, job
    assert_undisturbed(job, shared=False)


def test_a_host_that_was_cut_off_ends_when_the_others_have_finished(
    hosts: Hosts, start: Start, tmp_path: Path
) -> None:
    program = write(tmp_path, 1000, shared=False)
    with start("1:3", "-H", "alpha,beta,gamma", "-np", 3, program) as job:
        job.wait_for(r"step 4 of 3")
        hosts.link("gamma", "down")
        seen = job.wait_for(r"step \d+ of 2")
        hosts.link("gamma", "up")
        hosts.kill("alpha")  # while gamma may be about to join
        job.wait_for(r"step \d+ of [12]", since=len(seen))
        enough(tmp_path)
        assert job.end() == 0, job
    assert_undisturbed(job, shared=False)


def test_a_host_that_waits_for_one_that_has_ended_ends_as_well(
    hosts: Hosts, start: Start, tmp_path: Path
) -> None:
    program = write(tmp_path, 1000, shared=False)
    with by_hand(hosts, start, program) as (first, other):
        first.wait_for(r"step 4 of 2")
        hosts.link("beta", "down")
        other.wait_for_error("the training is paused on beta, because alpha may go on")
        hosts.kill("alpha")
        hosts.link("beta", "up")
        assert other.end() == 1, other
    assert "the other hosts have ended while beta was cut off, and may have finished" in other.err()


def test_one_of_two_hosts_goes_on_by_a_claim_on_shared_storage(
    hosts: Hosts, start: Start, tmp_path: Path
) -> None:
    program = write(tmp_path, 1000, shared=True)
    with start("1:2", "-H", "alpha,beta", "-np", 2, program) as job:
        job.wait_for(r"step 8 of 2")
        hosts.link("beta", "down")
        wait_until(lambda: len(set(claims(tmp_path))) == 1, lambda: f"no claim:\n{job}")
        history = len(rows(tmp_path / "run"))
        wait_until(lambda: len(rows(tmp_path / "run")) > history, lambda: f"no rows:\n{job}")
        hosts.link("beta", "up")
        job.wait_for_error("joined the job")
        job.wait_for(r"step \d+ of 2", since=len(job.out()))
        enough(tmp_path)
        assert job.end() == 0, job
    assert_undisturbed(job, shared=True)
    assert re.search("the others went on without (alpha|beta), which joins them again", job.err())


def claims(folder: Path) -> list[Path]:
    """The views that one host has claimed, without the other ones."""
    return list((folder / "run" / ".hosts").glob("job-*/view-*.json"))


def test_two_hosts_without_shared_storage_wait_for_each_other(
    hosts: Hosts, start: Start, tmp_path: Path
) -> None:
    program = write(tmp_path, 1000, shared=False)
    with by_hand(hosts, start, program) as (first, other):
        first.wait_for(r"step 4 of 2")
        hosts.link("beta", "down")
        first.wait_for_error("the training is paused on alpha, because beta may go on")
        other.wait_for_error("the training is paused on beta, because alpha may go on")
        seen = len(first.out())
        hosts.link("beta", "up")
        first.wait_for(r"step \d+ of 2", since=seen)
        enough(tmp_path)
        assert (first.end(), other.end()) == (0, 0), f"{first}\n{other}"
    assert_undisturbed(first, shared=False)
    assert "of 1\n" not in first.out() + other.out()


HOROVOD = """
import os, time, torch, horovod.torch as hvd
hvd.init()
state = hvd.elastic.ObjectState(done=0)

@hvd.elastic.run
def train(state):
    print("begin at", state.done, "as", hvd.rank(), "of", hvd.size(), flush=True)
    while not hvd.broadcast_object(os.path.exists("enough")):
        total = hvd.allreduce(torch.ones(1), op=hvd.Sum, name="ones").item()
        assert total == hvd.size(), total
        state.done += 1
        print("step", state.done, "of", hvd.size(), flush=True)
        time.sleep(0.02)
        state.commit()

train(state)
print("ended with", hvd.size(), flush=True)
"""


def test_a_horovod_program_goes_on_after_the_loss_of_the_first_host(
    hosts: Hosts, start: Start, tmp_path: Path
) -> None:
    program = tmp_path / "train.py"
    program.write_text(HOROVOD)
    with start("1:3", "--as-horovod", "-np", 3, "-H", "alpha:1,beta:1,gamma:1", program) as job:
        job.wait_for(r"step 9 of 3")
        seen = len(job.out())
        hosts.kill("alpha")
        job.wait_for(r"begin at \d+ as 0 of 2", seen)
        job.wait_for(r"step \d+ of 2", seen)
        enough(tmp_path)
        assert job.end() == 0, job
        assert job.out().count("ended with 2") == 2, job


def test_a_job_follows_the_hosts_of_a_script(hosts: Hosts, lockstep: Start, tmp_path: Path) -> None:
    program, script, listed = tmp_path / "train.py", tmp_path / "discover.sh", tmp_path / "hosts"
    program.write_text(HOROVOD)
    script.write_text(f"#!/bin/sh\ncat {listed}\n")
    script.chmod(0o700)
    listed.write_text("alpha:1\nbeta:1\n")
    words = ("--min-np", 1, "--max-np", 8, "--host-discovery-script", script, program)
    with lockstep("horovodrun", "-np", 2, *words) as job:
        job.wait_for(r"step 9 of 2")
        listed.write_text("beta:1\ngamma:2\nnowhere:1\n")
        job.wait_for(r"begin at \d+ as \d of 3")  # the first host leaves once another has come
        wait_until(lambda: not hosts.programs("alpha"), lambda: left(hosts))
        job.wait_for_error("nowhere is not added: hosts: expected a host that ssh reaches")
        seen = len(job.out())
        listed.write_text("gamma:1\nbeta:1\n")
        job.wait_for(r"begin at \d+ as 0 of 2", seen)
        listed.write_text("")
        job.wait_for_error("the hosts are not changed|beta, gamma would leave")
        seen = len(job.out())
        listed.write_text("gamma:1\nalpha:1\n")  # which has been there before
        job.wait_for(r"begin at \d+ as 0 of 2", seen)
        wait_until(lambda: not hosts.programs("beta"), lambda: left(hosts))
        enough(tmp_path)
        assert job.end() == 0, job
    assert job.out().count("ended with 2") == 2, job
    assert "lost" not in job.err() and "Traceback" not in job.err(), job


def test_a_host_is_told_to_leave_and_then_the_job_to_end(
    hosts: Hosts, start: Start, tmp_path: Path
) -> None:
    program = write(tmp_path, 1000, shared=True)
    with start("1:2", "-H", "alpha,beta", "-np", 2, program) as job:
        job.wait_for(r"step 4 of 2")
        launcher(hosts, "beta").terminate()
        job.wait_for(r"step \d+ of 1")
        wait_until(lambda: not hosts.programs("beta"), lambda: left(hosts))
        seen = job.out()
        job.wait_for(r"step \d+ of 1", since=len(seen))
        job.process.terminate()
        assert job.end() == 143, job
    err = job.err()
    assert "rank 1 has left; 1 worker goes on" in err
    assert "lost" not in err and "Traceback" not in err
    assert re.search(
        "stopped by SIGTERM after step .* saved .*/run/checkpoints/step-", err.splitlines()[-1]
    ), err


def test_all_workers_start_again_and_then_an_error_of_the_program_ends_the_job(
    hosts: Hosts, start: Start, tmp_path: Path
) -> None:
    program = write(tmp_path, 1000, shared=True)
    with start("1:2", "-H", "alpha,beta", "-np", 2, program) as job:
        seen = job.wait_for(r"step 8 of 2")  # two epochs, and a checkpoint
        pids = [int(pid) for pid in re.findall(r"pid (\d+)", seen)]
        for number in (signal.SIGSTOP, signal.SIGKILL):  # so that none goes on without the other
            for pid in pids:
                os.kill(pid, number)
        job.wait_for(r"step \d+ of 2", since=len(job.out()))
        (tmp_path / "raise").touch()
        assert job.end() == 1, job
    err, out = job.err(), job.out()
    assert err.count("all workers are started again, from the checkpoint") == 1, err
    assert int(re.findall(r"step (\d+) of", out[len(seen) :])[-1]) > 3
    assert err.count("Traceback (most recent call last)") == 1, err
    assert "lockstep run: error: rank 1 on beta: ValueError: of the program" in err, err
    assert err.count("\nValueError: of the program\n") == 1, err


def test_the_first_of_two_launchers_started_by_hand_leaves(
    hosts: Hosts, start: Start, tmp_path: Path
) -> None:
    program = write(tmp_path, 1000, shared=True)
    with by_hand(hosts, start, program) as (first, other):
        first.wait_for(r"step 4 of 2")
        first.process.terminate()
        other.wait_for(r"step \d+ of 1")
        assert first.end() == 0, first
        enough(tmp_path)
        assert other.end() == 0, other
    assert_undisturbed(other, shared=True)
    assert "lost" not in first.err() + other.err()
    assert "alpha has left; beta coordinates the job now" in other.err()
