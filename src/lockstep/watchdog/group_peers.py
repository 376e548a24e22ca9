"""The other ranks of a group on this host: which of its collectives they have called, and whether
this rank calls the same.

The ranks of a host read each other's flight recorders. Ranks of other hosts are compared by the
pre-flight check, see `preflight`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..flight_recorder import RawRecord, RecorderReader
from . import mismatch
from .swaps import SwapDetector, are_swapped

if TYPE_CHECKING:
    from .shared_state import WatchdogState

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

    def record_of(self, key: int, sequence: int) -> RawRecord | None:
        """Return its record of a collective of the group `key`; None if it has not called it, or
        the record is overwritten.
        """
        slot = self.find_slot(key)
        number = self.reader.record_number(slot, sequence) if slot >= 0 else 0
        raw = self.reader.raw(number) if number else None
        return raw if raw is not None and raw.key == key and raw.sequence == sequence else None


class GroupPeers:
    """The other ranks of one group on this host, with whose calls this rank's are compared.

    Args:
        state: of the watchdog.
        key: of the group.
        slot: of the group in this rank's flight recorder.
        ranks: global ranks of the others, in the order in which they are looked at.
        swaps: of the group.
    """

    def __init__(
        self,
        state: WatchdogState,
        key: int,
        slot: int,
        ranks: Iterable[int],
        swaps: SwapDetector,
    ) -> None:
        self._state = state
        self._key = key
        self._slot = slot
        self._swaps = swaps
        self._peers = [Peer(rank, state.peers[rank]) for rank in ranks]
        self._memories = tuple(peer.reader.memory for peer in self._peers)
        # topics of differences that are no errors and have been warned about
        self._warned: set[tuple[str, int]] = set()

    def missing(self, sequence: int) -> list[int]:
        """Return the ranks that have not called that collective yet."""
        ranks = []
        for peer in self._peers:
            slot = peer.find_slot(self._key)
            if slot < 0 or peer.reader.last_sequence(slot) < sequence:
                ranks.append(peer.rank)
        return ranks

    def within(self, sequence: int) -> list[int]:
        """Return the ranks that have called that collective and are in it."""
        records = ((peer.rank, peer.record_of(self._key, sequence)) for peer in self._peers)
        return [rank for rank, raw in records if raw is not None and not raw.left]

    def compare_first(self, number: int, sequence: int) -> None:
        """Compare the collective that this rank is about to start with one rank that has called
        it, if any has.

        One is enough: those that called it before were compared with each other.

        Args:
            number: of this rank's record.
            sequence: of the collective.

        Raises:
            DesyncError: that rank has called something else.
        """
        state = self._state
        if state.recorder.agrees(number, self._slot, self._memories):
            return
        key = self._key
        mine = state.recorder.compared_bytes(number)
        for peer in self._peers:
            reader = peer.reader
            compared = reader.compared_bytes(peer.slot, key, sequence)
            if compared is None:  # the slot is not known yet, or has become another group's
                compared = reader.compared_bytes(peer.find_slot(key), key, sequence)
            if compared == mine:
                return
            if compared is None or compared[:_IDENTITY_BYTES] != mine[:_IDENTITY_BYTES]:
                continue  # it has not called it: the record there is of another one
            their_record = peer.record_of(key, sequence)
            if their_record is not None:
                own_record = state.own_reader.raw(number)
                if own_record is not None:
                    self._swaps.note_lines(own_record, {their_record.line})
                    self._compare_with(peer, own_record, raises=True)
                return

    def compare_all(self, own_record: RawRecord) -> None:
        """Compare this rank's record of a collective with that of every rank that has called it,
        and report differences: two ranks that call at the same moment both miss them.
        """
        for peer in self._peers:
            self._compare_with(peer, own_record, raises=False)

    def _compare_with(self, peer: Peer, own_record: RawRecord, raises: bool) -> None:
        """Compare this rank's record of a collective with that of `peer`, and report a difference.

        Raises:
            DesyncError: with `raises`, if the difference is an error.
        """
        their_record = peer.record_of(self._key, own_record.sequence)
        if their_record is None or not self._difference(own_record, peer, their_record):
            return
        if (
            own_record.rejected != their_record.rejected
            and time.monotonic() - own_record.entered < _REJECTION_S
        ):
            # the backend may still reject the call of one of them, which is then no part of that
            # collective
            return
        time.sleep(_REREAD_S)
        their_record = peer.record_of(self._key, own_record.sequence)
        kind = self._difference(own_record, peer, their_record) if their_record is not None else ""
        if their_record is not None and kind:
            self._report(kind, own_record, peer, their_record, raises)

    def _difference(self, own_record: RawRecord, peer: Peer, their_record: RawRecord) -> str:
        """Return the gravest difference, without those that were warned about; "" for none."""
        if self._is_swap(own_record, peer, their_record):
            return "swap"
        strict = self._state.limits.strict
        for kind in mismatch.compare_records(
            own_record, their_record, bool(self._state.uneven_batches)
        ):
            if (
                mismatch.is_error(kind, strict)
                or _topic(kind, own_record, their_record) not in self._warned
            ):
                return kind
        return ""

    def _is_swap(self, own_record: RawRecord, peer: Peer, their_record: RawRecord) -> bool:
        """Return whether the two ranks have called this collective and the one before it in
        different orders, as one of them has announced.
        """
        reader = self._state.own_reader
        announced = (
            self._swaps.has_announced(rank_reader, own_record.sequence)
            for rank_reader in (reader, peer.reader)
        )
        if not any(announced):
            return False
        before = reader.raw(reader.record_number(self._slot, own_record.sequence - 1))
        their_last = peer.record_of(self._key, own_record.sequence - 1)
        if (
            before is None
            or their_last is None
            or (before.key, before.sequence) != (self._key, own_record.sequence - 1)
        ):
            return False
        return are_swapped((before, their_last), (own_record, their_record))

    def _report(
        self, kind: str, own_record: RawRecord, peer: Peer, their_record: RawRecord, raises: bool
    ) -> None:
        """Report a difference: as an error, or once as a warning."""
        state = self._state
        calls = state.own_reader.record(own_record), peer.reader.record(their_record)
        finding = mismatch.describe_difference(kind, (state.rank, peer.rank), calls)
        if mismatch.is_error(kind, state.limits.strict):
            if state.recorder.phase == "runs":
                state.recorder.begin_wait(own_record.number, own_record.entered)
            state.fail(finding.at(self._key, own_record.sequence))
            if raises:
                state.check()
            return
        topic = _topic(kind, own_record, their_record)
        self._warned.add(topic)
        try:
            (state.folder / f"{kind}-{topic[1]:x}").touch(exist_ok=False)
        except FileExistsError:  # the other rank has written the warning
            return
        except OSError:  # no space: better a warning twice than none
            pass
        state.write_message(finding.as_warning())


def _topic(kind: str, own_record: RawRecord, their_record: RawRecord) -> tuple[str, int]:
    """Return what is warned about once: a pair of lines, or a loop over batches."""
    if kind == "lines":
        return kind, own_record.line ^ their_record.line
    return kind, own_record.loop
