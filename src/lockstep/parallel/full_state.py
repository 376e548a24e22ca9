"""Conversion of parameters and optimizer state between the full tensors of a checkpoint and the
workers' shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.optim import Optimizer

from ..checkpoint.folder import read_tensors
from ..checkpoint.serialization import StoredTensor
from ..communicator import Communicator
from .module_sync import expanded_dimensions

__all__ = [
    "full_tensors",
    "load_model",
    "load_optimizer",
    "read_model_state",
    "read_optimizer_state",
    "replace_parameters",
    "shard_like",
    "shard_optimizer_state",
]


def full_tensors(value: Any, wanted: bool = True) -> Any:
    """Return `value`, a tree of lists and dicts, with every DTensor gathered into a full tensor on
    the CPU.

    Called by all workers together. Tensors are gathered one at a time, so that a device need not
    hold all of them.

    Args:
        value: the tree.
        wanted: whether this worker keeps the full tensors; otherwise it gets None instead of each.
    """
    if isinstance(value, DTensor):
        gathered = value.full_tensor().detach()
        return gathered.cpu() if wanted else None
    if isinstance(value, Mapping):
        return {key: full_tensors(item, wanted) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(full_tensors(item, wanted) for item in value)
    return value


def shard_like(value: Any, like: Any) -> Any:
    """Return this worker's shard of the full tensor `value`, sharded as the DTensor `like`; other
    values unchanged.

    It does not communicate: every worker has the full tensor. A tensor of another shape than `like`
    is replicated, and a DTensor is returned as it is.
    """
    if not isinstance(like, DTensor) or not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    if isinstance(value, DTensor):
        return value
    placements = (
        like.placements if value.shape == like.shape else [Replicate()] * like.device_mesh.ndim
    )
    sharded = distribute_tensor(
        value.detach().to(like.device), like.device_mesh, placements, src_data_rank=None
    )
    # The shard is a view; without the copy it would keep the full tensor in memory.
    local = sharded.to_local().clone()
    return DTensor.from_local(
        local, like.device_mesh, placements, shape=sharded.shape, stride=sharded.stride()
    )


def shard_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state dict of full tensors with each tensor sharded as its
    parameter.
    """
    parameters = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
    sharded = {
        number: {name: shard_like(value, parameters.get(number)) for name, value in entries.items()}
        if number in parameters
        else entries
        for number, entries in state["state"].items()
    }
    return {**state, "state": sharded}


def replace_parameters(optimizer: Optimizer, new: Mapping[int, nn.Parameter]) -> None:
    """Replace an optimizer's parameters, and shard its state of the old ones.

    Args:
        optimizer: the optimizer; its groups and its state are changed.
        new: id() of an old parameter → the new parameter.
    """
    for group in optimizer.param_groups:
        group["params"] = [new.get(id(p), p) for p in group["params"]]
    for old in [p for p in optimizer.state if id(p) in new]:
        entries = optimizer.state.pop(old)
        parameter = new[id(old)]
        optimizer.state[parameter] = {
            name: shard_like(value, parameter) for name, value in entries.items()
        }


def load_model(model: nn.Module, state: Mapping[str, Any], comm: Communicator) -> None:
    """Load a state dict, with stored tensors or others, into a model; DTensors get this worker's
    shard.

    Args:
        model: the model, with entries of the same names and shapes.
        state: the state dict.
        comm: communicator over the workers, who call this together.

    Raises:
        CheckpointError: if a stored tensor cannot be read; some of the model's tensors may have
            been changed.
    """
    with _dense_buffers(model):
        current = model.state_dict()
        full = read_model_state(model, state, comm)
        model.load_state_dict(
            {name: shard_like(value, current.get(name)) for name, value in full.items()}
        )


@contextmanager
def _dense_buffers(model: nn.Module) -> Iterator[None]:
    """Replace buffers made by `expand()`, whose elements share memory and cannot be written, by
    copies meanwhile.

    Afterwards the expanded buffer is back with the new values, unless they differ within an
    expanded dimension: then the copy stays.
    """
    expanded = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and expanded_dimensions(buffer)
    ]
    copies = [
        buffer.detach().clone(memory_format=torch.contiguous_format) for _, _, buffer in expanded
    ]
    for (module, name, _), copy in zip(expanded, copies, strict=True):
        module._buffers[name] = copy
    yield
    with torch.no_grad():
        for (module, name, buffer), copy in zip(expanded, copies, strict=True):
            if module._buffers[name] is not copy:
                continue  # a hook of the layer has replaced it
            first_of_each = buffer.detach()
            values = copy
            for dimension in expanded_dimensions(buffer):
                first_of_each = first_of_each.narrow(dimension, 0, 1)
                values = values.narrow(dimension, 0, 1)
            first_of_each.copy_(values)
            if torch.equal(buffer, copy):
                module._buffers[name] = buffer


def load_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load a state dict into an optimizer, whose state keeps the dtypes that it has in the state
    dict.

    `torch.optim.Optimizer.load_state_dict` converts the state of a parameter to the parameter's
    dtype. Optimizers that keep a float32 copy of bfloat16 parameters, counters or masks would go on
    with other values.

    Args:
        optimizer: the optimizer, over the same parameters.
        state: a state dict with tensors in memory, sharded as the parameters are.
    """
    optimizer.load_state_dict(dict(state))
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        loaded = optimizer.state.get(parameter)
        saved = state["state"].get(number)
        if isinstance(loaded, dict) and isinstance(saved, Mapping):
            for name in loaded.keys() & saved.keys():
                if name != "step":  # torch has a rule of its own for it
                    loaded[name] = _with_dtype_of(saved[name], loaded[name], parameter.dtype)


def _with_dtype_of(saved: Any, loaded: Any, converted_to: torch.dtype) -> Any:
    """Return a loaded value, or the saved one on its device if the loaded one was converted to
    `converted_to`.
    """
    if isinstance(saved, torch.Tensor) and isinstance(loaded, torch.Tensor):
        was_converted = loaded.dtype == converted_to != saved.dtype and loaded.shape == saved.shape
        return saved.detach().to(loaded.device) if was_converted else loaded
    if isinstance(saved, Mapping) and isinstance(loaded, dict) and saved.keys() == loaded.keys():
        return {
            name: _with_dtype_of(saved[name], value, converted_to) for name, value in loaded.items()
        }
    if (
        isinstance(saved, (list, tuple))
        and type(saved) is type(loaded)
        and len(saved) == len(loaded)
    ):
        pairs = zip(saved, loaded, strict=True)
        return type(loaded)(_with_dtype_of(one, other, converted_to) for one, other in pairs)
    return loaded


def read_model_state(
    model: nn.Module, state: Mapping[str, Any], comm: Communicator
) -> dict[str, Any]:
    """Read the stored tensors of a state dict into the model's tensors, and return the state dict
    with those.

    No tensor is in memory twice. The model then loads the returned state dict as any other, so that
    the loading hooks of its layers run; loading a tensor into itself changes nothing.

    Args:
        model: the model, with entries of the same names and shapes.
        state: a state dict; without stored tensors it is returned unchanged.
        comm: communicator over the workers, who call this together.

    Raises:
        CheckpointError: if a stored tensor cannot be read; some of the model's tensors may have
            been changed.
    """
    live: dict[str, Any] = model.state_dict()
    targets = {
        name: (live[name], stored)
        for name, stored in state.items()
        if isinstance(stored, StoredTensor)
    }
    _read_stored(targets, comm)
    return {name: live[name] if name in targets else value for name, value in state.items()}


def read_optimizer_state(
    optimizer: Optimizer, state: Mapping[str, Any], comm: Communicator
) -> dict[str, Any]:
    """Read the stored tensors of a state dict into the optimizer's tensors, or new ones, and return
    it with those.

    Args:
        optimizer: the optimizer, over the same parameters.
        state: a state dict; without stored tensors it is returned unchanged.
        comm: communicator over the workers, who call this together.

    Raises:
        CheckpointError: if a stored tensor cannot be read; some of the optimizer's tensors may have
            been changed.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    targets: dict[str, tuple[torch.Tensor, StoredTensor]] = {}

    def target(number: int, name: str, value: Any) -> Any:
        if not isinstance(value, StoredTensor):
            return read_tensors(value)  # which may be within lists or dicts
        parameter = parameters[number]
        tensor = _target_for(parameter, optimizer.state.get(parameter, {}).get(name), value)
        targets[f"{number}.{name}"] = tensor, value
        return tensor

    read = {
        number: {name: target(number, name, value) for name, value in entries.items()}
        if type(number) is int and isinstance(entries, Mapping)
        else read_tensors(entries)  # state that belongs to no parameter
        for number, entries in state["state"].items()
    }
    _read_stored(targets, comm)
    return {**state, "state": read}


def _read_stored(
    targets: Mapping[str, tuple[torch.Tensor, StoredTensor]], comm: Communicator
) -> None:
    if any(isinstance(target, DTensor) for target, _ in targets.values()):
        from ..checkpoint.distributed_checkpoint import load_tensors

        load_tensors(targets, comm)
        return
    with torch.no_grad():
        for target, stored in targets.values():
            stored.read_into(target)


def _target_for(parameter: nn.Parameter, current: Any, stored: StoredTensor) -> torch.Tensor:
    """Return the tensor to read a parameter's optimizer state into: `current` if it fits, else a
    new one.
    """
    if (
        isinstance(current, torch.Tensor)
        and tuple(current.shape) == stored.shape
        and current.dtype == stored.dtype
    ):
        return current
    if stored.shape == tuple(parameter.shape):
        return torch.empty_like(parameter, dtype=stored.dtype, requires_grad=False)
    new = torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
    if not isinstance(parameter, DTensor) or not stored.shape:
        return new
    mesh = parameter.device_mesh
    return DTensor.from_local(new.to(parameter.device), mesh, [Replicate()] * mesh.ndim)
