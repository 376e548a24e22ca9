"""Records this rank's collectives in one process group, has them compared with the other ranks',
and says why one hangs.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..flight_recorder import current
from . import mismatch
from .call_sites import digest
from .diagnosis import ObservationClock, local_finding
from .group_peers import GroupPeers
from .report import Finding
from .shared_state import PendingCall, WatchdogState
from .states import channel_key, describe_record
from .swaps import SwapDetector

if TYPE_CHECKING:
    from .gloo_waits import EndableWaits
    from .preflight import PreflightCheck

_STOPPED_S = 1.0  # a process that was stopped for longer may have been given up by the others


class _StreamEvent:
    """An event of a device stream with the method of c10d's `Work` that tells whether it has
    completed.
    """

    def __init__(self, event: torch.Event) -> None:
        self._event = event

    def is_completed(self) -> bool:
        return bool(self._event.query())


def record_event(device: torch.device) -> _StreamEvent | None:
    """Record an event in the device's current stream; None if the device has no streams.

    c10d's work would tell the same, and keep the tensors of the operation alive for as long as it
    is kept.
    """
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != device.type:
        return None
    return _StreamEvent(torch.accelerator.current_stream(device).record_event())


class GroupMonitor:
    """Monitors one process group on this rank.

    Args:
        state: of the watchdog.
        name: of the group in c10d.
        title: of the group in reports, "" for the default group.
        ranks: global ranks of its members.
        uses: how many groups of that name and those ranks this rank has made before.
        limit_s: timeout in seconds that the user has set for the group; 0 for none.

    Attributes:
        key: 64-bit digest that identifies the group on all ranks.
        sequence: sequence number of the last collective.
        rejected: how many calls the backend has rejected.
        pending: collectives that have not completed, in order.
        pending_receives: receives for which a stream waits, and no longer the program.
        threads_inside: identities of the threads that are in a call of the group.
        coalesced: by thread, the calls that are to be started as one.
        swaps: finds collectives that ranks call in different orders.
        peers: the other members on this host.
        remote_ranks: the other members, on other hosts.
        limits: time limits and modes; those of the watchdog unless the group has its own.
        preflight: compares calls across hosts; None if all members are on one host, or calls cannot
            be compared.
        sizes_must_fit: whether a message that is larger than its receive ends the receiver's
            process, as over Gloo.
        completes_on_host: whether an operation has completed when its future has, and was not
            merely enqueued.
        used_by_ddp: whether a DistributedDataParallel reduces over the group.
        endable_waits: the waits of a group over Gloo in an elastic job; None in others, whose waits
            end with the report or the process.
        moved: counts the parts of messages that have moved, where a transport moves them without a
            posted receive.
    """

    def __init__(
        self,
        state: WatchdogState,
        name: str,
        title: str,
        ranks: Sequence[int],
        uses: int,
        limit_s: float = 0.0,
    ) -> None:
        self.state = state
        self.ranks = tuple(ranks)
        self.key = digest(f"{name} {self.ranks} {uses}")
        self.sequence = 0
        self.rejected = 0
        self.pending: deque[PendingCall] = deque()
        self.pending_receives: deque[PendingCall] = deque()
        self.threads_inside: set[int] = set()
        self.coalesced: dict[int, list[PendingCall]] = {}
        self.limits = state.limits
        self.preflight: PreflightCheck | None = None
        self.endable_waits: EndableWaits | None = None
        self.moved: Callable[[], int] | None = None
        self.sizes_must_fit = False
        self.completes_on_host = False
        self.used_by_ddp = False
        recorder = state.recorder
        self.limit_s = limit_s
        self.slot = recorder.open_group(self.key, limit_s, self.ranks)
        self.title_number = recorder.texts.intern(title)
        self.swaps = SwapDetector(recorder, self.key)
        position = self.ranks.index(recorder.rank)
        others = (*self.ranks[position + 1 :], *self.ranks[:position])
        on_this_host = [rank for rank in others if rank in state.peers]
        self.peers = GroupPeers(state, self.key, self.slot, on_this_host, self.swaps)
        self.remote_ranks = tuple(rank for rank in others if rank not in state.peers)
        self._channels: dict[tuple[bool, int, int], int] = {}  # keys, by direction, peer and tag

    def enter(
        self, operation: str, key: tuple[Any, ...], peer: int = -1, tag: int = 0
    ) -> PendingCall:
        """Record that this rank calls a collective, and compare it with what others have called.

        Args:
            operation: its name in reports.
            key: what all ranks must call alike; see `signatures.OPERATIONS`.
            peer: the other rank of a message; -1 for a collective.
            tag: of a message.

        Raises:
            DesyncError: they have called something else.
        """
        state = self.state
        if state.error is not None:
            state.check()
        recorder = state.recorder
        name = current.thread.name
        call = state.signatures.lookup(operation, key, name)
        site = state.call_sites.lookup(sys._getframe(1))
        if self.swaps.last_mismatch is not None and peer < 0:
            self.swaps.announce(
                self.swaps.last_mismatch, self.sequence + 1, site.line, sys._getframe(1)
            )
        name_number = recorder.texts.intern(name) if name else 0
        now = time.monotonic()
        with state.lock:
            sequence = 0
            if peer < 0:
                sequence = self.sequence = self.sequence + 1
            number = recorder.calls.enter(
                self.key,
                self.slot,
                sequence,
                call.fingerprint,
                site.line,
                call.number,
                site.text,
                self.title_number,
                name_number,
                peer,
                self.rejected,
                now,
                tag,
                None,
            )
            pending = PendingCall(number, sequence, now)
            if sequence:
                # else the monitor thread does: a step queries no device
                if self.pending and self.completes_on_host:
                    self.reap_completed()
                self.pending.append(pending)
        if now - state.last_poll > _STOPPED_S and state.poll_report():
            state.check()
        if sequence:
            self.peers.compare_first(number, sequence)
        return pending

    def send_or_receive(
        self, operation: str, tensors: Sequence[torch.Tensor], peer: int, tag: int = 0
    ) -> PendingCall:
        """Record a message to or from the global rank `peer`; -1 for a receive from any rank.

        Raises:
            DesyncError: the message is larger than its receive, where that would end a process.
        """
        sent = operation == "send"
        if not self.completes_on_host and any(tensor.device.type != "cpu" for tensor in tensors):
            tag = 0  # NCCL has none
        key = (
            tuple((tensor.shape, tensor.dtype) for tensor in tensors),
            ("to" if sent else "from", peer if peer >= 0 else "any rank"),
            *((("tag", tag),) if tag else ()),
        )
        pending = self.enter(
            "send" if sent else "recv", key, peer if peer >= 0 else self.state.rank, tag
        )
        channel = self._channel(sent, peer, tag)
        size = sum(tensor.nbytes for tensor in tensors)
        pending.message = peer, sent, channel
        number = self.state.recorder.count_message(peer, sent, channel, size)
        if (
            self.sizes_must_fit
            and number
            and peer in self.state.peers
            and tensors[0].device.type == "cpu"
        ):
            self._compare_sizes(pending, tag, number, size)
        return pending

    def _channel(self, sent: bool, peer: int, tag: int) -> int:
        """Return the key of a channel of this rank, see
        `flight_recorder.layout.Layout.channels`.
        """
        known = sent, peer, tag
        if known not in self._channels:
            rank = self.state.rank
            source, target = (rank, peer) if sent else (peer, rank)
            self._channels[known] = channel_key(sent, self.key, source, target, tag)
        return self._channels[known]

    def _compare_sizes(self, pending: PendingCall, tag: int, number: int, size: int) -> None:
        """Report that message `number` of its channel is larger than the receive that matches it.

        Messages of a channel are received in the order in which they were sent. The side that comes
        second finds it, before data moves.
        """
        state = self.state
        (peer, sent, _) = pending.message
        reader = state.peers[peer]
        source, target = (state.rank, peer) if sent else (peer, state.rank)
        theirs = reader.channel(channel_key(not sent, self.key, source, target, tag))
        other_size = reader.channel_size(theirs, number) if theirs else None
        if other_size is None or other_size == size or (other_size > size) == sent:
            return
        receiver = reader if sent else state.own_reader
        if receiver.channel(channel_key(False, self.key, -1, target, tag)):
            return  # a receive from any rank may have got a message of this channel
        sizes = (size, other_size) if sent else (other_size, size)
        state.recorder.begin_wait(pending.number, pending.entered)
        raw = state.own_reader.raw(pending.number)
        call = None if raw is None else state.own_reader.record(raw)
        where = "a message" if call is None else f"{call.what} at {call.call_site}"
        state.fail(mismatch.size_finding((source, target), sizes, tag, where))
        state.check()

    def extend_limit(self, seconds: float) -> None:
        """Take over the timeout of one wait of this group, if it is longer than that of the
        group.
        """
        if seconds > self.limit_s:
            self.limit_s = seconds
            self.state.recorder.set_limit(self.slot, seconds)

    def finish(self, pending: PendingCall, now: float) -> None:
        """Record that a call has completed."""
        self.state.recorder.leave(pending.number, now)
        if not pending.sequence:
            return
        # Nobody but its own thread removes a call without a work, so that the first one stays the
        # first: the lock, which takes longer, is not needed.
        try:
            if self.pending[0] is pending and pending.work is None:
                self.pending.popleft()
                return
        except IndexError:  # the group is being closed
            return
        self.remove_pending(pending)

    def finish_wait(self, pending: PendingCall, work: Any, device: torch.device | None) -> None:
        """Record that the program's wait for a call has returned, which on a device only makes its
        stream wait.

        The call stays in the record until the device has completed it: what waits for that stream
        waits for the call.

        Args:
            pending: the call.
            work: c10d's.
            device: of its tensors; None without any.
        """
        if device is None or device.type == "cpu" or self.state.captures.are_open:
            self.finish(pending, time.monotonic())
            return
        pending.work = record_event(device) or work
        with self.state.lock:
            if not pending.sequence and pending not in self.pending_receives:
                self.pending_receives.append(pending)

    def remove_pending(self, pending: PendingCall) -> None:
        """Remove a collective from the pending ones."""
        with self.state.lock:
            if pending in self.pending:
                self.pending.remove(pending)

    def cancel_call(self, pending: PendingCall) -> None:
        """Remove a call that the backend has rejected before anything was sent."""
        if pending.message is not None:
            self.state.recorder.cancel_message(*pending.message)
        with self.state.lock:
            if pending.sequence and pending.sequence == self.sequence:
                self.sequence -= 1
                self.rejected += 1
                self.state.recorder.cancel_call(self.slot, pending.sequence)

    def close(self) -> None:
        """Stop monitoring: the group has been destroyed, or is excluded."""
        self.state.recorder.close_group(self.slot)
        self.pending.clear()
        self.pending_receives.clear()

    def unfinished_works(self) -> list[Any]:
        """Return the works of Gloo, in an elastic job, that have been started and have not
        ended.
        """
        waits = self.endable_waits
        if waits is None:
            return []
        with self.state.lock:
            works = [*waits.abandoned, *(pending.work for pending in list(self.pending))]
        return [work for work in works if work is not None and not work.is_completed()]

    def abandon(self, work: Any) -> None:
        """Note that nobody waits any more for a collective that has started, see
        `unfinished_works`.
        """
        if self.endable_waits is not None:
            self.endable_waits.abandon(work)

    def first_pending(self) -> PendingCall | None:
        """Return this rank's first collective that has not completed."""
        self.reap_completed()  # without the lock: a device may be slow to answer
        return self._first_of(self.pending)

    def reap_completed(self) -> None:
        """Record the completion of calls that nobody waits for."""
        for calls in (self.pending, self.pending_receives):
            while (first := self._first_of(calls)) is not None and self._has_completed(first):
                self.state.recorder.leave(first.number, time.monotonic())
                with self.state.lock:
                    if first in calls:  # unless another thread has removed it
                        calls.remove(first)

    def _first_of(self, calls: deque[PendingCall]) -> PendingCall | None:
        with self.state.lock:
            return calls[0] if calls else None

    def _has_completed(self, pending: PendingCall) -> bool:
        work = pending.work
        if work is None or self.completes_on_host:
            return work is not None and bool(work.is_completed())
        try:
            return self.state.captures.query(work.is_completed)
        except RuntimeError:  # the device has failed; whoever waits for it gets that error
            return True

    def diagnose(
        self, pending: PendingCall, missing: Iterable[int], clock: ObservationClock
    ) -> Finding | None:
        """Return why missing ranks will never call a collective, or do their part of a message;
        None if they still may.

        Args:
            pending: this rank's collective or message.
            missing: the ranks that have not called it.
            clock: measures for how long ranks have been stopped.
        """
        where = describe_record(self.state.own_reader, pending.number)
        for rank in missing:
            finding = local_finding(self.state, rank, where, clock)
            if finding is not None:
                return finding.at(self.key, pending.sequence)
        return None
