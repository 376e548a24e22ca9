"""Cycles of ranks that wait for each other across hosts."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.messages import convert
from lockstep.watchdog.cross_host import find_deadlock
from lockstep.watchdog.deadlock import CycleSearch
from lockstep.watchdog.report import Finding
from lockstep.watchdog.states import HostState, JobStates
from support.clock import Clock

HOSTS = ((0, 1), (2,))


def told(*parts: dict[str, Any]) -> dict[int, HostState]:
    """What hosts publish."""
    return {host: convert(state, HostState) for host, state in enumerate(parts)}


class Search:
    """A search that looks at published states, each half a second after the one before."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._cycles = clock, CycleSearch()

    def find(self, states: dict[int, HostState]) -> Finding | None:
        self._clock.pass_s(0.5)
        counts = {host: state.count for host, state in states.items()}
        return find_deadlock(self._cycles, JobStates(HOSTS, states), counts)


@pytest.fixture
def search(clock: Clock) -> Search:
    return Search(clock)


def cycle_of(count: int, sent: int = 0, head: int = 3, number: int = 8) -> dict[int, HostState]:
    """Rank 0 waits for a message from rank 2, which waits for it in collective 4, as rank 1
    does.
    """
    row = [
        "",
        "host",
        1,
        None,
        ["recv(float32[4], from=2)", "a.py:3 in f", "", 0, "", None],
        0.5,
        [],
        "",
    ]
    waiting = [4, 4, 1.0, 0.0, [], "", ""]
    groups = [[[[0], head], [[1], *waiting]], [[[2], *waiting]]]
    waits = [{"0": [number, 2, 1, 0, 0], "1": [9, -1, 0, 9, 4]}, {"2": [9, -1, 0, 9, 4]}]
    ranks = [[[0, "waits", *row], [1, "waits", *row]], [[2, "waits", *row]]]
    parts = [
        {"ranks": ranks[i], "groups": {"9": groups[i]}, "waits": waits[i], "count": count}
        for i in range(2)
    ]
    parts[1]["sent"] = {"2": {"0": sent}} if sent else {}
    return told(*parts)


def test_a_wait_cycle_of_ranks_on_several_hosts_is_found(search: Search) -> None:
    assert search.find(cycle_of(1)) is None
    half_new = cycle_of(2) | {1: cycle_of(1)[1]}
    assert (
        search.find(half_new) is None
    )  # that of one host may be of another moment than that of the other
    finding = search.find(cycle_of(2))
    assert finding is not None
    assert (
        "rank 0 waits in recv(float32[4], from=2) at a.py:3 in f for rank 2"
        in finding.sentence.lower()
    )


@pytest.mark.parametrize("others", [{"sent": 1}, {"head": 4}, {"number": 9}])
def test_ranks_that_continue_are_in_no_cycle(search: Search, others: dict[str, int]) -> None:
    assert search.find(cycle_of(1)) is None
    assert search.find(cycle_of(2, **others)) is None


def messages_of(count: int, waits: list[list[Any]], posted: int = 0) -> dict[int, HostState]:
    """Ranks 0 and 2 wait in messages to each other; `posted` receives of rank 0 are for the message
    of rank 2.
    """
    row = [
        "waits",
        "",
        "host",
        1,
        None,
        ["send(float32[4], to=1)", "a.py:3 in f", "", 0, "", None],
        0.5,
        [],
        "",
    ]
    channels = [{"0": {"20": posted}}, {"2": {}}]
    return told(
        *(
            {
                "ranks": [[rank, *row]],
                "waits": {str(rank): waits[i]},
                "channels": channels[i],
                "sent": {"0": {"2": 5}},
                "count": count,
            }
            for i, rank in enumerate((0, 2))
        )
    )


SENDS = [[8, 2, 1, 0, 0, [10, 11], True], [9, 0, 1, 0, 0, [20, 21], True]]
OTHER_TAGS = [[8, 2, 1, 0, 0, [10, 11], True, 5], [9, 0, 1, 0, 0, [20], False, 6]]


def test_ranks_of_two_hosts_that_send_to_each_other_are_a_cycle_unless_one_receives(
    search: Search,
) -> None:
    """As on one host, it has to last for longer, as transports may move a message before it is
    received.
    """
    for count in range(4):
        assert search.find(messages_of(count, SENDS)) is None
    finding = search.find(messages_of(4, SENDS))
    assert finding is not None
    assert "Let one side receive first" in finding.advice
    for count in range(5, 10):
        assert search.find(messages_of(count, SENDS, posted=1)) is None


def test_another_tag_on_another_host_is_named(search: Search) -> None:
    found = [search.find(messages_of(count, OTHER_TAGS)) for count in range(5)]
    assert found[-1] is not None
    assert (
        found[-1].cause == "The tags differ: rank 2 receives with tag 6, rank 0 sends with tag 5."
    )


def test_a_group_that_only_one_host_makes_is_a_cycle(search: Search) -> None:
    """Rank 2 makes a group with rank 0, which is in a collective of another group and publishes
    nothing of it.
    """

    def states(count: int) -> dict[int, HostState]:
        row = ["", "host", 1, None, ["barrier()", "a.py:3 in f", "", 4, "", None], 0.5, [], ""]
        made = [*row[:4], ["new_group([0, 2])", "a.py:5 in g", "", 1, "", None], *row[5:]]
        first = {
            "ranks": [[0, "waits", *row]],
            "groups": {"9": [[[0], 4, 4, 1.0]]},
            "waits": {"0": [8, -1, 0, 9, 4]},
            "count": count,
        }
        creation = [[2], 1, 1, 1.0, 0.0, [], "new_group([0, 2])", "a.py:5 in g", "g", [0, 2]]
        second = {
            "ranks": [[2, "waits", *made]],
            "groups": {"9": [[[2], 3]], "7": [creation]},
            "waits": {"2": [9, -1, 0, 7, 1]},
            "count": count,
        }
        return told(first, second)

    assert search.find(states(1)) is None
    finding = search.find(states(2))
    assert finding is not None
    assert "rank 2 waits in new_group([0, 2]) at a.py:5 in g for rank 0" in finding.sentence.lower()
    assert "Call new_group on every rank" in finding.advice
