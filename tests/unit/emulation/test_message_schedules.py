"""Collectives on emulated networks against closed forms, and what the cards do when messages
meet.
"""

from __future__ import annotations

import math
import random

import pytest

from lockstep.emulation.message_schedules import BUSY_TIMES, ROUNDS, Cards, finish_times
from lockstep.network import parse_network

BANDWIDTH, LATENCY, SIZE = 1e8, 1e-3, 8e6


def cards(hosts: int, more: str = "") -> Cards:
    return Cards(parse_network(f"{hosts} hosts, 100MB, 1ms{more}"))


def ends(
    operation: str, hosts: int, more: str = "", arrivals: list[float] | None = None
) -> list[float]:
    rounds = ROUNDS[operation]([SIZE] * hosts, 0)
    return finish_times(cards(hosts, more), rounds, range(hosts), arrivals or [0.0] * hosts)


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_closed_forms_on_an_idle_network(n: int) -> None:
    part, depth = SIZE / n / BANDWIDTH, math.ceil(math.log2(n))
    assert ends("all_reduce", n) == pytest.approx([2 * (n - 1) * (LATENCY + part)] * n)
    assert ends("reduce_scatter", n) == pytest.approx([(n - 1) * (LATENCY + part)] * n)
    assert ends("all_gather", n) == pytest.approx([(n - 1) * (LATENCY + SIZE / BANDWIDTH)] * n)
    assert ends("barrier", n) == pytest.approx([depth * LATENCY] * n)
    if (
        n & (n - 1) == 0
    ):  # else the last message may come from the root, which need not receive before it sends
        assert max(ends("broadcast", n)) == pytest.approx(depth * (LATENCY + SIZE / BANDWIDTH))
    # the root's card receives all messages, one after another
    assert ends("gather", n)[0] == pytest.approx(LATENCY + (n - 1) * SIZE / BANDWIDTH)
    assert max(ends("scatter", n)) == pytest.approx(LATENCY + (n - 1) * SIZE / BANDWIDTH)
    assert ends("all_to_all", n) == pytest.approx([LATENCY + (n - 1) * part] * n)


def test_every_rank_gets_all_of_a_reduction() -> None:
    for operation in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "reduce"):
        rounds = ROUNDS[operation]([8.0] * 4, 1)
        received = {message.target for messages in rounds for message in messages}
        assert received == {0, 1, 2, 3}


def test_dilation_stretches_everything_and_a_slow_host_its_own_messages() -> None:
    assert ends("all_reduce", 4, ", dilation 3") == pytest.approx(
        [3 * each for each in ends("all_reduce", 4)]
    )
    slow = ends("all_reduce", 4, ", slow host 2 5x")
    assert min(slow) > 2 * max(ends("all_reduce", 4))


def test_a_late_rank_delays_the_others() -> None:
    late = ends("all_reduce", 4, arrivals=[0.0, 0.0, 0.0, 7.0])
    assert min(late) > 7.0 and max(late) <= 7.0 + max(ends("all_reduce", 4)) + 1e-9


def test_ranks_on_one_host_do_not_use_the_network() -> None:
    rounds = ROUNDS["all_reduce"]([SIZE] * 4, 0)
    assert finish_times(cards(2), rounds, [0, 0, 0, 0], [1.0, 2.0, 3.0, 3.0]) == [3.0] * 4
    assert min(finish_times(cards(2), rounds, [0, 0, 1, 1], [0.0] * 4)) > 0


def test_messages_wait_for_each_other_on_one_card_and_not_on_two() -> None:
    both = cards(3)
    assert both.send(0, 1, SIZE, 0.0) == pytest.approx((0.08, 0.081))
    assert both.send(0, 2, SIZE, 0.0) == pytest.approx((0.16, 0.161))  # sends after the first
    assert both.send(1, 0, SIZE, 0.0) == pytest.approx((0.08, 0.081))  # the other direction
    assert both.send(2, 1, SIZE, 0.0)[1] == pytest.approx(0.161)  # receives after the first


def test_a_message_goes_into_the_first_gap() -> None:
    one = cards(2)
    one.send(0, 1, SIZE, 1.0)
    assert one.send(0, 1, SIZE / 2, 0.0) == pytest.approx((0.04, 0.041))  # before the later one
    assert one.send(0, 1, SIZE, 0.99)[0] == pytest.approx(1.16)  # the gap until 1.0 is too short


def test_busy_times_are_forgotten_and_limited() -> None:
    one = cards(2)
    for i in range(3 * BUSY_TIMES):
        one.send(0, 1, SIZE, float(i))
    assert len(one.sends[0]) == 2 * BUSY_TIMES
    one.forget(1e9)
    assert one.sends[0] == [] == one.receives[1]


def test_a_cut_link_delivers_nothing_from_then_on() -> None:
    one = cards(3, ", cut 0-1 after 2s")
    assert one.send(0, 1, 8, 1.0)[1] < math.inf
    assert one.send(1, 0, 8, 2.0)[1] == math.inf
    assert one.send(1, 2, 8, 2.0)[1] < math.inf
    assert ends("all_reduce", 3, ", cut 0-1") == [math.inf] * 3


def test_jitter_only_delays_and_is_the_same_with_the_same_seed() -> None:
    def run(seed: int) -> list[float]:
        rounds = ROUNDS["all_reduce"]([SIZE] * 4, 0)
        return finish_times(
            cards(4, ", jitter 5ms"), rounds, range(4), [0.0] * 4, random.Random(seed)
        )

    assert run(1) == run(1) != run(2)
    exact = max(ends("all_reduce", 4))
    assert exact < max(run(1)) <= exact + 6 * 5e-3 + 1e-9
