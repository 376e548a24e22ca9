"""Measures what it costs to be watched: a collective, a step of DistributedDataParallel, and doing
nothing.

Two workers have each of their groups twice, watched and not, and use them in turns in one run. A
round gives one difference or ratio; the median over the rounds counts. What the store gets of many
hosts is simulated.

    python benchmarks/watchdog.py          # some four minutes on two idle cores
    python benchmarks/watchdog.py --quick     # a smoke run; its figures say nothing
    python benchmarks/watchdog.py --write     # also the table in docs/watchdog.md
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lockstep
from common import (
    DOCS,
    RESULTS,
    Spread,
    describe_machine,
    machine_line,
    make_model,
    markdown_table,
    write_between,
    write_json,
)
from lockstep.messages import convert
from lockstep.watchdog import patches
from lockstep.watchdog.cross_host import PERIOD_S, StateExchange, find_fault
from lockstep.watchdog.states import HostState, JobStates

BACKENDS = ("shm", "gloo")
IDLE_S = 5.0


@contextmanager
def unwatched() -> Any:
    """Groups that are made inside are not watched."""
    assert patches._watchdog is not None
    session = patches._watchdog.session
    patches._watchdog.session = None
    try:
        yield
    finally:
        patches._watchdog.session = session


def groups(backend: str) -> tuple[Any, Any]:
    """(a group that is not watched, one that is)."""
    with unwatched():
        plain = dist.new_group([0, 1], backend=backend)
    return plain, dist.new_group([0, 1], backend=backend)


def alternate(
    plain: Callable[[], None], watched: Callable[[], None], calls: int, rounds: int
) -> list[list[float]]:
    """Seconds a call of each, one pair a round; the first round is not counted."""
    pairs = []
    for number in range(rounds + 1):
        pair = [0.0, 0.0]
        for side in (0, 1) if number % 2 else (1, 0):
            call = (plain, watched)[side]
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(calls):
                call()
            pair[side] = (time.perf_counter() - begin) / calls
        pairs.append(pair)
    return pairs[1:]


def step_of(group: Any) -> Callable[[], None]:
    """One step of LeNet, half of a global batch of 256 on each worker."""
    model, optimizer = make_model("lenet")
    ddp = DistributedDataParallel(model, process_group=group)
    images = torch.randn(128, 1, 28, 28)
    labels = torch.randint(0, 10, (128,))
    loss_fn = nn.CrossEntropyLoss()

    def step() -> None:
        optimizer.zero_grad()
        loss_fn(ddp(images), labels).backward()
        optimizer.step()

    return step


def measure(calls: int, steps: int, rounds: int) -> dict[str, Any]:
    """Run by both workers; what rank 0 has measured."""
    lockstep.init("cpu")
    found: dict[str, Any] = {}
    for backend in BACKENDS:
        plain, watched = groups(backend)
        tensor = torch.ones(1)
        # Gloo's times vary by more than the watch costs: many short rounds, whose median does not
        few = max(1, calls // (1 if backend == "shm" else 40))
        found[f"all_reduce {backend}"] = alternate(
            partial(dist.all_reduce, tensor, group=plain),
            partial(dist.all_reduce, tensor, group=watched),
            few,
            rounds * (calls // few if backend == "gloo" else 1),
        )
        found[f"step {backend}"] = alternate(step_of(plain), step_of(watched), steps, rounds)
    dist.barrier()
    before = time.process_time()
    time.sleep(IDLE_S)
    found["idle"] = (time.process_time() - before) / IDLE_S
    dist.barrier()
    return found


class CountingStore:
    """A store in this process, which counts what it is asked."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.messages = self.bytes = 0

    def set(self, key: str, value: str) -> None:
        """As torch's."""
        self.values[key] = value
        self.messages = self.messages + 1
        self.bytes = self.bytes + len(value)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """As torch's."""
        found = [self.values[key].encode() for key in keys]
        self.messages = self.messages + 1
        self.bytes = self.bytes + sum(map(len, found))
        return found

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """As torch's."""
        self.messages += 1
        return self.values.setdefault(key, desired).encode()


def simulate(ranks: int, each: int = 8, periods: int = 10) -> dict[str, float]:
    """Messages and bytes a second at the store, and the first machine's processor time, for so many
    ranks.
    """
    store = CountingStore()
    count = ranks // each
    places = [range(at * each, (at + 1) * each) for at in range(count)]
    groups = {1 << 59: range(ranks)}
    hosts = [StateExchange(store, machine, count) for machine in range(count)]
    for machine in hosts:
        machine.initialize()
    call = [
        "all_reduce(float32[61706], sum)",
        "train.py:31 in main",
        "loss.backward()",
        1000,
        "",
        7,
    ]
    records = [[number, 1 << 60, 1 << 61, 7, 1 << 62, 0] for number in range(995, 1001)]
    store.messages = store.bytes = 0
    first = 0.0
    for _ in range(periods):
        for number, machine in enumerate(hosts):
            own = range(number * each, (number + 1) * each)
            rows = [
                [rank, "runs", "", f"host{number}", 1234, 7, call, None, [], ""] for rank in own
            ]
            group = [list(own), 1000, 0, 0.0, 0.0, records, *call[:2]]
            machine.publish(convert({"ranks": rows, "groups": {1 << 59: [group]}}, HostState))
            begin = time.process_time()
            _, states = machine.poll()
            if number == 0:
                find_fault(JobStates(places, states, groups))
            first += time.process_time() - begin if number == 0 else 0.0
    seconds = periods * PERIOD_S
    return {
        "ranks": ranks,
        "hosts": count,
        "messages_s": store.messages / seconds,
        "mib_s": store.bytes / seconds / 2**20,
        "first_share": first / seconds,
    }


def as_table(found: dict[str, Any]) -> str:
    """What is shown."""
    rows = []
    for backend in BACKENDS:
        pairs = found[f"all_reduce {backend}"]
        times = [
            f"{1e6 * Spread.of([pair[side] for pair in pairs]).median:.1f} µs" for side in (0, 1)
        ]
        more = Spread.of([1e6 * (b - a) for a, b in pairs])
        rows.append([f"all-reduce of 4 bytes, {backend}", *times, f"{more.median:+.1f} µs"])
        pairs = found[f"step {backend}"]
        times = [
            f"{1e3 * Spread.of([pair[side] for pair in pairs]).median:.2f} ms" for side in (0, 1)
        ]
        ratio = Spread.of([b / a for a, b in pairs])
        rows.append(
            [f"step of LeNet, DDP, {backend}", *times, f"{100 * (ratio.median - 1):+.1f} %"]
        )
    rows.append(["doing nothing, share of a core", "0", f"{100 * found['idle']:.2f} %", ""])
    text = markdown_table(["two workers", "not watched", "watched", "difference"], rows)
    lines = [
        [
            f"{s['ranks']:,} ranks on {s['hosts']} hosts",
            f"{s['messages_s']:.0f}",
            f"{s['mib_s']:.2f} MiB",
            f"{100 * s['first_share']:.2f} %",
        ]
        for s in found["store"]
    ]
    header = ["at the store, a second", "messages", "data", "of a core of the first rank"]
    return f"{text}\n\n{markdown_table(header, lines)}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    parser.add_argument("--write", action="store_true", help="also the table in docs/watchdog.md")
    parser.add_argument("--json", type=Path, help="where everything that was measured goes")
    args = parser.parse_args()
    machine = describe_machine()
    calls, steps, rounds = (50, 2, 3) if args.quick else (2000, 10, 30)
    found = lockstep.launch(measure, calls, steps, rounds, workers=2, threads=1)
    found["store"] = [simulate(ranks) for ranks in (16, 128, 1000)]
    machine["load_average_after"] = round(os.getloadavg()[0], 2)
    table = as_table(found)
    line = machine_line(machine, "random images")
    print(f"\n{table}\n\n{line}")
    if args.json or not args.quick:
        write_json(args.json or RESULTS / "watchdog.json", {"machine": machine, "measured": found})
    if args.write:
        write_between(DOCS / "watchdog.md", "watchdog", f"{table}\n\n{line}")


if __name__ == "__main__":
    main()
