"""Measures two replicas in one process, with a thread each, against one model, and against two
processes.

On the CPU every replica and every process computes with one thread, on its half of a batch of 256
that lies in memory; nothing is loaded. The sides are one model alone; two replicas in the
tutorials' loop, one after the other; two replicas of `lockstep.DataParallel`; and two processes
with DistributedDataParallel over Gloo and over "shm". All are started at once and take turns: a
round is one block of steps of each, every second round in the opposite order. A block's first step,
and the first round, are not counted. A round gives one ratio; the median over the rounds counts.

    python benchmarks/one_process.py             # some ten minutes on two idle cores
    python benchmarks/one_process.py --quick     # a smoke run; its figures say nothing
    python benchmarks/one_process.py --write     # also the table in docs/performance.md

With --device cuda each replica and each process has a GPU of its own, of which there must be two.
The sides are then one model on one of them, both kinds of replicas, `nn.DataParallel`, and two
processes, DDP over NCCL.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from common import TITLES, Spread, describe_machine, load_images, markdown_table, ratio
from frame import Benchmark, chosen
from ranks import BACKENDS, GLOO, NCCL, SHM
from side_ddp_step import StepJob
from side_one_process import ALONE, LOOP, THREADS, TORCH
from turns import command_of, last_losses, speeds_of, train_in_turns

BENCHMARK = Benchmark("one_process", __doc__)

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
    global_batch_size: int = 256
    device: str = "cpu"

    def job(self, side: str, meter: str) -> StepJob:
        """One side's job; the first step of a block is not timed, and the first round not
        counted.
        """
        workers = 2 if side in BACKENDS else 1
        return StepJob(
            self.model,
            self.global_batch_size,
            1,
            self.timed_steps,
            self.rounds + 1,
            workers,
            meter,
            side,
            self.device,
        )


CASES = [Case("lenet", timed_steps=12, rounds=12), Case("resnet18", timed_steps=2, rounds=8)]


def measure(case: Case) -> dict[str, list[dict[str, float]]]:
    """What each side's rank 0 reported in every round."""

    def programs(folder: str) -> dict[str, tuple[list[str], StepJob]]:
        jobs = {side: case.job(side, f"{folder}/{side}") for side in SIDES[case.device]}
        return {side: (command_of("side_one_process.py", job), job) for side, job in jobs.items()}

    return train_in_turns(TITLES[case.model], case.rounds, programs)


def summarise(case: Case, speeds: Speeds) -> list[dict[str, Any]]:
    """A row for each side."""
    return [
        {
            "model": case.model,
            "global_batch_size": case.global_batch_size,
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
                f"{TITLES[row['model']]}, batch {row['global_batch_size']}: "
                f"{SIDES[device][row['side']]}",
                f"{row['samples_per_second']['median']:,.0f}",
                *(Spread(**row["over"][other]).text(2) for other in OVER[device]),
            ]
            for row in rows
        ],
    )


def parse() -> argparse.Namespace:
    parser = BENCHMARK.parser("12 for LeNet and 8 for ResNet-18")
    parser.add_argument("--model", choices=[case.model for case in CASES], help="only this one")
    parser.add_argument("--device", choices=list(SIDES), help="of the replicas (default: cpu)")
    args = BENCHMARK.parse(parser, "model", "device")
    if args.device == "cuda" and torch.cuda.device_count() < 2:
        parser.error(f"--device cuda: expected two GPUs, found {torch.cuda.device_count()}")
    return args


def main() -> None:
    args = parse()
    machine = describe_machine()
    rows = []
    kept = {}
    cases = [replace(case, device=args.device or "cpu") for case in CASES]
    for case in chosen(cases, args, global_batch_size=16, timed_steps=1):
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
