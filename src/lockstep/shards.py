"""Which samples form a step, and which worker computes which of them; pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["bounds", "mix", "sizes", "step_range", "steps_per_epoch"]

_MASK = (1 << 64) - 1


def bounds(n: int, parts: int, part: int) -> tuple[int, int]:
    """The half-open range of `n` ordered items that belongs to `part` of `parts`.

    Parts are contiguous, in order, and differ by one item at most; lower parts take the remainder (17 in two
    parts: 9 and 8). With fewer items than parts the last parts are empty.
    """
    if parts < 1 or not 0 <= part < parts:
        raise ValueError(f"part: expected 0 <= part < parts = {parts}, got {part}")
    if n < 0:
        raise ValueError(f"n: expected a whole number of at least 0, got {n}")
    quotient, remainder = divmod(n, parts)
    start = part * quotient + min(part, remainder)
    return start, start + quotient + (part < remainder)


def sizes(n: int, parts: int) -> list[int]:
    """How many of `n` items each of `parts` gets."""
    return [stop - start for start, stop in (bounds(n, parts, part) for part in range(parts))]


def steps_per_epoch(samples: int, global_batch: int, drop_last: bool = False) -> int:
    """Steps that one pass over `samples` takes; a short last batch is a step unless `drop_last`."""
    return samples // global_batch if drop_last else -(-samples // global_batch)


def step_range(samples: int, global_batch: int, step: int) -> tuple[int, int]:
    """The half-open range of the epoch's order that step `step` of that epoch uses."""
    start = step * global_batch
    return start, min(start + global_batch, samples)


def mix(values: Iterable[int]) -> int:
    """One 64-bit key out of several integers, e.g. (seed, purpose, epoch).

    The finaliser of SplitMix64 over a running state: every bit of every value reaches every bit of the key, so
    neighbouring seeds and steps get unrelated keys. Source: Steele, Lea, Flood, "Fast splittable pseudorandom
    number generators", OOPSLA 2014.
    """
    z = 0x9E3779B97F4A7C15
    for value in values:
        z = ((z ^ (value & _MASK)) + 0x9E3779B97F4A7C15) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        z ^= z >> 31
    return z
