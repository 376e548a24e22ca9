"""Beginning and end of a job, this process's place in it, and what Horovod can be asked about itself."""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from typing import Any

from lockstep.errors import ConfigError

from ..engine import job
from .process_sets import (
    ProcessSet,
    _get_process_set_ids_and_ranks,  # noqa: F401, which some programs ask this module for
    add_process_set,
    forget_process_sets,
)
from .timeline import begin_timeline, end_timeline

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


def init(comm: Any = None, process_sets: Sequence[ProcessSet | Sequence[int]] | str | None = None) -> None:
    """Join the job that this process belongs to; alone, it is a job of one rank. Nothing, when it has been called.

    Args:
        comm: a list of the ranks that form the job, this one among them, or a communicator of mpi4py; all when None.
        process_sets: sets to be made at once; the same on all ranks. Others can always be added later, so that
            "dynamic" changes nothing.

    Raises:
        ConfigError: a ValueError, for sets that are there twice, and other wrong arguments.
    """
    if is_initialized():
        return
    if isinstance(process_sets, str) and process_sets != "dynamic":
        raise ConfigError("process_sets", 'a list of process sets, "dynamic" or None', process_sets)
    job.open_job(job.find_ranks(comm))
    atexit.register(shutdown)
    try:
        begin_timeline()
        for each in process_sets if process_sets and not isinstance(process_sets, str) else ():
            add_process_set(each)
    except BaseException:
        shutdown()
        raise


def shutdown() -> None:
    """Leave the job. What this rank or others still wait for from it ends with an error."""
    end_timeline()
    forget_process_sets()
    job.shut_down()
    atexit.unregister(shutdown)


def rank() -> int:
    """This process's number in the job. Raises a ValueError before `init`, as do the others."""
    return job.current("rank").comm.rank


def size() -> int:
    """The number of ranks."""
    return job.current("size").comm.size


def local_rank() -> int:
    """This rank's number on its machine."""
    return job.current("local_rank").comm.local_rank


def local_size() -> int:
    """The number of ranks on this machine."""
    return job.current("local_size").comm.local_size


def cross_rank() -> int:
    """This machine's number among those that have a rank with this local rank."""
    found = job.current("cross_rank")
    return found.cross.index(found.comm.node)


def cross_size() -> int:
    """The number of machines that have a rank with this local rank."""
    return len(job.current("cross_size").cross)


def is_homogeneous() -> bool:
    """Whether all machines have as many ranks."""
    return job.current("is_homogeneous").is_homogeneous


def mpi_threads_supported() -> bool:
    """Whether MPI can be used from several threads.

    Raises:
        ConfigError: as there is no MPI below; a ValueError.
    """
    job.current("mpi_threads_supported")
    raise ConfigError("mpi_threads_supported", "a job on MPI", found="one on torch.distributed's process groups")


def mpi_enabled() -> bool:
    """No: process groups carry everything, also under mpiexec."""
    return False


def mpi_built() -> bool:
    """No."""
    return False


def gloo_enabled() -> bool:
    """Yes: what Horovod on Gloo does, this does."""
    return True


def gloo_built() -> bool:
    """Yes."""
    return True


def nccl_built() -> int:
    """The version of NCCL that torch has, as one number (2.21.5 is 22105); 0 without."""
    import torch

    if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        return 0
    version: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    major, minor, patch = version[:3]
    return int(major) * 10_000 + int(minor) * 100 + int(patch)


def ddl_built() -> bool:
    """No."""
    return False


def ccl_built() -> bool:
    """No."""
    return False


def cuda_built() -> bool:
    """Whether torch is built with CUDA."""
    import torch

    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether torch is built with ROCm."""
    import torch

    return torch.version.hip is not None
