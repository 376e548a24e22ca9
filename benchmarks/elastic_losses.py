"""Draws the losses of an elastic job whose workers and hosts are lost, leave and join, over those
of a quiet run.

LeNet is trained on handwritten digits with `virtual_workers=6`: once on one worker, and once on two
hosts of three workers each, both of them launchers on this machine. Meanwhile a worker, rank 0, and
then the host on which the job began are killed (SIGKILL), another host joins, and the number of
workers changes. All losses must be the same, bit for bit, and so must the fingerprints of the
models.

    python benchmarks/elastic_losses.py  # draws docs/figures/elastic_losses.png, in about a minute
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from common import DOCS
from figures import draw_elastic_losses

PROGRAM = """
import json, os, sys, time
import torch
import lockstep
from lockstep.callbacks import Callback

class Notes(Callback):
    every_rank = True

    def on_loss(self, trainer, result, loss):
        note = {"step": result.step, "loss": loss, "size": comm.size, "rank": comm.rank, "pid": os.getpid()}
        with open(os.environ["NOTES"], "a") as file:
            file.write(json.dumps({**note, "host": os.environ["HOST"]}) + "\\n")
        time.sleep(float(os.environ["PAUSE_S"]))

comm = lockstep.init("cpu")
torch.manual_seed(0)
digits, _ = lockstep.data.digits()
model = lockstep.models.lenet()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
loss_fn = torch.nn.CrossEntropyLoss()
trainer = lockstep.Trainer(model, optimizer, loss_fn, global_batch_size=64, virtual_workers=6, callbacks=[Notes()])
trainer.fit(digits, epochs=100, max_steps=STEPS)
if comm.rank == 0:
    print("fingerprint", lockstep.fingerprint(model, optimizer), flush=True)
"""
STEPS = 340
SLOTS = 3  # of a host
LIMIT_S = 120.0  # to wait for anything


@dataclass(frozen=True)
class Note:
    """What a worker has noted after a step; `size` is the number of workers of its group."""

    step: int
    loss: float
    size: int
    rank: int
    pid: int
    host: str


class Job:
    """A job that runs in `folder`, on hosts that are launchers on this machine."""

    def __init__(self, folder: Path, pause_s: float) -> None:
        self.folder = folder
        self._pause_s = pause_s
        self._key = secrets.token_hex(16)
        self.launchers: dict[str, subprocess.Popen[str]] = {}
        (folder / "train.py").write_text(PROGRAM.replace("STEPS", str(STEPS)))
        (folder / "notes").touch()

    def start(self, host: str, *words: str) -> None:
        """Start the command `lockstep` on a host."""
        own = {"HOST": host, "NOTES": str(self.folder / "notes"), "PAUSE_S": str(self._pause_s)}
        env = {**os.environ, **own, "OMP_NUM_THREADS": "1", "LOCKSTEP_JOB_KEY": self._key}
        command = [sys.executable, "-m", "lockstep", *words]
        with (self.folder / f"output-{host}").open("w") as log:
            self.launchers[host] = subprocess.Popen(
                command, cwd=self.folder, env=env, stdout=log, stderr=log, text=True
            )

    def notes(self) -> list[Note]:
        """What the workers have noted so far."""
        return [
            Note(**json.loads(line))
            for line in (self.folder / "notes").read_text().splitlines(keepends=True)
            if line.endswith("\n")
        ]

    def wait_for(self, done: Callable[[list[Note]], bool]) -> list[Note]:
        """Wait until what the workers have noted is enough."""
        deadline = time.monotonic() + LIMIT_S
        while not done(notes := self.notes()):
            if time.monotonic() > deadline or all(
                each.poll() is not None for each in self.launchers.values()
            ):
                raise SystemExit(f"error: the job does not go on\n{self.output()}")
            time.sleep(0.02)
        return notes

    def member(self, rank: int) -> psutil.Process:
        """The process of a rank of the newest group."""
        newest = [note for note in self.notes() if note.rank == rank][-1]
        return psutil.Process(newest.pid)

    def kill_host(self, host: str) -> None:
        """Kill a launcher and all processes that it has started, as the loss of a machine does."""
        launcher = psutil.Process(self.launchers[host].pid)
        for process in [launcher, *launcher.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.launchers.pop(host).wait()

    def ask(self, *words: str) -> str:
        """Run a command of a user on one of the hosts, and return what it prints."""
        command = [sys.executable, "-m", "lockstep", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    @property
    def pid(self) -> str:
        """A launcher that lives."""
        return str(next(iter(self.launchers.values())).pid)

    def finish(self) -> None:
        """Wait for the job's end."""
        for launcher in self.launchers.values():
            if launcher.wait(LIMIT_S):
                raise SystemExit(f"error: the job has failed\n{self.output()}")

    def output(self) -> str:
        """What all hosts have printed."""
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("output-*")))


@contextmanager
def job(pause_s: float) -> Iterator[Job]:
    """A job; all of its hosts are killed at the end."""
    with tempfile.TemporaryDirectory(prefix="elastic-", ignore_cleanup_errors=True) as folder:
        made = Job(Path(folder), pause_s)
        try:
            yield made
        finally:
            for host in list(made.launchers):
                with suppress(psutil.NoSuchProcess):
                    made.kill_host(host)


def disturb(made: Job) -> dict[int, str]:
    """Run a job on two hosts, and disturb it; returns what has happened, each with the first step
    on other workers.
    """
    several = [
        "run",
        "--elastic",
        "1:6",
        "-np",
        str(SLOTS),
        "--nnodes",
        "2",
        "--master-addr",
        "127.0.0.1",
    ]
    several += ["--master-port", str(secrets.randbelow(10_000) + 20_000)]
    made.start("A", *several, "--node-rank", "0", "train.py")
    made.start("B", *several, "--node-rank", "1", "train.py")
    events: dict[int, str] = {}

    def after(step: int, size: int, text: str, event: Callable[[], object]) -> None:
        """Let something happen after a step, when all workers are there."""
        last = made.wait_for(
            lambda notes: bool(notes) and notes[-1].step >= step and notes[-1].size == size
        )[-1]
        print(f"step {last.step}: {text}", flush=True)
        event()
        later = made.wait_for(lambda notes: notes[-1].size != size)
        events[
            next(note.step for note in later if note.step >= last.step and note.size != size)
        ] = text

    def join() -> None:
        made.start("C", "join", made.ask("join", "--show", made.pid).split()[-1], "-np", str(SLOTS))

    after(30, 6, "rank 4 killed", lambda: made.member(4).kill())
    after(62, 6, "resize to 4", lambda: made.ask("resize", made.pid, "4"))
    after(122, 4, "rank 0 killed", lambda: made.member(0).kill())
    after(165, 4, "host A killed", lambda: made.kill_host("A"))
    after(195, SLOTS, "host C joins", join)
    after(290, 6, "resize to 2", lambda: made.ask("resize", made.pid, "2"))
    made.finish()
    return events


def losses(notes: list[Note]) -> list[float]:
    """The loss of each step; all workers must have noted the same."""
    found: dict[int, set[float]] = {}
    for note in notes:
        found.setdefault(note.step, set()).add(note.loss)
    if sorted(found) != list(range(STEPS)) or any(len(each) > 1 for each in found.values()):
        raise SystemExit("error: a step is missing, or its workers have noted different losses")
    return [found[step].pop() for step in sorted(found)]


def workers(notes: list[Note]) -> dict[str, list[int]]:
    """The number of workers of each host at each step, as all workers of a group have noted it."""
    hosts = sorted({note.host for note in notes})
    counts: dict[str, list[int]] = {host: [] for host in hosts}
    by_step: dict[int, list[Note]] = {}
    for note in notes:
        by_step.setdefault(note.step, []).append(note)
    for step in range(STEPS):
        size = by_step[step][-1].size
        group = {note.rank: note.host for note in by_step[step] if note.size == size}
        # a step that some have done before a loss, and others after it, counts as the one before
        for host in hosts:
            here = list(group.values()).count(host)
            counts[host].append(
                here if len(group) == size or not counts[host] else counts[host][-1]
            )
    return counts


def main() -> None:
    """Run from the command line."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    path = DOCS / "figures/elastic_losses.png"
    with job(0.0) as alone:
        alone.start("A", "run", "-np", "1", "train.py")
        alone.finish()
        undisturbed = losses(alone.notes())
        first = alone.output()
    with job(0.1) as made:
        events = disturb(made)
        notes = made.notes()
        second = made.output()
    prints = [
        [line.split()[-1] for line in text.splitlines() if "fingerprint" in line]
        for text in (first, second)
    ]
    if losses(notes) != undisturbed or len(prints[0]) != 1 or prints[0] != prints[1]:
        raise SystemExit(f"error: the runs differ: fingerprints {prints}")
    draw_elastic_losses(undisturbed, losses(notes), workers(notes), events, path)


if __name__ == "__main__":
    main()
