"""Lets one program time another's training steps, and decides when that one may run.

A controller starts several jobs at once and gives them the machine in turn: a job that has no turn
waits, idle, between two steps. So jobs that are to be compared alternate every few seconds,
although each is started only once.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

import torch

from common import keep_freed_memory

GRACE = 10  # seconds for a job to end by itself
PATIENCE = 300  # seconds for a job to start or to make a block; beyond it something hangs


@dataclass(frozen=True)
class Job:
    """What a program trains. An epoch is one block: `warm_up` steps that are not timed, then
    `timed_steps`.

    Attributes:
        epochs: blocks; the program ends after them.
        meter: the path of the controller's socket.
    """

    model: str
    global_batch_size: int
    warm_up: int
    timed_steps: int
    epochs: int
    workers: int
    meter: str

    @property
    def steps(self) -> int:
        """In an epoch."""
        return self.warm_up + self.timed_steps

    @property
    def samples(self) -> int:
        """The size of the data set that gives an epoch so many steps."""
        return self.steps * self.global_batch_size

    def arguments(self) -> list[str]:
        """The command line that `parse_job` understands."""
        return [f"--{name.replace('_', '-')}={value}" for name, value in vars(self).items()]


AnyJob = TypeVar("AnyJob", bound=Job)


def parse_job() -> Job:
    """The job that this program was started for."""
    return parse_as(Job)


def parse_as(kind: type[AnyJob]) -> AnyJob:
    """The job, of a kind that says more than `Job` does."""
    parser = argparse.ArgumentParser()
    for field in fields(kind):
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=int if field.type == "int" else str,
            required=True,
        )
    return kind(**vars(parser.parse_args()))


class Line:
    """A worker's connection to the controller.

    Args:
        path: of the controller's socket.
    """

    def __init__(self, path: str) -> None:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(path)
        self._stream = connection.makefile("rw")

    def report(self, message: dict[str, Any]) -> str:
        """Send `message` and wait, idle, for the next turn: what the controller says, or "" when it
        has ended.
        """
        self._stream.write(json.dumps(message) + "\n")
        self._stream.flush()
        return self._stream.readline()


class Meter:
    """The end that lives in each worker; made just before the first step, and told of every step.

    Args:
        job: what is trained.
        rank: this worker's number.
    """

    def __init__(self, job: Job, rank: int) -> None:
        self._job = job
        self._done = 0
        self._started = (0.0, 0.0)
        self._losses = torch.zeros(())
        keep_freed_memory()
        self._line = Line(job.meter)
        self._report_and_wait({"rank": rank})

    def step(self, loss: torch.Tensor) -> None:
        """Called after each step with its loss: starts and stops the clock, and waits for the next
        turn.
        """
        self._done += 1
        self._losses = self._losses.to(loss.device) + loss.detach()
        place = self._done % self._job.steps
        if place == self._job.warm_up:
            float(self._losses)  # a GPU has done what it was given before the clock starts
            self._started = time.perf_counter(), time.process_time()
        elif place == 0:
            mean = float(self._losses) / self._job.steps  # and before it stops
            seconds = time.perf_counter() - self._started[0]
            cpu = time.process_time() - self._started[1]
            self._report_and_wait({"seconds": seconds, "cpu_seconds": cpu, "loss": mean})
            self._losses = torch.zeros(())

    def _report_and_wait(self, message: dict[str, Any]) -> None:
        if not self._line.report(message):
            raise SystemExit("the benchmark that started this program has ended")


class Metered(Protocol):
    """A job as far as its controller must know it."""

    @property
    def workers(self) -> int:
        """How many connect."""

    @property
    def meter(self) -> str:
        """Where: the path of the controller's socket."""


class Controlled:
    """The controller's end: a job whose workers run one block at each turn.

    Args:
        command: starts the job; its workers make a `Meter` or `Line` each.
        job: as the command's arguments say.
        env: the job's environment.
    """

    def __init__(self, command: Sequence[str], job: Metered, env: dict[str, str]) -> None:
        self.job = job
        self._log = Path(f"{job.meter}.log")
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(job.meter)
        self._server.listen(job.workers)
        self._streams: list[Any] = []
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command, env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

    def wait_until_ready(self) -> None:
        """Return when every worker is about to make its first step."""
        self._server.settimeout(0.5)
        deadline = time.monotonic() + PATIENCE
        ranked: list[tuple[int, Any]] = []
        while len(ranked) < self.job.workers:
            try:
                connection = self._server.accept()[0]
            except TimeoutError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    self.fail("did not start")
                continue
            connection.settimeout(PATIENCE)
            stream = connection.makefile("rw")
            ranked.append((json.loads(stream.readline())["rank"], stream))
        self._streams = [stream for _, stream in sorted(ranked, key=lambda pair: pair[0])]

    def turn(self) -> dict[str, float]:
        """Let the workers, which have a `Meter` each, make one block.

        Returns:
            Of rank 0: `seconds` and `cpu_seconds` (of processor time) for the timed steps, and
            their mean `loss`.
        """
        return self.ask("go")[0]

    def ask(self, order: str) -> list[dict[str, float]]:
        """Give all workers a turn, with one line that says what to do, and return what they report,
        by rank.
        """
        self._tell(order)
        try:
            replies = [stream.readline() for stream in self._streams]
        except TimeoutError:
            self.fail(f"made no block within {PATIENCE} s")
        except ConnectionError:
            replies = []
        if not replies or not all(replies):
            self.fail("ended early")
        return [json.loads(reply) for reply in replies]

    def finish(self) -> None:
        """Let the job end after its last block, so that it is gone when others have their turn."""
        self._tell("go")
        self._process.wait(PATIENCE)

    def _tell(self, order: str) -> None:
        try:
            for stream in self._streams:
                stream.write(f"{order}\n")
                stream.flush()
        except ConnectionError:
            self.fail("ended early")

    def fail(self, what: str) -> NoReturn:
        """End the benchmark, with the last lines that the job wrote."""
        tail = "\n".join(self._log.read_text().splitlines()[-15:])
        raise SystemExit(
            f"{Path(self.job.meter).name}: the job {what}; its output ends with:\n{tail}"
        )

    def close(self) -> None:
        """End the job if it still runs."""
        for stream in self._streams:
            stream.close()  # a worker that waits for its turn ends
        for end in (self._process.terminate, self._process.kill, None):
            try:
                self._process.wait(GRACE)
                break
            except subprocess.TimeoutExpired:
                if end is not None:
                    end()
        self._server.close()
