"""The functions of `horovod.common.util` that programs import."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from lockstep import arguments, environment
from lockstep.errors import ConfigError
from lockstep.parallel.shards import bounds

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

_cache = functools.cache  # Horovod's name


@contextmanager
def env(**variables: str | None) -> Iterator[None]:
    """Set environment variables within a context; the variables that are None stay unchanged."""
    with environment.with_variables(
        {name: value for name, value in variables.items() if value is not None}
    ):
        yield


def is_iterable(x: Any) -> bool:
    """Return whether `x` is iterable."""
    try:
        iter(x)
    except TypeError:
        return False
    return True


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Return whether the version `ver` is `target` or later.

    Raises:
        ConfigError: a ValueError, if one is not a string, or `target` is not of the form 1.2.3.
    """
    from torch.torch_version import TorchVersion

    arguments.text("ver", ver, 'a version, such as "2.5.1"')
    if not isinstance(target, str) or target.count(".") != 2:
        raise ConfigError("target", 'a version of the form "1.2.3"', target)
    return bool(TorchVersion(ver) >= target)


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether `num_rank` is a power of two."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(values: Sequence[T], num_parts: int) -> list[list[T]]:
    """Split `values` into at most `num_parts` non-empty lists, in order; the first lists get the
    remaining values.
    """
    cuts = [bounds(len(values), num_parts, part) for part in range(num_parts)]
    return [list(values[start:stop]) for start, stop in cuts if stop > start]


def gpu_available(ext_base_name: str = "torch", verbose: bool = False) -> bool:
    """Return whether torch has a GPU on this host."""
    import torch

    return torch.cuda.is_available()


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether the framework `ext_base_name` is supported: only "torch" is."""
    return ext_base_name == "torch"


def _ignore_verbose(function: Callable[[], T]) -> Callable[[bool], T]:
    """Return `function` with the argument `verbose`, which has no effect."""

    @functools.wraps(function)
    def wrapper(verbose: bool = False) -> T:
        return function()

    return wrapper


mpi_built = _ignore_verbose(basics.mpi_built)
gloo_built = _ignore_verbose(basics.gloo_built)
nccl_built = _ignore_verbose(basics.nccl_built)
ddl_built = _ignore_verbose(basics.ddl_built)
ccl_built = _ignore_verbose(basics.ccl_built)
cuda_built = _ignore_verbose(basics.cuda_built)
rocm_built = _ignore_verbose(basics.rocm_built)
