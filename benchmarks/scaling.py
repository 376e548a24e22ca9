"""Measures what a second worker brings: Lockstep, DDP under torchrun, and Hugging Face Accelerate.

Every side trains the same model on the same data with the same global batch, on one worker and on
two with one thread each, and is written as its users would write it (``side_*.py``). All jobs of a
model are started at once and take turns: a round is one block of steps of each, every second round
in the opposite order. A block's first steps, and the first round, are not counted. A round gives
one ratio; the median over the rounds counts.

    pip install -e '.[bench]'
    python benchmarks/scaling.py          # some four minutes on two idle cores
    python benchmarks/scaling.py --quick  # a smoke run; its figures say nothing
    python benchmarks/scaling.py --write  # also the table and the picture in docs/
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from common import DOCS, TITLES, Spread, describe_machine, load_images, markdown_table, ratio
from figures import draw_scaling
from frame import Benchmark, chosen
from meter import Job
from turns import command_of, last_losses, speeds_of, train_in_turns

BENCHMARK = Benchmark("scaling", __doc__)
WORKERS = (1, 2)

# name → (title, script, whether torchrun starts it when there are several workers)
SIDES = {
    "lockstep": ("Lockstep", "side_lockstep.py", False),
    "ddp": ("DDP, torchrun", "side_ddp.py", True),
    "ddp-indexed": ("DDP, torchrun, quick loader", "side_ddp_indexed.py", True),
    "accelerate": ("Accelerate", "side_accelerate.py", True),
}

SideAt = tuple[str, int]
"""(side, workers)."""

Speeds = dict[SideAt, list[float]]
"""Side, at a number of workers → samples per second, one value a round."""


@dataclass(frozen=True)
class Case:
    """What is trained, and in blocks of how many steps: a few seconds each."""

    model: str
    global_batch_size: int
    warm_up: int
    timed_steps: int
    rounds: int

    def job(self, workers: int, meter: str) -> Job:
        """One side's job; the first round is not counted."""
        epochs = self.rounds + 1
        return Job(
            self.model,
            self.global_batch_size,
            self.warm_up,
            self.timed_steps,
            epochs,
            workers,
            meter,
        )


CASES = [
    Case("lenet", global_batch_size=256, warm_up=2, timed_steps=13, rounds=8),
    Case("resnet18", global_batch_size=32, warm_up=1, timed_steps=2, rounds=6),
]


def start_of(side: str, job: Job) -> list[str]:
    """How a user starts this side: plain Python for one worker; for more, torchrun or Lockstep's
    own launcher.
    """
    _, script, by_torchrun = SIDES[side]
    python, *rest = command_of(script, job)
    several = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={job.workers}"]
    return [python, *(several if by_torchrun and job.workers > 1 else []), *rest]


def measure(case: Case, sides: list[str]) -> dict[SideAt, list[dict[str, float]]]:
    """What each side's rank 0 reported in every round, at each number of workers."""

    def programs(folder: str) -> dict[SideAt, tuple[list[str], Job]]:
        keys = [(side, workers) for side in sides for workers in WORKERS]
        jobs = {
            (side, workers): case.job(workers, f"{folder}/{side}-{workers}")
            for side, workers in keys
        }
        return {key: (start_of(key[0], job), job) for key, job in jobs.items()}

    return train_in_turns(TITLES[case.model], case.rounds, programs)


def summarise(case: Case, speeds: Speeds) -> list[dict[str, Any]]:
    """A row for each side."""
    one, two = WORKERS
    sides = dict.fromkeys(side for side, _ in speeds)
    return [
        {
            "model": case.model,
            "global_batch_size": case.global_batch_size,
            "side": side,
            "samples_per_second": {k: asdict(Spread.of(speeds[side, k])) for k in WORKERS},
            "two_over_one": ratio(speeds, (side, two), (side, one)),
            # Lockstep comes first where it takes part.
            "over_first": {k: ratio(speeds, (side, k), (next(iter(sides)), k)) for k in WORKERS},
            "over_first_alone": {
                k: ratio(speeds, (side, k), (next(iter(sides)), one)) for k in WORKERS
            },
        }
        for side in sides
    ]


def as_table(rows: list[dict[str, Any]]) -> str:
    first = SIDES[rows[0]["side"]][0]
    header = [
        "",
        "1 worker, samples/s",
        "2 workers, samples/s",
        "2 workers over 1",
        f"1 worker over {first}'s",
        f"2 workers over {first}'s",
    ]
    return markdown_table(
        header,
        [
            [
                f"{TITLES[row['model']]}, global batch {row['global_batch_size']}: "
                f"{SIDES[row['side']][0]}",
                *(f"{row['samples_per_second'][k]['median']:,.0f}" for k in WORKERS),
                Spread(**row["two_over_one"]).text(2),
                *(Spread(**row["over_first"][k]).text(2) for k in WORKERS),
            ]
            for row in rows
        ],
    )


def available(sides: list[str]) -> list[str]:
    """`sides` without those that are not installed, which is said."""
    try:
        version("accelerate")
    except PackageNotFoundError:
        if "accelerate" in sides:
            print(
                "Accelerate is not installed and left out: pip install -e '.[bench]'",
                file=sys.stderr,
            )
        return [side for side in sides if side != "accelerate"]
    return sides


def parse() -> argparse.Namespace:
    parser = BENCHMARK.parser("8 for LeNet and 6 for ResNet-18")
    parser.add_argument("--model", choices=[case.model for case in CASES], help="only this one")
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), help="only these")
    args = BENCHMARK.parse(parser, "model", "sides")
    args.sides = available([side for side in SIDES if side in (args.sides or SIDES)])
    if args.write and args.sides != list(SIDES):
        parser.error(
            "--write: only the whole run is for the documentation: every side, Accelerate's too"
        )
    return args


def main() -> None:
    args = parse()
    torch.set_num_threads(1)
    machine = describe_machine()
    data = f"{load_images(1).name} images"
    if "accelerate" in args.sides:
        machine["accelerate"] = version("accelerate")
        data += f"; Accelerate {machine['accelerate']}"
    rows = []
    kept = {}
    for case in chosen(CASES, args, global_batch_size=8, warm_up=1, timed_steps=2):
        found = measure(case, args.sides)
        speeds = speeds_of(found, case.timed_steps * case.global_batch_size)
        rows += summarise(case, speeds)
        kept[case.model] = {
            "case": asdict(case),
            "samples_per_second": by_name(speeds),
            "last_mean_loss": by_name(last_losses(found)),
        }
    shown = ""
    if args.write:
        picture = DOCS / "figures" / "scaling.png"
        draw_scaling(rows, {side: title for side, (title, _, _) in SIDES.items()}, picture)
        shown = (
            "![Speeds of one and two workers, for each "
            f"side]({picture.relative_to(DOCS).as_posix()})"
        )
    BENCHMARK.publish(args, machine, as_table(rows), data, shown, rows=rows, measured=kept)


def by_name(values: dict[SideAt, Any]) -> dict[str, Any]:
    """With keys that JSON can hold."""
    return {f"{side}, {workers}": value for (side, workers), value in values.items()}


if __name__ == "__main__":
    main()
