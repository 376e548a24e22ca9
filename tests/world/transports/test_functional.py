"""Functional collectives: they return new tensors, can be compiled, and have gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from support.conformance import Case, Ranks

# the two older names bring a deprecation warning where the newer are there
gather_single = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
scatter_single = (
    getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor
)


def every_function() -> None:
    case = Case((4, 3))
    rank, size, group = case.rank, case.size, dist.group.WORLD
    mine = case.numbers(rank)
    total = case.folded([case.numbers(peer) for peer in range(size)])
    for op, expected in (
        ("sum", total),
        ("max", torch.stack([case.numbers(p) for p in range(size)]).amax(0)),
    ):
        case.expect(functional.wait_tensor(functional.all_reduce(mine, op, group)), expected)
    torch.testing.assert_close(
        functional.wait_tensor(functional.all_reduce(mine, "avg", group)), total / size
    )
    case.expect(mine, case.numbers(rank), "input")
    case.expect(functional.wait_tensor(functional.broadcast(mine, 1, group)), case.numbers(1))
    for dim in (0, 1):
        gathered = functional.wait_tensor(gather_single(mine, dim, group))
        case.expect(gathered, torch.cat([case.numbers(peer) for peer in range(size)], dim))
        whole = torch.cat([case.numbers(rank, part) for part in range(size)], dim)
        scattered = functional.wait_tensor(scatter_single(whole, "sum", dim, group))
        case.expect(scattered, case.folded([case.numbers(peer, rank) for peer in range(size)]))
    rows = (
        [(rank + 2 * peer) % 3 for peer in range(size)],
        [(peer + 2 * rank) % 3 for peer in range(size)],
    )
    sent = torch.cat([case.numbers(rank, peer, (count, 3)) for peer, count in enumerate(rows[0])])
    received = functional.wait_tensor(functional.all_to_all_single(sent, rows[1], rows[0], group))
    case.expect(
        received, torch.cat([case.numbers(peer, rank, (c, 3)) for peer, c in enumerate(rows[1])])
    )


def coalesced() -> None:
    cases = [Case((size + 1,), seed=size) for size in range(4)]
    group = dist.group.WORLD
    tensors = [case.numbers(case.rank) for case in cases]
    for case, got in zip(
        cases, functional.all_reduce_coalesced(tensors, "sum", group), strict=True
    ):
        case.expect(
            functional.wait_tensor(got),
            case.folded([case.numbers(peer) for peer in range(case.size)]),
        )
    gather = (
        getattr(functional, "all_gather_single_coalesced", None)
        or functional.all_gather_into_tensor_coalesced
    )
    for case, got in zip(cases, gather(tensors, group), strict=True):
        case.expect(
            functional.wait_tensor(got),
            torch.cat([case.numbers(peer) for peer in range(case.size)]),
        )


def many_at_once() -> None:
    """Several under way; their results are waited for when first used."""
    case = Case((1000,))
    under_way = [
        functional.all_reduce(case.numbers(case.rank, part), "sum", dist.group.WORLD)
        for part in range(20)
    ]
    for part in reversed(range(20)):
        expected = case.folded([case.numbers(peer, part) for peer in range(case.size)])
        case.expect(under_way[part] + 0, expected)


def exchange(mine: Tensor) -> Tensor:
    total = functional.all_reduce(mine * 2, "sum", dist.group.WORLD)
    return gather_single(total + 1, 0, dist.group.WORLD) * 3


def compiled() -> None:
    case = Case((4,))
    expected = 3 * (2 * case.folded([case.numbers(peer) for peer in range(case.size)]) + 1).repeat(
        case.size
    )
    case.expect(
        torch.compile(exchange, backend="aot_eager", fullgraph=True)(case.numbers(case.rank)),
        expected,
    )
    torch._dynamo.reset()


@pytest.mark.parametrize("body", [every_function, coalesced, many_at_once])
def test_functional_collectives(ranks: Ranks, body: Callable[[], None]) -> None:
    ranks.run(body)


@pytest.mark.leaks("the compiler keeps what it has compiled, and with it the group")
@pytest.mark.parametrize("size", [2])
def test_compiled_functional_collectives(ranks: Ranks) -> None:
    ranks.run(compiled, timeout=110)
