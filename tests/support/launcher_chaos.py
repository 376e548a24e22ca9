"""Elastic jobs whose hosts are lost, leave and join at random: launchers on this machine, each of
which is a host.

Run as a program it tries many seeds: ``python tests/support/launcher_chaos.py 100 --first 0``.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from lockstep.elastic.control import request
from lockstep.errors import LockstepError
from lockstep.flight_recorder import jobs
from support import warm_python
from support.elastic_program import fingerprint, rows, write_program
from support.warm_python import WarmProcess

EPOCHS, VIRTUAL_WORKERS = 12, 8
STEPS = 4 * EPOCHS
LIMIT_S = 90.0
SAID = (
    "the job goes on|was lost|has left|joined|coordinates|paused|started again|waits for|others "
    "went on|have ended"
)


@dataclass(frozen=True)
class Fault:
    """What happens when the training has done `step` steps, to the `which`-th of the hosts that are
    left.

    "lose" kills a host's launcher with its workers, "launcher" the launcher alone, "worker" one of
    its workers, "workers" all of them at once; "stop" stops the launcher for a moment; "leave"
    tells it to leave; "join" adds a host; "resize" changes the number of workers.
    """

    step: int
    what: str
    which: int


@dataclass(frozen=True)
class Plan:
    """A job: its hosts, with so many workers each, its faults, whether all see its run folder, and
    its transport.
    """

    hosts: int
    workers: int
    shared: bool
    faults: tuple[Fault, ...]
    transport: str

    @classmethod
    def of(cls, seed: int) -> Plan:
        """Return the plan of a seed."""
        draw = random.Random(seed)
        kinds = [
            "lose",
            "lose",
            "lose",
            "launcher",
            "worker",
            "workers",
            "stop",
            "leave",
            "join",
            "join",
            "resize",
            "resize",
        ]
        steps = sorted(draw.randrange(STEPS - 8) for _ in range(draw.randrange(1, 6)))
        faults = tuple(Fault(step, draw.choice(kinds), draw.randrange(9)) for step in steps)
        hosts, workers, shared = draw.randrange(2, 5), draw.randrange(1, 3), draw.random() < 0.5
        return cls(hosts, workers, shared, faults, draw.choice(["shm", "gloo"]))


class Job:
    """A job under the faults of a plan."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan, self.folder = plan, folder
        self.program = write_program(
            folder, EPOCHS, folder / "run" if plan.shared else None, virtual_workers=VIRTUAL_WORKERS
        )
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = int(listener.getsockname()[1])
        self.lines: list[str] = []
        self.hosts: list[WarmProcess] = []
        self.readers: list[threading.Thread] = []
        self.lost: set[int] = set()  # by their index
        self.left: set[int] = set()
        # the workers that were killed, each with all that lived just before
        self.killed: dict[int, frozenset[int]] = {}
        self.begun = time.monotonic()

    def start(self, *words: object) -> None:
        """Start a launcher."""
        index = len(self.hosts)
        variables = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "LOCKSTEP_TRANSPORT": self.plan.transport,
        }
        process = warm_python.popen(["-m", "lockstep", *words], self.folder, variables)
        self.hosts.append(process)
        for stream in (process.stdout, process.stderr):
            thread = threading.Thread(target=self.read, args=(index, stream), daemon=True)
            thread.start()
            self.readers.append(thread)

    def read(self, index: int, stream: object) -> None:
        for line in stream:  # type: ignore[attr-defined]
            self.note(f"host {index}: {line.rstrip()}")

    def note(self, text: str) -> None:
        self.lines.append(f"{time.monotonic() - self.begun:.3f} {text}")

    @property
    def steps(self) -> int:
        found = [
            int(match[1])
            for line in list(self.lines)
            if (match := re.search(r" step (\d+) of ", line))
        ]
        return max(found, default=-1) + 1

    @property
    def running(self) -> list[int]:
        return [index for index, host in enumerate(self.hosts) if host.poll() is None]

    def run(self) -> str:
        """Run to the end; returns what is wrong, or ""."""
        try:
            return self._run()
        finally:
            for host in self.hosts:
                self.kill(host.pid)
                host.wait(20.0)
            for thread in self.readers:
                thread.join(5.0)
            for host in self.hosts:
                for stream in (host.stdout, host.stderr):
                    assert stream is not None
                    stream.close()

    def _run(self) -> str:
        plan, deadline = self.plan, time.monotonic() + LIMIT_S
        words = (
            "run",
            "--elastic",
            f"1:{VIRTUAL_WORKERS}",
            "--nnodes",
            plan.hosts,
            "--master-addr",
            "127.0.0.1",
        )
        for node in range(plan.hosts):
            self.start(
                *words,
                "--master-port",
                self.port,
                "-np",
                plan.workers,
                "--node-rank",
                node,
                self.program,
            )
        faults = list(plan.faults)
        while self.running:
            while faults and self.steps > faults[0].step:
                self.meet(faults.pop(0))
            time.sleep(0.005)
            if time.monotonic() > deadline:
                return f"it hangs: {[self.hosts[index].pid for index in self.running]} run"
        for thread in self.readers:
            thread.join(5.0)
        return self.check()

    def meet(self, fault: Fault) -> None:
        """Let a fault happen."""
        staying = [index for index in self.running if index not in self.left]
        if not staying:
            return
        index = staying[fault.which % len(staying)]
        process = psutil.Process(self.hosts[index].pid)
        self.note(f"--- {fault.what}{'' if fault.what == 'join' else f' host {index}'}")
        with suppress(psutil.NoSuchProcess):
            if fault.what == "lose":
                self.lost.add(index)
                self.kill(process.pid)
            elif fault.what == "launcher":
                self.lost.add(index)
                self.note_killed(workers_of(process))  # which end themselves
                process.kill()
            elif fault.what in ("worker", "workers"):
                self.kill_workers(process, 1 if fault.what == "worker" else None)
            elif fault.what == "resize":
                self.resize(process.pid, 1 + fault.which % VIRTUAL_WORKERS)
            elif fault.what == "stop":
                process.suspend()
                threading.Timer(0.1 + fault.which / 10, self.resume, [process.pid]).start()
            elif fault.what == "leave" and len(staying) > 1:
                self.left.add(index)
                process.terminate()
            elif fault.what == "join" and len(self.hosts) < 8:
                self.join(process.pid)

    def kill(self, pid: int) -> None:
        """Kill a process and all that it has started, as the loss of a host does."""
        with suppress(psutil.NoSuchProcess):
            tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
            suspend(tree)
            self.note_killed(tree)
            for process in tree:
                with suppress(psutil.NoSuchProcess):
                    process.kill()

    def resume(self, pid: int) -> None:
        """Let a stopped process go on."""
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    def kill_workers(self, launcher: psutil.Process, count: int | None) -> None:
        workers = workers_of(launcher)[:count]
        suspend(workers)
        self.note_killed(workers)
        for worker in workers:
            with suppress(psutil.NoSuchProcess):
                worker.kill()

    def note_killed(self, processes: list[psutil.Process]) -> None:
        """Note which of the processes that are about to be killed are workers that have not ended
        by themselves.
        """
        together = frozenset(
            worker.pid for index in self.running for worker in workers_of(self.hosts[index].pid)
        )
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                if process.pid in together and process.status() != psutil.STATUS_ZOMBIE:
                    self.killed[process.pid] = together

    def was_lost_with_all(self, worker: int) -> bool:
        """Return whether a worker was killed, and with it, or after it, all that lived then: nobody
        was left who could tell that the training was complete.
        """
        return worker in self.killed and self.killed[worker] <= self.killed.keys()

    def join(self, launcher: int) -> None:
        for answer in self.ask(launcher, "address"):
            self.start("join", answer.split()[-1], "-np", self.plan.workers)

    def resize(self, launcher: int, workers: int) -> None:
        for answer in self.ask(launcher, "resize", workers):
            self.note(f"    {answer}")

    def ask(self, launcher: int, what: str, number: int = 0) -> Iterator[str]:
        """Yield the answer of a launcher, unless it refuses or has just ended."""
        for job in jobs.find_jobs().values():
            if job.pid == launcher and job.control:
                with suppress(LockstepError):
                    yield request(job.control, what, number)

    # --- what has come out
    # ------------------------------------------------------------------------------------

    def check(self) -> str:
        """Return what is wrong."""
        staying = [
            index
            for index in range(len(self.hosts))
            if index not in self.lost | self.left and not self.may_fail(index)
        ]
        out = "\n".join(self.lines)
        if "fingerprint" not in out:
            return (
                ""
                if not staying
                else f"nobody has completed the training, though {staying} have not been lost"
            )
        *before, _ = re.findall(r"fingerprint .* of process (\d+)", out)
        if not all(self.was_lost_with_all(int(worker)) for worker in before):
            return "it has trained again what was complete"
        results = {fingerprint(line) for line in self.lines if "fingerprint" in line}
        if len(results) > 1:
            return f"another result after all workers were lost: {results}"
        ((epochs, bits),) = results
        if (epochs, bits) != (str(EPOCHS), undisturbed()):
            return f"another fingerprint after {epochs} epochs: {bits}"
        if self.plan.shared and rows(self.folder / "run") != undisturbed_rows():
            return "other rows in metrics.csv"
        if (self.folder / "run-2").exists():
            return "a second run folder"
        codes = {index: self.hosts[index].returncode for index in staying}
        failed = ", ".join(
            f"host {index} with {code}" for index, code in codes.items() if code != 0
        )
        return f"failed: {failed}" if failed else ""

    def may_fail(self, index: int) -> bool:
        """Return whether a host may fail: it wanted to join when the job was over."""
        said = [line for line in self.lines if f"host {index}: " in line]
        return index >= self.plan.hosts and not any("pid" in line for line in said)


def workers_of(launcher: psutil.Process | int) -> list[psutil.Process]:
    """Return the workers of a launcher that there are, those included whose end it has not seen."""
    workers = []
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(launcher) if isinstance(launcher, int) else launcher
        for child in process.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if child.name().startswith("lockstep rank"):
                    workers.append(child)
    return workers


def suspend(processes: list[psutil.Process]) -> None:
    """Stop processes that are about to be killed, so that none sees the end of another one, or ends
    by itself meanwhile.
    """
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.suspend()


_undisturbed: list[tuple[str, list[list[str]]]] = []


def _alone() -> tuple[str, list[list[str]]]:
    if not _undisturbed:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            program = write_program(folder, EPOCHS, folder / "run", virtual_workers=VIRTUAL_WORKERS)
            done = warm_python.run([program], folder, {**os.environ, "OMP_NUM_THREADS": "1"})
            _undisturbed.append((fingerprint(done.stdout)[1], rows(folder / "run")))
    return _undisturbed[0]


def undisturbed() -> str:
    """Return the fingerprint of one worker's run without faults."""
    return _alone()[0]


def undisturbed_rows() -> list[list[str]]:
    """Return the rows of that run's metrics.csv."""
    return _alone()[1]


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args(words)
    wrong = completed = 0
    try:
        for seed in range(options.first, options.first + options.count):
            plan, begun = Plan.of(seed), time.monotonic()
            with tempfile.TemporaryDirectory(prefix="chaos-") as name:
                job = Job(plan, Path(name))
                try:
                    problem = job.run()
                except KeyboardInterrupt:
                    problem = "interrupted"
            wrong, completed = (
                wrong + bool(problem),
                completed + any("fingerprint" in line for line in job.lines),
            )
            if problem or options.verbose:
                print(
                    f"seed {seed}: {problem or 'fine'} in {time.monotonic() - begun:.2f} s: {plan}",
                    flush=True,
                )
            if problem:
                print("\n".join(job.lines), flush=True)
            elif options.verbose:
                print(
                    "\n".join(line for line in job.lines if "---" in line or re.search(SAID, line)),
                    flush=True,
                )
    finally:
        warm_python.unload()
    print(f"{options.count} jobs, {completed} completed, {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
