"""Partition of samples: the samples of each step, its shards, and the shards of each worker
(pure).
"""

from __future__ import annotations

from collections.abc import Iterable

from .. import arguments
from ..errors import ConfigError, counted

__all__ = [
    "DEFAULT_VIRTUAL_WORKERS",
    "bounds",
    "check_virtual_workers",
    "local_range",
    "mix",
    "sizes",
    "step_range",
    "steps_per_epoch",
]


_MASK = (1 << 64) - 1


def bounds(n: int, parts: int, part: int) -> tuple[int, int]:
    """Return the half-open range of `n` ordered items that belongs to `part` of `parts`.

    Parts are contiguous, in order, and differ by at most one item; the first parts take the
    remainder (17 items in two parts: 9 and 8). With fewer items than parts the last parts are
    empty.
    """
    if parts < 1 or not 0 <= part < parts:
        raise ValueError(f"part: expected 0 <= part < parts = {parts}, got {part}")
    if n < 0:
        raise ValueError(f"n: expected a whole number of at least 0, got {n}")
    quotient, remainder = divmod(n, parts)
    start = part * quotient + min(part, remainder)
    return start, start + quotient + (part < remainder)


def local_range(
    n: int, workers: int, rank: int, virtual_workers: int | None = None
) -> tuple[int, int]:
    """Return the half-open range of the `n` samples of a global batch that a worker has; with its
    shards, if any.
    """
    if virtual_workers is None:
        return bounds(n, workers, rank)
    first, last = bounds(virtual_workers, workers, rank)
    return bounds(n, virtual_workers, first)[0], bounds(n, virtual_workers, last - 1)[1]


def sizes(n: int, parts: int) -> list[int]:
    """Return the number of items in each of `parts` parts of `n` items, see `bounds`."""
    return [stop - start for start, stop in (bounds(n, parts, part) for part in range(parts))]


def steps_per_epoch(samples: int, global_batch_size: int, drop_last: bool = False) -> int:
    """Return the number of steps in one epoch over `samples`; a short last batch is a step unless
    `drop_last`.
    """
    return samples // global_batch_size if drop_last else -(-samples // global_batch_size)


def step_range(samples: int, global_batch_size: int, step: int) -> tuple[int, int]:
    """Return the half-open range of positions in the epoch's order that step `step` of the epoch
    uses.
    """
    start = step * global_batch_size
    return start, min(start + global_batch_size, samples)


_STATE = 0x9E3779B97F4A7C15


def mix(values: Iterable[int], state: int = _STATE) -> int:
    """Return a 64-bit key of several integers, e.g. (seed, purpose, epoch).

    The key of a prefix is the state from which the others follow: ``mix((a, b, c)) == mix((c,),
    mix((a, b)))``.

    It applies the finaliser of SplitMix64 to a running state: every bit of every value affects
    every bit of the key, so neighbouring seeds and steps get unrelated keys. Source: Steele, Lea,
    Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    z = state
    for value in values:
        z = ((z ^ (value & _MASK)) + _STATE) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        z ^= z >> 31
    return z


DEFAULT_VIRTUAL_WORKERS = 8


def check_virtual_workers(virtual_workers: int, workers: int) -> int:
    """Check the number of virtual workers, each of which computes one shard of a global batch, and
    return it.

    Raises:
        ConfigError: if it is not a whole number of at least 1, or is less than `workers`.
    """
    virtual_workers = arguments.whole("virtual_workers", virtual_workers, least=1)
    if virtual_workers < workers:
        hint = "Use fewer workers, or more virtual workers, which give other bits."
        raise ConfigError(
            "virtual_workers",
            f"at least one for each of {counted(workers, 'worker')}",
            virtual_workers,
            hint,
        )
    return virtual_workers
