"""One rank's part of a group over MPI: its communicator, its pending operations, and MPI requests
as steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import torch

from ...errors import ConfigError, StallError, TransportError
from ..runtime.backoff import Steps
from ..runtime.op_queue import OpQueue
from ..runtime.tensor_arguments import copy_back, flatten
from ..runtime.work import CPUWork
from .finalizer import finalizer
from .library import buffer_for, load_mpi, mpi_buffer

# A test that takes so many times as long as the quickest has transferred data, and the next may
# follow at once. MPI does not report that, but it transfers a long message in pieces, some as small
# as 16 KiB, and only during a test.
_BUSY = 3.0


def request_steps(
    begin: Callable[[], Any], memory: object, status: Any = None, can_cancel: bool = False
) -> Steps:
    """Wait until the request that `begin` returns has completed.

    Args:
        begin: starts a non-blocking operation.
        memory: what it reads and writes; kept alive, if need be until the program ends, until MPI
            is done with it.
        status: an `MPI.Status` that is filled at the end.
        can_cancel: whether it can be cancelled when no thread waits for it any more, as a receive
            can.

    Raises:
        TransportError: MPI has refused it, or it has failed.
    """
    mpi = load_mpi()
    request = None
    try:
        request = begin()
        if request.Test(status):
            return
        yield None
        quickest = math.inf
        while True:
            # Time of this thread alone: one that had to wait for its core has transferred nothing.
            before = time.thread_time()
            if request.Test(status):
                return
            took = time.thread_time() - before
            quickest = min(quickest, took)
            yield None if took > _BUSY * quickest else _unknown_ranks
    except mpi.Exception as error:
        raise TransportError(f"mpi4py: {error}") from error
    finally:
        if request and not (can_cancel and _cancelled(request, mpi)):
            finalizer.keep_alive(request, memory)


def _cancelled(request: Any, mpi: Any) -> bool:
    with suppress(mpi.Exception):
        request.Cancel()
        return bool(request.Test())
    return True


def _unknown_ranks() -> Iterable[int]:
    """Return no ranks: MPI does not report which have not arrived."""
    return ()


_POLL_S = 1e-3


class MpiContext:
    """Runs collectives and messages over a communicator, which it owns from then on.

    Collectives start one after the other in the order of the calls, blocking or not, as MPI matches
    them by their order, and a blocking collective of MPI does not match a non-blocking one. MPI
    itself orders messages.

    Args:
        comm: an `MPI.Intracomm`.
        timeout: seconds that an operation may take when it is given no limit of its own.
        oversubscribed: whether there are more ranks than cores.
    """

    def __init__(self, comm: Any, timeout: float, oversubscribed: bool) -> None:
        self.rank = comm.rank
        self.size = comm.size
        self.timeout = timeout
        self._comm = comm
        self._oversubscribed = oversubscribed
        self._failure = ""
        self._collectives = OpQueue(self._check, self._fail_with, oversubscribed)
        self._sends: WeakSet[OpQueue] = WeakSet()
        self._receives: WeakSet[OpQueue] = WeakSet()
        finalizer.add(self)

    @property
    def comm(self) -> Any:
        """The communicator.

        Raises:
            TransportError: an earlier operation has failed here, or the group has been left.
        """
        if self._failure or self._comm is None:
            why = self._failure or "the group has been destroyed"
            raise TransportError(f"mpi4py: this group cannot be used since an earlier error: {why}")
        return self._comm

    def run(
        self,
        operation: str,
        steps: Steps,
        asynchronous: bool,
        timeout: float | None,
        result: list[torch.Tensor],
    ) -> CPUWork:
        """Run a collective, synchronously or in the background.

        Raises:
            TransportError: when an earlier one has failed here, or this one does.
        """
        if asynchronous:
            return self._collectives.enqueue(operation, steps, timeout or self.timeout, result)
        return self._collectives.run(operation, lambda: steps, (), lambda: timeout or self.timeout)

    def send(self, tensor: torch.Tensor, target: int, tag: int) -> CPUWork:
        """Send `tensor` to `target` in the background; completed when `tensor` may be written to
        again.
        """
        queue = self._new_queue(self._sends)
        steps = _send(self.comm, tensor, target, self._check_tag(tag))
        return queue.enqueue(f"send to rank {target}", steps, None, [tensor], self.timeout)

    def receive(self, tensor: torch.Tensor, source: int | None, tag: int) -> CPUWork:
        """Receive a message from `source`, or from any rank, into `tensor` in the background."""
        mpi = load_mpi()
        status = mpi.Status()
        steps = _receive(
            self.comm,
            tensor,
            mpi.ANY_SOURCE if source is None else source,
            self._check_tag(tag),
            status,
        )
        operation = "recv from any rank" if source is None else f"recv from rank {source}"
        queue = self._new_queue(self._receives)
        work = queue.enqueue(operation, steps, None, [tensor], self.timeout)
        # it must not take a message after its caller has stopped waiting
        work.on_wait_error = None if work.is_completed() else queue.abort
        work.get_source = lambda: status.Get_source() if work.is_success() else None
        return work

    def fail(self, reason: str) -> None:
        """Give up the group on this rank; MPI does not inform the others."""
        self._failure = self._failure or reason

    def close(self) -> None:
        """Leave the group when this rank's operations, but for receives, have completed, or the
        time limit is over.
        """
        comm = self._comm
        self._comm = None
        if comm is None:
            return
        self._wait_for_pending()
        self.fail("the group has been destroyed")
        for queue in [self._collectives, *self._sends, *self._receives]:
            queue.abort(TransportError(f"mpi4py: {self._failure}"))
        if not load_mpi().Is_finalized():
            comm.Free()

    def _wait_for_pending(self) -> None:
        """Wait for operations that the others may still join: MPI has no way to cancel them."""
        deadline = time.monotonic() + self.timeout
        queues = [self._collectives, *self._sends]
        while any(queue.pending for queue in queues):
            if self._failure or finalizer.aborting or time.monotonic() > deadline:
                return
            for queue in queues:
                queue.make_progress()  # at the end of the program the progress thread may be gone
            time.sleep(_POLL_S)

    def _new_queue(self, queues: WeakSet[OpQueue]) -> OpQueue:
        """Return a queue for one message alone: MPI itself keeps messages in order."""
        queue = OpQueue(self._check, None, self._oversubscribed)
        queues.add(queue)
        return queue

    def _check_tag(self, tag: int) -> int:
        upper = self.comm.Get_attr(load_mpi().TAG_UB)
        if not 0 <= tag <= upper:
            raise ConfigError(
                "tag", f"a number from 0 to {upper}, the largest tag of this MPI", tag
            )
        return tag

    def _check(
        self, operation: str, awaited: Iterable[int], seconds: float, timeout: float
    ) -> None:
        if seconds >= timeout:
            raise StallError(
                f"mpi4py: {operation} has not ended on rank {self.rank} (of {self.size}) within "
                f"its time limit of {timeout:g} s: another rank has not called it, or no longer can"
            )

    def _fail_with(self, error: BaseException) -> None:
        self.fail(str(error) or type(error).__name__)


def _send(comm: Any, tensor: torch.Tensor, target: int, tag: int) -> Steps:
    flat = flatten(tensor)
    yield from request_steps(
        lambda: comm.Isend([mpi_buffer(flat), load_mpi().BYTE], target, tag), flat
    )


def _receive(comm: Any, tensor: torch.Tensor, source: int, tag: int, status: Any) -> Steps:
    buffer = buffer_for([tensor])

    def begin() -> Any:
        return comm.Irecv([mpi_buffer(buffer), load_mpi().BYTE], source, tag)

    yield from request_steps(begin, buffer, status, can_cancel=True)
    sent = status.Get_count(load_mpi().BYTE)
    wanted = buffer.numel() * buffer.element_size()
    if sent != wanted:
        raise TransportError(
            f"mpi4py: rank {status.Get_source()} sent {sent} bytes (tag {tag}), "
            f"but rank {comm.rank} receives into {wanted} bytes"
        )
    copy_back(buffer, tensor)
