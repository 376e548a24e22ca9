"""Measures the processor time that a training step costs of its own, with a model that costs next
to nothing.

The model has two layers of 16, a batch 32 samples in memory; one worker with one thread, on the
CPU. The loop by hand is PyTorch's tutorial with batches that are selected by index; each library
runs the same step. All sides take turns in rounds of some steps, so that whatever else the machine
does falls on all alike, and time that another process takes is not counted. A side's figure is the
median over its rounds, beside it the least. Libraries that are not installed are left out.
Lightning's trainer is made anew for each round, and what its start takes is subtracted.

    python benchmarks/step_cost.py            # about two minutes
    python benchmarks/step_cost.py --quick    # a smoke run; its figures say nothing
    python benchmarks/step_cost.py --write    # also puts the table into docs/performance.md
"""

from __future__ import annotations

import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import lockstep
from common import describe_machine, markdown_table
from frame import Benchmark

BENCHMARK = Benchmark("step_cost", __doc__)
BATCH = 32
STEPS = 256
ROUNDS = 27

Objects = tuple[nn.Module, torch.optim.Optimizer, nn.Module]
Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]
Round = Callable[[int], float]
"""Trains so many steps, and returns the seconds of processor time that they took."""


class Task:
    """What all sides train: model, optimizer, loss and data."""

    def __init__(self, steps: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(BATCH * steps, 16, generator=generator)
        self.labels = torch.randint(0, 10, (BATCH * steps,), generator=generator)
        self.dataset = TensorDataset(self.inputs, self.labels)

    def objects(self) -> Objects:
        """New ones, always of the same values."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 10))
        return (
            model,
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            nn.CrossEntropyLoss(),
        )

    def batches(self, steps: int) -> Batches:
        """So many batches, as a loop by hand selects them."""
        order = torch.randperm(len(self.inputs), generator=torch.Generator().manual_seed(0))
        for start in range(0, steps * BATCH, BATCH):
            indices = order[start : start + BATCH]
            yield self.inputs[indices], self.labels[indices]


def timed(body: Callable[[], object]) -> float:
    began = time.process_time()
    body()
    return time.process_time() - began


def by_hand(task: Task) -> Round:
    model, optimizer, loss_fn = task.objects()

    def body(steps: int) -> None:
        for inputs, labels in task.batches(steps):
            optimizer.zero_grad(set_to_none=True)
            loss_fn(model(inputs), labels).backward()
            optimizer.step()

    return lambda steps: timed(lambda: body(steps))


def by_hand_reading_the_loss(task: Task) -> Round:
    """The loop by hand that also checks that its loss is finite, and adds it up for the mean of the
    epoch.
    """
    model, optimizer, loss_fn = task.objects()

    def body(steps: int) -> None:
        total = 0.0
        for inputs, labels in task.batches(steps):
            optimizer.zero_grad(set_to_none=True)
            loss = loss_fn(model(inputs), labels)
            loss.backward()
            value = loss.item()
            if value - value != 0:
                raise ValueError("the loss is not finite")
            total += value * len(labels)
            optimizer.step()

    return lambda steps: timed(lambda: body(steps))


def fabric(task: Task) -> Round:
    from lightning_fabric import (
        Fabric,
    )

    model, optimizer, loss_fn = task.objects()
    engine = Fabric(accelerator="cpu", devices=1)
    wrapped, optimizer = engine.setup(model, optimizer)

    def body(steps: int) -> None:
        for inputs, labels in task.batches(steps):
            optimizer.zero_grad(set_to_none=True)
            engine.backward(loss_fn(wrapped(inputs), labels))
            optimizer.step()

    return lambda steps: timed(lambda: body(steps))


def accelerate(task: Task) -> Round:
    from accelerate import Accelerator

    model, optimizer, loss_fn = task.objects()
    engine = Accelerator(cpu=True)
    wrapped, prepared = engine.prepare(model, optimizer)

    def body(steps: int) -> None:
        for inputs, labels in task.batches(steps):
            with engine.accumulate(wrapped):
                prepared.zero_grad(set_to_none=True)
                engine.backward(loss_fn(wrapped(inputs), labels))
                prepared.step()

    return lambda steps: timed(lambda: body(steps))


def lightning_trainer(task: Task) -> Round:
    import lightning

    for name in ("lightning", "lightning.pytorch", "lightning.fabric", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)

    class Data(IterableDataset[Any]):
        def __init__(self, steps: int) -> None:
            self.steps = steps

        def __iter__(self) -> Batches:
            return task.batches(self.steps)

        def __len__(self) -> int:
            return self.steps

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model, self.optimizer, self.loss_fn = task.objects()

        def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
            loss: torch.Tensor = self.loss_fn(self.model(batch[0]), batch[1])
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return self.optimizer

    def fit(steps: int) -> float:
        left_out = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        trainer = lightning.Trainer(
            accelerator="cpu", devices=1, max_epochs=1, **dict.fromkeys(left_out, False)
        )
        module = Module()
        loader = DataLoader(Data(steps), batch_size=None)
        return timed(lambda: trainer.fit(module, loader))

    def run(steps: int) -> float:
        few = steps // 8
        return (fit(steps) - fit(few)) * steps / (steps - few)

    return run


def train_step(task: Task) -> Round:
    step = lockstep.TrainStep(*task.objects())
    loader = lockstep.Loader(task.dataset, global_batch_size=BATCH)

    def body(steps: int) -> None:
        for number, batch in enumerate(loader.epoch(0), 1):
            step.run(batch)
            if number == steps:
                break

    return lambda steps: timed(lambda: body(steps))


def trainer(task: Task) -> Round:
    made = lockstep.Trainer(*task.objects(), global_batch_size=BATCH, callbacks=[])
    loader = lockstep.Loader(task.dataset, global_batch_size=BATCH)
    done = 0

    def run(steps: int) -> float:
        nonlocal done
        done += 1
        return timed(partial(made.fit, loader, epochs=done))

    return run


SIDES: dict[str, Callable[[Task], Round]] = {
    "loop by hand": by_hand,
    "loop by hand, reading its loss": by_hand_reading_the_loss,
    "Lightning Fabric": fabric,
    "Accelerate": accelerate,
    "Lightning Trainer": lightning_trainer,
    "TrainStep and Loader": train_step,
    "Trainer, no callbacks": trainer,
}


def measure(steps: int, rounds: int) -> dict[str, list[float]]:
    """By side, the microseconds of a step in each round; the first round of each warms up."""
    task = Task(steps)
    sides: dict[str, Round] = {}
    for name, make in SIDES.items():
        try:
            sides[name] = make(task)
        except ImportError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
            continue
        sides[name](steps)
    found: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in list(sides) if number % 2 else reversed(list(sides)):
            found[name].append(sides[name](steps) / steps * 1e6)
        print(f"\rround {number + 1} of {rounds}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return found


def summarise(found: dict[str, list[float]]) -> list[dict[str, Any]]:
    """A row for each side."""
    hand = found["loop by hand"]
    rows = []
    for name, values in found.items():
        differences = [value - base for value, base in zip(values, hand, strict=True)]
        rows.append(
            {
                "side": name,
                "median": statistics.median(values),
                "least": min(values),
                "over_hand": statistics.median(differences),
            }
        )
    return rows


def as_table(rows: list[dict[str, Any]]) -> str:
    header = ["", "processor time of a step, µs", "least, µs", "over the loop by hand, µs"]
    return markdown_table(
        header,
        [
            [
                row["side"],
                f"{row['median']:.0f}",
                f"{row['least']:.0f}",
                f"{row['over_hand']:+.0f}".replace("-", "−"),
            ]
            for row in rows
        ],
    )


def main() -> None:
    args = BENCHMARK.parse(BENCHMARK.parser(str(ROUNDS)))
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    lockstep.init("cpu")
    machine = describe_machine()
    steps = 16 if args.quick else STEPS
    found = measure(steps, args.rounds or (1 if args.quick else ROUNDS))
    rows = summarise(found)
    BENCHMARK.publish(args, machine, as_table(rows), "random numbers", rows=rows, measured=found)


if __name__ == "__main__":
    main()
