"""Small functions that scripts import from `horovod.common.util`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from lockstep import environment
from lockstep.errors import ConfigError

from . import basics

__all__ = [
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "env",
    "extension_available",
    "gloo_built",
    "gpu_available",
    "is_iterable",
    "is_version_greater_equal_than",
    "mpi_built",
    "nccl_built",
    "num_rank_is_power_2",
    "rocm_built",
    "split_list",
]

T = TypeVar("T")

_cache = functools.cache  # by Horovod's name for it


@contextmanager
def env(**variables: str | None) -> Iterator[None]:
    """Set environment variables while it lasts; those that are None stay as they are."""
    with environment.with_variables({name: value for name, value in variables.items() if value is not None}):
        yield


def is_iterable(x: Any) -> bool:
    """Whether one can go through `x`."""
    try:
        iter(x)
    except TypeError:
        return False
    return True


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Whether the version `ver` is `target` or a later one.

    Raises:
        ConfigError: a ValueError, where these are no texts, or `target` is not of the form 1.2.3.
    """
    from torch.torch_version import TorchVersion

    if not isinstance(ver, str):
        raise ConfigError("ver", 'a version, such as "2.5.1"', ver)
    if not isinstance(target, str) or target.count(".") != 2:
        raise ConfigError("target", 'a version of the form "1.2.3"', target)
    return bool(TorchVersion(ver) >= target)


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether `num_rank` is 1, 2, 4, 8 and so on."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(values: Sequence[T], num_parts: int) -> list[list[T]]:
    """`values` in order, in `num_parts` lists of which the first ones are longer by one; none of them is empty."""
    each, rest = divmod(len(values), num_parts)
    ends = [part * each + min(part, rest) for part in range(num_parts + 1)]
    parts = [list(values[start:end]) for start, end in itertools.pairwise(ends)]
    return [part for part in parts if part]


def gpu_available(ext_base_name: str = "torch", verbose: bool = False) -> bool:
    """Whether torch has a GPU here."""
    import torch

    return torch.cuda.is_available()


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether there is an interface for the framework `ext_base_name`: "torch", and no other."""
    return ext_base_name == "torch"


def _also_verbose(ask: Callable[[], T]) -> Callable[[bool], T]:
    """`ask` as it is called here; it has nothing more to say."""

    @functools.wraps(ask)
    def answer(verbose: bool = False) -> T:
        return ask()

    return answer


mpi_built = _also_verbose(basics.mpi_built)
gloo_built = _also_verbose(basics.gloo_built)
nccl_built = _also_verbose(basics.nccl_built)
ddl_built = _also_verbose(basics.ddl_built)
ccl_built = _also_verbose(basics.ccl_built)
cuda_built = _also_verbose(basics.cuda_built)
rocm_built = _also_verbose(basics.rocm_built)
