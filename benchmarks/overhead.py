"""Measures what `Trainer.fit` costs beside a hand-written PyTorch loop that does the same work.

One worker with one thread. All sides take turns in short blocks (A B C C B A is one round), so that
whatever else the machine does falls on all alike; a round gives one ratio per side, and the median
over the rounds counts. The plain loop takes part twice: the ratio of the second to the first would
be 1 on a perfect clock, and shows the error of the others.

    python benchmarks/overhead.py            # some four minutes
    python benchmarks/overhead.py --quick    # a smoke run; its figures say nothing
    python benchmarks/overhead.py --write    # also puts the table into docs/performance.md
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

import lockstep
from common import (
    TITLES,
    Spread,
    describe_machine,
    keep_freed_memory,
    load_images,
    make_model,
    markdown_table,
)
from frame import Benchmark, chosen
from lockstep.data import ImageSet
from lockstep.training.callbacks import Callback

BENCHMARK = Benchmark("overhead", __doc__)
TARGET = 1.02

Block = Callable[[int], float]
"""Trains block number n, from 0, and returns the mean loss of its steps."""


@dataclass(frozen=True)
class Case:
    """What is trained, and in blocks of how many steps: about a second each."""

    model: str
    batch: int
    steps: int
    rounds: int

    @property
    def samples(self) -> int:
        """In a block."""
        return self.batch * self.steps


CASES = [
    Case("lenet", batch=256, steps=10, rounds=12),
    Case("resnet18", batch=32, steps=2, rounds=7),
]


def plain_loop(case: Case, images: ImageSet, order: Callable[[int], torch.Tensor]) -> Block:
    """The loop as one writes it by hand where speed counts: data in memory, whole batches indexed,
    no waiting.
    """
    model, optimizer = make_model(case.model)
    loss_fn = nn.CrossEntropyLoss()
    pixels = images.images
    labels = images.labels
    scale = 1 / (255 * images.std[0])
    shift = -images.mean[0] / images.std[0]
    model.train()

    def block(number: int) -> float:
        total = torch.zeros((), dtype=torch.float64)
        for index in torch.split(order(number), case.batch):
            inputs = pixels.index_select(0, index).to(torch.float32).mul_(scale).add_(shift)
            optimizer.zero_grad(set_to_none=True)
            loss = loss_fn(model(inputs), labels.index_select(0, index))
            loss.backward()
            optimizer.step()
            total += loss.detach()
        return float(total) / case.steps

    return block


def trainer_fit(case: Case, images: ImageSet, callbacks: list[Callback] | None) -> Block:
    """The same through `Trainer.fit`: a block is an epoch, so all that fit does around an epoch is
    timed as well.
    """
    model, optimizer = make_model(case.model)
    trainer = lockstep.Trainer(
        model, optimizer, nn.CrossEntropyLoss(), case.batch, callbacks=callbacks
    )
    loader = trainer.loader(images)

    def block(number: int) -> float:
        return trainer.fit(loader, epochs=number + 1)[-1]["train_loss"]

    return block


class Terminal(io.StringIO):
    """Takes what a terminal would be sent."""

    def isatty(self) -> bool:
        """As every terminal says."""
        return True


def shown_on(output: io.StringIO, block: Block) -> Block:
    """`block` with its standard output going elsewhere."""

    def redirected(number: int) -> float:
        output.seek(0)
        output.truncate()
        with redirect_stdout(output):
            return block(number)

    return redirected


def make_sides(case: Case, images: ImageSet) -> dict[str, Block]:
    """The plain loop, then what is compared with it, by name."""
    order = lockstep.Loader(images, case.batch).order  # all sides train on the same batches
    return {
        "plain loop": plain_loop(case, images, order),
        "plain loop again": plain_loop(case, images, order),
        "Trainer, no callbacks": trainer_fit(case, images, []),
        "Trainer, default callbacks, output to a file": shown_on(
            io.StringIO(), trainer_fit(case, images, None)
        ),
        "Trainer, default callbacks, live display": shown_on(
            Terminal(), trainer_fit(case, images, None)
        ),
    }


@dataclass
class Turn:
    """What one side took for its block: seconds on the clock and of processor time, and the loss it
    came to.
    """

    wall: float
    cpu: float
    loss: float


def take_turn(block: Block, number: int) -> Turn:
    wall = time.perf_counter()
    cpu = time.process_time()
    loss = block(number)
    return Turn(time.perf_counter() - wall, time.process_time() - cpu, loss)


def measure(case: Case, images: ImageSet) -> dict[str, list[Turn]]:
    """Blocks 0 warm up; then each round is blocks n and n + 1 of every side, in one order and then
    the other.
    """
    sides = make_sides(case, images)
    turns: dict[str, list[Turn]] = {name: [] for name in sides}
    for block in sides.values():
        block(0)
    for number in range(1, 2 * case.rounds + 1):
        for name in list(sides) if number % 2 else reversed(list(sides)):
            turns[name].append(take_turn(sides[name], number))
        print(
            f"\r{TITLES[case.model]}: block {number} of {2 * case.rounds}",
            end="",
            file=sys.stderr,
            flush=True,
        )
    print(file=sys.stderr)
    return turns


def ratios(side: list[Turn], plain: list[Turn], clock: str) -> list[float]:
    """One ratio a round, of the two blocks there and back together."""

    def seconds(turns: list[Turn]) -> list[float]:
        values = [getattr(turn, clock) for turn in turns]
        return [there + back for there, back in zip(values[::2], values[1::2], strict=True)]

    return [a / b for a, b in zip(seconds(side), seconds(plain), strict=True)]


def loss_difference(side: list[Turn], plain: list[Turn]) -> float:
    """The largest relative difference between the losses of the same block."""
    return max(abs(a.loss - b.loss) / abs(b.loss) for a, b in zip(side, plain, strict=True))


def summarise(case: Case, turns: dict[str, list[Turn]]) -> list[dict[str, Any]]:
    """A row for each side but the first, which the others are compared with."""
    name, *others = turns
    plain = turns[name]
    rows = []
    for other in others:
        wall, cpu = (Spread.of(ratios(turns[other], plain, clock)) for clock in ("wall", "cpu"))
        difference = loss_difference(turns[other], plain)
        if not difference < 1e-4:
            raise SystemExit(
                f"{other}: the losses differ from the plain loop's by {difference:.1e}: not the "
                "same work"
            )
        rows.append(
            {"side": other, "wall": asdict(wall), "cpu": asdict(cpu), "loss_difference": difference}
        )
    step = Spread.of([turn.wall / case.steps for turn in plain])
    print(f"{TITLES[case.model]}: a step of the plain loop takes {1000 * step.median:.1f} ms")
    return [
        {"model": case.model, "batch": case.batch, "plain_step_seconds": step.median, **row}
        for row in rows
    ]


def as_table(rows: list[dict[str, Any]]) -> str:
    header = [
        "",
        "time over the plain loop's",
        "processor time over the plain loop's",
        "largest difference in loss",
    ]
    return markdown_table(
        header,
        [
            [
                f"{TITLES[row['model']]}, batch {row['batch']}: {row['side']}",
                Spread(**row["wall"]).text(),
                Spread(**row["cpu"]).text(),
                "none" if row["loss_difference"] == 0 else f"{row['loss_difference']:.0e}",
            ]
            for row in rows
        ],
    )


def parse() -> argparse.Namespace:
    parser = BENCHMARK.parser("12 for LeNet and 7 for ResNet-18")
    parser.add_argument("--model", choices=[case.model for case in CASES], help="only this one")
    return BENCHMARK.parse(parser, "model")


def main() -> None:
    args = parse()
    torch.set_num_threads(1)
    keep_freed_memory()
    os.environ["TERM"] = "xterm-256color"  # the live display is the same wherever this runs
    machine = describe_machine()
    rows = []
    turns = {}
    for case in chosen(CASES, args, batch=8, steps=2):
        images = load_images(case.samples)
        turns[case.model] = measure(case, images)
        rows += summarise(case, turns[case.model])
    kept = {
        model: {name: [asdict(t) for t in side] for name, side in sides.items()}
        for model, sides in turns.items()
    }
    BENCHMARK.publish(
        args,
        machine,
        as_table(rows),
        f"{images.name} images",
        data=images.name,
        rows=rows,
        turns=kept,
    )
    for row in rows:
        if row["side"] == "Trainer, no callbacks" and not args.quick:
            verdict = "within" if row["wall"]["median"] <= TARGET else "ABOVE"
            print(
                f"{TITLES[row['model']]}: {row['wall']['median']:.3f}, {verdict} the target of "
                f"{TARGET}"
            )


if __name__ == "__main__":
    main()
