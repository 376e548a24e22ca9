"""Random draws made to depend on numbers that name them, and not on what was drawn before."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .shards import mix

__all__ = ["draw_on", "drawn_so_far", "generators_kept", "seed_shard", "seed_torch", "times_seeded"]

_LOW = 0xFFFFFFFF

# What a key is for goes into it, so that the draws of one seed are unrelated; 1 to 3 are those of the order of samples,
# of dropout by rank and of augmentation.
_SHARD = 4


def seed_torch(key: int, device: torch.device) -> None:
    """Seed torch's generators of the CPU and of `device`; of `key`, the CPU's looks at the low 32 bits alone."""
    # torch.manual_seed() also asks every backend that is not there: 0.4 to 0.8 ms a step, 70 % of what a step costs
    # beside its computation.
    torch.default_generator.manual_seed(key)
    if device.type == "cuda" and device.index is not None:  # torch.cuda.manual_seed() is for the current one
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.cuda.default_generators[device.index].manual_seed(key)
    elif device.type == "cuda":
        torch.cuda.manual_seed(key)
    elif device.type == "mps":
        torch.mps.manual_seed(key)


_seeded = 0


def times_seeded() -> int:
    """How often `seed_shard` has been called in this process."""
    return _seeded


def seed_shard(seed: int, step: int, shard: int, device: torch.device | str = "cpu") -> None:
    """Seed the global generators of torch, Python and NumPy for the passes of one shard of one step.

    Called before a shard's forward pass, it makes dropout and other random operations of the model the same wherever
    the shard is computed. It holds no state: a run that goes on from a checkpoint draws what it would have drawn. At
    the end of a loop over an `OrderedReducer` the generators are as they were at its beginning, for whoever else draws
    from them, such as a `DataLoader` that shuffles.

    Args:
        seed: of the run.
        step: the number of the step, from 0.
        shard: the number of the shard, from 0.
        device: where the model is; its generator is seeded beside the CPU's.
    """
    global _seeded
    _seeded += 1
    key = mix((seed, _SHARD, step, shard))
    seed_torch(key & _LOW, torch.device(device))
    random.seed(key)
    # NumPy's and torch's generator of the CPU are the same one: from the same bits they would draw the same numbers.
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(key >> 32)


def drawn_so_far(device: torch.device | str = "cpu") -> tuple[Any, ...]:
    """The states of the global generators of torch (CPU, and that of `device`), Python and NumPy."""
    numpy, own = sys.modules.get("numpy"), _generator_of(torch.device(device))
    drawn = None if numpy is None else numpy.random.get_state()
    return torch.get_rng_state(), random.getstate(), drawn, own, None if own is None else own.get_state()


def draw_on(states: tuple[Any, ...]) -> None:
    """Let the generators go on from what `drawn_so_far` has returned."""
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    if states[2] is not None:
        sys.modules["numpy"].random.set_state(states[2])
    if states[3] is not None:
        states[3].set_state(states[4])


@contextmanager
def generators_kept(device: torch.device | str = "cpu") -> Iterator[None]:
    """Leave the global generators, also that of `device`, as they are now, whatever is drawn inside."""
    states = drawn_so_far(device)
    try:
        yield
    finally:
        draw_on(states)


def _generator_of(device: torch.device) -> torch.Generator | None:
    """The global generator of an accelerator."""
    if device.type in ("cpu", "meta"):
        return None
    if device.type == "mps":
        return torch.mps._get_default_mps_generator()
    module = torch.get_device_module(device)
    generators = getattr(module, "default_generators", ())
    index = module.current_device() if device.index is None else device.index
    return generators[index] if index < len(generators) else None
