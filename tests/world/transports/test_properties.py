"""Any short program of operations gives what follows from its inputs: shapes, dtypes, groups and
order at random.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.conformance import FITS, LAYOUTS, MOVABLE, PURE, TRANSPORTS, Case, Ranks, offered
from support.operations import OPERATIONS, REDUCING
from support.pool import Pool

WORLD = 3
MEMBERS = [[0, 1, 2], [0, 1], [1, 2], [0, 2], [2]]


@dataclass(frozen=True)
class Call:
    """One operation in one of the groups, started at once or waited for at once."""

    name: str
    case: Case
    members: int
    later: bool


def dimensions() -> st.SearchStrategy[tuple[int, ...]]:
    any_shape = st.lists(st.sampled_from([0, 1, 2, 3, 7, 64, 129]), max_size=4).map(tuple)
    return any_shape.filter(lambda shape: math.prod(shape) < 50_000)


@st.composite
def calls(draw: st.DrawFn) -> Call:
    """Any operation, with a dtype and a reduction that fit each other."""
    name = draw(st.sampled_from(sorted(OPERATIONS)))
    op = draw(st.sampled_from(sorted(FITS))) if name in REDUCING else "SUM"
    dtype = draw(st.sampled_from(FITS[op] if name in REDUCING else MOVABLE))
    if dtype.is_complex and op not in ("SUM", "AVG"):  # what c10d lets through
        op = "SUM"
    members = draw(st.integers(0, len(MEMBERS) - 1))
    size = len(MEMBERS[members])
    if size == 1 and name in ("ring", "batch"):
        name = "broadcast"
    shape = draw(st.one_of(dimensions(), st.tuples(st.integers(0, 40_000))))
    case = Case(
        shape,
        dtype,
        op,
        draw(st.integers(0, size - 1)),
        draw(st.integers(0, 99)),
        draw(st.sampled_from(LAYOUTS)),
    )
    return Call(name, case, members, draw(st.booleans()))


def program(sequence: list[Call], waits: list[int]) -> None:
    """Call all in order; after each, wait for as many of those under way as `waits` says, the
    oldest last.
    """
    groups = [dist.new_group(members) for members in MEMBERS]
    under_way: list[Any] = []
    for call, count in zip(sequence, waits, strict=True):
        if dist.get_rank() in MEMBERS[call.members]:
            case = replace(call.case, group=groups[call.members])
            under_way.append(OPERATIONS[call.name](case, call.later))
        for _ in range(min(count, len(under_way))):
            finish(*under_way.pop())
    for started in under_way:
        finish(*started)


def finish(works: list[Any], check: Any) -> None:
    for work in works:
        work.wait()
    check()


@pytest.mark.parametrize("transport", [*TRANSPORTS, PURE])
@settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
    ],
)
@given(sequence=st.lists(calls(), min_size=1, max_size=8), data=st.data())
def test_any_program(pool: Pool, transport: str, sequence: list[Call], data: st.DataObject) -> None:
    own = [call for call in sequence if offered(transport, call.name, [call.case])]
    waits = data.draw(st.lists(st.integers(0, 3), min_size=len(own), max_size=len(own)))
    Ranks(pool, transport, WORLD).run(program, own, waits)
