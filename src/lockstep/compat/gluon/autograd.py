"""`autograd`: the contexts that control whether gradients are recorded and layers are in training
mode.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch.nn.parameter import is_lazy

from lockstep import arguments

__all__ = [
    "backward",
    "is_recording",
    "is_training",
    "pause",
    "predict_mode",
    "record",
    "set_grad_req",
    "train_mode",
]


class _State(threading.local):
    recording = training = False


_STATE = _State()


@contextmanager
def _set(recording: bool, training: bool) -> Iterator[None]:
    previous = _STATE.recording, _STATE.training
    _STATE.recording = recording
    _STATE.training = training
    try:
        with torch.set_grad_enabled(recording):
            yield
    finally:
        _STATE.recording, _STATE.training = previous


def record(train_mode: bool = True) -> AbstractContextManager[None]:
    """Return a context that records gradients; layers are in training mode, unless `train_mode` is
    False.
    """
    return _set(True, train_mode)


def pause(train_mode: bool = False) -> AbstractContextManager[None]:
    """Return a context, for use within `record`, that does not record gradients."""
    return _set(False, train_mode)


def train_mode() -> AbstractContextManager[None]:
    """Return a context in which layers are in training mode, whether or not gradients are
    recorded.
    """
    return _set(_STATE.recording, True)


def predict_mode() -> AbstractContextManager[None]:
    """Return a context in which layers are in evaluation mode, whether or not gradients are
    recorded.
    """
    return _set(_STATE.recording, False)


def is_recording() -> bool:
    """Return whether gradients are recorded."""
    return _STATE.recording


def is_training() -> bool:
    """Return whether layers are in training mode."""
    return _STATE.training


def backward(heads: torch.Tensor | Iterable[torch.Tensor]) -> None:
    """Compute the gradients of the sum of all elements of `heads`, in one pass: they replace
    earlier ones once.
    """
    of_all = [heads] if isinstance(heads, torch.Tensor) else list(heads)
    torch.autograd.backward(of_all, [torch.ones_like(head) for head in of_all])


def set_grad_req(leaf: torch.Tensor, grad_req: str = "write") -> None:
    """Set what a backward pass does with the gradient of `leaf`, as `grad_req` of MXNet.

    Args:
        leaf: a leaf tensor.
        grad_req: 'write' replaces the gradient, 'add' accumulates it, 'null' computes none.

    Raises:
        ConfigError: for another `grad_req`.
    """
    arguments.choice("grad_req", grad_req, ("write", "add", "null"))
    leaf.requires_grad = grad_req != "null"
    leaf._lockstep_grad_req = grad_req  # type: ignore[attr-defined]
    if grad_req == "null" or hasattr(leaf, "_lockstep_hook") or is_lazy(leaf):
        return
    # the tensor holds the hook: a strong reference would keep both alive
    reference = weakref.ref(leaf)

    def clear_gradient(
        _: torch.Tensor,
    ) -> None:  # called once, with the sum of the new gradients, before torch adds it
        tensor = reference()
        if tensor is not None and tensor.grad is not None and tensor._lockstep_grad_req == "write":  # type: ignore[attr-defined]
            tensor.grad.zero_()

    leaf._lockstep_hook = leaf.register_hook(clear_gradient)  # type: ignore[attr-defined, no-untyped-call]
