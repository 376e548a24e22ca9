"""Random draws of data sets and collate functions, keyed by sample: the same in any process, at any
number of them; and the random generators that a data set has of its own, which are not keyed.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
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


@contextmanager
def preserve_own_generators(dataset: Any) -> Iterator[None]:
    """Restore the random generators that a data set has as attributes, or its parts have, after a
    `with` block.
    """
    restore = [save() for save in _savers(dataset)]
    try:
        yield
    finally:
        for call in restore:
            call()


# A generator is looked for in what a data set refers to: in so many objects, and of a container in
# so many items, as a list of all samples would take long.
_MAX_OBJECTS = 2000
_MAX_ITEMS = 64


def _savers(dataset: Any) -> Iterator[Callable[[], Callable[[], None]]]:
    """Yield for each random generator within a data set a function that saves its state and returns
    one to restore.
    """
    seen: set[int] = set()
    pending = [dataset]
    while pending and len(seen) < _MAX_OBJECTS:
        value = pending.pop()
        if id(value) in seen or isinstance(
            value, (str, bytes, int, float, torch.Tensor, np.ndarray, type)
        ):
            continue
        seen.add(id(value))
        if isinstance(value, (torch.Generator, np.random.RandomState)):
            yield _saver(value.get_state, value.set_state)
        elif isinstance(value, np.random.Generator):
            bits = value.bit_generator
            yield _saver(
                lambda bits=bits: bits.state,  # type: ignore[misc]
                lambda state, bits=bits: setattr(bits, "state", state),  # type: ignore[misc]
            )
        elif type(value) is random.Random:
            yield _saver(value.getstate, value.setstate)
        elif isinstance(value, Mapping):
            if isinstance(value, dict):  # another mapping may read a file for each value
                pending += itertools.islice(value.values(), _MAX_ITEMS)
        elif isinstance(value, (list, tuple)):
            pending += value[:_MAX_ITEMS]
        else:
            pending += list(getattr(value, "__dict__", {}).values())


def _saver(get: Callable[[], Any], put: Callable[[Any], Any]) -> Callable[[], Callable[[], None]]:
    def save() -> Callable[[], None]:
        state = get()
        return lambda: put(state)

    return save
