"""The process group that a set of ranks has for its operations alone."""

from __future__ import annotations

from contextlib import suppress

import torch
import torch.distributed as dist

from lockstep import Communicator

__all__ = ["leave", "leave_unwatched", "side_of"]


def leave_unwatched(comm: Communicator) -> None:
    """Have `lockstep run` not compare the lines and batches of ranks in rounds, which belong to none."""
    if hasattr(comm.group, "watch_member"):
        vars(comm.group)["watch_member"] = None


def side_of(comm: Communicator) -> torch.device:
    """Where the ranks tell each other what they ask for: the CPU, if the group carries what is there."""
    return torch.device("cpu") if "cpu" in dist.get_backend_config(comm.group) else comm.device


def leave(comm: Communicator) -> None:
    """Give the group back without waiting for the others."""
    group, comm.group = comm.group, None
    if group is not None and dist.is_initialized():
        with suppress(ValueError):  # the program has destroyed it, or all groups
            dist.destroy_process_group(group)
