"""What is read from flight recorders and published to other hosts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep import messages
from lockstep.flight_recorder import CallSignature, FlightRecorder, RecorderReader
from lockstep.flight_recorder.layout import RING, StateWords
from lockstep.watchdog.report import Call, Finding, RankStatus
from lockstep.watchdog.report_text import as_text
from lockstep.watchdog.states import (
    HostState,
    JobStates,
    channel_key,
    collect_state,
    collect_waits,
    from_rows,
    make_report,
    to_row,
)

CALL = Call("barrier()", "train.py:3 in main", "dist.barrier()", 4, "tp", 7, "mine")
STATUS = RankStatus(3, "raised", "ValueError: no", "b", 12, 7, CALL, 0.5, (), "x" * 3000)


@pytest.mark.parametrize("status", [STATUS, RankStatus(0, "runs")])
def test_a_status_is_read_as_it_was_published_but_for_a_long_traceback(status: RankStatus) -> None:
    text = messages.encode(HostState(ranks=[to_row(status)]))
    assert "waiting_s" not in text, "names of fields would be half of what is sent"
    (found,) = from_rows(messages.decode(text, HostState).ranks)
    assert found.traceback == status.traceback[-2000:]
    assert to_row(found) == to_row(status)
    assert found.call == status.call


@pytest.mark.parametrize(
    "row", [[], [0], ["0", "runs"], [0, "runs", "", "", 1, None, ["barrier()", 3]]]
)
def test_a_damaged_row_is_refused(row: list[object]) -> None:
    with pytest.raises(ValueError, match=r"Expected|missing"):
        from_rows([row])


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[FlightRecorder]:
    made = FlightRecorder(tmp_path, 1, 4, "here", "program")
    made.set_word(StateWords().threads, 1)
    yield made
    made.close()


def wait_in_group(recorder: FlightRecorder, key: int, ranks: tuple[int, ...], what: str) -> None:
    slot = recorder.open_group(key, ranks=ranks)
    call = CallSignature(1, what, recorder.texts.intern(what))
    number = recorder.enter(key, slot, 1, call, 0, 0, 0, 0, -1)
    recorder.begin_wait(number, time.monotonic())


def test_members_are_published_of_groups_that_are_being_made(recorder: FlightRecorder) -> None:
    """The others may not know the group yet, and publish nothing of it."""
    wait_in_group(recorder, 5, (0, 1, 2), "new_group([0, 1, 2])")
    wait_in_group(recorder, 6, (0, 1), "barrier()")
    with RecorderReader(recorder.path) as reader:
        published = collect_state({1: reader}, (), (), ())
        local = collect_waits({1: reader})
    assert {key: state.members for key, (state,) in published.groups.items()} == {
        5: [0, 1, 2],
        6: [],
    }
    assert {key: state.members for key, (state,) in local.groups.items()} == {
        5: [0, 1, 2],
        6: [0, 1],
    }
    assert {rank: (wait.key, wait.sequence) for rank, wait in local.waits.items()} == {1: (6, 1)}
    assert [
        len(state.records) for (state,) in (*published.groups.values(), *local.groups.values())
    ] == [1, 1, 0, 0]


def test_on_one_host_all_channels_of_a_rank_count_however_many(tmp_path: Path) -> None:
    """A pipeline may have many tags; what is published of them has a limit."""
    made = [FlightRecorder(tmp_path, rank, 2, "here", "program") for rank in range(2)]
    call = CallSignature(1, "recv()", made[0].texts.intern("recv()"))
    made[1].texts.intern("recv()")
    for rank, recorder in enumerate(made):
        recorder.set_word(StateWords().threads, 1)
        number = recorder.enter(5, 0, 0, call, 0, 0, 0, 0, 1 - rank, tag=7)
        recorder.count_message(1 - rank, False, channel_key(False, 5, 1 - rank, rank, 7), 4)
        recorder.begin_wait(number, time.monotonic())
        for tag in range(300):
            recorder.count_message(
                1 - rank, True, channel_key(True, 5, rank, 1 - rank, tag + 100), 4
            )
    readers = {rank: RecorderReader(recorder.path) for rank, recorder in enumerate(made)}
    local, published = collect_waits(readers), collect_state(readers, (), (), ())
    assert {rank: len(counts) for rank, counts in local.channels.items()} == {0: 301, 1: 301}
    assert published.channels == {}
    matched = [JobStates([(0, 1)], {0: state}).is_matched(0) for state in (local, published)]
    assert matched == [False, True], "300 messages were sent, but none with that tag"
    for each in (*readers.values(), *made):
        each.close()


def test_a_call_whose_record_was_overwritten_was_reached(tmp_path: Path) -> None:
    """A rank may have sent many messages, or used other groups, since it has made a call."""
    made = [FlightRecorder(tmp_path, rank, 3, "here", "program") for rank in range(3)]
    call = CallSignature(1, "barrier()", made[0].texts.intern("barrier()"))
    message = CallSignature(2, "send()", made[0].texts.intern("send()"))
    for rank, recorder in enumerate(made):
        for text in ("barrier()", "send()"):
            recorder.texts.intern(text)
        slot = recorder.open_group(5, ranks=(0, 1, 2))
        if rank < 2:
            recorder.enter(5, slot, 1, call, 0, 0, 0, 0, -1)
    for _ in range(RING):
        made[1].enter(5, 0, 0, message, 0, 0, 0, 0, 2)
    readers = {rank: RecorderReader(recorder.path) for rank, recorder in enumerate(made)}
    finding = Finding("stall", "Rank 2 is late.", key=5, sequence=1)
    report = make_report(finding, readers, {rank: RankStatus(rank, "runs") for rank in range(3)}, 3)
    (collective,) = report.last_collectives
    by_rank = {calls.ranks: calls for calls in collective.calls}
    assert {ranks: calls.is_overwritten for ranks, calls in by_rank.items()} == {
        (0,): False,
        (1,): True,
        (2,): False,
    }
    assert by_rank[0,].call is not None and by_rank[2,].call is None
    text = as_text(report)
    assert "rank 1:      reached, no longer recorded" in text
    assert "rank 2:      not reached" in text
    for each in (*readers.values(), *made):
        each.close()
