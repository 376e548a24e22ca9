"""Measures how much processor time a step saves where workers keep freed memory, and what memory
that takes.

Workers set glibc's mmap and trim thresholds at their start; the other side has glibc's defaults.
Jobs of one worker take turns, every second round in the opposite order. A job's figure is the
median of the processor time of its steps after the first ones; a round gives one ratio, and the
median over the rounds counts. Losses must be equal in every bit.

    python benchmarks/kept_memory.py             # some seven minutes on an idle core
    python benchmarks/kept_memory.py --quick     # a smoke run; its figures say nothing
    python benchmarks/kept_memory.py --write     # also puts the table into docs/performance.md
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import Spread, describe_machine, markdown_table
from frame import Benchmark, chosen

BENCHMARK = Benchmark("kept_memory", __doc__)
TITLES = {
    "resnet18": "ResNet-18, batch 32",
    "gpt": "GPT of 100 M parameters",
    "lenet": "LeNet, batch 256",
}
# Whoever has a setting of the allocator keeps it: this one changes nothing else.
SIDES: dict[str, dict[str, str]] = {"kept": {}, "default": {"MALLOC_PERTURB_": "0"}}


@dataclass(frozen=True)
class Case:
    """What is trained, for how many steps."""

    model: str
    steps: int
    rounds: int = 5


CASES = [Case("resnet18", 10), Case("gpt", 5), Case("lenet", 30)]


def measure(case: Case, side: str) -> dict[str, Any]:
    """Run one job; what its worker has measured."""
    script = Path(__file__).with_name("side_kept_memory.py")
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        job = [str(script), case.model, str(case.steps), str(result)]
        launcher = [sys.executable, "-m", "lockstep", "run", "-n", "1", "--threads", "1"]
        subprocess.run([*launcher, *job], check=True, env={**os.environ, **SIDES[side]})
        measured: dict[str, Any] = json.loads(result.read_text())
    return measured


def compare(case: Case) -> list[dict[str, dict[str, Any]]]:
    """All rounds: what each side has measured."""
    rounds = []
    for number in range(case.rounds):
        order = list(SIDES) if number % 2 else list(SIDES)[::-1]
        sides = {side: measure(case, side) for side in order}
        if sides["kept"]["loss"] != sides["default"]["loss"]:
            raise SystemExit(f"{case.model}: the sides have different losses: {sides}")
        print(json.dumps({"model": case.model, **sides}), flush=True)
        rounds.append(sides)
    return rounds


def as_table(results: dict[str, list[dict[str, dict[str, Any]]]]) -> str:
    """The table of all models."""
    rows = []
    for model, rounds in results.items():
        row = [TITLES[model]]
        for what in ("processor", "faults", "resident"):
            for side in SIDES:
                middle = Spread.of([sides[side][what] for sides in rounds]).median
                row.append(f"{1e3 * middle:,.0f} ms" if what == "processor" else f"{middle:,.0f}")
        ratios = [sides["kept"]["processor"] / sides["default"]["processor"] for sides in rounds]
        rows.append([*row, Spread.of(ratios).text(3)])
    head = ["", "a step, kept", "default", "page faults, kept", "default", "MB, kept", "default"]
    return markdown_table([*head, "processor time, kept / default"], rows)


def main() -> None:
    """Measure all models, and show the table."""
    parser = BENCHMARK.parser("5")
    parser.add_argument("--model", choices=TITLES)
    args = BENCHMARK.parse(parser, "model")
    machine = describe_machine()
    cases = chosen(CASES, args, steps=3)
    results = {case.model: compare(case) for case in cases}
    measured = {"cases": [asdict(case) for case in cases], "results": results}
    BENCHMARK.publish(args, machine, as_table(results), "random data", measured=measured)


if __name__ == "__main__":
    main()
