"""The rendezvous of the ranks of one `mpiexec`: their `World`, and a store for
torch.distributed.
"""

# torch's stubs lack some of the names of torch.distributed
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ...errors import TransportError
from ...stores import LOOPBACK, serve_store
from ...topology import World
from ..runtime.c10d import Store
from .finalizer import finalizer
from .library import load_mpi

_TIMEOUT = timedelta(minutes=5)  # for the store: to connect, and for what is waited for in it


def find_world() -> World:
    """Return this process's `World` among the processes that `mpiexec` has started; all of them
    must call it.

    Raises:
        ConfigError: mpi4py is not installed.
    """
    mpi = load_mpi()
    world = mpi.COMM_WORLD
    node = world.Split_type(mpi.COMM_TYPE_SHARED)
    try:
        first = node.bcast(world.rank)  # identifies the node
        nodes = sorted(set(world.allgather(first)))
        return World(
            world.rank, world.size, node.rank, node.size, nodes.index(first), len(nodes), "mpiexec"
        )
    finally:
        node.Free()


def make_store(world: World, timeout: timedelta = _TIMEOUT) -> Store:
    """Return a store that rank 0 serves on a free port; all processes of `mpiexec` must call it.

    From then on an exception that ends one rank's program ends the job, whatever transport is used
    for tensors.

    Args:
        world: from `find_world`.
        timeout: limit of a wait in it.

    Raises:
        TransportError: rank 0 cannot open it, or another cannot reach it.
    """
    comm = load_mpi().COMM_WORLD
    store = None
    address = None
    finalizer.abort_on_exception()
    if world.is_first:
        host = LOOPBACK if world.nodes == 1 else socket.gethostname()
        try:
            store = serve_store(host, 0, timeout, several_hosts=world.nodes > 1)
            address = (host, store.port)
        except (OSError, RuntimeError) as error:
            address = (str(error), 0)
    host, port = comm.bcast(address)
    if not port:
        raise TransportError(f"mpi4py: rank 0 cannot open a store for torch.distributed: {host}")
    try:
        return store or dist.TCPStore(host, port, None, False, timeout)
    except RuntimeError as error:
        raise TransportError(
            f"mpi4py: rank {world.rank} cannot reach rank 0 at {host}:{port}: {error}"
        ) from error


def rendezvous_handler(
    url: str, timeout: timedelta = _TIMEOUT, **_options: Any
) -> Iterator[tuple[Store, int, int]]:
    """Return the rendezvous handler for ``init_method="mpi4py://"``: store, rank and world size
    come from MPI.
    """
    world = find_world()
    yield make_store(world, timeout), world.rank, world.world_size
    raise RuntimeError(
        f"the ranks of an MPI job can rendezvous again only by a new call with {url}"
    )
