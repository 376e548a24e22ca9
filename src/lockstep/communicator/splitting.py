"""Communicators of some of the workers."""

from __future__ import annotations

import uuid
from contextlib import suppress
from types import TracebackType
from typing import overload

import torch.distributed as dist
from typing_extensions import Self

from .grouping import make_group
from .objects import Objects
from .place import place_among

__all__ = ["Splitting"]


class Splitting(Objects):
    """`split`, `dup` and `free`; what they make is a context manager that gives its group back at the end."""

    @overload
    def split(self, color: int, key: int = 0) -> Self: ...
    @overload
    def split(self, color: int | None, key: int = 0) -> Self | None: ...
    def split(self, color: int | None, key: int = 0) -> Self | None:
        """The communicator of those that pass the same `color`, ordered by `key`, and where keys are equal, by rank.

        Every worker must call it. Those that pass None get none.

        Raises:
            ConfigError: for a color that is no whole number, or a key.
        """
        color, key = None if color is None else self._whole("color", color), self._whole("key", key)
        if self.group is None and self.size == 1:
            return None if color is None else type(self).at(self.world, self.device)
        group = self._connected()
        told = self.allgather_object((color, key, self.node, uuid.uuid4().hex))
        if color is None:
            return None
        members = sorted((rank for rank in range(self.size) if told[rank][0] == color), key=lambda rank: told[rank][1])
        place = place_among([told[rank][2] for rank in members], members.index(self.rank), self.world.source)
        ranks = dist.get_process_group_ranks(group)
        # the name is that of nobody else: it says nothing about how many groups each rank has made before
        name = f"lockstep/{told[members[0]][3]}"
        part = type(self).at(place, self.device, make_group([ranks[rank] for rank in members], name, group))
        part._owned = True
        return part

    def dup(self) -> Self:
        """A communicator of the same workers, whose messages and collectives do not meet those of this one."""
        return self.split(0, self.rank)

    def free(self) -> None:
        """Give back the process group, when every worker has called this.

        Raises:
            ConfigError: for a communicator that neither `split` nor `dup` has made.
        """
        if self.group is None and self.size == 1:
            return
        if not self._owned:
            raise self._error("communicator", "one made by split or dup", repr(self))
        if self.group is not None:
            self.barrier()
            self._destroy()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._owned or self.group is None:
            return
        if error is None:
            self.free()
        else:  # the others may never come
            self._destroy()

    def _destroy(self) -> None:
        group, self.group = self.group, None
        with suppress(ValueError):  # the program has destroyed it, or all groups
            dist.destroy_process_group(group)
