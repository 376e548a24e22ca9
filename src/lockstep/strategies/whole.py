"""Parameters and optimizer state between the whole tensors of a checkpoint and the parts that workers hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.optim import Optimizer

from ..communicator import Communicator
from ..packing import StoredTensor

__all__ = ["as_parts", "filled_model", "filled_optimizer", "optimizer_parts", "replace_parameters", "whole"]


def whole(value: Any, wanted: bool = True) -> Any:
    """`value`, a tree of lists and dicts, with every tensor that is spread over workers whole on the CPU.

    Called by all workers together. One tensor after the other is gathered, so that a device needs no place for all.

    Args:
        value: the tree.
        wanted: whether this worker keeps them; else it has None in their places.
    """
    if isinstance(value, DTensor):
        gathered = value.full_tensor().detach()
        return gathered.cpu() if wanted else None
    if isinstance(value, Mapping):
        return {key: whole(item, wanted) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(whole(item, wanted) for item in value)
    return value


def as_parts(value: Any, like: Any) -> Any:
    """This worker's part of the whole tensor `value`, spread as `like` is; anything else is returned as it is.

    Nothing is sent: every worker has the whole. A tensor of another shape than `like` is kept whole by every worker,
    and one that is spread already is kept as it is.
    """
    if not isinstance(like, DTensor) or not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    if isinstance(value, DTensor):
        return value
    placements = like.placements if value.shape == like.shape else [Replicate()] * like.device_mesh.ndim
    there = value.detach().to(like.device)
    # A part is a view; without the copy it would keep the whole tensor in memory.
    part = distribute_tensor(there, like.device_mesh, placements, src_data_rank=None)
    return DTensor.from_local(
        part.to_local().clone(), like.device_mesh, placements, shape=part.shape, stride=part.stride()
    )


def optimizer_parts(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state dict of whole tensors, as one of parts, each spread as its parameter is."""
    numbered = enumerate(p for group in optimizer.param_groups for p in group["params"])
    parameters = dict(numbered)
    parts = {
        number: {name: as_parts(value, parameters.get(number)) for name, value in entries.items()}
        for number, entries in state["state"].items()
    }
    return {**state, "state": parts}


def replace_parameters(optimizer: Optimizer, new: Mapping[int, nn.Parameter]) -> None:
    """Let an optimizer go on with other parameters, and with its state of the old ones in parts.

    Args:
        optimizer: its groups and its state are changed.
        new: id() of an old parameter → the one in its place.
    """
    for group in optimizer.param_groups:
        group["params"] = [new.get(id(p), p) for p in group["params"]]
    for old in [p for p in optimizer.state if id(p) in new]:
        entries, parameter = optimizer.state.pop(old), new[id(old)]
        optimizer.state[parameter] = {name: as_parts(value, parameter) for name, value in entries.items()}


def filled_model(model: nn.Module, state: Mapping[str, Any], comm: Communicator) -> dict[str, Any]:
    """A state dict with the model's own tensors in the places of stored ones, which have been read into them.

    Nothing is in memory twice. The model loads the result as any state dict, so that layers with an own way of loading
    see it; on tensors that it holds itself this changes nothing.

    Args:
        model: has entries of the same names and shapes.
        state: a state dict; where nothing in it is a stored tensor, it comes back as it is.
        comm: the workers, who call this together.

    Raises:
        CheckpointError: a stored tensor cannot be read; some of the model's may have been changed.
    """
    live: dict[str, Any] = model.state_dict()
    targets = {name: (live[name], stored) for name, stored in state.items() if isinstance(stored, StoredTensor)}
    _fill(targets, comm)
    return {name: live[name] if name in targets else value for name, value in state.items()}


def filled_optimizer(optimizer: Optimizer, state: Mapping[str, Any], comm: Communicator) -> dict[str, Any]:
    """A state dict with tensors in the places of stored ones: the optimizer's own where they fit, else new ones.

    Args:
        optimizer: over the same parameters.
        state: a state dict; where nothing in it is a stored tensor, it comes back as it is.
        comm: the workers, who call this together.

    Raises:
        CheckpointError: a stored tensor cannot be read; some of the optimizer's may have been changed.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    targets: dict[str, tuple[torch.Tensor, StoredTensor]] = {}

    def target(number: int, name: str, value: Any) -> Any:
        if not isinstance(value, StoredTensor):
            return value
        made = _place(parameters[number], optimizer.state.get(parameters[number], {}).get(name), value)
        targets[f"{number}.{name}"] = made, value
        return made

    entries = {
        number: {name: target(number, name, value) for name, value in held.items()}
        for number, held in state["state"].items()
    }
    _fill(targets, comm)
    return {**state, "state": entries}


def _fill(targets: Mapping[str, tuple[torch.Tensor, StoredTensor]], comm: Communicator) -> None:
    if any(isinstance(target, DTensor) for target, _ in targets.values()):
        from ..distributed_checkpoint import fill

        fill(targets, comm)
        return
    with torch.no_grad():
        for target, stored in targets.values():
            stored.read_into(target)


def _place(parameter: nn.Parameter, held: Any, stored: StoredTensor) -> torch.Tensor:
    """A tensor for an optimizer's state of a parameter: what is `held`, if it fits, else a new one."""
    if isinstance(held, torch.Tensor) and tuple(held.shape) == stored.shape and held.dtype == stored.dtype:
        return held
    if stored.shape == tuple(parameter.shape):
        return torch.empty_like(parameter, dtype=stored.dtype, requires_grad=False)
    new = torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
    if not isinstance(parameter, DTensor) or not stored.shape:
        return new
    mesh = parameter.device_mesh
    return DTensor.from_local(new.to(parameter.device), mesh, [Replicate()] * mesh.ndim)
