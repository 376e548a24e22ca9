"""Records the first steps of all optimizers in a process, with hooks of torch that every optimizer
calls.
"""

from __future__ import annotations

import gc
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .. import environment, observers
from ..parallel.optimizer_parts import hyperparameters_of, part_of
from .held import Held, hold
from .passes import PassRecorder
from .records import RunRecord, StepRecord, TensorRecord

# elements of a tensor that are kept; their number decides how small a part that differs is still
# found
_SAMPLE = 512
_MOST_IGNORED = 3  # times that a script may catch the exception that ends it


class StepsRecorded(SystemExit):
    """All steps are recorded: the script ends, as by `sys.exit`, on every rank before the same
    step.
    """


def record_file(folder: Path, rank: int) -> Path:
    """Return the path of the record of a rank."""
    return folder / f"steps-{rank}"


class StepRecorder(observers.Observer):
    """Records what each optimizer of this process is about to do, and ends the program after some
    steps.

    Args:
        folder: for the record.
        steps: recorded steps of each optimizer.
        held: what is the same at every number of workers.
    """

    def __init__(self, folder: Path, steps: int, held: Held | None = None) -> None:
        self._folder = folder
        self._most = steps
        self._held = held or Held()
        self._counts: dict[int, int] = {}
        self._optimizers: list[Optimizer] = []  # keeps their ids unique
        self._records: list[StepRecord] = []
        self._layers: tuple[str, ...] = ()
        self._low_precision = False
        self._ignored = 0
        self._undo: list[Callable[[], Any]] = []

    def install(self) -> None:
        """Begin to record, until `finish`. Trainers make their run directories in the folder."""
        hook = register_optimizer_step_pre_hook(self._before_update)
        held = hold(self._held, environment.find_world().world_size)
        self._passes = PassRecorder()  # around what is held
        self._undo = [hook.remove, observers.install(self), self._passes.undo]
        self._undo += [replaced.undo for replaced in reversed(held)]

    def finish(self) -> None:
        """Stop recording, and write the record; a program that took no step gives an empty one."""
        for undo in self._undo:
            undo()
        self._undo = []
        world = environment.find_world()
        passes = self._passes
        record = RunRecord(
            world.rank,
            world.world_size,
            tuple(self._records),
            self._layers,
            self._low_precision or passes.low_precision,
            passes.has_dropout,
            passes.has_batch_statistics,
            passes.has_draws,
            passes.divides_batches,
            passes.repeated_order,
        )
        record_file(self._folder, world.rank).write_bytes(msgspec.msgpack.encode(record))

    def run_directory(self, path: Path) -> Path:
        """Return another one: the user's stays as it is."""
        return self._folder / "runs" / path.name

    def _before_update(self, optimizer: Optimizer, *_: object) -> None:
        if id(optimizer) not in self._counts:
            self._counts[id(optimizer)] = 0
            self._optimizers.append(optimizer)
        step = self._counts[id(optimizer)]
        if step == self._most:
            self._end()
        self._counts[id(optimizer)] = step + 1
        self._records.append(self._record(optimizer, step))
        self._passes.begin_step()

    def _end(self) -> None:
        self._ignored += 1
        if self._ignored > _MOST_IGNORED:  # the script catches every exception
            raise RuntimeError("lockstep verify: all steps are recorded, but the script goes on")
        raise StepsRecorded(0)

    def _record(self, optimizer: Optimizer, step: int) -> StepRecord:
        models = list(find_models())
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        names = name_parameters(models, parameters)
        self._layers = tuple(
            sorted({type(layer).__name__ for model in models for layer in model.modules()})
        )
        gradients = {names[id(p)]: p.grad for p in parameters if p.grad is not None}
        self._low_precision = self._low_precision or any(
            gradient.dtype.itemsize < 4 for gradient in gradients.values()
        )
        trained = {id(p) for p in parameters}
        others = [p for model in models for p in model.parameters() if id(p) not in trained]
        buffers = {
            name: buffer
            for model in models
            for name, buffer in _named(models, model.named_buffers(), model)
        }
        buffers |= {names[id(p)]: p for p in others if id(p) in names}
        return StepRecord(
            self._optimizers.index(optimizer),
            step,
            tuple(_hyperparameters(group) for group in optimizer.param_groups),
            {names[id(p)]: _summary(p) for p in parameters},
            {name: _summary(gradient) for name, gradient in gradients.items()},
            {name: _summary(buffer) for name, buffer in buffers.items()},
            tuple(self._passes.samples),
            self._passes.passes,
            self._passes.targets,
            self._passes.draws,
            part_of(optimizer.param_groups) is not None,
        )


def _hyperparameters(group: dict[str, Any]) -> dict[str, str]:
    kinds = (bool, int, float, str, tuple, list, type(None))
    texts = {}
    for name, value in hyperparameters_of(group).items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if name != "param_names" and isinstance(value, kinds):
            texts[name] = str(value)
    return texts


def _summary(tensor: torch.Tensor) -> TensorRecord:
    whole = tensor.detach()
    if isinstance(whole, DTensor):  # each rank has a part: all of them call this
        whole = whole.full_tensor()
    if whole.is_sparse:
        whole = whole.to_dense()
    flat = whole.cpu().contiguous().reshape(-1)
    digest = hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()[:16]
    numbers = flat.abs().double() if flat.is_complex() else flat.double()
    stride = max(1, math.ceil(flat.numel() / _SAMPLE))
    return TensorRecord(
        digest, flat.numel(), float(numbers.norm()), tuple(numbers[::stride].tolist())
    )


_WRAPPERS = ("lockstep.", "torch.nn.parallel.", "torch._dynamo.", "accelerate.", "lightning")


def find_models() -> Iterator[nn.Module]:
    """Yield the modules of this process that are in no other one, except those of libraries that
    wrap models.
    """
    modules = [value for value in gc.get_objects() if _is_users_module(value)]
    inner = {id(child) for module in modules for child in module.modules() if child is not module}
    seen: set[int] = set()
    for module in modules:
        tensors = {id(p) for p in module.parameters()} | {id(buffer) for buffer in module.buffers()}
        # an average or a copy has tensors of its own
        if id(module) not in inner and tensors and not tensors <= seen:
            seen |= tensors
            yield module


def _is_users_module(value: object) -> bool:
    try:
        return isinstance(value, nn.Module) and not type(value).__module__.startswith(_WRAPPERS)
    except ReferenceError:  # a weak proxy whose object is gone
        return False


def _named(
    models: Sequence[nn.Module], tensors: Iterable[tuple[str, torch.Tensor]], model: nn.Module
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of one of the models; the names begin with its class where there are
    several models.
    """
    prefix = f"{type(model).__name__}: " if len(models) > 1 else ""
    for name, tensor in tensors:
        yield prefix + name, tensor


def name_parameters(
    models: Sequence[nn.Module], parameters: Iterable[torch.Tensor]
) -> dict[int, str]:
    """Return the parameters' names by id; those that are in no module are numbered."""
    names: dict[int, str] = {}
    for model in models:
        for name, parameter in _named(models, model.named_parameters(), model):
            names.setdefault(id(parameter), name)
    for number, parameter in enumerate(parameters):
        names.setdefault(id(parameter), f"parameter {number}")
    return names
