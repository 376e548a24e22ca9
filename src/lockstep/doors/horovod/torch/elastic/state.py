"""The state of a PyTorch training: model, optimizer, schedule, sampler, and other values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from ...common import elastic
from ...common.basics import rank
from ..functions import allgather_object, broadcast_object, broadcast_optimizer_state, broadcast_parameters
from .sampler import ElasticSampler

__all__ = ["ObjectState", "StateHandler", "TorchState", "get_handler_registry", "set_handler_registry"]


class ObjectState(elastic.ObjectState):
    """Values of any kind that can be pickled, which are attributes of the state.

    Args:
        bcast_object: gives every rank what rank 0 passes to it; `hvd.broadcast_object` when None.
        get_rank: gives this rank; `hvd.rank` when None.
        kwargs: the values by name.
    """

    def __init__(
        self, bcast_object: Callable[[Any], Any] | None = None, get_rank: Callable[[], int] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(bcast_object or broadcast_object, get_rank or rank, **kwargs)


class TorchState(ObjectState):
    """The state of a PyTorch training.

    Args:
        model: if there is one.
        optimizer: if there is one.
        kwargs: further values by name, which are attributes of the state: models, optimizers, learning rate
            schedulers and samplers keep their states, other values are copied as they are.
    """

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        given = {"model": model, "optimizer": optimizer, **kwargs}
        handlers = {name: handler for name, value in given.items() if (handler := _handler(value)) is not None}
        self._handlers: dict[str, StateHandler] = {}
        for name, handler in handlers.items():
            setattr(self, name, handler.value)
        self._handlers = handlers
        super().__init__(**{name: value for name, value in given.items() if name not in handlers})

    def save(self) -> None:
        """Keep a copy of everything; all ranks call it, as the samplers find out what other ranks have done."""
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Go back to what was saved last."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Give all ranks what rank 0 has, and save it; all ranks call it."""
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    def __setattr__(self, name: str, value: Any) -> None:
        handler = self.__dict__.get("_handlers", {}).get(name)
        if handler is not None:
            handler.set_value(value)
        super().__setattr__(name, value)


class StateHandler:
    """Keeps the state of one value.

    Args:
        value: has `state_dict` and `load_state_dict`.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self._saved = copy.deepcopy(value.state_dict())

    def set_value(self, value: Any) -> None:
        """Keep that of `value` from now on."""
        self.value = value
        self.save()

    def save(self) -> None:
        """Copy it."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Put the copy in place."""
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Give all ranks that of rank 0, and save it."""
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))
        self.save()


class ModelStateHandler(StateHandler):
    """That of a model, whose tensors are sent without copies."""

    def sync(self) -> None:
        """Give all ranks that of rank 0, and save it."""
        state = self.value.state_dict()
        tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        broadcast_parameters(tensors, root_rank=0)
        others = {name: value for name, value in state.items() if name not in tensors}
        if others:
            self.value.load_state_dict({**tensors, **broadcast_object(others)})
        self.save()


class OptimizerStateHandler(StateHandler):
    """That of an optimizer."""

    def sync(self) -> None:
        """Give all ranks that of rank 0, and save it."""
        broadcast_optimizer_state(self.value, root_rank=0)
        self.save()


class SamplerStateHandler(StateHandler):
    """That of an `ElasticSampler`: what any rank has done is done."""

    def save(self) -> None:
        """Find out what all ranks have done, and keep it; all ranks call it."""
        self._saved = self._joint()

    def sync(self) -> None:
        """Deal out anew what no rank has done."""
        self._saved = broadcast_object(self._joint())
        self.restore()

    def _joint(self) -> dict[str, Any]:
        own = self.value.state_dict()
        said = allgather_object((own["processed_num"], own["processed_indices"]))
        done, others = zip(*said, strict=True)
        return {**own, "processed_num": max(done), "processed_indices": set().union(*others)}


_handlers: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (torch.optim.lr_scheduler.LRScheduler, StateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """Which handler a kind of value has; the first that fits is taken."""
    return _handlers


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    """Let states that are made from now on use `registry`."""
    global _handlers
    _handlers = registry


def _handler(value: Any) -> StateHandler | None:
    return next((handler(value) for kind, handler in _handlers if isinstance(value, kind)), None)
