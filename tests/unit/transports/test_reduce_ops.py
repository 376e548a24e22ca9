"""Reductions in rank order: every operation and dtype against NumPy, element by element."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.transports.runtime.reduce_ops import reduce_fn_for

BOOL = (torch.bool,)
INTEGER = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
HALF = (torch.half, torch.bfloat16)
REAL = (*HALF, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
ALL = (*BOOL, *INTEGER, *REAL, *COMPLEX)
FITS: dict[str, tuple[torch.dtype, ...]] = {
    "SUM": ALL,
    "PRODUCT": ALL,
    "AVG": (*REAL, *COMPLEX),
    "PREMUL_SUM": (*REAL, *COMPLEX),
    "MIN": (*BOOL, *INTEGER, *REAL),
    "MAX": (*BOOL, *INTEGER, *REAL),
    "BAND": (*BOOL, *INTEGER),
    "BOR": (*BOOL, *INTEGER),
    "BXOR": (*BOOL, *INTEGER),
}
FACTOR = 0.75
PAIRS: dict[str, Callable[[Any, Any], Any]] = {
    "SUM": np.add,
    "AVG": np.add,
    "PREMUL_SUM": np.add,
    "PRODUCT": np.multiply,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}
CASES = [(op, dtype) for op, dtypes in FITS.items() for dtype in dtypes]


def reduce_op(name: str) -> Any:
    return (
        dist._make_nccl_premul_sum(FACTOR) if name == "PREMUL_SUM" else getattr(dist.ReduceOp, name)
    )


def values(dtype: torch.dtype, ranks: int, seed: int = 0) -> list[Tensor]:
    """What the ranks hold: any bits for integers, numbers of very different sizes for the
    others.
    """
    source = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return [torch.randint(0, 2, (33,), generator=source).bool() for _ in range(ranks)]
    if dtype in INTEGER:
        nbytes = 33 * dtype.itemsize
        return [
            torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=source).view(dtype)
            for _ in range(ranks)
        ]
    wide = torch.complex128 if dtype.is_complex else torch.float64
    sizes = 10.0 ** torch.randint(-2, 3, (ranks, 33), generator=source)
    return [
        (torch.randn(33, dtype=wide, generator=source) * sizes[rank]).to(dtype)
        for rank in range(ranks)
    ]


def expected(op: str, parts: list[Tensor]) -> Tensor:
    """The reduction in rank order, in NumPy; of half types in float32, rounded once."""
    dtype = parts[0].dtype
    terms = [(part.float() if dtype in HALF else part).numpy() for part in parts]
    if op == "PREMUL_SUM":
        terms = [(term * np.array(FACTOR, dtype=term.dtype)) for term in terms]
    with np.errstate(over="ignore"):
        total = functools.reduce(PAIRS[op], terms)
    if op == "AVG":
        total = total / np.array(len(parts), dtype=total.dtype)
    return torch.from_numpy(np.ascontiguousarray(total)).to(dtype)


def same(got: Tensor, wanted: Tensor, op: str) -> bool:
    # a complex product, or division, may be computed with other roundings
    if got.dtype.is_complex and op in ("PRODUCT", "AVG"):
        return torch.allclose(got, wanted, rtol=1e-5 if got.dtype == torch.complex64 else 1e-12)
    return got.dtype == wanted.dtype and torch.equal(
        got.view(torch.uint8), wanted.view(torch.uint8)
    )


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_every_operation_and_dtype(op: str, dtype: torch.dtype, ranks: int) -> None:
    parts = values(dtype, ranks)
    before = [part.clone() for part in parts]
    out = torch.empty_like(parts[0])
    reduce_fn_for(reduce_op(op), dtype)(parts, out)
    assert same(out, expected(op, before), op), f"{out}, not {expected(op, before)}"
    assert all(same(part, old, "") for part, old in zip(parts, before, strict=True)), (
        "an input was changed"
    )


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_the_result_may_take_the_place_of_any_part(op: str, dtype: torch.dtype, ranks: int) -> None:
    for rank in range(ranks):
        parts = values(dtype, ranks)
        wanted = expected(op, [part.clone() for part in parts])
        reduce_fn_for(reduce_op(op), dtype)(parts, parts[rank])
        assert same(parts[rank], wanted, op), (
            f"in the place of rank {rank}: {parts[rank]}, not {wanted}"
        )


def test_a_sum_is_taken_from_the_first_rank_on() -> None:
    """In another order the small terms would be lost, or would not be."""
    for terms, total in (((1.0, 1e8, -1e8), 0.0), ((1e8, -1e8, 1.0), 1.0)):
        out = torch.empty(1)
        reduce_fn_for(dist.ReduceOp.SUM, torch.float32)(
            [torch.tensor([term]) for term in terms], out
        )
        assert out.item() == total


@pytest.mark.parametrize("dtype", HALF)
def test_halves_are_rounded_once(dtype: torch.dtype) -> None:
    """1 + 4 × ε/4, where each quarter alone would be rounded away."""
    quarter = torch.finfo(dtype).eps / 4
    parts = [
        torch.ones(1, dtype=dtype),
        *(torch.full((1,), quarter, dtype=dtype) for _ in range(4)),
    ]
    out = torch.empty(1, dtype=dtype)
    reduce_fn_for(dist.ReduceOp.SUM, dtype)(parts, out)
    assert out.item() == 1 + torch.finfo(dtype).eps


def test_a_factor_holds_for_its_own_call_only() -> None:
    parts = [torch.ones(1), torch.ones(1)]
    for factor in (2.0, 3.0, torch.tensor([0.5])):
        out = torch.empty(1)
        reduce_fn_for(dist._make_nccl_premul_sum(factor), torch.float32)(parts, out)
        assert out.item() == 2 * float(factor)


@pytest.mark.parametrize(
    ("op", "dtype"),
    [(op, dtype) for op in FITS for dtype in (*ALL, torch.float8_e5m2) if dtype not in FITS[op]],
)
def test_what_does_not_fit_is_refused_with_what_would(op: str, dtype: torch.dtype) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"dtype: expected one that {op} is defined for \(.*{_name(FITS[op][-1])}",
    ):
        reduce_fn_for(reduce_op(op), dtype)


def test_an_operation_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="op: expected SUM, AVG"):
        reduce_fn_for("sum", torch.float32)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
