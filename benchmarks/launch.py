"""Measures how long launchers take from the command to the end of the first all-reduce, and to
start workers afresh.

``lockstep run`` and torchrun start the same program, which joins a group over Gloo and adds up one
number; the last rank's time counts. Then rank 1 fails on purpose, and what counts is the time from
there to the end of the first all-reduce of the workers that take their place. The launchers take
turns; the ratio of two neighbours is one value, and the median over the rounds counts.

    python benchmarks/launch.py               # some three minutes on two idle cores
    python benchmarks/launch.py --quick       # a smoke run; its figures say nothing
    python benchmarks/launch.py --write       # also the table in docs/performance.md
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import Spread, describe_machine, markdown_table
from frame import Benchmark

BENCHMARK = Benchmark("launch", __doc__)

PROGRAM = Path(__file__).resolve().parent / "side_launch.py"
LOCKSTEP = "lockstep run"
TORCHRUN = "torchrun"
ROUNDS = {"start": 9, "restart": 3}
RANKS = (2, 4)
LIMIT = 15.0  # seconds for one job; beyond it something hangs


def command(launcher: str, ranks: int, restarts: int) -> list[str]:
    if launcher == LOCKSTEP:
        return [
            sys.executable,
            "-m",
            "lockstep",
            "run",
            "-q",
            "-np",
            str(ranks),
            "--restarts",
            str(restarts),
        ]
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    # its default rendezvous keeps the words of the first workers, over which the second ones
    # stumble (torch 2.13)
    return [*words, "--standalone", "--max-restarts", str(restarts)] if restarts else words


def start(launcher: str, ranks: int) -> float:
    """Seconds from the command to the end of the first all-reduce."""
    with tempfile.TemporaryDirectory(prefix="launch-") as folder:
        began = time.time()
        trouble = run([*command(launcher, ranks, 0), str(PROGRAM), folder, "gloo"])
        if trouble:
            raise SystemExit(trouble)
        return latest(Path(folder), 0, ranks) - began


def restart(launcher: str, ranks: int) -> float:
    """Seconds from a rank's failure to the end of the first all-reduce of those started afresh; inf
    if none came.
    """
    with tempfile.TemporaryDirectory(prefix="launch-") as folder:
        if run([*command(launcher, ranks, 1), str(PROGRAM), folder, "gloo", "fail"]):
            return math.inf
        return latest(Path(folder), 1, ranks) - float(Path(folder, "failed").read_text())


def latest(folder: Path, attempt: int, ranks: int) -> float:
    return max(float((folder / f"{attempt}-{rank}").read_text()) for rank in range(ranks))


def run(words: list[str]) -> str:
    """Run a command to its end; what went wrong, or ""."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(words, env=env, stdout=said, stderr=said)
        try:
            code = process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            end_all_with(words[-3] if "fail" in words else words[-2])
            return f"{' '.join(words)}: no end within {LIMIT:.0f} s"
        said.seek(0)
        return f"{' '.join(words)}\nleft with {code}\n{said.read()}" if code else ""


def end_all_with(folder: str) -> None:
    """End the ranks that a launcher has left behind: they have `folder` in their command."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if folder.encode() in path.read_bytes():
                os.kill(int(path.parent.name), signal.SIGKILL)


CASES = {"start": start, "restart": restart}
WORDS = {
    "start": "command to first all-reduce",
    "restart": "failure to first all-reduce of new workers",
}


def measure(case: str, ranks: int, rounds: int) -> dict[str, Any]:
    """Both launchers in turns; the first round is not counted."""
    seconds: dict[str, list[float]] = {LOCKSTEP: [], TORCHRUN: []}
    for number in range(rounds + 1):
        for launcher in list(seconds) if number % 2 else reversed(list(seconds)):
            found = CASES[case](launcher, ranks)
            if number > 0:
                seconds[launcher].append(found)
        print(
            f"\r{case}, {ranks} ranks: round {number} of {rounds}",
            end="",
            file=sys.stderr,
            flush=True,
        )
    print(file=sys.stderr)
    ratios = [other / own for own, other in zip(seconds[LOCKSTEP], seconds[TORCHRUN], strict=True)]
    lost = {launcher: sum(map(math.isinf, values)) for launcher, values in seconds.items()}
    return {
        "case": case,
        "ranks": ranks,
        "rounds": rounds,
        "seconds": {launcher: spread(values) for launcher, values in seconds.items()},
        "lost": lost,
        "torchrun_over_lockstep": spread(ratios),
    }


def spread(values: list[float]) -> dict[str, float] | None:
    """Of those jobs that came to an end."""
    ended = [value for value in values if math.isfinite(value)]
    return asdict(Spread.of(ended)) if ended else None


def as_table(rows: list[dict[str, Any]]) -> str:
    header = ["", "lockstep run", "torchrun", "torchrun / lockstep run"]
    return markdown_table(header, [cells(row) for row in rows])


def cells(row: dict[str, Any]) -> list[str]:
    what = WORDS[row["case"]]
    ratio = row["torchrun_over_lockstep"]
    times = [time_of(row, launcher) for launcher in (LOCKSTEP, TORCHRUN)]
    return [f"{row['ranks']} ranks, {what}", *times, Spread(**ratio).text(2) if ratio else "–"]


def time_of(row: dict[str, Any], launcher: str) -> str:
    found = row["seconds"][launcher]
    lost = row["lost"][launcher]
    text = f"{found['median']:.2f} s" if found else ""
    return text + (f" ({lost} of {row['rounds']} did not come back)" if lost else "")


def main() -> None:
    args = BENCHMARK.parse(
        BENCHMARK.parser(f"{ROUNDS['start']} starts and {ROUNDS['restart']} failures")
    )
    machine = describe_machine()
    rounds = dict.fromkeys(ROUNDS, args.rounds or 1) if args.quick or args.rounds else ROUNDS
    rows = [measure(case, ranks, rounds[case]) for case in CASES for ranks in RANKS]
    BENCHMARK.publish(args, machine, as_table(rows), "Gloo, one thread each", rows=rows)


if __name__ == "__main__":
    main()
