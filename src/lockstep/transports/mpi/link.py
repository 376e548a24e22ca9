"""One rank's part of a group over MPI: its communicator, and what is under way in it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakSet

import torch

from ...errors import ConfigError, StallError, TransportError
from ..shm.engine import Lane
from ..shm.moving import flat_of, put_back
from ..shm.waiting import Steps
from ..shm.work import ShmWork
from .ending import ending
from .following import follow
from .library import load
from .memory import room_for, span

__all__ = ["Link"]

_NAP_S = 1e-3


class Link:
    """Runs collectives and messages over a communicator, which becomes its own.

    Collectives start one after the other in the order of the calls, blocking or not, as MPI matches them by their
    order, and a blocking one of MPI's would not match a non-blocking one. Messages are MPI's to put in order.

    Args:
        comm: an `MPI.Intracomm`.
        timeout: seconds that an operation may take when it is given no limit of its own.
        crowded: whether there are more ranks than cores.
    """

    def __init__(self, comm: Any, timeout: float, crowded: bool) -> None:
        self.rank, self.size, self.timeout = comm.rank, comm.size, timeout
        self._comm, self._crowded, self._broken = comm, crowded, ""
        self._collectives = Lane(self._check, self._break, crowded)
        self._sends: WeakSet[Lane] = WeakSet()
        self._receives: WeakSet[Lane] = WeakSet()
        ending.watch(self)

    @property
    def comm(self) -> Any:
        """The communicator.

        Raises:
            TransportError: an earlier operation has failed here, or the group has been left.
        """
        if self._broken or self._comm is None:
            why = self._broken or "the group has been destroyed"
            raise TransportError(f"mpi4py: this group cannot be used since an earlier error: {why}")
        return self._comm

    def run(
        self, what: str, steps: Steps, asynchronous: bool, timeout: float | None, result: list[torch.Tensor]
    ) -> ShmWork:
        """Carry out a collective, at once or beside the caller.

        Raises:
            TransportError: when an earlier one has failed here, or this one does.
        """
        if asynchronous:
            return self._collectives.start(what, steps, timeout or self.timeout, result)
        return self._collectives.run(what, lambda: steps, lambda: timeout or self.timeout)

    def send(self, tensor: torch.Tensor, target: int, tag: int) -> ShmWork:
        """Send `tensor` to `target` beside the caller; done when `tensor` may be written to again."""
        lane, steps = self._lane(self._sends), _send(self.comm, tensor, target, self._tag(tag))
        return lane.start(f"send to rank {target}", steps, None, [tensor], self.timeout)

    def receive(self, tensor: torch.Tensor, source: int | None, tag: int) -> ShmWork:
        """Receive a message from `source`, or from any rank, into `tensor` beside the caller."""
        mpi = load()
        status = mpi.Status()
        steps = _receive(self.comm, tensor, mpi.ANY_SOURCE if source is None else source, self._tag(tag), status)
        what = "recv from any rank" if source is None else f"recv from rank {source}"
        lane = self._lane(self._receives)
        work = lane.start(what, steps, None, [tensor], self.timeout)
        # it must not take a message after its caller has stopped waiting
        work.give_up = None if work.is_completed() else lane.stop
        work.sender = lambda: status.Get_source() if work.is_success() else None
        return work

    def fail(self, reason: str) -> None:
        """Give up the group on this rank; MPI does not tell the others."""
        self._broken = self._broken or reason

    def close(self) -> None:
        """Leave the group when what this rank has begun has ended, but for receives, or its time is up."""
        comm, self._comm = self._comm, None
        if comm is None:
            return
        self._let_end()
        self.fail("the group has been destroyed")
        for lane in [self._collectives, *self._sends, *self._receives]:
            lane.stop(TransportError(f"mpi4py: {self._broken}"))
        if not load().Is_finalized():
            comm.Free()

    def _let_end(self) -> None:
        """Wait for what the others may still come to: MPI has no way to take it back."""
        deadline, lanes = time.monotonic() + self.timeout, [self._collectives, *self._sends]
        while any(lane.pending for lane in lanes):
            if self._broken or ending.aborting or time.monotonic() > deadline:
                return
            for lane in lanes:
                lane.advance()  # at the program's end the progress thread may be gone
            time.sleep(_NAP_S)

    def _lane(self, among: WeakSet[Lane]) -> Lane:
        """A lane of its own for a message: MPI itself keeps messages in order."""
        lane = Lane(self._check, None, self._crowded)
        among.add(lane)
        return lane

    def _tag(self, tag: int) -> int:
        most = self.comm.Get_attr(load().TAG_UB)
        if not 0 <= tag <= most:
            raise ConfigError("tag", f"a number from 0 to {most}, which is what this MPI can carry", tag)
        return tag

    def _check(self, what: str, awaited: Iterable[int], seconds: float, timeout: float) -> None:
        if seconds >= timeout:
            raise StallError(
                f"mpi4py: {what} has not ended on rank {self.rank} (of {self.size}) within its time limit of "
                f"{timeout:g} s: another rank has not called it, or no longer can"
            )

    def _break(self, error: BaseException) -> None:
        self.fail(str(error) or type(error).__name__)


def _send(comm: Any, tensor: torch.Tensor, target: int, tag: int) -> Steps:
    flat = flat_of(tensor)
    yield from follow(lambda: comm.Isend([span(flat), load().BYTE], target, tag), flat)


def _receive(comm: Any, tensor: torch.Tensor, source: int, tag: int, status: Any) -> Steps:
    room = room_for([tensor])
    begin: Callable[[], Any] = lambda: comm.Irecv([span(room), load().BYTE], source, tag)  # noqa: E731
    yield from follow(begin, room, status, can_cancel=True)
    sent, wanted = status.Get_count(load().BYTE), room.numel() * room.element_size()
    if sent != wanted:
        raise TransportError(
            f"mpi4py: rank {status.Get_source()} sent {sent} bytes (tag {tag}), "
            f"but rank {comm.rank} receives into {wanted} bytes"
        )
    put_back(room, tensor)
