"""All verbs of a communicator together."""

from __future__ import annotations

from .member import Member
from .moving import Moving
from .objects import Objects
from .point_to_point import PointToPoint
from .rank_0 import Rank0
from .reducing import Reducing
from .splitting import Splitting

__all__ = ["Communicator"]


class Communicator(Rank0, Splitting, Objects, Reducing, Moving, PointToPoint, Member):
    """The workers of a process group, seen from one of them; the verbs are MPI's.

    Every worker must call the collective verbs in the same order. Ranks, of peers and of roots too, are those of this
    communicator. A worker that is alone has no process group; every verb then does the obvious without one.

    What can be seen to be wrong from here (a number of parts, a dtype, a device, a rank) is a ConfigError that names
    the argument, what came and the rank, raised before anything is sent. Gradients do not travel.

    Args:
        group: a process group of torch.distributed that this process is in; that of all workers when None, and when
            there is none either, this process is alone.
        device: where this worker computes; by default its GPU where the group carries GPU tensors, else the CPU.

    Attributes:
        world: this worker's place.
        device: where it computes.
        group: the process group, in which ranks are the same; None where the worker is alone.

    Raises:
        ConfigError: for a group that this process is not in.
    """
