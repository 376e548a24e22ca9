"""Takes requests in any order, and carries each out when all ranks have made it."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from lockstep import Communicator
from lockstep.environment import variables
from lockstep.errors import ConfigError

from ..common.exceptions import HorovodInternalError
from . import operations
from .carry_out import carry_out
from .fitting import fitting
from .frame import Frames
from .group import leave, leave_unwatched, side_of
from .request import Request
from .stalls import StallCheck, warn_after
from .streams import mark, wait_for
from .table import JOIN, Agreed, Record, Table

__all__ = ["Engine"]

# Requests that need not be seen to at once are, when there are so many bytes of them: then sending them has a point.
_ENOUGH = 1 << 20
# ... or when they have been left alone for so long.
_LONG_S = 0.05
# After a round in which no rank had anything to say the next one is put off, for longer each time.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2e-3, 5e-3


class Engine:
    """The operations of one set of ranks.

    In each round every rank tells what it has asked for since the last one, and all carry out what all have asked for
    by then, in the same order. A rank that waits for nothing takes part in no round, and keeps the others waiting in
    theirs: without it nothing can be carried out anyway. Whoever waits for a request drives the rounds; for requests
    that nobody waits for there is a thread.

    Args:
        comm: the ranks; from now on used here alone.
        title: what a timeline calls them; "" for all ranks.
    """

    def __init__(self, comm: Communicator, title: str = "") -> None:
        self.comm, self._title = comm, title
        self._ended = 0  # operations, those counted in which this rank has not taken part
        leave_unwatched(comm)
        self._table = Table(comm.size)
        self._frames = Frames(comm, side_of(comm)) if comm.size > 1 else None
        self._changed = threading.Condition()
        self._requests: dict[bytes, Request] = {}
        self._untold: collections.deque[Record] = collections.deque()
        self._counts: collections.Counter[str] = collections.Counter()
        self._driving = self._urgent = False
        self._waiters, self._lazy_bytes = 0, 0
        self._pause = self._resume_at = 0.0
        self._cause: BaseException | str | None = None
        self._stalls = StallCheck(warn_after(variables()), comm.rank)
        self._thread = threading.Thread(target=self._work, name="lockstep horovod", daemon=True)
        if self._frames is not None:
            self._thread.start()

    def name_for(self, kind: str) -> str:
        """A name for a request without one: the same for the n-th of its kind on every rank."""
        self._counts[kind] += 1
        return f"{kind}.noname.{self._counts[kind]}"

    def submit(self, request: Request, waits: bool = False) -> None:
        """Ask for an operation; `waits` says that the caller is going to wait for it at once.

        Raises:
            ConfigError: when there is one of this name under way.
            HorovodInternalError: when an earlier one has broken the connection, or it has been shut down.
        """
        request.events, request.asked = (mark(request.inputs), None), time.monotonic()
        if (records := operations.current) is not None:
            records.begun(request)
        key = request.key if request.kind != "join" else JOIN[0]
        with self._changed:
            self._check_usable()
            if key in self._requests:
                expected = f"one that no other {request.kind} under way has"
                raise ConfigError("name", expected, repr(request.name), "Call synchronize() for that one first.")
            self._requests[key] = request
            self._untold.append((key, request.form_digest if key != JOIN[0] else JOIN[1]))
            self._lazy_bytes += sum(tensor.numel() * tensor.element_size() for tensor in request.inputs)
            if not waits and (request.wakes or self._lazy_bytes >= _ENOUGH):
                self._urge()
        if self.comm.size == 1 and not waits:
            self._wait(request)

    def run(self, request: Request) -> Any:
        """Ask for an operation and wait for it."""
        self.submit(request, waits=True)
        return self.wait(request)

    def wait(self, request: Request) -> Any:
        """The result of `request`, when it has ended.

        Raises:
            HorovodInternalError: when it could not be carried out.
            ConfigError: when what was asked for is not defined.
        """
        if not request.done:
            self._wait(request)
        wait_for(request.events[1])
        if request.error is not None:
            raise request.error
        return request.result

    def _wait(self, request: Request) -> None:
        with self._changed:
            self._waiters += 1
            try:
                while not request.done:
                    if self._driving:
                        if not self._changed.wait(_LONG_S):
                            self._look()
                    else:
                        self._drive(own=1)
            finally:
                self._waiters -= 1
                if self._urgent and self._requests:
                    self._changed.notify_all()

    def poll(self, request: Request) -> bool:
        """Whether `wait` would return at once; if not, it is seen to from now on."""
        if not request.done:
            with self._changed:
                if self._cause is None:
                    self._urge()
        return request.done

    def close(self, cause: str = "Horovod has been shut down on this rank") -> None:
        """Leave the other ranks: what is under way here ends with an error, and so does what they wait for."""
        with self._changed:
            self._give_up(cause)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)

    def _check_usable(self) -> None:
        if self._cause is not None:
            error = HorovodInternalError(f"this rank can no longer reach the others: {_said(self._cause)}")
            raise error from (self._cause if isinstance(self._cause, BaseException) else None)

    # The methods from here on are called while `_changed` is held.

    def _urge(self) -> None:
        self._urgent = True
        if not self._driving:
            self._changed.notify_all()

    def _look(self) -> None:
        self._stalls.look(self._requests.values(), time.monotonic(), self._table.waiting_for)

    def _work(self) -> None:
        if self.comm.device.type == "cuda":
            torch.cuda.set_device(self.comm.device)
        with self._changed:
            while self._cause is None:
                if self._urgent and self._requests and not self._driving and not self._waiters:
                    self._drive()
                elif not self._changed.wait(_LONG_S) and self._requests:
                    self._urgent = True
                    self._look()

    def _drive(self, own: int = 0) -> None:
        """One round, driven by `own` of those who wait; lets go of `_changed` meanwhile."""
        left = self._resume_at - time.monotonic() if self._pause and not self._untold else 0.0
        if left > 0:
            self._changed.wait(left)
            return
        self._driving = True
        self._lazy_bytes = 0
        records = [self._untold.popleft() for _ in range(min(len(self._untold), Frames.most))]
        self._changed.release()
        failure: BaseException | None = None
        try:
            self._round(records)
        except BaseException as error:
            failure = error
        finally:
            self._changed.acquire()
            self._driving = False
        if failure is not None:
            self._give_up(failure)
            if not isinstance(failure, Exception):  # Ctrl-C is for the program
                raise failure
        self._urgent = self._urgent and bool(self._requests)
        if self._waiters > own or self._urgent:
            self._changed.notify_all()

    def _give_up(self, cause: BaseException | str) -> None:
        if self._cause is None:
            self._cause = cause
            for request in self._requests.values():
                error = HorovodInternalError(f"{request.kind} {request.name!r}: {_said(cause)}")
                error.__cause__ = cause if isinstance(cause, BaseException) else None
                request.error, request.done = error, True
            self._requests.clear()
            self._untold.clear()
            self._frames = None  # holds the group, whose connections end with it
            leave(self.comm)
        self._changed.notify_all()

    # Without `_changed`, by the one thread that drives.

    def _round(self, records: Sequence[Record]) -> None:
        told = [records] if self._frames is None else self._frames.exchange(records)
        agreed = self._table.take(told)
        if agreed or any(told):
            self._pause = 0.0
        else:
            self._pause = min(max(self._pause * 2, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
            self._resume_at = time.monotonic() + self._pause
        if not agreed:
            return
        ready = fitting(self.comm, [each for each in agreed if each.key != JOIN[0]], self._requests)
        for request in ready:
            wait_for(request.events[0])
        carry_out(self.comm, ready)
        for request in ready:
            request.events = (None, mark(request.inputs))
        with self._changed:
            for each in agreed:
                self._end(each)

    def _end(self, agreed: Agreed) -> None:
        request = self._requests.pop(agreed.key, None)
        self._ended += 1
        if request is None:  # of a rank that has joined
            return
        if agreed.key == JOIN[0]:
            # ranks have come here after different numbers of requests; from here on they count alike again
            self._counts.clear()
            request.result = list(agreed.forms)[-1]
        if (records := operations.current) is not None:
            records.ended(request, self._ended, self._title)
        request.done = True


def _said(cause: BaseException | str) -> str:
    return cause if isinstance(cause, str) else f"{type(cause).__name__}: {cause}"
