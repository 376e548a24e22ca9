"""Makes a group when `init_process_group` or `new_group` asks for the backend "mpi4py"."""

# torch's stubs lack some of the names of torch.distributed
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import json
import socket
import zlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from ...environment import usable_cores
from ...errors import ConfigError
from ...store_exchange import exchange
from ..c10d import PrefixStore
from ..devices import device_options
from .group import MpiGroup
from .library import load
from .link import Link

__all__ = ["make_mpi_group"]

_TAGS = 32768  # MPI promises at least so many


def make_mpi_group(given: Any, options: Any) -> dist.ProcessGroup:
    """The process group for what c10d hands to an extended backend: store, rank, size, timeout.

    Raises:
        ConfigError: mpi4py is not installed, or the ranks were not started by one `mpiexec`; for options.
        StallError: when some ranks do not call it in time.
    """
    others = device_options(options, "none, as mpi4py has no options")
    world, rank, size = load().COMM_WORLD, given.group_rank, given.group_size
    # a store may outlive the groups that met in it, and c10d gives a group that is made again the same name
    given.store = PrefixStore(str(given.store.add(f"round/{rank}", 1)), given.store)
    host = socket.gethostname()
    said = exchange(given.store, "mpi4py", rank, json.dumps([world.rank, host]), range(size), _places_and_hosts)
    places, ranks_on = json.loads(said)
    if len(set(places)) < size:
        raise ConfigError(
            "mpi4py",
            f"the {size} ranks of the group in one MPI job",
            found=f"ranks that are number {', '.join(map(str, places))} of theirs (this one has {world.size})",
            hint=f"Start the program with mpiexec -n {size}, the one of the MPI that mpi4py uses.",
        )
    crowded = ranks_on[host] > usable_cores()
    comm = _communicator(world, places, str(given.group_id))
    group = MpiGroup(Link(comm, given.timeout.total_seconds(), crowded), given.store)
    group.device_options = others
    return group


def _places_and_hosts(said: Mapping[int, str]) -> str:
    """The ranks of all in their MPI job, and the number of ranks on each host."""
    places, hosts = zip(*(json.loads(text) for text in said.values()), strict=True)
    return json.dumps([places, Counter(hosts)])


def _communicator(world: Any, places: list[int], name: str) -> Any:
    """One of the processes at `places` in `world`, in that order; only they take part in making it."""
    everyone = world.Get_group()
    members = everyone.Incl(places)
    try:
        # threads may make several groups at once, which the tag keeps apart
        return world.Create_group(members, zlib.crc32(name.encode()) % _TAGS)
    finally:
        members.Free()
        everyone.Free()
