"""Joins the job that this process belongs to, and leaves it."""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from .. import environment, rendezvous, watch
from ..errors import ConfigError
from ..topology import World
from ..transports.c10d import Store
from ..transports.shm import host
from .communicator import Communicator
from .place import world_of

__all__ = ["claim_gpu", "init", "pick_device"]

# One process is one worker of one job, so there is one communicator for all workers; torch.distributed holds its
# default process group in the same way.
_default: Communicator | None = None


_TRANSPORTS = ("auto", "shm", "gloo", "mpi")


def init(device: str = "auto", timeout: timedelta | None = None, transport: str | None = None) -> Communicator:
    """Find the job that this process belongs to, and join it.

    Alone (``python train.py``) nothing is set up. Under a launcher the process group is made: "shm" for what lives on
    the CPU (shared memory inside a machine, Gloo between machines), NCCL for what lives on GPUs. One that the program
    has already made is used as it is. A second call returns the same communicator.

    Args:
        device: "auto" (a GPU where there is one), "cpu", "cuda" (the GPU of this worker's local rank, or the only one
            that it sees) or "mps".
        timeout: how long a collective may wait; PyTorch's default when None.
        transport: what carries tensors on the CPU: "shm", "gloo", "mpi" (through mpi4py, for processes that mpiexec has
            started), or "auto": "shm" on Linux and "gloo" elsewhere. LOCKSTEP_TRANSPORT, or "auto", when None.

    Raises:
        ConfigError: for a device or transport that is not there, or an incomplete environment.
        StallError: when the others do not come.
        TransportError: when they cannot be reached.
    """
    global _default
    if _default is not None and _still_valid(_default):
        if device not in ("auto", _default.device.type):
            raise ConfigError("device", f"{_default.device.type}, as in the first call of init()", device)
        return _default
    if dist.is_initialized():
        world = world_of(dist.group.WORLD)
        _default = Communicator.at(world, pick_device(device, world), dist.group.WORLD)
        _check_own_gpu(_default.device, world)
        return _default
    world = environment.find_world()
    where = pick_device(device, world)
    carrier = _pick_carrier(transport)
    group = _join(world, where, carrier, timeout) if environment.is_launched() else None
    _default = Communicator.at(world, where, group)
    return _default


def _still_valid(found: Communicator) -> bool:
    """Whether the job is still the one that `found` belongs to: a program may destroy its group and make another."""
    if dist.is_initialized():
        return found.group is dist.group.WORLD
    return found.group is None and found.world == replace(environment.find_world(), device=found.world.device)


def _pick_carrier(transport: str | None) -> str:
    """The name that torch.distributed knows of the backend for tensors on the CPU."""
    name = transport if transport is not None else environment.transport()
    if name not in _TRANSPORTS:
        where = "transport" if transport is not None else "environment variable LOCKSTEP_TRANSPORT"
        raise ConfigError(where, ", ".join(_TRANSPORTS[:-1]) + f" or {_TRANSPORTS[-1]}", name)
    # shared memory is opened through /proc, which only Linux has
    usual = "shm" if sys.platform == "linux" else "gloo"
    return {"auto": usual, "mpi": "mpi4py"}.get(name, name)


def _join(world: World, device: torch.device, carrier: str, timeout: timedelta | None) -> dist.ProcessGroup | None:
    store = rendezvous.open_store(world, timeout, lambda: _store_over_mpi(world, timeout))
    watch.install(host.host_key)
    backend = f"cpu:{carrier},cuda:nccl" if device.type == "cuda" else carrier
    dist.init_process_group(
        backend,
        store=store,
        rank=world.rank,
        world_size=world.world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    atexit.register(_leave)
    _check_own_gpu(device, world)
    return dist.group.WORLD


def _check_own_gpu(device: torch.device, world: World) -> None:
    """Where each worker sees one GPU alone, and has numbers of its own for it, see that it is not another's as well."""
    if device.type == "cuda" and world.local_world_size > 1 and torch.cuda.device_count() == 1:
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        claim_gpu(distributed_c10d._get_default_store(), world.rank, uuid)


def claim_gpu(store: Store, rank: int, uuid: str) -> None:
    """Take a GPU for this process.

    Args:
        store: of the job.
        rank: of this process.
        uuid: of the GPU.

    Raises:
        ConfigError: another rank on this machine, which lives, has taken it.
    """
    mine = json.dumps([host.host_key(), os.getpid(), rank])
    key = f"lockstep/gpu/{uuid}"
    where, pid, other = json.loads(store.compare_set(key, "", mine))
    if where != host.host_key() or pid == os.getpid():
        return
    with suppress(ProcessLookupError, PermissionError):  # of one that has ended, and from whom it is taken over
        os.kill(pid, 0)
        raise ConfigError(
            "device",
            "a GPU of its own for each worker on a node",
            found=f"GPU {uuid} on rank {other} and on rank {rank}, each of which sees it alone",
            hint="Set CUDA_VISIBLE_DEVICES by the local rank, start fewer workers, or choose the device cpu.",
        )
    store.set(key, mine)


def _store_over_mpi(world: World, timeout: timedelta | None) -> Store:
    from ..transports.mpi.meeting import make_store  # mpi4py is optional

    return make_store(world) if timeout is None else make_store(world, timeout)


def _leave() -> None:
    """Give the process group back when the program ends."""
    watch.left()
    global _default
    _default = None
    if dist.is_initialized():
        gloo = dist.get_backend() == "gloo"
        dist.destroy_process_group()
        if not gloo:
            return
        # Gloo's threads let go of the last collective's tensor a moment after it was waited for, and need the
        # interpreter for it; one that comes too late aborts the process (seen in 3 of 4 runs that ended right after a
        # collective, torch 2.13). There is nothing to wait for, so they get a moment in which nobody holds it.
        time.sleep(0.05)


def pick_device(device: str, world: World) -> torch.device:
    """The device on which a worker computes; for CUDA it also becomes the current device.

    Raises:
        ConfigError: when that kind of device is not on this machine, or has fewer of it than local workers.
    """
    if device not in ("auto", "cpu", "cuda", "mps"):
        raise ConfigError("device", "auto, cpu, cuda or mps", device)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cuda" and not gpus:
        raise ConfigError("device", "cpu or auto, as this machine has no GPU that torch can use", device)
    if device == "cuda" or (device == "auto" and gpus):
        # srun --gpus-per-task=1, or a program around this one: each worker sees its own alone, of whatever number
        sees_its_own = gpus == 1 and (world.source == "slurm" or environment.visible_gpus() == 1)
        if world.local_world_size > gpus and not sees_its_own:
            raise ConfigError(
                "device",
                f"at most as many workers on a node as it has GPUs ({gpus})",
                found=f"{world.local_world_size} workers (this is rank {world.rank})",
                hint="Start fewer workers, or choose the device cpu.",
            )
        chosen = torch.device("cuda", 0 if sees_its_own else world.local_rank)
        torch.cuda.set_device(chosen.index)
        return chosen
    if device == "mps" or (device == "auto" and world.world_size == 1 and torch.backends.mps.is_available()):
        if not torch.backends.mps.is_available() or world.world_size > 1:
            raise ConfigError("device", "cpu or cuda (mps needs an Apple GPU, and one worker)", device)
        return torch.device("mps")
    return torch.device("cpu")
