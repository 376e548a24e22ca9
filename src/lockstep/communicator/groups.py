"""Process groups of torch.distributed: a process's `World` in one, its backends and device, and new
groups.
"""

# torch's stubs lack some of the names of torch.distributed
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from .. import devices, environment
from ..topology import World

__all__ = ["backends_of", "device_of", "make_group", "world_among", "world_of"]


def world_of(group: dist.ProcessGroup | None) -> World:
    """Return the `World` of this process in `group`; that of a single process where it is None.

    The launcher's environment says which ranks share a host; without it, all are taken to be on one
    host.
    """
    if group is None:
        return World()
    world = environment.find_world()
    rank = dist.get_rank()
    size = dist.get_world_size()
    matches = (world.rank, world.world_size) == (rank, size)
    if group is dist.group.WORLD:
        return world if matches else World(rank, size, rank, size, source="torch.distributed")
    members = dist.get_process_group_ranks(group)
    local_size = world.local_world_size
    in_order = (
        size == local_size * world.nodes and rank == local_size * world.node + world.local_rank
    )
    nodes = [member // local_size if matches and in_order else 0 for member in members]
    return world_among(nodes, members.index(rank), world.source if matches else "torch.distributed")


def world_among(nodes: Sequence[int], rank: int, source: str) -> World:
    """Return the `World` of `rank` in a group whose ranks are on `nodes`; the nodes are renumbered
    from 0.
    """
    here = [member for member, node in enumerate(nodes) if node == nodes[rank]]
    distinct = sorted(set(nodes))
    node = distinct.index(nodes[rank])
    return World(rank, len(nodes), here.index(rank), len(here), node, len(distinct), source)


def backends_of(group: dist.ProcessGroup | None) -> dict[str, str]:
    """Return the name of the backend for the tensors of each type of device."""
    if group is None:
        return {}
    config = dist.BackendConfig(dist.Backend(dist.get_backend_config(group)))
    return {device: str(name) for device, name in config.get_device_backend_map().items()}


def device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Return the current accelerator where the group has a backend for it, else the CPU."""
    kind = devices.accelerator()
    return (
        torch.device("cpu")
        if kind is None or kind not in backends_of(group)
        else devices.current(kind)
    )


def make_group(ranks: Sequence[int], name: str, like: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a group of `ranks` of the job, in that order, with the backends and the time limit of
    `like`.

    Only its members call this. `new_group` would not do: older versions sort the ranks, and it
    names groups by how many a process has seen, so that ranks that have been in different groups
    wait for each other under different names (PyTorch issue 190396). This calls the function that
    `new_group` calls.

    Args:
        ranks: ranks of the whole job; this process's is among them.
        name: the same on all members, and of no other group of the job.
        like: a group that they are all in.
    """
    make: Any = c10d._new_process_group_helper
    with _unbound(c10d._get_default_group()):
        new_group, _ = make(
            len(ranks),
            ranks.index(dist.get_rank()),
            list(ranks),
            dist.Backend(dist.get_backend(like)),
            c10d._get_default_store(),
            name,
            timeout=_timeout_of(like),
        )
    c10d._world.pg_group_ranks[new_group] = {member: rank for rank, member in enumerate(ranks)}
    group: dist.ProcessGroup = new_group
    return group


@contextmanager
def _unbound(group: Any) -> Iterator[None]:
    """Bind `group` to no device during the body.

    From a group that is bound to one, NCCL's communicators are split, in which all of its ranks
    have to take part.
    """
    device = group.bound_device_id
    group.bound_device_id = None
    try:
        yield
    finally:
        group.bound_device_id = device


def _timeout_of(group: Any) -> timedelta:
    """Return the group's time limit, which each backend keeps in an attribute of its own."""
    timeout = _backend_timeout(group)
    # torch compares by identity to tell its default limit from one that the user has chosen
    return (
        c10d.default_pg_timeout
        if timeout is None or timeout == c10d.default_pg_timeout
        else timeout
    )


def _backend_timeout(group: Any) -> timedelta | None:
    if isinstance(getattr(group, "timeout", None), timedelta):
        timeout: timedelta = group.timeout
        return timeout
    for device in group._device_types:
        with suppress(AttributeError, RuntimeError):
            limit: timedelta = group._get_backend(torch.device(device)).options._timeout
            return limit
    return None
