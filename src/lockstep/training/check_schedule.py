"""At which steps what a user's code does is looked at closely: one schedule for all such checks.

The checks are those of losses and metrics by halves (`mean_check`, `model_check`), of the losses of
a prepared loop (`body_losses`), of gradients that are changed by hand (`prepared_optimizer`), of
forward passes that change parameters (`step`), and of callbacks (`rank0_changes`).
"""

from __future__ import annotations

from functools import lru_cache

from ..parallel.shards import mix

_EVERY = 1024
_FIRST_DRAWN = 8
_SCHEDULE = 17  # the key of this schedule's draws

WITH_GRADIENTS = (0, 1)
"""The steps at which gradients are compared in any case; later, the losses of samples differ and
values alone tell.
"""


def is_due(number: int) -> bool:
    """Return whether a check is made at this step, or this batch of an evaluation:
    0, 1, 2, 4 … 1024, and every 1024 after; from 8 on also at one between each two of these.

    The ones between are drawn, the same everywhere: where an epoch has 2ⁿ steps, the others are all
    first or middle ones of an epoch.
    """
    if number >= _EVERY:
        return number % _EVERY in (0, _drawn(_EVERY, number // _EVERY))
    power = 1 << max(0, number.bit_length() - 1)
    return number in (0, power) or (
        power >= _FIRST_DRAWN and number == power + _drawn(power, power)
    )


@lru_cache(maxsize=64)
def _drawn(length: int, key: int) -> int:
    """Return a number from 1 to `length` - 1 that follows from `key`."""
    return 1 + mix((_SCHEDULE, key)) % (length - 1)


def block_at(number: int) -> int:
    """Return the number of the block of samples that is compared at a step: another one each time
    that is due.
    """
    return number.bit_length() + number // _EVERY
