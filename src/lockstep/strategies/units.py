"""Which modules of a model are gathered whole, one after the other, while its parameters are spread over workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ..errors import ConfigError

__all__ = ["check_units", "normalising", "units"]

# Elements. What a smaller module saves in memory (256 KiB in float32) is not worth messages of its own.
SMALLEST = 1 << 16
# A module with more than this part of the model is looked into for smaller ones.
PART = 4

# Their forward passes call their children's, one by one; other layers of torch may use their children's parameters
# themselves, as nn.MultiheadAttention does.
_CONTAINERS = (
    nn.Sequential,
    nn.ModuleList,
    nn.ModuleDict,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
)


def units(model: nn.Module, smallest: int = SMALLEST) -> list[str]:
    """Names of the modules to be units, inner before outer; what is in none of them belongs to the model itself.

    A unit is the largest module that has at most a quarter of the model's elements, at least `smallest` of them, and
    no parameter that a module outside of it uses too. Of a larger module, what its units leave over is a unit where it
    is large enough itself.

    Args:
        model: its structure alone is looked at.
        smallest: number of elements.
    """
    return list(_Search(model, smallest).inside(model, ""))


class _Search:
    def __init__(self, model: nn.Module, smallest: int) -> None:
        self._smallest = smallest
        self._limit = sum(p.numel() for p in model.parameters()) // PART
        self._owners: dict[int, list[str]] = {}
        for name, p in model.named_parameters(remove_duplicate=False):
            self._owners.setdefault(id(p), []).append(name)
        self._taken: set[int] = set()

    def inside(self, module: nn.Module, name: str) -> Iterator[str]:
        for child_name, child in module.named_children():
            full = f"{name}.{child_name}" if name else child_name
            if self._size(child) > self._limit and _calls_children(child):
                yield from self.inside(child, full)
            if self._size(child) >= self._smallest and _runs(child) and self._alone(child, full):
                self._taken.update(id(p) for p in child.parameters())
                yield full

    def _size(self, module: nn.Module) -> int:
        return sum(p.numel() for p in module.parameters() if id(p) not in self._taken)

    def _alone(self, module: nn.Module, name: str) -> bool:
        mine = f"{name}."
        return all(owner.startswith(mine) for p in module.parameters() for owner in self._owners[id(p)])


def _calls_children(module: nn.Module) -> bool:
    return isinstance(module, _CONTAINERS) or not type(module).__module__.startswith("torch.nn.")


def _runs(module: nn.Module) -> bool:
    """Whether its forward pass is sure to be called: a Sequential may be looped over, a list has none."""
    has_one = type(module).forward is not nn.Module.forward
    return has_one and type(module) is not nn.Sequential


def normalising(model: nn.Module) -> list[nn.Module]:
    """The layers with running statistics, whose parameters have to be of the type of these."""
    return [m for m in model.modules() if isinstance(m, _NormBase) and m.track_running_stats and _own(m)]


def _own(module: nn.Module) -> list[nn.Parameter]:
    return list(module.parameters(recurse=False))


def check_units(model: nn.Module, names: Sequence[str]) -> list[str]:
    """`names` of modules, chosen by the user, in the order in which they can be made units: inner before outer.

    Raises:
        ConfigError: for one that the model has not, or that shares a parameter with a module outside of it.
    """
    search, modules = _Search(model, 0), dict(model.named_modules())
    for name in names:
        if not name or name not in modules:
            raise ConfigError("units", f"names of the model's modules, such as {_example(modules)}", name)
        if not _runs(modules[name]) and not isinstance(modules[name], nn.Sequential):
            raise ConfigError("units", "modules with a forward pass", found=f"{name}, a {type(modules[name]).__name__}")
        if not search._alone(modules[name], name):
            raise ConfigError("units", "modules that share no parameter with others", name)
    return sorted(dict.fromkeys(names), key=lambda name: -name.count("."))


def _example(modules: dict[str, nn.Module]) -> str:
    return ", ".join([name for name in modules if name][:3]) or "none, as it has none"


def check_model(model: nn.Module) -> None:
    """See that a model's parameters can be cut over workers.

    Raises:
        ConfigError: naming the first that cannot.
    """
    sparse = [n for n, m in model.named_modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse]
    if sparse:
        raise ConfigError(
            "model", "embeddings with sparse=False, with strategy='sharded'", found=f"sparse=True of {sparse[0]}"
        )
    dtypes: dict[torch.dtype, str] = {}
    for name, p in model.named_parameters():
        if p.dim() == 0:
            hint = "Give it one dimension, of size 1."
            raise ConfigError("model", "parameters with a dimension to cut along", found=f"{name}, a scalar", hint=hint)
        if p.requires_grad:
            dtypes.setdefault(p.dtype, name)
    if len(dtypes) > 1:
        got = ", ".join(f"{name} of {dtype}" for dtype, name in dtypes.items())
        raise ConfigError("model", "trained parameters of one dtype, with strategy='sharded'", found=got)
