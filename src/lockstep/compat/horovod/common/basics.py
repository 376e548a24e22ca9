"""Starts and ends a job; ranks and sizes; what Horovod reports that it was built with."""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from typing import Any

from lockstep.errors import ConfigError
from lockstep.flight_recorder import named

from ..engine import job
from .process_sets import (
    ProcessSet,
    _get_process_set_ids_and_ranks,  # noqa: F401 - some programs import it from this module
    add_process_set,
    forget_process_sets,
)
from .timeline import close_timeline, start_timeline_from_environment

__all__ = [
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "rocm_built",
    "shutdown",
    "size",
]

is_initialized = job.is_initialized


def init(
    comm: Any = None, process_sets: Sequence[ProcessSet | Sequence[int]] | str | None = None
) -> None:
    """Join the job of this process, or start one of a single rank; does nothing after the first
    call.

    Args:
        comm: a list of the ranks that form the job, this one among them, or a communicator of
            mpi4py; None for all ranks.
        process_sets: process sets to add, the same on all ranks. "dynamic" changes nothing, as
            process sets can always be added later.

    Raises:
        ConfigError: a ValueError, for duplicate process sets and other invalid arguments.
    """
    if is_initialized():
        return
    if isinstance(process_sets, str) and process_sets != "dynamic":
        raise ConfigError("process_sets", 'a list of process sets, "dynamic" or None', process_sets)
    with named("hvd.init"):  # in an elastic job, ranks get here from different places
        job.start(job.create_communicator(comm))
    atexit.register(shutdown)
    try:
        start_timeline_from_environment()
        for process_set in (
            process_sets if process_sets and not isinstance(process_sets, str) else ()
        ):
            add_process_set(process_set)
    except BaseException:
        shutdown()
        raise


def shutdown() -> None:
    """Leave the job. Pending operations of this rank fail, and so do those of other ranks that need
    this rank.
    """
    close_timeline()
    forget_process_sets()
    job.shut_down()
    atexit.unregister(shutdown)


def rank() -> int:
    """Return the rank of this process. This and the following functions raise a ValueError before
    `init`.
    """
    return job.current("rank").comm.rank


def size() -> int:
    """Return the number of ranks."""
    return job.current("size").comm.size


def local_rank() -> int:
    """Return the rank of this process among the ranks of its host."""
    return job.current("local_rank").comm.local_rank


def local_size() -> int:
    """Return the number of ranks on this host."""
    return job.current("local_size").comm.local_size


def cross_rank() -> int:
    """Return the index of this host among the hosts that have a rank with this local rank."""
    current = job.current("cross_rank")
    return current.cross_nodes.index(current.comm.node)


def cross_size() -> int:
    """Return the number of hosts that have a rank with this local rank."""
    return len(job.current("cross_size").cross_nodes)


def is_homogeneous() -> bool:
    """Return whether all hosts have the same number of ranks."""
    return job.current("is_homogeneous").is_homogeneous


def mpi_threads_supported() -> bool:
    """Raise an error: whether MPI supports several threads is not defined without MPI.

    Raises:
        ConfigError: a ValueError, always.
    """
    job.current("mpi_threads_supported")
    raise ConfigError(
        "mpi_threads_supported", "a job on MPI", found="one on torch.distributed's process groups"
    )


def mpi_enabled() -> bool:
    """Return False: operations run on process groups of torch.distributed, also under mpiexec."""
    return False


def mpi_built() -> bool:
    """Return False."""
    return False


def gloo_enabled() -> bool:
    """Return True: all operations that Horovod has on Gloo are supported."""
    return True


def gloo_built() -> bool:
    """Return True."""
    return True


def nccl_built() -> int:
    """Return the version of torch's NCCL as a number (2.21.5 is 22105); 0 without NCCL or a GPU."""
    import torch

    if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        return 0
    version: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    major, minor, patch = version[:3]
    return int(major) * 10_000 + int(minor) * 100 + int(patch)


def ddl_built() -> bool:
    """Return False."""
    return False


def ccl_built() -> bool:
    """Return False."""
    return False


def cuda_built() -> bool:
    """Return whether torch is built with CUDA."""
    import torch

    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Return whether torch is built with ROCm."""
    import torch

    return torch.version.hip is not None
