"""Says which layers of a sequence form which stage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import pairwise

from torch import nn

from ..errors import ConfigError

__all__ = ["balanced", "begins", "refuse_shared", "sequence"]


def balanced(weights: Sequence[int], parts: int) -> list[int]:
    """Where each of `parts` contiguous parts begins, none empty, so that the heaviest of them is as light as it can be.

    Among equals the earlier parts have fewer layers.

    Args:
        weights: of the layers, in order; at least as many as parts.
    """
    sums = [0]
    for weight in weights:
        sums.append(sums[-1] + weight)

    @cache
    def best(start: int, left: int) -> tuple[int, tuple[int, ...]]:
        if left == 1:
            return sums[-1] - sums[start], (start,)
        found = []
        for stop in range(start + 1, len(weights) - left + 2):
            heaviest, rest = best(stop, left - 1)
            found.append((max(heaviest, sums[stop] - sums[start]), (start, *rest)))
        return min(found, key=lambda one: one[0])

    return list(best(0, parts)[1])


def begins(layers: Mapping[str, nn.Module | None], stages: int, split: Sequence[str] | None) -> list[int]:
    """At which layer each stage begins: where `split` says, or so that their numbers of parameters are alike.

    Raises:
        ConfigError: for more stages than layers, or a `split` that does not fit.
    """
    names = list(layers)
    if stages > len(names):
        raise ConfigError("stages", f"at most one for each of the model's {len(names)} layers", stages)
    if split is None:
        return balanced([_elements(layer) for layer in layers.values()], stages)
    if unknown := [name for name in split if name not in names]:
        raise ConfigError("split", f"names of the model's layers ({', '.join(names)})", unknown[0])
    starts = [0, *(names.index(name) for name in split)]
    if any(start >= following for start, following in pairwise(starts)):
        raise ConfigError("split", "layers in the order of the model, none twice, and not its first", list(split))
    return starts


def _elements(layer: nn.Module | None) -> int:
    return 0 if layer is None else sum(p.numel() for p in layer.parameters())


def sequence(model: nn.Sequential, starts: Sequence[int]) -> list[nn.Sequential]:
    """The stages of `model`, whose layers keep their names."""
    items = list(model._modules.items())
    stages = []
    for start, stop in zip(starts, [*starts[1:], len(items)], strict=True):
        stage = nn.Sequential()
        stage._modules.update(items[start:stop])
        stage.training = model.training
        stages.append(stage)
    return stages


def refuse_shared(stages: Iterable[nn.Module]) -> None:
    """See that no two stages use the same parameter or buffer.

    Raises:
        ConfigError: naming the first that they do.
    """
    owner: dict[int, tuple[int, str]] = {}
    for number, stage in enumerate(stages):
        for name, tensor in [*stage.named_parameters(), *stage.named_buffers()]:
            first, its_name = owner.setdefault(id(tensor), (number, name))
            if first != number:
                got = f"{its_name} of stage {first}, which stage {number} has as {name}"
                raise ConfigError("model", "stages without a parameter or buffer in common", found=got)
