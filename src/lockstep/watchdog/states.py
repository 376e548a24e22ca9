"""What each rank is doing, in rows: read from the flight recorders of this host, and published to
the other hosts.

A rank of this host and one of another have the same rows, and what is wrong between them is found
in the same way.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import structs

from .. import messages
from ..flight_recorder import RankState, RawRecord, Record, RecorderReader, jobs
from ..flight_recorder.layout import GROUP_SLOTS, StateWords
from ..flight_recorder.rank_progress import RankProgress, SlowRank
from .call_sites import digest
from .report import Call, CollectiveCalls, Finding, RankCalls, RankStatus, Report

_WORDS = StateWords()


_STATES = {"runs": "runs", "waits": "waits", "left": "ended", "ended": "ended", "raised": "raised"}
SILENT_S = 3.0
"""Seconds without a heartbeat that are noted; a monitor thread records ten of them a second."""

DESTROYED_GROUPS = "it destroyed its process groups"
"""The note of a rank that has not ended its program, but all its groups."""


def rank_status(
    state: RankState, several_hosts: bool, dead: bool, stopped: bool, stack: tuple[str, ...] = ()
) -> RankStatus:
    """Return the status of one rank of this host.

    Args:
        state: from its flight recorder.
        several_hosts: whether to include the name of its host.
        dead: whether its process has ended.
        stopped: whether its process is stopped.
        stack: of its main thread.
    """
    now = time.monotonic()
    kind = _STATES[state.phase]
    note = ""
    if kind == "raised":
        note = exception_line(state.traceback)
    elif kind == "ended":
        note = DESTROYED_GROUPS if state.phase == "left" else "the program reached its end"
    elif dead:
        kind = "died"
        note = f"process {state.pid} is gone, without an exception or a regular exit"
    elif stopped:
        kind = "frozen"
        note = f"process {state.pid} is stopped by a signal"
    elif now - state.heartbeat > SILENT_S:
        note = f"no heartbeat for {now - state.heartbeat:.1f} s"
    elif kind == "runs" and state.call is not None and state.call.left is None:
        note = "its last collective is still pending"
    elif kind == "runs" and state.activity:
        note = f"it is in {state.activity}"
    return RankStatus(
        state.rank,
        kind,
        note,
        state.host if several_hosts else "",
        state.pid,
        state.batch,
        None if state.call is None else _call(state.call),
        now - state.call.entered if kind == "waits" and state.call is not None else None,
        stack,
        state.traceback if kind == "raised" else "",
    )


def exception_line(traceback: str) -> str:
    """Return the line ``ValueError: message`` of a traceback; the first of them for a message of
    several lines.
    """
    lines = traceback.splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith('  File "')]
    after = lines[frames[-1] + 1 :] if frames else lines
    return next((line for line in after if line and not line.startswith(" ")), "")[:300]


def _call(record: Record) -> Call:
    # after its loop a collective belongs to no batch
    batch = None if record.finished else record.batch
    return Call(
        record.what,
        record.call_site,
        record.source,
        record.sequence,
        record.group,
        batch,
        record.name,
    )


def describe_record(reader: RecorderReader, number: int) -> str:
    """Return that record of a rank as text: ``all_reduce(float32[4], sum) at train.py:3 in
    main``.
    """
    raw = reader.raw(number)
    if raw is None:
        return "a collective"
    record = reader.record(raw)
    return f"{record.description} at {record.call_site}"


# Rows are published as arrays, twice a second by each host: names of fields would be half of what
# is sent.


class Wait(msgspec.Struct, frozen=True, array_like=True):
    """The operation in which a rank waits.

    Messages of one group, source, destination and tag, a channel, are received in the order in
    which they were sent. Each rank counts what it has sent, and for what it has posted receives, by
    channel.

    Attributes:
        record: the number of its record.
        peer: the rank that it receives from or sends to; -1 in a collective.
        messages: how many messages the peer must have sent, or posted receives for.
        key: of the group of a collective.
        sequence: sequence number of a collective.
        channels: keys of the peer's channels of these messages; empty if there was no room for all
            of this rank's.
        is_send: whether it sends.
        tag: of the message.
        moved: what the rank has moved of messages so far: a send may end though no receive is
            posted for it.
    """

    record: int
    peer: int
    messages: int = 0
    key: int = 0
    sequence: int = 0
    channels: list[int] = []
    is_send: bool = False
    tag: int = 0
    moved: int = 0

    def is_matched(self, sent: int, counts: Mapping[int, int] | None) -> bool:
        """Return whether the peer has sent the message, or has, or may have, posted a receive for
        it.

        Args:
            sent: how many messages the peer has sent to this rank, in whatever channel.
            counts: how many messages it has sent, or posted receives for, by channel; None if that
                is not known: every receive may have been posted then, and what is sent is counted
                without regard to tags.
        """
        if counts is None or not self.channels:
            return self.is_send or sent >= self.messages
        return sum(counts.get(channel, 0) for channel in self.channels) >= self.messages

    def is_matched_by(self, rank: int, peer: RecorderReader) -> bool:
        """Return whether a peer on this host has sent the message for which `rank` waits,
        or has, or may have, posted a receive for it.
        """
        known = {channel: peer.channel_messages(channel) for channel in self.channels}
        return self.is_matched(
            peer.messages(rank, sent=True), known if peer.knows_channels else None
        )


def current_wait(reader: RecorderReader) -> Wait | None:
    """Return the operation in which a rank waits for others; None if it does not, or if that may be
    misleading.

    If several of its threads communicate, another one may do what is waited for; and a message may
    come from any rank.
    """
    if reader.phase != "waits" or reader.state_word(_WORDS.threads) != 1:
        return None
    raw = reader.raw(reader.state_word(_WORDS.since_record))
    return None if raw is None or raw.peer == reader.rank else wait_in(reader, raw)


def wait_in(reader: RecorderReader, raw: RawRecord) -> Wait:
    """Return the wait of a rank in the collective or message of that record."""
    rank = reader.rank
    peer = raw.peer
    if peer < 0:
        return Wait(raw.number, -1, key=raw.key, sequence=raw.sequence)
    is_send = not is_recv(reader, raw)
    later = (
        reader.raw(number)
        for number in range(raw.number + 1, reader.state_word(_WORDS.records) + 1)
    )
    after = [
        record
        for record in later
        if record and record.peer == peer and is_recv(reader, record) != is_send
    ]
    number = reader.messages(peer, sent=is_send) - len(after)
    channels = []
    if reader.knows_channels:
        source, target = (rank, peer) if is_send else (peer, rank)
        channel = channel_key(is_send, raw.key, source, target, raw.tag)
        number = reader.channel_messages(channel) - sum(
            (record.key, record.tag) == (raw.key, raw.tag) for record in after
        )
        # a receive from any rank may have been posted for it
        sources = (source, -1) if is_send else (source,)
        channels = [
            channel_key(not is_send, raw.key, sender, target, raw.tag) for sender in sources
        ]
    moved = reader.state_word(_WORDS.moved)
    return Wait(
        raw.number, peer, number, channels=channels, is_send=is_send, tag=raw.tag, moved=moved
    )


def is_recv(reader: RecorderReader, raw: RawRecord) -> bool:
    """Return whether that record of the rank of `reader`, of a message, is a receive."""
    return reader.text(raw.what).startswith("recv")


def channel_key(sent: bool, group: int, source: int, target: int, tag: int) -> int:
    """Return the key of a channel; see `flight_recorder.layout.Layout.channels`.

    Args:
        sent: whether of its sends; else of its receives.
        group: key of the group.
        source: the rank that sends; -1 for receives from any rank.
        target: the rank that receives.
        tag: of the messages.
    """
    return digest(f"{'send' if sent else 'recv'} {group} {source} {target} {tag}")


# last collectives of a group that are published; those before were compared in earlier periods
HISTORY = 6
_TRACEBACK = 2000  # characters of its end
_MAX_CHANNELS = 256  # of a rank that waits


class RecordRow(msgspec.Struct, frozen=True, array_like=True):
    """A collective as a rank calls it, by what is compared among ranks; see `RawRecord`.

    Attributes:
        sequence, fingerprint, line, batch, loop: as in its record.
        name: 1 if it has one, which is a number of its rank's own in the record; else 0.
    """

    sequence: int
    fingerprint: int = 0
    line: int = 0
    batch: int = 0
    loop: int = 0
    name: int = 0

    @staticmethod
    def of(raw: RawRecord) -> RecordRow:
        """Return what is compared of a record."""
        return RecordRow(
            raw.sequence, raw.fingerprint, raw.line, raw.batch, raw.loop, int(raw.name > 0)
        )


class GroupState(msgspec.Struct, array_like=True):
    """Ranks of one host that are in the same state in one group.

    Attributes:
        ranks: these ranks.
        last: the sequence number of their last collective.
        pending: that of the first one that is pending; 0 for none.
        seconds: since its call.
        limit_s: timeout that the user has set; 0 for none.
        records: their last collectives.
        what: the last one.
        call_site: where they called it, with the text of the line.
        title: of the group, "" for the default group.
        members: of a group that is being made, as those that do not make it publish nothing of it;
            else empty. On one host, of every group.
    """

    ranks: list[int]
    last: int = 0
    pending: int = 0
    seconds: float = 0.0
    limit_s: float = 0.0
    records: list[RecordRow] = []
    what: str = ""
    call_site: str = ""
    title: str = ""
    members: list[int] = []

    def last_call(self) -> str:
        """Return what these ranks have called last."""
        return f"{self.what} at {self.call_site.partition(chr(10))[0]}"

    def is_equal(self, other: GroupState) -> bool:
        """Return whether both differ in the ranks, and in the seconds and the limit of a wait,
        only.
        """
        return (
            structs.replace(self, ranks=other.ranks, seconds=other.seconds, limit_s=other.limit_s)
            == other
        )


class HostState(msgspec.Struct, omit_defaults=True):
    """What a host publishes.

    Attributes:
        ranks: the `RankStatus` of each of its ranks, as `to_row` makes it.
        groups: by key, the states of its ranks in groups with ranks of other hosts.
        waits: of the ranks that wait for others.
        sent: how many messages each rank has sent, by destination.
        channels: for ranks that wait, how many messages they have sent, or posted receives for, by
            channel.
        solo: whether rank 0 works while the others wait for it.
        activities: what the programs of ranks are doing, such as "the callback Curve.on_train_end",
            where it is known.
        own_work: ranks of which that is work of Lockstep's own that may take seconds.
        held_up: why ranks do not run, where their processes show it, see `diagnosis.why_held_up`.
        final: whether a rank is about to exit.
        progress: the counters of each rank.
        slowest: of the first host, the slowest rank of the job if one is much slower.
        count: differs from one publication to the next.
    """

    ranks: list[list[Any]] = []
    groups: dict[int, list[GroupState]] = {}
    waits: dict[int, Wait] = {}
    sent: dict[int, dict[int, int]] = {}
    channels: dict[int, dict[int, int]] = {}
    solo: bool = False
    activities: dict[int, str] = {}
    own_work: list[int] = []
    held_up: dict[int, str] = {}
    final: bool = False
    progress: list[RankProgress] = []
    slowest: SlowRank | None = None
    count: int = 0


def to_row(status: RankStatus) -> list[Any]:
    """Return the values of a status, of a traceback its end; see `from_rows`."""
    short = structs.replace(status, traceback=status.traceback[-_TRACEBACK:])
    return [
        list(structs.astuple(value)) if isinstance(value, Call) else value
        for value in structs.astuple(short)
    ]


def from_rows(rows: Iterable[Sequence[Any]]) -> list[RankStatus]:
    """Return the statuses that `to_row` was given.

    Raises:
        ValueError: another host has published something else.
    """
    fields: list[dict[str, Any]] = [
        dict(zip(RankStatus.__struct_fields__, row, strict=False)) for row in rows
    ]
    for values in fields:
        if isinstance(values.get("call"), list):
            values["call"] = dict(zip(Call.__struct_fields__, values["call"], strict=False))
    return messages.convert(fields, list[RankStatus])  # at once, as there may be a thousand


def collect_state(
    readers: Mapping[int, RecorderReader],
    gone: Collection[int],
    stopped: Collection[int],
    skip: Collection[int],
) -> HostState:
    """Return the state of this host's ranks.

    Args:
        readers: of the flight recorders of this host's ranks.
        gone: ranks whose processes have ended.
        stopped: ranks whose processes are stopped.
        skip: keys of groups that have no ranks on other hosts.
    """
    host_state = collect_waits(readers, HISTORY, skip)
    host_state.ranks = [
        to_row(rank_status(reader.state(), True, rank in gone, rank in stopped))
        for rank, reader in readers.items()
    ]
    host_state.solo = any(
        reader.in_solo_section for rank, reader in readers.items() if rank not in gone
    )
    host_state.activities = {
        rank: reader.activity for rank, reader in readers.items() if reader.activity
    }
    host_state.own_work = [rank for rank, reader in readers.items() if reader.activity_is_own]
    host_state.progress = [RankProgress.of(reader) for reader in readers.values()]
    return host_state


def collect_waits(
    readers: Mapping[int, RecorderReader], history: int = 0, skip: Collection[int] = ()
) -> HostState:
    """Return of the state of this host's ranks what tells who waits for whom; see `collect_state`.

    Args:
        readers: of the flight recorders of this host's ranks.
        history: how many of the last collectives of each group to include; 0 if ranks of other
            hosts do not matter.
        skip: keys of groups to leave out.
    """
    waits = {
        rank: wait for rank, reader in readers.items() if (wait := current_wait(reader)) is not None
    }
    peers = {wait.peer for wait in waits.values()} & waits.keys()
    host_state = HostState(waits=waits)
    for rank in waits if history else peers:
        most = _MAX_CHANNELS if history else readers[rank].layout.channel_slots
        counts = readers[rank].channels(most)
        if counts is not None:
            host_state.channels[rank] = counts
    for rank in readers if history else peers:
        reader = readers[rank]
        sent = {peer: reader.messages(peer, sent=True) for peer in range(reader.world_size)}
        if any(sent.values()):
            host_state.sent[rank] = {peer: count for peer, count in sent.items() if count}
    for reader in readers.values():
        for slot in range(GROUP_SLOTS):
            key = reader.state_word((reader.layout.group_keys >> 3) + slot)
            if key and key not in skip:
                _add(
                    host_state.groups.setdefault(key, []), _group_state(reader, slot, key, history)
                )
    return host_state


def _group_state(reader: RecorderReader, slot: int, key: int, history: int) -> GroupState:
    """Return the state of one rank in one group."""
    group_state = GroupState(
        [reader.rank], reader.last_sequence(slot), limit_s=reader.limit_s(slot), records=[]
    )
    for sequence in range(max(1, group_state.last + 1 - history), group_state.last + 1):
        raw = reader.raw(reader.record_number(slot, sequence))
        if raw is None or raw.key != key or raw.sequence != sequence:
            continue
        if not raw.left and not group_state.pending:
            group_state.pending = sequence
            group_state.seconds = round(time.monotonic() - raw.entered, 1)
        group_state.records.append(RecordRow.of(raw))
    raw = reader.raw(reader.record_number(slot, group_state.last))
    if raw is not None:
        group_state.what, group_state.call_site, group_state.title = map(
            reader.text, (raw.what, raw.call_site, raw.group)
        )
    if not history or group_state.what.startswith("new_group("):
        group_state.members = list(reader.members(slot))
    return group_state


def _add(states: list[GroupState], state: GroupState) -> None:
    """Add a rank's state to those of its host, joined with an equal one, as all are while all is
    well.
    """
    equal = next((other for other in states if other.is_equal(state)), None)
    if equal is None:
        states.append(state)
    else:
        equal.ranks += state.ranks


class JobStates:
    """What hosts have published, together: a row for each rank, and the groups with their ranks on
    all hosts.

    Args:
        hosts: the ranks of each host.
        states: of hosts, by index.
        groups: the ranks of groups of which a host may have published nothing, by the group's key.
        lost: hosts whose ranks do not respond, by index: the state of these ranks, "lost" or
            "died", and a note.

    Attributes:
        rows: the status of every rank, as far as it is known.
        groups: the states of the ranks of each group, by its key; none is empty.
        waits: the operation of each rank that waits for others.
        host_of: the index of each rank's host.
    """

    def __init__(
        self,
        hosts: Sequence[Sequence[int]],
        states: Mapping[int, HostState],
        groups: Mapping[int, Sequence[int]] | None = None,
        lost: Mapping[int, tuple[str, str]] | None = None,
    ) -> None:
        groups = groups or {}
        lost = lost or {}
        self._states = states
        self.host_of = {rank: host for host, ranks in enumerate(hosts) for rank in ranks}
        self.waits = {rank: wait for state in states.values() for rank, wait in state.waits.items()}
        self.rows = {rank: RankStatus(rank, *lost[host]) for host in lost for rank in hosts[host]}
        self.groups: dict[int, list[GroupState]] = {}
        for host, published in states.items():
            for status in from_rows(published.ranks):
                if host in lost and status.state not in ("ended", "raised", "died"):
                    status = structs.replace(status, state=lost[host][0], note=lost[host][1])
                self.rows[status.rank] = status
            for key, parts in published.groups.items():
                self.groups.setdefault(key, []).extend(parts)
        for key in dict.fromkeys((*self.groups, *groups)):
            parts = self.groups.setdefault(key, [])
            members = {*groups.get(key, ()), *(rank for part in parts for rank in part.members)}
            silent = members.difference(*(part.ranks for part in parts))
            if silent:  # their hosts have published nothing of the group yet
                parts.append(GroupState(sorted(silent)))

    def missing(self, key: int, sequence: int) -> list[int]:
        """Return the ranks that have not called the collective `sequence` of a group; none for
        0.
        """
        parts = self.groups.get(key, ())
        return sorted(rank for part in parts if part.last < sequence for rank in part.ranks)

    def within(self, key: int, sequence: int) -> list[int]:
        """Return the ranks that are in the collective `sequence` of a group; none for 0."""
        parts = self.groups.get(key, ()) if sequence else ()
        return sorted(rank for part in parts if part.pending == sequence for rank in part.ranks)

    def is_matched(self, rank: int) -> bool:
        """Return whether the other rank has done its part of the message in which `rank` waits;
        both must wait.
        """
        wait = self.waits[rank]
        state = self._states[self.host_of[wait.peer]]
        return wait.is_matched(
            state.sent.get(wait.peer, {}).get(rank, 0), state.channels.get(wait.peer)
        )


_SHOWN = 5  # last collectives, the one at which the ranks diverge included


def make_report(
    finding: Finding,
    readers: Mapping[int, RecorderReader],
    rows: Mapping[int, RankStatus],
    world_size: int,
) -> Report:
    """Return the report of a finding.

    Args:
        finding: what is wrong.
        readers: of the flight recorders of this host's ranks, in order.
        rows: the status of each rank, as far as it is known.
        world_size: number of ranks.
    """
    return Report(
        finding.kind,
        finding.sentence,
        tuple(rows[rank] for rank in sorted(rows) if rank < world_size),
        finding.culprits,
        _last_collectives(finding, readers.values()),
        finding.cause,
        finding.advice,
        time.time(),
        jobs.command_line(),
    )


def _last_collectives(
    finding: Finding, readers: Iterable[RecorderReader]
) -> tuple[CollectiveCalls, ...]:
    """Return what the ranks of this host have called last in the group of a finding."""
    if not finding.key:
        return ()
    calls: dict[int, dict[int, Record]] = {}
    last_called: dict[int, int] = {}  # by rank, the number of its last collective in the group
    for reader in readers:
        slot = reader.group_slot(finding.key)
        if slot < 0:
            continue
        last_called[reader.rank] = reader.last_sequence(slot)
        calls[reader.rank] = {
            raw.sequence: reader.record(raw)
            for raw in reader.raws()
            if raw.key == finding.key and raw.sequence
        }
    group = next((record.group for records in calls.values() for record in records.values()), "")
    first = max(1, finding.sequence + 1 - _SHOWN)
    return tuple(
        CollectiveCalls(
            number,
            group,
            _joined_calls(
                {rank: records.get(number) for rank, records in calls.items()},
                {rank for rank, last in last_called.items() if number <= last},
            ),
        )
        for number in range(first, finding.sequence + 1)
    )


def _joined_calls(
    records: Mapping[int, Record | None], callers: Collection[int]
) -> tuple[RankCalls, ...]:
    """Return each distinct call of one collective with its ranks.

    Args:
        records: by rank, its record of the call; None if it has none.
        callers: the ranks that have called it, also those whose record was overwritten since.
    """
    in_one_loop = len({record.loop for record in records.values() if record is not None}) == 1
    ranks_by_call: dict[tuple[str, str] | bool, list[int]] = {}
    first: dict[tuple[str, str] | bool, Call | None] = {}
    for rank, record in records.items():
        call = None if record is None else _call(record)
        # batches of different loops say nothing about each other
        if call is not None and not in_one_loop:
            call = structs.replace(call, batch=None)
        same = (call.what, call.call_site) if call is not None else rank in callers
        ranks_by_call.setdefault(same, []).append(rank)
        first.setdefault(same, call)
    return tuple(
        RankCalls(tuple(ranks), first[same], is_overwritten=same is True)
        for same, ranks in ranks_by_call.items()
    )
