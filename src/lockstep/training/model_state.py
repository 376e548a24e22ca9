"""What a training step and the program around it change, as workers that are behind others are given it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ..data.loader import Batch
from ..errors import ConfigError
from ..parallel.module_sync import expanded_dimensions
from ..parallel.nested import map_tensors
from ..parallel.randomness import generator_states, set_generator_states
from .recovery import REGROUP, as_bytes, from_bytes
from .step import StepResult, TrainStep

__all__ = ["ModelState"]

_CPU = torch.device("cpu")


class ModelState:
    """The part of a `recovery.TrainingState` that all loops around a `TrainStep` have.

    Args:
        step: the training step.
    """

    result: Any = True

    def __init__(self, step: TrainStep) -> None:
        self.step = step
        self._left: list[dict[str, Any]] = []  # the hyperparameters, as the last operation has left them
        self._versions: list[int] = []  # of parameters and buffers, when they were last looked at
        self._has_changed = False  # whether the program has changed them since the last operation
        self._generators: list[Any] = []  # the states of the global generators then, or before an operation

    def part_of(self, batch: Batch) -> Batch:
        """See `TrainingState`."""
        return batch

    def begin(self) -> None:
        """See `TrainingState`."""
        self._look_for_changes()
        self.step.strategy.begin_step()
        self._generators = self._generator_states()

    def note_seen(self, note: Callable[[bytes | None], None]) -> None:
        """See `TrainingState`."""

    def undo(self) -> None:
        """See `TrainingState`."""
        self.step.strategy.abandon_step()
        self._versions = self._current_versions()  # what has been restored has another one
        self._set_generator_states(self._generators)

    def commit(self, result: Any) -> None:
        """See `TrainingState`."""
        self._left, self._versions = self._hyperparameters(), self._current_versions()
        self._has_changed = False
        self._generators = self._generator_states()

    def for_others(self, result: Any) -> Any:
        """See `TrainingState`: requests to regroup were those of an earlier group, and those to stop hold."""
        if isinstance(result, StepResult):
            stop = result.on_hand[2] % REGROUP
            return result.replaced(stop=stop, replicas=None).mapped(lambda tensor: tensor.detach().cpu())
        return map_tensors(lambda tensor: tensor.detach().cpu(), result)

    def from_others(self, result: Any) -> Any:
        """See `TrainingState`."""
        device = self.step.comm.device
        if isinstance(result, StepResult):
            return result.mapped(lambda tensor: tensor.to(device))
        return map_tensors(lambda tensor: tensor.to(device), result)

    def of_operations(self) -> dict[str, Any]:
        """See `TrainingState`."""
        model, optimizer = self.step.model, self.step.optimizer
        return {
            "model": model.state_dict(),
            "buffers": _buffers_beside(model),
            "optimizer": optimizer.state_dict(),
            "hyperparameters": as_bytes(self._left),
            "generators": as_bytes(self._generators),
            "step": self.step.state_dict(),
            "changed": self._has_changed,
        }

    def load_operations(self, state: dict[str, Any]) -> None:
        """See `TrainingState`.

        Raises:
            ConfigError: if the program of the other worker has changed the model since the operation, so that its state
                as the operation has left it is gone.
        """
        if state["changed"] and self._left:
            raise ConfigError(
                "callbacks",
                "parameters and buffers that only the steps of an elastic job change",
                found="a change between two steps, which cannot be repeated on a worker that has lost its group",
                hint="Make it in optimizer.register_step_post_hook(), which is a part of the step.",
            )
        step, model = self.step, self.step.model
        _load_buffers_beside(model, state["buffers"])
        step.strategy.load_model_state(model, state["model"])
        step.strategy.load_optimizer_state(model, step.optimizer, state["optimizer"])
        self._set_hyperparameters(from_bytes(state["hyperparameters"], _CPU))
        self._set_generator_states(from_bytes(state["generators"], _CPU))
        step.load_state_dict(state["step"])

    def of_program(self) -> dict[str, Any]:
        """See `TrainingState`."""
        return {
            "hyperparameters": as_bytes(self._hyperparameters()),
            "generators": as_bytes(self._generator_states()),
            "modes": _modes_of(self.step.model),
        }

    def load_program(self, state: dict[str, Any]) -> None:
        """See `TrainingState`."""
        self._set_hyperparameters(from_bytes(state["hyperparameters"], _CPU))
        self._set_generator_states(from_bytes(state["generators"], _CPU))
        _load_modes(self.step.model, state["modes"])

    def leave(self) -> None:
        """See `TrainingState`."""
        self._look_for_changes()

    def regroup(self, states: bytes | None, all_seen: bool) -> None:
        """See `TrainingState`."""
        self.step.regroup()
        self._versions = self._current_versions()

    def _hyperparameters(self) -> list[dict[str, Any]]:
        """Return a copy of the hyperparameters of the optimizer's parameter groups."""
        groups = self.step.optimizer.param_groups
        return copy.deepcopy([{name: value for name, value in g.items() if name != "params"} for g in groups])

    def _set_hyperparameters(self, groups: list[dict[str, Any]]) -> None:
        for group, values in zip(self.step.optimizer.param_groups, groups, strict=True):
            for name, value in values.items():
                own = group.get(name)
                is_tensor = isinstance(own, torch.Tensor) and isinstance(value, torch.Tensor)
                group[name] = value.to(own.device) if is_tensor else value  # type: ignore[union-attr]

    def _generator_states(self) -> list[Any]:
        of_torch, of_python, of_numpy, _, of_device = generator_states(self.step.comm.device)
        return [of_torch, of_python, of_numpy, of_device]

    def _set_generator_states(self, states: list[Any]) -> None:
        generator = generator_states(self.step.comm.device)[3]  # of this worker's device
        set_generator_states((*states[:3], generator, states[3]))

    def _look_for_changes(self) -> None:
        before, self._versions = self._versions, self._current_versions()
        self._has_changed = self._has_changed or before != self._versions

    def _current_versions(self) -> list[int]:
        model = self.step.model
        return [tensor._version for tensor in (*model.parameters(), *model.buffers())]


def _buffers_beside(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers of a model that are not in its state dict."""
    persistent = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in model.named_buffers() if name not in persistent}


def _load_buffers_beside(model: nn.Module, buffers: Mapping[str, torch.Tensor]) -> None:
    """Load what `_buffers_beside` returned on another worker, where a buffer may have another shape by now."""
    for full_name, value in buffers.items():
        path, _, name = full_name.rpartition(".")
        module = model.get_submodule(path)
        buffer = module._buffers.get(name)
        fits = buffer is not None and (buffer.shape, buffer.dtype) == (value.shape, value.dtype)
        if buffer is not None and fits and not expanded_dimensions(buffer):
            with torch.no_grad():
                buffer.copy_(value)
        else:
            module.register_buffer(name, value, persistent=False)


def _modes_of(model: nn.Module) -> dict[str, dict[str, bool]]:
    """Return which parameters of a model are trained, and which modules are in training mode."""
    return {
        "trained": {name: parameter.requires_grad for name, parameter in model.named_parameters()},
        "training": {name: module.training for name, module in model.named_modules()},
    }


def _load_modes(model: nn.Module, modes: Mapping[str, Mapping[str, bool]]) -> None:
    """Set what `_modes_of` returned on another worker."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(modes["trained"].get(name, parameter.requires_grad))
    for name, module in model.named_modules():
        module.training = modes["training"].get(name, module.training)
