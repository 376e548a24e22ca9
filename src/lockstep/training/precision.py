"""The number format of forward and backward passes, and the scaling of gradients that fp16 needs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..errors import ConfigError, unknown_name
from .formats import PRECISIONS

__all__ = ["Precision", "clip"]

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """Mixed precision: what autocast computes in, and how gradients are kept in range.

    Parameters, their gradients and the optimizer's state stay in float32. With fp16 the loss is scaled up before the
    backward pass and gradients down after it, and a step whose gradients overflow is skipped (Micikevicius et al.,
    "Mixed precision training", ICLR 2018).

    Args:
        name: "fp32", "bf16" or "fp16".
        device: where the model is.

    Raises:
        ConfigError: for another name, or a format that the device cannot compute in.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        if name not in PRECISIONS:
            raise unknown_name("precision", name, PRECISIONS)
        if name == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
            raise ConfigError("precision", "fp32 or fp16 on this GPU, which has no bf16", name)
        self.name, self._device, self._dtype = name, device, _AUTOCAST.get(name)
        self._scaler = torch.amp.GradScaler(device.type) if name == "fp16" else None

    def autocast(self) -> AbstractContextManager[object]:
        """Around a forward pass."""
        if self._dtype is None:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self._dtype)

    def backward(self, loss: torch.Tensor) -> None:
        """Gradients of `loss` (a scalar), scaled where the format needs it."""
        scaled = loss if self._scaler is None else self._scaler.scale(loss)
        torch.autograd.backward(scaled)

    def unscale(self, optimizer: Optimizer) -> None:
        """Bring the gradients back to their own size, before they are looked at or changed."""
        if self._scaler is not None:
            self._scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> None:
        """One update, or none when fp16 gradients overflowed; every worker decides alike, from the same sums."""
        if self._scaler is None:
            optimizer.step()
        else:
            self._scaler.step(optimizer)
            self._scaler.update()

    def state_dict(self) -> dict[str, Any]:
        """The scale and its history; empty where there is none."""
        return {} if self._scaler is None else self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with a saved scale, if this precision has one."""
        if self._scaler is not None and state:
            self._scaler.load_state_dict(state)


def clip(parameters: list[nn.Parameter], max_norm: float) -> torch.Tensor:
    """Scale all gradients down together so that their joint 2-norm is at most `max_norm`; returns the norm before.

    Source: Pascanu, Mikolov, Bengio, "On the difficulty of training recurrent neural networks", ICML 2013.
    """
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm)
