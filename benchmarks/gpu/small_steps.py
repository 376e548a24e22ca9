"""Steps that the host takes longer to start than the GPU to compute: LeNet and an MLP with 32
images.

Microseconds of a step: a loop by hand and the same as a CUDA graph, `TrainStep` and `Trainer.fit`
as they are and compiled with graphs, Accelerate and Lightning's Fabric where they are installed;
and what equal bits cost: a pass for each of V virtual workers, against one pass. `TrainStep` and
the others have their batches ready in the device's memory; the Trainer makes them there from
images, and so does a second loop by hand.

    PYTHONPATH=src:benchmarks python benchmarks/gpu/small_steps.py
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from sides import MODELS, Make, Resident, captured_step, hand_step, made
from timing import Options, Side, finish, keep, medians, options, take_turns
from torch import Tensor, nn

import lockstep
from lockstep.data import ImageSet
from lockstep.data.loader import Batch
from lockstep.training.step.train_step import TrainStep

BATCH = 32
VIRTUAL = (1, 2, 4, 8)
BY_HAND = ("by hand", "by hand, batches made there")


def batches_on(device: torch.device, count: int, size: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(size, 1, 28, 28, generator=generator).to(device),
            torch.randint(0, 10, (size,), generator=generator).to(device),
        )
        for _ in range(count)
    ]


Step = Callable[[Tensor, Tensor], object]


def repeated(
    make_step: Callable[[], Step], batches: list[tuple[Tensor, Tensor]], steps: int
) -> Side:
    step = make_step()
    endless = itertools.cycle(batches)

    def block() -> None:
        for _ in range(steps):
            step(*next(endless))

    return block


def compiled_with_graphs(model: nn.Module) -> nn.Module:
    """The model, compiled in place in the mode in which the compiler records CUDA graphs."""
    return lockstep.prepare_model(
        model, lockstep.init(), compile_model=True, compile_mode="reduce-overhead"
    )


def train_step(make: Make, device: torch.device, graphs: bool = False, **given: Any) -> Step:
    model, optimizer = made(make, device)
    model = compiled_with_graphs(model) if graphs else model
    step = TrainStep(model, optimizer, nn.CrossEntropyLoss(), **given)
    indices = torch.arange(4096)

    def run(inputs: Tensor, labels: Tensor) -> object:
        size = len(inputs)
        return step.run(Batch((inputs, labels), indices[:size], size, size, 0, 0))

    return run


def resident_steps(make: Make, images: ImageSet, device: torch.device, steps: int) -> Side:
    """A loop by hand that makes its batches in the device's memory, in another order each epoch."""
    step = hand_step(*made(make, device))
    data = Resident(images, device, BATCH)
    endless = itertools.chain.from_iterable(data.epoch() for _ in itertools.count())

    def block() -> None:
        for inputs, labels in itertools.islice(endless, steps):
            step(inputs, labels)

    return block


def trainer_steps(make: Make, images: ImageSet, steps: int, graphs: bool = False) -> Side:
    model, optimizer = made(make, lockstep.init().device)
    model = compiled_with_graphs(model) if graphs else model
    trainer = lockstep.Trainer(model, optimizer, nn.CrossEntropyLoss(), BATCH, callbacks=[])
    loader = trainer.loader(images)

    def block() -> None:
        trainer.fit(loader, max_steps=trainer.step.steps_done + steps)

    return block


def accelerate_step(make: Make, device: torch.device) -> Step:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=device.type == "cpu")
    model, optimizer = accelerator.prepare(*made(make, device))
    return hand_step(model, optimizer, accelerator.backward)


def fabric_step(make: Make, device: torch.device) -> Step:
    name = "lightning.fabric" if is_installed("lightning") else "lightning_fabric"
    fabric = importlib.import_module(name).Fabric(
        accelerator="cpu" if device.type == "cpu" else "cuda", devices=1
    )
    model, optimizer = fabric.setup(*made(make, device))
    return hand_step(model, optimizer, fabric.backward)


def is_installed(*names: str) -> bool:
    return any(importlib.util.find_spec(name) is not None for name in names)


def measure(name: str, given: Options) -> dict[str, Any]:
    """Microseconds of a step of each side, and what they take more than the loop by hand with
    batches like theirs.
    """
    device = given.device
    make = MODELS[name]
    steps = 4 if given.quick else 50
    batches = batches_on(device, 8, BATCH)
    images = lockstep.data.synthetic(train=BATCH * 2 * steps, test=8)[0].to(device)
    steps_of: dict[str, Callable[[], Step]] = {
        "by hand": lambda: hand_step(*made(make, device)),
        "TrainStep": lambda: train_step(make, device),
    }
    sides: dict[str, Callable[[], Side]] = {
        "by hand, batches made there": lambda: resident_steps(make, images, device, steps),
        "Trainer": lambda: trainer_steps(make, images, steps),
    }
    if device.type == "cuda":
        steps_of["by hand, captured"] = lambda: captured_step(make, *batches[0])
        steps_of["TrainStep, compiled with graphs"] = lambda: train_step(make, device, graphs=True)
        sides["Trainer, compiled with graphs"] = lambda: trainer_steps(
            make, images, steps, graphs=True
        )
    if is_installed("accelerate"):
        steps_of["Accelerate"] = lambda: accelerate_step(make, device)
    if is_installed("lightning", "lightning_fabric"):
        steps_of["Fabric"] = lambda: fabric_step(make, device)
    sides |= {
        side: partial(repeated, make_step, batches, steps) for side, make_step in steps_of.items()
    }
    found = medians(take_turns(sides, given), 1e6 / steps)
    more = {}
    for side in found.keys() - set(BY_HAND):
        more[side] = found[side] - found[BY_HAND[1] if side.startswith("Trainer") else BY_HAND[0]]
    return {"microseconds": found, "more than by hand": more}


def virtual_workers(given: Options) -> dict[str, Any]:
    """Microseconds of a step of LeNet on 256 images in V passes."""
    device = given.device
    steps = 2 if given.quick else 20
    size = 256
    batches = batches_on(given.device, 4, 256)
    one = partial(train_step, MODELS["LeNet"], device)
    sides: dict[str, Callable[[], Side]] = {"one pass": partial(repeated, one, batches, steps)}
    for count in VIRTUAL:
        sides[f"V = {count}"] = partial(
            repeated, partial(one, virtual_workers=count), batches, steps
        )
    return {"images": size, "microseconds": medians(take_turns(sides, given), 1e6 / steps)}


def main() -> None:
    given, path = options(__doc__, 12.0)
    lockstep.init(given.device.type)
    found: dict[str, Any] = {}
    for name in ("LeNet", "MLP"):
        found[name] = measure(name, given)
        keep(path, found)
    finish(path, {**found, "virtual workers": virtual_workers(given)})


if __name__ == "__main__":
    main()
