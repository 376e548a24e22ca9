"""The parts of the compatibility layer for Horovod that need no other process."""

from __future__ import annotations

import math
import random
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from lockstep.compat.horovod.common.util import num_rank_is_power_2, split_list
from lockstep.compat.horovod.engine.execution import neutral_tensor
from lockstep.compat.horovod.engine.negotiation import mismatch_message, missing_ranks_message
from lockstep.compat.horovod.engine.request import (
    JOIN,
    Average,
    Max,
    MessageTable,
    Min,
    Product,
    Request,
    RequestMessage,
    Sum,
)
from lockstep.compat.horovod.engine.response_cache import ResponseCache, _Buffer
from lockstep.compat.horovod.engine.stall_inspector import StalledOps, StallLimits, group_stalled
from lockstep.compat.horovod.torch.optimizer import gradient_groups, parameter_names
from lockstep.errors import ConfigError

A: RequestMessage = (b"a" * 8, b"x" * 8)
B: RequestMessage = (b"b" * 8, b"x" * 8)


def keys(table: MessageTable, *messages: list[RequestMessage]) -> list[bytes]:
    return [response.key for response in table.add(messages)]


def test_an_operation_is_ready_when_all_ranks_have_requested_it() -> None:
    table = MessageTable(2)
    assert keys(table, [A], []) == []
    assert table.missing_ranks(A[0]) == [1]
    assert keys(table, [], [B]) == []
    assert keys(table, [B], [A]) == [B[0], A[0]]
    assert keys(table, [A], [A]) == [A[0]]


@given(st.integers(2, 4), st.integers(0, 1000))
def test_any_orders_end_in_the_same_order_everywhere(ranks: int, seed: int) -> None:
    draw = random.Random(seed)
    names = [(bytes([number]) * 8, b"x" * 8) for number in range(1, 7)]
    orders = [draw.sample(names, len(names)) for _ in range(ranks)]
    tables = [MessageTable(ranks) for _ in range(ranks)]
    found: list[list[bytes]] = [[] for _ in range(ranks)]
    while any(orders):
        cuts = [draw.randint(0, 3) for _ in range(ranks)]
        messages = [order[:cut] for order, cut in zip(orders, cuts, strict=True)]
        orders = [order[cut:] for order, cut in zip(orders, cuts, strict=True)]
        for table, done in zip(tables, found, strict=True):
            done += [response.key for response in table.add(messages)]
    assert all(done == found[0] for done in found)
    assert sorted(found[0]) == sorted(key for key, _ in names)


def test_signatures_that_differ() -> None:
    (response,) = MessageTable(2).add([[A], [(A[0], b"y" * 8)]])
    assert response.has_mismatch
    (response,) = MessageTable(2).add([[A], [A]])
    assert not response.has_mismatch


def test_ranks_that_have_joined_need_no_negotiation() -> None:
    table = MessageTable(3)
    assert keys(table, [A], [A], []) == []
    (response,) = table.add([[], [], [JOIN]])
    assert (response.key, response.joined) == (A[0], (2,))
    assert keys(table, [JOIN], [], []) == []
    (response,) = table.add([[], [B], []])
    assert (response.key, response.joined) == (B[0], (0, 2))
    (response,) = table.add([[], [JOIN], []])
    assert response.key == JOIN[0]
    assert list(response.signatures) == [2, 0, 1]
    assert keys(table, [A], [A], []) == []  # everybody counts again


def test_what_a_rank_requested_before_it_joined_is_its_own() -> None:
    table = MessageTable(2)
    table.add([[], [A, JOIN]])
    (response,) = table.add([[A], []])
    assert response.joined == ()


def test_digests_differ_for_names_kinds_and_signatures() -> None:
    one = Request("allreduce", "x", signature=(("shape", (2,)),))
    assert one.key == Request("allreduce", "x").key != Request("allgather", "x").key
    assert one.key != Request("allreduce", "y").key
    assert one.message[1] != Request("allreduce", "x", signature=(("shape", (3,)),)).message[1]
    assert Request("join", "join").message == JOIN


class Together:
    """Sums what several threads give, as if they were ranks."""

    def __init__(self, ranks: int) -> None:
        self._met, self._given = threading.Barrier(ranks, timeout=20), [torch.empty(0)] * ranks
        self.counts = [0] * ranks

    def calls_of(self, rank: int) -> Any:
        def sum_(tensor: torch.Tensor) -> None:
            self.counts[rank] += 1
            self._given[rank] = tensor.clone()
            self._met.wait()
            tensor.copy_(torch.stack(self._given).sum(0))
            self._met.wait()

        return types.SimpleNamespace(sum=sum_)


def reduction(
    name: str, values: list[float], op: int = Sum, dtype: torch.dtype = torch.float32
) -> Request:
    x = torch.tensor(values, dtype=dtype)
    how = {"op": op, "prescale_factor": 1.0, "postscale_factor": 1.0}
    return Request(
        "allreduce", name, [x], [x], how, (("op", op), ("shape", (len(values),)), ("dtype", dtype))
    )


def confirmed(asked: list[Request | None], taught: Request) -> list[bool]:
    """What each rank finds in the round after two of `taught`, when it asks for its part of
    `asked`.
    """
    together = Together(len(asked))

    def rank(number: int, request: Request | None) -> bool:
        cache = ResponseCache(together.calls_of(number), len(asked))
        for _ in range(2):
            assert not cache.has_prediction
            cache.put(taught)
        assert cache.has_prediction
        fits = request is not None and cache.matches(request)
        found = cache.confirm(request.key if request else JOIN[0], request if fits else None)
        assert cache.has_prediction == found
        return found

    with ThreadPoolExecutor(len(asked)) as threads:
        found = list(threads.map(rank, range(len(asked)), asked))
    assert together.counts == [1] * len(asked)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_all_ranks_confirm_is_done_in_one_sum(dtype: torch.dtype) -> None:
    sums = [reduction("x", [rank + 0.5, -1.0], dtype=dtype) for rank in range(3)]
    assert confirmed([*sums], sums[0]) == [True] * 3
    assert [each.result[0].tolist() for each in sums] == [[4.5, -3.0]] * 3
    means = [reduction("x", [3.0 * rank], Average, dtype) for rank in range(3)]
    assert confirmed([*means], means[0]) == [True] * 3
    assert [each.result[0].tolist() for each in means] == [[3.0]] * 3


def test_nothing_has_happened_where_one_rank_means_something_else() -> None:
    def x(value: float) -> Request:
        return reduction("x", [value])

    for other in (reduction("y", [2.0]), reduction("x", [1.0, 1.0]), None):
        asked = [x(1.0), other, x(2.0)]
        assert confirmed(asked, x(0.0)) == [False] * 3
        assert [each and each.inputs[0].tolist()[0] for each in asked] == [
            1.0,
            other and other.inputs[0][0],
            2.0,
        ]
    assert confirmed([None, None], x(0.0)) == [False] * 2


@given(st.lists(st.binary(min_size=8, max_size=8), min_size=2, max_size=5), st.integers(0, 4))
@example([bytes([1] * 8), bytes([2] * 8), bytes([3] * 8)], 0)  # one of them is the mean
def test_marks_agree_only_where_all_are_equal(keys: list[bytes], same: int) -> None:
    keys = [keys[0]] * same + keys[same:]
    buffers = [_Buffer(None, len(keys)) for _ in keys]
    for buffer, key in zip(buffers, keys, strict=True):
        buffer.fill(key, None)
    total = torch.stack([buffer.tensor for buffer in buffers]).sum(0)
    for buffer in buffers:
        buffer.tensor.copy_(total)
        assert buffer.all_equal() == (len(set(keys)) == 1)


def test_what_is_large_is_only_confirmed() -> None:
    large = [reduction("x", [1.0] * (1 << 15)) for _ in range(2)]
    assert confirmed([*large], large[0]) == [True] * 2
    assert large[0].result is None
    assert large[0].inputs[0][0] == 1.0


def test_what_comes_in_turns_is_not_foreseen() -> None:
    cache = ResponseCache(Together(2).calls_of(0), 2)
    for name, form in (("x", [0.0]), ("y", [0.0, 0.0])) * 2:
        request = reduction(name, form)
        cache.put(request)
        assert not cache.has_prediction
    alone, gpu = ResponseCache(Together(1).calls_of(0), 1), ResponseCache(None, 2)
    for each in (alone, gpu, alone, gpu):
        each.put(request)
        assert not each.has_prediction


def test_difference_names_both_values_and_their_ranks() -> None:
    signatures = {
        rank: (("dtype", dtype), ("shape", shape))
        for rank, (dtype, shape) in enumerate(
            [(torch.float32, (2,)), (torch.float32, (2, 3)), (torch.float32, (2,))]
        )
    }
    assert (
        mismatch_message("allreduce", "x", signatures)
        == "allreduce 'x': the ranks do not agree on shape: (2,) on ranks 0 and 2, (2, 3) on rank 1"
    )


def test_missing_names_those_that_have_joined() -> None:
    assert missing_ranks_message("allgather", "x", (1,)).startswith(
        "allgather 'x' needs all ranks, but rank 1 has joined"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.bfloat16])
@pytest.mark.parametrize("op", [Sum, Min, Max, Product])
def test_neutral_changes_nothing(op: int, dtype: torch.dtype) -> None:
    x = torch.tensor([-3, 0, 5]).to(dtype)
    nothing = neutral_tensor((3,), dtype, "cpu", op)
    apply = {Sum: torch.add, Min: torch.minimum, Max: torch.maximum, Product: torch.mul}[op]
    assert torch.equal(apply(x, nothing), x)


def test_stalled_operations_are_grouped_by_the_missing_ranks() -> None:
    x, y, z = (
        Request("allreduce", name, submitted_at=moment)
        for name, moment in (("x", 10.0), ("y", 12.0), ("z", 14.0))
    )
    table = MessageTable(4)
    table.add([[x.message, y.message, z.message], [], [x.message, y.message], [JOIN]])
    both, one = group_stalled([x, y, z], 70.0, table)
    assert (both.missing, both.waiting, one.missing, one.waiting) == ((1,), (0, 2), (1, 2), (0,))
    waited = (
        "rank 1 has not submitted allreduce 'x', allreduce 'y', for which ranks 0 and 2 have "
        "waited 60 s"
    )
    assert str(both) == waited
    assert (
        str(one)
        == "ranks 1 and 2 have not submitted allreduce 'z', for which rank 0 has waited 56 s"
    )
    many = StalledOps((1,), tuple(map(str, range(9))), (0,), 1.0)
    assert "0, 1, 2, 3, 4, 5 and 3 more" in str(many)


def test_limits_of_stalls() -> None:
    assert StallLimits.from_variables({}) == StallLimits(60.0, math.inf)
    warn, end, run = (
        "HOROVOD_STALL_CHECK_TIME_SECONDS",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
        "LOCKSTEP_STALL_TIMEOUT",
    )
    assert StallLimits.from_variables({warn: "5", end: "9"}) == StallLimits(5.0, 9.0)
    assert StallLimits.from_variables({warn: "0", end: "0"}) == StallLimits(math.inf, math.inf)
    # the launcher's option
    assert StallLimits.from_variables({end: "9", run: "7"}) == StallLimits(60.0, 7.0, run)
    assert StallLimits.from_variables(
        {warn: "5", end: "9", "HOROVOD_STALL_CHECK_DISABLE": "1"}
    ) == StallLimits(math.inf, math.inf)
    for name in (warn, end):
        for text in ("soon", "-1", "nan"):
            with pytest.raises(
                ConfigError, match=f"{name}: expected a number of seconds, 0 or more"
            ):
                StallLimits.from_variables({name: text})


def test_split_list_gives_the_first_lists_one_more() -> None:
    assert split_list([1, 2, 3, 4, 5], 2) == [[1, 2, 3], [4, 5]]
    assert split_list([1, 2], 5) == [[1], [2]]


def test_num_rank_is_power_2() -> None:
    assert [n for n in range(-1, 10) if num_rank_is_power_2(n)] == [1, 2, 4, 8]


def parameters(*shapes: int) -> list[torch.Tensor]:
    return [torch.zeros(shape, requires_grad=True) for shape in shapes]


def test_parameters_without_names_are_named_by_position() -> None:
    first, second = parameters(1, 2)
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": [second]}], lr=1.0)
    assert list(parameter_names(optimizer, None).values()) == [
        "allreduce.noname.0.0",
        "allreduce.noname.1.0",
    ]


@pytest.mark.parametrize("wrong", ["twice", "missing", "no pairs"])
def test_wrong_names(wrong: str) -> None:
    first, second = parameters(1, 2)
    given_names = {
        "twice": [("a", first), ("a", second)],
        "missing": [("a", first)],
        "no pairs": [first, second],
    }[wrong]
    with pytest.raises(ValueError, match="named_parameters: expected"):
        parameter_names(torch.optim.SGD([first, second], lr=1.0), given_names)


def test_groups() -> None:
    a, b, c = parameters(1, 2, 3)
    assert gradient_groups([a, b, c], None) == gradient_groups([a, b, c], 0) == [[a], [b], [c]]
    assert gradient_groups([a, b, c], 2) == [[a, b], [c]]
    assert gradient_groups([a, b, c], [[c, torch.zeros(1), a], []]) == [[c, a], [b]]


@pytest.mark.parametrize("wrong", [-1, "x", [1], 1.5, True])
def test_wrong_groups(wrong: object) -> None:
    with pytest.raises(ValueError, match="groups: expected"):
        gradient_groups(parameters(1), wrong)  # type: ignore[arg-type]


def test_a_parameter_in_two_groups() -> None:
    (a,) = parameters(1)
    with pytest.raises(ConfigError, match="each parameter in one group"):
        gradient_groups([a], [[a], [a]])
