"""Where a worker stands in a process group, and which devices the group serves."""

# torch's stubs lack some of the names of torch.distributed
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from .. import environment
from ..topology import World

__all__ = ["carriers_of", "device_of", "place_among", "world_of"]


def world_of(group: dist.ProcessGroup | None) -> World:
    """This process's place in `group`; alone where it is None.

    Which members share a machine is what the launcher says; where it says nothing, all are taken to be on one.
    """
    if group is None:
        return World()
    found, rank, size = environment.find_world(), dist.get_rank(), dist.get_world_size()
    said = (found.rank, found.world_size) == (rank, size)
    if group is dist.group.WORLD:
        return found if said else World(rank, size, rank, size, source="torch.distributed")
    members, each = dist.get_process_group_ranks(group), found.local_world_size
    in_order = size == each * found.nodes and rank == each * found.node + found.local_rank
    nodes = [member // each if said and in_order else 0 for member in members]
    return place_among(nodes, members.index(rank), found.source if said else "torch.distributed")


def place_among(nodes: Sequence[int], rank: int, source: str) -> World:
    """The place of the member `rank` of a group whose members are on `nodes`; the nodes are numbered anew."""
    here = [member for member, node in enumerate(nodes) if node == nodes[rank]]
    distinct = sorted(set(nodes))
    node = distinct.index(nodes[rank])
    return World(rank, len(nodes), here.index(rank), len(here), node, len(distinct), source)


def carriers_of(group: dist.ProcessGroup | None) -> dict[str, str]:
    """Type of device → name of the backend that carries its tensors."""
    if group is None:
        return {}
    config = dist.BackendConfig(dist.Backend(dist.get_backend_config(group)))
    return {device: str(name) for device, name in config.get_device_backend_map().items()}


def device_of(group: dist.ProcessGroup | None) -> torch.device:
    """The current GPU where the group carries what is there, else the CPU."""
    if "cuda" in carriers_of(group) and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
