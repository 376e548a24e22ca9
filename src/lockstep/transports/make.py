"""Makes a group when `init_process_group` or `new_group` asks for the backend "shm"."""

# torch's stubs lack some of the names of torch.distributed
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from .. import environment
from ..errors import ConfigError
from .c10d import PrefixStore
from .hierarchy.between import Leaders
from .hierarchy.group import HierarchicalGroup
from .shm.core import Core
from .shm.group import ShmGroup
from .shm.host import ranks_by_host
from .shm.layout import default_size, plan
from .shm.options import ShmOptions

__all__ = ["make_shm_group"]


def make_shm_group(given: Any, options: ShmOptions | None) -> dist.ProcessGroup:
    """The process group for what c10d hands to an extended backend (store, rank, size, timeout) and the user's options.

    Raises:
        ConfigError: for options of another backend, or too small a size.
        TransportError: when no memory can be shared.
    """
    if options is not None and not isinstance(options, ShmOptions):
        raise ConfigError("pg_options", "lockstep.ShmOptions", type(options).__name__)
    rank, most = given.group_rank, (options.size if options else None) or environment.shm_size()
    hosts = ranks_by_host(given.store, rank, given.group_size)
    machine = next(i for i, ranks in enumerate(hosts) if rank in ranks)
    ranks = hosts[machine]
    layout = plan(len(ranks), most or default_size(len(ranks)))
    store = PrefixStore(f"machine/{machine}", given.store)
    core = Core(store, ranks.index(rank), layout, given.timeout.total_seconds(), ranks)
    return ShmGroup(core, given.store) if len(hosts) == 1 else _spanning(given, core, hosts, machine)


def _spanning(given: Any, core: Core, hosts: list[list[int]], machine: int) -> dist.ProcessGroup:
    leaders = None
    if core.rank == 0:
        leaders = Leaders(PrefixStore("leaders", given.store), machine, len(hosts), given.timeout)
    gloo = dist.ProcessGroupGloo(PrefixStore("gloo", given.store), given.group_rank, given.group_size, given.timeout)
    return HierarchicalGroup(core, given.store, leaders, gloo, hosts)
