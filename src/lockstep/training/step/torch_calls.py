"""An optimizer's update and a backward pass, without what torch does around them for its profiler
and other callers.

Torch's wrappers take up to 30 µs each on the CPU, as long as the update of a small model. Each
function here does what torch's does whenever the wrapper could have an effect, and also where a
torch of another version has other parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim import optimizer as optimizer_module
from torch.overrides import has_torch_function

LeavesOf = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
"""Returns the leaves of the graph of a loss whose gradients a backward pass has to compute; () for
all.
"""

_zero_grad = Optimizer.zero_grad
_backward = torch.autograd.backward
_profiler_runs: Callable[[], bool] = getattr(torch.autograd, "_profiler_enabled", lambda: True)


def _code_of_the_wrapper() -> CodeType | None:
    """Return the code that torch puts around the `step` of every class of optimizers; None if there
    is no such one.
    """

    def step(_: Optimizer) -> None:
        pass

    wrap: Any = getattr(Optimizer, "profile_hook_step", None)
    wrapped = step if wrap is None else wrap(step)
    return wrapped.__code__ if getattr(wrapped, "__wrapped__", None) is step else None


_WRAPPER = _code_of_the_wrapper()


def take_step(optimizer: Optimizer) -> None:
    """Do ``optimizer.step()``.

    Torch's wrapper records the step for a profiler and calls hooks: 30 µs. The step itself is
    called if there are none.
    """
    update: Any = type(optimizer).step
    # The wrapper is left out only where it is torch's own and would do nothing: no other `step` on
    # the object, where schedulers of torch and programs put one, no profiler, and no hook. A list
    # of hooks that this release of torch does not have may be elsewhere: it counts as one with
    # hooks.
    if (
        _WRAPPER is not None
        and getattr(update, "__code__", None) is _WRAPPER
        and "step" not in optimizer.__dict__
        and not _profiler_runs()
        and not getattr(optimizer, "_optimizer_step_pre_hooks", True)
        and not getattr(optimizer, "_optimizer_step_post_hooks", True)
        and not getattr(optimizer_module, "_global_optimizer_pre_hooks", True)
        and not getattr(optimizer_module, "_global_optimizer_post_hooks", True)
    ):
        update.__wrapped__(optimizer)
    else:
        optimizer.step()


@contextmanager
def without_hooks_of_all_optimizers() -> Iterator[None]:
    """Let no hook that the program has registered for all optimizers see the steps in the body:
    they are none of its training.
    """
    tables: list[dict[int, Any]] = [
        getattr(optimizer_module, name, {})
        for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
    ]
    hooks = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, kept in zip(tables, hooks, strict=True):
            table.update(kept)


def clear_gradients(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Do ``optimizer.zero_grad()``, where `parameters` are all of its own; torch's takes 15 µs for
    a profiler.
    """
    is_overridden = type(optimizer).zero_grad is not _zero_grad or "zero_grad" in optimizer.__dict__
    if is_overridden or _profiler_runs():
        optimizer.zero_grad(set_to_none=True)
        return
    for parameter in parameters:
        parameter.grad = None


def run_backward(
    loss: torch.Tensor, gradient: torch.Tensor, leaves_of: LeavesOf | None = None
) -> None:
    """Do ``loss.backward(gradient)`` for tensors of the same shape and dtype; torch's checks of
    that take 15 µs.

    Args:
        loss: the loss.
        gradient: that the pass begins with.
        leaves_of: called right before the pass, if it is torch's own.
    """
    # By its name in that module, where the watchdog replaces it.
    run: Any = getattr(torch.autograd, "_engine_run_backward", None)
    replaced = run is None or torch.autograd.backward is not _backward
    # a class of tensors of its own, or a mode that looks at calls
    if replaced or has_torch_function((loss,)):
        torch.autograd.backward(loss, gradient)
    else:
        leaves = () if leaves_of is None else leaves_of(loss)
        run(
            (loss,), (gradient,), False, False, leaves, allow_unreachable=True, accumulate_grad=True
        )


class FirstGradients:
    """Factors of losses as the gradients that backward passes begin with, in place of a
    multiplication of each loss.

    Batches have few sizes, and so losses few factors.
    """

    _MOST = 64

    def __init__(self) -> None:
        self._kept: dict[tuple[float, torch.dtype, torch.device], tuple[torch.Tensor, int]] = {}

    def of(self, loss: torch.Tensor, factor: float) -> torch.Tensor:
        """Return `factor` as a gradient of `loss`, a 0-dim tensor."""
        key = factor, loss.dtype, loss.device
        gradient, version = self._kept.get(key, (None, 0))
        # a hook of the program may have changed it in place
        if gradient is None or gradient._version != version:
            if len(self._kept) >= self._MOST:
                self._kept.clear()
            gradient = torch.full_like(loss, factor, requires_grad=False)
            self._kept[key] = gradient, gradient._version
        return gradient
