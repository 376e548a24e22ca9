"""A part of an epoch of LeNet and ResNet-18, 256 images a step: the tutorials' loop, loops by hand
and `Trainer.fit`.

The best loop by hand has its data in the device's memory, and is compiled or captured as a CUDA
graph.

    PYTHONPATH=src:benchmarks python benchmarks/gpu/epochs.py
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from sides import (
    MODELS,
    Resident,
    captured_step,
    hand_epoch,
    hand_step,
    made,
    trainer_epoch,
    tutorial_epoch,
)
from timing import Options, Side, best_of, finish, keep, medians, options, ratio_of, take_turns

import lockstep

BATCH = 256
QUICK_BATCH = 16
IMAGES = {"LeNet": 20_000, "ResNet-18": 5_000}  # a part of an epoch, for the time that it takes
BY_HAND = ["by hand", "by hand, compiled", "by hand, captured"]
OURS = [
    "Trainer",
    "Trainer, images on the device",
    "Trainer, compiled",
    "Trainer, compiled with graphs",
]


def sides_of(name: str, given: Options) -> dict[str, Callable[[], Side]]:
    """What makes each side: one that fails is left out."""
    device = given.device
    make = MODELS[name]
    batch = QUICK_BATCH if given.quick else BATCH
    images = lockstep.data.synthetic(train=2 * batch + 8 if given.quick else IMAGES[name], test=8)[
        0
    ]
    there = images.to(device)

    def by_hand(compiled: bool = False) -> Side:
        model, optimizer = made(make, device)
        return hand_epoch(
            hand_step(torch.compile(model) if compiled else model, optimizer), resident()
        )

    def captured() -> Side:
        return hand_epoch(captured_step(make, *next(resident().epoch())), resident())

    resident = partial(Resident, images, device, batch)
    ours = partial(trainer_epoch, make, there, batch)
    sides: dict[str, Callable[[], Side]] = {
        "tutorial": partial(tutorial_epoch, make, images, batch, device),
        "by hand": by_hand,
        "Trainer": partial(trainer_epoch, make, images, batch),
        "Trainer, images on the device": ours,
    }
    if device.type == "cuda":
        sides["by hand, compiled"] = partial(by_hand, compiled=True)
        sides["by hand, captured"] = captured
        sides["Trainer, compiled"] = partial(ours, compile_mode="default")
        sides["Trainer, compiled with graphs"] = partial(ours, compile_mode="reduce-overhead")
    return sides


def measure(name: str, given: Options) -> dict[str, Any]:
    found = take_turns(sides_of(name, given), given, warm_up=1)
    best = best_of(found, BY_HAND)
    ours = best_of(found, OURS)
    assert best is not None and ours is not None
    return {
        "seconds": medians(found),
        "best by hand": best,
        "best of ours": ours,
        "tutorial over Trainer": ratio_of(found, "tutorial", "Trainer"),
        "best of ours over best by hand": ratio_of(found, ours, best),
        "Trainer over by hand": ratio_of(found, "Trainer", "by hand"),
    }


def main() -> None:
    given, path = options(__doc__, 15.0)
    lockstep.init(given.device.type)
    found: dict[str, Any] = {}
    for name in IMAGES:
        found[name] = measure(name, given)
        keep(path, found)
    finish(path, found)


if __name__ == "__main__":
    main()
