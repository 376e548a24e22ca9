"""Refuses programs that use mpi4py under a launcher that is not MPI's: each worker would be a job
of one rank.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import Any

from ...environment import find_world, records_dir
from ...errors import LockstepError
from ...flight_recorder import jobs
from ...watchdog.call_sites import is_internal, is_library

_MODULE = "mpi4py.MPI"


def install() -> None:
    """Let the use of `MPI.COMM_WORLD` by the program's own code be an error, where it has one rank
    and the job several.

    Libraries may import mpi4py and use it, as they do in a program of one process, which is noted;
    so may Lockstep.
    """
    if _MODULE not in sys.modules and not any(
        isinstance(finder, _Finder) for finder in sys.meta_path
    ):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds `mpi4py.MPI` as the other finders do, and watches it once it is imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target) if finder is not self else None
            if spec is not None and spec.loader is not None:
                spec.loader = _WatchingLoader(spec.loader)
                return spec
        return None


class _WatchingLoader(Loader):
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._inner.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        if module.__dict__["COMM_WORLD"].Get_size() == 1:
            module.__class__ = _SingletonModule


class _SingletonModule(ModuleType):
    """The module `mpi4py.MPI` of a process that MPI has not started."""

    @property
    def COMM_WORLD(self) -> Any:  # noqa: N802 - mpi4py's name
        """The communicator of all ranks, which is this process alone."""
        world = find_world()
        file = _calling_file(sys._getframe(1))
        if world.world_size > 1 and file and not is_internal(file):
            size = world.world_size
            words = " ".join(sys.argv)
            where = f"MPI.COMM_WORLD has one rank in each of the {size} workers"
            cure = (
                f"`mpiexec -n {size} python {words}` starts an MPI job, whose ranks "
                "lockstep.init() finds"
            )
            if not is_library(file):
                raise LockstepError(
                    f"the program uses mpi4py, but its launcher starts no MPI job: {where}. "
                    f"{cure}. Without MPI, use lockstep.init() or torch.distributed."
                )
            if world.rank == 0 and not self.__dict__.get("_lockstep_said"):
                self.__dict__["_lockstep_said"] = True
                with suppress(OSError):  # the launcher is gone, or the disk is full
                    jobs.write_message(records_dir(), f"note: {file} uses mpi4py: {where}. {cure}.")
        return self.__dict__["COMM_WORLD"]


def _calling_file(frame: FrameType | None) -> str:
    """Return the file of the first frame that does not belong to the import system; "" without
    one.
    """
    while frame is not None and frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return "" if frame is None else frame.f_code.co_filename
