"""Joins the job that this process belongs to, and leaves it."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
from dataclasses import replace
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle
from typing_extensions import Never

from .. import arguments, bootstrap, devices, environment, messages, other_names, watchdog
from ..errors import ConfigError, unexpected_argument
from ..flight_recorder import recorded_exchanges
from ..flight_recorder.jobs import write_message
from ..messages import Integer
from ..stores import read_message
from ..system.processes import is_alive
from ..topology import World
from ..transports.runtime import host_identity
from ..transports.runtime.c10d import Store
from ..tried_versions import about_untried_torch
from .communicator import Communicator
from .groups import backends_of, world_of

__all__ = ["claim_gpu", "current", "init", "pick_device"]

# One process is one worker of one job, so there is one communicator for all workers;
# torch.distributed holds its default process group in the same way.
_default: Communicator | None = None
_has_noted_torch = False
_first_update: RemovableHandle | None = None  # looks at the first update of an optimizer


_log = logging.getLogger(__name__)

_TRANSPORTS = ("auto", "shm", "gloo", "mpi4py")


def init(
    device: str = "auto",
    timeout: timedelta | None = None,
    transport: str | None = None,
    **unknown: Never,
) -> Communicator:
    """Find the job that this process belongs to, and join it.

    Without a launcher (``python train.py``) nothing is set up. Under one the process group is made:
    "shm" for tensors on the CPU (shared memory inside a host, Gloo between hosts), NCCL for tensors
    on GPUs, and for those on another accelerator the backend that is registered for it. A process
    group that the program has already made is used as it is. A second call returns the same
    communicator.

    Args:
        device: "auto" (an accelerator where there is one), "cpu", or the type of an accelerator
            that torch knows: "cuda", "mps", "xpu", or that of a package, such as "npu". A worker
            takes the device of its local rank, or the only one that it sees. With "cuda", workers
            may share a GPU if the program has made a process group whose backend for GPUs is Gloo;
            NCCL refuses that.
        timeout: how long a collective may wait; PyTorch's default when None.
        transport: the backend for tensors on the CPU: "shm", "gloo", "mpi4py" (over MPI, for
            processes that mpiexec has started), or "auto": "shm" on Linux and "gloo" elsewhere;
            when None, LOCKSTEP_TRANSPORT or "auto".

    Raises:
        ConfigError: for a device or transport that is not available, or an incomplete environment.
        StallError: when the others do not arrive.
        TransportError: when they cannot be reached.
        TypeError: for an argument of another name, such as `backend`.

    Examples:
        >>> import lockstep
        >>> comm = lockstep.init()
        >>> comm.rank, comm.size  # of a process without a launcher
        (0, 1)
    """
    if unknown:
        name = next(iter(unknown))
        raise unexpected_argument(
            "init", name, other_names.INIT.get(name), arguments.keyword_names(init)
        )
    if timeout is not None:
        hint = (
            f"timeout=datetime.timedelta(seconds={timeout}) is {timeout} s."
            if isinstance(timeout, int)
            else ""
        )
        arguments.instance("timeout", timeout, timedelta, "a datetime.timedelta", hint)
    if transport is not None:
        _pick_backend(transport)
    global _default
    if _default is not None and _still_valid(_default):
        if device not in ("auto", _default.device.type):
            raise ConfigError(
                "device", f"{_default.device.type}, as in the first call of init()", device
            )
        return _default
    if dist.is_initialized():
        world = world_of(dist.group.WORLD)
        _note_untried_torch(world)
        shares_gpus = device != "cpu" and backends_of(dist.group.WORLD).get(device) == "gloo"
        where = pick_device(device, world, shares_gpus)
        _prepare_device(where)
        _default = Communicator.at(world, where, dist.group.WORLD)
        if not shares_gpus:
            _check_own_gpu(_default.device, world)
        return _default
    world = environment.find_world()
    _note_untried_torch(world)
    where = pick_device(device, world)
    _prepare_device(where)
    backend = _pick_backend(transport)
    worker = environment.elastic_worker()
    if worker is not None:
        _default = _join_elastic(worker, world, where, backend)
        return _default
    group = _join(world, where, backend, timeout) if environment.is_launched() else None
    _default = Communicator.at(world, where, group)
    if _default.size > 1:
        _watch_first_update(world)
    return _default


def current() -> Communicator | None:
    """Return the communicator that `init` has returned; None if it was not called."""
    return _default


def _prepare_device(device: torch.device) -> None:
    """Set what equal bits need on a device before its first use: cuBLAS reads it when a thread
    first multiplies.
    """
    if device.type == "cuda":
        environment.set_defaults({"CUBLAS_WORKSPACE_CONFIG": devices.CUBLAS_WORKSPACE})


def _still_valid(communicator: Communicator) -> bool:
    """Return whether `communicator` still belongs to the current job: a program may destroy its
    group and make another.
    """
    if environment.elastic_worker() is not None:  # whose group is another one after each loss
        return hasattr(communicator, "client")
    if dist.is_initialized():
        return communicator.group is dist.group.WORLD
    return communicator.group is None and communicator.world == replace(
        environment.find_world(), device=communicator.world.device
    )


def _note_untried_torch(world: World) -> None:
    """Write one line on a torch that Lockstep has not been tried with: on rank 0, once in a
    process.
    """
    global _has_noted_torch
    if world.rank == 0 and not _has_noted_torch:
        _has_noted_torch = True
        line = about_untried_torch(str(torch.__version__))
        if line is not None:
            write_message(None, line)


def _watch_first_update(world: World) -> None:
    """Write a line if an optimizer makes its first update before the workers have exchanged
    anything: each of them then trains a model of its own.
    """
    global _first_update
    if _first_update is not None:
        _first_update.remove()  # of a group that was left
    before = recorded_exchanges()
    if before is None:  # nothing is recorded
        return

    def look(optimizer: Optimizer, *_: object) -> None:
        hook.remove()
        if world.rank == 0 and recorded_exchanges() == before:
            name = type(optimizer).__name__
            _log.warning(
                "an optimizer (%s) makes its first update, and the %d workers have exchanged "
                "nothing: each trains a model of its own, from the batches that it has itself. To "
                "train one model together use lockstep.Trainer, lockstep.prepare, "
                "lockstep.TrainStep or DistributedDataParallel",
                *(name, world.world_size),
            )

    # the hook refers to nothing of the group, whose connections end when the program leaves it
    _first_update = hook = register_optimizer_step_post_hook(look)


def _pick_backend(transport: str | None) -> str:
    """Return torch.distributed's name of the backend for tensors on the CPU."""
    name = transport if transport is not None else environment.transport()
    where = "transport" if transport is not None else "environment variable LOCKSTEP_TRANSPORT"
    arguments.choice(where, name, _TRANSPORTS)
    # shared memory is opened through /proc, which only Linux has
    default = "shm" if sys.platform == "linux" else "gloo"
    return default if name == "auto" else name


def _join(
    world: World, device: torch.device, cpu_backend: str, timeout: timedelta | None
) -> dist.ProcessGroup | None:
    store = bootstrap.open_store(world, timeout, lambda: _store_over_mpi(world, timeout))
    watchdog.install(host_identity.host_key)
    backend = _backends(device, cpu_backend)
    dist.init_process_group(
        backend,
        store=store,
        rank=world.rank,
        world_size=world.world_size,
        timeout=timeout,
        device_id=devices.bound_to(device, backend),
    )
    # Registered last and therefore called first: before torch and the transports clean up.
    atexit.register(_leave)
    _check_own_gpu(device, world)
    return dist.group.WORLD


def _backends(device: torch.device, cpu_backend: str) -> str:
    """Return torch.distributed's name of the backends."""
    device_backend = devices.backend_of(device)
    return (
        cpu_backend
        if device_backend is None
        else f"cpu:{cpu_backend},{device.type}:{device_backend}"
    )


def _join_elastic(
    worker: environment.ElasticWorker, world: World, device: torch.device, cpu_backend: str
) -> Communicator:
    from .elastic_communicator import ElasticCommunicator

    if cpu_backend == "mpi4py":
        raise ConfigError("transport", "shm or gloo in an elastic job", cpu_backend)
    watchdog.install(host_identity.host_key, lasting=True)
    backend = _backends(device, cpu_backend)
    atexit.register(_leave)
    return ElasticCommunicator.join(worker, world, device, backend)


def _check_own_gpu(device: torch.device, world: World) -> None:
    """Check that no other worker of this host uses the same device, where each sees a single one,
    numbered 0.
    """
    if device.type == "cpu" or world.local_world_size == 1 or devices.count(device.type) != 1:
        return
    uuid = devices.uuid_of(device)
    if uuid is not None:
        claim_gpu(distributed_c10d._get_default_store(), world.rank, uuid)


class _GpuClaim(msgspec.Struct, frozen=True):
    """The process that uses a GPU: its host, PID and rank."""

    host: str
    pid: Integer
    rank: int


def claim_gpu(store: Store, rank: int, uuid: str) -> None:
    """Claim a GPU for this process.

    Args:
        store: of the job.
        rank: of this process.
        uuid: of the GPU.

    Raises:
        ConfigError: another rank on this host, which is alive, has claimed it.
        TransportError: what is in the store is damaged.
    """
    mine = _GpuClaim(host_identity.host_key(), os.getpid(), rank)
    key = f"lockstep/gpu/{uuid}"
    text = messages.encode(mine)
    first = read_message(
        store.compare_set(key, "", text), _GpuClaim, f"the rank that uses GPU {uuid}"
    )
    if first.host != mine.host or first.pid == mine.pid:
        return
    if is_alive(first.pid, any_user=False):  # else it is taken over from a rank that has ended
        raise ConfigError(
            "device",
            "a GPU of its own for each worker on a node",
            found=f"GPU {uuid} on rank {first.rank} and on rank {rank}, each of which sees it "
            "alone",
            hint="Set CUDA_VISIBLE_DEVICES by the local rank, start fewer workers, or choose the "
            "device cpu.",
        )
    store.set(key, text)


def _store_over_mpi(world: World, timeout: timedelta | None) -> Store:
    from ..transports.mpi.rendezvous import make_store  # mpi4py is optional

    return make_store(world) if timeout is None else make_store(world, timeout)


def _leave() -> None:
    """Destroy the process group when the program ends."""
    watchdog.report_exit()
    global _default
    _default = None
    if dist.is_initialized():
        gloo = dist.get_backend() == "gloo"
        dist.destroy_process_group()
        if not gloo:
            return
        # Gloo's threads release the last collective's tensor a moment after it was waited for, and
        # need the interpreter for it; one that is too late aborts the process (seen in 3 of 4 runs
        # that ended right after a collective, torch 2.13). There is nothing to wait for, so they
        # get a moment in which no thread holds it.
        time.sleep(0.05)


def pick_device(device: str, world: World, shares_gpus: bool = False) -> torch.device:
    """Return the device on which a worker computes; an accelerator also becomes the current device.

    Args:
        device: as in `init`.
        world: this worker's rank, and those of its host.
        shares_gpus: whether several workers may use the same GPU, which NCCL refuses.

    Raises:
        ConfigError: when this host has no such device, or fewer of them than local workers.
    """
    kind = _checked_kind(device, world)
    if kind in ("cpu", "mps"):
        return torch.device(kind)
    there = devices.count(kind)
    # srun --gpus-per-task=1, or a wrapper around this program: each worker sees only its own device
    sees_own_only = there == 1 and (world.source == "slurm" or environment.visible_gpus() == 1)
    if world.local_world_size > there and not sees_own_only and not shares_gpus:
        raise _too_many_workers(kind, there, world)
    chosen = torch.device(kind, 0 if sees_own_only else world.local_rank % there)
    devices.use(chosen)
    return chosen


def _checked_kind(device: str, world: World) -> str:
    """Return the type of device that is meant, which this host has.

    Raises:
        ConfigError: torch does not know it, or cannot use it here.
    """
    if device == "auto":
        accelerator = devices.accelerator()
        is_for_one = accelerator == "mps"
        return (
            "cpu" if accelerator is None or (is_for_one and world.world_size > 1) else accelerator
        )
    if device == "cpu":
        return device
    if not isinstance(device, str) or not devices.is_known(device):
        is_numbered = devices.is_known(str(device).partition(":")[0])
        hint = (
            "Each worker takes the device of its local rank; for GPUs, CUDA_VISIBLE_DEVICES "
            "chooses among them."
        )
        expected = (
            f"auto, cpu, {', '.join(devices.known_names())} or another accelerator that torch knows"
        )
        raise ConfigError("device", expected, device, hint if is_numbered else "")
    is_there = devices.count(device) > 0
    if device == "mps" and (not is_there or world.world_size > 1):
        raise ConfigError("device", "cpu or cuda (mps needs an Apple GPU, and one worker)", device)
    if not is_there:
        noun = "GPU" if device == "cuda" else "device of this type"
        raise ConfigError(
            "device", f"cpu or auto, as this host has no {noun} that torch can use", device
        )
    return device


def _too_many_workers(kind: str, there: int, world: World) -> ConfigError:
    expected = f"at most as many workers on a node as it has devices of type {kind} ({there})"
    hint = "Start fewer workers, or choose the device cpu."
    if kind == "cuda":
        expected = f"at most as many workers on a node as it has GPUs ({there})"
        hint = (
            "NCCL refuses two workers on one GPU: start fewer workers, or choose the device cpu. "
            "To try several on one GPU, call torch.distributed.init_process_group('gloo') before "
            "lockstep.init('cuda')."
        )
    found = f"{world.local_world_size} workers (this is rank {world.rank})"
    return ConfigError("device", expected, found=found, hint=hint)
