"""Compares what trainers make of one program on 1, 2 and 3 workers: Lockstep, Accelerate,
Lightning, Transformers.

A small GPT-2 is trained on sentences of different lengths with padding, 12 sentences a step over
all workers, with a learning rate that falls linearly to 0. Asked is whether the answer depends on
the number of workers: the loss over all sentences after 50 steps, the learning rate then, and which
sentences are used after a resume in the middle of an epoch.

    python benchmarks/trainers.py            # some five minutes on two idle cores
    python benchmarks/trainers.py --quick    # a smoke run of two of the sides on 1 and 2 workers
    python benchmarks/trainers.py --write    # also puts the table into docs/language-models.md

It needs the packages accelerate, lightning and transformers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from common import describe_machine, markdown_table
from frame import Benchmark
from side_trainers import EPOCH, SENTENCES, SIDES

BENCHMARK = Benchmark("trainers", __doc__, "language-models.md")
STEPS = 50
OF = 60
STOPPED = EPOCH * 2 // 3
TITLES = {
    "lockstep": "Lockstep",
    "accelerate": "Accelerate",
    "lightning": "Lightning",
    "transformers": "Transformers",
}
PACKAGES = {"lockstep": "lockstep-train"}


def run(side: str, workers: int, folder: Path, **job: Any) -> list[dict[str, Any]]:
    """Run a side on some workers; returns what each rank has found."""
    launcher = ["-m", "lockstep", "run", "-np", str(workers), "--threads", "1"]
    if side != "lockstep":
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
    program = Path(__file__).with_name("side_trainers.py")
    words = json.dumps({"folder": str(folder), **job})
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, *launcher, str(program), side, words]
    ended = subprocess.run(
        command, env=variables, capture_output=True, text=True, cwd=folder, timeout=600
    )
    if ended.returncode:
        raise SystemExit(f"error: {side} on {workers} workers failed\n{ended.stderr[-3000:]}")
    files = sorted(folder.glob("found-*.json"))
    results = [json.loads(file.read_text()) for file in files]
    for file in files:
        file.unlink()
    return results


def answers(side: str, counts: Sequence[int]) -> dict[int, dict[str, Any]]:
    """Return the loss and the learning rate after `STEPS` steps by number of workers."""
    found = {}
    for workers in counts:
        with tempfile.TemporaryDirectory() as folder:
            (first, *_) = run(side, workers, Path(folder), steps=STEPS, of=OF)
        found[workers] = {name: first[name] for name in ("loss", "learning_rate")}
        print(f"{side} on {workers} workers: loss {first['loss']:.6f}", flush=True)
    return found


def resumed(side: str, before: int, after: int) -> dict[str, int]:
    """Stop a run within an epoch, and resume it to the epoch's end: how many sentences are left out
    or used again.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parts = run(side, before, folder, steps=STOPPED, of=OF, saves=True)
        parts += run(side, after, folder, steps=EPOCH, of=OF, resumes=True)
    uses = Counter(number for part in parts for number in part["seen"])
    found = {
        "left out": sum(1 for number in range(SENTENCES) if not uses[number]),
        "used again": sum(1 for count in uses.values() if count > 1),
    }
    print(f"{side}, resumed on {after} workers after {before}: {found}", flush=True)
    return found


def spread(values: Sequence[float]) -> float:
    """Return the largest difference from the first value, relative to it."""
    return max(abs(value - values[0]) / abs(values[0]) for value in values)


def shown(
    side: str, found: Mapping[int, Mapping[str, Any]], again: Sequence[Mapping[str, int]]
) -> list[str]:
    """Return a row of the table."""
    losses = [each["loss"] for each in found.values()]
    rates = [each["learning_rate"] for each in found.values()]
    problems = [
        " and ".join(f"{count} {what}" for what, count in each.items() if count) for each in again
    ]
    return [
        f"{TITLES[side]} {package(side)}",
        f"{spread(losses):.1e}",
        "yes" if spread(rates) < 1e-6 else f"no: {', '.join(f'{rate:.2g}' for rate in rates)}",
        *(f"no: {each} of {SENTENCES}" if each else "yes" for each in problems),
    ]


def package(side: str) -> str:
    """Return the version of a side's package."""
    try:
        return version(PACKAGES.get(side, side))
    except PackageNotFoundError:
        return ""


def main() -> None:
    """Run from the command line."""
    args = BENCHMARK.parse(BENCHMARK.parser("1"))
    sides, counts = (
        (list(SIDES), (1, 2, 3)) if not args.quick else (["lockstep", "transformers"], (1, 2))
    )
    machine = describe_machine()
    found = {side: answers(side, counts) for side in sides}
    again = {side: [resumed(side, 2, 2), resumed(side, 2, 1)] for side in sides}
    table = markdown_table(
        [
            "trainer",
            f"loss after {STEPS} steps on {', '.join(map(str, counts))} workers: largest relative "
            "difference",
            "learning rate the same",
            "after a resume within an epoch exactly the missing sentences: 2 workers",
            "2, then 1",
        ],
        [shown(side, found[side], again[side]) for side in sides],
    )
    BENCHMARK.publish(
        args,
        machine,
        table,
        "sentences made by the script",
        answers=found,
        resumed=again,
        versions={side: package(side) for side in sides},
    )


if __name__ == "__main__":
    main()
