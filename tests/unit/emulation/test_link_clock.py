"""The link clocks in shared memory: ranks of a group share them, and settle each collective
once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from lockstep.emulation.link_clock import GroupClock, LinkClock, emulation_summary
from lockstep.errors import TransportError
from lockstep.network import parse_network

NETWORK = parse_network("3 hosts, 100MB, 1ms")


@contextmanager
def group(folder: Path) -> Iterator[list[GroupClock]]:
    with ExitStack() as stack:
        clocks = [LinkClock(folder, NETWORK) for _ in range(3)]  # as three processes have them
        for clock in clocks:
            stack.callback(clock.close)
        made = [GroupClock(clock, "g", rank, 3, rank) for rank, clock in enumerate(clocks)]
        for each in made:
            stack.callback(each.close)
        yield made


def test_the_last_rank_settles_a_collective_for_all(tmp_path: Path) -> None:
    with group(tmp_path) as ranks:
        now = time.monotonic()
        numbers = [each.call() for each in ranks]
        for rank in (2, 0):
            ranks[rank].arrive(numbers[rank], "all_reduce", 3e6, 0, now)
            assert [each.done_at(1) for each in ranks] == [None] * 3
        ranks[1].arrive(numbers[1], "all_reduce", 3e6, 0, now)
        assert [each.done_at(1) for each in ranks] == pytest.approx(
            [now + 4 * (1e-3 + 1e6 / 1e8)] * 3
        )


def test_collectives_share_the_cards(tmp_path: Path) -> None:
    with group(tmp_path) as ranks:
        now = time.monotonic()
        for _ in range(2):
            for each in ranks:
                each.arrive(each.call(), "all_to_all", 3e6, 0, now)
        first, second = ranks[0].done_at(1), ranks[0].done_at(2)
        assert first is not None and second is not None and second - now >= 4e-2 > first - now


def test_too_many_pending_collectives_are_an_error(tmp_path: Path) -> None:
    with group(tmp_path) as ranks, pytest.raises(TransportError, match="more than 256"):
        for _ in range(257):
            ranks[0].arrive(ranks[0].call(), "barrier", 0.0, 0, 0.0)


@pytest.mark.parametrize(("dilation", "behind_s"), [("1", 20.0), ("4", 10.0)])
def test_the_summary_says_what_this_host_could_not_emulate(
    tmp_path: Path, dilation: str, behind_s: float
) -> None:
    network = parse_network(f"3 hosts, 100MB, 1ms, dilation {dilation}")
    clock = LinkClock(tmp_path, network)
    clock.note_wait()
    assert "1 messages" in emulation_summary(tmp_path, network)
    assert "behind" not in emulation_summary(tmp_path, network)
    for _ in range(2):  # without dilation, what is lost is not made up for
        clock.virtual.begin_wait()
        clock.virtual._own().now = time.monotonic() - 10.0
        clock.virtual.end_wait(0.0)
        clock.note_wait()
    assert clock.statistics().waits == 3
    assert clock.statistics().behind_s == pytest.approx(behind_s, abs=0.5)
    clock.close()
    text = emulation_summary(tmp_path, network)
    assert f"this host was {behind_s:.0f}" in text and f"dilation {2 * int(dilation)}" in text
    assert ("time dilation 4: " in text) == (dilation == "4")
