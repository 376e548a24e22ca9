"""Groups such as "cpu:shm,cuda:nccl": tensors that are not on the CPU go to the backend of their device."""

# torch's stubs lack some of the names of torch.distributed
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..errors import ConfigError
from .c10d import PrefixStore
from .shm.arguments import NotOnCPUError
from .wrapped import as_group

__all__ = ["NAMES", "by_device"]

Group = TypeVar("Group", bound=type[dist.ProcessGroup])

# c10d's names for what can be asked of a group; some have two, as torch renamed them
NAMES = (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "gather", "scatter", "send", "recv", "recv_anysource"),
    *("allgather", "allgather_coalesced", "all_gather_single", "_allgather_base"),
    *("all_gather_single_coalesced", "allgather_into_tensor_coalesced"),
    *("reduce_scatter", "reduce_scatter_single", "_reduce_scatter_base"),
    *("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
    *("alltoall", "all_to_all_single", "alltoall_base"),
)


def by_device(group: Group) -> Group:
    """Let the methods of `group`, a class for the CPU, hand on what is on another device.

    torch.distributed gives up its own table of backends for a group that is written in Python, so the group keeps
    one: a backend is made when its first tensor comes, which is at the same call on every rank.
    """
    for name in NAMES:
        setattr(group, name, _or_elsewhere(name, getattr(group, name)))
    for name in ("shutdown", "abort"):
        setattr(group, name, _and_elsewhere(name, getattr(group, name)))
    return group


def _or_elsewhere(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except NotOnCPUError as found:
            backend = _backend(self, found.device)
        return getattr(backend, name)(*args, **kwargs)

    return call


def _and_elsewhere(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: dist.ProcessGroup) -> None:
        method(self)
        for backend in self.__dict__.get("_elsewhere", {}).values():
            getattr(backend, name)()

    return call


def _backend(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    made: dict[str, dist.ProcessGroup] = group.__dict__.setdefault("_elsewhere", {})
    if device.type not in made:
        config = dist.BackendConfig(dist.Backend(dist.get_backend_config(group)))
        name = config.get_device_backend_map().get(device.type)
        own = getattr(group, "backend", "shm")
        if name in (None, own):
            raise ConfigError(
                "tensor",
                f"one on the CPU, which is what {own} carries",
                got=str(device),
                hint=f'Make the group with "cpu:{own},{device.type}:..." to name a backend for it.',
            )
        made[device.type] = _make(group, str(name), device)
    return made[device.type]


def _make(group: Any, name: str, device: torch.device) -> dist.ProcessGroup:
    store, place = PrefixStore(f"elsewhere/{device.type}", group.store), (group.rank(), group.size())
    plugin = dist.Backend._plugins.get(name.upper())
    backend: Any
    if name == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = group.timeout
        backend = dist.ProcessGroupNCCL(store, *place, options)
    elif name == "gloo":
        backend = dist.ProcessGroupGloo(store, *place, group.timeout)
    elif plugin is not None and not plugin.extended_api:
        backend = plugin.creator_fn(store, *place, group.timeout)
    else:
        raise ConfigError("backend", "nccl, gloo or a plain plug-in beside the one for the CPU", name)
    return as_group(backend, store, device.type)
