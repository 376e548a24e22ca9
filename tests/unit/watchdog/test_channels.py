"""Which send belongs to which receive: by group, ranks and tag."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.flight_recorder import CallSignature, FlightRecorder, RawRecord, RecorderReader
from lockstep.flight_recorder.layout import GROUP_SLOTS
from lockstep.watchdog.deadlock import explained, find_other_tag
from lockstep.watchdog.report import Finding
from lockstep.watchdog.states import channel_key, wait_in

GROUP = 7


class Rank:
    """A rank of two that only records."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.recorder = FlightRecorder(folder, rank, 2, "here", "program")
        self.reader = RecorderReader(self.recorder.path)
        self.rank, self.other = rank, 1 - rank

    def message(
        self, sent: bool, tag: int = 0, group: int = GROUP, size: int = 16, any_rank: bool = False
    ) -> RawRecord:
        what = "send()" if sent else "recv()"
        call = CallSignature(1, what, self.recorder.texts.intern(what))
        peer = self.rank if any_rank else self.other
        number = self.recorder.enter(group, 0, 0, call, 0, 0, 0, 0, peer, tag=tag)
        source, target = (
            (self.rank, self.other) if sent else (-1 if any_rank else self.other, self.rank)
        )
        channel = channel_key(sent, group, source, target, tag)
        self.recorder.count_message(-1 if any_rank else peer, sent, channel, size)
        raw = self.reader.raw(number)
        assert raw is not None
        return raw

    def is_matched(self, wanted: RawRecord, other: Rank) -> bool:
        return wait_in(self.reader, wanted).is_matched_by(self.rank, other.reader)

    def other_tag(self, wanted: RawRecord, other: Rank) -> int | None:
        return find_other_tag(self.reader, wait_in(self.reader, wanted), {other.rank: other.reader})

    def close(self) -> None:
        self.reader.close()
        self.recorder.close()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[Rank]]:
    made = [Rank(tmp_path, rank) for rank in range(2)]
    yield made
    for each in made:
        each.close()


def test_a_message_with_another_tag_or_group_is_another_one(ranks: list[Rank]) -> None:
    sender, receiver = ranks
    wanted = receiver.message(False, tag=6)
    sent = sender.message(True, tag=5)
    sender.message(True, tag=6, group=8)
    assert not receiver.is_matched(wanted, sender)
    assert not sender.is_matched(sent, receiver)
    wait = wait_in(receiver.reader, wanted)
    finding = explained(
        Finding("desync", "it is so"), receiver.rank, wait, receiver.other_tag(wanted, sender)
    )
    assert finding.cause == (
        "The tags differ: rank 1 receives with tag 6, rank 0 sends with tag 5."
    )
    sender.message(True, tag=6)
    assert receiver.is_matched(wanted, sender)


def test_tags_that_have_been_received_are_no_cause(ranks: list[Rank]) -> None:
    sender, receiver = ranks
    sender.message(True, tag=5)
    receiver.message(False, tag=5)
    assert receiver.other_tag(receiver.message(False), sender) is None


def test_messages_of_a_channel_are_received_in_their_order(ranks: list[Rank]) -> None:
    sender, receiver = ranks
    first, second = receiver.message(False), receiver.message(False)
    sender.message(True)
    assert [wait_in(receiver.reader, each).messages for each in (first, second)] == [1, 2]
    assert receiver.is_matched(first, sender)
    assert not receiver.is_matched(second, sender)


def test_a_receive_from_any_rank_may_be_for_a_send(ranks: list[Rank]) -> None:
    sender, receiver = ranks
    sent = sender.message(True)
    assert not sender.is_matched(sent, receiver)
    receiver.message(False, any_rank=True)
    assert sender.is_matched(sent, receiver)


def test_a_message_that_the_backend_has_rejected_does_not_count(ranks: list[Rank]) -> None:
    sender, receiver = ranks
    wanted = receiver.message(False)
    sender.message(True)
    sender.recorder.cancel_message(1, True, channel_key(True, GROUP, 0, 1, 0))
    assert not receiver.is_matched(wanted, sender)


def test_where_the_channels_are_too_many_tags_are_not_told_apart(ranks: list[Rank]) -> None:
    """A program may use a new tag at every step; it must not be taken for one whose messages are
    not sent.
    """
    sender, receiver = ranks
    slots = sender.reader.layout.channel_slots
    for tag in range(slots):
        sender.message(True, tag=tag)
    assert not sender.reader.knows_channels
    assert sender.reader.channels(256) is None
    wanted = receiver.message(False, tag=slots + 1)
    assert receiver.is_matched(wanted, sender)  # one of so many
    assert sender.is_matched(sender.message(True, tag=1), receiver)


def test_sizes_of_the_last_messages_are_known(ranks: list[Rank]) -> None:
    sender, receiver = ranks
    for size in range(1, 21):
        sender.message(True, size=size)
    (channel,) = wait_in(receiver.reader, receiver.message(False)).channels
    at = sender.reader.channel(channel)
    assert [sender.reader.channel_size(at, number) for number in (12, 13, 20, 21)] == [
        None,
        13,
        20,
        None,
    ]
    assert sender.reader.channels(256) == {channel: 20}


def test_members_of_a_group_are_recorded(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path, 3, 130, "here", "program")
    slot = recorder.open_group(5, ranks=(0, 3, 64, 129))
    with RecorderReader(recorder.path) as reader:
        assert list(reader.members(slot)) == [0, 3, 64, 129]
    recorder.close()


def test_members_are_not_recorded_where_slots_are_reused_at_once(tmp_path: Path) -> None:
    """A member that has made the group, and other groups after it, would look as if it had never
    made it.
    """
    recorder = FlightRecorder(tmp_path, 0, 2, "here", "program")
    slots = [recorder.open_group(key, ranks=(0, 1)) for key in range(1, GROUP_SLOTS + 1)]
    with RecorderReader(recorder.path) as reader:
        known = [list(reader.members(slot)) == [0, 1] for slot in slots]
        assert known == [True] * (GROUP_SLOTS - 8) + [False] * 8
        for slot in slots[:10]:
            recorder.close_group(slot)
        assert list(reader.members(recorder.open_group(99, ranks=(1,)))) == [1]
    recorder.close()
