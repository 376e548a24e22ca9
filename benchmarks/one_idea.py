"""Shows the one idea: with the same program, more workers are the same training.

LeNet is trained on handwritten digits on 1, 2, 4 and 8 workers: with Lockstep, 64 samples a step
over all workers and `virtual_workers=8`, and with DDP as PyTorch's tutorial shows it, 64 samples a
step on each worker. Lockstep's losses and weights must be the same at any number of workers, bit
for bit. No time is measured: the host may be busy.

    python benchmarks/one_idea.py            # about two minutes on two cores
    python benchmarks/one_idea.py --quick    # a smoke run of 1 and 2 workers
    python benchmarks/one_idea.py --write    # also puts the table into docs/performance.md
    python benchmarks/readme.py              # then draws the picture
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import describe_machine, markdown_table
from frame import Benchmark

BENCHMARK = Benchmark("one_idea", __doc__)
WORKERS = (1, 2, 4, 8)
EPOCHS = 10
TITLES = {
    "lockstep": "Lockstep, 64 samples a step over all workers",
    "ddp": "DDP, 64 samples a step on each worker",
}
LAUNCHERS = {
    "lockstep": ("-m", "lockstep", "run", "--quiet", "--no-prefix", "--threads", "1", "-np"),
    "ddp": ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node"),
}


def train(side: str, workers: int, epochs: int) -> dict[str, Any]:
    """Return the test losses after 0, 1, 2, … epochs, and the fingerprint of the model."""
    program = Path(__file__).with_name("side_one_idea.py")
    command = [sys.executable, *LAUNCHERS[side], str(workers), str(program), side, str(epochs)]
    ended = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    results = [line for line in ended.stdout.splitlines() if line.startswith("result ")]
    if ended.returncode or not results:
        raise SystemExit(f"error: {side} on {workers} workers failed\n{ended.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(results[-1].removeprefix("result "))
    print(
        f"{side} on {workers} workers: loss {found['losses'][-1]:.6f}, {found['fingerprint'][:12]}",
        flush=True,
    )
    return found


def main() -> None:
    """Run from the command line."""
    args = BENCHMARK.parse(BENCHMARK.parser("1"))
    counts, epochs = ((1, 2), 1) if args.quick else (WORKERS, EPOCHS)
    machine = describe_machine()
    found = {
        side: {workers: train(side, workers, epochs) for workers in counts} for side in LAUNCHERS
    }
    if len({json.dumps(each) for each in found["lockstep"].values()}) > 1:
        raise SystemExit(f"error: Lockstep's runs differ: {found['lockstep']}")
    table = markdown_table(
        ["", *(f"{workers} worker{'s' if workers > 1 else ''}" for workers in counts)],
        [
            [f"{TITLES[side]}: {what}", *(show(each) for each in runs.values())]
            for side, runs in found.items()
            for what, show in (
                (f"test loss after {epochs} epochs", lambda each: f"{each['losses'][-1]:.4f}"),
                ("fingerprint", lambda each: each["fingerprint"][:8]),
            )
        ],
    )
    BENCHMARK.publish(args, machine, table, "digits", **found)


if __name__ == "__main__":
    main()
