"""The link clocks in shared memory: ranks of a group share them, and settle each collective once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from lockstep.emulation.link_clock import GroupClock, LinkClock, emulation_summary, sleep_until
from lockstep.errors import TransportError
from lockstep.planning.network import parse_network

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
        assert [each.done_at(1) for each in ranks] == pytest.approx([now + 4 * (1e-3 + 1e6 / 1e8)] * 3)


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


def test_a_sleep_never_ends_early() -> None:
    for seconds in (0.0, 1e-5, 2e-3):
        when = time.monotonic() + seconds
        sleep_until(when)
        assert time.monotonic() >= when


def test_the_summary_says_what_this_host_could_not_emulate(tmp_path: Path) -> None:
    clock = LinkClock(tmp_path, NETWORK)
    clock.note(0.0, 1.0, 0.5)
    assert "took longer" not in emulation_summary(tmp_path, NETWORK)
    clock.note(0.0, 1.0, 1.25)
    clock.close()
    text = emulation_summary(tmp_path, NETWORK)
    assert "2 messages" in text and "for 50 % this host took longer" in text and "by 250000 us" in text
    assert "dilation 2: " in emulation_summary(tmp_path, parse_network("3 hosts, 100MB, 1ms, dilation 2"))
