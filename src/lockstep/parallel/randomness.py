"""Keyed random numbers: seeds the global generators from (seed, step, shard), and saves and
restores their states.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .. import arguments, devices
from .shards import mix

_LOW = 0xFFFFFFFF

# Keys include their purpose, so that keys of one seed are unrelated; 1 to 3 are the order of
# samples, dropout by rank, and augmentation.
_SHARD = 4


def seed_torch(key: int, device: torch.device) -> None:
    """Seed torch's generators of the CPU and of `device`; the CPU's generator uses the low 32 bits
    of `key` only.
    """
    # torch.manual_seed() also queries every absent backend: 0.4 to 0.8 ms a step, 70 % of a step's
    # overhead.
    torch.default_generator.manual_seed(key)
    devices.seed(device, key)


_seed_count = 0


def seed_count() -> int:
    """Return how often `seed_shard` has been called in this process."""
    return _seed_count


def seed_shard(seed: int, step: int, shard: int, device: torch.device | str = "cpu") -> None:
    """Seed the global generators of torch, Python and NumPy for the passes of one shard of one
    step.

    Call it before a shard's forward pass: dropout and other random operations of the model then
    give the same numbers on whichever worker computes the shard. It keeps no state, so a run that
    resumes from a checkpoint draws the same numbers. An `OrderedReducer` restores the generators at
    the end of its loop, for other users of the generators such as a shuffling `DataLoader`.

    Args:
        seed: the seed of the run.
        step: the number of the step, from 0.
        shard: the number of the shard, from 0.
        device: the device of the model, whose generator is seeded as well as the CPU's.

    Raises:
        ConfigError: if one of the numbers is none, or `step` or `shard` is below 0.
    """
    global _seed_count
    seed = arguments.whole("seed", seed)
    step = arguments.whole("step", step, least=0)
    shard = arguments.whole("shard", shard, least=0)
    _seed_count += 1
    key = mix((seed, _SHARD, step, shard))
    seed_torch(key & _LOW, torch.device(device))
    random.seed(key)
    # NumPy and torch's CPU generator use the same algorithm, and would draw the same numbers from
    # the same bits.
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(key >> 32)


def generator_states(device: torch.device | str = "cpu") -> tuple[Any, ...]:
    """Return the states of the global generators of torch (CPU and `device`), Python and NumPy."""
    numpy = sys.modules.get("numpy")
    generator = devices.generator_of(torch.device(device))
    numpy_state = None if numpy is None else numpy.random.get_state()
    device_state = None if generator is None else generator.get_state()
    return torch.get_rng_state(), random.getstate(), numpy_state, generator, device_state


def set_generator_states(states: tuple[Any, ...]) -> None:
    """Restore states that `generator_states` has returned."""
    torch_state, python_state, numpy_state, generator, device_state = states
    torch.set_rng_state(torch_state)
    random.setstate(python_state)
    if numpy_state is not None:
        sys.modules["numpy"].random.set_state(numpy_state)
    if generator is not None:
        generator.set_state(device_state)


@contextmanager
def preserve_generators(device: torch.device | str = "cpu") -> Iterator[None]:
    """Restore the global generators of torch (CPU and `device`), Python and NumPy after a `with`
    block.
    """
    states = generator_states(device)
    try:
        yield
    finally:
        set_generator_states(states)
