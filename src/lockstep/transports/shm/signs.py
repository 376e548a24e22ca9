"""What a rank tells of the collective that it takes part in, so that ranks in different ones get an error."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...errors import TransportError

__all__ = [
    "ALL_GATHER",
    "ALL_REDUCE",
    "ALL_TO_ALL",
    "BARRIER",
    "BROADCAST",
    "GATHER",
    "KINDS",
    "REDUCE",
    "REDUCE_SCATTER",
    "SCATTER",
    "difference",
    "dtype_name",
    "dtype_number",
    "sign_of",
]

# in the order of _exchange.h
KINDS = [
    "barrier",
    "all_reduce",
    "reduce",
    "broadcast",
    "gather",
    "scatter",
    "all_gather",
    "all_to_all",
    "reduce_scatter",
]
BARRIER, ALL_REDUCE, REDUCE, BROADCAST, GATHER, SCATTER, ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER = range(len(KINDS))

# The position stands for the dtype; the first ones, which the compiled part adds, are in the order of _exchange.h.
_DTYPES = (
    *("float32", "float64", "int32", "int64"),
    *("float16", "bfloat16", "complex32", "complex64", "complex128"),
    *("bool", "uint8", "int8", "int16", "uint16", "uint32", "uint64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
    *("quint8", "qint8", "qint32", "quint4x2", "quint2x4"),
)
_ANOTHER = 63  # of all others, which are not told apart
_numbers = {getattr(torch, name): number for number, name in enumerate(_DTYPES) if hasattr(torch, name)}

# Of a word: 40 bits of bytes, 13 of its place in the order, 6 of the dtype, 4 of the kind.
_BYTES, _PLACES, _MASK = (1 << 40) - 1, (1 << 13) - 1, 63
_PLACE_AT, _DTYPE_AT, _KIND_AT = 40, 53, 59


def dtype_number(dtype: torch.dtype) -> int:
    """What stands for `dtype` where one number has to tell it, 0 to 63."""
    return _numbers.get(dtype, _ANOTHER)


def dtype_name(number: int) -> str:
    """The name of the dtype that `dtype_number` has given `number`."""
    return _DTYPES[number] if number < len(_DTYPES) else "another dtype"


def sign_of(kind: int, dtype: int, first: int, nbytes: int) -> int:
    """One word for a collective, 63 bits.

    Args:
        kind: index into KINDS.
        dtype: of its tensors, see `dtype_number`.
        first: the tick before those of its current chunk, which is its place in the order of collectives.
        nbytes: a size on which the ranks must agree.
    """
    return kind << _KIND_AT | dtype << _DTYPE_AT | (first & _PLACES) << _PLACE_AT | (nbytes & _BYTES)


def difference(rank: int, other: int, told: int, expected: int, names: Sequence[int]) -> TransportError:
    """The error for rank `rank`, to which `other` has `told` something else than `expected`."""
    kind, nbytes = KINDS[expected >> _KIND_AT], expected & _BYTES
    theirs, mine = (word >> _DTYPE_AT & _MASK for word in (told, expected))
    if (told ^ expected) & ~(_BYTES | _MASK << _DTYPE_AT):
        has = f"called another collective where rank {names[rank]} has called {kind} with {nbytes} bytes"
    elif theirs != mine:
        has = f"{dtype_name(theirs)} in {kind}, where rank {names[rank]} has {dtype_name(mine)}"
    else:
        has = f"{told & _BYTES} bytes in {kind}, where rank {names[rank]} has {nbytes}"
    return TransportError(
        f"shm: rank {names[other]} has {has}. "
        "All ranks must call the same collectives in the same order, with one dtype and with sizes that fit."
    )
