"""The modules that a loss function is, or calls: their buffers and parameters are a part of the
training's state.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from ...communicator import Communicator
from ...errors import CheckpointError
from ...parallel.module_sync import move_module, sync_tensors
from ..settings import variables_of

_log = logging.getLogger(__name__)


def modules_of(fn: Any, model: nn.Module | None) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the modules that a loss function is, and those that it calls by name; without those of
    the model.

    Args:
        fn: a module, a method of one, a function, or a `functools.partial` of these.
        model: the model; when None, the modules belong to another module, and there are none.
    """
    if model is None:
        return [], []
    if isinstance(fn, partial):
        modules = [
            modules_of(argument, model) for argument in (fn.func, *fn.args, *fn.keywords.values())
        ]
        return [m for direct, _ in modules for m in direct], [
            m for _, called in modules for m in called
        ]
    if isinstance(fn, nn.Module):
        return _without(model, [fn]), []
    if inspect.ismethod(fn):
        return (_without(model, [fn.__self__]) if isinstance(fn.__self__, nn.Module) else []), []
    if not inspect.isfunction(fn):
        return [], []
    called = [variable.read() for variable in variables_of(fn)]
    return [], _without(model, [value for value in called if isinstance(value, nn.Module)])


def _without(model: nn.Module, modules: list[nn.Module]) -> list[nn.Module]:
    parts = set(model.modules())
    return [
        module for module in modules if module not in parts and parts.isdisjoint(module.modules())
    ]


class LossState(nn.ModuleList):
    """The modules of a loss function, for the strategy, which treats their buffers as the model's.

    Of a module that a function only calls, the parameters are left alone: it may be a large
    pretrained network.

    Args:
        fn: the loss function.
        model: the model; None if the modules belong to another module.
        device: the device of the outputs.
    """

    def __init__(self, fn: Any, model: nn.Module | None, device: torch.device) -> None:
        direct, called = (list(dict.fromkeys(modules)) for modules in modules_of(fn, model))
        super().__init__([*direct, *(module for module in called if module not in direct)])
        self._direct = len(direct)
        move_module(self, device)

    def synchronise(self, comm: Communicator) -> None:
        """Broadcast rank 0's values, and check that all workers have the same modules; called by
        all workers.

        Raises:
            MismatchError: on every worker, naming the first difference.
        """
        named = [(f"loss.{name}", value) for name, value in self._named(persistent=False).items()]
        if named:
            sync_tensors(named, comm)

    def versions(self) -> list[tuple[int, int]]:
        """Return numbers that differ once a buffer has changed."""
        return [(id(buffer), buffer._version) for buffer in self.buffers()]

    def saved(self) -> dict[str, torch.Tensor]:
        """Return what belongs into a checkpoint, by name."""
        return {name: value.detach() for name, value in self._named(persistent=True).items()}

    def load(self, saved: Mapping[str, torch.Tensor] | None, speaks: bool) -> None:
        """Load what `saved` returned.

        Args:
            saved: the state; None from a version that did not save it.
            speaks: whether this worker logs what cannot be loaded.

        Raises:
            CheckpointError: for tensors of other shapes.
        """
        ours = self._named(persistent=True)
        if (saved or {}).keys() != ours.keys():
            if speaks:
                lost = (
                    "has no state of the loss function"
                    if not saved
                    else "has the state of another loss function"
                )
                _log.warning("the checkpoint %s: buffers of this loss function begin anew", lost)
            return
        for name, value in (saved or {}).items():
            if value.shape != ours[name].shape:
                difference = (
                    f"{name}: here {list(ours[name].shape)}, in the checkpoint {list(value.shape)}"
                )
                raise CheckpointError(
                    "a checkpoint of another loss function. The first difference in shapes is "
                    f"{difference}."
                )
        with torch.no_grad():
            for name, value in (saved or {}).items():
                ours[name].copy_(value)

    def _named(self, persistent: bool) -> dict[str, torch.Tensor]:
        named_tensors: dict[str, torch.Tensor] = {}
        for number, module in enumerate(self):
            every: dict[str, Any] = module.state_dict(keep_vars=True)
            if not persistent:
                every |= dict(module.named_buffers())
            kept = {} if number < self._direct else dict(module.named_parameters())
            tensors = {
                name: value for name, value in every.items() if isinstance(value, torch.Tensor)
            }
            named_tensors |= {
                f"{number}.{name}": value for name, value in tensors.items() if name not in kept
            }
        return named_tensors
