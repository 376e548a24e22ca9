"""The workers of a job as one communicator, and `init()`, which finds it."""

from __future__ import annotations

import atexit
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from . import environment
from .errors import ConfigError, WorkerError
from .topology import World

__all__ = ["Communicator", "init", "pick_device"]

T = TypeVar("T")


class Communicator:
    """All workers of a job, seen from one of them.

    Args:
        world: this worker's place.
        device: where this worker computes.
        group: the process group of all workers; None where the worker is alone, and then every verb does the
            obvious without any communication.
    """

    def __init__(self, world: World, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self.world, self.device, self.group = replace(world, device=str(device)), device, group

    def __repr__(self) -> str:
        return f"Communicator(rank={self.rank}, size={self.size}, device={str(self.device)!r})"

    @property
    def rank(self) -> int:
        """This worker's number, 0 ≤ rank < size."""
        return self.world.rank

    @property
    def size(self) -> int:
        """The number of workers."""
        return self.world.world_size

    def allreduce_async(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start summing `tensor` over all workers, in place; calling what is returned waits and gives the sum.

        Every worker must call it in the same order with the same shape and dtype.
        """
        if self.size == 1:
            return lambda: tensor
        work = dist.all_reduce(tensor, group=self.group, async_op=True)

        def wait() -> torch.Tensor:
            assert work is not None
            work.wait()
            return tensor

        return wait

    def allreduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` over all workers, in place, and return it."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
        """Copy `tensor` of rank `root` into every worker's `tensor`, in place, and return it."""
        if self.size > 1:
            dist.broadcast(tensor, src=root, group=self.group)
        return tensor

    def broadcast_object(self, value: T | None, root: int = 0) -> T:
        """What rank `root` passed, on every worker; `value` of the others is ignored. It must be picklable."""
        box: list[Any] = [value]
        if self.size > 1:
            dist.broadcast_object_list(box, src=root, group=self.group, device=self._object_device())
        result: T = box[0]
        return result

    def allgather_object(self, value: T) -> list[T]:
        """Every worker's `value`, in rank order, on every worker. It must be picklable."""
        if self.size == 1:
            return [value]
        box: list[Any] = [None] * self.size
        dist.all_gather_object(box, value, group=self.group)
        return box

    def barrier(self) -> None:
        """Return when every worker has come here."""
        if self.size > 1:
            dist.barrier(group=self.group)

    def on_rank0(self, fn: Callable[[], T]) -> T:
        """Run `fn` on rank 0 alone and return its result, which must be picklable, on every worker.

        An exception on rank 0 is raised on every worker, so that none waits for a result that never comes: itself on
        rank 0, and a copy on the others or, where it cannot be sent or would end a program without a word, a
        WorkerError with its name and text.
        """
        if self.size == 1:
            return fn()
        sent: bytes | None = None
        raised: BaseException | None = None
        if self.rank == 0:
            try:
                sent = pickle.dumps((True, fn()))
            except BaseException as error:
                raised, sent = error, _error_to_send(error)
        good, value = pickle.loads(self.broadcast_object(sent))
        if raised is not None:
            raise raised
        if not good:
            raise value
        result: T = value
        return result

    @contextmanager
    def first(self) -> Iterator[None]:
        """Run the body on rank 0, and when it has ended there, on the others (to make a folder, to download)."""
        if self.rank != 0:
            self.barrier()
        try:
            yield
        finally:
            if self.rank == 0:
                self.barrier()

    def _object_device(self) -> torch.device | None:
        # NCCL alone cannot carry objects on the CPU; Lockstep's own groups have another backend beside it.
        return self.device if dist.get_backend(self.group) == "nccl" else None


def _error_to_send(error: BaseException) -> bytes:
    """`error` as others can read it: many exceptions come back with another text, or not at all."""
    with suppress(Exception):
        sent = pickle.dumps((False, error))
        again = pickle.loads(sent)[1]
        # SystemExit and KeyboardInterrupt speak to the program that they are raised in.
        if isinstance(error, Exception) and type(again) is type(error) and str(again) == str(error):
            return sent
    return pickle.dumps((False, WorkerError(0, type(error).__name__, str(error))))


# One process is one worker of one job, so there is one communicator for all workers; torch.distributed holds its
# default process group in the same way.
_default: Communicator | None = None


def init(device: str = "auto", timeout: timedelta | None = None) -> Communicator:
    """Find the job that this process belongs to, and join it.

    Alone (``python train.py``) nothing is set up. Under a launcher the process group is made: "shm" for what lives on
    the CPU (shared memory inside a machine, Gloo between machines), NCCL for what lives on GPUs. One that the program
    has already made is used as it is. A second call returns the same communicator.

    Args:
        device: "auto" (a GPU where there is one), "cpu", "cuda" (the GPU of this worker's local rank) or "mps".
        timeout: how long a collective may wait; PyTorch's default when None.

    Raises:
        ConfigError: for a device that is not there, or an incomplete environment.
    """
    global _default
    if _default is not None and _still_valid(_default):
        if device not in ("auto", _default.device.type):
            raise ConfigError("device", f"{_default.device.type}, as in the first call of init()", device)
        return _default
    if dist.is_initialized():
        world = _world_of_group()
        _default = Communicator(world, pick_device(device, world), dist.group.WORLD)
        return _default
    world = environment.find_world()
    where = pick_device(device, world)
    group = _join(world, where, timeout) if environment.is_launched() else None
    _default = Communicator(world, where, group)
    return _default


def _still_valid(found: Communicator) -> bool:
    """Whether the job is still the one that `found` belongs to: a program may destroy its group and make another."""
    if dist.is_initialized():
        return found.group is dist.group.WORLD
    return found.group is None and found.world == replace(environment.find_world(), device=found.world.device)


def _world_of_group() -> World:
    found, rank, size = environment.find_world(), dist.get_rank(), dist.get_world_size()
    if (found.rank, found.world_size) == (rank, size):
        return found
    return World(rank, size, rank, size, source="torch.distributed")


def _join(world: World, device: torch.device, timeout: timedelta | None) -> dist.ProcessGroup | None:
    if not environment.rendezvous_is_set():
        raise ConfigError(
            "environment",
            "MASTER_ADDR and MASTER_PORT beside RANK and WORLD_SIZE",
            "neither or only one of them",
            "Start the workers with a launcher such as torchrun, or unset RANK and WORLD_SIZE to run alone.",
        )
    # shared memory is opened through /proc, which only Linux has
    carrier = "shm" if sys.platform == "linux" else "gloo"
    backend = f"cpu:{carrier},cuda:nccl" if device.type == "cuda" else carrier
    dist.init_process_group(backend, rank=world.rank, world_size=world.world_size, timeout=timeout)
    atexit.register(_leave)
    return dist.group.WORLD


def _leave() -> None:
    """Give the process group back when the program ends."""
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
        if world.local_world_size > gpus:
            raise ConfigError(
                "device",
                f"at most as many workers on a node as it has GPUs ({gpus})",
                f"{world.local_world_size} workers (this is rank {world.rank})",
                "Start fewer workers, or choose the device cpu.",
            )
        torch.cuda.set_device(world.local_rank)
        return torch.device("cuda", world.local_rank)
    if device == "mps" or (device == "auto" and world.world_size == 1 and torch.backends.mps.is_available()):
        if not torch.backends.mps.is_available() or world.world_size > 1:
            raise ConfigError("device", "cpu or cuda (mps needs an Apple GPU, and one worker)", device)
        return torch.device("mps")
    return torch.device("cpu")
