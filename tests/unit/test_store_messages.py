"""A damaged or hostile message in a job's store is an error that says which message it is, and what
is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from lockstep.checkpoint import distributed_checkpoint
from lockstep.communicator.initialization import claim_gpu
from lockstep.errors import CheckpointError, LockstepError, TransportError
from lockstep.stores import from_ranges
from lockstep.transports.mpi import process_group as mpi
from lockstep.transports.runtime.host_identity import find_hosts
from lockstep.watchdog import rendezvous
from lockstep.watchdog.preflight import PreflightCheck
from lockstep.watchdog.shared_state import PendingCall
from lockstep.watchdog.states import RecordRow

MINE = RecordRow(7, 5, 1, 3, 19, 0)
CALL = [7, 5, 1, 3, 19, 0]


def exchange_calls(store: Any) -> None:
    own = SimpleNamespace(raw=lambda _: None)
    state: Any = SimpleNamespace(own_reader=own, rank=0, rendezvous=SimpleNamespace(store=store))
    swaps: Any = SimpleNamespace()
    check = PreflightCheck(None, state, 4, (0, 1), swaps, lambda work: None)
    check._exchange_calls(PendingCall(0, 7, 0.0), MINE)


# The last rank to arrive combines the messages of all; the others read the combined one.
CALLS, HOSTS = "preflight/4/7.0/rows", "host"


def from_rank_1(topic: str, message: Any) -> dict[str, str]:
    return {f"{topic}/1": json.dumps(message), f"{topic}/here": "1"}


def from_the_last(topic: str, message: Any) -> dict[str, str]:
    return {f"{topic}/combined": json.dumps(message)}


@pytest.mark.parametrize(
    ("stored", "read", "message"),
    [
        (
            from_rank_1(CALLS, {"sequence": 7}),
            exchange_calls,
            "the call of rank 1: .* damaged: Expected `array`, got `object`",
        ),
        (
            from_rank_1(CALLS, [7, 5, "x", 3, 19, 0]),
            exchange_calls,
            r"rank 1: .* got `str` - at `\$\[2\]`",
        ),
        (
            from_rank_1(CALLS, []),
            exchange_calls,
            "rank 1: .* Expected `array` of at least length 1",
        ),
        (
            from_the_last(CALLS, [{"call": CALL}]),
            exchange_calls,
            "the calls of all ranks: .* got `object`",
        ),
        (
            from_the_last(CALLS, [(CALL, [[0, 1 << 60]])]),
            exchange_calls,
            r"from 0 to 1, got \[0, ",
        ),
        (
            from_the_last(CALLS, [(CALL, [[-1, 1]])]),
            exchange_calls,
            r"from 0 to 1, got \[-1, 1\]",
        ),
        (
            from_rank_1(HOSTS, ["a", None]),
            lambda store: find_hosts(store, 0, 2, None),
            "host of rank 1: .* `array`",
        ),
        (
            from_rank_1(HOSTS, {"key": "a", "size": "1"}),
            lambda store: find_hosts(store, 0, 2, None),
            "got `str`",
        ),
        (from_the_last(HOSTS, [[[[0, 3]], 1]]), lambda store: find_hosts(store, 0, 2, 1), "0 to 1"),
        (
            {"lockstep/gpu/x": "[]"},
            lambda store: claim_gpu(store, 0, "x"),
            "uses GPU x: .* got `array`",
        ),
        (
            {"lockstep/gpu/x": '{"host": 1}'},
            lambda store: claim_gpu(store, 0, "x"),
            "uses GPU x: .* got `int`",
        ),
    ],
)
def test_a_damaged_message_is_named(
    stored: dict[str, str], read: Callable[[Any], object], message: str
) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    for key, value in stored.items():
        if key.endswith("/here"):
            store.add(key, int(value))
        else:
            store.set(key, value)
    with pytest.raises(LockstepError, match=message):
        read(store)


@pytest.mark.parametrize(
    ("combine", "message"),
    [
        (mpi._merge, "rank 1 in its MPI job: .* got `array`"),
        (rendezvous._join_hosts, "the host of rank 1: .* got `array`"),
        (rendezvous._join_readiness, "the flight recorder of rank 1: .* got `array`"),
    ],
)
def test_a_damaged_message_of_one_rank_is_named_by_whoever_combines_all(
    combine: Callable[[dict[int, str]], str], message: str
) -> None:
    with pytest.raises(TransportError, match=message):
        combine({1: "[1]"})


def test_a_rank_that_no_host_has_is_an_error() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    hosts = [{"ranks": [[1, 2]], "token": "t", "base": "", "addresses": []}]
    store.set("lockstep-watch/1/hosts/combined", json.dumps(hosts))
    with pytest.raises(TransportError, match="expected rank 0 among them"):
        rendezvous.rendezvous(store, 0, 2, "here")


@pytest.mark.parametrize("ranges", [[(2, 2)], [(3, 1)], [(0, 1), (3, 5)], [(-2, 0)]])
def test_ranges_of_ranks_that_there_are_not_are_refused(ranges: list[tuple[int, int]]) -> None:
    with pytest.raises(TransportError, match="expected ranges of ranks from 0 to 3, got"):
        from_ranges(ranges, 4)


PART = {"entry": {"size": 3, "sha256": "ab"}, "error": "", "errno": None}


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([], "what rank 1 has written: .* got `array`"),
        (
            {**PART, "entry": {"size": "x", "sha256": "ab"}},
            r"what rank 1 has written: .* at `\$.entry.size`",
        ),
        ({}, "no result"),  # neither a file nor an error
    ],
)
def test_a_damaged_result_of_a_part_of_a_checkpoint_is_named(
    result: Any, message: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    monkeypatch.setattr(c10d, "_get_default_store", lambda: store)
    comm: Any = SimpleNamespace(group=None, rank=0, size=2)
    store.set("lockstep/checkpoint//k/1", json.dumps(result))
    exchange = distributed_checkpoint._exchange_over_store(comm, "k", lambda: False)
    with pytest.raises((TransportError, CheckpointError), match=message):
        own = distributed_checkpoint.PartResult(distributed_checkpoint.Entry(1, "c"))
        distributed_checkpoint._entries(tmp_path, exchange(own))
