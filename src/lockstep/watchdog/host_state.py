"""The state of one host's ranks, as it is published to the other hosts."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from .report import Call, RankStatus

__all__ = ["CallRow", "GroupState", "HostState", "HostStates", "Pending", "RankRow", "RecordRow", "Wait"]

# Rows are published as arrays, twice a second by each host: names of fields would be half of what is sent.


class CallRow(msgspec.Struct, frozen=True, array_like=True):
    """The fields of a `Call`."""

    what: str
    call_site: str
    source: str = ""
    number: int = 0
    group: str = ""
    batch: int | None = None
    name: str = ""


class RankRow(msgspec.Struct, frozen=True, array_like=True):
    """The fields of a `RankStatus` that other hosts need."""

    state: str
    note: str = ""
    host: str = ""
    pid: int = 0
    batch: int | None = None
    waiting_s: float | None = None
    call: CallRow | None = None
    traceback: str = ""

    @staticmethod
    def of(status: RankStatus) -> RankRow:
        """Return the row of a status; of a traceback its end."""
        call = None if status.call is None else CallRow(*msgspec.structs.astuple(status.call))
        return RankRow(
            *(status.state, status.note, status.host, status.pid, status.batch, status.waiting_s),
            call,
            status.traceback[-2000:],
        )

    def status(self, rank: int) -> RankStatus:
        """Return the status of `rank`, whose row this is."""
        call = None if self.call is None else Call(*msgspec.structs.astuple(self.call))
        return RankStatus(
            rank, self.state, self.note, self.host, self.pid, self.batch, call, self.waiting_s, (), self.traceback
        )


class RecordRow(msgspec.Struct, frozen=True, array_like=True):
    """A collective, by what is compared among ranks; see `RawRecord`."""

    sequence: int
    fingerprint: int
    line: int
    batch: int
    loop: int
    named: int


class Pending(msgspec.Struct, frozen=True, array_like=True):
    """The first pending collective of ranks in a group.

    Attributes:
        sequence: its sequence number.
        seconds: since its call.
        limit_s: timeout that the user has set; 0 for none.
    """

    sequence: int
    seconds: float
    limit_s: float


class GroupState(msgspec.Struct, array_like=True):
    """Ranks of one host that are in the same state in one group.

    Attributes:
        ranks: these ranks.
        last: the sequence number of their last collective.
        pending: the first one that is pending.
        records: their last collectives.
        what: the last one.
        call_site: where they called it, with the text of the line.
        title: of the group, "" for the default group.
    """

    ranks: list[int]
    last: int
    pending: Pending | None
    records: list[RecordRow]
    what: str
    call_site: str
    title: str = ""

    def last_call(self) -> str:
        """Return what these ranks have called last."""
        return f"{self.what} at {self.call_site.partition(chr(10))[0]}"

    def is_equal(self, other: GroupState) -> bool:
        """Return whether both differ in the ranks and in the seconds of a wait only."""
        if (self.pending and self.pending.sequence) != (other.pending and other.pending.sequence):
            return False
        return msgspec.structs.replace(self, ranks=other.ranks, pending=other.pending) == other


class Wait(msgspec.Struct, frozen=True, array_like=True):
    """The operation in which a rank waits.

    Attributes:
        record: the number of its record.
        peer: the rank that it receives from or sends to; -1 in a collective.
        messages: how many messages the peer must have sent, or posted receives for.
        key: of the group of a collective.
        sequence: sequence number of a collective.
        channels: keys of the peer's channels of these messages; empty if they are not known.
        is_send: whether it sends.
    """

    record: int
    peer: int
    messages: int = 0
    key: int = 0
    sequence: int = 0
    channels: list[int] = []
    is_send: bool = False


class HostState(msgspec.Struct):
    """What a host publishes.

    Attributes:
        ranks: its ranks.
        groups: by key, the states of its ranks in groups with ranks of other hosts.
        waits: of the ranks that wait for others.
        sent: how many messages each rank has sent, by destination.
        channels: for ranks that wait, how many messages they have sent, or posted receives for, by channel.
        solo: whether rank 0 works while the others wait for it.
        activities: what the programs of ranks are doing, such as "the callback Curve.on_train_end", where it is known.
        own_work: ranks of which that is work of Lockstep's own that may take seconds.
        final: whether a rank is about to exit.
        count: differs from one publication to the next.
    """

    ranks: dict[int, RankRow] = {}
    groups: dict[int, list[GroupState]] = {}
    waits: dict[int, Wait] = {}
    sent: dict[int, dict[int, int]] = {}
    channels: dict[int, dict[int, int]] = {}
    solo: bool = False
    activities: dict[int, str] = {}
    own_work: list[int] = []
    final: bool = False
    count: int = 0


HostStates = Mapping[int, HostState]
"""The states of hosts, by the host's index."""
