"""Lets the sides of a comparison, each a program of its own, train in turns."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

from meter import Controlled, Job, Metered

Side = TypeVar("Side", bound=Hashable)

Programs = Callable[[str], Mapping[Side, tuple[Sequence[str], Metered]]]
"""The folder of the sockets → side → the command that starts it, and the job it is given."""


def command_of(script: str, job: Job) -> list[str]:
    """How a program of this folder is started, if it starts its own workers."""
    return [sys.executable, str(Path(__file__).resolve().parent / script), *job.arguments()]


@contextmanager
def running(programs: Programs[Side]) -> Iterator[dict[Side, Controlled]]:
    """All sides, each about to make its first step; started at once, so that all live through the
    same.
    """
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder, ExitStack() as stack:
        jobs = {}
        for side, (command, job) in programs(folder).items():
            jobs[side] = Controlled(command, job, env)
            stack.callback(jobs[side].close)
        for controlled in jobs.values():
            controlled.wait_until_ready()
        yield jobs


def train_in_turns(
    title: str, rounds: int, programs: Programs[Side]
) -> dict[Side, list[dict[str, float]]]:
    """What each side's rank 0 reported in every round (`Controlled.turn`).

    Args:
        title: what is trained, for the line that tells how far it is.
        rounds: that count. One more comes before them, so each job has `rounds` + 1 blocks to make;
            every second round goes in the opposite order.
        programs: the sides.
    """
    with running(programs) as jobs:
        found: dict[Side, list[dict[str, float]]] = {side: [] for side in jobs}
        for number in range(rounds + 1):
            for side in list(jobs) if number % 2 else reversed(list(jobs)):
                found[side].append(jobs[side].turn())
                if number == rounds:
                    jobs[side].finish()
            print(f"\r{title}: round {number} of {rounds}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return {side: blocks[1:] for side, blocks in found.items()}


def speeds_of(
    found: Mapping[Side, list[dict[str, float]]], samples: int
) -> dict[Side, list[float]]:
    """Samples per second, one value a round, where the timed steps of a block take `samples`."""
    return {
        side: [samples / block["seconds"] for block in blocks] for side, blocks in found.items()
    }


def last_losses(found: Mapping[Side, list[dict[str, float]]]) -> dict[Side, float]:
    """The mean loss that each side came to in its last block: sides that do the same work come to
    the same.
    """
    return {side: blocks[-1]["loss"] for side, blocks in found.items()}
