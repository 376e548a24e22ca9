"""Copies of models on other devices, and replicas that are kept up to date with their model."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ...errors import ConfigError
from ..buffers import is_running_statistic
from ..nested import map_tensors
from .scatter import Device, as_devices


def replicate(module_or_params: Any, devices: Iterable[Device]) -> list[Any]:
    """Return a copy for each of `devices`, independent of the original and of each other, without
    gradients.

    Args:
        module_or_params: a module, a tensor, or a tree of them (see `scatter`), such as a list of
            parameters. A copied tensor is a leaf and requires a gradient if the original does; a
            copied parameter is a parameter.
        devices: one device for each copy; a device may be listed several times.

    Raises:
        ConfigError: for devices that cannot be used, or a module with uninitialised parameters.
    """
    if isinstance(module_or_params, nn.Module):
        return [copy_module(module_or_params, device) for device in as_devices(devices)]
    return [
        map_tensors(partial(_copy_tensor, device=device), module_or_params)
        for device in as_devices(devices)
    ]


def _copy_tensor(tensor: torch.Tensor, device: torch.device, shared: bool = False) -> torch.Tensor:
    values = tensor.detach()
    if not (shared and tensor.device == device):
        values = values.to(device, copy=True)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(values, requires_grad=tensor.requires_grad)
    return values.requires_grad_(tensor.requires_grad)


def copy_module(module: nn.Module, device: torch.device, shared: bool = False) -> nn.Module:
    """Return a copy of `module` on `device`, which shares the hooks of the original, including
    later ones.

    Args:
        module: the original.
        device: the device of the copy.
        shared: whether parameters on the same device share memory with the original: separate
            leaves with separate gradients, but an update of one is an update of the other.

    Raises:
        ConfigError: for a module with uninitialised parameters, or one that cannot be copied.
    """
    memo: dict[int, Any] = {}
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            hint = "Call it once on a batch before it is replicated."
            raise ConfigError(
                "module", "parameters with shapes", found=f"{name} without one", hint=hint
            )
        memo[id(parameter)] = _copy_tensor(parameter, device, shared)
    for buffer in module.buffers():
        memo[id(buffer)] = buffer.detach().to(device, copy=True)
    for name, layer in module.named_modules():
        if isinstance(layer, torch.jit.ScriptModule):
            got = f"a {type(layer).__name__} at {name or 'its top'}"
            raise ConfigError(
                "module",
                "modules in Python",
                found=got,
                hint="Pass the module that it was made from.",
            )
        for attribute, value in vars(layer).items():
            if "hooks" in attribute:
                memo[id(value)] = value
            elif isinstance(value, torch.Tensor) and not value.is_leaf:
                # set by an earlier forward pass
                memo[id(value)] = value.detach().to(device, copy=True)
    try:
        return copy.deepcopy(module, memo)
    except (TypeError, RuntimeError) as error:
        hint = (
            "Keep objects that cannot be copied outside of it, and tensors with a graph in lists."
        )
        raise ConfigError(
            "module",
            "a module that can be copied",
            found=f"{type(module).__name__} ({error})",
            hint=hint,
        ) from error


# Attributes of these types are settings, such as the probability of dropout, and may change between
# steps.
_PLAIN_TYPES = (bool, int, float, str, type(None))
# Attributes that torch keeps in every layer; replicas share the model's hooks.
_TORCH_ATTRIBUTES = frozenset(vars(nn.Module()))


class ReplicaCopies:
    """The replicas of one model, created when first needed and reused: every pass copies the
    model's values into them.

    On the model's own device they share the memory of its parameters, and nothing is copied.
    Gradients and buffers, which forward passes may change, are separate.

    Args:
        module: the model; it may be moved, frozen, put into another mode or get other layers at any
            time.
        devices: the devices of the replicas.
    """

    def __init__(self, module: nn.Module, devices: Sequence[torch.device]) -> None:
        self.module = module
        self.devices = list(devices)
        self._objects: list[
            object
        ] = []  # layers, parameters and other attributes of the model when it was copied
        self._storage: list[
            object
        ] = []  # device, dtype and address of its parameters, and versions of other tensors
        self._copies: list[nn.Module] = []
        self._versions: list[int] = []
        self._settings: list[dict[str, object]] = []

    def update(self, count: int) -> list[nn.Module]:
        """Bring the first `count` replicas up to date with the model, and return them."""
        # Outside of inference mode, because a later pass could not use inference tensors for
        # training.
        with torch.inference_mode(False), torch.no_grad():
            if self._structure_changed():
                self._copies = [
                    copy_module(self.module, device, shared=True) for device in self.devices
                ]
                self._versions = []
                self._settings = [_settings(layer) for layer in self.module.modules()]
            self._copy_parameters()
            self._copy_settings()
            for replica, device in zip(self._copies[:count], self.devices, strict=False):
                self._copy_buffers(replica, device)
        return self._copies[:count]

    def _structure_changed(self) -> bool:
        """Return whether the model has other layers, parameters, attributes or memory than at the
        last call.
        """
        layers = list(self.module.modules())
        attributes = [value for layer in layers for value in _object_attributes(layer)]
        objects = [
            part for layer in layers for part in (layer, *layer._parameters.values())
        ] + attributes
        # the use of an uninitialised parameter is an error
        storage: list[object] = [
            (p.device, p.dtype, 0 if is_lazy(p) else p.data_ptr()) for p in self.module.parameters()
        ]
        storage += [
            value._version
            for value in attributes
            if type(value) is torch.Tensor and not value.is_inference()
        ]
        same = len(objects) == len(self._objects) and all(map(operator.is_, objects, self._objects))
        same = same and storage == self._storage
        self._objects = objects
        self._storage = storage
        return not same

    def parameters(self, replica: int) -> list[nn.Parameter]:
        """Return the parameters of one replica, in the order of the model's."""
        return list(self._copies[replica].parameters())

    def _copy_parameters(self) -> None:
        """Copy the model's parameters to the other devices."""
        parameters = list(self.module.parameters())
        versions = [parameter._version for parameter in parameters]
        for replica in self._copies:
            for number, (source, target) in enumerate(
                zip(parameters, replica.parameters(), strict=True)
            ):
                target.requires_grad_(source.requires_grad)
                if source.device == target.device and source.data_ptr() == target.data_ptr():
                    continue
                # The version of an unchanged parameter must not change, because an earlier pass may
                # still need it for its backward pass. It is copied all the same: changes through
                # `.data` have no version.
                unchanged = bool(self._versions) and self._versions[number] == versions[number]
                (target.data if unchanged else target).copy_(source, non_blocking=True)
        self._versions = versions

    def _copy_settings(self) -> None:
        """Set the plain attributes of the model that have changed since the last pass, such as its
        mode.
        """
        for number, layer in enumerate(self.module.modules()):
            before = self._settings[number]
            now = _settings(layer)
            if now != before:
                changed = {
                    name: value
                    for name, value in now.items()
                    if name not in before or before[name] != value
                }
                for replica in self._copies:
                    vars(list(replica.modules())[number]).update(changed)
                self._settings[number] = now

    def _copy_buffers(self, replica: nn.Module, device: torch.device) -> None:
        """Copy the model's buffers into new tensors of the replica: an earlier pass may still need
        the old ones.
        """
        buffers = [
            b for layer in self.module.modules() for b in layer._buffers.values() if b is not None
        ]
        copies = iter(copy_tensors(buffers, device))
        for source, target in zip(self.module.modules(), replica.modules(), strict=True):
            for name, buffer in source._buffers.items():
                target._buffers[name] = None if buffer is None else next(copies)

    def merge_buffers(self, weights: Sequence[float]) -> None:
        """Copy the buffers that a forward pass of the first len(weights) replicas has changed to
        the model.

        Running statistics become their average over the replicas by `weights`, which sum to 1;
        other buffers are those of the first replica.
        """
        copies = [list(replica.modules()) for replica in self._copies[: len(weights)]]
        with torch.inference_mode(False), torch.no_grad():
            keys = []
            values = []
            to_average = []
            for layer, *replicas in zip(self.module.modules(), *copies, strict=True):
                for name in layer._buffers:
                    of_replicas = [replica._buffers[name] for replica in replicas]
                    buffers = [buffer for buffer in of_replicas if buffer is not None]
                    if of_replicas[0] is not None and any(map(_may_be_written, buffers)):
                        keys.append((layer, name))
                        values.append(buffers[0])
                        to_average.append(
                            buffers if is_running_statistic(layer, buffers[0]) else []
                        )
            averaged = [number for number, buffers in enumerate(to_average) if buffers]
            for number, value in zip(
                averaged, _averages([to_average[n] for n in averaged], weights), strict=True
            ):
                values[number] = value
            _set_buffers(keys, values)


def _set_buffers(keys: Sequence[tuple[nn.Module, str]], values: Sequence[torch.Tensor]) -> None:
    """Set the buffers with `keys`, (layer, name), to `values`: in place if the shape is the
    same.
    """
    in_place = []
    for (layer, name), value in zip(keys, values, strict=True):
        buffer = layer._buffers[name]
        if buffer is None or buffer.shape != value.shape:
            layer._buffers[name] = value.to(buffer.device if buffer is not None else value.device)
        else:
            in_place.append((buffer, value))
    for numbers in _group_by_kind(in_place):
        targets, sources = zip(*(in_place[number] for number in numbers), strict=True)
        torch._foreach_copy_(targets, move_tensors(sources, targets[0].device))


def copy_tensors(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Return copies of `tensors` on `device`, with version 0.

    It uses few kernels: tensors of one dtype are copied together, and sent to another device as one
    tensor.
    """
    copies = [torch.empty_like(tensor, device=device, requires_grad=False) for tensor in tensors]
    for numbers in _group_by_kind(list(zip(copies, tensors, strict=True))):
        sources = move_tensors([tensors[number] for number in numbers], device)
        torch._foreach_copy_([copies[number] for number in numbers], sources)
    return [copy.data for copy in copies]


def move_tensors(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Move `tensors`, of one dtype and on one device, to `device`, as one tensor where possible."""
    if tensors[0].device == device or any(tensor.layout is not torch.strided for tensor in tensors):
        return [tensor.to(device) for tensor in tensors]
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).to(device)
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]


def _group_by_kind(rows: Sequence[Sequence[torch.Tensor]]) -> list[list[int]]:
    """Group the indices of rows whose tensors have the same dtypes and devices, for operations with
    foreach kernels.
    """
    groups: dict[object, list[int]] = {}
    for number, row in enumerate(rows):
        groups.setdefault(tuple((tensor.dtype, tensor.device) for tensor in row), []).append(number)
    return list(groups.values())


def _may_be_written(buffer: torch.Tensor) -> bool:
    """Return whether a forward pass may have changed a buffer whose version was 0 before it.

    Torch's batch norm changes its running statistics without a new version.
    """
    return buffer._version > 0 or (buffer.dim() == 1 and buffer.is_floating_point())


def _averages(
    rows: Sequence[Sequence[torch.Tensor]], weights: Sequence[float]
) -> list[torch.Tensor]:
    """Return the average of each row by weights that sum to 1; it is exact if the tensors of a row
    are equal.
    """
    averages: dict[int, torch.Tensor] = {}
    for numbers in _group_by_kind(rows):
        firsts, *others = zip(*(rows[number] for number in numbers), strict=True)
        device = firsts[0].device
        sums = copy_tensors(firsts, device)
        for values, weight in zip(others, weights[1:], strict=True):
            torch._foreach_add_(
                sums, torch._foreach_sub(move_tensors(values, device), firsts), alpha=weight
            )
        averages.update(zip(numbers, sums, strict=True))
    return [averages[number] for number in range(len(rows))]


def _object_attributes(layer: nn.Module) -> Iterator[object]:
    """Yield a layer's attributes that are neither plain values nor torch's own, such as a mask, and
    their contents.

    The contents of lists, mappings and objects with attributes may change in place.
    """
    for name, value in vars(layer).items():
        if name not in _TORCH_ATTRIBUTES and type(value) not in _PLAIN_TYPES:
            yield value
            yield from _contents(value)


def _contents(value: object) -> Iterable[object]:
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (list, set)):
        return value
    return (
        ()
        if isinstance(value, (nn.Module, torch.Tensor, type))
        else getattr(value, "__dict__", {}).values()
    )


def _settings(layer: nn.Module) -> dict[str, object]:
    """Return the attributes of a layer that are plain values."""
    return {name: value for name, value in vars(layer).items() if type(value) in _PLAIN_TYPES}
