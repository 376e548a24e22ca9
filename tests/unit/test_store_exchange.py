"""Ranks that tell each other something through a store: with how many messages, and what if some
say nothing.
"""

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

from lockstep.errors import MembershipChangedError, StallError
from lockstep.stores import (
    combine_nothing,
    exchange,
    exchange_available,
    from_ranges,
    get_available,
    to_ranges,
)
from lockstep.transports.runtime import host_identity
from lockstep.watchdog import rendezvous
from support.stores import CountingStore, all_ranks

MANY = 1000
MESSAGES = 6  # of a rank in one exchange, whatever the number of ranks
SOON = timedelta(seconds=0.2)


def everything(said: Mapping[int, str]) -> str:
    return json.dumps([said[each] for each in sorted(said)])


def test_every_rank_receives_the_same_in_rank_order() -> None:
    def body(store: Any, rank: int) -> str:
        return exchange(store, "topic", rank, "ä" * rank, range(3), everything)

    assert all_ranks(3, body)[0] == [json.dumps(["", "ä", "ää"])] * 3


def test_a_thousand_ranks_find_their_hosts_with_few_messages_each() -> None:
    """A rank that read every other's text would send thousands, and the store's host 90 MB."""
    key = f"{host_identity.host_key()} {{}}"

    def body(store: Any, rank: int) -> str:
        text = json.dumps({"key": key.format(rank // 8), "size": None})
        return exchange(store, "host", rank, text, range(MANY), host_identity._group_by_host)

    found, stores = all_ranks(MANY, body)
    assert set(found) == {json.dumps([[[[low, low + 8]], None] for low in range(0, MANY, 8)])}
    assert max(store.messages for store in stores) <= MESSAGES
    assert sum(store.received for store in stores) < 5_000_000


def test_a_thousand_ranks_find_each_others_flight_records_with_few_messages_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rendezvous, "_make_recorder", lambda *_: object())
    monkeypatch.setattr(
        rendezvous,
        "_make_folder",
        lambda token, base, local, rank: (Path(f"/{token}-{local[0]}"), False),
    )
    monkeypatch.setattr(rendezvous, "JobFolderLock", lambda folder: None)
    monkeypatch.setattr(rendezvous, "RecorderReader", lambda path: path)
    monkeypatch.setattr(
        rendezvous, "_own_address", lambda store: ""
    )  # one from which there is no way to the first
    monkeypatch.setattr(rendezvous, "PrefixStore", lambda _, store: store)
    found, stores = all_ranks(
        MANY, lambda store, rank: rendezvous.rendezvous(store, rank, MANY, f"host {rank // 8}")
    )
    assert [rank for rank, met in enumerate(found) if met.heartbeat is not None] == [0]
    found[0].heartbeat.close()
    for rank, met in enumerate(found):
        low = rank // 8 * 8
        assert met.hosts[rank // 8] == tuple(range(low, low + 8))
        assert met.folder == found[low].folder
        assert met.peers.keys() == set(range(low, low + 8)) - {rank}
    assert max(store.messages for store in stores) <= 1 + 2 * MESSAGES
    assert sum(store.received for store in stores) < 20_000_000


def test_missing_ranks_are_named() -> None:
    store = dist.HashStore()
    store.set_timeout(SOON)
    store.set("topic/2", "there")
    with pytest.raises(
        StallError, match=r"creating the group \(topic\): ranks 11, 13 did not arrive"
    ) as caught:
        exchange(store, "topic", 0, "here", (10, 11, 12, 13), everything)
    assert caught.value.ranks == (11, 13)


def test_a_missing_rank_is_found_with_few_messages() -> None:
    inner = dist.HashStore()
    inner.set_timeout(SOON)
    for rank in range(1, MANY):
        if rank != 700:
            inner.set(f"topic/{rank}", "")
    store: Any = CountingStore(inner)
    with pytest.raises(StallError) as caught:
        exchange(store, "topic", 0, "", range(MANY), combine_nothing)
    assert caught.value.ranks == (700,)
    assert store.messages < 40


def test_the_last_rank_may_end_before_it_has_published_the_result() -> None:
    store = dist.HashStore()
    store.set_timeout(SOON)
    store.set("topic/1", "last")
    assert json.loads(exchange(store, "topic", 0, "here", range(2), everything)) == ["here", "last"]


def test_ranks_that_publish_nothing_may_be_left_out() -> None:
    store = dist.HashStore()
    store.set("topic/2", "there")
    assert json.loads(exchange_available(store, "topic", 0, "here", 3, everything, SOON)) == [
        "here",
        "there",
    ]


def test_the_values_that_are_there() -> None:
    store = dist.HashStore()
    assert get_available(store, []) == get_available(store, ["a", "b"]) == {}
    store.set("b", "2")
    store.set("d", "")
    assert get_available(store, list("abcde")) == {"b": b"2", "d": b""}


@given(st.sets(st.integers(0, 40)))
def test_ranks_as_runs(ranks: set[int]) -> None:
    runs = to_ranges(sorted(ranks))
    assert from_ranges(runs, 64) == sorted(ranks)
    assert all(stop < following for (_, stop), (following, _) in pairwise(runs))


def test_a_change_of_the_members_is_no_stall_of_ranks_that_have_not_arrived() -> None:
    class Changed(CountingStore):
        def get(self, key: str) -> bytes:
            raise MembershipChangedError(3)

    with pytest.raises(MembershipChangedError):
        exchange(Changed(dist.HashStore()), "topic", 1, "text", range(2), everything)
