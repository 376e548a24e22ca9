"""Makes Lockstep's process groups known to torch.distributed, as soon as there is one, without importing it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["register"]

_C10D = "torch.distributed.distributed_c10d"


def register() -> None:
    """Let `init_process_group` and `new_group` know "shm" and "mpi4py", now or when torch is imported."""
    if hasattr(sys.modules.get(_C10D), "Backend"):
        _tell(sys.modules[_C10D])
    elif not any(isinstance(finder, _WhenImported) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WhenImported())


def _tell(c10d: ModuleType) -> None:
    if hasattr(c10d, "Backend") and not hasattr(c10d.Backend, "SHM"):
        c10d.Backend.register_backend("shm", _make_shm, extended_api=True, devices=["cpu"])
        # not "mpi": torch keeps that name for an MPI that it is built with, and never asks a plug-in for it
        c10d.Backend.register_backend("mpi4py", _make_mpi, extended_api=True, devices=["cpu"])
        c10d.register_rendezvous_handler("mpi4py", _meet_over_mpi)
        _replace(c10d, "batch_isend_irecv", _together)


def _replace(c10d: ModuleType, name: str, make: Callable[[ModuleType, Any], Any]) -> None:
    """Put what `make` makes of a function in its place, also where it was imported from `c10d` by its name."""
    old = getattr(c10d, name, None)
    if old is None:
        return
    new = make(c10d, old)
    for module in [c10d, *sys.modules.values()]:
        if getattr(module, "__dict__", {}).get(name) is old:
            setattr(module, name, new)


def _together(c10d: Any, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`batch_isend_irecv` for groups that are written in Python as well.

    torch gives messages to the backend as one only where the group is c10d's own class itself. NCCL carries out one
    message after the other otherwise, so that two ranks that send to each other wait for ever. A group that says by
    its method `coalesces(device)` that its backend there needs it gets them as one here.
    """

    @functools.wraps(original)
    def batch_isend_irecv(p2p_op_list: Any) -> Any:
        c10d._check_p2p_op_list(p2p_op_list)
        group, device = p2p_op_list[0].group or c10d._get_default_group(), p2p_op_list[0].tensor.device
        coalesces = getattr(group, "coalesces", None)
        if coalesces is None or not coalesces(device):
            return original(p2p_op_list)
        with c10d._coalescing_manager(group, device, async_ops=True) as manager:
            for each in p2p_op_list:
                peer = {"group_dst" if each.op is c10d.isend else "group_src": each.group_peer}
                each.op(each.tensor, group=each.group, tag=each.tag, **peer)
        return manager.works

    return batch_isend_irecv


def _make_shm(given: Any, options: Any) -> Any:
    from .make import make_shm_group

    return make_shm_group(given, options)


def _make_mpi(given: Any, options: Any) -> Any:
    from .mpi.make import make_mpi_group

    return make_mpi_group(given, options)


def _meet_over_mpi(url: str, **options: Any) -> Any:
    from .mpi.meeting import meet

    return meet(url, **options)


class _WhenImported(MetaPathFinder):
    """Lets the others find the module that it waits for, and tells it about the backends once it has run.

    `import lockstep` must not import torch: the command answers `--help` long before torch would be there.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _C10D:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Telling(spec.loader, self._finish)
                return spec
        return None

    def _finish(self, module: ModuleType) -> None:
        # only now: somebody may have asked for the module without importing it, or its import may have failed
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        _tell(module)


class _Telling(Loader):
    """Does what another loader does, and something more when the module has run."""

    def __init__(self, loader: Loader, then: Callable[[ModuleType], None]) -> None:
        self._loader, self._then = loader, then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader  # whoever looks for the module's source finds it as ever
        self._loader.exec_module(module)
        self._then(module)
