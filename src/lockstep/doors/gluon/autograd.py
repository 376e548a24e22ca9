"""When gradients are recorded, and whether layers are in training."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch.nn.parameter import is_lazy

from lockstep.errors import ConfigError

__all__ = ["backward", "is_recording", "is_training", "pause", "predict_mode", "record", "train_mode", "want_gradient"]


class _State(threading.local):
    recording = training = False


_STATE = _State()


@contextmanager
def _set(recording: bool, training: bool) -> Iterator[None]:
    before = _STATE.recording, _STATE.training
    _STATE.recording, _STATE.training = recording, training
    try:
        with torch.set_grad_enabled(recording):
            yield
    finally:
        _STATE.recording, _STATE.training = before


def record(train_mode: bool = True) -> AbstractContextManager[None]:
    """Around the computation that `backward` shall go through; layers are in training, unless `train_mode` is False."""
    return _set(True, train_mode)


def pause(train_mode: bool = False) -> AbstractContextManager[None]:
    """Around what shall not be recorded, within `record`."""
    return _set(False, train_mode)


def train_mode() -> AbstractContextManager[None]:
    """Layers are in training, whether or not gradients are recorded."""
    return _set(_STATE.recording, True)


def predict_mode() -> AbstractContextManager[None]:
    """Layers are not in training."""
    return _set(_STATE.recording, False)


def is_recording() -> bool:
    """Whether gradients are recorded."""
    return _STATE.recording


def is_training() -> bool:
    """Whether layers are in training."""
    return _STATE.training


def backward(heads: torch.Tensor | Iterable[torch.Tensor]) -> None:
    """Gradients of each of `heads`, counting each of its elements once."""
    for head in [heads] if isinstance(heads, torch.Tensor) else heads:
        head.backward(torch.ones_like(head))


def want_gradient(leaf: torch.Tensor, how: str = "write") -> None:
    """Say what a backward pass does to the gradient of `leaf`: replace it, as in MXNet, add to it, or nothing.

    Args:
        leaf: a tensor that was not computed from others.
        how: 'write', 'add' or 'null'.

    Raises:
        ConfigError: for anything else.
    """
    if how not in ("write", "add", "null"):
        raise ConfigError("grad_req", "write, add or null", how)
    leaf.requires_grad = how != "null"
    leaf._lockstep_grad_req = how  # type: ignore[attr-defined]
    if how == "null" or hasattr(leaf, "_lockstep_hook") or is_lazy(leaf):
        return
    reference = weakref.ref(leaf)  # a hook that held the tensor that holds it would keep both

    def forget(_: torch.Tensor) -> None:  # called with the whole new gradient, before torch adds it
        own = reference()
        if own is not None and own.grad is not None and own._lockstep_grad_req == "write":  # type: ignore[attr-defined]
            own.grad.zero_()

    leaf._lockstep_hook = leaf.register_hook(forget)  # type: ignore[attr-defined, no-untyped-call]
