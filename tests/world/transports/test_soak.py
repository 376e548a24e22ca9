"""Thousands of random operations in several groups, each with its result checked.

``SOAK=600 pytest tests/world/transports/test_soak.py`` goes on for ten minutes, with other
operations every time; ``SOAK_SEED`` repeats those of the seed that a failure shows.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.conformance import FITS, MOVABLE, PURE, TRANSPORTS, Case, Ranks, offered
from support.operations import OPERATIONS, REDUCING

LIMIT = float(os.environ.get("SOAK", "0"))
ROUNDS = 1500
GROUPS = 6
AT_ONCE = 12


def choose(source: random.Random, transport: str, members: list[int]) -> tuple[str, Case]:
    """An operation that the transport offers."""
    while True:
        name = source.choice(sorted(OPERATIONS))
        op = (
            source.choice(["SUM", "SUM", "MAX", "PRODUCT", "AVG", "BXOR"])
            if name in REDUCING
            else "SUM"
        )
        dtype = source.choice([torch.float32, *(FITS[op] if name in REDUCING else MOVABLE)])
        count = min(int(2 ** source.uniform(-1, 17)), 10_000 if source.random() < 0.9 else 120_000)
        case = Case((count,), dtype, op, source.randrange(len(members)), source.randrange(1000))
        alone = len(members) == 1 and name in ("ring", "batch")
        fits = dtype in FITS[op] and not (dtype.is_complex and op not in ("SUM", "AVG"))
        if fits and not alone and offered(transport, name, [case]):
            return name, case


def steps(seed: int, size: int, transport: str) -> Iterator[tuple[int, list[int], str, Case, bool]]:
    """The same on every rank: group, its ranks, operation, case, whether it is waited for at
    once.
    """
    source = random.Random(seed)
    members = [
        sorted(source.sample(range(size), source.randint(1, size))) for _ in range(GROUPS - 1)
    ]
    members = [list(range(size)), *members]
    yield from ((-1, own, "", Case(), False) for own in members)
    while True:
        number = source.choice([0, *range(GROUPS)])
        yield (
            number,
            members[number],
            *choose(source, transport, members[number]),
            source.random() < 0.5,
        )


def soak(transport: str, seed: int, rounds: int) -> int:
    """Up to a dozen operations are under way at once, and each rank waits for them in an order of
    its own.
    """
    rank, own = dist.get_rank(), random.Random(dist.get_rank())
    groups: list[Any] = []
    under_way: list[Any] = []
    done = 0
    for number, members, name, case, later in steps(seed, dist.get_world_size(), transport):
        if number < 0:
            groups.append(dist.new_group(members))
        elif rank in members:
            under_way.append(OPERATIONS[name](replace(case, group=groups[number]), later))
            done += 1
        own.shuffle(under_way)
        while len(under_way) > (AT_ONCE if own.random() < 0.9 else 0):
            finish(*under_way.pop())
        rounds -= 1
        if rounds == 0:
            break
    for started in under_way:
        finish(*started)
    return done


def finish(works: list[Any], check: Any) -> None:
    for work in works:
        work.wait()
    check()


@pytest.mark.parametrize("transport", [*TRANSPORTS, PURE])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_soak(ranks: Ranks) -> None:
    done = ranks.run(
        soak, ranks.transport, ranks.size, ROUNDS if ranks.transport != "gloo" else ROUNDS // 3
    )
    assert min(done) > 100


@pytest.mark.skipif(not LIMIT, reason="SOAK=seconds sets how long it goes on")
@pytest.mark.timeout(LIMIT + 120)
@pytest.mark.parametrize("transport", [*TRANSPORTS, PURE])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_long_soak(ranks: Ranks) -> None:
    """Each number of ranks, and each transport, has a third of the time."""
    end = time.monotonic() + LIMIT / 9
    seed = int(os.environ.get("SOAK_SEED", time.time_ns()))
    while time.monotonic() < end:
        print(f"seed {seed}")
        ranks.run(soak, ranks.transport, seed, 20_000, timeout=LIMIT + 60)
        seed += 1
