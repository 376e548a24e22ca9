"""Measures steps of DistributedDataParallel over the backend "shm" and over Gloo, against one
worker alone.

Two workers with one thread each share a global batch that lies in memory; nothing is loaded. Two
workers that exchange nothing show what this machine lets two workers reach at all. All are started
at once and take turns: a round is one block of steps of each, every second round in the opposite
order. A block's first step, and the first round, are not counted. A round gives one ratio; the
median over the rounds counts.

    python benchmarks/ddp_step.py             # some three minutes on two idle cores
    python benchmarks/ddp_step.py --quick     # a smoke run; its figures say nothing
    python benchmarks/ddp_step.py --write     # also the table in docs/performance.md
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from typing import Any

from common import TITLES, Spread, describe_machine, load_images, markdown_table, ratio
from frame import Benchmark, chosen
from ranks import GLOO
from ranks import TITLES as BACKENDS
from side_ddp_step import StepJob
from turns import command_of, last_losses, speeds_of, train_in_turns

BENCHMARK = Benchmark("ddp_step", __doc__)

ALONE = "alone"
APART = "apart"
SIDES = {
    ALONE: "one worker",
    APART: "two workers that exchange nothing",
    **{backend: f"two workers, DDP over {title}" for backend, title in BACKENDS.items()},
}

Speeds = dict[str, list[float]]
"""Side → samples per second, one value a round."""


@dataclass(frozen=True)
class Case:
    """What is trained, and in blocks of how many steps: about a second each."""

    model: str
    global_batch_size: int
    timed_steps: int
    rounds: int

    def job(self, side: str, meter: str) -> StepJob:
        """One side's job; the first step of a block is not timed, and the first round not
        counted.
        """
        workers = 1 if side == ALONE else 2
        return StepJob(
            self.model,
            self.global_batch_size,
            1,
            self.timed_steps,
            self.rounds + 1,
            workers,
            meter,
            side,
        )


CASES = [
    Case("lenet", global_batch_size=256, timed_steps=12, rounds=12),
    Case("mlp", 256, timed_steps=5, rounds=12),
]


def measure(case: Case) -> dict[str, list[dict[str, float]]]:
    """What each side's rank 0 reported in every round."""

    def programs(folder: str) -> dict[str, tuple[list[str], StepJob]]:
        jobs = {side: case.job(side, f"{folder}/{side}") for side in SIDES}
        return {side: (command_of("side_ddp_step.py", job), job) for side, job in jobs.items()}

    return train_in_turns(TITLES[case.model], case.rounds, programs)


def summarise(case: Case, speeds: Speeds) -> list[dict[str, Any]]:
    """A row for each side."""
    return [
        {
            "model": case.model,
            "global_batch_size": case.global_batch_size,
            "side": side,
            "samples_per_second": asdict(Spread.of(speeds[side])),
            "over_one": ratio(speeds, side, ALONE),
            "of_ideal": ratio(speeds, side, ALONE, 1.0 if side == ALONE else 0.5),
            "over_apart": ratio(speeds, side, APART),
            "over_gloo": ratio(speeds, side, GLOO),
        }
        for side in speeds
    ]


def as_table(rows: list[dict[str, Any]]) -> str:
    header = [
        "",
        "samples/s",
        "over one worker",
        "of ideal",
        "over exchanging nothing",
        "over Gloo",
    ]
    return markdown_table(
        header,
        [
            [
                f"{TITLES[row['model']]}, global batch {row['global_batch_size']}: "
                f"{SIDES[row['side']]}",
                f"{row['samples_per_second']['median']:,.0f}",
                *(
                    Spread(**row[name]).text(2)
                    for name in ("over_one", "of_ideal", "over_apart", "over_gloo")
                ),
            ]
            for row in rows
        ],
    )


def parse() -> argparse.Namespace:
    parser = BENCHMARK.parser("12")
    parser.add_argument("--model", choices=[case.model for case in CASES], help="only this one")
    return BENCHMARK.parse(parser, "model")


def main() -> None:
    args = parse()
    machine = describe_machine()
    rows = []
    kept = {}
    for case in chosen(CASES, args, global_batch_size=32, timed_steps=2):
        found = measure(case)
        speeds = speeds_of(found, case.timed_steps * case.global_batch_size)
        rows += summarise(case, speeds)
        kept[case.model] = {
            "case": asdict(case),
            "samples_per_second": speeds,
            "last_mean_loss": last_losses(found),
        }
    BENCHMARK.publish(
        args, machine, as_table(rows), f"{load_images(1).name} images", rows=rows, measured=kept
    )


if __name__ == "__main__":
    main()
