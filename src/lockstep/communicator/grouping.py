"""Makes a process group of some ranks of another."""

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

__all__ = ["make_group"]


def make_group(ranks: Sequence[int], name: str, like: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of `ranks` of the job, in that order, with the backends and the time limit of `like`.

    Only its members call this. `new_group` would not do: older versions sort the ranks, and it names groups by how many
    a process has seen, so that ranks that have been in different groups wait for each other under different names
    (PyTorch issue 190396). What is called here is what `new_group` calls.

    Args:
        ranks: ranks of the whole job; this process's is among them.
        name: the same on all members, and of no other group of the job.
        like: a group that they are all in.
    """
    make: Any = c10d._new_process_group_helper
    with _unbound(c10d._get_default_group()):
        made, _ = make(
            len(ranks),
            ranks.index(dist.get_rank()),
            list(ranks),
            dist.Backend(dist.get_backend(like)),
            c10d._get_default_store(),
            name,
            timeout=_timeout_of(like),
        )
    c10d._world.pg_group_ranks[made] = {member: rank for rank, member in enumerate(ranks)}
    group: dist.ProcessGroup = made
    return group


@contextmanager
def _unbound(group: Any) -> Iterator[None]:
    """Within it `group` is bound to no device.

    From a group that is bound to one, NCCL's communicators are split, in which all of its ranks have to take part.
    """
    device, group.bound_device_id = group.bound_device_id, None
    try:
        yield
    finally:
        group.bound_device_id = device


def _timeout_of(group: Any) -> timedelta:
    """The group's time limit, which each backend keeps in a place of its own."""
    found = _own_timeout_of(group)
    # the very object is what tells torch's own limit from one that the user has chosen
    return c10d.default_pg_timeout if found is None or found == c10d.default_pg_timeout else found


def _own_timeout_of(group: Any) -> timedelta | None:
    if isinstance(getattr(group, "timeout", None), timedelta):
        found: timedelta = group.timeout
        return found
    for device in group._device_types:
        with suppress(AttributeError, RuntimeError):
            limit: timedelta = group._get_backend(torch.device(device)).options._timeout
            return limit
    return None
