"""Measures an all-reduce of 4 bytes over shm as programs call it: by torch.distributed and by a
communicator, watched and not.

Two workers take turns with each way of calling it, in batches of calls; the least batch counts, as
whatever else runs on the host makes a batch longer and none shorter.

    python benchmarks/small_all_reduces.py             # less than a minute on two idle cores
    python benchmarks/small_all_reduces.py --quick     # a smoke run; its figures say nothing
    python benchmarks/small_all_reduces.py --write     # also the table in docs/performance.md
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import lockstep
from common import describe_machine, markdown_table
from frame import Benchmark
from lockstep.communicator import Communicator
from side_collectives import group_of_nothing
from watchdog import groups, unwatched

BENCHMARK = Benchmark("small_all_reduces", __doc__)
CALLS = 100
BATCHES = 1000


def measure(batches: int) -> dict[str, float]:
    """Run by both workers; what rank 0 has measured, in seconds a call."""
    lockstep.init("cpu")
    plain, watched = groups("shm")
    with unwatched():
        nothing = group_of_nothing()
    unwatched_comm = Communicator(plain)
    comm = Communicator(watched)
    tensor = torch.ones(1)
    ways: dict[str, Callable[[], Any]] = {
        "`dist.all_reduce` of a group that does nothing": lambda: dist.all_reduce(
            tensor, group=nothing
        ),
        "`dist.all_reduce`, not watched": lambda: dist.all_reduce(tensor, group=plain),
        "`Communicator.allreduce`, not watched": lambda: unwatched_comm.allreduce(tensor),
        "`dist.all_reduce`, watched": lambda: dist.all_reduce(tensor, group=watched),
        "`Communicator.allreduce`, watched": lambda: comm.allreduce(tensor),
    }
    least = dict.fromkeys(ways, float("inf"))
    for _ in range(batches):
        for name, call in ways.items():
            call()
            began = time.perf_counter()
            for _ in range(CALLS):
                call()
            least[name] = min(least[name], (time.perf_counter() - began) / CALLS)
    return least


def main() -> None:
    args = BENCHMARK.parse(BENCHMARK.parser(f"{BATCHES} batches"))
    machine = describe_machine()
    batches = 3 if args.quick else args.rounds or BATCHES
    least = lockstep.launch(measure, batches, workers=2, threads=1)
    rows = [[name, f"{1e6 * seconds:.1f}"] for name, seconds in least.items()]
    table = markdown_table(["all-reduce of 4 bytes, two workers, shm", "µs"], rows)
    BENCHMARK.publish(args, machine, table, "float32", seconds=least)


if __name__ == "__main__":
    main()
