"""Counts what `lockstep blame` names in runs with one damaged sample: the step, and the sample.

A seed draws the sample; networks (an MLP with dropout, LeNet, one with batch norm) and sources of
the data (a map data set, a `lockstep.data.Stream`) take turns. The sample is a thousand times too
bright, or has one NaN. A bright one may do nothing, as its loss may be exactly 0: then there is no
gradient. So each run has a twin with the undamaged sample, and counts only if the loss, the norm of
the gradient or that of the buffers of the first step with the sample is at least twice that of the
twin, which is the same up to there. Seeds are added until so many runs count. The step is named if
the sample is in the step that `lockstep blame` chooses: a run is longer than an epoch, and the
damage may be larger the second time.

    python benchmarks/blame.py            # about half an hour
    python benchmarks/blame.py --quick    # a smoke run; its figures say nothing
    python benchmarks/blame.py --folder runs/blame    # keeps the runs, and goes on with them
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import lockstep
from common import describe_machine, markdown_table
from frame import Benchmark
from lockstep.errors import LockstepError
from lockstep.proof.spikes import COLUMNS
from side_blame import GLOBAL_BATCH, NETWORKS, SOURCES, STEPS, digits_stream

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from support import warm_python

BENCHMARK = Benchmark("blame", __doc__, "proof.md")
SIDE = Path(__file__).resolve().parent / "side_blame.py"
RUNS = 50
EFFECT = 2.0
MOST_SEEDS = 400
TITLES = {"x1000": "1,000 times too bright", "nan": "one NaN"}


def train(run_dir: Path, seed: int, network: str, damage: str, source: str) -> dict[str, Any]:
    """Make a run, unless it is there; what it has reported."""
    report = run_dir / "report.json"
    if not report.exists():
        words = [str(SIDE), str(run_dir), str(seed), network, damage, source]
        done = warm_python.run(words, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=600.0)
        if done.returncode:
            raise SystemExit(f"{' '.join(words)} failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(report.read_text())
    return found


def has_effect(run_dir: Path, twin_dir: Path, step: int) -> bool:
    """Whether a damaged sample has raised the loss or a norm of the first step with it."""
    damaged = lockstep.ledger(run_dir).record(step)
    healthy = lockstep.ledger(twin_dir).record(step)
    return any(not damaged[name] < EFFECT * healthy[name] for name in COLUMNS if healthy[name])


def steps_with(sample: int, seed: int, source: str, run_dir: Path) -> list[int]:
    """The steps of a run that use a sample."""
    data: Any = range(len(lockstep.data.digits()[0]))
    if source == "stream":
        data = digits_stream(run_dir)
    loader = lockstep.Loader(data, GLOBAL_BATCH, seed=seed)
    steps = []
    first = 0
    while first < STEPS:
        order = loader.order(first // len(loader))
        steps.append(first + int((order == sample).nonzero()) // GLOBAL_BATCH)
        first += len(loader)
    return steps


def blamed(folder: Path, seed: int, damage: str) -> dict[str, Any]:
    """A run with the damaged sample of a seed, and what is blamed for it."""
    network = NETWORKS[seed % len(NETWORKS)]
    source = SOURCES[seed % len(SOURCES)]
    run_dir = folder / f"{damage}-{seed}"
    kept = run_dir / "blamed.json"
    if kept.exists():
        stored: dict[str, Any] = json.loads(kept.read_text())
        return stored
    run = train(run_dir, seed, network, damage, source)
    row: dict[str, Any] = {"seed": seed, "network": network, "source": source, **run}
    row["has_effect"] = damage == "nan"
    if not row["has_effect"]:
        twin_dir = folder / f"{source}-twin-{seed}"
        train(twin_dir, seed, network, "none", source)
        row["has_effect"] = has_effect(run_dir, twin_dir, run["step"])
    row |= {"blamed_step": None, "has_sample": False, "culprits": [], "error": ""}
    if row["has_effect"]:
        try:
            found = lockstep.blame(run_dir)
        except LockstepError as error:
            row["error"] = str(error)
        else:
            row["blamed_step"] = found.step
            row["has_sample"] = found.step in steps_with(run["sample"], seed, source, run_dir)
            row["culprits"] = [[each.index, each.origin, each.what] for each in found.culprits]
            row["same_bits"] = found.replayed.difference is None
    kept.write_text(json.dumps(row))
    return row


def main() -> None:
    """Make the runs that are missing, and count."""
    parser = BENCHMARK.parser(f"{RUNS} runs of each damage that count")
    parser.add_argument("--folder", type=Path, help="where the runs are kept (default: nowhere)")
    parser.add_argument("--damage", choices=TITLES, help="only this one")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: 0)")
    args = BENCHMARK.parse(parser, "damage", "first")
    machine = describe_machine()
    wanted = 2 if args.quick else args.rounds or RUNS
    rows: dict[str, list[dict[str, Any]]] = {}
    table = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for damage, title in TITLES.items():
            if args.damage not in (None, damage):
                continue
            tried = rows[damage] = []
            counted: list[dict[str, Any]] = []
            for seed in range(args.first, args.first + MOST_SEEDS):
                if len(counted) == wanted:
                    break
                row = blamed(folder.resolve(), seed, damage)
                tried.append(row)
                if row["has_effect"]:
                    counted.append(row)
                    print(f"{title}: {describe(row)}", flush=True)
            table += [counts(title, source, tried, counted) for source in SOURCES]
    header = ["One damaged sample", "Data", "Runs", "With effect", "Step named"]
    header += ["Sample named first", "Both", "Origin right", "Same bits"]
    BENCHMARK.publish(
        args, machine, markdown_table(header, table), "the handwritten digits", **rows
    )


def describe(row: dict[str, Any]) -> str:
    """A line about a run that counts."""
    head = f"seed {row['seed']}, {row['network']}, {row['source']}: "
    what = f"sample {row['sample']} in step {row['step']}"
    if row["error"]:
        return f"{head}{what}: {row['error']}"
    first = row["culprits"][0][0] if row["culprits"] else None
    return f"{head}{what}: named sample {first} in step {row['blamed_step']}"


def counts(
    title: str, source: str, tried: list[dict[str, Any]], counted: list[dict[str, Any]]
) -> list[str]:
    """A row of the table."""
    of_source = [row for row in counted if row["source"] == source]
    steps = [row["has_sample"] for row in of_source]
    samples = [
        bool(row["culprits"]) and row["culprits"][0][0] == row["sample"] for row in of_source
    ]
    both = sum(map(all, zip(steps, samples, strict=True)))
    right = sum(
        bool(row["culprits"]) and row["culprits"][0][1].startswith("in the sample itself: 1 of 784")
        for row in of_source
    )
    number = sum(row["source"] == source for row in tried)
    same = sum(row.get("same_bits", False) for row in of_source)
    figures = [number, len(of_source), sum(steps), sum(samples), both]
    origin = str(right) if title == TITLES["nan"] else ""
    return [title, source, *map(str, figures), origin, str(same)]


if __name__ == "__main__":
    main()
