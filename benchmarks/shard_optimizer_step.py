"""Measures the time of a step with the optimizer divided among two workers, over one with the whole
optimizer on each.

One job of two workers trains a GPT with AdamW twice, with and without `shard_optimizer`; both take
turns, a step each, and every second round begins with the other one. It does so with virtual
workers, where gradients are divided as well, and without. A round gives one ratio of the processor
time of both workers, and one of the time on the clock of rank 0; the median over the rounds counts.
After each round both models have the same weights, bit by bit.

    python benchmarks/shard_optimizer_step.py             # some five minutes; needs 5 GB of memory
    python benchmarks/shard_optimizer_step.py --quick     # a smoke run with a small model
    python benchmarks/shard_optimizer_step.py --write     # also the table in docs/performance.md
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import Spread, describe_machine, markdown_table, ratio
from frame import Benchmark

BENCHMARK = Benchmark("shard_optimizer_step", __doc__)
WORKERS = 2
VIRTUAL_WORKERS = {"8 virtual workers": 8, "none, DDP": 0}


def measure(size: str, rounds: int, virtual_workers: int) -> dict[str, Any]:
    """Run one job; what its rank 0 has measured."""
    with tempfile.TemporaryDirectory() as name:
        found = Path(name, "found.json")
        script = Path(__file__).with_name("side_shard_optimizer_step.py")
        launcher = [sys.executable, "-m", "lockstep", "run", "-n", str(WORKERS), "--threads", "1"]
        options = ["--virtual-workers", str(virtual_workers)] if virtual_workers else []
        subprocess.run(
            [*launcher, str(script), size, str(rounds), str(found), *options], check=True
        )
        measured: dict[str, Any] = json.loads(found.read_text())
    return measured


def as_table(measured: dict[str, dict[str, Any]]) -> str:
    """A row for each kind of training."""
    rows = []
    for name, kinds in measured.items():
        of_times = [
            Spread(**ratio(kinds[unit], "divided", "whole")).text(2)
            for unit in ("processor", "seconds")
        ]
        whole = Spread.of(kinds["seconds"]["whole"]).median
        rows.append([name, f"{1000 * whole:,.0f} ms", *of_times])
    head = [
        *("virtual workers", "a step with the whole optimizer on each"),
        *("divided over whole, processor time", "divided over whole, time"),
    ]
    return markdown_table(head, rows)


def main() -> None:
    """Measure all kinds, and show what was found."""
    parser = BENCHMARK.parser("16")
    parser.add_argument("--size", choices=("1M", "10M", "30M", "100M"))
    args = BENCHMARK.parse(parser, "size")
    machine = describe_machine()
    size = args.size or ("1M" if args.quick else "30M")
    rounds = args.rounds or (2 if args.quick else 16)
    measured = {}
    for name, virtual_workers in VIRTUAL_WORKERS.items():
        measured[name] = measure(size, rounds, virtual_workers)
        print(name, json.dumps(measured[name]), flush=True)
    BENCHMARK.publish(
        args,
        machine,
        as_table(measured),
        f"GPT of {size}, 8 texts of 32 tokens, AdamW (fused), two workers over shm",
        measured=measured,
    )


if __name__ == "__main__":
    main()
