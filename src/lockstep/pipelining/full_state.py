"""Conversion between the states of all stages and the full state dicts of the model and its
optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ..communicator import Communicator
from ..errors import CheckpointError, ConfigError
from ..parallel.optimizer_parts import check_whole


def gather_stages(stage_entries: Mapping[str, Any], comm: Communicator) -> dict[str, Any]:
    """Return the entries of all stages, in order, with tensors on the CPU; the same on every
    worker.
    """
    gathered: dict[str, Any] = {}
    for root in range(comm.size):
        gathered |= broadcast_tree(stage_entries, comm, root, torch.device("cpu"))
    return gathered


def broadcast_tree(value: Any, comm: Communicator, root: int, device: torch.device) -> Any:
    """Broadcast the `value` of rank `root`, a tree of mappings and tensors; returns it with its
    tensors on `device`.
    """
    template = comm.broadcast_object(_template(value) if comm.rank == root else None, root)
    return _broadcast_values(value, template, comm, root, device)


class _TensorTemplate:
    """The shape and dtype of a tensor, sent before its values."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape = tensor.shape
        self.dtype = tensor.dtype


def _template(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _TensorTemplate(value)
    if isinstance(value, Mapping):
        return {key: _template(item) for key, item in value.items()}
    return value


def _broadcast_values(
    value: Any, template: Any, comm: Communicator, root: int, device: torch.device
) -> Any:
    """Broadcast the values of a tree, one tensor at a time, so that a device need not hold all of
    them.
    """
    if isinstance(template, _TensorTemplate):
        tensor = torch.empty(template.shape, dtype=template.dtype, device=comm.device)
        if comm.rank == root:
            tensor.copy_(value.detach())
        return comm.broadcast(tensor, root).to(device)
    if isinstance(template, Mapping):
        values = value if comm.rank == root else dict.fromkeys(template)
        return {
            name: _broadcast_values(values[name], item, comm, root, device)
            for name, item in template.items()
        }
    return template


def stage_state(
    state: Mapping[str, Any], names: Sequence[str], stage_names: Iterable[str]
) -> dict[str, Any]:
    """Return the entries of one stage in the full state dict of a model with entries `names`.

    Raises:
        CheckpointError: if it is the state dict of another model.
    """
    missing = [name for name in names if name not in state]
    unknown = [name for name in state if name not in names]
    if missing or unknown:
        what = (
            f"without {missing[0]}"
            if missing
            else f"with {unknown[0]}, which the model does not have"
        )
        raise CheckpointError(
            f"expected the state dict of the whole model, with {len(names)} entries; got one {what}"
        )
    return {name: state[name] for name in stage_names}


def _single_group(optimizer: Optimizer) -> dict[str, Any]:
    if len(optimizer.param_groups) != 1:
        raise ConfigError(
            "optimizer",
            "one group of parameters, in a pipeline",
            found=f"{len(optimizer.param_groups)} groups",
        )
    return optimizer.param_groups[0]


def _stage_names(optimizer: Optimizer, parameters: Mapping[str, torch.nn.Parameter]) -> list[str]:
    """Return the names of an optimizer's parameters, in its order.

    Raises:
        ConfigError: if it has other parameters, several groups, or a part of its state only.
    """
    check_whole(optimizer)
    names = {id(p): name for name, p in parameters.items()}
    trained = _single_group(optimizer)["params"]
    known = [names[id(p)] for p in trained if id(p) in names]
    if len(known) < len(trained):
        got = f"{len(trained) - len(known)} that are not"
        raise ConfigError(
            "optimizer", "parameters of this stage alone, pipe.parameters()", found=got
        )
    return known


def _all_names(stage_names: Sequence[str], order: Sequence[str], comm: Communicator) -> list[str]:
    """Return the names of the parameters in the optimizers of all stages, in `order`."""
    return sorted(
        (name for names in comm.allgather_object(stage_names) for name in names),
        key=list(order).index,
    )


def merge_optimizers(
    optimizer: Optimizer,
    parameters: Mapping[str, torch.nn.Parameter],
    order: Sequence[str],
    comm: Communicator,
) -> dict[str, Any]:
    """Merge the optimizers of all stages into the state dict of one over the whole model, with
    names in `order`.
    """
    local = optimizer.state_dict()
    stage_names = _stage_names(optimizer, parameters)
    names = _all_names(stage_names, order, comm)
    by_name = gather_stages(
        {stage_names[number]: entries for number, entries in local["state"].items()}, comm
    )
    options = {
        key: value
        for key, value in comm.broadcast_object(local["param_groups"][0]).items()
        if key != "params"
    }
    state = {number: by_name[name] for number, name in enumerate(names) if name in by_name}
    return {"state": state, "param_groups": [{**options, "params": list(range(len(names)))}]}


def stage_optimizer_state(
    optimizer: Optimizer,
    parameters: Mapping[str, torch.nn.Parameter],
    order: Sequence[str],
    comm: Communicator,
    state: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the state dict of one stage's optimizer, taken from that of one over the whole model.

    Raises:
        CheckpointError: if the state dict has another number of parameters.
    """
    stage_names = _stage_names(optimizer, parameters)
    names = _all_names(stage_names, order, comm)
    groups = state["param_groups"]
    saved = state["state"]
    if len(groups) != 1 or len(groups[0]["params"]) != len(names):
        got = f"{len(groups)} with {[len(group['params']) for group in groups]}"
        raise CheckpointError(
            f"expected the state of an optimizer with one group of {len(names)} parameters, got "
            f"{got}"
        )
    numbers = dict(zip(names, groups[0]["params"], strict=True))
    entries = {
        i: saved[numbers[name]] for i, name in enumerate(stage_names) if numbers[name] in saved
    }
    return {
        "state": entries,
        "param_groups": [{**groups[0], "params": list(range(len(stage_names)))}],
    }
