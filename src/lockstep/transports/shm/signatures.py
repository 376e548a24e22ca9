"""The signature of a collective: one word that every rank writes beside its data, so that a
mismatch is an error.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...errors import TransportError

# the position is the kind's number; in the order of _exchange.h
_NAMES = (
    *("barrier", "all_reduce", "reduce", "broadcast", "gather", "scatter"),
    *("all_gather", "all_to_all", "reduce_scatter"),
)
KINDS = {name: number for number, name in enumerate(_NAMES)}

# The position is the dtype's number; the first ones, which the native extension sums, are in the
# order of _exchange.h.
_DTYPES = (
    *("float32", "float64", "int32", "int64"),
    *("float16", "bfloat16", "complex32", "complex64", "complex128"),
    *("bool", "uint8", "int8", "int16", "uint16", "uint32", "uint64"),
    *(
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "float4_e2m1fn_x2",
    ),
    *("quint8", "qint8", "qint32", "quint4x2", "quint2x4"),
)
_OTHER_DTYPE = 63  # for all others, which are not told apart
_numbers = {
    getattr(torch, name): number for number, name in enumerate(_DTYPES) if hasattr(torch, name)
}

# bits of a signature: 40 for a number of bytes, 13 for the position in the order, 6 for the dtype,
# 4 for the kind
_BYTES = (1 << 40) - 1
_POSITIONS = (1 << 13) - 1
_DTYPE_MASK = 63
_POSITION_SHIFT = 40
_DTYPE_SHIFT = 53
_KIND_SHIFT = 59


def dtype_number(dtype: torch.dtype) -> int:
    """Return a number for `dtype`, 0 to 63."""
    return _numbers.get(dtype, _OTHER_DTYPE)


def dtype_name(number: int) -> str:
    """Return the name of the dtype with this `dtype_number`."""
    return _DTYPES[number] if number < len(_DTYPES) else "another dtype"


def signature_of(kind: int, dtype: int, first_tick: int, nbytes: int) -> int:
    """Return the signature of a collective, 63 bits.

    Args:
        kind: a value of KINDS.
        dtype: of its tensors, see `dtype_number`.
        first_tick: the tick before those of its current chunk, which is its position in the order
            of collectives.
        nbytes: a size on which the ranks must agree.
    """
    return (
        kind << _KIND_SHIFT
        | dtype << _DTYPE_SHIFT
        | (first_tick & _POSITIONS) << _POSITION_SHIFT
        | (nbytes & _BYTES)
    )


def mismatch_error(
    rank: int, other: int, signature: int, expected: int, display_ranks: Sequence[int]
) -> TransportError:
    """Return the error on `rank` when the `signature` of rank `other` is not the `expected` one."""
    kind = _NAMES[expected >> _KIND_SHIFT]
    nbytes = expected & _BYTES
    theirs, mine = (word >> _DTYPE_SHIFT & _DTYPE_MASK for word in (signature, expected))
    if (signature ^ expected) & ~(_BYTES | _DTYPE_MASK << _DTYPE_SHIFT):
        has = (
            f"called another collective where rank {display_ranks[rank]} has called {kind} with "
            f"{nbytes} bytes"
        )
    elif theirs != mine:
        has = (
            f"{dtype_name(theirs)} in {kind}, where rank {display_ranks[rank]} has "
            f"{dtype_name(mine)}"
        )
    else:
        has = f"{signature & _BYTES} bytes in {kind}, where rank {display_ranks[rank]} has {nbytes}"
    return TransportError(
        f"shm: rank {display_ranks[other]} has {has}. All ranks must call the same collectives in "
        "the same order, with one dtype and with sizes that fit."
    )
