"""The state of all stages as that of the whole model on one device, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ..communicator import Communicator
from ..errors import CheckpointError, ConfigError

__all__ = ["from_one", "gathered", "merge_optimizers", "own_part", "part_of_optimizer"]


def gathered(own: Mapping[str, Any], comm: Communicator) -> dict[str, Any]:
    """The entries of all stages, in their order, with tensors on the CPU; the same on every worker."""
    whole: dict[str, Any] = {}
    for root in range(comm.size):
        whole |= from_one(own, comm, root, torch.device("cpu"))
    return whole


def from_one(value: Any, comm: Communicator, root: int, device: torch.device) -> Any:
    """`value` of `root`, a tree of mappings and tensors, on every worker, its tensors on `device`."""
    places = comm.broadcast_object(_places(value) if comm.rank == root else None, root)
    return _sent(value, places, comm, root, device)


class _Place:
    """A tensor, before it is sent."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype = tensor.shape, tensor.dtype


def _places(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _Place(value)
    if isinstance(value, Mapping):
        return {key: _places(item) for key, item in value.items()}
    return value


def _sent(own: Any, place: Any, comm: Communicator, root: int, device: torch.device) -> Any:
    """The value that `root` has; one tensor after the other, so that a device needs no place for all."""
    mine = comm.rank == root
    if isinstance(place, _Place):
        room = torch.empty(place.shape, dtype=place.dtype, device=comm.device)
        if mine:
            room.copy_(own.detach())
        return comm.broadcast(room, root).to(device)
    if isinstance(place, Mapping):
        return {name: _sent(own[name] if mine else None, it, comm, root, device) for name, it in place.items()}
    return place


def own_part(state: Mapping[str, Any], every: Sequence[str], own: Iterable[str]) -> dict[str, Any]:
    """What one stage takes of a whole state dict.

    Raises:
        CheckpointError: when it is not one of this model.
    """
    missing = [name for name in every if name not in state]
    foreign = [name for name in state if name not in every]
    if missing or foreign:
        what = f"without {missing[0]}" if missing else f"with {foreign[0]}, which the model has not"
        raise CheckpointError(f"expected the state dict of the whole model, with {len(every)} entries; got one {what}")
    return {name: state[name] for name in own}


def _group(optimizer: Optimizer) -> dict[str, Any]:
    if len(optimizer.param_groups) != 1:
        raise ConfigError(
            "optimizer", "one group of parameters, in a pipeline", found=f"{len(optimizer.param_groups)} groups"
        )
    return optimizer.param_groups[0]


def _names(optimizer: Optimizer, parameters: Mapping[str, torch.nn.Parameter]) -> list[str]:
    """The names of an optimizer's parameters, in its order."""
    names = {id(p): name for name, p in parameters.items()}
    found = [names.get(id(p)) for p in _group(optimizer)["params"]]
    known = [name for name in found if name is not None]
    if len(known) < len(found):
        got = f"{len(found) - len(known)} that are not"
        raise ConfigError("optimizer", "parameters of this stage alone, pipe.parameters()", found=got)
    return known


def _every(own: Sequence[str], order: Sequence[str], comm: Communicator) -> list[str]:
    """The names that the optimizers of all stages have."""
    return sorted((name for part in comm.allgather_object(own) for name in part), key=list(order).index)


def merge_optimizers(
    optimizer: Optimizer, parameters: Mapping[str, torch.nn.Parameter], order: Sequence[str], comm: Communicator
) -> dict[str, Any]:
    """The state dict of an optimizer over all parameters of the whole model, whose names are in `order`."""
    own, names = optimizer.state_dict(), _names(optimizer, parameters)
    every = _every(names, order, comm)
    by_name = gathered({names[number]: entries for number, entries in own["state"].items()}, comm)
    options = {key: value for key, value in comm.broadcast_object(own["param_groups"][0]).items() if key != "params"}
    state = {number: by_name[name] for number, name in enumerate(every) if name in by_name}
    return {"state": state, "param_groups": [{**options, "params": list(range(len(every)))}]}


def part_of_optimizer(
    optimizer: Optimizer,
    parameters: Mapping[str, torch.nn.Parameter],
    order: Sequence[str],
    comm: Communicator,
    state: Mapping[str, Any],
) -> dict[str, Any]:
    """What one stage's optimizer takes of the state dict of one over the whole model.

    Raises:
        CheckpointError: when that has another number of parameters.
    """
    own = _names(optimizer, parameters)
    every = _every(own, order, comm)
    groups = state["param_groups"]
    if len(groups) != 1 or len(groups[0]["params"]) != len(every):
        got = f"{len(groups)} with {[len(group['params']) for group in groups]}"
        raise CheckpointError(
            f"expected the state of an optimizer with one group of {len(every)} parameters, got {got}"
        )
    numbers = dict(zip(every, groups[0]["params"], strict=True))
    entries = {i: state["state"][numbers[name]] for i, name in enumerate(own) if numbers[name] in state["state"]}
    return {"state": entries, "param_groups": [{**groups[0], "params": list(range(len(own)))}]}
