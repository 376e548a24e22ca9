"""Cycles of ranks that wait for each other across hosts."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.messages import convert
from lockstep.watchdog.deadlock import CrossHostCycles
from lockstep.watchdog.host_state import HostState


def cycle_of(count: int, sent: int = 0, head: int = 3, number: int = 8) -> dict[int, Any]:
    """Rank 0 waits for a message from rank 2, which waits for it in collective 4, as rank 1 does."""
    row = ["", "host", 1, None, 0.5, ["recv(float32[4], from=2)", "a.py:3 in f", "", 0, "", None], ""]
    waiting = [4, [4, 1.0, 0.0], [], "", ""]
    groups = [[[[0], head, None, [], "", ""], [[1], *waiting]], [[[2], *waiting]]]
    waits = [{"0": [number, 2, 1, 0, 0], "1": [9, -1, 0, 9, 4]}, {"2": [9, -1, 0, 9, 4]}]
    ranks = [{"0": ["waits", *row], "1": ["waits", *row]}, {"2": ["waits", *row]}]
    told = [{"ranks": ranks[i], "groups": {"9": groups[i]}, "waits": waits[i], "count": count} for i in range(2)]
    told[1]["sent"] = {"2": {"0": sent}} if sent else {}
    return {host: convert(state, HostState) for host, state in enumerate(told)}


def test_a_wait_cycle_of_ranks_on_several_hosts_is_found() -> None:
    cycles = CrossHostCycles()
    assert cycles.find(cycle_of(1)) is None
    half_new = cycle_of(2) | {1: cycle_of(1)[1]}
    assert cycles.find(half_new) is None  # that of one host may be of another moment than that of the other
    finding = cycles.find(cycle_of(2))
    assert finding is not None
    assert "rank 0 waits in recv(float32[4], from=2) at a.py:3 in f for rank 2" in finding.sentence.lower()


@pytest.mark.parametrize("others", [{"sent": 1}, {"head": 4}, {"number": 9}])
def test_ranks_that_continue_are_in_no_cycle(others: dict[str, int]) -> None:
    cycles = CrossHostCycles()
    assert cycles.find(cycle_of(1)) is None
    assert cycles.find(cycle_of(2, **others)) is None


def sends_of_both(count: int, posted: int = 0) -> dict[int, Any]:
    """Ranks 0 and 1 send to each other; `posted` receives of rank 0 are for the message of rank 1."""
    row = ["waits", "", "host", 1, None, 0.5, ["send(float32[4], to=1)", "a.py:3 in f", "", 0, "", None], ""]
    waits = [{"0": [8, 1, 1, 0, 0, [10, 11], True]}, {"1": [9, 0, 1, 0, 0, [20, 21], True]}]
    channels = [{"0": {"20": posted}}, {"1": {}}]
    told = [
        {"ranks": {str(i): row}, "waits": waits[i], "channels": channels[i], "sent": {"0": {"1": 5}}, "count": count}
        for i in range(2)
    ]
    return {host: convert(state, HostState) for host, state in enumerate(told)}


def test_ranks_of_two_hosts_that_send_to_each_other_are_a_cycle_unless_one_receives() -> None:
    cycles = CrossHostCycles()
    assert cycles.find(sends_of_both(1)) is None
    finding = cycles.find(sends_of_both(2))
    assert finding is not None
    assert "Let one side receive first" in finding.advice
    cycles = CrossHostCycles()
    assert cycles.find(sends_of_both(1, posted=1)) is None
    assert cycles.find(sends_of_both(2, posted=1)) is None
