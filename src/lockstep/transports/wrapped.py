"""One of torch.distributed's backends as a process group of its own."""

# torch's stubs lack some of the names of torch.distributed
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .c10d import Store

__all__ = ["as_group"]


def as_group(backend: Any, store: Store, device: str) -> dist.ProcessGroup:
    """`backend` as a group that carries what is on `device`.

    A backend knows only some of the names by which c10d asks a group; c10d's own group knows how to ask it.

    Args:
        backend: one of c10d's, or a plug-in's; a process group is returned as it is.
        store: where its ranks have met.
        device: a device's type, such as "cpu".
    """
    if isinstance(backend, dist.ProcessGroup):
        return backend
    kind = getattr(dist.ProcessGroup.BackendType, backend.name().upper(), dist.ProcessGroup.BackendType.CUSTOM)
    group = dist.ProcessGroup(store, backend.rank(), backend.size())
    group._set_default_backend(kind)
    group._register_backend(torch.device(device), kind, backend)
    return group
