"""Ranks that tell each other something through a store: with how many messages, and what if some say nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import StallError
from lockstep.store_exchange import exchange, exchange_present, nothing, present, ranks_of, runs_of
from lockstep.transports.shm import host
from lockstep.watch import meeting
from support.stores import CountingStore, all_ranks

MANY = 1000
MESSAGES = 6  # of a rank in one exchange, whatever the number of ranks
SOON = timedelta(seconds=0.2)


def everything(said: Mapping[int, str]) -> str:
    return json.dumps([said[each] for each in sorted(said)])


def test_everybody_hears_the_same_in_the_ranks_order() -> None:
    def body(store: Any, rank: int) -> str:
        return exchange(store, "topic", rank, "ä" * rank, range(3), everything)

    assert all_ranks(3, body)[0] == [json.dumps(["", "ä", "ää"])] * 3


def test_a_thousand_ranks_find_their_machines_with_few_messages_each() -> None:
    """A rank that read every other's text would send thousands, and the store's host 90 MB."""
    key = f"{host.host_key()} {{}}"

    def body(store: Any, rank: int) -> str:
        text = json.dumps([key.format(rank // 8), None])
        return exchange(store, "host", rank, text, range(MANY), host._by_key)

    found, stores = all_ranks(MANY, body)
    assert set(found) == {json.dumps([[[[low, low + 8]], None] for low in range(0, MANY, 8)])}
    assert max(store.messages for store in stores) <= MESSAGES
    assert sum(store.received for store in stores) < 5_000_000


def test_a_thousand_ranks_find_each_others_recordings_with_few_messages_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_record", lambda *_: object())
    monkeypatch.setattr(meeting, "_folder", lambda token, base, local, rank: (Path(f"/{token}-{local[0]}"), False))
    monkeypatch.setattr(meeting, "Recording", lambda path: path)
    monkeypatch.setattr(meeting, "_own_address", lambda store: "")  # one from which there is no way to the first
    monkeypatch.setattr(meeting, "PrefixStore", lambda _, store: store)
    found, stores = all_ranks(MANY, lambda store, rank: meeting.meet(store, rank, MANY, f"machine {rank // 8}"))
    assert [rank for rank, met in enumerate(found) if met.heartbeat is not None] == [0]
    found[0].heartbeat.close()
    for rank, met in enumerate(found):
        low = rank // 8 * 8
        assert met.machines[rank // 8] == tuple(range(low, low + 8))
        assert met.folder == found[low].folder
        assert met.peers.keys() == set(range(low, low + 8)) - {rank}
    assert max(store.messages for store in stores) <= 1 + 2 * MESSAGES
    assert sum(store.received for store in stores) < 20_000_000


def test_who_says_nothing_is_named() -> None:
    store = dist.HashStore()
    store.set_timeout(SOON)
    store.set("topic/2", "there")
    with pytest.raises(StallError, match=r"making the group \(topic\): ranks 11, 13 did not arrive") as caught:
        exchange(store, "topic", 0, "here", (10, 11, 12, 13), everything)
    assert caught.value.ranks == (11, 13)


def test_who_says_nothing_is_found_with_few_messages() -> None:
    inner = dist.HashStore()
    inner.set_timeout(SOON)
    for rank in range(1, MANY):
        if rank != 700:
            inner.set(f"topic/{rank}", "")
    store: Any = CountingStore(inner)
    with pytest.raises(StallError) as caught:
        exchange(store, "topic", 0, "", range(MANY), nothing)
    assert caught.value.ranks == (700,)
    assert store.messages < 40


def test_the_rank_that_came_last_may_have_gone_before_it_said_what_all_have() -> None:
    store = dist.HashStore()
    store.set_timeout(SOON)
    store.set("topic/1", "last")
    assert json.loads(exchange(store, "topic", 0, "here", range(2), everything)) == ["here", "last"]


def test_those_that_say_nothing_may_be_left_out() -> None:
    store = dist.HashStore()
    store.set("topic/2", "there")
    assert json.loads(exchange_present(store, "topic", 0, "here", 3, everything, SOON)) == ["here", "there"]


def test_the_values_that_are_there() -> None:
    store = dist.HashStore()
    assert present(store, []) == present(store, ["a", "b"]) == {}
    store.set("b", "2")
    store.set("d", "")
    assert present(store, list("abcde")) == {"b": b"2", "d": b""}


@given(st.sets(st.integers(0, 40)))
def test_ranks_as_runs(ranks: set[int]) -> None:
    runs = runs_of(sorted(ranks))
    assert ranks_of(runs) == sorted(ranks)
    assert all(stop < following for (_, stop), (following, _) in pairwise(runs))
