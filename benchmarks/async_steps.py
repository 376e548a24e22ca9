"""Measures time and peak memory of work that is queued: waited for at once, bounded, and without a
bound.

Two kinds of work. "all-reduces": tensors of 4 MB, each a new one, summed over two workers; the
bound is two under way. "steps": training steps of LeNet whose losses are read after each step, a
few steps late, or all at the end. They are on the device at hand: on a CPU a step has ended when
its call returns, so that there the ways differ by nothing but reading a number, and only the
all-reduces show what a bound is good for.

Each measurement has processes of its own, so that none finds the memory that another has freed.
Memory is the highest during the work, beyond what there was before it: of the process, and on a GPU
that of its allocator. It is not what is left when all has been waited for. The three ways take
turns; every second round goes in the opposite order.

    python benchmarks/async_steps.py             # some four minutes on two idle cores
    python benchmarks/async_steps.py --quick     # a smoke run; its figures say nothing
    python benchmarks/async_steps.py --write     # also the table in docs/asynchronous.md
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lockstep
from common import Spread, describe_machine, load_images, make_model, markdown_table
from frame import Benchmark
from lockstep.communicator import wait_all
from lockstep.training.in_flight import StepsInFlight

BENCHMARK = Benchmark("async_steps", __doc__, "asynchronous.md")
WAYS = {"at once": 1, "bounded": 2, "unbounded": None}
"""Way → how many pieces of work may be under way."""

MEGABYTE = 1 << 20


@dataclass(frozen=True)
class Case:
    """Some work.

    Attributes:
        kind: "all-reduces" or "steps".
        transport: that carries the all-reduces.
        count: pieces of work in a measurement.
        workers: processes.
    """

    kind: str
    transport: str
    count: int
    workers: int

    @property
    def title(self) -> str:
        """What a table calls it."""
        device = "GPU" if torch.cuda.is_available() else "CPU"
        if self.kind == "steps":
            return f"{self.count} steps of LeNet, batch 256, on the {device}"
        return f"{self.count} all-reduces of 4 MB over {self.workers} workers, {self.transport}"


CASES = [
    Case("all-reduces", "gloo", 100, 2),
    Case("all-reduces", "shm", 100, 2),
    Case("steps", "gloo", 40, 1),
]


# --- in a worker
# --------------------------------------------------------------------------------------------


class Peak:
    """The highest memory of this process, and of its GPU's allocator, beyond what there was at
    first.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._at_first = torch.cuda.memory_allocated(device)
        else:
            Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
            self._at_first = _kilobytes("VmRSS") << 10

    def megabytes(self) -> float:
        """That, so far."""
        if self._device.type == "cuda":
            highest = torch.cuda.max_memory_allocated(self._device)
        else:
            highest = _kilobytes("VmHWM") << 10
        return (highest - self._at_first) / MEGABYTE


def _kilobytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def work(case: Case, way: str) -> dict[str, float]:
    """Do it once to warm up and once to be measured; seconds, and megabytes at the peak."""
    torch.set_num_threads(1)
    comm = lockstep.init("cpu" if case.kind == "all-reduces" else "auto", transport=case.transport)
    run = (reduce_all if case.kind == "all-reduces" else train)(comm, WAYS[way])
    run(4)
    lockstep.synchronize()
    comm.barrier()
    peak = Peak(comm.device)
    started = time.perf_counter()
    run(case.count)
    lockstep.synchronize()
    return {"seconds": time.perf_counter() - started, "megabytes": peak.megabytes()}


def reduce_all(comm: lockstep.Communicator, in_flight: int | None) -> Callable[[int], None]:
    def run(count: int) -> None:
        under_way: deque[Any] = deque()
        for number in range(count):
            under_way.append(comm.iallreduce(torch.full((MEGABYTE,), float(number))))
            while in_flight is not None and len(under_way) >= in_flight:
                under_way.popleft().wait()
        wait_all(under_way)

    return run


def train(comm: lockstep.Communicator, in_flight: int | None) -> Callable[[int], None]:
    model, optimizer = make_model("lenet")
    step = lockstep.TrainStep(model, optimizer, nn.CrossEntropyLoss())
    images = load_images(256 * 8)
    loader = lockstep.Loader(images, 256)

    def run(count: int) -> None:
        steps_in_flight = StepsInFlight(comm.device, in_flight or count + 1)
        epochs = (batch for epoch in range(count) for batch in loader.epoch(epoch))
        for _, batch in zip(range(count), epochs, strict=False):
            steps_in_flight.add(step.run(batch))
            steps_in_flight.settle()
        steps_in_flight.check()

    return run


# --- the measurement
# ----------------------------------------------------------------------------------------


def measure(case: Case, rounds: int) -> dict[str, list[dict[str, float]]]:
    """By way, what each round gave."""
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for number in range(rounds):
        for way in list(WAYS) if number % 2 == 0 else reversed(list(WAYS)):
            found[way].append(lockstep.launch(work, case, way, workers=case.workers, threads=1))
        print(
            f"\r{case.title}: round {number + 1} of {rounds}", end="", file=sys.stderr, flush=True
        )
    print(file=sys.stderr)
    return found


def summarise(case: Case, found: dict[str, list[dict[str, float]]]) -> Iterator[dict[str, Any]]:
    """A row for each way."""
    at_once = [each["seconds"] for each in found["at once"]]
    for way, values in found.items():
        seconds = [each["seconds"] for each in values]
        yield {
            "work": case.title,
            "way": way,
            "seconds": asdict(Spread.of(seconds)),
            "over_at_once": asdict(
                Spread.of([a / b for a, b in zip(seconds, at_once, strict=True)])
            ),
            "megabytes": asdict(Spread.of([each["megabytes"] for each in values])),
        }


def as_table(rows: list[dict[str, Any]]) -> str:
    return markdown_table(
        ["", "seconds", "over at once", "peak memory, MB"],
        [
            [
                f"{row['work']}: {row['way']}",
                f"{row['seconds']['median']:.3f}",
                Spread(**row["over_at_once"]).text(2),
                f"{row['megabytes']['median']:+,.0f}",
            ]
            for row in rows
        ],
    )


def main() -> None:
    args = BENCHMARK.parse(BENCHMARK.parser("7"))
    rounds = args.rounds or (1 if args.quick else 7)
    cases = [replace(case, count=10) for case in CASES] if args.quick else CASES
    machine = describe_machine()
    rows: list[Any] = []
    kept: dict[str, Any] = {}
    for case in cases:
        kept[case.title] = measure(case, rounds)
        rows += summarise(case, kept[case.title])
    BENCHMARK.publish(
        args, machine, as_table(rows), f"{load_images(1).name} images", rows=rows, measured=kept
    )


if __name__ == "__main__":
    main()
