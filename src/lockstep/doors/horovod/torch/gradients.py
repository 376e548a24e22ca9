"""Which gradients a `DistributedOptimizer` reduces, under which names and in which groups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from lockstep.errors import ConfigError

from ..common.util import split_list

__all__ = ["grouped", "named"]

Parameter = torch.Tensor


def named(optimizer: torch.optim.Optimizer, named_parameters: Iterable[Any] | None) -> dict[Parameter, str]:
    """The name of each parameter of `optimizer`, from pairs (name, parameter), or by its place when None.

    Raises:
        ConfigError: when names or parameters are missing, or come twice.
    """
    places = [
        (f"allreduce.noname.{group}.{number}", p)
        for group, options in enumerate(optimizer.param_groups)
        for number, p in enumerate(options["params"])
    ]
    pairs: list[Any] = places if named_parameters is None else list(named_parameters)
    if any(not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str) for pair in pairs):
        expected = "(name, parameter) pairs, as model.named_parameters() gives them"
        raise ConfigError("named_parameters", expected, found="something else")
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError("named_parameters", "a different name for each parameter", found=f"{', '.join(twice)} twice")
    found = {p: name for name, p in pairs}
    nameless = [place for place, p in places if p not in found]
    if nameless:
        got = f"none for {len(nameless)} of {len(places)}"
        raise ConfigError("named_parameters", "a name for each parameter of the optimizer", found=got)
    return found


def grouped(
    parameters: Sequence[Parameter], groups: int | Sequence[Sequence[Parameter]] | None
) -> dict[Parameter, tuple[Parameter, ...]]:
    """The group of each parameter that is reduced together with others.

    Args:
        parameters: that are trained.
        groups: a number of groups of neighbours; or the groups, of which those who are in none are each one; None for
            no groups.

    Raises:
        ConfigError: for something else, or a parameter in two groups.
    """
    if groups is None or (isinstance(groups, int) and groups == 0):
        return {}
    if isinstance(groups, int) and groups > 0:
        lists = split_list(parameters, groups)
    elif isinstance(groups, (list, tuple)) and all(map(_is_tensors, groups)):
        lists = [[p for p in group if any(p is q for q in parameters)] for group in groups]
    else:
        raise ConfigError("groups", "a number of at least 0, or a list of lists of parameters", groups)
    found: dict[Parameter, tuple[Parameter, ...]] = {}
    for members in map(tuple, lists):
        for p in members:
            if p in found:
                raise ConfigError(
                    "groups", "each parameter in one group", found=f"one of shape {tuple(p.shape)} in two"
                )
            found[p] = members
    return found


def _is_tensors(group: Any) -> bool:
    return isinstance(group, (list, tuple)) and all(isinstance(p, torch.Tensor) for p in group)
