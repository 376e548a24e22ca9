"""Whether an optimizer updates each tensor from its own gradient and state alone, tried on small
tensors.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from ...errors import ConfigError
from ...parallel.optimizer_shards import DIVISION
from .torch_calls import without_hooks_of_all_optimizers

_SIDE = 3  # elements in each dimension of a small tensor
_MOST = 8  # small tensors of each group
# Methods that are attributes of an object if a learning-rate scheduler counts its steps, or after
# `lockstep.prepare`, and what it is divided by: they are those of the original.
_REPLACED = ("step", "zero_grad", "shards", "full_state_dict", DIVISION)
_SCALES = (1e-4, 1.0, 1e4)  # of the gradients: a limit of their norm shows only where it is large
_VOUCH = "Set optimizer.same_bits = True if it does all the same."
_CLIP = "Trainer(max_grad_norm=...) limits the norm of the whole gradient, with equal bits."


def check_separable(
    optimizer: Optimizer, owns: Callable[[torch.Tensor], bool] = lambda _: True
) -> None:
    """Check that the owner of some tensors gives them the bits that they would get among all
    others.

    A copy of the optimizer, with small tensors, makes three updates with all gradients, and, for
    each half of the tensors, with the gradients of that half alone. Values, state and
    hyperparameters must have equal bits. It takes some milliseconds, and changes nothing. An
    optimizer with an attribute ``same_bits = True`` is not tried.

    Args:
        optimizer: the optimizer.
        owns: whether this worker has the state of a parameter, if it has any.

    Raises:
        ConfigError: if they differ, or the optimizer cannot be tried.
    """
    if getattr(optimizer, "same_bits", False):
        return
    kind = type(optimizer).__name__
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise _refused(
            f"{kind} with a step hook, which would see the gradients of some tensors only", _VOUCH
        )
    try:
        reference = _updated(optimizer, owns, None)
        halves = [_updated(optimizer, owns, half) for half in (0, 1)]
    except Exception as error:  # whatever an optimizer of others raises
        description = f"{kind}, which fails on small tensors: {type(error).__name__}: {error}"
        raise _refused(description, _VOUCH) from error
    hint = f"{_CLIP} {_VOUCH}"
    for half, tried in enumerate(halves):
        for number, (whole, part) in enumerate(zip(reference, tried, strict=True)):
            has_gradient = number % 2 == half
            if not has_gradient and part.has_moved:
                raise _refused(f"{kind}, which changes tensors that have no gradient", hint)
            if not _are_same(whole.hyperparameters, part.hyperparameters):
                description = f"{kind}, whose hyperparameters depend on all gradients of a group"
                raise _refused(description, hint)
            if has_gradient and not _are_same(
                [whole.values, whole.state], [part.values, part.state]
            ):
                description = (
                    f"{kind}, whose update of one tensor depends on the gradients of others"
                )
                raise _refused(description, hint)


def _refused(description: str, hint: str) -> ConfigError:
    expected = "an optimizer that updates each tensor from its own gradient and state alone"
    return ConfigError("shard_optimizer", expected, found=description, hint=hint)


class _Tried(NamedTuple):
    """One small tensor after the updates, its state, and the hyperparameters of its group."""

    has_moved: bool
    values: torch.Tensor
    state: dict[str, Any]
    hyperparameters: dict[str, Any]


def _updated(
    optimizer: Optimizer, owns: Callable[[torch.Tensor], bool], half: int | None
) -> list[_Tried]:
    """Make the updates of small tensors, with gradients of every second one only if `half` says of
    which.
    """
    small = _small_copy(optimizer, owns)
    members = [(p, group) for group in small.param_groups for p in group["params"]]
    before = [p.detach().clone() for p, _ in members]
    with torch.random.fork_rng(devices=[]), without_hooks_of_all_optimizers():
        for step, scale in enumerate(_SCALES):
            for number, (p, _) in enumerate(members):
                generator = torch.Generator(p.device).manual_seed(1000 * step + number)
                gradient = torch.randn(p.shape, generator=generator, device=p.device) * scale
                has_gradient = half is None or number % 2 == half
                p.grad = gradient.to(p.dtype) if has_gradient else None
            torch.manual_seed(step)
            small.step()
    tried = []
    for (p, group), old in zip(members, before, strict=True):
        hyperparameters = {name: value for name, value in group.items() if name != "params"}
        values = p.detach()
        has_moved = not torch.equal(values, old)
        tried.append(_Tried(has_moved, values, small.state.get(p, {}), hyperparameters))
    return tried


def _small_copy(optimizer: Optimizer, owns: Callable[[torch.Tensor], bool]) -> Optimizer:
    """Return a copy whose tensors, wherever it keeps them, are corners of those of `optimizer`.

    ``copy.deepcopy(optimizer)`` would lose attributes, and hold all tensors twice.
    """
    small = type(optimizer).__new__(type(optimizer))
    state: defaultdict[Any, Any] = defaultdict(dict)
    memo: dict[int, Any] = {id(optimizer): small, id(optimizer.state): state}
    groups = []
    for group in optimizer.param_groups:
        chosen: list[torch.Tensor] = []
        for p in sorted(group["params"], key=lambda p: p.dim()):
            of_dimensions = sum(q.dim() == p.dim() for q in chosen)
            if owns(p) and of_dimensions < 2 and len(chosen) < _MOST:
                corner = _corner(p, p.shape).requires_grad_(p.requires_grad)
                entries = optimizer.state.get(p, {})
                if entries:
                    state[corner] = {
                        name: _corner(value, p.shape) for name, value in entries.items()
                    }
                chosen.append(corner)
            memo[id(p)] = chosen[-1] if chosen else torch.zeros(())
        groups.append((group, chosen))
    memo[id(optimizer.param_groups)] = [
        {
            **{name: copy.deepcopy(group[name], memo) for name in group if name != "params"},
            "params": chosen,
        }
        for group, chosen in groups
    ]
    attributes = {name: value for name, value in vars(optimizer).items() if name not in _REPLACED}
    small.__dict__.update(copy.deepcopy(attributes, memo))
    return small


def _corner(value: Any, shape: torch.Size) -> Any:
    """Return a corner of a parameter of this shape, or of a tensor of its state; other values are
    copied.

    State may be one number for each row, such as Adafactor's, or a square of a side of the
    parameter: a dimension is cut if it is as long as one of the parameter's.
    """
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    corner = tuple(slice(0, _SIDE) if size in shape else slice(None) for size in value.shape)
    return value.detach()[corner].clone()


def _are_same(one: Any, other: Any) -> bool:
    """Return whether two trees are equal, tensors bit by bit."""
    if isinstance(one, torch.Tensor):
        if not isinstance(other, torch.Tensor) or one.dtype != other.dtype:
            return False
        # the bits: two NaN are no difference, and 0.0 and -0.0 are one
        return one.shape == other.shape and torch.equal(_bits(one), _bits(other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(
            _are_same(value, other[name]) for name, value in one.items()
        )
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_are_same, one, other))
    return bool(one == other)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor."""
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)
