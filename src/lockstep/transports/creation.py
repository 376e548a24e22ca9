"""Creates the group of the backend "shm": shared memory on one host, or hierarchical where ranks
span hosts.
"""

# torch's stubs lack some of the names of torch.distributed
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from .. import arguments, environment
from .device_groups import device_options
from .hierarchical.connections import GlooConnection
from .hierarchical.process_group import HierarchicalGroup, Leaders
from .process_group import TransportGroup
from .runtime.c10d import PrefixStore
from .runtime.host_identity import find_hosts
from .shm.context import ShmContext
from .shm.memory_layout import default_size, plan
from .shm.process_group import ShmGroup


@dataclass(frozen=True, slots=True)
class ShmOptions:
    """Options of one group, for ``init_process_group("shm", pg_options=ShmOptions(...))`` and
    `new_group`.

    Attributes:
        size: the most bytes of shared memory that the group takes on a host; None for
            LOCKSTEP_SHM_SIZE, or else 64 MiB, or 4 MiB per rank if that is more. Pages that are
            never written take no memory.
    """

    size: int | None = None


# A group on several hosts of up to so many ranks connects every pair when it is made. A larger one
# connects pairs on demand, as the sockets, and the requests to the store for them, grow with the
# square of the number of ranks.
MAX_FULL_MESH = 64


def make_shm_group(group_options: Any, options: Any) -> dist.ProcessGroup:
    """Return the process group for what c10d hands to an extended backend, and for the user's
    options.

    Raises:
        ConfigError: for options of another backend, or too small a size.
        TransportError: when no memory can be shared.
        StallError: when some ranks do not call it in time.
    """
    shm_options = options if isinstance(options, ShmOptions) else ShmOptions()
    options_of_device = (
        None
        if shm_options is options
        else device_options(options, "lockstep.transports.ShmOptions")
    )
    group = _make(group_options, shm_options.size)
    group.device_options = options_of_device
    return group


def _make(group_options: Any, size: int | None) -> TransportGroup:
    if size is None:
        size = environment.shm_size() or None
    else:
        size = arguments.whole("ShmOptions size", size, expected="a number of bytes")
    # a store may outlive the groups that were made with it, and c10d gives a group that is made
    # again the same name
    group_options.store = PrefixStore(
        str(group_options.store.add(f"round/{group_options.group_rank}", 1)), group_options.store
    )
    hosts = find_hosts(
        group_options.store, group_options.group_rank, group_options.group_size, size
    )
    own_host = next(i for i, host in enumerate(hosts) if group_options.group_rank in host.ranks)
    layouts = []
    for host in hosts:  # all of them, so that all ranks refuse what one refuses
        count = len(host.ranks)
        layouts.append(plan(count, default_size(count) if host.size is None else host.size))
    ranks = hosts[own_host].ranks
    store = PrefixStore(f"on-host/{own_host}", group_options.store)
    context = ShmContext(
        store,
        ranks.index(group_options.group_rank),
        layouts[own_host],
        group_options.timeout.total_seconds(),
        ranks,
    )
    if len(hosts) == 1:
        return ShmGroup(context, group_options.store)
    return _make_hierarchical(
        group_options, context, [list(host.ranks) for host in hosts], own_host
    )


def _make_hierarchical(
    group_options: Any, context: ShmContext, hosts: list[list[int]], own_host: int
) -> TransportGroup:
    leaders = None
    if context.rank == 0:
        leaders = Leaders(
            GlooConnection(
                PrefixStore("leaders", group_options.store),
                own_host,
                len(hosts),
                group_options.timeout,
            )
        )
    rank_and_size = group_options.group_rank, group_options.group_size
    lazy = group_options.group_size > MAX_FULL_MESH
    everyone = GlooConnection(
        PrefixStore("gloo", group_options.store), *rank_and_size, group_options.timeout, lazy=lazy
    )
    return HierarchicalGroup(context, group_options.store, leaders, everyone, hosts)
