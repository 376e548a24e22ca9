"""Sends parameters, optimizer states and objects of any kind."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import cloudpickle
import torch

from lockstep.errors import ConfigError

from ..common.process_sets import ProcessSet, checked_set, global_process_set
from .handles import synchronize
from .moving import allgather, broadcast_, broadcast_async_

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Copy the tensors of rank `root_rank` into those of all ranks.

    Args:
        params: a dict, such as ``model.state_dict()``; or tensors, or (name, tensor), as
            ``model.named_parameters()`` gives them.
        root_rank: a global rank.
        process_set: the ranks.

    Raises:
        ConfigError: a ValueError, for something else.
    """
    if isinstance(params, Mapping):
        items: list[Any] = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, (torch.Tensor, str)):
        items = [each if isinstance(each, tuple) else (None, each) for each in params]
    else:
        raise ConfigError("params", "a dict, or tensors, or (name, tensor) pairs", found=type(params).__name__)
    for name, tensor in items:
        if tensor is not None and not isinstance(tensor, torch.Tensor):
            raise ConfigError("params", "tensors", found=f"{type(tensor).__name__} for {name!r}")
    begun = [broadcast_async_(tensor, root_rank, name, process_set) for name, tensor in items if tensor is not None]
    for handle in begun:
        synchronize(handle)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Give the optimizers of all ranks the state and the options of that of rank `root_rank`.

    Where there is no state yet, parameters without a gradient get one of zeros, which some programs count on.

    Args:
        optimizer: one of torch's, or a `DistributedOptimizer`.
        root_rank: a global rank.
        model: by which parameters of embeddings with sparse gradients are known.
        process_set: the ranks.

    Raises:
        ConfigError: a ValueError, for torch.optim.LBFGS, whose state is that of a line search on one rank.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError("optimizer", "one with a state for each parameter", found="torch.optim.LBFGS")
    state = optimizer.state_dict()
    if not state["state"]:
        _give_zeros(optimizer, model)
    if process_set.size() == 1:
        return
    tensors: list[torch.Tensor] = []
    shape = broadcast_object(_without_tensors(state, tensors), root_rank, process_set=process_set)
    if process_set.rank() != process_set.root_of(root_rank):
        tensors = []
        state = _with_tensors(shape, tensors)
    broadcast_parameters(tensors, root_rank, process_set)
    if process_set.rank() != process_set.root_of(root_rank):
        optimizer.load_state_dict(state)


def _give_zeros(optimizer: torch.optim.Optimizer, model: torch.nn.Module | None) -> None:
    modules = () if model is None else model.modules()
    sparse = {m.weight for m in modules if isinstance(m, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and m.sparse}
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        if p.requires_grad and p.grad is None:
            p.grad = torch.zeros_like(p)
            if p in sparse or isinstance(optimizer, torch.optim.SparseAdam):
                p.grad = p.grad.to_sparse()


class _Place:
    """Stands for a tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype, self.device = tuple(tensor.shape), tensor.dtype, tensor.device.type

    def room(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


def _without_tensors(value: Any, found: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        found.append(value)
        return _Place(value)
    return _walk(value, lambda each: _without_tensors(each, found))


def _with_tensors(value: Any, made: list[torch.Tensor]) -> Any:
    if isinstance(value, _Place):
        made.append(value.room())
        return made[-1]
    return _walk(value, lambda each: _with_tensors(each, made))


def _walk(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {key: change(each) for key, each in value.items()}
    return type(value)(change(each) for each in value) if type(value) in (list, tuple) else value


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """What rank `root_rank` passed, on every rank.

    It travels pickled (functions and classes too, by cloudpickle), and unpickling can run any code: it is for the ranks
    of one job, which trust each other.

    Args:
        obj: any value; those of the other ranks are ignored.
        root_rank: a global rank.
        name: by which ranks find each other's; by the number of such calls when None.
        process_set: the ranks.
    """
    at_root = checked_set(process_set).rank() == process_set.root_of(root_rank)
    data = _pickled(obj) if at_root else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([len(data)])
    broadcast_(size, root_rank, name and f"{name}.sz", process_set)
    data = data if at_root else torch.empty(int(size), dtype=torch.uint8)
    broadcast_(data, root_rank, name and f"{name}.t", process_set)
    return obj if at_root else _unpickled(data)


def broadcast_object_fn(
    root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[Any], Any]:
    """`broadcast_object` with all but the value given."""
    return lambda obj: broadcast_object(obj, root_rank, name, process_set)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """What every rank passed, in rank order, on every rank; it travels as for `broadcast_object`."""
    data = _pickled(obj)
    sizes = allgather(torch.tensor([len(data)]), name and f"{name}.sz", process_set)
    gathered = allgather(data, name and f"{name}.t", process_set)
    return [_unpickled(part) for part in torch.split(gathered, sizes.tolist())]


def _pickled(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(cloudpickle.dumps(value)), dtype=torch.uint8)


def _unpickled(data: torch.Tensor) -> Any:
    return pickle.loads(data.numpy().tobytes())
