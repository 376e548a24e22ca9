"""mpi4py, which is optional and starts MPI when it is imported: so only when a group is made."""

from __future__ import annotations

from functools import cache
from typing import Any

from ...errors import ConfigError

__all__ = ["load"]

_LEVELS = ("single", "funneled", "serialized")


@cache
def load() -> Any:
    """The module `mpi4py.MPI`, with MPI started.

    Raises:
        ConfigError: mpi4py or an MPI is not installed, or MPI was started for one thread alone.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # the second when there is no MPI library for it to load
        raise ConfigError(
            "backend",
            "one whose packages are installed",
            found=f"mpi4py, which cannot be imported ({error})",
            hint="Install it with an MPI: pip install 'lockstep-train[mpi]'.",
        ) from error
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise ConfigError(
            "mpi4py.rc.thread_level",
            "multiple, as operations go on beside the program",
            _LEVELS[[MPI.THREAD_SINGLE, MPI.THREAD_FUNNELED, MPI.THREAD_SERIALIZED].index(MPI.Query_thread())],
            "Leave mpi4py.rc as it is, and take an MPI that is built for threads.",
        )
    return MPI
