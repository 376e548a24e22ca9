"""Mixed precision: autocast and gradient scaling; also scaling and clipping of gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ... import arguments, devices, other_names
from ...communicator import Communicator
from ...errors import ConfigError
from ...flight_recorder import named
from ..formats import PRECISIONS
from .torch_calls import FirstGradients, LeavesOf, run_backward, take_step

__all__ = ["Number", "Precision", "clip", "full_precision", "scale_gradients"]

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}

# How much smaller gradients are in passes: a part of a batch whose gradient is so many times that
# of the whole batch does not overflow alone. More would lose small gradients, below 2 ** -24 / 8.
_HEADROOM = 8.0
# float32 ends at 2 ** 128 and float16 at 2 ** 16: times this power of two, what float16 cannot hold
# is infinite.
_BEYOND_FLOAT16 = 2.0**112 * _HEADROOM
# for each sample; the exact count is what gradients are divided by in the end
_LEAST_COUNT = 2.0**-20


Number = torch.Tensor | float
"""A number of the host, or a 0-dim tensor on the device, which nothing waits for."""


class Precision:
    """Mixed precision: the dtype of autocast, and the gradient scaler of fp16.

    Parameters, their gradients and the optimizer's state stay in float32. With fp16 the loss is
    scaled up before the backward pass and gradients are scaled down after it, and a step whose
    gradients overflow is skipped (Micikevicius et al., "Mixed precision training", ICLR 2018).

    The same steps are skipped however a global batch is divided. In every pass the loss is divided
    by the same number, known before it: the samples of the global batch times the count per sample.
    What is left of the division by the exact count, and by the number of workers, is applied to the
    sums, in float32. A part's gradient may be larger than that of the whole batch, and then
    overflow alone; so passes run with smaller gradients than a single pass would, and a sum over
    all parts counts as an overflow if float16 could not have held it in a single pass.

    Args:
        name: "fp32", "bf16" or "fp16".
        device: the device of the model.

    Attributes:
        is_new: whether the count per sample is still to be agreed upon, before the first step; with
            fp16 only.
        cast: the parameters that autocast converts, by number in the model: their gradients are
            computed in float16.

    Raises:
        ConfigError: for another name, or a format that the device does not support.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        arguments.choice("precision", name, PRECISIONS, elsewhere=other_names.PRECISIONS)
        if name == "bf16" and not devices.supports_bf16(device):
            raise ConfigError("precision", "fp32 or fp16 on this device, which has no bf16", name)
        self.name = name
        self._device = device
        self._dtype = _AUTOCAST.get(name)
        self._scaler = torch.amp.GradScaler(device.type) if name == "fp16" else None
        self.is_new = self._scaler is not None
        self.cast = frozenset[int]()
        self._first_gradients = FirstGradients()
        # On the device, where passes read it and nothing waits for it; always the same tensor, as
        # graphs of passes refer to it. A power of two: the division changes no digit.
        self._count_per_sample = torch.ones((), device=device)

    def autocast(self) -> AbstractContextManager[object]:
        """Return the autocast context manager of a forward pass."""
        if self._dtype is None:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self._dtype)

    def run_forward(self, computation: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a forward pass returns, computed in the format."""
        if self._dtype is None:
            return computation(*arguments)
        with self.autocast():
            return computation(*arguments)

    def backward(
        self, loss: torch.Tensor, factor: float, leaves_of: LeavesOf | None = None
    ) -> None:
        """Run the backward pass of `loss`, a scalar, times `factor`; gradients are scaled up with
        fp16.

        Args:
            loss: the loss.
            factor: the factor.
            leaves_of: tells which gradients have to be computed; None for all. Not asked with fp16,
                where layers compute in another format than their weights have.
        """
        if self._scaler is None:
            run_backward(loss, self._first_gradients.of(loss, factor), leaves_of)
        else:
            torch.autograd.backward(self._scaler.scale(loss * factor / self._count_per_sample))

    def backward_of_mean(self, total: torch.Tensor, count: Number) -> None:
        """Run the backward pass of ``total / count``, a number or on the device of `total`; not
        with fp16.
        """
        if isinstance(count, torch.Tensor):
            run_backward(total, torch.reciprocal(count).to(total.dtype))
        else:
            run_backward(total, self._first_gradients.of(total, 1 / count if count else math.nan))

    def pass_scale(self, samples: int, workers: int = 1) -> float:
        """Return the factor of the sum of the loss in each pass of a step.

        Args:
            samples: samples in the global batch.
            workers: number of workers over which the strategy averages gradients, if it does.
        """
        return (workers if self._scaler is None else 1 / _HEADROOM) / samples

    def correction(self, samples: int, count: Number, workers: int) -> Number:
        """Return the factor that makes the reduced gradients those of the mean.

        Args:
            samples: see `pass_scale`, as for `workers`.
            count: what the mean is over.
        """
        if self._scaler is None:
            return samples / count
        if not isinstance(count, torch.Tensor):
            return samples * _HEADROOM * workers * self._count_per_sample.item() / count
        return samples * _HEADROOM * workers * self._count_per_sample.to(count.dtype) / count

    def set_count(self, count: Number, samples: int) -> None:
        """Set the count per sample for the next passes: that of a global batch, rounded up to a
        power of two.
        """
        if self._scaler is not None:
            if not isinstance(count, torch.Tensor):
                count = torch.tensor(count, dtype=torch.float64)
            mantissa, exponent = torch.frexp((count / samples).clamp(min=_LEAST_COUNT))
            self._count_per_sample.copy_(
                torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int())
            )

    def end_step(self, count: Number, samples: int) -> None:
        """Note what the loss has counted in a step that is complete; does not wait for the
        device.
        """
        if self._scaler is not None:
            self.set_count(count, samples)
            self.is_new = False

    def forget_cast(self) -> None:
        """Find out anew what is computed in float16: the model has other parameters."""
        self.is_new = self._scaler is not None
        self.cast = frozenset[int]()

    def mark_overflows(self, gradients: list[torch.Tensor], workers: int) -> None:
        """Make those elements of reduced gradients infinite that float16 could not have held in a
        single pass.

        Args:
            gradients: in float32, of the parameters that autocast converts.
            workers: see `pass_scale`.
        """
        if self._scaler is not None and gradients:
            torch._foreach_mul_(gradients, _BEYOND_FLOAT16 * workers)
            torch._foreach_mul_(gradients, 1 / (_BEYOND_FLOAT16 * workers))

    def unscale(self, optimizer: Optimizer, comm: Communicator | None = None) -> None:
        """Unscale the gradients, before they are read or changed.

        Args:
            optimizer: the optimizer of their parameters.
            comm: communicator over workers that each have the gradients of some parameters: a step
                is skipped on all if the gradients of one have overflowed. None if each has all.
        """
        if self._scaler is None:
            return
        self._scaler.unscale_(optimizer)
        if comm is not None:
            # By name, as the scaler of FSDP does: torch has no public way.
            overflows = self._scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
            local_overflows = [overflow.to(self._device) for overflow in overflows.values()]
            most = torch.stack([torch.zeros((), device=self._device), *local_overflows]).max()
            with named("overflows of gradients"):
                of_all = comm.allreduce(most, "max")
            overflows.clear()
            overflows[self._device] = of_all

    def abandon_step(self) -> None:
        """Forget that gradients were unscaled, where no update is made with them; the scale stays
        as it is.
        """
        if self._scaler is not None:
            self._scaler._per_optimizer_states.clear()

    def step(self, optimizer: Optimizer) -> None:
        """Update the parameters, or skip the step if fp16 gradients overflowed; the same on all
        workers.
        """
        if self._scaler is None:
            take_step(optimizer)
        else:
            self._scaler.step(optimizer)
            self._scaler.update()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the gradient scaler, and what workers have agreed upon; empty without
        a scaler.
        """
        if self._scaler is None:
            return {}
        agreed = {"count_per_sample": float(self._count_per_sample), "cast": sorted(self.cast)}
        return {**self._scaler.state_dict(), **({} if self.is_new else agreed)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of the gradient scaler, if this precision has one."""
        if self._scaler is not None and state:
            self._scaler.load_state_dict(state)
            self.is_new = "count_per_sample" not in state
            self._count_per_sample.fill_(float(state.get("count_per_sample", 1.0)))
            self.cast = frozenset(map(int, state.get("cast", ())))


def full_precision(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of a half-precision format as float32; others are returned unchanged."""
    return tensor.float() if tensor.dtype in _AUTOCAST.values() else tensor


def clip(parameters: list[nn.Parameter], max_norm: float) -> torch.Tensor:
    """Scale all gradients down together so that their joint 2-norm is at most `max_norm`; returns
    the norm before.

    Source: Pascanu, Mikolov, Bengio, "On the difficulty of training recurrent neural networks",
    ICML 2013.
    """
    if any(p.grad is not None and p.grad.is_sparse for p in parameters):
        return _clip_sparse(parameters, max_norm)
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    # of sharded parameters
    whole: torch.Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return whole


def _clip_sparse(parameters: list[nn.Parameter], max_norm: float) -> torch.Tensor:
    """Clip as `clip` where some gradients are sparse, which torch's function does not support.

    The values of a row that is there several times are added up first, as the norm is that of their
    sum.
    """
    values: list[torch.Tensor] = []
    for p in parameters:
        if p.grad is not None and p.grad.is_sparse:
            p.grad = p.grad.coalesce()
            values.append(p.grad._values())
        elif p.grad is not None:
            values.append(p.grad)
    norms = [torch.linalg.vector_norm(value).to(values[0].device) for value in values]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for value in values:
        value.mul_(factor.to(value.device))
    return norm


def scale_gradients(gradients: list[torch.Tensor], factor: Number) -> None:
    """Multiply `gradients` in place by `factor`; does not wait for an accelerator."""
    for gradient in gradients:
        if gradient.is_sparse:
            gradient._values().mul_(factor)
    gradients = [gradient for gradient in gradients if not gradient.is_sparse]
    if not gradients:
        return
    if not isinstance(factor, torch.Tensor) or factor.device.type == "cpu":
        torch._foreach_mul_(gradients, float(factor))
        return
    for dtype in {gradient.dtype for gradient in gradients}:
        # foreach kernels need a factor of the gradients' dtype; half-precision formats are too
        # coarse for it.
        converted = factor.to(torch.promote_types(dtype, torch.float32))
        torch._foreach_mul_(
            [gradient for gradient in gradients if gradient.dtype == dtype], converted
        )
