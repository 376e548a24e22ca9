"""Parameters and optimizer state between the whole tensors of a checkpoint and the parts that workers hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.optim import Optimizer

__all__ = ["as_parts", "optimizer_parts", "replace_parameters", "whole"]


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

    Nothing is sent: every worker has the whole. A tensor of another shape than `like` is kept whole by every worker.
    """
    if not isinstance(like, DTensor) or not isinstance(value, torch.Tensor) or value.dim() == 0:
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
