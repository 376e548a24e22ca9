"""Copies of a model that follow it: its values, modes and running statistics."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from .copies import copy_module

__all__ = ["Mirrors"]

# Attributes of these types are settings, such as a dropout's share, and may be changed between steps.
_PLAIN = (bool, int, float, str, type(None))
# What torch keeps in every layer; hooks are those of the model.
_TORCHS = frozenset(vars(nn.Module()))


class Mirrors:
    """The replicas of one model, made when first needed and kept: every pass writes the model's values into them.

    On the device that the model is on, they share its parameters' memory, and nothing is copied. Their own are the
    gradients, and the buffers, which forward passes may change.

    Args:
        module: the model; it may be moved, frozen, put into another mode or be given other layers at any time.
        devices: of the replicas.
    """

    def __init__(self, module: nn.Module, devices: Sequence[torch.device]) -> None:
        self.module, self.devices = module, list(devices)
        self._made_of: list[object] = []
        self._lies_at: list[object] = []
        self._copies: list[nn.Module] = []
        self._versions: list[int] = []
        self._settings: list[dict[str, object]] = []

    def follow(self, count: int) -> list[nn.Module]:
        """The first `count` replicas, as the model is now."""
        # Not as inference tensors, which no later pass could use for training.
        with torch.inference_mode(False), torch.no_grad():
            if self._is_another():
                self._copies = [copy_module(self.module, device, shared=True) for device in self.devices]
                self._versions = []
                self._settings = [_settings(layer) for layer in self.module.modules()]
            self._send_values()
            self._send_settings()
            for replica, device in zip(self._copies[:count], self.devices, strict=False):
                self._send_buffers(replica, device)
        return self._copies[:count]

    def _is_another(self) -> bool:
        """Whether the model is made of other things than at the last call, or they lie elsewhere."""
        layers = list(self.module.modules())
        others = [part for layer in layers for part in _others(layer)]
        made_of = [part for layer in layers for part in (layer, *layer._parameters.values())] + others
        lies_at: list[object] = [(p.device, p.dtype, _address(p)) for p in self.module.parameters()]
        lies_at += [part._version for part in others if type(part) is torch.Tensor and not part.is_inference()]
        same = len(made_of) == len(self._made_of) and all(map(operator.is_, made_of, self._made_of))
        same = same and lies_at == self._lies_at
        self._made_of, self._lies_at = made_of, lies_at
        return not same

    def parameters(self, replica: int) -> list[nn.Parameter]:
        """Those of one replica, in the order of the model's own."""
        return list(self._copies[replica].parameters())

    def _send_values(self) -> None:
        """Copy the model's parameters to the devices on which it is not."""
        own = list(self.module.parameters())
        versions = [parameter._version for parameter in own]
        for replica in self._copies:
            for number, (source, target) in enumerate(zip(own, replica.parameters(), strict=True)):
                target.requires_grad_(source.requires_grad)
                if source.device == target.device and source.data_ptr() == target.data_ptr():
                    continue
                # One that was not changed, or changed behind autograd's back, shall not seem to have been changed: an
                # earlier pass may still need it for its backward.
                unchanged = bool(self._versions) and self._versions[number] == versions[number]
                (target.data if unchanged else target).copy_(source, non_blocking=True)
        self._versions = versions

    def _send_settings(self) -> None:
        """Set in every replica what was set in the model since the last pass, such as its mode."""
        for number, layer in enumerate(self.module.modules()):
            before, now = self._settings[number], _settings(layer)
            if now != before:
                changed = {name: value for name, value in now.items() if name not in before or before[name] != value}
                for replica in self._copies:
                    vars(list(replica.modules())[number]).update(changed)
                self._settings[number] = now

    def _send_buffers(self, replica: nn.Module, device: torch.device) -> None:
        """Give the replica the model's buffers as new tensors: an earlier pass may still need the old ones."""
        found = [buffer for layer in self.module.modules() for buffer in layer._buffers.values() if buffer is not None]
        copies = iter(copies_on(found, device))
        for source, target in zip(self.module.modules(), replica.modules(), strict=True):
            for name, buffer in source._buffers.items():
                target._buffers[name] = None if buffer is None else next(copies)

    def collect(self, weights: Sequence[float]) -> None:
        """Take over the buffers that a forward pass of the first len(weights) replicas has changed.

        Running statistics become their average over the replicas by `weights`, which sum to 1; others are those of the
        first replica.
        """
        copies = [list(replica.modules()) for replica in self._copies[: len(weights)]]
        with torch.inference_mode(False), torch.no_grad():
            places, values, several = [], [], []
            for layer, *replicas in zip(self.module.modules(), *copies, strict=True):
                for name in layer._buffers:
                    found = [replica._buffers[name] for replica in replicas]
                    there = [buffer for buffer in found if buffer is not None]
                    if found[0] is not None and any(map(_may_be_written, there)):
                        places.append((layer, name))
                        values.append(there[0])
                        several.append(there if isinstance(layer, _NormBase) and there[0].is_floating_point() else [])
            averaged = [number for number, each in enumerate(several) if each]
            for number, value in zip(averaged, _averages([several[n] for n in averaged], weights), strict=True):
                values[number] = value
            _put(places, values)


def _put(places: Sequence[tuple[nn.Module, str]], values: Sequence[torch.Tensor]) -> None:
    """Take over the values of buffers: in their own memory, where they fit."""
    fitting = []
    for (layer, name), value in zip(places, values, strict=True):
        own = layer._buffers[name]
        if own is None or own.shape != value.shape:
            layer._buffers[name] = value.to(own.device if own is not None else value.device)
        else:
            fitting.append((own, value))
    for numbers in _alike(fitting):
        owns, taken = zip(*(fitting[number] for number in numbers), strict=True)
        torch._foreach_copy_(owns, brought(taken, owns[0].device))


def copies_on(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """New tensors of the same values on `device`, on each of which nothing seems to have been written so far.

    Few kernels for all of them: tensors of one kind are copied together, and travel to another device as one.
    """
    made = [torch.empty_like(tensor, device=device, requires_grad=False) for tensor in tensors]
    for numbers in _alike(list(zip(made, tensors, strict=True))):
        sources = brought([tensors[number] for number in numbers], device)
        torch._foreach_copy_([made[number] for number in numbers], sources)
    return [copy.data for copy in made]


def brought(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """`tensors`, of one dtype and on one device, on `device`."""
    if tensors[0].device == device or any(tensor.layout is not torch.strided for tensor in tensors):
        return [tensor.to(device) for tensor in tensors]
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).to(device)
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]


def _alike(rows: Sequence[Sequence[torch.Tensor]]) -> list[list[int]]:
    """The numbers of those rows whose tensors have the same dtypes and devices: one kernel takes those of one kind."""
    groups: dict[object, list[int]] = {}
    for number, row in enumerate(rows):
        groups.setdefault(tuple((tensor.dtype, tensor.device) for tensor in row), []).append(number)
    return list(groups.values())


def _may_be_written(buffer: torch.Tensor) -> bool:
    """Whether a buffer that was new before a pass may have been changed by it.

    Autograd counts writes, but for those of torch's batch norm to its running statistics.
    """
    return buffer._version > 0 or (buffer.dim() == 1 and buffer.is_floating_point())


def _averages(rows: Sequence[Sequence[torch.Tensor]], weights: Sequence[float]) -> list[torch.Tensor]:
    """Of each row, by weights that sum to 1; exact where all are equal."""
    averages: dict[int, torch.Tensor] = {}
    for numbers in _alike(rows):
        firsts, *others = zip(*(rows[number] for number in numbers), strict=True)
        sums = copies_on(firsts, firsts[0].device)
        for values, weight in zip(others, weights[1:], strict=True):
            here = brought(values, firsts[0].device)
            torch._foreach_add_(sums, torch._foreach_sub(here, firsts), alpha=weight)
        averages.update(zip(numbers, sums, strict=True))
    return [averages[number] for number in range(len(rows))]


def _address(parameter: nn.Parameter) -> int:
    """0 where there is no memory yet: what uses the parameter says so better."""
    return 0 if is_lazy(parameter) else parameter.data_ptr()


def _others(layer: nn.Module) -> Iterator[object]:
    """A layer's attributes that are neither plain values nor torch's own, such as a mask, and what they hold.

    That is the content of lists, mappings and objects with attributes, which may be changed in place.
    """
    for name, value in vars(layer).items():
        if name not in _TORCHS and type(value) not in _PLAIN:
            yield value
            yield from _content(value)


def _content(value: object) -> Iterable[object]:
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (list, set)):
        return value
    return () if isinstance(value, (nn.Module, torch.Tensor, type)) else getattr(value, "__dict__", {}).values()


def _settings(layer: nn.Module) -> dict[str, object]:
    """Those attributes of a layer that are plain values."""
    return {name: value for name, value in vars(layer).items() if type(value) in _PLAIN}
