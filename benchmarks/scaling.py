"""Measures what a second worker brings: Lockstep, DDP under torchrun, and Hugging Face Accelerate.

Every side trains the same model on the same data with the same global batch, on one worker and on two with one thread
each, and is written as its users would write it (``side_*.py``). All jobs of a model are started at once and take
turns: a round is one block of steps of each, every second round in the opposite order. A block's first steps, and the
first round, are not counted. A round gives one ratio; the median over the rounds counts.

    pip install -e '.[bench]'
    python benchmarks/scaling.py             # some four minutes on two idle cores
    python benchmarks/scaling.py --quick     # a smoke run; its figures say nothing
    python benchmarks/scaling.py --write     # also the table in docs/performance.md and docs/figures/scaling.png
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from common import (
    DOCS,
    RESULTS,
    TITLES,
    Spread,
    describe_machine,
    load_images,
    machine_line,
    markdown_table,
    write_between,
    write_json,
)
from figures import draw_scaling
from meter import Controlled, Job

WORKERS = (1, 2)

# name → (title, script, whether torchrun starts it when there are several workers)
SIDES = {
    "lockstep": ("Lockstep", "side_lockstep.py", False),
    "ddp": ("DDP, torchrun", "side_ddp.py", True),
    "ddp-indexed": ("DDP, torchrun, quick loader", "side_ddp_indexed.py", True),
    "accelerate": ("Accelerate", "side_accelerate.py", True),
}

Speeds = dict[tuple[str, int], list[float]]
"""(side, workers) → samples per second, one value a round."""


@dataclass(frozen=True)
class Case:
    """What is trained, and in blocks of how many steps: a few seconds each."""

    model: str
    global_batch: int
    warm_up: int
    timed_steps: int
    rounds: int

    def job(self, workers: int, meter: str) -> Job:
        """One side's job; the first round is not counted."""
        epochs = self.rounds + 1
        return Job(self.model, self.global_batch, self.warm_up, self.timed_steps, epochs, workers, meter)


CASES = [
    Case("lenet", global_batch=256, warm_up=2, timed_steps=13, rounds=8),
    Case("resnet18", global_batch=32, warm_up=1, timed_steps=2, rounds=6),
]


def command_of(side: str, job: Job) -> list[str]:
    """How a user starts this side: plain Python for one worker; for more, torchrun or Lockstep's own launcher."""
    _, script, by_torchrun = SIDES[side]
    path = str(Path(__file__).resolve().parent / script)
    several = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={job.workers}"]
    return [sys.executable, *(several if by_torchrun and job.workers > 1 else []), path, *job.arguments()]


@contextmanager
def running(case: Case, sides: list[str]) -> Iterator[dict[tuple[str, int], Controlled]]:
    """All jobs of a model, each about to make its first step."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="scaling-") as folder, ExitStack() as stack:
        jobs = {}
        for side in sides:
            for workers in WORKERS:
                job = case.job(workers, f"{folder}/{side}-{workers}")
                jobs[side, workers] = Controlled(command_of(side, job), job, env)
                stack.callback(jobs[side, workers].close)
        for controlled in jobs.values():
            controlled.wait_until_ready()
        yield jobs


def measure(case: Case, sides: list[str]) -> tuple[Speeds, dict[str, float]]:
    """The speeds of every round, and the mean loss that each job came to in its last block."""
    speeds: Speeds = {(side, workers): [] for side in sides for workers in WORKERS}
    losses: dict[str, float] = {}
    with running(case, sides) as jobs:
        for number in range(case.rounds + 1):
            for key in list(jobs) if number % 2 else reversed(list(jobs)):
                found = jobs[key].turn()
                losses[f"{key[0]}, {key[1]}"] = found["loss"]
                if number > 0:
                    speeds[key].append(case.timed_steps * case.global_batch / found["seconds"])
                if number == case.rounds:
                    jobs[key].finish()
            print(f"\r{TITLES[case.model]}: round {number} of {case.rounds}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return speeds, losses


def ratio(speeds: Speeds, above: tuple[str, int], below: tuple[str, int]) -> Spread:
    """Of two jobs' speeds in the same round."""
    return Spread.of([a / b for a, b in zip(speeds[above], speeds[below], strict=True)])


def summarise(case: Case, speeds: Speeds) -> list[dict[str, Any]]:
    """A row for each side."""
    one, two = WORKERS
    sides = dict.fromkeys(side for side, _ in speeds)
    return [
        {
            "model": case.model,
            "global_batch": case.global_batch,
            "side": side,
            "samples_per_second": {k: asdict(Spread.of(speeds[side, k])) for k in WORKERS},
            "two_over_one": asdict(ratio(speeds, (side, two), (side, one))),
            # Lockstep comes first where it takes part.
            "over_first": {k: asdict(ratio(speeds, (side, k), (next(iter(sides)), k))) for k in WORKERS},
            "over_first_alone": {k: asdict(ratio(speeds, (side, k), (next(iter(sides)), one))) for k in WORKERS},
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
                f"{TITLES[row['model']]}, global batch {row['global_batch']}: {SIDES[row['side']][0]}",
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
            print("Accelerate is not installed and left out: pip install -e '.[bench]'", file=sys.stderr)
        return [side for side in sides if side != "accelerate"]
    return sides


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of the smallest blocks: does it run?")
    parser.add_argument("--model", choices=[case.model for case in CASES], help="only this one")
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=list(SIDES), help="only these")
    parser.add_argument("--rounds", type=int, help="instead of 8 for LeNet and 6 for ResNet-18")
    parser.add_argument("--json", type=Path, help="where all that was measured goes (default: results/scaling.json)")
    parser.add_argument("--write", action="store_true", help="put table and picture into docs/")
    args = parser.parse_args()
    if args.rounds is not None and args.rounds < 1:
        parser.error("--rounds: expected a whole number of at least 1")
    args.sides = available([side for side in SIDES if side in args.sides])
    whole = not args.quick and not args.model and args.sides == list(SIDES)
    if args.write and not whole:
        parser.error("--write: only the whole run is for the documentation: every model and side, without --quick")
    return args


def chosen_cases(args: argparse.Namespace) -> list[Case]:
    cases = [case for case in CASES if args.model in (None, case.model)]
    if args.quick:
        cases = [replace(case, global_batch=8, warm_up=1, timed_steps=2, rounds=1) for case in cases]
    return cases if args.rounds is None else [replace(case, rounds=args.rounds) for case in cases]


def main() -> None:
    args = parse()
    torch.set_num_threads(1)
    machine = describe_machine()
    if "accelerate" in args.sides:
        machine["accelerate"] = version("accelerate")
    rows, kept = [], {}
    for case in chosen_cases(args):
        speeds, losses = measure(case, args.sides)
        rows += summarise(case, speeds)
        named = {f"{side}, {workers}": values for (side, workers), values in speeds.items()}
        kept[case.model] = {"case": asdict(case), "samples_per_second": named, "last_mean_loss": losses}
    machine["load_average_after"] = round(os.getloadavg()[0], 2)
    data = f"{load_images(1).name} images" + (
        f"; Accelerate {machine['accelerate']}" if "accelerate" in machine else ""
    )
    table, line = as_table(rows), machine_line(machine, data)
    print(f"\n{table}\n\n{line}")
    if args.json or not args.quick:
        write_json(args.json or RESULTS / "scaling.json", {"machine": machine, "rows": rows, "measured": kept})
    if args.write:
        picture = DOCS / "figures" / "scaling.png"
        draw_scaling(rows, {side: title for side, (title, _, _) in SIDES.items()}, picture)
        shown = f"![Speeds of one and two workers, for each side]({picture.relative_to(DOCS).as_posix()})"
        write_between(DOCS / "performance.md", "scaling", f"{table}\n\n{shown}\n\n{line}")


if __name__ == "__main__":
    main()
