"""One rank's part of a group on one host: the shared memory, and the operations that run in it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakSet, ref

import torch

from ...environment import usable_cores
from ...errors import TransportError
from ...stores import combine_nothing, exchange
from ..runtime.backoff import NATIVE_SPINS, Steps
from ..runtime.c10d import Store, timeout_of
from ..runtime.op_queue import OpQueue, progress_thread
from ..runtime.tensor_arguments import is_plain
from ..runtime.work import CPUWork
from .chunk_buffers import ChunkBuffers
from .memory_layout import Layout
from .native import begin
from .point_to_point import MessageQueues, PostedReceive
from .rank_states import RankStates
from .segment import share
from .signatures import KINDS


@dataclass(eq=False)
class _Resources:
    """The objects that hold the group's memory."""

    rank_states: RankStates
    buffers: ChunkBuffers
    message_queues: MessageQueues
    collectives: OpQueue
    sends: list[OpQueue]
    receives: WeakSet[OpQueue] = field(default_factory=WeakSet)


class ShmContext:
    """Runs collectives and messages in memory that all ranks of the group have mapped.

    Args:
        store: of the group's rendezvous; used here and not again.
        rank: this rank.
        layout: division of the memory, the same on all ranks.
        timeout: seconds that an operation may take when it is given no limit of its own.
        display_ranks: the number of each rank in errors; their own numbers when None.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        layout: Layout,
        timeout: float,
        display_ranks: Sequence[int] | None = None,
    ) -> None:
        self.rank = rank
        self.size = layout.ranks
        self.timeout = timeout
        self._display_ranks = display_ranks or range(layout.ranks)
        segment = share(store, rank, layout.ranks, layout.total)
        rank_states = RankStates(segment, layout, rank, self._display_ranks)
        rank_states.announce(os.getpid())
        exchange(store, "open", rank, "", self._display_ranks, combine_nothing)
        rank_states.watch_processes()
        self._oversubscribed = layout.ranks > usable_cores()
        self._failure = ""
        buffers = ChunkBuffers(
            segment, layout, rank_states, 0 if self._oversubscribed else NATIVE_SPINS
        )
        self._resources: _Resources | None = _Resources(
            rank_states,
            buffers,
            MessageQueues(segment, layout, rank_states),
            OpQueue(rank_states.check, _fail_weakly(self), self._oversubscribed),
            [OpQueue(rank_states.check, None, self._oversubscribed) for _ in range(layout.ranks)],
        )
        # called when the group has failed here, or is left
        self.on_end: Callable[[], None] = _nothing
        progress_thread.add_group(self)

    @property
    def buffers(self) -> ChunkBuffers:
        """The buffers through which collectives exchange their data.

        Raises:
            TransportError: when the group has failed here, or has been left.
        """
        return self._require_open().buffers

    def count_moved(self) -> int:
        """Return how many fragments of messages this rank has written and read; 0 in a group that
        was left.
        """
        return self._resources.message_queues.count_moved() if self._resources is not None else 0

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
        queue = self._require_open().collectives
        if asynchronous:
            return queue.enqueue(operation, steps, timeout or self.timeout, result)
        return queue.run(operation, lambda: steps, (), lambda: timeout or self.timeout)

    def run_native(
        self,
        kind: str,
        opts: Any,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        keep_alive: object,
        root: int,
        dtype_code: int,
    ) -> CPUWork:
        """Run a collective synchronously in the native extension; see `begin`."""
        resources = self._resources
        if self._failure or resources is None:
            resources = self._require_open()  # raises
        buffers = resources.buffers
        return resources.collectives.run(
            kind,
            begin,
            (buffers, KINDS[kind], root, dtype_code, inputs, outputs, buffers.spins, keep_alive),
            lambda: timeout_of(opts) or self.timeout,
            True,
        )

    def send(self, tensor: torch.Tensor, target: int, tag: int) -> CPUWork:
        """Send `tensor` to `target`, at once if there is room for it, otherwise in the
        background.
        """
        resources = self._require_open()
        message_queues = resources.message_queues
        queue = resources.sends[target]
        if is_plain(tensor) and queue.attempt(lambda: message_queues.try_send(tensor, target, tag)):
            return CPUWork([tensor])
        steps = message_queues.send(tensor, target, tag)
        return queue.enqueue(
            f"send to rank {self._display_ranks[target]}", steps, None, [tensor], self.timeout
        )

    def receive(self, tensor: torch.Tensor, source: int | None, tag: int) -> CPUWork:
        """Receive a message from `source`, or from any rank, into `tensor` in the background."""
        resources = self._require_open()
        receive = resources.message_queues.post(PostedReceive(tensor, source, tag))
        if receive.received_directly:
            work = CPUWork([tensor])
        else:
            work = self._enqueue_receive(resources, receive)
        work.get_source = receive.get_source
        return work

    def _enqueue_receive(self, resources: _Resources, receive: PostedReceive) -> CPUWork:
        message_queues = resources.message_queues
        source = receive.source
        operation = (
            "recv from any rank"
            if source is None
            else f"recv from rank {self._display_ranks[source]}"
        )
        buffers = resources.buffers
        spin = partial(message_queues.spin, receive, buffers.spins) if buffers.is_native else None
        queue = OpQueue(resources.rank_states.check, None, self._oversubscribed, spin)
        resources.receives.add(queue)
        work = queue.enqueue(
            operation, message_queues.receive(receive), None, [receive.tensor], self.timeout
        )

        def cancel(error: BaseException) -> None:
            queue.abort(error)
            message_queues.cancel(receive)

        # it must not take a message after its caller has stopped waiting
        work.on_wait_error = None if work.is_completed() else cancel
        return work

    def check(self, operation: str) -> None:
        """Raise when the group has failed, here or on another rank of this host, so that waiting
        for `operation` is vain.
        """
        self._require_open().rank_states.check(operation, (), 0.0, math.inf)

    def fail(self, reason: str, error: BaseException | None = None) -> None:
        """Give up the group: every wait of the others ends with `reason`, and an error of the kind
        of `error`.

        So do the waits of this rank, in whatever thread.
        """
        self._failure = self._failure or reason
        if self._resources is not None:
            self._resources.rank_states.failure = self._failure
            self._resources.rank_states.fail(reason, error)
            self.on_end()

    def close(self) -> None:
        """Leave the group, and release the memory, even if there are still references to the
        group.
        """
        resources = self._resources
        self._resources = None
        self._failure = self._failure or "the group has been destroyed"
        if resources is None:
            return
        resources.rank_states.close()
        self.on_end()
        for queue in (resources.collectives, *resources.sends, *resources.receives):
            queue.abort(TransportError(f"shm: {self._failure}"))
        progress_thread.remove_group(self)

    def _require_open(self) -> _Resources:
        if self._failure or self._resources is None:
            raise TransportError(
                f"shm: this group cannot be used since an earlier error: {self._failure}"
            )
        return self._resources

    def _fail_once(self, error: BaseException) -> None:
        if not self._failure:
            self.fail(f"{type(error).__name__}: {error}", error)


def _fail_weakly(context: ShmContext) -> Callable[[BaseException], None]:
    """Return `_fail_once` with a weak reference to `context`: a group's memory goes with its last
    reference.
    """
    weak = ref(context)

    def fail(error: BaseException) -> None:
        alive = weak()
        if alive is not None:
            alive._fail_once(error)

    return fail


def _nothing() -> None:
    return
