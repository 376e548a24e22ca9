"""Data parallelism over several devices in each process: a replica of the model, and a thread, for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .. import environment
from ..communicator import Communicator
from ..data.nested import narrow
from ..errors import ConfigError, LockstepError
from ..replicas import Device, Engine, ReplicaError, as_devices
from ..replicas.spread import check_can_be_cut, leaves
from ..shards import bounds
from .distributed import Distributed
from .sync_batchnorm import SyncBatchNorm

__all__ = ["Replicas", "default_devices"]

# Fewer samples keep a core busy for less time than it takes to hand out the work and to add up the gradients.
_SAMPLES_FOR_A_CORE = 32


class Replicas(Distributed):
    """Trains one model on several devices of one process; CPUs are devices too, also several times the same one.

    Each device computes its part of the process's part of a step, forward and backward at the same time as the others.
    The optimizer has the model itself, whose gradients are sums over the replicas in their order: the mean over the
    global batch, however it is cut. Running statistics are averaged over the replicas, by samples, at every pass.
    Several processes, each with devices of its own, train together as under `Distributed`.

    Args:
        comm: the workers.
        devices: of the replicas, the worker's own device first; see `default_devices` for None.
        global_batch: samples in a step, if they are known.

    Raises:
        ConfigError: for devices that are not there, or another one than the worker's in the first place.
    """

    def __init__(
        self, comm: Communicator, devices: Sequence[Device] | None = None, global_batch: int | None = None
    ) -> None:
        super().__init__(comm)
        self._devices = default_devices(comm, global_batch) if devices is None else _checked(devices, comm)
        self._engine: Engine | None = None

    @property
    def devices(self) -> list[torch.device]:
        """Where this worker computes."""
        return list(self._devices)

    def in_shards(self, shards: int, threads: int | None) -> Distributed:
        """There is no such strategy.

        Raises:
            ConfigError: always.
        """
        hint = "Shards are computed one after another; share them among processes: strategy='distributed'."
        raise ConfigError("shards", "none with strategy='replicas'", shards, hint)

    def prepare(self, model: nn.Module) -> None:
        """Bring rank 0's values of `model` to every worker; the replicas are made with the first pass.

        Raises:
            MismatchError: when the workers' models differ in their parameters or buffers.
            ConfigError: when the model has layers that talk to other workers in their passes.
        """
        for name, layer in model.named_modules():
            if isinstance(layer, (SyncBatchNorm, nn.SyncBatchNorm)):
                hint = "Replicas talk in no order that would be the same everywhere; use strategy='distributed'."
                found = f"{type(layer).__name__} at {name or 'its top'}"
                raise ConfigError(
                    "model", "no synchronised batch norm with strategy='replicas'", found=found, hint=hint
                )
        super().prepare(model)
        self._engine = Engine(model, self._devices) if len(self._devices) > 1 else None

    def wrap(self, module: nn.Module) -> nn.Module:
        """`module` on all devices, with its gradients averaged over workers."""
        return super().wrap(self.spread(module))

    def spread(self, module: nn.Module) -> nn.Module:
        """`module`, (data, samples) → sums over the samples, on all devices."""
        return module if self._engine is None else _OnReplicas(module, self._engine)


class _OnReplicas(nn.Module):
    """What `computation` computes with its model, computed with the replicas of it.

    Args:
        computation: with a method ``on(model, data, samples)``.
        engine: of its model.
    """

    def __init__(self, computation: Any, engine: Engine) -> None:
        super().__init__()
        self.computation, self._engine = computation, engine

    def forward(self, data: Any, size: int) -> Any:
        """The sums over `size` samples.

        Raises:
            ConfigError: for a batch that cannot be cut.
            ReplicaError: when something fails that Lockstep does not know, with the device and the shapes.
        """
        try:
            return self._engine.sums(self._on, _cut(data, size, len(self._engine.devices)))
        except ReplicaError as error:
            if isinstance(error.__cause__, LockstepError):  # says by itself what is wrong
                raise error.__cause__ from None
            raise

    def _on(self, model: nn.Module, data: Any, size: int) -> Any:
        found = self.computation.on(model, data, size)
        if not isinstance(found, tuple):
            return found
        total, count = found
        wide = torch.float32 if total.device.type == "mps" else torch.float64
        return total, torch.as_tensor(count, dtype=wide, device=total.device)


def _cut(data: Any, size: int, devices: int) -> list[tuple[Any, int]]:
    """`data` in parts that differ by one sample at most, each with its number; of few samples fewer parts."""
    parts = min(devices, max(size, 1))
    if parts == 1:
        return [(data, size)]
    check_can_be_cut(data)
    for path, tensor in leaves(data):
        if tensor.dim() and tensor.shape[0] != size:
            expected = f"batches whose tensors all have their {size} samples in the first dimension"
            hint = "Collate them there and turn them in the model; a value for all samples can be 0-dim."
            raise ConfigError(
                "batch", expected, found=f"shape {list(tensor.shape)} at {path or 'the batch'}", hint=hint
            )
    cuts = [bounds(size, parts, number) for number in range(parts)]
    return [(narrow(data, start, stop), stop - start) for start, stop in cuts]


def _checked(devices: Sequence[Device], comm: Communicator) -> list[torch.device]:
    found = as_devices(devices)
    got = ", ".join(str(device) for device in found)
    if any(device.type == "meta" for device in found):
        raise ConfigError("devices", "devices that compute", found=got)
    if found[0] != comm.device:
        hint = "Batches come there, and losses and gradients are added there; lockstep.init(device) chooses it."
        raise ConfigError("devices", f"{comm.device}, this worker's own, in the first place", found=got, hint=hint)
    return found


def default_devices(comm: Communicator, global_batch: int | None = None) -> list[torch.device]:
    """This worker's device, and its share of the machine's others of that kind.

    On the CPU as many replicas as there are cores, if each gets at least 32 samples of a step.

    Args:
        comm: the workers.
        global_batch: samples in a step; where they are not known, any number is taken to be enough.
    """
    here, workers = comm.device, comm.world.local_world_size
    if here.type == "cpu":
        cores = max(1, environment.usable_cores() // workers)
        enough = cores if global_batch is None else global_batch // comm.size // _SAMPLES_FOR_A_CORE
        return [here] * max(1, min(cores, enough))
    count = torch.accelerator.device_count()
    # Of two workers with four devices, the first has 0 and 2: that of a worker's local rank is its own.
    return [torch.device(here.type, index) for index in range(here.index or 0, count, workers)] or [here]
