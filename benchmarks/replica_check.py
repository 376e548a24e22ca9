"""Measures what it costs that workers compare their hyperparameters and weights while they train.

Two workers train LeNet twice, with `replica_check` and without, and take turns in one run: a round
gives one ratio, and the median over the rounds counts. As the cost is far below what a step's time
varies by, the check is timed alone as well: what it does around each step, what a look at some
weights adds, and what it takes to compare all weights.

    python benchmarks/replica_check.py            # some five minutes on two idle cores
    python benchmarks/replica_check.py --quick    # a smoke run; its figures say nothing
    python benchmarks/replica_check.py --write    # also puts the table into docs/training.md
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import lockstep
from common import Spread, describe_machine, make_model, markdown_table
from frame import Benchmark
from lockstep.data.loader import Batch
from lockstep.training.formats import REPLICA_CHECK
from lockstep.training.step.train_step import TrainStep

BENCHMARK = Benchmark("replica_check", __doc__, "training.md")
GLOBAL_BATCH = 256
TARGET = 0.005
CALLS = 2000


def make_step(replica_check: int) -> tuple[TrainStep, Callable[[], object]]:
    """The step of LeNet, and what makes one with this worker's part of a batch."""
    comm = lockstep.init("cpu")
    model, optimizer = make_model("lenet")
    step = TrainStep(model, optimizer, nn.CrossEntropyLoss(), replica_check=replica_check)
    size = GLOBAL_BATCH // comm.size
    data = torch.randn(size, 1, 28, 28), torch.randint(0, 10, (size,))
    batch = Batch(data, torch.arange(size), size, GLOBAL_BATCH, 0, 0)
    return step, lambda: step.run(batch)


def seconds(call: Callable[[], Any], calls: int) -> float:
    """Of one call, after a warm one; all workers begin together."""
    call()
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begin) / calls


def alone(step: TrainStep) -> dict[str, float]:
    """Seconds of what the check does, without the step that it belongs to."""
    check = step._replicas
    sums = (0.0, 0.0, 0.0, 0.0)

    def around(number: int) -> None:
        check.marks(number)
        check.settle(number, sums)

    return {
        "usual": seconds(lambda: around(1), CALLS),
        "sampling": seconds(lambda: around(0), CALLS),
        "all": seconds(check.compare, CALLS // 10),
    }


def measure(steps: int, rounds: int) -> dict[str, Any]:
    """Run by both workers; what rank 0 has measured."""
    made = [make_step(replica_check) for replica_check in (0, REPLICA_CHECK)]
    pairs = []
    for number in range(rounds + 1):
        pair = [0.0, 0.0]
        for side in (0, 1) if number % 2 else (1, 0):
            pair[side] = seconds(made[side][1], steps)
        pairs.append(pair)
    return {"steps": pairs[1:], **alone(made[1][0])}


def as_table(found: dict[str, Any]) -> str:
    """What is shown."""
    plain, checked = (Spread.of([pair[side] for pair in found["steps"]]).median for side in (0, 1))
    ratio = Spread.of([b / a for a, b in found["steps"]])
    each = found["usual"] + (found["sampling"] - found["usual"]) / REPLICA_CHECK
    rows = [
        ["a step without", f"{1e3 * plain:.3f} ms", ""],
        ["a step with", f"{1e3 * checked:.3f} ms", f"{ratio.text(4)} times"],
        [
            f"the check alone, a look every {REPLICA_CHECK} steps included",
            f"{1e6 * each:.1f} µs",
            f"{each / plain:.2%}",
        ],
        ["one look at some weights", f"{1e6 * (found['sampling'] - found['usual']):.1f} µs", ""],
        ["all weights, at checkpoints and ends of epochs", f"{1e6 * found['all']:.0f} µs", ""],
    ]
    return markdown_table(["LeNet, 2 workers", "takes", "of a step without"], rows)


def main() -> None:
    parser = BENCHMARK.parser("30")
    args = BENCHMARK.parse(parser)
    machine = describe_machine()
    steps, rounds = (2, 2) if args.quick else (REPLICA_CHECK, 30)
    found = lockstep.launch(measure, steps, args.rounds or rounds, workers=2, threads=1)
    BENCHMARK.publish(args, machine, as_table(found), "random images", measured=found)
    share = found["usual"] / Spread.of([pair[0] for pair in found["steps"]]).median
    if not args.quick:
        print(
            f"{share:.2%} of a step, {'within' if share < TARGET else 'ABOVE'} the target of "
            f"{TARGET:.1%}"
        )


if __name__ == "__main__":
    main()
