"""The state of a PyTorch training: model, optimizer, schedule, sampler, and other values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from lockstep.parallel.full_state import load_optimizer

from ...common import elastic
from ...common.basics import rank
from ..functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from .sampler import ElasticSampler

__all__ = [
    "ObjectState",
    "StateHandler",
    "TorchState",
    "get_handler_registry",
    "set_handler_registry",
]


class ObjectState(elastic.ObjectState):
    """A state of values that can be pickled, which are its attributes.

    Args:
        bcast_object: broadcasts an object from rank 0 and returns it; None for
            `hvd.broadcast_object`.
        get_rank: returns the rank of this process; None for `hvd.rank`.
        kwargs: the values, by name.
    """

    def __init__(
        self,
        bcast_object: Callable[[Any], Any] | None = None,
        get_rank: Callable[[], int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(bcast_object or broadcast_object, get_rank or rank, **kwargs)


class TorchState(ObjectState):
    """The state of a PyTorch training.

    Args:
        model: the model, if any.
        optimizer: the optimizer, if any.
        kwargs: further values, by name; all values are attributes of the state. For models,
            optimizers, learning rate schedulers and `ElasticSampler` the `state_dict` is saved;
            other values are copied.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        values = {"model": model, "optimizer": optimizer, **kwargs}
        handlers = {}
        for name, value in values.items():
            makers = [make for kind, make in _handler_registry if isinstance(value, kind)]
            if makers:
                handlers[name] = makers[0](value)
        self._handlers: dict[str, StateHandler] = {}
        for name, handler in handlers.items():
            setattr(self, name, handler.value)
        self._handlers = handlers
        super().__init__(**{name: value for name, value in values.items() if name not in handlers})

    def save(self) -> None:
        """Save a copy of all values; all ranks call it, because samplers gather the processed
        samples of all ranks.
        """
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Restore the values that were saved last."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Broadcast the values of rank 0, and save them; all ranks call it."""
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    def __setattr__(self, name: str, value: Any) -> None:
        handler = self.__dict__.get("_handlers", {}).get(name)
        if handler is not None:
            handler.set_value(value)
        super().__setattr__(name, value)


class StateHandler:
    """Saves and restores one value.

    Args:
        value: an object with `state_dict` and `load_state_dict`.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self._saved = copy.deepcopy(value.state_dict())

    def set_value(self, value: Any) -> None:
        """Replace the value, and save its state."""
        self.value = value
        self.save()

    def save(self) -> None:
        """Save a copy of the state."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Restore the saved state."""
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Broadcast the state of rank 0, and save it."""
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))
        self.save()


class ModelStateHandler(StateHandler):
    """Saves and restores a model, whose tensors are broadcast in place."""

    def sync(self) -> None:
        """Broadcast the state of rank 0, and save it."""
        state = self.value.state_dict()
        tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        broadcast_parameters(tensors, root_rank=0)
        others = {name: value for name, value in state.items() if name not in tensors}
        if others:
            self.value.load_state_dict({**tensors, **broadcast_object(others)})
        self.save()


class OptimizerStateHandler(StateHandler):
    """Saves and restores an optimizer."""

    def restore(self) -> None:
        """Restore the saved state."""
        load_optimizer(self.value, copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Broadcast the state of rank 0, and save it."""
        broadcast_optimizer_state(self.value, root_rank=0)
        self.save()


class SamplerStateHandler(StateHandler):
    """Saves and restores an `ElasticSampler`, with the processed samples of all ranks."""

    def save(self) -> None:
        """Gather the processed samples of all ranks, and save the state; all ranks call it."""
        self._saved = self._merged_state()

    def sync(self) -> None:
        """Broadcast the merged state, and distribute the unprocessed samples again."""
        self._saved = broadcast_object(self._merged_state())
        self.restore()

    def _merged_state(self) -> dict[str, Any]:
        state = self.value.state_dict()
        gathered = allgather_object((state["processed_num"], state["processed_indices"]))
        counts, indices = zip(*gathered, strict=True)
        return {**state, "processed_num": max(counts), "processed_indices": set().union(*indices)}


_handler_registry: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (torch.optim.lr_scheduler.LRScheduler, StateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """Return the registry, as (class of values, handler) pairs; the first pair that matches a value
    is used.
    """
    return _handler_registry


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    """Use `registry` for states that are created from now on."""
    global _handler_registry
    _handler_registry = registry
