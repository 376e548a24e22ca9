"""Groups such as "cpu:shm,cuda:nccl": calls with tensors on another device go to the backend for
that device.
"""

# torch's stubs lack some of the names of torch.distributed
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..errors import ConfigError
from .runtime.c10d import PrefixStore, backend_as_group
from .runtime.tensor_arguments import NotOnCPUError

Group = TypeVar("Group", bound=type[dist.ProcessGroup])

# c10d's names for the operations of a group; some have two, as torch renamed them
OPERATIONS = (
    *(
        "allreduce",
        "allreduce_coalesced",
        "reduce",
        "broadcast",
        "gather",
        "scatter",
        "send",
        "recv",
        "recv_anysource",
    ),
    *("allgather", "allgather_coalesced", "all_gather_single", "_allgather_base"),
    *("all_gather_single_coalesced", "allgather_into_tensor_coalesced"),
    *("reduce_scatter", "reduce_scatter_single", "_reduce_scatter_base"),
    *("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
    *("alltoall", "all_to_all_single", "alltoall_base"),
)


def dispatch_by_device(group: Group) -> Group:
    """Make the methods of `group`, a class for the CPU, pass calls with tensors on another device
    to its backend.

    torch.distributed does not use its own table of backends for a group that is written in Python,
    so the group keeps one: a backend is made for its first tensor, which is at the same call on
    every rank.

    A method that the class has wrapped by `or_device_backend` in part is left as it is.
    """
    for name in OPERATIONS:
        if name not in getattr(group, "dispatches", ()):
            setattr(group, name, or_device_backend(name, getattr(group, name)))
    for name in ("shutdown", "abort"):
        setattr(group, name, _and_device_backends(name, getattr(group, name)))
    for name in ("_start_coalescing", "_end_coalescing", "_get_backend"):
        setattr(group, name, _at_device_backend(name, getattr(group, name)))
    setattr(group, "coalesces", _coalesces)  # noqa: B010 - no name of c10d's class
    return group


def or_device_backend(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return `method` of a group, with calls for another device passed on to its backend."""

    @functools.wraps(method)
    def call(self: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except NotOnCPUError as error:
            device = error.device
        return getattr(_backend(self, device), name)(*args, **kwargs)

    return call


def _and_device_backends(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: dist.ProcessGroup) -> None:
        method(self)
        for backend in self.__dict__.get("_device_backends", {}).values():
            getattr(backend, name)()

    return call


def _at_device_backend(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: dist.ProcessGroup, device: torch.device | None = None) -> Any:
        if device is None or device.type == "cpu":
            return method(self, device)
        if (backend := _known_backend(self, device)) is None:
            return method(self, device)
        return _inner(backend, device) if name == "_get_backend" else getattr(backend, name)(device)

    return call


def _known_backend(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup | None:
    """Return the backend for `device`; None where there is none, or it has not been made and
    `device` has no index.

    A call that asks for a type of device, without an index, may be about to destroy the group; none
    is made for that.
    """
    backends: dict[str, dist.ProcessGroup] = group.__dict__.get("_device_backends", {})
    known = device.type in backends or (
        device.index is not None and _name_of_backend(group, device) is not None
    )
    return _backend(group, device) if known else None


def _coalesces(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether messages on `device` that are to run concurrently have to be passed to the
    group as one batch.
    """
    if device.type == "cpu":
        return bool(group.supports_coalescing)
    return bool(getattr(_inner(_backend(group, device), device), "supports_coalescing", False))


def _inner(backend: dist.ProcessGroup, device: torch.device) -> Any:
    """Return the backend inside a group made by `backend_as_group`; a group written in Python is
    its own backend.
    """
    return backend._get_backend(device) if type(backend) is dist.ProcessGroup else backend


def _name_of_backend(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Return the name of the backend for `device` that the group was made with, if it is not the
    group's own.
    """
    try:
        config = dist.BackendConfig(dist.Backend(dist.get_backend_config(group)))
    except (RuntimeError, ValueError, TypeError):  # not among c10d's groups yet, or no longer
        return None
    name = config.get_device_backend_map().get(device.type)
    return None if name in (None, getattr(group, "backend", "shm")) else str(name)


def _backend(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    backends: dict[str, dist.ProcessGroup] = group.__dict__.setdefault("_device_backends", {})
    if device.type not in backends:
        name = _name_of_backend(group, device)
        cpu_backend = getattr(group, "backend", "shm")
        if name is None:
            raise ConfigError(
                "tensor",
                f"one on the CPU, which {cpu_backend} is for",
                got=str(device),
                hint=f'Make the group with "cpu:{cpu_backend},{device.type}:..." to name a backend '
                "for it.",
            )
        backends[device.type] = _make(group, name, device)
    return backends[device.type]


def device_options(options: Any, cpu_backend: str) -> Any:
    """Return a group's `pg_options` if they are those of the backend for another device, and not
    its `cpu_backend`.

    Raises:
        ConfigError: they are of no backend that takes options.
    """
    nccl = getattr(dist, "ProcessGroupNCCL", None)
    if options is None or (nccl is not None and isinstance(options, nccl.Options)):
        return options
    raise ConfigError(
        "pg_options",
        f"{cpu_backend}, or those of NCCL for the GPUs beside it",
        found=type(options).__name__,
    )


def _make(group: Any, name: str, device: torch.device) -> dist.ProcessGroup:
    store = PrefixStore(f"device/{device.type}", group.store)
    rank_and_size = (group.rank(), group.size())
    plugin = dist.Backend._plugins.get(name.upper())
    backend: Any
    if name == "nccl":
        options = getattr(group, "device_options", None) or dist.ProcessGroupNCCL.Options()
        # as torch sets them for a group of its own
        options._timeout = group.timeout
        options.group_name = group.group_name
        options.global_ranks_in_group = dist.get_process_group_ranks(group)
        backend = dist.ProcessGroupNCCL(store, *rank_and_size, options)
    elif name == "gloo":
        backend = dist.ProcessGroupGloo(store, *rank_and_size, group.timeout)
    elif plugin is not None and not plugin.extended_api:
        backend = plugin.creator_fn(store, *rank_and_size, group.timeout)
    else:
        raise ConfigError(
            "backend", "nccl, gloo or a plain plug-in beside the one for the CPU", name
        )
    return backend_as_group(backend, store, device.type)
