"""The bodies of prepared loops that run now, and the calls of torch within them that a loop is told
of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel

from .all_gradients import AllGradients
from .batch_parts import BatchParts
from .body_losses import BodyLosses
from .once_a_batch import OnceABatch
from .repeated_batches import RepeatedBatches

__all__ = ["Loop", "begin", "end", "running", "watch"]


class Loop(Protocol):
    """A prepared loop, as the calls within its bodies see it."""

    parts: BatchParts
    gradients: AllGradients
    losses: BodyLosses
    once_a_batch: OnceABatch
    repeats: RepeatedBatches


_running: list[Loop] = []


def begin(loop: Loop) -> None:
    """Record that a body of `loop` runs from now on."""
    _running.append(loop)


def end(loop: Loop) -> None:
    """Record that no body of `loop` runs any more."""
    if loop in _running:
        _running.remove(loop)


def running() -> Loop | None:
    """Return the loop whose body runs now; None outside."""
    return _running[-1] if _running else None


# --- calls of torch
# --------------------------------------------------------------------------------------------------

# A loop of one's own calls torch directly, so that there is no object to ask. These are wrapped,
# once in a process; outside the bodies of prepared loops a wrapper is one comparison.
_MARK = "_lockstep_watched"


def watch() -> None:
    """Wrap the calls that a prepared loop is told of; once more for classes of schedulers defined
    since then.
    """
    if not hasattr(torch.autograd.backward, _MARK):
        torch.autograd.backward = _marked(_watched_backward, torch.autograd.backward)
        register_optimizer_step_pre_hook(_watched_optimizer)
    if not hasattr(AveragedModel.update_parameters, _MARK):
        original = AveragedModel.update_parameters
        AveragedModel.update_parameters = _marked(_watched_update, original)  # type: ignore[method-assign]
    for kind in _classes(LRScheduler):
        step = vars(kind).get("step")
        if step is not None and not hasattr(step, _MARK):
            kind.step = _marked(_watched_step, step)


def _classes(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    for subclass in kind.__subclasses__():
        yield from _classes(subclass)


def _marked(replacement: Callable[..., Any], original: Any) -> Any:
    @wraps(original)
    def watched(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs) if _running else original(*args, **kwargs)

    setattr(watched, _MARK, True)
    return watched


def _watched_backward(
    original: Any, tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any
) -> Any:
    roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    is_plain = grad_tensors is None and len(args) < 4 and kwargs.get("inputs") is None
    told = [(loop.gradients, loop.losses.refusals(roots)) for loop in _running] if is_plain else []
    result = original(tensors, grad_tensors, *args, **kwargs)
    for gradients, refusals in told:
        gradients.note_backward(refusals)
    return result


def _watched_optimizer(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    for loop in _running:
        loop.gradients.check_optimizer(optimizer)


def _watched_step(original: Any, scheduler: LRScheduler, *args: Any, **kwargs: Any) -> Any:
    for loop in _running:
        loop.once_a_batch.check_scheduler(scheduler)
    return original(scheduler, *args, **kwargs)


def _watched_update(original: Any, average: AveragedModel, model: Any) -> None:
    _running[-1].once_a_batch.update_average(average, model, partial(original, average, model))
