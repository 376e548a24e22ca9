"""Runs a model on several devices of one process, as if it were one model on one batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ..data.nested import map_tensors
from ..errors import ConfigError
from .devices import Device, as_device, as_devices
from .draws import DrawsApart, Seed
from .failure import shapes_of
from .joining import Column, Inputs, Join, Plan
from .mirrors import Mirrors
from .spread import check_can_be_cut, cut, join, leaves
from .threads import Threads, parallel_apply

__all__ = ["Engine"]

Part = tuple[tuple[Any, ...], dict[str, Any]]


class Engine:
    """Replicas of one model, and the passes that they make together.

    The optimizer has the model itself, whose gradients are sums over the replicas, in their order. Each replica
    computes forward and backward on its own part of the batch, in a thread of its own where it is on the CPU.

    Args:
        module: the model.
        devices: of the replicas.
        dim: the dimension in which batches have their samples.
        output_device: where outputs are joined; on the first device when None.
    """

    def __init__(
        self, module: nn.Module, devices: Sequence[Device], dim: int = 0, output_device: Device | None = None
    ) -> None:
        self.module, self.devices, self.dim = module, as_devices(devices), dim
        self.output_device = self.devices[0] if output_device is None else as_device(output_device, "output_device")
        self._mirrors = Mirrors(module, self.devices)
        self._threads: Threads | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Without what cannot be copied or saved, and is made again when needed."""
        return {**vars(self), "_mirrors": Mirrors(self.module, self.devices), "_threads": None}

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], summed: bool = False) -> Any:
        """Cut a batch, run the replicas on its parts, and join what they return.

        Args:
            args: of the model.
            kwargs: of the model, by name.
            summed: add up what the replicas return, where otherwise it is joined along the samples.

        Raises:
            ConfigError: for a batch that cannot be cut, or outputs that cannot be joined.
            ReplicaError: when a replica fails, with its device and the shapes that it was given.
        """
        inputs = Inputs(dim=self.dim)
        parts = self._scatter((args, dict(kwargs)), inputs)
        sizes = self._sizes(parts)
        parts = parts[: len(sizes)]
        outputs = self._pass(nn.Module.__call__, parts, sizes)
        return self._join(outputs, parts, inputs, summed)

    def sums(self, function: Callable[..., Any], parts: Sequence[tuple[Any, int]]) -> Any:
        """Compute something with the replicas, and add it up.

        Args:
            function: (replica, data, samples) → tensors, of the same make from each replica.
            parts: (data, samples) for the first replicas; to be brought to their devices.

        Returns:
            The sums of the tensors on the output device, with a graph that leads to the model's parameters.

        Raises:
            ReplicaError: when a replica fails, with its device and the shapes that it was given.
        """
        places = zip(parts, self.devices, strict=False)
        given: list[Part] = [((map_tensors(_mover(device), data), size), {}) for (data, size), device in places]
        outputs = self._pass(function, given, [size for _, size in parts])
        return self._join(outputs, given, Inputs(), summed=True)

    def _pass(self, function: Callable[..., Any], parts: Sequence[Part], sizes: Sequence[int]) -> list[Any]:
        replicas = self._mirrors.follow(len(parts))
        outputs = self._forward([partial(function, replica) for replica in replicas], parts)
        self._mirrors.collect([size / sum(sizes) for size in sizes] if sum(sizes) else [1.0])
        return outputs

    # --- before -----------------------------------------------------------------------------------------------

    def _scatter(self, batch: Any, inputs: Inputs) -> list[Part]:
        """A part for each replica; those tensors that want a gradient are cut off, and noted in `inputs`."""
        check_can_be_cut(batch)
        for _, tensor in leaves(batch):
            if tensor.requires_grad and torch.is_grad_enabled():
                inputs.wholes.append(tensor)
                inputs.pieces.append([])
        return [self._part(batch, number, inputs) for number in range(len(self.devices))]

    def _part(self, batch: Any, number: int, inputs: Inputs) -> Part:
        waiting = iter(inputs.pieces)

        def own(tensor: torch.Tensor) -> torch.Tensor:
            piece = cut(tensor.detach(), number, len(self.devices), self.dim)
            piece = piece.to(self.devices[number], non_blocking=True)
            if tensor.requires_grad and torch.is_grad_enabled():
                next(waiting).append(piece.requires_grad_())
            return piece

        part: Part = map_tensors(own, batch)
        return part

    def _sizes(self, parts: Sequence[Part]) -> list[int]:
        """How many samples each replica has that has some; the first always has a part."""
        sizes = []
        for number, part in enumerate(parts):
            found = {name: tensor.shape[self.dim] for name, tensor in leaves(part) if tensor.dim()}
            some = [size for size in found.values() if size]
            if number and not some:
                break
            if some and len(some) < len(found):
                got = ", ".join(f"{name}: {size}" for name, size in found.items())
                hint = "Values that are for all samples can be 0-dim, or no tensors."
                raise ConfigError(
                    "batch", f"samples for replica {number} in every tensor, or in none", found=got, hint=hint
                )
            sizes.append(some[0] if some else 0)
        return sizes

    # --- the pass ---------------------------------------------------------------------------------------------

    def _forward(self, functions: Sequence[Callable[..., Any]], parts: Sequence[Part]) -> list[Any]:
        if self._threads is None and len(self.devices) > 1:
            self._threads = Threads(len(self.devices))
        seed = Seed()

        def apart(number: int, function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                with DrawsApart(seed, number, self.devices[number]):
                    return function(*args, **kwargs)

            return call

        calls = [apart(number, function) for number, function in enumerate(functions)]
        arguments, keywords = [part[0] for part in parts], [part[1] for part in parts]
        return parallel_apply(calls, arguments, keywords, self.devices[: len(parts)], self._threads)

    # --- after ------------------------------------------------------------------------------------------------

    def _join(self, outputs: Sequence[Any], parts: Sequence[Part], inputs: Inputs, summed: bool) -> Any:
        dim = None if summed else self.dim
        columns: list[Column] = []
        join(outputs, lambda _, tensors: columns.append(Column(tensors, self.output_device, dim)))
        if any(column.wants_gradient for column in columns):
            joined = iter(self._connected(columns, parts, inputs))
        else:
            joined = iter([column.joined() for column in columns])
        return map_tensors(lambda _: next(joined), outputs[0])

    def _connected(self, columns: list[Column], parts: Sequence[Part], inputs: Inputs) -> tuple[torch.Tensor, ...]:
        """The joined outputs, with a graph that leads to the model's parameters and the inputs."""
        parameters = list(self.module.parameters())
        replicas = [self._mirrors.parameters(number) for number in range(len(parts))]
        on_cpu = all(device.type == "cpu" for device in self.devices)
        given = [shapes_of(part) for part in parts]
        plan = Plan(columns, inputs, parameters, replicas, self._threads if on_cpu else None, given)
        joined: tuple[torch.Tensor, ...] = Join.apply(plan, *parameters, *inputs.wholes)  # type: ignore[no-untyped-call]
        return joined


def _mover(device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.to(device, non_blocking=True)
