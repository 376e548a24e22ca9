"""Data parallelism over several devices in each process: a replica of the model and a thread for
each device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .. import environment
from ..communicator import Communicator
from ..errors import ConfigError, LockstepError
from .distributed import Distributed
from .nested import narrow
from .replicas.replica_threads import ReplicaError
from .replicas.replicated import Engine
from .replicas.scatter import Device, as_devices, check_can_be_cut, leaves
from .shards import bounds
from .strategy import accumulation_dtype, number_on
from .sync_batchnorm import SyncBatchNorm

# With fewer samples, a core computes for less time than it takes to distribute the work and to add
# up the gradients.
_MIN_SAMPLES_PER_CORE = 32


class Replicas(Distributed):
    """Trains one model on several devices of one process; the CPU is a device too and may be listed
    several times.

    Each device computes a part of the process's samples; all devices run their forward and backward
    passes in parallel. The optimizer updates the model itself, whose gradients are sums over the
    replicas in order: the gradient of the mean over the global batch, independent of the partition.
    Running statistics are averaged over the replicas, weighted by samples, at every pass. Several
    processes, each with its own devices, train together as under `Distributed`.

    Args:
        comm: communicator over the workers.
        devices: the devices of the replicas, the worker's device first; see `default_devices` for
            None.
        global_batch_size: samples in a step, if known.

    Raises:
        ConfigError: for devices that do not exist, or if the first is not the worker's device.
    """

    can_regroup = False
    can_shard_optimizer = False

    def __init__(
        self,
        comm: Communicator,
        devices: Sequence[Device] | None = None,
        global_batch_size: int | None = None,
    ) -> None:
        super().__init__(comm)
        self._devices = (
            default_devices(comm, global_batch_size)
            if devices is None
            else _check_devices(devices, comm)
        )
        self._engine: Engine | None = None

    @property
    def devices(self) -> list[torch.device]:
        """The devices that this worker computes on."""
        return list(self._devices)

    def with_virtual_workers(self, virtual_workers: int, threads: int | None) -> Distributed:
        """Raise an error: replicas do not support virtual workers.

        Raises:
            ConfigError: always.
        """
        hint = (
            "A process computes its shards one after another; use several processes: "
            "strategy='distributed'."
        )
        raise ConfigError("virtual_workers", "none with strategy='replicas'", virtual_workers, hint)

    def prepare(self, model: nn.Module) -> None:
        """Synchronise `model` over the workers; the replicas are created at the first pass.

        Raises:
            MismatchError: if the workers' models differ in their parameters or buffers.
            ConfigError: if the model has layers that communicate with other workers.
        """
        for name, layer in model.named_modules():
            if isinstance(layer, (SyncBatchNorm, nn.SyncBatchNorm)):
                hint = (
                    "Threads of replicas have no common order of collectives; use "
                    "strategy='distributed'."
                )
                found = f"{type(layer).__name__} at {name or 'its top'}"
                raise ConfigError(
                    "model",
                    "no synchronised batch norm with strategy='replicas'",
                    found=found,
                    hint=hint,
                )
        super().prepare(model)
        self._engine = Engine(model, self._devices) if len(self._devices) > 1 else None

    def wrap(self, module: nn.Module) -> nn.Module:
        """Run `module` on all devices, with gradients averaged over the workers."""
        return super().wrap(self.wrap_evaluation(module))

    def wrap_evaluation(self, module: nn.Module) -> nn.Module:
        """Run `module`, (data, samples) → sums over the samples, on all devices."""
        return module if self._engine is None else _ReplicatedComputation(module, self._engine)


class _ReplicatedComputation(nn.Module):
    """A computation with a model, run with the model's replicas.

    Args:
        computation: a `lockstep.training.losses.loss.Computation`, with a method ``on(model, data,
            samples)``.
        engine: the replicas of its model.
    """

    def __init__(self, computation: Any, engine: Engine) -> None:
        super().__init__()
        self.computation = computation
        self._engine = engine
        self._count_dtype = accumulation_dtype(engine.output_device)

    def forward(self, data: Any, size: int) -> Any:
        """Return the sums over `size` samples.

        Raises:
            ConfigError: for a batch that cannot be split by samples.
            ReplicaError: for any other failure of a replica, with its device and the shapes of its
                inputs.
        """
        try:
            return self._engine.sums(self._on, _split(data, size, len(self._engine.devices)))
        except ReplicaError as error:
            # its message is clear without the replica
            if isinstance(error.__cause__, LockstepError):
                raise error.__cause__ from None
            raise

    def _on(self, model: nn.Module, data: Any, size: int) -> Any:
        result = self.computation.on(model, data, size)
        if not isinstance(result, tuple):
            return result
        total, count = result
        return total, number_on(total.device, count, self._count_dtype)


def _split(data: Any, size: int, devices: int) -> list[tuple[Any, int]]:
    """Split `data` into one part for each device, at most one for each sample; returns (part,
    samples) of each.
    """
    parts = min(devices, max(size, 1))
    if parts == 1:
        return [(data, size)]
    check_can_be_cut(data)
    for path, tensor in leaves(data, samples=size):
        if tensor.dim() and tensor.shape[0] != size:
            expected = f"batches whose tensors all have their {size} samples in the first dimension"
            hint = (
                "Collate them that way and transpose them in the model; a value for all samples "
                "can be 0-dim."
            )
            raise ConfigError(
                "batch",
                expected,
                found=f"shape {list(tensor.shape)} at {path or 'the batch'}",
                hint=hint,
            )
    ranges = [bounds(size, parts, number) for number in range(parts)]
    return [(narrow(data, start, stop, size), stop - start) for start, stop in ranges]


def _check_devices(devices: Sequence[Device], comm: Communicator) -> list[torch.device]:
    checked = as_devices(devices)
    names = ", ".join(str(device) for device in checked)
    if any(device.type == "meta" for device in checked):
        raise ConfigError("devices", "devices that compute", found=names)
    if checked[0] != comm.device:
        hint = (
            "It holds the batches and the sums of losses and gradients; lockstep.init(device) "
            "chooses it."
        )
        raise ConfigError(
            "devices",
            f"{comm.device}, this worker's own, as the first device",
            found=names,
            hint=hint,
        )
    return checked


def default_devices(comm: Communicator, global_batch_size: int | None = None) -> list[torch.device]:
    """Return this worker's device and its share of the host's other devices of that kind.

    On the CPU it is one replica for each core that gets at least 32 samples of a step.

    Args:
        comm: communicator over the workers.
        global_batch_size: samples in a step; if None, every core gets a replica.
    """
    device = comm.device
    workers = comm.world.local_world_size
    if device.type == "cpu":
        replicas = max(1, environment.usable_cores() // workers)
        if global_batch_size is not None:
            replicas = min(replicas, global_batch_size // comm.size // _MIN_SAMPLES_PER_CORE)
        return [device] * max(1, replicas)
    count = torch.accelerator.device_count()
    # A worker starts with the device of its local rank: of two workers with four devices, the first
    # has 0 and 2.
    return [
        torch.device(device.type, index) for index in range(device.index or 0, count, workers)
    ] or [device]
