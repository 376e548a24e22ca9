"""Takes requests in any order, and carries each out when all ranks have made it."""

from __future__ import annotations

import collections
import functools
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from lockstep import Communicator
from lockstep.errors import ConfigError
from lockstep.watch.blame import is_of_transport

from . import operations
from .calls import Calls
from .carry_out import carry_out
from .carrying import Carrying
from .fitting import fitting
from .frame import Frames
from .group import end_waits, leave, leave_unwatched, side_of
from .monitor import Monitor
from .request import Request, broken
from .streams import mark, wait_for
from .table import JOIN, Agreed, Table

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
        self._calls = Calls(comm)
        side = side_of(comm) if comm.size > 1 else comm.device
        self._frames = Frames(comm, side, self._calls) if comm.size > 1 else None
        self._carrying = Carrying(self._calls if side.type == "cpu" else None, comm.size)
        self._lock = threading.RLock()  # held by itself, it costs less than by the condition
        self._changed = threading.Condition(self._lock)
        self._requests: dict[bytes, Request] = {}
        self._untold: collections.deque[Request] = collections.deque()
        self._counts: collections.Counter[str] = collections.Counter()
        self._driving = self._urgent = False
        self._waiters, self._lazy_bytes = 0, 0
        self._pause = self._resume_at = 0.0
        self._cause: BaseException | str | None = None
        self._thread = threading.Thread(target=self._work, name="lockstep horovod", daemon=True)
        self._monitor: Monitor | None = None
        if comm.size > 1:
            self._monitor = Monitor(comm, lambda: list(self._requests.values()), self._table.waiting_for, self._abandon)
            self._thread.start()

    def name_for(self, kind: str) -> str:
        """A name for a request without one: the same for the n-th of its kind on every rank."""
        self._counts[kind] += 1
        return f"{kind}.noname.{self._counts[kind]}"

    def submit(self, request: Request) -> None:
        """Ask for an operation.

        Raises:
            ConfigError: when there is one of this name under way.
            HorovodInternalError: when an earlier one has broken the connection, or it has been shut down.
        """
        with self._lock:
            self._add(request)
            self._lazy_bytes += sum(tensor.numel() * tensor.element_size() for tensor in request.inputs)
            if request.wakes or self._lazy_bytes >= _ENOUGH:
                self._urge()
        if self.comm.size == 1:
            self.wait(request)

    def run(self, request: Request) -> Any:
        """Ask for an operation and wait for it; raises what both raise."""
        with self._lock:
            self._add(request)
            self._wait(request)
        return self._result(request)

    def wait(self, request: Request) -> Any:
        """The result of `request`, when it has ended.

        Raises:
            HorovodInternalError: when it could not be carried out.
            ConfigError: when what was asked for is not defined.
        """
        if not request.done:
            with self._lock:
                self._wait(request)
        return self._result(request)

    def _result(self, request: Request) -> Any:
        wait_for(request.events[1])
        if request.error is not None:
            raise request.error
        return request.result

    def poll(self, request: Request) -> bool:
        """Whether `wait` would return at once; if not, it is seen to from now on."""
        if not request.done:
            with self._lock:
                if self._cause is None:
                    self._urge()
        return request.done

    def close(self, cause: str = "Horovod has been shut down on this rank") -> None:
        """Leave the other ranks: what is under way here ends with an error, and so does what they wait for."""
        monitor, self._monitor = self._monitor, None
        if monitor is not None and self._driving:  # in a thread, which is to be called back from among the others
            monitor.blame(f"rank {self.comm.rank}: {cause}")
        self._abandon(cause)
        if monitor is not None:
            monitor.close()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)

    def _abandon(self, cause: BaseException | str) -> None:
        with self._lock:
            self._give_up(cause)

    # The methods from here on are called while `_lock` is held.

    def _add(self, request: Request) -> None:
        if self._cause is not None:
            raise broken("this rank can no longer reach the others", self._cause)
        key = request.key
        if key in self._requests:
            expected = f"one that no other {request.kind} under way has"
            raise ConfigError("name", expected, request.name, "Call synchronize() for that one first.")
        request.events, request.asked = (mark(request.inputs), None), time.monotonic()
        if (records := operations.current) is not None:
            records.begun(request)
        self._requests[key] = request
        self._untold.append(request)

    def _wait(self, request: Request) -> None:
        self._waiters += 1
        try:
            while not request.done:
                if not self._driving:
                    self._drive(own=1)
                else:
                    self._changed.wait(_LONG_S)
        finally:
            self._waiters -= 1
            if self._urgent and self._requests:
                self._changed.notify_all()

    def _urge(self) -> None:
        self._urgent = True
        if not self._driving:
            self._changed.notify_all()

    def _work(self) -> None:
        if self.comm.device.type == "cuda":
            torch.cuda.set_device(self.comm.device)
        with self._lock:
            while self._cause is None:
                if self._urgent and self._requests and not self._driving and not self._waiters:
                    self._drive()
                elif not self._changed.wait(_LONG_S) and self._requests:
                    self._urgent = True

    def _drive(self, own: int = 0) -> None:
        """One round, driven by `own` of those who wait; lets go of `_lock` meanwhile."""
        left = self._resume_at - time.monotonic() if self._pause and not self._untold else 0.0
        if left > 0:
            self._changed.wait(left)
            return
        untold = self._untold
        new = [untold.popleft() for _ in range(min(len(untold), Frames.most))] if untold else []
        agreed: Sequence[Agreed] = ()
        failure: BaseException | None = None
        try:
            self._driving, self._lazy_bytes = True, 0
            self._lock.release()
            try:
                if (records := operations.current) is not None:
                    records.round_begins()
                agreed = self._round(new)
            except BaseException as error:
                failure = self._explained(error)
            finally:
                self._lock.acquire()
        finally:
            self._driving = False
        for each in agreed:
            self._end(each)
        if failure is not None or self._cause is not None:
            self._give_up(failure or self._cause or "")
        if failure is not None and not isinstance(failure, Exception):  # Ctrl-C is for the program
            raise failure
        self._urgent = self._urgent and bool(self._requests)
        if self._waiters > own or self._urgent:
            self._changed.notify_all()

    def _explained(self, error: BaseException) -> BaseException:
        monitor = self._monitor
        return error if monitor is None else monitor.explain(error)

    def _give_up(self, cause: BaseException | str) -> None:
        if self._cause is None:
            self._cause = cause
            for request in self._requests.values():
                request.fail(cause)
            self._requests.clear()
            self._untold.clear()
        if self._driving or (isinstance(cause, Exception) and not is_of_transport(cause)):
            end_waits(self.comm)  # after an error of a transport, this has let the others know
        if not self._driving:  # or else who drives leaves the group, as soon as it is out of it
            self._calls.close()
            leave(self.comm)
        self._changed.notify_all()

    # Without `_lock`, by the one thread that drives.

    def _round(self, new: Sequence[Request]) -> Sequence[Agreed]:
        """Let the ranks meet, of which this one has `new` to tell; what has been done then."""
        if self._carrying.is_next and (confirmed := self._confirmed(new)):
            return confirmed
        records = [request.record for request in new]
        told = [records] if self._frames is None else self._frames.exchange(records)
        agreed = self._table.take(told)
        if agreed:
            self._carry_out(agreed)
        elif any(told):
            self._pause = 0.0
        else:
            self._pause = min(max(self._pause * 2, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
            self._resume_at = time.monotonic() + self._pause
        return agreed

    def _confirmed(self, new: Sequence[Request]) -> Sequence[Agreed]:
        request = new[0] if len(new) == 1 and self._carrying.fits(new[0]) else None
        key = JOIN[0] if request is None else request.key
        if not self._carrying.confirm(key, request) or request is None:
            return ()
        if request.result is None:
            self._do([request])
        self._pause = 0.0
        return _alone(key)

    def _carry_out(self, agreed: list[Agreed]) -> None:
        self._pause = 0.0
        ready = fitting(self.comm, [each for each in agreed if each.key != JOIN[0]], self._requests)
        self._do(ready)
        if len(agreed) == len(ready) == 1 and not agreed[0].absent:
            self._carrying.learn(ready[0])
        else:
            self._carrying.forget()

    def _do(self, ready: list[Request]) -> None:
        for request in ready:
            wait_for(request.events[0])
        carry_out(self.comm, self._calls, ready)
        for request in ready:
            request.events = (None, mark(request.inputs))

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


@functools.lru_cache(maxsize=8)
def _alone(key: bytes) -> tuple[Agreed]:
    return (Agreed(key, {}),)
