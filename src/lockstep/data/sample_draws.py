"""Random draws of data sets and collate functions, keyed by sample: the same in any process, at any
number of them.
"""

from __future__ import annotations

import random
import sys

import torch

from ..parallel.shards import mix

_LOW = 0xFFFFFFFF
_COLLATE = 1  # part of the key of a collate function's draws


def seed_draws(key: int, index: int) -> None:
    """Seed the global generators of torch (CPU), Python and NumPy for one sample.

    It takes about 7 µs, most of it in Python's generator. Generators of the data set's own are not
    seeded.

    Args:
        key: of the epoch's random draws.
        index: the sample.
    """
    mixed = mix((key, index))
    # torch.manual_seed() also seeds every backend, which takes a hundred times as long. The
    # generators of torch and NumPy are both Mersenne twisters seeded with 32 bits: the same bits
    # would give the same numbers.
    torch.default_generator.manual_seed(mixed & _LOW)
    random.seed(mixed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(mixed >> 32)


def seed_collate(key: int, index: int) -> None:
    """Seed them for a batch: its draws are the same whichever process has loaded the samples.

    Args:
        key: of the epoch's random draws.
        index: the first sample of the batch.
    """
    seed_draws(mix((key, _COLLATE)), index)
