"""The bits of a training from its options, as `lockstep train` runs it, at several numbers of
workers: its first steps, where two runs diverge, and why.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..checkpoint.names import plain_names
from ..communicator import init
from ..parallel.invariant import Invariant
from ..training.options import TrainOptions
from ..training.trainer import Trainer
from ..training.training_run import load_data, make_trainer


@dataclass(frozen=True)
class Step:
    """The state after one step.

    Attributes:
        fingerprint: fingerprint of the model and the optimizer, see `lockstep.fingerprint`.
        loss: the exact loss, as `float.hex` writes it.
        tensors: the SHA-256 of each parameter, buffer and tensor of the optimizer's state, by name,
            in order.
    """

    fingerprint: str
    loss: str
    tensors: dict[str, str]


@dataclass(frozen=True)
class Record:
    """The first steps of a run.

    Attributes:
        workers: number of workers.
        steps: the steps, in order.
        settings: the determinism settings, by name.
        layers: the classes of the model's layers.
    """

    workers: int
    steps: tuple[Step, ...]
    settings: dict[str, Any]
    layers: tuple[str, ...]


def record(options: TrainOptions, steps: int) -> Record:
    """Train for `steps` steps under `options`, without writing files, and record each step; called
    by every worker.

    Raises:
        LockstepError: a subclass, for any problem with options, data or model.
    """
    comm = init(options.device)
    train, _ = load_data(options)
    trainer = make_trainer(replace(options, run_dir=None, resume=None), train, [])
    recorded: list[Step] = []
    with closing(trainer.loader(train)) as loader:
        trainer.model.train()
        epoch = 0
        while len(recorded) < steps:
            for batch in loader.epoch(epoch):
                result = trainer.step.run(batch)
                recorded.append(_record_step(trainer, float(result.loss)))
                if len(recorded) == steps:
                    break
            epoch += 1
    layers = tuple(sorted({type(layer).__name__ for layer in trainer.model.modules()}))
    return Record(comm.size, tuple(recorded), _determinism_settings(trainer), layers)


def _record_step(trainer: Trainer, loss: float) -> Step:
    strategy = trainer.step.strategy
    state = strategy.optimizer_state(trainer.model, trainer.optimizer)
    tensors = {
        name: _digest(tensor)
        for name, tensor in _named_tensors(trainer.model, trainer.optimizer, state["state"])
    }
    return Step(strategy.fingerprint(trainer.model, trainer.optimizer), loss.hex(), tensors)


def _named_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[int, Mapping[str, Any]]
) -> Iterator[tuple[str, torch.Tensor]]:
    parameters = plain_names(dict(model.named_parameters()))
    yield from parameters.items()
    yield from plain_names(dict(model.named_buffers())).items()
    updated = [id(p) for group in optimizer.param_groups for p in group["params"]]
    number_of = {parameter: number for number, parameter in enumerate(updated)}
    for name, parameter in parameters.items():
        for key, value in state.get(number_of.get(id(parameter), -1), {}).items():
            if torch.is_tensor(value):
                yield f"{name} ({key} of the optimizer)", value


def _digest(tensor: torch.Tensor) -> str:
    dense = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(dense.view(torch.uint8).numpy().data).hexdigest()


def _determinism_settings(trainer: Trainer) -> dict[str, Any]:
    strategy = trainer.step.strategy
    if isinstance(strategy, Invariant):
        return strategy.determinism.describe()
    return {
        "threads": torch.get_num_threads(),
        "instruction set": torch.backends.cpu.get_cpu_capability(),
    }


@dataclass(frozen=True)
class Divergence:
    """The first difference between two records.

    Attributes:
        step: the number of the step, from 0.
        loss_differs: whether the loss of that step differs; it was computed before the update.
        tensors: the names of the tensors that differ, in the model's order; the first one is the
            most telling.
        of: number of all tensors.
    """

    step: int
    loss_differs: bool
    tensors: tuple[str, ...]
    of: int


def first_divergence(one: Record, other: Record) -> Divergence | None:
    """Return the first step after which two records differ in a bit; None if they are equal."""
    for number, (left, right) in enumerate(zip(one.steps, other.steps, strict=True)):
        names = tuple(
            name for name in left.tensors if left.tensors[name] != right.tensors.get(name)
        )
        if names or left.loss != right.loss or left.fingerprint != right.fingerprint:
            return Divergence(number, left.loss != right.loss, names, len(left.tensors))
    return None


_RANDOM_LAYERS = ("Dropout", "DropPath", "StochasticDepth", "RReLU", "GumbelSoftmax")
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def likely_cause(
    one: Record,
    other: Record,
    divergence: Divergence,
    has_virtual_workers: bool,
    repeated: Divergence | None,
) -> str:
    """Return one or two sentences on the likely cause of a divergence, and its remedy.

    Args:
        one: the reference record.
        other: the record that differs from it.
        divergence: their first difference.
        has_virtual_workers: whether the training used virtual workers.
        repeated: the first difference between `one` and a second run with the same number of
            workers; None if there is none.
    """
    if repeated is not None:
        return _not_repeatable(one, repeated)
    if not has_virtual_workers:
        return (
            "without virtual workers, a worker computes its whole part in one pass. The size of "
            "that part depends on the number of workers, kernels choose their order of summation "
            "by it, and gradients are added in another order. --virtual-workers V fixes these "
            "orders."
        )
    different = [name for name, value in one.settings.items() if other.settings.get(name) != value]
    if different:
        name = different[0]
        return (
            f"{name}: {one.settings[name]} against {other.settings.get(name)}. Set it to the same "
            "for all runs."
        )
    if (
        divergence.tensors
        and divergence.tensors[0].rpartition(".")[2] in _STATISTICS
        and not divergence.loss_differs
    ):
        return (
            f"a layer's running statistics ({divergence.tensors[0]}): the model changes them "
            "outside the forward pass of a shard."
        )
    if divergence.loss_differs:
        return _forward_cause(one)
    return (
        "the losses are equal and the gradients differ: an operation of the backward pass has no "
        "fixed order on this device, or a hook uses more than its own shard."
    )


def _not_repeatable(one: Record, repeated: Divergence) -> str:
    where = repeated.tensors[0] if repeated.tensors else "the loss"
    workers = f"{one.workers} worker{'s'[: one.workers != 1]}"
    return (
        f"not the number of workers: two runs with {workers} diverge too, at step "
        f"{repeated.step}, in {where}. Something draws random numbers that Lockstep does not seed "
        "(a separate generator, the time, os.urandom), or an operation has no fixed order."
    )


def _forward_cause(one: Record) -> str:
    random = [layer for layer in one.layers if layer.startswith(_RANDOM_LAYERS)]
    layers = f" The model has {', '.join(random)}." if random else ""
    return (
        "the loss differs first, so the forward pass or its data differ: random numbers from "
        "generators other than torch's, an augmentation that is not keyed by (seed, epoch, "
        f"sample), or a model that keeps state from one batch to the next.{layers}"
    )
