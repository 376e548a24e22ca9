"""Measures collectives and messages of the backend "shm" against Gloo and against MPICH through
mpi4py.

All sides are started at once, and are idle, blocked in a read, but for the one whose turn it is. A
turn is a block of some 20 ms of calls of one operation, on buffers that stay the same; every second
round has the opposite order. The slowest rank's time counts. A round gives one ratio; the median
over the rounds counts. Results are checked once at each size.

    pip install -e '.[bench]'
    python benchmarks/collectives.py          # some six minutes on two idle cores
    python benchmarks/collectives.py --quick  # a smoke run; its figures say nothing
    python benchmarks/collectives.py --write  # also the tables and the picture in docs/
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from collective_tables import COPY, MPICH, NOTHING, SIDES, documented, size_text, tables
from common import DOCS, RESULTS, Spread, describe_machine, ratio, write_between, write_json
from exchanges import OPERATIONS
from figures import draw_collectives
from frame import Benchmark
from meter import Controlled
from ranks import GLOO, SHM, SHM_PYTHON
from turns import running

BENCHMARK = Benchmark("collectives", __doc__)

RANKS = [2, 4]
SIZES = [4, 64, *(kib << 10 for kib in (1, 4, 16, 64, 256)), *(mib << 20 for mib in (1, 4, 16, 64))]
QUICK_SIZES = [4, 64 << 10, 4 << 20]
TURN_S = 0.02
MOST_CALLS = 5000

Rounds = dict[str, list[float]]
"""Side → seconds of one call, one value a round."""


@dataclass(frozen=True)
class Started:
    """One side's ranks.

    Attributes:
        most: bytes of the largest buffer.
    """

    side: str
    workers: int
    meter: str
    most: int

    def command(self) -> list[str]:
        """Python starts its own ranks, and mpiexec MPI's."""
        path = str(Path(__file__).resolve().parent / "side_collectives.py")
        mpi = [find_mpiexec() or "mpiexec", "-n", str(self.workers), sys.executable, "-m", "mpi4py"]
        arguments = [f"--{name}={value}" for name, value in vars(self).items()]
        return [*(mpi if self.side == MPICH else [sys.executable]), path, *arguments]


@dataclass
class Contestant:
    """What takes a turn: a side, or what `shm`'s ranks do besides.

    Attributes:
        job: who does it.
        operation: what they are told.
        calls: how many of them make a block.
    """

    job: Controlled
    operation: str
    nbytes: int
    calls: int = 1

    def turn(self, turn_s: float, check: bool = False) -> float:
        """Seconds of one call on the slowest rank. The next block's calls are chosen to take
        `turn_s`.
        """
        order = {
            "operation": self.operation,
            "nbytes": self.nbytes,
            "calls": self.calls,
            "check": check,
        }
        seconds = max(reply["seconds"] for reply in self.job.ask(json.dumps(order)))
        self.calls = max(1, min(MOST_CALLS, 8 * self.calls, int(turn_s / seconds)))
        return seconds

    def warm_up(self, turn_s: float) -> None:
        """Check the result, and find the number of calls."""
        seconds = self.turn(turn_s, check=True)
        made = 1
        while seconds * made < turn_s / 2 and made < MOST_CALLS:
            made = self.calls
            seconds = self.turn(turn_s)


def contestants(
    jobs: dict[str, Controlled], operation: str, nbytes: int, smallest: bool
) -> dict[str, Contestant]:
    """Who takes turns at one size of one operation."""
    found = {side: Contestant(job, operation, nbytes) for side, job in jobs.items()}
    found[COPY] = Contestant(jobs[SHM], "copy", nbytes)
    if smallest and operation == "all-reduce":
        found[NOTHING] = Contestant(jobs[SHM], "nothing", nbytes)
    return found


Cases = dict[tuple[str, int], dict[str, Contestant]]
"""Operation and bytes → who takes turns."""


def measure(
    cases: Cases, rounds: int, turn_s: float, note: Callable[[str], None]
) -> dict[tuple[str, int], Rounds]:
    """Seconds of one call, for each case, contestant and round.

    A round visits every case: where two virtual cores lie to each other is a matter of the host,
    and changes what it costs them to share memory by a factor of up to seven for seconds or
    minutes. So a phase of that kind falls into a few rounds of all cases, and into no case as a
    whole.
    """
    for (operation, nbytes), found in cases.items():
        note(f"first calls: {operation}, {size_text(nbytes)}")
        for contestant in found.values():
            contestant.warm_up(turn_s)
    seconds: dict[tuple[str, int], Rounds] = {
        case: {name: [] for name in found} for case, found in cases.items()
    }
    for number in range(rounds):
        for case, found in cases.items():
            note(f"round {number + 1} of {rounds}: {case[0]}, {size_text(case[1])}")
            for name in list(found) if number % 2 else reversed(list(found)):
                seconds[case][name].append(found[name].turn(turn_s))
    return seconds


def ratio_if_there(seconds: Rounds, above: str, below: str) -> dict[str, float] | None:
    """Of two contestants' times in the same round; None where one took no part."""
    return ratio(seconds, above, below) if above in seconds and below in seconds else None


def summarise(ranks: int, operation: str, nbytes: int, seconds: Rounds) -> dict[str, Any]:
    """One row: medians of the times with their quartiles, ratios, and all that they come from."""
    seconds = {
        name: [float(f"{value:.4g}") for value in values] for name, values in seconds.items()
    }
    return {
        "ranks": ranks,
        "operation": operation,
        "bytes": nbytes,
        "seconds": {name: asdict(Spread.of(values)) for name, values in seconds.items()},
        "gloo_over_shm": ratio_if_there(seconds, GLOO, SHM),
        "mpich_over_shm": ratio_if_there(seconds, MPICH, SHM),
        "python_over_shm": ratio_if_there(seconds, SHM_PYTHON, SHM),
        "shm_over_copy": ratio_if_there(seconds, SHM, COPY),
        "rounds": seconds,
    }


def measure_all(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each number of ranks, operation and size."""

    def programs(folder: str, ranks: int) -> dict[str, tuple[list[str], Started]]:
        found = {
            side: Started(side, ranks, f"{folder}/{side}", max(args.sizes)) for side in args.sides
        }
        return {side: (started.command(), started) for side, started in found.items()}

    rows = []
    for ranks in args.ranks:
        with running(partial(programs, ranks=ranks)) as jobs:
            cases = {
                (operation, nbytes): contestants(jobs, operation, nbytes, nbytes == min(args.sizes))
                for operation in args.operation
                for nbytes in args.sizes
            }
            found = measure(cases, args.rounds, args.turn, partial(_note, ranks))
            rows += [summarise(ranks, *case, seconds) for case, seconds in found.items()]
    print(file=sys.stderr)
    return rows


def _note(ranks: int, text: str) -> None:
    print(f"\r{f'{ranks} ranks, {text}':<70}", end="", file=sys.stderr, flush=True)


def find_mpiexec() -> str | None:
    """The one that was installed beside this Python, or else any."""
    return shutil.which(
        "mpiexec",
        path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
    )


def available(sides: list[str]) -> list[str]:
    """`sides` without MPICH where it is not installed, which is said."""
    try:
        version("mpi4py"), version("mpich")
        installed = find_mpiexec() is not None
    except PackageNotFoundError:
        installed = False
    if MPICH in sides and not installed:
        print(
            "MPICH or mpi4py is not installed and left out: pip install -e '.[bench]'",
            file=sys.stderr,
        )
    return [side for side in sides if side != MPICH or installed]


def parse_size(text: str) -> int:
    """E.g. 4, 64K, 16M: bytes."""
    number = text.rstrip("KMkm")
    factor = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:].upper(), 1)
    if not number.isdigit() or int(number) * factor < 4 or int(number) * factor % 4:
        raise argparse.ArgumentTypeError(
            f"expected a multiple of 4 bytes such as 4, 64K or 16M, got {text!r}"
        )
    return int(number) * factor


def parse() -> argparse.Namespace:
    parser = BENCHMARK.parser("9")
    parser.add_argument("--operation", nargs="+", choices=OPERATIONS, help="only these")
    parser.add_argument("--ranks", nargs="+", type=int, choices=RANKS, help="only these")
    parser.add_argument(
        "--sizes", nargs="+", type=parse_size, help="bytes, such as 4 64K 16M, instead of eleven"
    )
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), help="only these, and shm")
    parser.add_argument("--figure", type=Path, help="draw the picture here as well")
    args = BENCHMARK.parse(parser, "operation", "ranks", "sizes", "sides")
    args.sides = available([side for side in SIDES if side == SHM or side in (args.sides or SIDES)])
    if args.write and args.sides != list(SIDES):
        parser.error(
            "--write: only the whole run is for the documentation: every side, MPICH's too"
        )
    args.operation = args.operation or OPERATIONS
    args.ranks = args.ranks or RANKS
    args.sizes = sorted(args.sizes or (QUICK_SIZES if args.quick else SIZES))
    args.rounds = args.rounds or (1 if args.quick else 9)
    args.turn = TURN_S / 4 if args.quick else TURN_S
    return args


def main() -> None:
    args = parse()
    began = time.monotonic()
    machine = describe_machine()
    if MPICH in args.sides:
        machine |= {"mpich": version("mpich"), "mpi4py": version("mpi4py")}
    rows = measure_all(args)
    machine["load_average_after"] = round(os.getloadavg()[0], 2)
    print(f"\n{tables(rows)}\n\nmeasured in {time.monotonic() - began:.0f} s")
    if args.json or not args.quick:
        write_json(args.json or RESULTS / "collectives.json", {"machine": machine, "rows": rows})
    picture = DOCS / "figures" / "collectives.png"
    for path in [args.figure] * bool(args.figure) + [picture] * args.write:
        draw_collectives(rows, SIDES, path)
    if args.write:
        write_between(
            DOCS / "performance.md",
            "collectives",
            documented(rows, machine, picture.relative_to(DOCS)),
        )


if __name__ == "__main__":
    main()
