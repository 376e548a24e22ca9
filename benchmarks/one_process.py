"""Measures two replicas in one process, with a thread each, against one model, and against two processes.

On the CPU every replica and every process computes with one thread, on its half of a batch of 256 that lies in memory;
nothing is loaded. The sides are one model alone; two replicas in the tutorials' loop, one after the other; two replicas
of `lockstep.DataParallel`; and two processes with DistributedDataParallel over Gloo and over "shm". All are started at
once and take turns: a round is one block of steps of each, every second round in the opposite order. A block's first
step, and the first round, are not counted. A round gives one ratio; the median over the rounds counts.

    python benchmarks/one_process.py             # some ten minutes on two idle cores
    python benchmarks/one_process.py --quick     # a smoke run; its figures say nothing
    python benchmarks/one_process.py --write     # also the table in docs/performance.md

With --device cuda each replica and each process has a GPU of its own, of which there must be two. The sides are then
one model on one of them, both kinds of replicas, `nn.DataParallel`, and two processes, DDP over NCCL.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
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
from meter import Controlled
from ranks import BACKENDS, GLOO, NCCL, SHM
from side_ddp_step import StepJob
from side_one_process import ALONE, LOOP, THREADS, TORCH

REPLICAS = {LOOP: "two replicas, one after the other", THREADS: "two replicas, `DataParallel`"}
SIDES = {
    "cpu": {
        ALONE: "one model, one thread",
        **REPLICAS,
        GLOO: "two processes, DDP over Gloo",
        SHM: "two processes, DDP over shm",
    },
    "cuda": {
        ALONE: "one model, one GPU",
        **REPLICAS,
        TORCH: "two replicas, `nn.DataParallel`",
        NCCL: "two processes, DDP over NCCL",
    },
}
OVER = {
    "cpu": {ALONE: "over one", GLOO: "over Gloo", SHM: "over shm"},
    "cuda": {ALONE: "over one", TORCH: "over `nn.DataParallel`", NCCL: "over DDP"},
}
"""What the columns of the table compare with."""

Speeds = dict[str, list[float]]
"""Side → samples per second, one value a round."""


@dataclass(frozen=True)
class Case:
    """What is trained, and in blocks of how many steps."""

    model: str
    timed_steps: int
    rounds: int
    global_batch: int = 256
    device: str = "cpu"

    def job(self, side: str, meter: str) -> StepJob:
        """One side's job; the first step of a block is not timed, and the first round not counted."""
        workers = 2 if side in BACKENDS else 1
        return StepJob(
            self.model, self.global_batch, 1, self.timed_steps, self.rounds + 1, workers, meter, side, self.device
        )


CASES = [Case("lenet", timed_steps=12, rounds=12), Case("resnet18", timed_steps=2, rounds=8)]


@contextmanager
def running(case: Case) -> Iterator[dict[str, Controlled]]:
    """All sides, each about to make its first step."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    script = str(Path(__file__).resolve().parent / "side_one_process.py")
    with tempfile.TemporaryDirectory(prefix="one-process-") as folder, ExitStack() as stack:
        jobs = {}
        for side in SIDES[case.device]:
            job = case.job(side, f"{folder}/{side}")
            jobs[side] = Controlled([sys.executable, script, *job.arguments()], job, env)
            stack.callback(jobs[side].close)
        for controlled in jobs.values():
            controlled.wait_until_ready()
        yield jobs


def measure(case: Case) -> tuple[Speeds, dict[str, float]]:
    """The speeds of every round, and the mean loss that each side's rank 0 came to in its last block."""
    speeds: Speeds = {side: [] for side in SIDES[case.device]}
    losses: dict[str, float] = {}
    with running(case) as jobs:
        for number in range(case.rounds + 1):
            for side in list(jobs) if number % 2 else reversed(list(jobs)):
                found = jobs[side].turn()
                losses[side] = found["loss"]
                if number > 0:
                    speeds[side].append(case.timed_steps * case.global_batch / found["seconds"])
                if number == case.rounds:
                    jobs[side].finish()
            print(f"\r{TITLES[case.model]}: round {number} of {case.rounds}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return speeds, losses


def ratio(speeds: Speeds, above: str, below: str) -> dict[str, float]:
    """Of two sides' speeds in the same round."""
    return asdict(Spread.of([a / b for a, b in zip(speeds[above], speeds[below], strict=True)]))


def summarise(case: Case, speeds: Speeds) -> list[dict[str, Any]]:
    """A row for each side."""
    return [
        {
            "model": case.model,
            "global_batch": case.global_batch,
            "device": case.device,
            "side": side,
            "samples_per_second": asdict(Spread.of(speeds[side])),
            "over": {other: ratio(speeds, side, other) for other in OVER[case.device]},
        }
        for side in speeds
    ]


def as_table(rows: list[dict[str, Any]]) -> str:
    device = rows[0]["device"]
    return markdown_table(
        ["", "samples/s", *OVER[device].values()],
        [
            [
                f"{TITLES[row['model']]}, batch {row['global_batch']}: {SIDES[device][row['side']]}",
                f"{row['samples_per_second']['median']:,.0f}",
                *(Spread(**row["over"][other]).text(2) for other in OVER[device]),
            ]
            for row in rows
        ],
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of the smallest blocks: does it run?")
    parser.add_argument("--model", choices=[case.model for case in CASES], help="only this one")
    parser.add_argument("--device", choices=list(SIDES), default="cpu", help="of the replicas (default: cpu)")
    parser.add_argument("--rounds", type=int, help="instead of 12 for LeNet, 8 for ResNet-18")
    parser.add_argument(
        "--json", type=Path, help="where all goes that was measured (default: results/one_process.json)"
    )
    parser.add_argument("--write", action="store_true", help="put the table into docs/")
    args = parser.parse_args()
    if args.rounds is not None and args.rounds < 1:
        parser.error("--rounds: expected a whole number of at least 1")
    if args.write and (args.quick or args.model or args.device != "cpu"):
        parser.error("--write: only the whole run is for the documentation: every model, on the CPU, without --quick")
    if args.device == "cuda" and torch.cuda.device_count() < 2:
        parser.error(f"--device cuda: expected two GPUs, found {torch.cuda.device_count()}")
    return args


def chosen_cases(args: argparse.Namespace) -> list[Case]:
    cases = [replace(case, device=args.device) for case in CASES if args.model in (None, case.model)]
    if args.quick:
        cases = [replace(case, global_batch=16, timed_steps=1, rounds=1) for case in cases]
    return cases if args.rounds is None else [replace(case, rounds=args.rounds) for case in cases]


def main() -> None:
    args = parse()
    machine, rows, kept = describe_machine(), [], {}
    for case in chosen_cases(args):
        speeds, losses = measure(case)
        rows += summarise(case, speeds)
        kept[case.model] = {"case": asdict(case), "samples_per_second": speeds, "last_mean_loss": losses}
    machine["load_average_after"] = round(os.getloadavg()[0], 2)
    table, line = as_table(rows), machine_line(machine, f"{load_images(1).name} images")
    print(f"\n{table}\n\n{line}")
    if args.json or not args.quick:
        write_json(args.json or RESULTS / "one_process.json", {"machine": machine, "rows": rows, "measured": kept})
    if args.write:
        write_between(DOCS / "performance.md", "one-process", f"{table}\n\n{line}")


if __name__ == "__main__":
    main()
