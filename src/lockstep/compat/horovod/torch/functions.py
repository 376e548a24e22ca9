"""`horovod.torch.functions`: broadcasts parameters, optimizer states and objects; gathers
objects.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from lockstep.errors import ConfigError
from lockstep.parallel.full_state import load_optimizer
from lockstep.parallel.nested import map_tensors, tensors_of
from lockstep.parallel.optimizer_parts import check_whole
from lockstep.pickling import pickled

from ..common.process_sets import ProcessSet, checked_process_set, global_process_set
from .handles import synchronize
from .mpi_ops import allgather, broadcast_, broadcast_async_

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Broadcast the tensors of rank `root_rank` into those of all ranks.

    Args:
        params: a dict, such as ``model.state_dict()``, or an iterable of tensors or of (name,
            tensor) pairs, such as ``model.named_parameters()``.
        root_rank: a global rank.
        process_set: the ranks.

    Raises:
        ConfigError: a ValueError, for other values.
    """
    if isinstance(params, Mapping):
        items: list[Any] = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, (torch.Tensor, str)):
        items = [item if isinstance(item, tuple) else (None, item) for item in params]
    else:
        raise ConfigError(
            "params", "a dict, or tensors, or (name, tensor) pairs", found=type(params).__name__
        )
    for name, tensor in items:
        if tensor is not None and not isinstance(tensor, torch.Tensor):
            raise ConfigError("params", "tensors", found=f"{type(tensor).__name__} for {name!r}")
    pending = [
        broadcast_async_(tensor, root_rank, name, process_set)
        for name, tensor in items
        if tensor is not None
    ]
    for handle in pending:
        synchronize(handle)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Broadcast the state and the options of the optimizer of rank `root_rank`.

    If the state is empty, parameters without a gradient get one of zeros, on which some programs
    rely.

    Args:
        optimizer: an optimizer of torch, or a `DistributedOptimizer`.
        root_rank: a global rank.
        model: the model, to find the parameters of embeddings with sparse gradients.
        process_set: the ranks.

    Raises:
        ConfigError: a ValueError, for torch.optim.LBFGS, whose state is that of a line search on
            one rank, and for an optimizer that has a part of its state only, after a training with
            ``shard_optimizer=True``.
    """
    check_whole(optimizer)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            "optimizer", "one with a state for each parameter", found="torch.optim.LBFGS"
        )
    state = optimizer.state_dict()
    if not state["state"]:
        _set_zero_gradients(optimizer, model)
    if process_set.size() == 1:
        return
    is_root = process_set.rank() == process_set.root_of(root_rank)
    without_values = map_tensors(lambda tensor: tensor.detach().to("meta"), state)
    devices = [tensor.device.type for tensor in tensors_of(state)]
    without_values, devices = broadcast_object(
        (without_values, devices), root_rank, process_set=process_set
    )
    if not is_root:
        in_order = iter(devices)
        state = map_tensors(
            lambda tensor: torch.empty_like(tensor, device=next(in_order)), without_values
        )
    broadcast_parameters(tensors_of(state), root_rank, process_set)
    if not is_root:
        load_optimizer(optimizer, state)


def _set_zero_gradients(optimizer: torch.optim.Optimizer, model: torch.nn.Module | None) -> None:
    modules = () if model is None else model.modules()
    sparse = {
        m.weight
        for m in modules
        if isinstance(m, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and m.sparse
    }
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        if p.requires_grad and p.grad is None:
            p.grad = torch.zeros_like(p)
            if p in sparse or isinstance(optimizer, torch.optim.SparseAdam):
                p.grad = p.grad.to_sparse()


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the object of rank `root_rank` on every rank.

    The object is pickled by cloudpickle. Unpickling can run any code, so that the ranks must trust
    each other.

    Args:
        obj: any value; ignored on the other ranks.
        root_rank: a global rank.
        name: the name of the operation, the same on all ranks; None for one from the number of such
            calls.
        process_set: the ranks.
    """
    is_root = checked_process_set(process_set).rank() == process_set.root_of(root_rank)
    data = _pickle(obj) if is_root else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([len(data)])
    broadcast_(size, root_rank, name and f"{name}.sz", process_set)
    data = data if is_root else torch.empty(int(size), dtype=torch.uint8)
    broadcast_(data, root_rank, name and f"{name}.t", process_set)
    return obj if is_root else _unpickle(data)


def broadcast_object_fn(
    root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[Any], Any]:
    """Return a function of an object that calls `broadcast_object` with these arguments."""
    return lambda obj: broadcast_object(obj, root_rank, name, process_set)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the objects of all ranks, in rank order, on every rank; they are pickled as by
    `broadcast_object`.
    """
    data = _pickle(obj)
    sizes = allgather(torch.tensor([len(data)]), name and f"{name}.sz", process_set)
    gathered = allgather(data, name and f"{name}.t", process_set)
    return [_unpickle(part) for part in torch.split(gathered, sizes.tolist())]


def _pickle(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickled(value)), dtype=torch.uint8)


def _unpickle(data: torch.Tensor) -> Any:
    return pickle.loads(data.numpy().tobytes())
