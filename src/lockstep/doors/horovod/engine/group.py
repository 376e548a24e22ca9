"""The process group that a set of ranks has for its operations alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lockstep import Communicator, watch
from lockstep.watch.sockets import Sockets

__all__ = ["end_waits", "leave", "leave_unwatched", "side_of", "with_sockets"]

Made = TypeVar("Made", Communicator, Communicator | None)

_sockets: dict[Any, Sockets] = {}  # that were opened for a group


def with_sockets(make: Callable[[], Made]) -> Made:
    """The communicator that `make` makes; `end_waits` knows its sockets then."""
    sockets = Sockets()
    with sockets.watching():
        made = make()
    if made is not None and made.group is not None:
        _sockets[made.group] = sockets
    return made


def leave_unwatched(comm: Communicator) -> None:
    """Have `lockstep run` not compare the lines and batches of ranks in rounds, which belong to none."""
    watch.leave_out(comm.group)


def side_of(comm: Communicator) -> torch.device:
    """Where the ranks tell each other what they ask for: the CPU, if the group carries what is there."""
    return torch.device("cpu") if "cpu" in dist.get_backend_config(comm.group) else comm.device


def end_waits(comm: Communicator) -> None:
    """Let every wait for the others end with an error, in whatever thread, and theirs for this rank too."""
    group: Any = comm.group
    if group is None:
        return
    with suppress(Exception):  # not every backend can
        group.abort()
    if group in _sockets:  # Gloo waits for nothing else
        _sockets[group].shut()


def leave(comm: Communicator) -> None:
    """Give the group back without waiting for the others."""
    group, comm.group = comm.group, None
    _sockets.pop(group, None)
    if group is not None and dist.is_initialized():
        with suppress(ValueError):  # the program has destroyed it, or all groups
            dist.destroy_process_group(group)
