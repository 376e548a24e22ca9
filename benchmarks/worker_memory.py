"""Measures how much memory each worker needs at its peak, with virtual workers, on one worker and
on several, with the optimizer whole on each and divided among them.

Each job trains a GPT for a few steps with AdamW; its optimizer state is all there after the first.
This program watches the workers from outside: the peak of the resident set (VmHWM), and the largest
proportional set size seen (Pss, which divides what is shared among those that share it). Bytes a
parameter are those of the largest Pss beyond that of the worker when it has trained a tiny model in
the same way. The fingerprints of all jobs must be equal.

    python benchmarks/worker_memory.py             # some five minutes; needs 16 GB of memory
    python benchmarks/worker_memory.py --quick     # a smoke run with a small model
    python benchmarks/worker_memory.py --write     # also puts the table into docs/performance.md

The machine need not be quiet.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import describe_machine, markdown_table
from frame import Benchmark

BENCHMARK = Benchmark("worker_memory", __doc__)
WORKERS = (1, 2, 3, 4)
INTERVAL = 0.02  # seconds between two looks at the proportional set size


def watch(job: subprocess.Popen[bytes], folder: Path) -> dict[int, int]:
    """The largest proportional set size seen of each worker, in kB, until the job ends."""
    seen: dict[int, int] = {}
    while job.poll() is None:
        for file in folder.glob("*.pid"):
            rank = int(file.stem)
            try:
                rollup = Path("/proc", file.read_text(), "smaps_rollup").read_text()
            except (OSError, ValueError):  # it begins, or has ended
                continue
            pss = next(line for line in rollup.splitlines() if line.startswith("Pss:"))
            seen[rank] = max(seen.get(rank, 0), int(pss.split()[1]))
        time.sleep(INTERVAL)
    return seen


def measure(size: str, workers: int, options: list[str]) -> dict[str, Any]:
    """Run one job; the peaks of its workers in MB, and the fingerprint."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        script = Path(__file__).with_name("side_worker_memory.py")
        launcher = [sys.executable, "-m", "lockstep", "run", "-n", str(workers), "--threads", "1"]
        job = subprocess.Popen([*launcher, str(script), size, str(folder), *options])
        pss = watch(job, folder)
        if job.returncode:
            raise SystemExit(f"{workers} workers: the job ended with {job.returncode}")
        found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(workers)]
    return {
        "workers": workers,
        "options": options,
        "fingerprint": found[0]["fingerprint"],
        "resident": [each["resident"] // 1000 for each in found],
        "proportional": [pss[rank] // 1000 for rank in range(workers)],
        "before": [each["before"] // 1000 for each in found],
        "parameters": found[0]["parameters"],
        "processor": [each["processor"] for each in found],
    }


def as_table(jobs: list[dict[str, Any]]) -> str:
    """The table of all jobs."""
    alone = max(jobs[0]["proportional"])
    whole = {job["workers"]: max(job["proportional"]) for job in jobs if not job["options"]}
    rows = []
    for job in jobs:
        most = max(job["proportional"])
        pairs = zip(job["proportional"], job["before"], strict=True)
        beyond = max(peak - before for peak, before in pairs)
        divided = f"{most / whole[job['workers']]:.2f}" if job["options"] else ""
        rows.append(
            [
                f"{job['workers']}, divided optimizer" if divided else str(job["workers"]),
                f"{most:,}",
                f"{max(job['resident']):,}",
                f"{most / alone:.2f}",
                divided,
                f"{1e6 * beyond / job['parameters']:.1f}",
            ]
        )
    head = [
        *("workers", "MB (Pss)", "MB (VmHWM)", "over one worker alone"),
        *("over the same, not divided", "bytes a parameter"),
    ]
    return markdown_table(head, rows)


def main() -> None:
    """Measure all jobs, and show what was found."""
    parser = BENCHMARK.parser("1")
    parser.add_argument("--size", choices=("1M", "10M", "50M", "100M"))
    parser.add_argument("--workers", type=int, nargs="+")
    args = BENCHMARK.parse(parser, "size", "workers")
    machine = describe_machine()
    size = args.size or ("1M" if args.quick else "100M")
    jobs = []
    for workers in args.workers or WORKERS:
        for options in [[], ["--shard-optimizer"]] if workers > 1 else [[]]:
            jobs.append(measure(size, workers, options))
            print(json.dumps(jobs[-1]), flush=True)
    fingerprints = {job["fingerprint"] for job in jobs}
    if len(fingerprints) > 1:
        raise SystemExit(f"the jobs have different weights: {sorted(fingerprints)}")
    BENCHMARK.publish(args, machine, as_table(jobs), f"GPT of {size}", jobs=jobs)


if __name__ == "__main__":
    main()
