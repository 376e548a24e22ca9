"""Bits that flip on one worker of a training: in an output, a gradient or a weight, once or always."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.errors import DivergedError, FaultyWorkerError
from lockstep.parallel.invariant import Invariant
from lockstep.proof.cross_check import CrossCheck
from lockstep.proof.faults import FoundFault
from lockstep.proof.on_spike import SpikeGuard

__all__ = ["KINDS", "STEPS", "VIRTUAL_WORKERS", "BitFlip", "Outcome", "run"]

KINDS = ("output", "gradient", "weight")
STEPS, VIRTUAL_WORKERS, BATCH = 20, 6, 48


@dataclass
class BitFlip:
    """One bit that flips on one rank while one virtual worker's pass runs, or in all passes from a step on.

    Attributes:
        kind: "output" of a layer, "gradient" of a parameter, or "weight".
        rank: the rank.
        is_persistent: whether it flips in every pass from `step` on.
        step: the first step in which it does.
        shard: the virtual worker in whose pass it flips, if it does once.
        place: the number of the layer or the parameter, modulo how many there are.
        element: the number of the value, modulo how many there are.
        bit: of 32.
        times: how often it has flipped.
    """

    kind: str
    rank: int
    is_persistent: bool
    step: int
    shard: int
    place: int
    element: int
    bit: int
    times: int = 0

    @staticmethod
    def drawn(seed: int, workers: int) -> BitFlip:
        """Draw a flip; it is the same on all workers."""
        draw = random.Random(seed)
        rank = draw.randrange(workers)
        low, high = rank * VIRTUAL_WORKERS // workers, (rank + 1) * VIRTUAL_WORKERS // workers
        return BitFlip(
            kind=draw.choice(KINDS),
            rank=rank,
            is_persistent=draw.random() < 0.5,
            step=draw.randrange(STEPS - 8),
            shard=draw.randrange(low, high),
            place=draw.randrange(1 << 20),
            element=draw.randrange(1 << 20),
            bit=draw.randrange(32),
        )

    def inject(self, trainer: lockstep.Trainer) -> None:
        """Let the bit flip in a training, on its rank."""
        if trainer.comm.rank != self.rank:
            return
        layers = [
            layer for layer in trainer.model.modules() if isinstance(layer, (nn.Linear, nn.Conv2d))
        ]
        parameters = list(trainer.model.parameters())
        parameter = parameters[self.place % len(parameters)]
        strategy = trainer.step.strategy
        assert isinstance(strategy, Invariant)

        def is_due() -> bool:
            if self.is_persistent:
                return trainer.step.steps_done >= self.step
            return (
                not self.times
                and trainer.step.steps_done == self.step
                and strategy.reducer.shard == self.shard
            )

        if self.kind == "output":
            layer = layers[self.place % len(layers)]
            layer.register_forward_hook(
                lambda module, inputs, output: self._flip(output) if is_due() else output
            )
        elif self.kind == "gradient":
            parameter.register_hook(  # type: ignore[no-untyped-call]
                lambda gradient: self._flip(gradient.clone()) if is_due() else gradient
            )
        else:
            trainer.model.register_forward_pre_hook(
                lambda module, inputs: (self._flip(parameter), None)[1] if is_due() else None
            )

    def _flip(self, tensor: torch.Tensor) -> torch.Tensor:
        """Flip the bit in the memory of a tensor of float32, without a new version of it, as a chip does."""
        self.times += 1
        bits = tensor.data.view(torch.int32).reshape(-1)
        bits[self.element % bits.numel()] ^= (1 << self.bit) if self.bit < 31 else -(1 << 31)
        return tensor


@dataclass
class Outcome:
    """What a training with a fault came to, on one rank.

    Attributes:
        fingerprint: of the weights at its end.
        faults: what the guards have found.
        checked_passes: how many passes of others each worker has repeated.
        end: "done", "faulty worker", or "not finite".
        ranks: that the error at its end names.
    """

    fingerprint: str
    faults: list[FoundFault] = field(default_factory=list)
    checked_passes: int = 0
    end: str = "done"
    ranks: tuple[int, ...] = ()


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(36, 24), nn.ReLU(), nn.Dropout(0.1), nn.Linear(24, 10)
    )


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(24, 10)
    )


def normed() -> nn.Module:
    layers = [nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(96, 10))


def run(
    flip: BitFlip | None,
    every: int | None = 4,
    make: Any = mlp,
    on_spike: Any = None,
    **options: Any,
) -> Outcome:
    """Train some steps, with a fault or without, on the workers of this job."""
    lockstep.init("cpu")
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    trainer = lockstep.Trainer(
        model, optimizer, nn.CrossEntropyLoss(), BATCH, callbacks=[], virtual_workers=VIRTUAL_WORKERS,
        replica_check=0, cross_check=every, on_spike=on_spike, **options,
    )  # fmt: skip
    if flip is not None:
        flip.inject(trainer)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(BATCH * STEPS, 1, 6, 6, generator=generator)
    labels = inputs.flatten(1)[:, :10].argmax(1)
    end, ranks = "done", ()
    try:
        trainer.fit(TensorDataset(inputs, labels), epochs=1)
    except FaultyWorkerError as error:
        end, ranks = "faulty worker", error.ranks  # type: ignore[assignment]
    except DivergedError:
        end = "not finite"
    found = Outcome(lockstep.fingerprint(trainer.model), end=end, ranks=ranks)
    for guard in trainer.step.guards:
        if isinstance(guard, (CrossCheck, SpikeGuard)):
            found.faults += guard.faults
        if isinstance(guard, CrossCheck):
            found.checked_passes = guard.checked_passes
    return found
