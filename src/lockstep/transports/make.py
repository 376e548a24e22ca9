"""Makes a group when `init_process_group` or `new_group` asks for the backend "shm"."""

# torch's stubs lack some of the names of torch.distributed
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from .. import environment
from ..errors import ConfigError
from .c10d import PrefixStore
from .devices import device_options
from .hierarchy.between import Leaders
from .hierarchy.connection import Connection
from .hierarchy.group import HierarchicalGroup
from .named import NamedGroup
from .shm.core import Core
from .shm.group import ShmGroup
from .shm.host import Machine, machines
from .shm.layout import Layout, default_size, plan
from .shm.options import ShmOptions

__all__ = ["MESH", "make_shm_group"]

# So many ranks on several machines are connected with each other when their group is made. More are when they need it,
# as the sockets of all, and what the store is asked for them, grow with the square of their number.
MESH = 64


def make_shm_group(given: Any, options: Any) -> dist.ProcessGroup:
    """The process group for what c10d hands to an extended backend (store, rank, size, timeout) and the user's options.

    Raises:
        ConfigError: for options of another backend, or too small a size.
        TransportError: when no memory can be shared.
        StallError: when some ranks do not call it in time.
    """
    own = options if isinstance(options, ShmOptions) else ShmOptions()
    others = None if own is options else device_options(options, "lockstep.ShmOptions")
    group = _make(given, own.size)
    group.device_options = others
    return group


def _make(given: Any, wish: int | None) -> NamedGroup:
    if wish is None:
        wish = environment.shm_size() or None
    elif not isinstance(wish, int):
        raise ConfigError("ShmOptions size", "a number of bytes", wish)
    # a store may outlive the groups that met in it, and c10d gives a group that is made again the same name
    given.store = PrefixStore(str(given.store.add(f"round/{given.group_rank}", 1)), given.store)
    found = machines(given.store, given.group_rank, given.group_size, wish)
    mine = next(i for i, machine in enumerate(found) if given.group_rank in machine.ranks)
    layouts = [_plan(machine) for machine in found]  # those of others too, so that all ranks refuse what one refuses
    ranks, store = found[mine].ranks, PrefixStore(f"machine/{mine}", given.store)
    core = Core(store, ranks.index(given.group_rank), layouts[mine], given.timeout.total_seconds(), ranks)
    if len(found) == 1:
        return ShmGroup(core, given.store)
    return _spanning(given, core, [list(machine.ranks) for machine in found], mine)


def _plan(machine: Machine) -> Layout:
    count = len(machine.ranks)
    return plan(count, default_size(count) if machine.size is None else machine.size)


def _spanning(given: Any, core: Core, hosts: list[list[int]], machine: int) -> NamedGroup:
    leaders = None
    if core.rank == 0:
        leaders = Leaders(Connection(PrefixStore("leaders", given.store), machine, len(hosts), given.timeout))
    place = given.group_rank, given.group_size
    everyone = Connection(PrefixStore("gloo", given.store), *place, given.timeout, lazy=given.group_size > MESH)
    return HierarchicalGroup(core, given.store, leaders, everyone, hosts)
