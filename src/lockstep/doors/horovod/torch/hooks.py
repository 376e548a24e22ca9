"""What optimizers for several ranks do around a backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .gradients import named

__all__ = ["check_idle", "keeping", "put", "take_in"]

Parameter = torch.Tensor


def put(p: Parameter, reduced: torch.Tensor) -> None:
    """Make `reduced` the gradient of `p`, in its place and of its layout."""
    assert p.grad is not None
    if p.grad.is_sparse:
        p.grad = reduced.to_sparse(p.grad.sparse_dim())
    elif p.grad.data_ptr() != reduced.data_ptr():
        p.grad.detach().copy_(reduced)


def check_idle(under_way: Any) -> None:
    """Raise an AssertionError where gradients are on their way."""
    if under_way:
        raise AssertionError(
            "zero_grad() was called after backward() and before step() or synchronize(), while gradients are being "
            "reduced. Call it before backward()."
        )


@contextmanager
def keeping(optimizer: Any) -> Iterator[None]:
    """Put a state and options that are loaded within it into the place of those before, which others hold too."""
    state, groups = optimizer.state, optimizer.param_groups
    yield
    for group, loaded in zip(groups, optimizer.param_groups, strict=True):
        group.clear()
        group.update(loaded)
    loaded_state = dict(optimizer.state)
    state.clear()
    state.update(loaded_state)
    optimizer.state, optimizer.param_groups = state, groups


def take_in(optimizer: Any) -> None:
    """Let `optimizer` train what has been thawed or added since the last time; all ranks do so at the same step.

    The keys are those that `optimizer` has of its parameters: its `_trained` ones, and the `_parameter_names` of all.
    """
    known = set(optimizer._trained)
    late = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad and p not in known]
    if late:
        optimizer._parameter_names = {**named(optimizer, None), **optimizer._parameter_names}
        optimizer._trained += late
        _listen(optimizer, late)


def _listen(optimizer: Any, parameters: Sequence[Parameter]) -> None:
    """Have `optimizer.arrived` called with each gradient, as long as somebody else holds `optimizer`."""
    weak = weakref.ref(optimizer)

    def hook(p: Parameter) -> None:
        there = weak()
        if there is not None:
            there.arrived(p)

    for p in parameters:
        p.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
