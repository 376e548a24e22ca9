"""Random draws of data sets, such as augmentation, made to depend on (seed, epoch, sample) alone."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..shards import mix

__all__ = ["draws_apart", "seed_draws"]

_LOW = 0xFFFFFFFF


def seed_draws(key: int, index: int) -> None:
    """Seed the global generators of torch (CPU), Python and NumPy for one sample.

    About 7 µs, most of it Python's own. Generators that a data set keeps for itself are its own business.
    """
    mixed = mix((key, index))
    # torch.manual_seed() would ask every backend as well, which takes a hundred times as long. The generators of torch
    # and NumPy are both Mersenne twisters that take 32 bits: from the same bits they would draw the same numbers.
    torch.default_generator.manual_seed(mixed & _LOW)
    random.seed(mixed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(mixed >> 32)


@contextmanager
def draws_apart() -> Iterator[None]:
    """Put the global generators back afterwards, so that dropout and the like go on as if nothing had been drawn."""
    ours, pythons = torch.default_generator.get_state(), random.getstate()
    numpy = sys.modules.get("numpy")
    numpys = None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(ours)
        random.setstate(pythons)
        if numpy is not None:
            numpy.random.set_state(numpys)
