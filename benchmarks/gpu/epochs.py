"""One epoch of LeNet and ResNet-18 with batches of 256 images: the tutorials' loop, loops by hand, and `Trainer.fit`.

The best loop by hand has its data in the device's memory, and is compiled or captured as a CUDA graph.

    PYTHONPATH=src:benchmarks python benchmarks/gpu/epochs.py
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from sides import MODELS, Resident, captured_step, hand_epoch, hand_step, made, trainer_epoch, tutorial_epoch
from timing import Options, Side, best_of, finish, medians, options, ratio_of, take_turns

import lockstep

BATCH, QUICK_BATCH = 256, 16
BY_HAND = ["by hand", "by hand, compiled", "by hand, captured"]
OURS = ["Trainer", "Trainer, images on the device", "Trainer, compiled", "Trainer, CUDA graphs"]


def sides_of(name: str, given: Options) -> dict[str, Side]:
    device, make, batch = given.device, MODELS[name], QUICK_BATCH if given.quick else BATCH
    images = lockstep.data.synthetic(train=2 * batch + 8 if given.quick else 60_000, test=8)[0]
    there = images.to(device)
    model, optimizer = made(make, device)
    compiled, optimizer_of_compiled = made(make, device)
    sides: dict[str, Side] = {
        "tutorial": tutorial_epoch(make, images, batch, device),
        "by hand": hand_epoch(hand_step(model, optimizer), Resident(images, device, batch)),
        "Trainer": trainer_epoch(make, images, batch),
        "Trainer, images on the device": trainer_epoch(make, there, batch),
    }
    if device.type == "cuda":
        graph = partial(captured_step, make)
        data = Resident(images, device, batch)
        sides["by hand, compiled"] = hand_epoch(hand_step(torch.compile(compiled), optimizer_of_compiled), data)
        sides["by hand, captured"] = hand_epoch(graph(*next(data.epoch())), Resident(images, device, batch))
        sides["Trainer, compiled"] = trainer_epoch(make, there, batch, compiled=True)
        sides["Trainer, CUDA graphs"] = trainer_epoch(make, there, batch, cuda_graphs=True)
    return sides


def measure(name: str, given: Options) -> dict[str, Any]:
    found = take_turns(sides_of(name, given), given, warm_up=1)
    best, ours = best_of(found, BY_HAND), best_of(found, OURS)
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
    given, path = options(__doc__, 25.0)
    lockstep.init(given.device.type)
    finish(path, {name: measure(name, given) for name in ("LeNet", "ResNet-18")})


if __name__ == "__main__":
    main()
