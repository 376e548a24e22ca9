"""The engine of replicated execution: runs a model on several devices of one process as one model
on one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ... import arguments
from ...errors import ConfigError
from ..nested import map_tensors
from .copies import ReplicaCopies
from .joined_graph import Column, ForwardPass, Inputs, Join
from .random_draws import Seed, SeparateDraws
from .replica_threads import Threads, parallel_apply, shapes_of
from .scatter import (
    Device,
    as_device,
    as_devices,
    check_can_be_cut,
    cut,
    join,
    leaves,
    with_lists_cut,
)

Part = tuple[tuple[Any, ...], dict[str, Any]]


class Engine:
    """Replicas of one model, and their joint forward and backward passes.

    The optimizer updates the model itself, whose gradients are sums over the replicas, in order.
    Each replica computes the forward and backward pass of its part of the batch, on the CPU in its
    own thread.

    Args:
        module: the model.
        devices: the devices of the replicas.
        dim: the dimension of the samples in tensors.
        output_device: the device of the joined outputs; the first device when None.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[Device],
        dim: int = 0,
        output_device: Device | None = None,
    ) -> None:
        self.module = module
        self.devices = as_devices(devices)
        self.dim = arguments.whole("dim", dim)
        self.output_device = (
            self.devices[0] if output_device is None else as_device(output_device, "output_device")
        )
        self._replicas = ReplicaCopies(module, self.devices)
        self._threads: Threads | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes without replicas and threads, which cannot be pickled and are
        created again.
        """
        return {
            **vars(self),
            "_replicas": ReplicaCopies(self.module, self.devices),
            "_threads": None,
        }

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], summed: bool = False) -> Any:
        """Split a batch, run the replicas on its parts, and join their outputs.

        Args:
            args: arguments of the model.
            kwargs: keyword arguments of the model.
            summed: whether to add up the outputs instead of joining them along the samples.

        Raises:
            ConfigError: for a batch that cannot be split, or outputs that cannot be joined.
            ReplicaError: if a replica fails, with its device and the shapes of its inputs.
        """
        inputs = Inputs(dim=self.dim)
        parts = self._scatter((args, dict(kwargs)), inputs)
        sizes = self._sizes(parts)
        parts = parts[: len(sizes)]
        outputs = self._run_parts(nn.Module.__call__, parts, sizes)
        return self._join(outputs, parts, inputs, summed)

    def sums(self, function: Callable[..., Any], parts: Sequence[tuple[Any, int]]) -> Any:
        """Call a function with the replicas in parallel, and return the sums of its results.

        Args:
            function: (replica, data, samples) → tensors, in the same structure for each replica.
            parts: (data, samples) for the first replicas; moved to their devices.

        Returns:
            The sums of the tensors on the output device, with a graph that reaches the model's
            parameters.

        Raises:
            ReplicaError: if a replica fails, with its device and the shapes of its inputs.
        """
        pairs = zip(parts, self.devices, strict=False)
        moved: list[Part] = [
            ((map_tensors(_mover(device), data), size), {}) for (data, size), device in pairs
        ]
        outputs = self._run_parts(function, moved, [size for _, size in parts])
        return self._join(outputs, moved, Inputs(), summed=True)

    def _run_parts(
        self, function: Callable[..., Any], parts: Sequence[Part], sizes: Sequence[int]
    ) -> list[Any]:
        """Call `function` with each up-to-date replica and its part, and merge the replicas'
        buffers.
        """
        replicas = self._replicas.update(len(parts))
        outputs = self._forward([partial(function, replica) for replica in replicas], parts)
        self._replicas.merge_buffers([size / sum(sizes) for size in sizes] if sum(sizes) else [1.0])
        return outputs

    def _scatter(self, batch: Any, inputs: Inputs) -> list[Part]:
        """Return a part for each replica; tensors that require a gradient are detached and recorded
        in `inputs`.
        """
        check_can_be_cut(batch)
        for _, tensor in leaves(batch):
            if tensor.requires_grad and torch.is_grad_enabled():
                inputs.tensors.append(tensor)
                inputs.parts.append([])
        return [self._part(batch, number, inputs) for number in range(len(self.devices))]

    def _part(self, batch: Any, number: int, inputs: Inputs) -> Part:
        parts_of_inputs = iter(inputs.parts)

        def move(tensor: torch.Tensor) -> torch.Tensor:
            part = cut(tensor.detach(), number, len(self.devices), self.dim)
            part = part.to(self.devices[number], non_blocking=True)
            if tensor.requires_grad and torch.is_grad_enabled():
                next(parts_of_inputs).append(part.requires_grad_())
            return part

        moved: Part = map_tensors(move, with_lists_cut(batch, number, len(self.devices), self.dim))
        return moved

    def _sizes(self, parts: Sequence[Part]) -> list[int]:
        """Return the number of samples of each replica up to the first one without samples; at
        least one number.
        """
        sizes = []
        for number, part in enumerate(parts):
            by_name = {
                name: tensor.shape[self.dim] for name, tensor in leaves(part) if tensor.dim()
            }
            nonzero = [size for size in by_name.values() if size]
            if number and not nonzero:
                break
            if nonzero and len(nonzero) < len(by_name):
                got = ", ".join(f"{name}: {size}" for name, size in by_name.items())
                hint = "Pass values for all samples as 0-dim tensors or plain values."
                raise ConfigError(
                    "batch",
                    f"samples for replica {number} in every tensor, or in none",
                    found=got,
                    hint=hint,
                )
            sizes.append(nonzero[0] if nonzero else 0)
        return sizes

    def _forward(self, functions: Sequence[Callable[..., Any]], parts: Sequence[Part]) -> list[Any]:
        if self._threads is None and len(self.devices) > 1:
            self._threads = Threads(len(self.devices))
        seed = Seed()

        def with_own_draws(number: int, function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                with SeparateDraws(seed, number, self.devices[number]):
                    return function(*args, **kwargs)

            return call

        calls = [with_own_draws(number, function) for number, function in enumerate(functions)]
        arguments = [part[0] for part in parts]
        keywords = [part[1] for part in parts]
        return parallel_apply(calls, arguments, keywords, self.devices[: len(parts)], self._threads)

    def _join(
        self, outputs: Sequence[Any], parts: Sequence[Part], inputs: Inputs, summed: bool
    ) -> Any:
        dim = None if summed else self.dim
        columns: list[Column] = []
        join(outputs, lambda _, tensors: columns.append(Column(tensors, self.output_device, dim)))
        if any(column.requires_grad for column in columns):
            joined = iter(self._join_graphs(columns, parts, inputs))
        else:
            joined = iter([column.joined() for column in columns])
        return map_tensors(lambda _: next(joined), outputs[0])

    def _join_graphs(
        self, columns: list[Column], parts: Sequence[Part], inputs: Inputs
    ) -> tuple[torch.Tensor, ...]:
        """Return the joined outputs, with a graph that reaches the model's parameters and the
        inputs.
        """
        parameters = list(self.module.parameters())
        replicas = [self._replicas.parameters(number) for number in range(len(parts))]
        threads = self._threads if all(device.type == "cpu" for device in self.devices) else None
        shapes = [shapes_of(part) for part in parts]
        forward_pass = ForwardPass(columns, inputs, parameters, replicas, threads, shapes)
        anchors = (*parameters, *inputs.tensors)
        joined: tuple[torch.Tensor, ...] = Join.apply(forward_pass, *anchors)  # type: ignore[no-untyped-call]
        return joined


def _mover(device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.to(device, non_blocking=True)
