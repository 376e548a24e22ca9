"""Copies of models and of lists of parameters on other devices."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..data.nested import map_tensors
from ..errors import ConfigError
from .devices import Device, as_devices

__all__ = ["copy_module", "replicate"]


def replicate(module_or_params: Any, devices: Iterable[Device]) -> list[Any]:
    """A copy for each of `devices`, independent of the original and of each other, without gradients.

    Args:
        module_or_params: a module, a tensor, or a tree of them (see `scatter`), such as a list of parameters. A copied
            tensor is a leaf and wants a gradient if the original does; parameters are parameters again.
        devices: one for each copy; the same may come several times.

    Raises:
        ConfigError: for devices that cannot be used, or a module whose shapes are not known yet.
    """
    return [_copy(module_or_params, device) for device in as_devices(devices)]


def _copy(source: Any, device: torch.device) -> Any:
    if isinstance(source, nn.Module):
        return copy_module(source, device)
    return map_tensors(lambda tensor: _copy_tensor(tensor, device), source)


def _copy_tensor(tensor: torch.Tensor, device: torch.device, shared: bool = False) -> torch.Tensor:
    values = tensor.detach()
    if not (shared and tensor.device == device):
        values = values.to(device, copy=True)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(values, requires_grad=tensor.requires_grad)
    return values.requires_grad_(tensor.requires_grad)


def copy_module(module: nn.Module, device: torch.device, shared: bool = False) -> nn.Module:
    """A copy of `module` on `device`, with hooks of the original, also of those that it gets later.

    Args:
        module: what is copied.
        device: where to.
        shared: let the parameters of the copy be those of the original where both are on one device: other leaves with
            gradients of their own, but in the same memory, so that an update of one is an update of the other.

    Raises:
        ConfigError: for a module whose shapes are not known yet, or that cannot be copied.
    """
    memo: dict[int, Any] = {}
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            hint = "Call it once on a batch before it is replicated."
            raise ConfigError("module", "parameters with shapes", found=f"{name} without one", hint=hint)
        memo[id(parameter)] = _copy_tensor(parameter, device, shared)
    for buffer in module.buffers():
        memo[id(buffer)] = buffer.detach().to(device, copy=True)
    for name, layer in module.named_modules():
        if isinstance(layer, torch.jit.ScriptModule):
            got = f"a {type(layer).__name__} at {name or 'its top'}"
            raise ConfigError("module", "modules in Python", found=got, hint="Pass the module that it was made of.")
        for attribute, value in vars(layer).items():
            if "hooks" in attribute:
                memo[id(value)] = value
            elif isinstance(value, torch.Tensor) and not value.is_leaf:  # left there by an earlier pass
                memo[id(value)] = value.detach().to(device, copy=True)
    try:
        return copy.deepcopy(module, memo)
    except (TypeError, RuntimeError) as error:
        hint = "Keep outside of it what cannot be copied, and tensors with a graph in lists."
        raise ConfigError(
            "module", "a module that can be copied", found=f"{type(module).__name__} ({error})", hint=hint
        ) from error
