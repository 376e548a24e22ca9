"""Assertions for tests of distributed training: the same at any number of workers, resumed, after
the loss of a worker.

They run functions and programs, with or without Lockstep's `Trainer`, in worker processes of this
host. With pytest, Lockstep is a plugin too: the fixture ``lockstep_golden``, the marker
``lockstep_workers``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..registry import import_object

if TYPE_CHECKING:
    from .assertions import resumes, same_at, survives
    from .golden import Golden

__all__ = ["Golden", "resumes", "same_at", "survives"]

_MODULES = {
    "Golden": "golden",
    "resumes": "assertions",
    "same_at": "assertions",
    "survives": "assertions",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: pytest loads the plugin in this package, which
    needs no PyTorch.
    """
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = import_object(name, f"{__name__}.{_MODULES[name]}:{name}")
    globals()[name] = value
    return value
