"""Parts of c10d: names that it does not declare, its options' time limits, and its backends as
groups of their own.
"""

# torch's stubs lack some of the names of torch.distributed
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, PrefixStore, Store

__all__ = ["AllgatherOptions", "PrefixStore", "Store", "backend_as_group", "timeout_of"]


def backend_as_group(backend: Any, store: Store, device: str) -> dist.ProcessGroup:
    """Return `backend` as a process group for tensors on `device`.

    A backend has only some of the methods that c10d calls on a group; c10d's own group class
    translates the others.

    Args:
        backend: one of c10d's, or a plug-in's; a process group is returned unchanged.
        store: of its rendezvous.
        device: a device's type, such as "cpu".
    """
    if isinstance(backend, dist.ProcessGroup):
        return backend
    kind = getattr(
        dist.ProcessGroup.BackendType, backend.name().upper(), dist.ProcessGroup.BackendType.CUSTOM
    )
    group = dist.ProcessGroup(store, backend.rank(), backend.size())
    group._set_default_backend(kind)
    group._register_backend(torch.device(device), kind, backend)
    return group


def timeout_of(opts: Any) -> float | None:
    """Return the time limit in c10d's options of a call, in seconds, if they have one."""
    seconds: float = opts.timeout.total_seconds() if opts is not None else 0.0
    return seconds if seconds > 0 else None
