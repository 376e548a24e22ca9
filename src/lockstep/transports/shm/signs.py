"""What a rank tells of the collective that it takes part in, so that ranks in different ones get an error."""

from __future__ import annotations

from collections.abc import Sequence

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

_BYTES = (1 << 40) - 1
_PLACES = 0xFFFF


def sign_of(kind: int, first: int, nbytes: int) -> int:
    """One word for a collective.

    Args:
        kind: index into KINDS.
        first: the tick before those of its current chunk, which is its place in the order of collectives.
        nbytes: a size on which the ranks must agree.
    """
    return kind << 56 | (first & _PLACES) << 40 | (nbytes & _BYTES)


def difference(rank: int, other: int, told: int, expected: int, names: Sequence[int]) -> TransportError:
    """The error for rank `rank`, to which `other` has `told` something else than `expected`."""
    kind, nbytes = KINDS[expected >> 56], expected & _BYTES
    if told >> 40 == expected >> 40:
        has = f"{told & _BYTES} bytes in {kind}, where rank {names[rank]} has {nbytes}"
    else:
        has = f"called another collective where rank {names[rank]} has called {kind} with {nbytes} bytes"
    return TransportError(
        f"shm: rank {names[other]} has {has}. "
        "All ranks must call the same collectives in the same order, with sizes that fit."
    )
