"""What the door to Horovod decides without any other process."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.doors.horovod.common.util import num_rank_is_power_2, split_list
from lockstep.doors.horovod.engine.mismatch import difference, missing
from lockstep.doors.horovod.engine.reduce import neutral
from lockstep.doors.horovod.engine.request import Max, Min, Product, Request, Sum
from lockstep.doors.horovod.engine.stalls import StallCheck, warn_after
from lockstep.doors.horovod.engine.table import JOIN, Record, Table
from lockstep.doors.horovod.torch.gradients import grouped, named
from lockstep.errors import ConfigError

A: Record = (b"a" * 8, b"x" * 8)
B: Record = (b"b" * 8, b"x" * 8)


def keys(table: Table, *told: list[Record]) -> list[bytes]:
    return [agreed.key for agreed in table.take(told)]


def test_an_operation_is_ready_when_all_ranks_have_asked_for_it() -> None:
    table = Table(2)
    assert keys(table, [A], []) == []
    assert table.waiting_for(A[0]) == [1]
    assert keys(table, [], [B]) == []
    assert keys(table, [B], [A]) == [B[0], A[0]]
    assert keys(table, [A], [A]) == [A[0]]


@given(st.integers(2, 4), st.integers(0, 1000))
def test_any_orders_end_in_the_same_order_everywhere(ranks: int, seed: int) -> None:
    draw = random.Random(seed)
    names = [(bytes([number]) * 8, b"x" * 8) for number in range(1, 7)]
    orders = [draw.sample(names, len(names)) for _ in range(ranks)]
    tables = [Table(ranks) for _ in range(ranks)]
    found: list[list[bytes]] = [[] for _ in range(ranks)]
    while any(orders):
        cuts = [draw.randint(0, 3) for _ in range(ranks)]
        told = [order[:cut] for order, cut in zip(orders, cuts, strict=True)]
        orders = [order[cut:] for order, cut in zip(orders, cuts, strict=True)]
        for table, done in zip(tables, found, strict=True):
            done += [agreed.key for agreed in table.take(told)]
    assert all(done == found[0] for done in found)
    assert sorted(found[0]) == sorted(key for key, _ in names)


def test_forms_that_differ() -> None:
    (agreed,) = Table(2).take([[A], [(A[0], b"y" * 8)]])
    assert agreed.differs
    (agreed,) = Table(2).take([[A], [A]])
    assert not agreed.differs


def test_ranks_that_have_joined_need_not_ask() -> None:
    table = Table(3)
    assert keys(table, [A], [A], []) == []
    (agreed,) = table.take([[], [], [JOIN]])
    assert (agreed.key, agreed.absent) == (A[0], (2,))
    assert keys(table, [JOIN], [], []) == []
    (agreed,) = table.take([[], [B], []])
    assert (agreed.key, agreed.absent) == (B[0], (0, 2))
    (joined,) = table.take([[], [JOIN], []])
    assert joined.key == JOIN[0]
    assert list(joined.forms) == [2, 0, 1]
    assert keys(table, [A], [A], []) == []  # everybody counts again


def test_what_a_rank_asked_for_before_it_joined_is_its_own() -> None:
    table = Table(2)
    table.take([[], [A, JOIN]])
    (agreed,) = table.take([[A], []])
    assert agreed.absent == ()


def test_digests_tell_names_kinds_and_forms_apart() -> None:
    one = Request("allreduce", "x", form=(("shape", (2,)),))
    assert one.key == Request("allreduce", "x").key != Request("allgather", "x").key
    assert one.key != Request("allreduce", "y").key
    assert one.form_digest != Request("allreduce", "x", form=(("shape", (3,)),)).form_digest


def test_difference_names_both_values_and_their_ranks() -> None:
    told = {
        rank: ("allreduce", "x", (("dtype", dtype), ("shape", shape)))
        for rank, (dtype, shape) in enumerate([(torch.float32, (2,)), (torch.float32, (2, 3)), (torch.float32, (2,))])
    }
    assert difference(told) == "allreduce 'x': the ranks do not agree on shape: (2,) on ranks 0 and 2, (2, 3) on rank 1"


def test_missing_names_those_that_have_joined() -> None:
    assert missing("allgather", "x", (1,)).startswith("allgather 'x' needs all ranks, but rank 1 has joined")


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.bfloat16])
@pytest.mark.parametrize("op", [Sum, Min, Max, Product])
def test_neutral_changes_nothing(op: int, dtype: torch.dtype) -> None:
    x = torch.tensor([-3, 0, 5]).to(dtype)
    nothing = neutral((3,), dtype, "cpu", op)
    apply = {Sum: torch.add, Min: torch.minimum, Max: torch.maximum, Product: torch.mul}[op]
    assert torch.equal(apply(x, nothing), x)


def test_stalls_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    late, early = Request("allreduce", "late", asked=10.0), Request("allreduce", "early", asked=65.0)
    check = StallCheck(60.0, rank=1)
    for now in (69.0, 70.0, 80.0):
        check.look([late, early], now, lambda key: [0, 1])
    assert [record.getMessage() for record in caplog.records] == [
        "rank 1 has waited for 60 s to carry out allreduce 'late', which ranks [0] have not asked for, as far as is "
        "known here. They may be busy, have ended, or call other operations."
    ]
    check.look([], 90.0, lambda key: [])
    check.look([late], 90.0, lambda key: [])  # the name is used again, and is late again
    assert len(caplog.records) == 2


def test_when_stalls_are_said() -> None:
    assert warn_after({}) == 60.0
    assert warn_after({"HOROVOD_STALL_CHECK_TIME_SECONDS": "5"}) == 5.0
    assert warn_after({"HOROVOD_STALL_CHECK_DISABLE": "1"}) is None
    with pytest.raises(ConfigError, match="HOROVOD_STALL_CHECK_TIME_SECONDS: expected seconds"):
        warn_after({"HOROVOD_STALL_CHECK_TIME_SECONDS": "soon"})
    StallCheck(None, 0).look([Request("allreduce", "x")], 1e9, lambda key: [])


def test_split_list_gives_the_first_lists_one_more() -> None:
    assert split_list([1, 2, 3, 4, 5], 2) == [[1, 2, 3], [4, 5]]
    assert split_list([1, 2], 5) == [[1], [2]]


def test_num_rank_is_power_2() -> None:
    assert [n for n in range(-1, 10) if num_rank_is_power_2(n)] == [1, 2, 4, 8]


def parameters(*shapes: int) -> list[torch.Tensor]:
    return [torch.zeros(shape, requires_grad=True) for shape in shapes]


def test_parameters_without_names_are_named_by_place() -> None:
    first, second = parameters(1, 2)
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": [second]}], lr=1.0)
    assert list(named(optimizer, None).values()) == ["allreduce.noname.0.0", "allreduce.noname.1.0"]


@pytest.mark.parametrize("wrong", ["twice", "missing", "no pairs"])
def test_wrong_names(wrong: str) -> None:
    first, second = parameters(1, 2)
    given_names = {
        "twice": [("a", first), ("a", second)],
        "missing": [("a", first)],
        "no pairs": [first, second],
    }[wrong]
    with pytest.raises(ValueError, match="named_parameters: expected"):
        named(torch.optim.SGD([first, second], lr=1.0), given_names)


def test_groups() -> None:
    a, b, c = parameters(1, 2, 3)
    assert grouped([a, b, c], None) == grouped([a, b, c], 0) == {}
    found = grouped([a, b, c], 2)
    assert [len(found[p]) for p in (a, b, c)] == [2, 2, 1]
    found = grouped([a, b, c], [[c, a]])
    assert found[a] is found[c]
    assert b not in found


@pytest.mark.parametrize("wrong", [-1, "x", [1], 1.5])
def test_wrong_groups(wrong: object) -> None:
    with pytest.raises(ValueError, match="groups: expected"):
        grouped(parameters(1), wrong)  # type: ignore[arg-type]


def test_a_parameter_in_two_groups() -> None:
    (a,) = parameters(1)
    with pytest.raises(ConfigError, match="each parameter in one group"):
        grouped([a], [[a], [a]])
