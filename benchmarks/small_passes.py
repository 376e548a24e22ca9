"""Measures what makes the small passes of virtual workers cheaper, by the processor time of a step.

One worker with eight virtual workers. The sides take turns, a step each; the first two rounds are
not counted. A round gives one ratio to a single pass over the whole batch, and the median over the
rounds counts. With gradients of large linear layers computed once after the passes
(`lockstep.parallel.weight_gradients`), losses must be those without, in every bit.

    python benchmarks/small_passes.py             # some three minutes on an idle core
    python benchmarks/small_passes.py --quick     # a smoke run; its figures say nothing
    python benchmarks/small_passes.py --write     # also puts the table into docs/invariance.md
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import lockstep
from common import (
    LR,
    MOMENTUM,
    TITLES,
    Spread,
    describe_machine,
    keep_freed_memory,
    load_images,
    markdown_table,
)
from frame import Benchmark, chosen
from lockstep.data.loader import Batch
from lockstep.parallel import weight_gradients
from lockstep.parallel.shards import bounds
from side_invariance import HERE

BENCHMARK = Benchmark("small_passes", __doc__, "invariance.md")
VIRTUAL_WORKERS = 8
NAMES = {**TITLES, "convnet": "CNN"}

WHOLE = "one pass over the batch"
EACH = "weights' gradients in each pass"
LATER = "once after the passes"
CHANNELS_LAST = "once after the passes, channels-last"
SIDES = (WHOLE, EACH, LATER, CHANNELS_LAST)


@dataclass(frozen=True)
class Case:
    """What is trained."""

    model: str
    global_batch_size: int
    rounds: int = 20


CASES = [Case("convnet", 64), Case("mlp", 256), Case("lenet", 256), Case("resnet18", 32)]


@contextmanager
def gradients_of(side: str) -> Any:
    """Let the passes of a side compute all gradients, or leave out those of large weights."""
    before = weight_gradients.LARGE
    if side == EACH:
        weight_gradients.LARGE = 1 << 62
    try:
        yield
    finally:
        weight_gradients.LARGE = before


def make_step(case: Case, side: str) -> Callable[[], float]:
    """A function that makes one step of a side and returns its loss."""
    torch.manual_seed(0)
    memory_format = torch.channels_last if side == CHANNELS_LAST else torch.contiguous_format
    model = HERE[case.model]().to(memory_format=memory_format)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    images = load_images(case.global_batch_size)
    size = case.global_batch_size
    loss_fn = nn.CrossEntropyLoss()
    if side == WHOLE:
        inputs, labels = images.collated_batch(range(size))

        def step_of_one_pass() -> float:
            optimizer.zero_grad()
            loss = loss_fn(model(inputs), labels)
            loss.backward()
            optimizer.step()
            return float(loss.detach())

        return step_of_one_pass
    step = lockstep.TrainStep(model, optimizer, loss_fn, virtual_workers=VIRTUAL_WORKERS)
    cuts = [bounds(size, VIRTUAL_WORKERS, shard) for shard in range(VIRTUAL_WORKERS)]
    parts = [list(images.collated_batch(range(*cut))) for cut in cuts]
    batch = Batch(parts, torch.arange(size), size, size, 0, 0, VIRTUAL_WORKERS)
    return lambda: float(step(batch))


def measure(case: Case) -> dict[str, list[float]]:
    """Seconds of processor time of a step, by side, one a round."""
    steps = {side: make_step(case, side) for side in SIDES}
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    for number in range(case.rounds + 2):
        losses = {}
        for side in SIDES if number % 2 else reversed(SIDES):
            with gradients_of(side):
                began = time.process_time()
                losses[side] = steps[side]()
                if number >= 2:
                    seconds[side].append(time.process_time() - began)
        if losses[EACH] != losses[LATER]:
            raise SystemExit(f"{case.model}: the sides have different losses: {losses}")
    return seconds


def main() -> None:
    parser = BENCHMARK.parser("20")
    parser.add_argument("--model", choices=[case.model for case in CASES], help="only this one")
    args = BENCHMARK.parse(parser, "model")
    machine = describe_machine()
    keep_freed_memory()
    torch.set_num_threads(1)
    lockstep.init("cpu")
    found = {}
    rows = []
    for case in chosen(CASES, args, global_batch_size=32):
        seconds = found[case.model] = measure(case)
        ratios = [
            Spread.of([a / b for a, b in zip(seconds[side], seconds[WHOLE], strict=True)])
            for side in SIDES[1:]
        ]
        milliseconds = 1000 * Spread.of(seconds[WHOLE]).median
        title = f"{NAMES[case.model]}, batch {case.global_batch_size}"
        rows.append([title, f"{milliseconds:.1f}", *(ratio.text(2) for ratio in ratios)])
    table = markdown_table(["8 virtual workers", f"{WHOLE}, ms", *SIDES[1:]], rows)
    BENCHMARK.publish(args, machine, table, f"{load_images(1).name} images", seconds=found)


if __name__ == "__main__":
    main()
