"""Measures what the same bits at any number of workers cost: Lockstep's steps with shards against DDP's.

DDP computes the same global batch in as many passes, of the same size, and adds gradients up (`no_sync`), or in a
single large pass on each worker, as it usually does. A batch lies in memory; nothing is loaded; each worker has one
thread. All sides of a case are started at once and take turns: a round is one block of steps of each, every second
round in the opposite order. A block's first step, and the first round, are not counted. A round gives one ratio of
times; the median over the rounds counts.

    python benchmarks/invariance.py             # some twelve minutes on two idle cores
    python benchmarks/invariance.py --quick     # a smoke run; its figures say nothing
    python benchmarks/invariance.py --write     # also the tables in docs/invariance.md
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
from ranks import GLOO, SHM
from ranks import TITLES as BACKENDS
from side_invariance import DDP, LOCKSTEP, InvarianceJob

NAMES = {**TITLES, "convnet": "CNN", "transformer": "Transformer of 0.1 M parameters"}
SHARDS = 8  # of the sides that are compared pass by pass
ALL_SHARDS = (2, 4, 8, 16)

Side = tuple[str, int]
"""(who, passes of a step over all workers)."""

OURS, SAME, LARGE = (LOCKSTEP, SHARDS), (DDP, SHARDS), (DDP, 0)  # 0: one for each worker

Seconds = dict[Side, list[float]]
"""Side → seconds of a step, one value a round."""


@dataclass(frozen=True)
class Case:
    """What is trained, on how many workers, and in blocks of how many steps: about half a second each."""

    model: str
    global_batch: int
    timed_steps: int
    workers: int
    backend: str
    rounds: int = 6

    @property
    def sides(self) -> list[Side]:
        """Over Gloo the two that are compared pass by pass alone."""
        if self.backend == GLOO:
            return [OURS, SAME]
        return [SAME, LARGE, *((LOCKSTEP, shards) for shards in ALL_SHARDS)]

    @property
    def title(self) -> str:
        """For a table's first column."""
        workers = "one worker" if self.workers == 1 else f"{self.workers} workers over {BACKENDS[self.backend]}"
        return f"{NAMES[self.model]}, {workers}"

    def job(self, side: Side, meter: str) -> InvarianceJob:
        """One side's job; the first step of a block is not timed, and the first round not counted."""
        who, passes = side
        blocks, passes = self.rounds + 1, passes or self.workers
        counts = (self.global_batch, 1, self.timed_steps, blocks, self.workers)
        return InvarianceJob(self.model, *counts, meter, who, self.backend, passes)


KINDS = {"lenet": (256, 16), "convnet": (64, 2), "resnet18": (32, 1), "transformer": (256, 4), "mlp": (256, 4)}
CASES = [
    Case(model, batch, steps, workers, backend)
    for model, (batch, steps) in KINDS.items()
    for workers, backend in ((1, SHM), (2, SHM), (2, GLOO))
]


@contextmanager
def running(case: Case) -> Iterator[dict[Side, Controlled]]:
    """All sides, each about to make its first step."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    script = str(Path(__file__).resolve().parent / "side_invariance.py")
    with tempfile.TemporaryDirectory(prefix="invariance-") as folder, ExitStack() as stack:
        jobs = {}
        for side in case.sides:
            job = case.job(side, f"{folder}/{side[0]}-{side[1]}")
            jobs[side] = Controlled([sys.executable, script, *job.arguments()], job, env)
            stack.callback(jobs[side].close)
        for controlled in jobs.values():
            controlled.wait_until_ready()
        yield jobs


def measure(case: Case) -> tuple[Seconds, dict[Side, float]]:
    """The seconds of every round, and the mean loss that each side's rank 0 came to in its last block."""
    seconds: Seconds = {side: [] for side in case.sides}
    losses: dict[Side, float] = {}
    with running(case) as jobs:
        for number in range(case.rounds + 1):
            for side in list(jobs) if number % 2 else reversed(list(jobs)):
                found = jobs[side].turn()
                losses[side] = found["loss"]
                if number > 0:
                    seconds[side].append(found["seconds"] / case.timed_steps)
                if number == case.rounds:
                    jobs[side].finish()
            print(f"\r{case.title}: round {number} of {case.rounds}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return seconds, losses


def ratio(seconds: Seconds, above: Side, below: Side) -> dict[str, float]:
    """Of two sides' times in the same round."""
    return asdict(Spread.of([a / b for a, b in zip(seconds[above], seconds[below], strict=True)]))


def summarise(case: Case, seconds: Seconds) -> dict[str, Any]:
    """The row of a case."""
    several = {shards: (LOCKSTEP, shards) for shards in ALL_SHARDS if LARGE in seconds}
    return {
        **asdict(case),
        "title": case.title,
        "milliseconds": 1000 * Spread.of(seconds[OURS]).median,
        "over_same_passes": ratio(seconds, OURS, SAME),
        "over_one_pass": {shards: ratio(seconds, side, LARGE) for shards, side in several.items()},
    }


def pass_by_pass(rows: list[dict[str, Any]]) -> str:
    """The table of what Lockstep adds to the passes themselves."""
    header = [f"{SHARDS} shards", "global batch", "ms a step", f"over DDP with {SHARDS} passes"]
    return markdown_table(
        header,
        [
            [
                row["title"],
                str(row["global_batch"]),
                f"{row['milliseconds']:.1f}",
                Spread(**row["over_same_passes"]).text(2),
            ]
            for row in rows
        ],
    )


def by_shards(rows: list[dict[str, Any]]) -> str:
    """The table of what small passes cost beside large ones."""
    header = ["over DDP with one pass on each worker", *(f"V = {shards}" for shards in ALL_SHARDS)]
    return markdown_table(
        header,
        [
            [row["title"], *(f"{Spread(**each).median:.2f}" for each in row["over_one_pass"].values())]
            for row in rows
            if row["over_one_pass"]
        ],
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of the smallest blocks: does it run?")
    parser.add_argument("--model", choices=list(KINDS), help="only this one")
    parser.add_argument("--workers", type=int, choices=[1, 2], help="only so many")
    parser.add_argument("--rounds", type=int, help="instead of 6")
    parser.add_argument("--json", type=Path, help="where all goes that was measured (default: results/invariance.json)")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/")
    args = parser.parse_args()
    if args.rounds is not None and args.rounds < 1:
        parser.error("--rounds: expected a whole number of at least 1")
    if args.write and (args.quick or args.model or args.workers):
        parser.error("--write: only the whole run is for the documentation: every case, without --quick")
    return args


def chosen_cases(args: argparse.Namespace) -> list[Case]:
    cases = [case for case in CASES if args.model in (None, case.model) and args.workers in (None, case.workers)]
    if args.quick:
        cases = [replace(case, global_batch=32, timed_steps=1, rounds=1) for case in cases]
    return cases if args.rounds is None else [replace(case, rounds=args.rounds) for case in cases]


def main() -> None:
    args = parse()
    machine, rows, kept = describe_machine(), [], {}
    for case in chosen_cases(args):
        seconds, losses = measure(case)
        rows.append(summarise(case, seconds))
        named = {f"{who}, {passes or 'one'} passes": side for side in case.sides for who, passes in [side]}
        kept[case.title] = {
            name: {"seconds": seconds[side], "last_mean_loss": losses[side]} for name, side in named.items()
        }
    machine["load_average_after"] = round(os.getloadavg()[0], 2)
    line = machine_line(machine, f"{load_images(1).name} images")
    text = f"{pass_by_pass(rows)}\n\n{by_shards(rows)}\n\n{line}"
    print(f"\n{text}")
    if args.json or not args.quick:
        write_json(args.json or RESULTS / "invariance.json", {"machine": machine, "rows": rows, "measured": kept})
    if args.write:
        write_between(DOCS / "invariance.md", "invariance", text)


if __name__ == "__main__":
    main()
