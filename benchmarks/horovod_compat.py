"""Measures `lockstep.compat.horovod` beside torch.distributed: all-reduces of several sizes, and
steps of LeNet.

The sides are `hvd` on Lockstep's shared memory ("hvd"), torch.distributed on the same ("shm"), and
torch.distributed on Gloo. All of them are in the same two processes and take turns; every second
round goes in the opposite order. A turn is as many calls as take about 20 ms, and its time that of
the slower rank. A sum is in place: `hvd.allreduce_`, or `dist.all_reduce`. A mean is in a new
tensor: `hvd.allreduce`, or a copy, `dist.all_reduce` and a division. Each is waited for by itself:
what costs `hvd` most, as the ranks agree on each. A step of LeNet is one of `DistributedOptimizer`,
or of `DistributedDataParallel`, on 32 images a rank that lie in memory.

    python benchmarks/horovod_compat.py             # some two minutes on two idle cores
    python benchmarks/horovod_compat.py --quick     # a smoke run; its figures say nothing
    python benchmarks/horovod_compat.py --write     # also the table in docs/horovod.md
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import lockstep
import lockstep.compat.horovod.torch as hvd
from common import Spread, describe_machine, load_images, make_model, markdown_table, ratio
from frame import Benchmark

BENCHMARK = Benchmark("horovod_compat", __doc__, "horovod.md")
SIDES = ["hvd", "shm", "gloo"]
SUMS = [4 << 10, 64 << 10, 1 << 20, 16 << 20]
MEANS = [4 << 10, 1 << 20]
LENET = "step of LeNet, 32 images a rank"
TURN_S = 0.02
MOST_CALLS = 2000

Call = Callable[[], Any]
Seconds = dict[str, dict[str, list[float]]]
"""What is done → side → seconds of one call, one value a round."""


# --- in a rank
# ----------------------------------------------------------------------------------------------


def work(rounds: int, turn_s: float) -> Seconds:
    """Measure everything; the same on both ranks."""
    torch.set_num_threads(1)
    lockstep.init("cpu", transport="shm")
    hvd.init()
    gloo = dist.new_group(backend="gloo")
    cases = {f"sum of {title(size)}": sums(size, gloo) for size in SUMS}
    cases |= {f"mean of {title(size)}, new": means(size, gloo) for size in MEANS}
    cases[LENET] = steps(gloo)
    found: Seconds = {case: {side: [] for side in SIDES} for case in cases}
    calls = {
        (case, side): calls_for(call, turn_s)
        for case, sides in cases.items()
        for side, call in sides.items()
    }
    for number in range(rounds):
        for case, sides in cases.items():
            for side in SIDES if number % 2 == 0 else reversed(SIDES):
                found[case][side].append(timed(sides[side], calls[case, side]))
    hvd.shutdown()
    return found


def sums(size: int, gloo: Any) -> dict[str, Call]:
    """By side, the sum of `size` bytes in place; of zeros, which stay what they are."""
    tensor = torch.zeros(size // 4)
    return {
        "hvd": lambda: hvd.allreduce_(tensor, op=hvd.Sum, name=f"sum of {size}"),
        "shm": lambda: dist.all_reduce(tensor),
        "gloo": lambda: dist.all_reduce(tensor, group=gloo),
    }


def means(size: int, gloo: Any) -> dict[str, Call]:
    """By side, the mean of `size` bytes in a new tensor."""
    tensor = torch.zeros(size // 4)

    def mean(group: Any) -> torch.Tensor:
        copy = tensor.clone()
        dist.all_reduce(copy, group=group)
        return copy.div_(dist.get_world_size())

    return {
        "hvd": lambda: hvd.allreduce(tensor, name=f"mean of {size}"),
        "shm": lambda: mean(None),
        "gloo": lambda: mean(gloo),
    }


def steps(gloo: Any) -> dict[str, Call]:
    """By side, a training step."""
    images = load_images(64)
    inputs, labels = images.collated_batch(range(32 * hvd.rank(), 32 * hvd.rank() + 32))

    def step_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Call:
        def step() -> None:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

        return step

    model, optimizer = make_model("lenet")
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    sides = {
        "hvd": step_of(
            model, hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        )
    }
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


# --- what comes of it
# ---------------------------------------------------------------------------------------


def title(size: int) -> str:
    """So many bytes, as a table has them."""
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def summarise(case: str, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Medians with their quartiles, and the ratios in each round."""
    return {
        "case": case,
        "seconds": {side: asdict(Spread.of(values)) for side, values in seconds.items()},
        "hvd_over_shm": ratio(seconds, "hvd", "shm"),
        "gloo_over_hvd": ratio(seconds, "gloo", "hvd"),
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


def main() -> None:
    args = BENCHMARK.parse(BENCHMARK.parser("101"))
    machine = describe_machine()
    rounds = args.rounds or (2 if args.quick else 101)
    turn_s = TURN_S / 4 if args.quick else TURN_S
    seconds = lockstep.launch(work, rounds, turn_s, workers=2, threads=1)
    rows = [summarise(case, sides) for case, sides in seconds.items()]
    BENCHMARK.publish(args, machine, as_table(rows), f"two ranks; {rounds} rounds", rows=rows)


if __name__ == "__main__":
    main()
