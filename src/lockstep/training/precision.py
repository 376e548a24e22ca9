"""Mixed precision: autocast and gradient scaling; also scaling and clipping of gradients."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .. import other_names
from ..errors import ConfigError, unknown_name
from .formats import PRECISIONS

__all__ = ["Precision", "clip", "full_precision", "scale_gradients"]

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """Mixed precision: the dtype of autocast, and the gradient scaler of fp16.

    Parameters, their gradients and the optimizer's state stay in float32. With fp16 the loss is scaled up before the
    backward pass and gradients are scaled down after it, and a step whose gradients overflow is skipped (Micikevicius
    et al., "Mixed precision training", ICLR 2018).

    Args:
        name: "fp32", "bf16" or "fp16".
        device: the device of the model.

    Raises:
        ConfigError: for another name, or a format that the device does not support.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        if name not in PRECISIONS:
            raise unknown_name("precision", name, PRECISIONS, elsewhere=other_names.PRECISIONS)
        if name == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
            raise ConfigError("precision", "fp32 or fp16 on this GPU, which has no bf16", name)
        self.name, self._device, self._dtype = name, device, _AUTOCAST.get(name)
        self._scaler = torch.amp.GradScaler(device.type) if name == "fp16" else None

    def autocast(self) -> AbstractContextManager[object]:
        """Return the autocast context manager of a forward pass."""
        if self._dtype is None:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self._dtype)

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward pass of `loss`, a scalar; gradients are scaled with fp16."""
        torch.autograd.backward(self.scaled(loss))

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return `loss`, a scalar, as its gradient is taken: scaled up with fp16."""
        return loss if self._scaler is None else self._scaler.scale(loss)

    def unscale(self, optimizer: Optimizer) -> None:
        """Unscale the gradients, before they are read or changed."""
        if self._scaler is not None:
            self._scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> None:
        """Update the parameters, or skip the step if fp16 gradients overflowed; the same on all workers."""
        if self._scaler is None:
            optimizer.step()
        else:
            self._scaler.step(optimizer)
            self._scaler.update()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the gradient scaler; empty without one."""
        return {} if self._scaler is None else self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of the gradient scaler, if this precision has one."""
        if self._scaler is not None and state:
            self._scaler.load_state_dict(state)


def full_precision(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of a half-precision format as float32; others are returned unchanged."""
    return tensor.float() if tensor.dtype in _AUTOCAST.values() else tensor


def clip(parameters: list[nn.Parameter], max_norm: float) -> torch.Tensor:
    """Scale all gradients down together so that their joint 2-norm is at most `max_norm`; returns the norm before.

    Source: Pascanu, Mikolov, Bengio, "On the difficulty of training recurrent neural networks", ICML 2013.
    """
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    whole: torch.Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # of sharded parameters
    return whole


def scale_gradients(gradients: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply `gradients` in place by `factor`, a 0-dim tensor; does not wait for an accelerator."""
    if not gradients:
        return
    if factor.device.type == "cpu":
        torch._foreach_mul_(gradients, float(factor))
        return
    for dtype in {gradient.dtype for gradient in gradients}:
        # foreach kernels need a factor of the gradients' dtype; half-precision formats are too coarse for it.
        converted = factor.to(torch.promote_types(dtype, torch.float32))
        torch._foreach_mul_([gradient for gradient in gradients if gradient.dtype == dtype], converted)
