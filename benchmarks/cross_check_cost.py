"""Measures what the cross-check costs: LeNet with 8 virtual workers, with it and without, in turns.

The processor time of all workers counts, so that other programs on the host change little; the
ratios are those of one run, each the median over the rounds.

    lockstep run -np 2 benchmarks/cross_check_cost.py
"""

from __future__ import annotations

import argparse
import logging
import time
from statistics import median

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

VIRTUAL_WORKERS, STEPS = 8, 100
VARIANTS = {"without": None, "weights alone": 1 << 40, "K = 100": 100, "K = 10": 10}


def main() -> None:
    """Print processor time of a step, and ratios to a step without the cross-check."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=256, help="images in a step (default: 256)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of 100 steps (default: 5)")
    args = parser.parse_args()
    comm = lockstep.init("cpu")
    logging.disable(logging.WARNING)
    images = torch.randn(args.batch * STEPS, 1, 28, 28)
    data = TensorDataset(images, torch.randint(0, 10, (len(images),)))
    trainers = {}
    for name, every in VARIANTS.items():
        torch.manual_seed(0)
        model = lockstep.models.lenet()
        optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
        options = {"virtual_workers": VIRTUAL_WORKERS, "callbacks": [], "cross_check": every}
        loss_fn = nn.CrossEntropyLoss()
        trainers[name] = lockstep.Trainer(model, optimizer, loss_fn, args.batch, **options)  # type: ignore[arg-type]
        trainers[name].fit(data, max_steps=STEPS // 10)  # not counted: losses are compared first
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for number in range(args.rounds):
        for name, trainer in trainers.items():
            began = time.process_time()
            trainer.fit(data, max_steps=STEPS // 10 + (number + 1) * STEPS)
            used = comm.allgather_object(time.process_time() - began)
            seconds[name].append(sum(used) / STEPS)
        if comm.rank == 0:
            of_round = {
                name: values[-1] / seconds["without"][-1] for name, values in seconds.items()
            }
            shown = ", ".join(f"{name} {ratio:.3f}" for name, ratio in of_round.items())
            print(f"round {number + 1}: {shown}", flush=True)
    if comm.rank == 0:
        print(f"{comm.size} workers, {args.batch} images, {VIRTUAL_WORKERS} virtual workers")
        for name, values in seconds.items():
            ratios = [a / b for a, b in zip(values, seconds["without"], strict=True)]
            print(f"{name:14} {1000 * median(values):7.1f} ms, {median(ratios):.3f} of without")


if __name__ == "__main__":
    main()
