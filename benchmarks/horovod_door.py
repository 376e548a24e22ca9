"""Measures Horovod's door beside torch.distributed: all-reduces of several sizes, and training steps of LeNet.

The sides are the door on Lockstep's shared memory ("hvd"), torch.distributed on the same ("shm"), and torch.distributed
on Gloo. All of them are in the same two processes and take turns; every second round goes in the opposite order. A turn
is as many calls as take about 20 ms, and its time that of the slower rank. An all-reduce is in place, a sum, and waited
for by itself: what costs the door most, as the ranks agree on each. A step of LeNet is one of `DistributedOptimizer`,
or of `DistributedDataParallel`, on 32 images a rank that lie in memory.

    python benchmarks/horovod_door.py             # some two minutes on two idle cores
    python benchmarks/horovod_door.py --quick     # a smoke run; its figures say nothing
    python benchmarks/horovod_door.py --write     # also the table in docs/horovod.md
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import lockstep
import lockstep.doors.horovod.torch as hvd
from common import (
    DOCS,
    RESULTS,
    Spread,
    describe_machine,
    load_images,
    machine_line,
    make_model,
    markdown_table,
    write_between,
    write_json,
)

SIDES = ["hvd", "shm", "gloo"]
SIZES = [4 << 10, 64 << 10, 1 << 20, 16 << 20]
LENET = "step of LeNet, 32 images a rank"
TURN_S = 0.02
MOST_CALLS = 2000

Call = Callable[[], Any]
Seconds = dict[str, dict[str, list[float]]]
"""What is done → side → seconds of one call, one value a round."""


# --- in a rank ----------------------------------------------------------------------------------------------


def work(sizes: list[int], rounds: int, turn_s: float) -> Seconds:
    """Measure everything; the same on both ranks."""
    torch.set_num_threads(1)
    lockstep.init("cpu", transport="shm")
    hvd.init()
    gloo = dist.new_group(backend="gloo")
    cases = {title(size): all_reduces(size, gloo) for size in sizes}
    cases[LENET] = steps(gloo)
    found: Seconds = {case: {side: [] for side in SIDES} for case in cases}
    calls = {(case, side): calls_for(call, turn_s) for case, sides in cases.items() for side, call in sides.items()}
    for number in range(rounds):
        for case, sides in cases.items():
            for side in SIDES if number % 2 == 0 else reversed(SIDES):
                found[case][side].append(timed(sides[side], calls[case, side]))
    hvd.shutdown()
    return found


def all_reduces(size: int, gloo: Any) -> dict[str, Call]:
    """By side, the sum of `size` bytes; of zeros, which stay what they are."""
    tensor = torch.zeros(size // 4)
    return {
        "hvd": lambda: hvd.allreduce_(tensor, op=hvd.Sum, name=f"sum of {size}"),
        "shm": lambda: dist.all_reduce(tensor),
        "gloo": lambda: dist.all_reduce(tensor, group=gloo),
    }


def steps(gloo: Any) -> dict[str, Call]:
    """By side, a training step."""
    images = load_images(64)
    inputs, labels = images.collated_batch(range(32 * hvd.rank(), 32 * hvd.rank() + 32))

    def step_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Call:
        def step() -> None:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()

        return step

    model, optimizer = make_model("lenet")
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    sides = {"hvd": step_of(model, hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters()))}
    for side, group in (("shm", None), ("gloo", gloo)):
        model, optimizer = make_model("lenet")
        sides[side] = step_of(DistributedDataParallel(model, process_group=group), optimizer)
    return sides


def timed(call: Call, count: int) -> float:
    """Seconds of one of `count` calls, on the slower rank."""
    dist.barrier()
    started = time.perf_counter()
    for _ in range(count):
        call()
    seconds = torch.tensor((time.perf_counter() - started) / count, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def calls_for(call: Call, turn_s: float) -> int:
    """How many calls take about `turn_s`."""
    count = 1
    while (seconds := timed(call, count)) * count < turn_s / 2 and count < MOST_CALLS:
        count = min(MOST_CALLS, 4 * count)
    return max(1, min(MOST_CALLS, int(turn_s / seconds)))


# --- what comes of it ---------------------------------------------------------------------------------------


def title(size: int) -> str:
    """What a table calls the all-reduce of so many bytes."""
    return f"all-reduce of {size >> 20} MiB" if size >= 1 << 20 else f"all-reduce of {size >> 10} KiB"


def summarise(case: str, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Medians with their quartiles, and the ratios in each round."""

    def ratio(above: str, below: str) -> dict[str, float]:
        return asdict(Spread.of([a / b for a, b in zip(seconds[above], seconds[below], strict=True)]))

    return {
        "case": case,
        "seconds": {side: asdict(Spread.of(values)) for side, values in seconds.items()},
        "hvd_over_shm": ratio("hvd", "shm"),
        "gloo_over_hvd": ratio("gloo", "hvd"),
        "rounds": seconds,
    }


def as_table(rows: list[dict[str, Any]]) -> str:
    header = ["", "hvd, µs", "shm, µs", "Gloo, µs", "hvd over shm", "Gloo over hvd"]
    cells = [
        [
            row["case"],
            *(f"{row['seconds'][side]['median'] * 1e6:,.0f}" for side in SIDES),
            Spread(**row["hvd_over_shm"]).text(2),
            Spread(**row["gloo_over_hvd"]).text(2),
        ]
        for row in rows
    ]
    return markdown_table(header, cells)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two rounds of short turns: does it run?")
    parser.add_argument("--rounds", type=int, default=101, help="turns of each side in each case (default: 101)")
    parser.add_argument(
        "--json", type=Path, help="where all goes that was measured; default: results/horovod_door.json"
    )
    parser.add_argument("--write", action="store_true", help="put the table into docs/")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds: expected a whole number of at least 1")
    if args.write and args.quick:
        parser.error("--write: only the whole run is for the documentation, without --quick")
    return args


def main() -> None:
    args = parse()
    machine = describe_machine()
    rounds, turn_s = (2, TURN_S / 4) if args.quick else (args.rounds, TURN_S)
    seconds = lockstep.launch(work, SIZES, rounds, turn_s, workers=2, threads=1)
    machine["load_average_after"] = round(os.getloadavg()[0], 2)
    rows = [summarise(case, sides) for case, sides in seconds.items()]
    table, line = as_table(rows), machine_line(machine, f"two ranks; {rounds} rounds")
    print(f"{table}\n\n{line}")
    if args.json or not args.quick:
        write_json(args.json or RESULTS / "horovod_door.json", {"machine": machine, "rows": rows})
    if args.write:
        write_between(DOCS / "horovod.md", "horovod-door", f"{table}\n\n{line}")


if __name__ == "__main__":
    main()
