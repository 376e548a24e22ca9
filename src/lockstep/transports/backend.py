"""Registers Lockstep's backends with torch.distributed, as soon as it is imported, without
importing it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_C10D = "torch.distributed.distributed_c10d"


def register() -> None:
    """Register "shm" and "mpi4py" for `init_process_group` and `new_group`, now or when torch is
    imported.
    """
    if hasattr(sys.modules.get(_C10D), "Backend"):
        _register_with(sys.modules[_C10D])
    elif not any(isinstance(finder, _ImportHook) for finder in sys.meta_path):
        sys.meta_path.insert(0, _ImportHook())


def _register_with(c10d: ModuleType) -> None:
    if hasattr(c10d, "Backend") and not hasattr(c10d.Backend, "SHM"):
        c10d.Backend.register_backend("shm", _make_shm, extended_api=True, devices=["cpu"])
        # not "mpi": torch reserves that name for an MPI that it is built with, and never looks for
        # a plug-in
        c10d.Backend.register_backend("mpi4py", _make_mpi, extended_api=True, devices=["cpu"])
        c10d.register_rendezvous_handler("mpi4py", _mpi_rendezvous)
        _replace(c10d, "batch_isend_irecv", _coalescing)


def _replace(c10d: ModuleType, name: str, make: Callable[[ModuleType, Any], Any]) -> None:
    """Replace a function by what `make` returns for it, also where it was imported from `c10d` by
    its name.
    """
    old = getattr(c10d, name, None)
    if old is None:
        return
    new = make(c10d, old)
    for module in [c10d, *sys.modules.values()]:
        if getattr(module, "__dict__", {}).get(name) is old:
            setattr(module, name, new)


def _coalescing(c10d: Any, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return `batch_isend_irecv` for groups that are written in Python as well.

    torch passes messages to the backend as one batch only where the group is of c10d's own class.
    NCCL runs one message after the other otherwise, so that two ranks that send to each other wait
    for ever. A group whose method `coalesces(device)` returns True gets them as one batch here.
    """

    @functools.wraps(original)
    def batch_isend_irecv(p2p_op_list: Any) -> Any:
        c10d._check_p2p_op_list(p2p_op_list)
        group = p2p_op_list[0].group or c10d._get_default_group()
        device = p2p_op_list[0].tensor.device
        coalesces = getattr(group, "coalesces", None)
        if coalesces is None or not coalesces(device):
            return original(p2p_op_list)
        with c10d._coalescing_manager(group, device, async_ops=True) as manager:
            for operation in p2p_op_list:
                peer = {
                    "group_dst" if operation.op is c10d.isend else "group_src": operation.group_peer
                }
                operation.op(operation.tensor, group=operation.group, tag=operation.tag, **peer)
        return manager.works

    return batch_isend_irecv


def _make_shm(group_options: Any, options: Any) -> Any:
    from .creation import make_shm_group

    return make_shm_group(group_options, options)


def _make_mpi(group_options: Any, options: Any) -> Any:
    from .mpi.process_group import make_mpi_group

    return make_mpi_group(group_options, options)


def _mpi_rendezvous(url: str, **options: Any) -> Any:
    from .mpi.rendezvous import rendezvous_handler

    return rendezvous_handler(url, **options)


class _ImportHook(MetaPathFinder):
    """Lets other finders find `torch.distributed`, and registers the backends once it has been
    imported.

    `import lockstep` must not import torch: `lockstep --help` is there long before torch would be
    imported.
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
                    spec.loader = _NotifyingLoader(spec.loader, self._finish)
                return spec
        return None

    def _finish(self, module: ModuleType) -> None:
        # only now: find_spec may have been called without an import, or the import may have failed
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        _register_with(module)


class _NotifyingLoader(Loader):
    """Wraps another loader, and calls `then` when the module has been executed."""

    def __init__(self, loader: Loader, then: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._then = then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader  # so that the module's source is found as usual
        self._loader.exec_module(module)
        self._then(module)
