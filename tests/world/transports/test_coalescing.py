"""Several tensors in one call: the coalesced collectives and c10d's coalescing manager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from support.conformance import Case, Ranks
from support.operations import all_gather_single, reduce_scatter_single

SHAPES = [(3,), (2, 2), (0,), (700,), (1,)]


def cases(dtype: torch.dtype = torch.float32) -> list[Case]:
    return [Case(shape, dtype=dtype, seed=seed) for seed, shape in enumerate(SHAPES)]


def sums(case: Case, part: int = 0) -> Tensor:
    return case.folded([case.numbers(rank, part) for rank in range(case.size)])


def joined(case: Case, rank: int) -> Tensor:
    return torch.cat([case.numbers(rank, part) for part in range(case.size)])


def all_reduces(later: bool) -> None:
    tensors = [case.numbers(case.rank) for case in cases()]
    with dist._coalescing_manager(async_ops=later) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    if later:
        manager.wait()
    for case, tensor in zip(cases(), tensors, strict=True):
        case.expect(tensor, sums(case))


def all_gathers(later: bool) -> None:
    outs = [torch.zeros(case.size * case.shape[0], *case.shape[1:]) for case in cases()]
    with dist._coalescing_manager(async_ops=later) as manager:
        for case, out in zip(cases(), outs, strict=True):
            all_gather_single(out, case.bits(case.rank))
    if later:
        manager.wait()
    for case, out in zip(cases(), outs, strict=True):
        case.expect(out, torch.cat([case.bits(rank) for rank in range(case.size)]))


def reduce_scatters(later: bool) -> None:
    outs = [torch.zeros(case.shape) for case in cases()]
    with dist._coalescing_manager(async_ops=later) as manager:
        for case, out in zip(cases(), outs, strict=True):
            reduce_scatter_single(out, joined(case, case.rank))
    if later:
        manager.wait()
    for case, out in zip(cases(), outs, strict=True):
        case.expect(out, sums(case, case.rank))


def at_once_and_later(body: Callable[[bool], None]) -> None:
    for later in (False, True):
        body(later)


@pytest.mark.parametrize("body", [all_reduces, all_gathers, reduce_scatters])
def test_coalescing_manager(ranks: Ranks, body: Callable[[bool], None]) -> None:
    ranks.run(at_once_and_later, body)


def maxima() -> None:
    tensors = [case.numbers(case.rank) for case in cases()]
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
    for case, tensor in zip(cases(), tensors, strict=True):
        case.expect(tensor, torch.stack([case.numbers(rank) for rank in range(case.size)]).amax(0))


def test_coalesced_reductions_other_than_sums(ranks: Ranks) -> None:
    ranks.run(maxima)


# --- the older functions, which lists of tensors are given to
# -------------------------------------------------


def lists(later: bool) -> None:
    own = cases()
    tensors = [case.numbers(case.rank) for case in own]
    finish(dist.all_reduce_coalesced(tensors, async_op=later))
    for case, tensor in zip(own, tensors, strict=True):
        case.expect(tensor, sums(case))
    rank, size = own[0].rank, own[0].size
    outs = [[torch.zeros(case.shape) for case in own] for _ in range(size)]
    finish(dist.all_gather_coalesced(outs, [case.bits(rank) for case in own], async_op=later))
    for peer, received in enumerate(outs):
        for case, out in zip(own, received, strict=True):
            case.expect(out, case.bits(peer))


def finish(future: Any) -> None:
    if future is not None:
        future.wait()


@pytest.mark.filterwarnings("ignore:.*coalesced.* will be deprecated:FutureWarning")
def test_coalesced_functions(ranks: Ranks) -> None:
    ranks.run(at_once_and_later, lists)


# --- lists of one rank's tensors, of sizes that differ
# --------------------------------------------------------


def rows(size: int) -> list[int]:
    """Rank r holds r + 1 rows; ranks from the third on hold none."""
    return [rank + 1 if rank < 2 else 0 for rank in range(size)]


def uneven_all_gather() -> None:
    case = Case()
    shapes = [(count, 3) for count in rows(case.size)]
    parts = [torch.zeros(shape) for shape in shapes]
    dist.all_gather(parts, case.bits(case.rank, 0, shapes[case.rank]))
    for peer, part in enumerate(parts):
        case.expect(part, case.bits(peer, 0, shapes[peer]))


def uneven_all_to_all() -> None:
    case = Case()
    shapes = [(count, 3) for count in rows(case.size)]
    received = [torch.zeros(shape) for shape in shapes]
    dist.all_to_all(
        received, [case.bits(case.rank, peer, shapes[case.rank]) for peer in range(case.size)]
    )
    for peer, part in enumerate(received):
        case.expect(part, case.bits(peer, case.rank, shapes[peer]))


def uneven_reduce_scatter() -> None:
    case = Case()
    shapes = [(count, 3) for count in rows(case.size)]
    total = torch.zeros(shapes[case.rank])
    dist.reduce_scatter(
        total, [case.numbers(case.rank, peer, shapes[peer]) for peer in range(case.size)]
    )
    case.expect(
        total,
        case.folded([case.numbers(p, case.rank, shapes[case.rank]) for p in range(case.size)]),
    )


@pytest.mark.parametrize("body", [uneven_all_gather, uneven_all_to_all, uneven_reduce_scatter])
def test_lists_of_uneven_tensors(ranks: Ranks, body: Callable[[], None]) -> None:
    if ranks.transport == "gloo" and body is not uneven_reduce_scatter:
        pytest.skip("gloo wants tensors of one shape here")
    ranks.run(body)
