"""Makes Lockstep's backends known to torch.distributed, as soon as there is one, without importing it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

__all__ = ["register"]

_C10D = "torch.distributed.distributed_c10d"


def register() -> None:
    """Let `init_process_group` and `new_group` know the backend "shm", now or when torch is imported."""
    if _C10D in sys.modules:
        _tell(sys.modules[_C10D])
    elif not any(isinstance(finder, _WhenImported) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WhenImported())


def _tell(c10d: ModuleType) -> None:
    if hasattr(c10d, "Backend") and not hasattr(c10d.Backend, "SHM"):
        c10d.Backend.register_backend("shm", _make_shm, extended_api=True, devices=["cpu"])


def _make_shm(given: Any, options: Any) -> Any:
    from .make import make_shm_group

    return make_shm_group(given, options)


class _WhenImported(MetaPathFinder):
    """Steps aside at the import that it waits for, and tells the module about the backends once it has run.

    `import lockstep` must not import torch: the command answers `--help` long before torch would be there.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _C10D:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_tell(module: ModuleType) -> None:
                run(module)
                _tell(module)

            spec.loader.exec_module = run_and_tell  # type: ignore[method-assign]
        return spec
