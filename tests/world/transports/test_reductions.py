"""Sums are the left fold in rank order, to the bit; what cannot be reduced is refused before
anything is sent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from support.conformance import FITS, HALF, PURE, REDUCIBLE, Case, Ranks, fold
from support.operations import REDUCING, perform, reduce_scatter_single

# Gloo and MPI sum in an order of their own, and Gloo half types at each step.
in_order = pytest.mark.parametrize("transport", ["shm", PURE])
not_gloo = pytest.mark.parametrize("transport", ["shm", PURE, "mpi4py"])


# --- order and rounding
# ---------------------------------------------------------------------------------------


def every_reduction(tensor: Tensor, op: str = "SUM") -> list[Tensor]:
    """The reduction of the ranks' tensors by every operation that has a result on this rank."""
    size, reduce_op = dist.get_world_size(), Case(op=op).reduce_op
    all_reduced, reduced = tensor.clone(), tensor.clone()
    dist.all_reduce(all_reduced, reduce_op)
    scattered, from_one = torch.empty_like(tensor), torch.empty_like(tensor)
    dist.reduce_scatter(scattered, [tensor] * size, reduce_op)
    reduce_scatter_single(from_one, tensor.repeat(size), reduce_op)
    dist.reduce(reduced, size - 1, reduce_op)
    return [all_reduced, scattered, from_one] + [reduced] * (dist.get_rank() == size - 1)


def random_values(rank: int, dtype: torch.dtype, count: int) -> Tensor:
    source = torch.Generator().manual_seed(100 + rank)
    return torch.randn(count, dtype=torch.float64, generator=source).to(dtype)


def sums_of_random_values(dtype: torch.dtype, counts: list[int]) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for count in counts:
        parts = [random_values(peer, dtype, count) for peer in range(size)]
        expected = fold("SUM", parts)
        if count > 100 and size > 2 and dtype not in HALF:
            assert not torch.equal(expected, fold("SUM", parts[::-1])), (
                "the order does not show in these values"
            )
        for got in every_reduction(parts[rank]):
            assert torch.equal(got, expected), (dtype, count)


@in_order
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(
    "dtype", [torch.half, torch.bfloat16, torch.float32, torch.float64, torch.complex64], ids=str
)
def test_sums_are_the_left_fold_in_rank_order(ranks: Ranks, dtype: torch.dtype) -> None:
    ranks.run(sums_of_random_values, dtype, [1, 7, 1000, 2**14 + 1, 2**18 + 3])


@in_order
def test_sums_beyond_the_shared_memory_are_in_rank_order_too(ranks: Ranks) -> None:
    ranks.run(sums_of_random_values, torch.float32, [3_000_001])


def round_once(dtype: torch.dtype, op: str) -> None:
    """The second to fourth rank each add half of what the first one's number can resolve."""
    large = 1 / torch.finfo(dtype).eps * 2
    parts = [torch.full((5,), large if rank == 0 else 1.0).to(dtype) for rank in range(4)]
    stepwise = ((parts[0] + parts[1]) + parts[2]) + parts[3]
    expected = fold(op, parts)
    assert op != "SUM" or not torch.equal(stepwise, expected), (
        "rounding at each step does not show in these values"
    )
    for got in every_reduction(parts[dist.get_rank()], op):
        assert torch.equal(got, expected), (dtype, op, got, expected)


@not_gloo
@pytest.mark.parametrize("size", [4])
@pytest.mark.parametrize("op", ["SUM", "AVG", "PREMUL_SUM"])
@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16], ids=str)
def test_half_types_are_rounded_once(ranks: Ranks, dtype: torch.dtype, op: str) -> None:
    ranks.run(round_once, dtype, op)


def special_values(op: str) -> None:
    """Infinities and not-a-number come out as torch's own arithmetic has them, on all ranks."""
    inf, nan = float("inf"), float("nan")
    rows = [
        [inf, -inf, nan, 1.0, inf, -0.0],
        [1.0, inf, 2.0, nan, inf, 0.0],
        [1.0, 2.0, 3.0, 4.0, 5.0, -0.0],
    ]
    for dtype in (torch.half, torch.bfloat16, torch.float32, torch.float64):
        parts = [torch.tensor(row, dtype=dtype) for row in rows]
        got = parts[dist.get_rank()].clone()
        dist.all_reduce(got, Case(op=op).reduce_op)
        torch.testing.assert_close(got, fold(op, parts), equal_nan=True, rtol=0, atol=0)


@in_order
@pytest.mark.parametrize("size", [3])
@pytest.mark.parametrize("op", ["SUM", "AVG", "PRODUCT", "MIN", "MAX"])
def test_infinities_and_not_a_number(ranks: Ranks, op: str) -> None:
    ranks.run(special_values, op)


# --- what is refused
# ------------------------------------------------------------------------------------------


def refused(calls: list[Callable[[], object]]) -> list[str]:
    """Every call raises at once on this rank; afterwards the group works."""
    messages = []
    for call in calls:
        with pytest.raises((ValueError, TypeError, RuntimeError)) as error:
            call()
        messages.append(str(error.value))
        perform("all_reduce", Case(seed=len(messages)))
    return messages


def misfits(operation: str) -> list[tuple[str, torch.dtype]]:
    """Pairs that fit no better; c10d passes complex tensors on as pairs of real numbers, except for
    all_reduce.
    """
    pairs = [
        (op, dtype) for op, fitting in FITS.items() for dtype in REDUCIBLE if dtype not in fitting
    ]
    return [(op, dtype) for op, dtype in pairs if operation == "all_reduce" or not dtype.is_complex]


def reduce_misfits() -> None:
    for operation in REDUCING:
        cases = [Case(op=op, dtype=dtype) for op, dtype in misfits(operation)]
        assert len(cases) > 15
        refused([functools.partial(perform, operation, case) for case in cases])


@not_gloo
def test_an_operation_that_does_not_fit_the_dtype_is_refused(ranks: Ranks) -> None:
    ranks.run(reduce_misfits)


def wrong_tensors() -> None:
    size = dist.get_world_size()
    two, three, whole = torch.ones(2), torch.ones(3), torch.ones(2, dtype=torch.int64)
    uneven = torch.ones(2 * size + 1)
    refused(
        [
            lambda: dist.all_gather([two] * (size - 1), two),
            lambda: dist.all_gather([two] * size, whole),
            lambda: dist.all_gather([three] * size, two),
            lambda: dist.reduce_scatter(two, [two] * (size + 1)),
            lambda: dist.reduce_scatter(three, [two] * size),
            lambda: reduce_scatter_single(two, uneven),
            lambda: dist.all_to_all_single(uneven, uneven.clone()),
            lambda: dist.all_to_all_single(two, two.clone(), [2] * size, [2] * size),
            lambda: dist.all_to_all([two] * (size - 1), [two] * (size - 1)),
            lambda: dist.broadcast(two.to_sparse(), 0),
            lambda: dist.all_reduce(torch.empty(2, device="meta")),
        ]
    )


@not_gloo
def test_tensors_that_do_not_fit_the_call_are_refused(ranks: Ranks) -> None:
    ranks.run(wrong_tensors)
