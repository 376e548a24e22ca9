"""`MpiGroup`: the process group of processes of one MPI job, and how such a group is made."""

# torch's stubs lack some of the names of torch.distributed
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import socket
import zlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from ... import messages
from ...environment import usable_cores
from ...errors import ConfigError
from ...stores import exchange, read_message
from ..device_groups import device_options, dispatch_by_device
from ..process_group import TransportGroup
from ..runtime.backoff import Steps
from ..runtime.c10d import PrefixStore, Store
from ..runtime.tensor_arguments import Tensors
from . import collectives
from .collectives import Reduction, reduction_for
from .context import MpiContext
from .library import load_mpi


@dispatch_by_device
class MpiGroup(TransportGroup):
    """A process group whose ranks are processes of one MPI job; see `TransportGroup`.

    An operation raises StallError when the other ranks do not arrive in time, and TransportError
    when MPI fails.
    """

    backend = "mpi4py"
    _context: MpiContext

    def __init__(self, context: MpiContext, store: Store) -> None:
        super().__init__(context.rank, context.size, context, store)

    def _reduction(self, op: Any, dtype: torch.dtype) -> Reduction:
        return reduction_for(op, dtype)

    def _all_reduce_steps(self, tensor: torch.Tensor, reduction: Reduction) -> Steps:
        return collectives.all_reduce(self._context.comm, tensor, reduction)

    def _sparse_all_reduce_steps(self, tensor: torch.Tensor, op: Any) -> Steps:
        return collectives.all_reduce_sparse(self._context.comm, tensor, op)

    def _reduce_steps(self, tensor: torch.Tensor, root: int, reduction: Reduction) -> Steps:
        return collectives.reduce(self._context.comm, tensor, root, reduction)

    def _reduce_scatter_steps(
        self, output: torch.Tensor, inputs: Tensors, reduction: Reduction
    ) -> Steps:
        return collectives.reduce_scatter(self._context.comm, output, inputs, reduction)

    def _broadcast_steps(self, tensor: torch.Tensor, root: int) -> Steps:
        return collectives.broadcast(self._context.comm, tensor, root)

    def _all_gather_steps(self, outputs: Tensors, tensor: torch.Tensor) -> Steps:
        return collectives.all_gather(self._context.comm, outputs, tensor)

    def _gather_steps(self, outputs: Tensors, tensor: torch.Tensor, root: int) -> Steps:
        return collectives.gather(self._context.comm, outputs, tensor, root)

    def _scatter_steps(self, tensor: torch.Tensor, inputs: Tensors, root: int) -> Steps:
        return collectives.scatter(self._context.comm, tensor, inputs, root)

    def _all_to_all_steps(self, outputs: Tensors, inputs: Tensors) -> Steps:
        return collectives.all_to_all(self._context.comm, outputs, inputs)

    def _barrier_steps(self) -> Steps:
        return collectives.barrier(self._context.comm)


_TAGS = 32768  # MPI guarantees at least so many


class _MpiRank(msgspec.Struct, frozen=True):
    """The number of a rank in its MPI job, and its host."""

    rank: int
    host: str


class _MpiRanks(msgspec.Struct, frozen=True):
    """The numbers of all ranks of a group in their MPI job, in the group's order, and how many each
    host has.
    """

    ranks: list[int]
    ranks_per_host: dict[str, int]


def make_mpi_group(group_options: Any, options: Any) -> dist.ProcessGroup:
    """Return the process group for what c10d hands to an extended backend: store, rank, size,
    timeout.

    Raises:
        ConfigError: mpi4py is not installed, or the ranks were not started by one `mpiexec`; for
            options.
        StallError: when some ranks do not call it in time.
        TransportError: what is in the store is damaged.
    """
    options_of_device = device_options(options, "none, as mpi4py has no options")
    world = load_mpi().COMM_WORLD
    rank = group_options.group_rank
    size = group_options.group_size
    # a store may outlive the groups that were made with it, and c10d gives a group that is made
    # again the same name
    group_options.store = PrefixStore(
        str(group_options.store.add(f"round/{rank}", 1)), group_options.store
    )
    host = socket.gethostname()
    own_rank = messages.encode(_MpiRank(world.rank, host))
    combined = exchange(group_options.store, "mpi4py", rank, own_rank, range(size), _merge)
    all_ranks = read_message(combined, _MpiRanks, "the ranks of all in their MPI job")
    world_ranks = all_ranks.ranks
    if len(set(world_ranks)) != size or not set(world_ranks) <= set(range(world.size)):
        raise ConfigError(
            "mpi4py",
            f"the {size} ranks of the group in one MPI job",
            found=f"ranks that are number {', '.join(map(str, world_ranks))} of theirs (this one "
            f"has {world.size})",
            hint=f"Start the program with mpiexec -n {size}, the one of the MPI that mpi4py uses.",
        )
    oversubscribed = all_ranks.ranks_per_host.get(host, 0) > usable_cores()
    comm = _communicator(world, world_ranks, str(group_options.group_id))
    group = MpiGroup(
        MpiContext(comm, group_options.timeout.total_seconds(), oversubscribed), group_options.store
    )
    group.device_options = options_of_device
    return group


def _merge(texts: Mapping[int, str]) -> str:
    """Return the ranks of all in their MPI job, and the number of ranks on each host."""
    ranks = [
        read_message(text, _MpiRank, f"rank {rank} in its MPI job") for rank, text in texts.items()
    ]
    return messages.encode(
        _MpiRanks(
            [mpi_rank.rank for mpi_rank in ranks], Counter(mpi_rank.host for mpi_rank in ranks)
        )
    )


def _communicator(world: Any, ranks: list[int], name: str) -> Any:
    """Create a communicator of these `ranks` of `world`, in that order; only they take part in
    it.
    """
    everyone = world.Get_group()
    members = everyone.Incl(ranks)
    try:
        # several threads may make groups at the same time, which the tag keeps apart
        return world.Create_group(members, zlib.crc32(name.encode()) % _TAGS)
    finally:
        members.Free()
        everyone.Free()
