"""The bodies of prepared loops that run now, and the calls of torch within them that a loop is told of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel

__all__ = ["Listener", "Shard", "begin", "end", "running", "watch"]


@dataclass(slots=True)
class Shard:
    """The shard whose passes are running.

    Attributes:
        number: its number.
        samples: its samples; 0 if its data is a sample that stands in for none.
        weight: its share of the samples of the global batch.
        last: whether it is this worker's last one, in which optimizers update the parameters.
        one_of_several: whether this worker has other shards of the same batch.
        total: samples of the global batch.
        left_out: in the last shard, the samples that a collate function has left out of this worker's shards; None if
            there is no such function.
        whole_batch: whether its loss is one of the whole batch, on each worker.
        divisors: what the losses of its backward passes are divided by, where steps have a count; see `divisor`.
    """

    number: int
    samples: int
    weight: float
    last: bool
    one_of_several: bool
    total: int = 1
    left_out: int | None = None
    whole_batch: bool = False
    divisors: list[torch.Tensor | None] = field(default_factory=list)


class Listener(Protocol):
    """A prepared loop, as the calls within its bodies see it."""

    def before_backward(self, roots: list[torch.Tensor]) -> Callable[[], None]:
        """Look at the losses of a backward pass; returns what to do after it."""
        ...

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Check that an optimizer may step."""
        ...

    def check_scheduler(self, scheduler: LRScheduler) -> None:
        """Check that a scheduler may be stepped now."""
        ...

    def update_average(self, average: AveragedModel, model: Any, update: Callable[[], None]) -> None:
        """Update an average of a model now, later, or not at all."""
        ...

    def whole_batch(self, output: torch.Tensor) -> torch.Tensor:
        """Return the rows of all workers for the running batch."""
        ...


_running: list[Listener] = []


def begin(loop: Listener) -> None:
    """Record that a body of `loop` runs from now on."""
    _running.append(loop)


def end(loop: Listener) -> None:
    """Record that no body of `loop` runs any more."""
    if loop in _running:
        _running.remove(loop)


def running() -> Listener | None:
    """Return the loop whose body runs now; None outside."""
    return _running[-1] if _running else None


# --- calls of torch ---------------------------------------------------------------------------------------------------

# A loop of one's own calls torch directly, so that there is no object to ask. These are wrapped, once in a process;
# outside the bodies of prepared loops a wrapper is one comparison.
_MARK = "_lockstep_watched"


def watch() -> None:
    """Wrap the calls that a prepared loop is told of; once more for classes of schedulers defined since then."""
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


def _watched_backward(original: Any, tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
    roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    plain = grad_tensors is None and len(args) < 4 and kwargs.get("inputs") is None
    after = [loop.before_backward(roots) for loop in _running] if plain else []
    result = original(tensors, grad_tensors, *args, **kwargs)
    for call in after:
        call()
    return result


def _watched_optimizer(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    for loop in _running:
        loop.check_optimizer(optimizer)


def _watched_step(original: Any, scheduler: LRScheduler, *args: Any, **kwargs: Any) -> Any:
    for loop in _running:
        loop.check_scheduler(scheduler)
    return original(scheduler, *args, **kwargs)


def _watched_update(original: Any, average: AveragedModel, model: Any) -> None:
    _running[-1].update_average(average, model, partial(original, average, model))
