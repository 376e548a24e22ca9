"""Measures the one idea, and draws it: the same losses at any number of workers, in less time.

LeNet is trained on Fashion-MNIST with `virtual_workers=4` on 1, 2 and 4 workers of one thread each, in turns. The
losses of all steps must be the same, bit for bit. Times are those of an epoch over that of one worker in the same
round, for as many workers as there are cores; the median over the rounds counts.

    python benchmarks/one_idea.py            # some four minutes on two idle cores
    python benchmarks/one_idea.py --quick    # a smoke run; its figures say nothing
    python benchmarks/one_idea.py --write    # also draws docs/figures/one_idea.png, for the README
"""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

from torch import nn

import lockstep
from common import DOCS, Spread, describe_machine, load_images, make_model, markdown_table
from figures import draw_one_idea
from frame import Benchmark
from lockstep.training.callbacks import Callback

BENCHMARK = Benchmark("one_idea", __doc__)
WORKERS = (1, 2, 4)
VIRTUAL_WORKERS = 4
GLOBAL_BATCH = 256


class Losses(Callback):
    """Keeps the loss of each step, and the seconds of each epoch."""

    every_rank = True

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def on_loss(self, trainer: Any, result: Any, loss: float) -> None:
        """Keep the loss of a step."""
        self.losses.append(loss)

    def on_train_epoch_end(self, trainer: Any, row: Any) -> None:
        """Keep the seconds of an epoch."""
        self.seconds.append(row["seconds"])


def train(samples: int, epochs: int) -> tuple[list[float], float, str]:
    """Return the losses of all steps, the seconds of the last epoch, and the fingerprint of the model."""
    kept = Losses()
    model, optimizer = make_model("lenet")
    trainer = lockstep.Trainer(
        model, optimizer, nn.CrossEntropyLoss(), GLOBAL_BATCH, virtual_workers=VIRTUAL_WORKERS, callbacks=[kept]
    )
    trainer.fit(load_images(samples), epochs)
    return kept.losses, kept.seconds[-1], lockstep.fingerprint(model)


def measure(samples: int, epochs: int, rounds: int) -> dict[int, list[tuple[list[float], float, str]]]:
    """Train on each number of workers, in turns, every second round in the opposite order."""
    found: dict[int, list[tuple[list[float], float, str]]] = {workers: [] for workers in WORKERS}
    for number in range(rounds):
        for workers in WORKERS[:: -1 if number % 2 else 1]:
            found[workers].append(lockstep.launch(train, samples, epochs, workers=workers, threads=1))
            print(
                f"round {number + 1} of {rounds}: {workers} workers, {found[workers][-1][1]:.2f} s an epoch", flush=True
            )
    return found


def main() -> None:
    """Run from the command line."""
    parser = BENCHMARK.parser("5")
    args = BENCHMARK.parse(parser)
    samples, epochs, rounds = (2560, 1, 1) if args.quick else (25_600, 3, 5)
    machine = describe_machine()
    found = measure(samples, epochs, args.rounds or rounds)
    fingerprints = {fingerprint for runs in found.values() for _, _, fingerprint in runs}
    losses = {workers: runs[0][0] for workers, runs in found.items()}
    if len(fingerprints) > 1 or len({tuple(each) for each in losses.values()}) > 1:
        raise SystemExit(f"error: the runs differ: fingerprints {fingerprints}")
    timed = [workers for workers in WORKERS if workers <= (os.cpu_count() or 1)]
    times = {
        workers: Spread.of([run[1] / alone[1] for run, alone in zip(found[workers], found[1], strict=True)])
        for workers in timed
    }
    table = markdown_table(
        ["workers", "fingerprint", "time of an epoch over that of one worker"],
        [[str(n), found[n][0][2][:12], f"{times[n].median:.2f}" if n in times else ""] for n in WORKERS],
    )
    if args.write:
        draw_one_idea(losses, {n: spread.median for n, spread in times.items()}, DOCS / "figures/one_idea.png")
    BENCHMARK.publish(
        args,
        machine,
        table,
        load_images(1).name,
        losses=losses,
        fingerprints={n: runs[0][2] for n, runs in found.items()},
        over_one_worker={n: asdict(spread) for n, spread in times.items()},
    )


if __name__ == "__main__":
    main()
