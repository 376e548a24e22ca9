"""Records this rank's collectives in one process group, compares them with the other ranks', and
says why one hangs.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..flight_recorder import RawRecord, RecorderReader, current
from . import mismatch
from .call_sites import digest
from .diagnosis import ObservationClock, local_finding
from .mismatch import compare_records
from .report import Finding
from .shared_state import PendingCall, WatchdogState
from .states import channel_key, describe_record
from .swaps import SwapDetector, are_swapped

if TYPE_CHECKING:
    from .preflight import PreflightCheck

_STOPPED_S = 1.0  # a process that was stopped for longer may have been given up by the others
_IDENTITY_BYTES = 16  # group key and sequence number: the first of the fields that are compared
_REJECTION_S = (
    5.0  # a call that the backend has not rejected after this time is not going to be rejected
)
# a difference is read again after this time, as the record may have been read while it was written
_REREAD_S = 2e-3


@dataclass
class Peer:
    """Another rank of the group, on this host.

    Attributes:
        rank: its global rank.
        reader: of its flight recorder.
        slot: of the group in its flight recorder; -1 if it is not known.
    """

    rank: int
    reader: RecorderReader
    slot: int = -1

    def find_slot(self, key: int) -> int:
        """Return the slot of the group `key` in its flight recorder; -1 if it has not made the
        group (yet).
        """
        if self.slot < 0 or not self.reader.has_group(self.slot, key):
            self.slot = self.reader.group_slot(key)
        return self.slot


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
        waits_in_slices: whether waits look again and again whether they have been interrupted, as
            in an elastic job.
        awaited_messages: messages for which the program waits, in such a group.
        moved: counts the parts of messages that have moved, where a transport moves them without a
            posted receive.
        abandoned: works of the group for which the program waited when it was interrupted, and
            which have not ended.
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
        self.title = title
        self.ranks = tuple(ranks)
        self.key = digest(f"{name} {self.ranks} {uses}")
        self.sequence = self.rejected = 0
        self.pending: deque[PendingCall] = deque()
        self.pending_receives: deque[PendingCall] = deque()
        self.threads_inside: set[int] = set()
        self.coalesced: dict[int, list[PendingCall]] = {}
        self.limits = state.limits
        self.preflight: PreflightCheck | None = None
        self.awaited_messages: list[Any] = []
        self.abandoned: list[Any] = []
        self.moved: Callable[[], int] | None = None
        self.sizes_must_fit = False
        self.completes_on_host = self.used_by_ddp = self.waits_in_slices = False
        recorder = state.recorder
        self.limit_s = limit_s
        self.slot = recorder.open_group(self.key, limit_s, self.ranks)
        self.title_number = recorder.texts.intern(title)
        self.swaps = SwapDetector(recorder, self.key)
        own = self.ranks.index(recorder.rank)
        others = (*self.ranks[own + 1 :], *self.ranks[:own])
        self.peers = [Peer(rank, state.peers[rank]) for rank in others if rank in state.peers]
        self.remote_ranks = tuple(rank for rank in others if rank not in state.peers)
        self._channels: dict[tuple[bool, int, int], int] = {}  # keys, by direction, peer and tag
        # differences that are no errors and have been warned about
        self._warned: set[tuple[str, int]] = set()

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
            number = recorder.enter(
                self.key,
                self.slot,
                sequence,
                call,
                site.line,
                site.text,
                self.title_number,
                name_number,
                peer,
                self.rejected,
                now,
                tag,
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
            self._compare(number, sequence)
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
            own = self.state.rank
            source, target = (own, peer) if sent else (peer, own)
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
        receiver = reader if sent else state.own
        if receiver.channel(channel_key(False, self.key, -1, target, tag)):
            return  # a receive from any rank may have got a message of this channel
        sizes = (size, other_size) if sent else (other_size, size)
        state.recorder.begin_wait(pending.number, pending.entered)
        raw = state.own.raw(pending.number)
        call = None if raw is None else state.own.record(raw)
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
        if not self.waits_in_slices:
            return []
        with self.state.lock:
            works = [*self.abandoned, *(pending.work for pending in list(self.pending))]
        return [work for work in works if work is not None and not work.is_completed()]

    def abandon(self, work: Any) -> None:
        """Note that nobody waits any more for a collective that has started, see
        `unfinished_works`.
        """
        if self.waits_in_slices and work is not None and not work.is_completed():
            self.abandoned.append(work)

    def abort_messages(self) -> None:
        """End the program's waits for messages over Gloo."""
        for work in list(self.awaited_messages):
            work.abort()

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

    def missing_ranks(self, sequence: int) -> list[int]:
        """Return the other ranks of this host that have not called that collective yet."""
        missing = []
        for peer in self.peers:
            slot = peer.find_slot(self.key)
            if slot < 0 or peer.reader.last_sequence(slot) < sequence:
                missing.append(peer.rank)
        return missing

    def ranks_within(self, sequence: int) -> list[int]:
        """Return the other ranks of this host that have called that collective and are in it."""
        records = ((peer.rank, self.peer_record(peer, sequence)) for peer in self.peers)
        return [rank for rank, raw in records if raw is not None and not raw.left]

    def peer_record(self, peer: Peer, sequence: int) -> RawRecord | None:
        """Return a peer's record of that collective; None if it has not called it, or the record is
        overwritten.
        """
        slot = peer.find_slot(self.key)
        number = peer.reader.record_number(slot, sequence) if slot >= 0 else 0
        raw = peer.reader.raw(number) if number else None
        return raw if raw is not None and raw.key == self.key and raw.sequence == sequence else None

    def _compare(self, number: int, sequence: int) -> None:
        # one rank that has called it is enough: those that called it before were compared with each
        # other
        mine = self.state.recorder.compared_bytes(number)
        key = self.key
        for peer in self.peers:
            slot = peer.find_slot(key)
            compared = peer.reader.compared_bytes(slot, sequence) if slot >= 0 else b""
            if compared == mine:
                return
            if compared[:_IDENTITY_BYTES] != mine[:_IDENTITY_BYTES]:
                continue  # it has not called it: the record there is of another one
            theirs = self.peer_record(peer, sequence)
            if theirs is not None:
                own = self.state.own.raw(number)
                if own is not None:
                    self.swaps.note_lines(own, {theirs.line})
                    self.compare_with(peer, own)
                return

    def compare_with(self, peer: Peer, own: RawRecord, raises: bool = True) -> None:
        """Compare this rank's record of a collective with that of `peer`, and report a difference.

        Raises:
            DesyncError: with `raises`, if the difference is an error.
        """
        theirs = self.peer_record(peer, own.sequence)
        if theirs is None or not self._difference(own, peer, theirs):
            return
        if own.rejected != theirs.rejected and time.monotonic() - own.entered < _REJECTION_S:
            # the backend may still reject the call of one of them, which is then no part of that
            # collective
            return
        time.sleep(_REREAD_S)
        theirs = self.peer_record(peer, own.sequence)
        kind = self._difference(own, peer, theirs) if theirs is not None else ""
        if theirs is not None and kind:
            self._report_difference(kind, own, peer, theirs, raises)

    def _difference(self, own: RawRecord, peer: Peer, theirs: RawRecord) -> str:
        """Return the gravest difference, without those that were warned about; "" for none."""
        if self._is_swap(own, peer, theirs):
            return "swap"
        kinds = compare_records(own, theirs, bool(self.state.uneven_batches))
        return next((kind for kind in kinds if not self._has_warned(kind, own, theirs)), "")

    def _is_swap(self, own: RawRecord, peer: Peer, theirs: RawRecord) -> bool:
        announced = (
            self.swaps.has_announced(reader, own.sequence)
            for reader in (self.state.own, peer.reader)
        )
        if not any(announced):
            return False
        before = self.state.own.raw(self.state.own.record_number(self.slot, own.sequence - 1))
        their_last = self.peer_record(peer, own.sequence - 1)
        if (
            before is None
            or their_last is None
            or (before.key, before.sequence) != (self.key, own.sequence - 1)
        ):
            return False
        return are_swapped((before, their_last), (own, theirs))

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
        where = describe_record(self.state.own, pending.number)
        found = (local_finding(self.state, rank, where, clock) for rank in missing)
        finding = next((each for each in found if each is not None), None)
        return None if finding is None else finding.at(self.key, pending.sequence)

    def _report_difference(
        self, kind: str, own: RawRecord, peer: Peer, theirs: RawRecord, raises: bool
    ) -> None:
        state = self.state
        if not mismatch.is_error(kind, state.limits.strict):
            self._warn(kind, own, peer, theirs)
            return
        calls = state.own.record(own), peer.reader.record(theirs)
        found = mismatch.describe_difference(kind, (state.rank, peer.rank), calls)
        if state.recorder.phase == "runs":
            state.recorder.begin_wait(own.number, own.entered)
        state.fail(found.at(self.key, own.sequence))
        if raises:
            state.check()

    def _has_warned(self, kind: str, own: RawRecord, theirs: RawRecord) -> bool:
        return (
            not mismatch.is_error(kind, self.state.limits.strict)
            and _topic(kind, own, theirs) in self._warned
        )

    def _warn(self, kind: str, own: RawRecord, peer: Peer, theirs: RawRecord) -> None:
        topic = _topic(kind, own, theirs)
        state = self.state
        self._warned.add(topic)
        calls = state.own.record(own), peer.reader.record(theirs)
        found = mismatch.describe_difference(kind, (state.rank, peer.rank), calls)
        try:
            (state.folder / f"{kind}-{topic[1]:x}").touch(exist_ok=False)
        except FileExistsError:  # the other rank has written the warning
            return
        except OSError:  # no space: better a warning twice than none
            pass
        state.write_message(found.as_warning())


def _topic(kind: str, own: RawRecord, theirs: RawRecord) -> tuple[str, int]:
    """Return what is warned about once: a pair of lines, or a loop over batches."""
    return kind, own.line ^ theirs.line if kind == "lines" else own.loop
