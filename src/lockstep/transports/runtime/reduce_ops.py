"""Reduce operations over tensors in rank order, element by element."""

# torch's stubs lack some of the names of torch.distributed
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp

from ...errors import ConfigError

# Writes the reduction of tensors in rank order into a tensor of the same shape and dtype, which may
# be one of them.
ReduceFn = Callable[[Sequence[torch.Tensor], torch.Tensor], None]

_SUM, _AVG, _PRODUCT, _MIN, _MAX, _BAND, _BOR, _BXOR, _PREMUL = (
    int(getattr(ReduceOp.RedOpType, name))
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
)
_HALF = (torch.float16, torch.bfloat16)
_REAL = (torch.float32, torch.float64, *_HALF)
_COMPLEX = (torch.complex64, torch.complex128)
_SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
# torch has no sum for these; two's complement makes signed and unsigned sums, products and bits the
# same
_UNSIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_INTEGER = (*_SIGNED, *_UNSIGNED, torch.bool)
_NUMBER = (*_REAL, *_COMPLEX)

_BINARY: dict[int, tuple[Callable[..., Any], tuple[torch.dtype, ...]]] = {
    _SUM: (torch.add, (*_NUMBER, *_INTEGER)),
    _PRODUCT: (torch.mul, (*_NUMBER, *_INTEGER)),
    _MIN: (torch.minimum, (*_REAL, *_INTEGER)),
    _MAX: (torch.maximum, (*_REAL, *_INTEGER)),
    _BAND: (torch.bitwise_and, _INTEGER),
    _BOR: (torch.bitwise_or, _INTEGER),
    _BXOR: (torch.bitwise_xor, _INTEGER),
}
_cache: dict[tuple[int, torch.dtype], ReduceFn] = {}


def reduce_fn_for(op: Any, dtype: torch.dtype) -> ReduceFn:
    """Return the function that computes `op` (a `torch.distributed.ReduceOp`) for `dtype`.

    A sum is taken in rank order, ((x0 + x1) + x2) + …; a sum of half-precision values is taken in
    float32 and rounded once. AVG divides the sum by the number of ranks; PREMUL_SUM multiplies each
    term by the operation's factor. A sum of bools is "or", a product "and".

    Raises:
        ConfigError: when the operation is not defined for `dtype`.
    """
    code = hash(op)
    reduce_fn = _cache.get((code, dtype))
    if reduce_fn is None:
        reduce_fn = _build(op, code, dtype)
        if code != _PREMUL:  # its factor differs from call to call
            _cache[code, dtype] = reduce_fn
    return reduce_fn


def _build(op: Any, code: int, dtype: torch.dtype) -> ReduceFn:
    if code in (_AVG, _PREMUL):
        _require(op, dtype, _NUMBER)
        if code == _PREMUL:
            return _premultiplied(premul_factor(op), dtype)
        return _in_float32(_in_rank_order(torch.add), lambda total, ranks: total.div_(ranks))
    if code not in _BINARY:
        raise ConfigError(
            "op", "SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR or PREMUL_SUM", found=str(op)
        )
    binary, dtypes = _BINARY[code]
    _require(op, dtype, dtypes)
    if dtype in _UNSIGNED:
        return _unsigned(binary, dtype, by_order=code in (_MIN, _MAX))
    if dtype in _HALF and code in (_SUM, _PRODUCT):
        return _in_float32(_in_rank_order(binary))
    return _in_rank_order(binary)


def premul_factor(op: Any) -> float | torch.Tensor:
    """Return the factor of a PREMUL_SUM, which torch before 2.13 exposes only in the operation's
    pickled state.
    """
    factor: float | torch.Tensor = op.__getstate__()[1]
    return factor


def _require(op: Any, dtype: torch.dtype, dtypes: Sequence[torch.dtype]) -> None:
    if dtype not in dtypes:
        names = ", ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
        name = str(getattr(op, "op", op)).rsplit(".", 1)[-1]
        raise ConfigError(
            "dtype",
            f"one that {name} is defined for ({names})",
            found=str(dtype).removeprefix("torch."),
        )


def _in_rank_order(binary: Callable[..., Any]) -> ReduceFn:
    def reduce_fn(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        # `out` may be one of the parts, so it is written only with the last of them
        if len(parts) == 2:
            binary(parts[0], parts[1], out=out)
            return
        total = binary(parts[0], parts[1]) if len(parts) > 1 else parts[0]
        for part in parts[2:-1]:
            binary(total, part, out=total)
        if len(parts) > 2:
            binary(total, parts[-1], out=out)
        else:
            out.copy_(total)

    return reduce_fn


def _in_float32(
    reduce_fn: ReduceFn, then: Callable[[torch.Tensor, int], object] | None = None
) -> ReduceFn:
    """Reduce half types in float32 (other types as they are), finish with `then`, and round
    once.
    """

    def wide(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        half = out.dtype in _HALF
        terms = [part.float() for part in parts] if half else parts
        total = torch.empty_like(terms[0])
        reduce_fn(terms, total)
        if then is not None:
            then(total, len(parts))
        out.copy_(total)

    return wide


def _premultiplied(factor: float | torch.Tensor, dtype: torch.dtype) -> ReduceFn:
    plain_sum = _in_rank_order(torch.add)

    def scaled(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        plain_sum([part * factor for part in parts], out)

    return _in_float32(scaled)


def _unsigned(binary: Callable[..., Any], dtype: torch.dtype, by_order: bool) -> ReduceFn:
    signed = _UNSIGNED[dtype]
    reduce_signed = _in_rank_order(binary)

    def reduce_fn(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        views = [part.view(signed) for part in parts]
        if by_order:  # flipping the sign bit turns the unsigned order into the signed one
            lowest = torch.iinfo(signed).min
            views = [view ^ lowest for view in views]
        reduce_signed(views, out.view(signed))
        if by_order:
            out.view(signed).bitwise_xor_(lowest)

    return reduce_fn
