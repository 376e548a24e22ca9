"""The first steps of a training with the fingerprint of every tensor after each."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..communicator import init
from ..fingerprints import fingerprint, plain_names
from ..training.job import make_trainer
from ..training.options import TrainOptions
from ..training.parts import load_data
from ..training.trainer import Trainer

__all__ = ["Record", "Step", "record"]


@dataclass(frozen=True)
class Step:
    """What a step has left.

    Attributes:
        fingerprint: of the model and the optimizer, see `lockstep.fingerprint`.
        loss: its exact value, as `float.hex` writes it.
        tensors: the SHA-256 of each parameter, buffer and tensor of the optimizer's state, by name, in order.
    """

    fingerprint: str
    loss: str
    tensors: dict[str, str]


@dataclass(frozen=True)
class Record:
    """A run's first steps.

    Attributes:
        workers: how many made it.
        steps: in order.
        conditions: what the run computed under, by name.
        layers: the classes of the model's layers.
    """

    workers: int
    steps: tuple[Step, ...]
    conditions: dict[str, Any]
    layers: tuple[str, ...]


def record(options: TrainOptions, steps: int) -> Record:
    """Train for so many steps as `options` say; called by every worker. Nothing is written.

    Raises:
        LockstepError: one of its kinds, for anything that is wrong with options, data or model.
    """
    comm = init(options.device)
    train, _ = load_data(options)
    trainer = make_trainer(replace(options, out=None, resume=None), train, [])
    found: list[Step] = []
    with closing(trainer.loader(train)) as loader:
        trainer.model.train()
        epoch = 0
        while len(found) < steps:
            for batch in loader.epoch(epoch):
                result = trainer.step.run(batch)
                found.append(_step(trainer, float(result.loss)))
                if len(found) == steps:
                    break
            epoch += 1
    layers = tuple(sorted({type(layer).__name__ for layer in trainer.model.modules()}))
    return Record(comm.size, tuple(found), _conditions(trainer), layers)


def _step(trainer: Trainer, loss: float) -> Step:
    tensors = {name: _digest(tensor) for name, tensor in _tensors(trainer.model, trainer.optimizer)}
    return Step(fingerprint(trainer.model, trainer.optimizer), loss.hex(), tensors)


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    named = plain_names(dict(model.named_parameters()))
    yield from named.items()
    yield from plain_names(dict(model.named_buffers())).items()
    for name, parameter in named.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if torch.is_tensor(value):
                yield f"{name} ({key} of the optimizer)", value


def _digest(tensor: torch.Tensor) -> str:
    dense = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(dense.view(torch.uint8).numpy().data).hexdigest()


def _conditions(trainer: Trainer) -> dict[str, Any]:
    conditions = getattr(trainer.step.strategy, "conditions", None)
    if conditions is not None:
        found: dict[str, Any] = conditions.describe()
        return found
    return {"threads": torch.get_num_threads(), "instruction set": torch.backends.cpu.get_cpu_capability()}
