"""Measures what the same bits at any number of workers cost: Lockstep's steps with virtual workers
against DDP's.

DDP computes the same global batch in as many passes, of the same size, and adds gradients up
(`no_sync`), or in a single large pass on each worker, as it usually does. A batch lies in memory;
nothing is loaded; each worker has one thread. All sides of a case are started at once and take
turns: a round is one block of steps of each, every second round in the opposite order. A block's
first step, and the first round, are not counted. A round gives one ratio of times; the median over
the rounds counts.

    python benchmarks/invariance.py             # some twelve minutes on two idle cores
    python benchmarks/invariance.py --quick     # a smoke run; its figures say nothing
    python benchmarks/invariance.py --write     # also the tables in docs/invariance.md
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from typing import Any

from common import TITLES, Spread, describe_machine, load_images, markdown_table, ratio
from frame import Benchmark, chosen
from ranks import GLOO, SHM
from ranks import TITLES as BACKENDS
from side_invariance import DDP, LOCKSTEP, InvarianceJob
from turns import command_of, last_losses, train_in_turns

BENCHMARK = Benchmark("invariance", __doc__, "invariance.md")

NAMES = {**TITLES, "convnet": "CNN", "transformer": "Transformer of 0.1 M parameters"}
SHARDS = 8  # of the sides that are compared pass by pass
ALL_SHARDS = (2, 4, 8, 16)

Side = tuple[str, int]
"""(who, passes of a step over all workers)."""

# 0: one for each worker
OURS = (LOCKSTEP, SHARDS)
SAME = (DDP, SHARDS)
LARGE = (DDP, 0)

Seconds = dict[Side, list[float]]
"""Side → seconds of a step, one value a round."""


@dataclass(frozen=True)
class Case:
    """What is trained, on how many workers, and in blocks of how many steps: about half a second
    each.
    """

    model: str
    global_batch_size: int
    timed_steps: int
    workers: int
    backend: str
    rounds: int = 6

    @property
    def sides(self) -> list[Side]:
        """Over Gloo the two that are compared pass by pass alone."""
        if self.backend == GLOO:
            return [OURS, SAME]
        return [SAME, LARGE, *((LOCKSTEP, virtual_workers) for virtual_workers in ALL_SHARDS)]

    @property
    def title(self) -> str:
        """For a table's first column."""
        workers = (
            "one worker"
            if self.workers == 1
            else f"{self.workers} workers over {BACKENDS[self.backend]}"
        )
        return f"{NAMES[self.model]}, {workers}"

    def job(self, side: Side, meter: str) -> InvarianceJob:
        """One side's job; the first step of a block is not timed, and the first round not
        counted.
        """
        who, passes = side
        blocks = self.rounds + 1
        passes = passes or self.workers
        counts = (self.global_batch_size, 1, self.timed_steps, blocks, self.workers)
        return InvarianceJob(self.model, *counts, meter, who, self.backend, passes)


KINDS = {
    "lenet": (256, 16),
    "convnet": (64, 2),
    "resnet18": (32, 1),
    "transformer": (256, 4),
    "mlp": (256, 4),
}
CASES = [
    Case(model, batch, steps, workers, backend)
    for model, (batch, steps) in KINDS.items()
    for workers, backend in ((1, SHM), (2, SHM), (2, GLOO))
]


def measure(case: Case) -> dict[Side, list[dict[str, float]]]:
    """What each side's rank 0 reported in every round."""

    def programs(folder: str) -> dict[Side, tuple[list[str], InvarianceJob]]:
        jobs = {side: case.job(side, f"{folder}/{side[0]}-{side[1]}") for side in case.sides}
        return {side: (command_of("side_invariance.py", job), job) for side, job in jobs.items()}

    return train_in_turns(case.title, case.rounds, programs)


def summarise(case: Case, seconds: Seconds) -> dict[str, Any]:
    """The row of a case."""
    several = {
        virtual_workers: (LOCKSTEP, virtual_workers)
        for virtual_workers in ALL_SHARDS
        if LARGE in seconds
    }
    return {
        **asdict(case),
        "title": case.title,
        "milliseconds": 1000 * Spread.of(seconds[OURS]).median,
        "over_same_passes": ratio(seconds, OURS, SAME),
        "over_one_pass": {
            virtual_workers: ratio(seconds, side, LARGE)
            for virtual_workers, side in several.items()
        },
    }


def pass_by_pass(rows: list[dict[str, Any]]) -> str:
    """The table of what Lockstep adds to the passes themselves."""
    header = [
        f"{SHARDS} virtual workers",
        "global batch",
        "ms a step",
        f"over DDP with {SHARDS} passes",
    ]
    return markdown_table(
        header,
        [
            [
                row["title"],
                str(row["global_batch_size"]),
                f"{row['milliseconds']:.1f}",
                Spread(**row["over_same_passes"]).text(2),
            ]
            for row in rows
        ],
    )


def by_shards(rows: list[dict[str, Any]]) -> str:
    """The table of what small passes cost beside large ones."""
    header = [
        "over DDP with one pass on each worker",
        *(f"V = {virtual_workers}" for virtual_workers in ALL_SHARDS),
    ]
    return markdown_table(
        header,
        [
            [
                row["title"],
                *(f"{Spread(**each).median:.2f}" for each in row["over_one_pass"].values()),
            ]
            for row in rows
            if row["over_one_pass"]
        ],
    )


def parse() -> argparse.Namespace:
    parser = BENCHMARK.parser("6")
    parser.add_argument("--model", choices=list(KINDS), help="only this one")
    parser.add_argument("--workers", type=int, choices=[1, 2], help="only so many")
    return BENCHMARK.parse(parser, "model", "workers")


def main() -> None:
    args = parse()
    machine = describe_machine()
    rows = []
    kept = {}
    cases = [case for case in CASES if args.workers in (None, case.workers)]
    for case in chosen(cases, args, global_batch_size=32, timed_steps=1):
        found = measure(case)
        seconds = {
            side: [block["seconds"] / case.timed_steps for block in blocks]
            for side, blocks in found.items()
        }
        losses = last_losses(found)
        rows.append(summarise(case, seconds))
        kept[case.title] = {
            f"{who}, {passes or 'one'} passes": {
                "seconds": values,
                "last_mean_loss": losses[who, passes],
            }
            for (who, passes), values in seconds.items()
        }
    tables = f"{pass_by_pass(rows)}\n\n{by_shards(rows)}"
    BENCHMARK.publish(
        args, machine, tables, f"{load_images(1).name} images", rows=rows, measured=kept
    )


if __name__ == "__main__":
    main()
