"""What training and the program around it change in a model, as workers that are behind others are
given it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from .. import arguments
from ..communicator import Communicator
from ..data.loader import Batch
from ..errors import ConfigError
from ..parallel.full_state import load_model, load_optimizer, read_optimizer_state
from ..parallel.module_sync import expanded_dimensions
from ..parallel.nested import map_tensors
from ..parallel.optimizer_parts import hyperparameters_of
from ..parallel.optimizer_shards import OptimizerShards, without_state
from ..parallel.randomness import generator_states, set_generator_states
from ..parallel.strategy import Strategy
from .recovery import REGROUP, TrainingState, as_bytes, from_bytes
from .step.precision import Precision
from .step.step_result import StepResult

__all__ = ["ModelState", "StateOfStep", "UserState"]

_CPU = torch.device("cpu")


class ModelState(TrainingState):
    """The part of a `recovery.TrainingState` that all trainings have: the model, its optimizer, and
    the generators.

    Args:
        model: the model.
        optimizer: the optimizer of its parameters.
        comm: of the workers.

    Attributes:
        has_changed_parameters: whether the program was seen to change parameters since the last
            operation. A worker that is behind could not be given what they were before.
    """

    result: Any = True

    def __init__(self, model: nn.Module, optimizer: Optimizer, comm: Communicator) -> None:
        self.model = model
        self.optimizer = optimizer
        self.comm = comm
        # the hyperparameters, as the last operation has left them
        self._left: list[dict[str, Any]] = []
        self._versions: list[int] = []  # of parameters and buffers, when they were last looked at
        self._has_changed = False  # whether the program has changed them since the last operation
        self.has_changed_parameters = False
        # the states of the global generators then, or before an operation
        self._generators: list[Any] = []

    @override
    def part_of(self, batch: Batch) -> Batch:
        return batch

    def begin(self) -> None:
        """Note the state of the generators, to which `undo` returns.

        Raises:
            ConfigError: if the program has changed parameters since the last operation.
        """
        self._look_for_changes()
        if self.has_changed_parameters:
            raise _refused_change()
        self._generators = self._generator_states()

    def note_seen(self, note: Callable[[bytes | None], None]) -> None:
        """Note nothing: a training has no callbacks by default."""

    @override
    def undo(self) -> None:
        self._versions = self._current_versions()  # what has been restored has another one
        self._set_generator_states(self._generators)

    @override
    def commit(self, result: Any) -> None:
        self._left = self._hyperparameters()
        self._versions = self._current_versions()
        self._has_changed = self.has_changed_parameters = False
        self._generators = self._generator_states()

    @override
    def for_others(self, result: Any) -> Any:
        return map_tensors(lambda tensor: tensor.detach().cpu(), result)

    @override
    def from_others(self, result: Any) -> Any:
        return map_tensors(lambda tensor: tensor.to(self.comm.device), result)

    @property
    def shards(self) -> OptimizerShards | None:
        """Who has which part of the optimizer's state; None if each worker has all of it, as by
        default.
        """
        return None

    @property
    @override
    def divides_state(self) -> bool:
        return self.shards is not None

    @override
    def finish_update(self) -> None:
        assert self.shards is not None
        self.shards.finish_update()

    @override
    def hand_over(self, leaving: bool) -> None:
        assert self.shards is not None
        self.shards.regroup(self.optimizer, leaving)

    @override
    def of_operations(self) -> dict[str, Any]:
        divides = self.divides_state  # then whoever is to have a part gets it with its tensors
        of_optimizer = without_state(self.optimizer) if divides else self.optimizer.state_dict()
        return {
            "model": self.model.state_dict(),
            "buffers": _buffers_beside(self.model),
            "optimizer": of_optimizer,
            "hyperparameters": as_bytes(self._left),
            "generators": as_bytes(self._generators),
            "changed": self._has_changed,
        }

    def load_operations(self, state: dict[str, Any]) -> None:
        """Load model, optimizer and generators as the other worker's last operation left them.

        Raises:
            ConfigError: if the program of the other worker has changed the model since the
                operation, so that its state as the operation has left it is gone.
        """
        if state["changed"] and self._left:
            raise _refused_change()
        _load_buffers_beside(self.model, state["buffers"])
        load_model(self.model, state["model"], self.comm)
        of_optimizer = state["optimizer"]
        if self.divides_state:
            of_optimizer = {**of_optimizer, "state": self.optimizer.state_dict()["state"]}
        load_optimizer(
            self.optimizer, read_optimizer_state(self.optimizer, of_optimizer, self.comm)
        )
        self._set_hyperparameters(from_bytes(state["hyperparameters"], _CPU))
        self._set_generator_states(from_bytes(state["generators"], _CPU))

    @override
    def of_program(self) -> dict[str, Any]:
        return {
            "hyperparameters": as_bytes(self._hyperparameters()),
            "generators": as_bytes(self._generator_states()),
            "modes": _modes_of(self.model),
        }

    @override
    def load_program(self, state: dict[str, Any]) -> None:
        self._set_hyperparameters(from_bytes(state["hyperparameters"], _CPU))
        self._set_generator_states(from_bytes(state["generators"], _CPU))
        _load_modes(self.model, state["modes"])

    @override
    def leave(self) -> None:
        self._look_for_changes()

    @override
    def regroup(self, states: bytes | None, all_seen: bool) -> None:
        self._versions = self._current_versions()

    def _hyperparameters(self) -> list[dict[str, Any]]:
        """Return a copy of the hyperparameters of the optimizer's parameter groups."""
        return copy.deepcopy([*map(hyperparameters_of, self.optimizer.param_groups)])

    def _set_hyperparameters(self, groups: list[dict[str, Any]]) -> None:
        for group, values in zip(self.optimizer.param_groups, groups, strict=True):
            for name, value in values.items():
                current = group.get(name)
                is_tensor = isinstance(current, torch.Tensor) and isinstance(value, torch.Tensor)
                group[name] = value.to(current.device) if is_tensor else value  # type: ignore[union-attr]

    def _generator_states(self) -> list[Any]:
        of_torch, of_python, of_numpy, _, of_device = generator_states(self.comm.device)
        return [of_torch, of_python, of_numpy, of_device]

    def _set_generator_states(self, states: list[Any]) -> None:
        generator = generator_states(self.comm.device)[3]  # of this worker's device
        set_generator_states((*states[:3], generator, states[3]))

    def _look_for_changes(self) -> None:
        before = self._versions
        self._versions = self._current_versions()
        parameters = sum(1 for _ in self.model.parameters())
        self.has_changed_parameters |= before[:parameters] != self._versions[:parameters]
        self._has_changed |= before != self._versions

    def _current_versions(self) -> list[int]:
        return [tensor._version for tensor in (*self.model.parameters(), *self.model.buffers())]


def _refused_change() -> ConfigError:
    return ConfigError(
        "callbacks",
        "parameters and buffers that only the steps of an elastic job change",
        found="a change between two steps, which could not be repeated on a worker that has lost "
        "its group",
        hint="Make it in optimizer.register_step_post_hook(), which is a part of the step.",
    )


class Step(Protocol):
    """What is asked of a `TrainStep`."""

    model: nn.Module
    optimizer: Optimizer
    comm: Communicator
    strategy: Strategy
    precision: Precision

    def state_dict(self) -> dict[str, Any]:
        """Return its state, without model and optimizer."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load it."""
        ...

    def regroup(self) -> None:
        """Adapt to the communicator's new workers."""
        ...


class StateOfStep(ModelState):
    """The part of a `recovery.TrainingState` that all loops around a `TrainStep` have.

    Args:
        step: the training step.
    """

    def __init__(self, step: Step) -> None:
        super().__init__(step.model, step.optimizer, step.comm)
        self.step = step

    @override
    def begin(self) -> None:
        super().begin()
        self.step.strategy.begin_step()

    @override
    def undo(self) -> None:
        self.step.strategy.abandon_step()
        self.step.precision.abandon_step()
        super().undo()

    def for_others(self, result: Any) -> Any:
        """Return a step's result without its requests to regroup, which were those of an earlier
        group; those to stop hold.
        """
        if isinstance(result, StepResult):
            numbers = result.on_hand._replace(stop=result.on_hand.stop % REGROUP)
            result = replace(result, on_hand=numbers, replicas=None)
        return super().for_others(result)

    @override
    def of_operations(self) -> dict[str, Any]:
        return {**super().of_operations(), "step": self.step.state_dict()}

    @override
    def load_operations(self, state: dict[str, Any]) -> None:
        super().load_operations(state)
        self.step.load_state_dict(state["step"])

    @property
    @override
    def shards(self) -> OptimizerShards | None:
        return self.step.strategy.shards

    @override
    def regroup(self, states: bytes | None, all_seen: bool) -> None:
        self.step.regroup()
        super().regroup(states, all_seen)


class UserState:
    """What else a loop of one's own changes, by name.

    Args:
        given: the argument `state` of the loop: objects with ``state_dict()`` and
            ``load_state_dict()``, or dicts.

    Raises:
        ConfigError: for anything else.
    """

    def __init__(self, state: Any) -> None:
        if state is not None:
            arguments.instance("state", state, Mapping, "a dict of objects by name")
        for name, value in (state or {}).items():
            if not isinstance(value, dict) and not (
                hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
            ):
                expected = "an object with state_dict() and load_state_dict(), or a dict"
                raise ConfigError(f"state[{name!r}]", expected, found=type(value).__name__)
        self._values: dict[str, Any] = dict(state or {})

    def of_program(self) -> torch.Tensor:
        """Return the values, see `recovery.TrainingState`."""
        values = self._values.items()
        return as_bytes(
            {
                name: value if isinstance(value, dict) else value.state_dict()
                for name, value in values
            }
        )

    def load_program(self, state: torch.Tensor, device: torch.device) -> None:
        """Load what `of_program` returned on another worker."""
        for name, saved in from_bytes(state, device).items():
            value = self._values[name]
            if isinstance(value, dict):
                value.clear()
                value.update(saved)
            else:
                value.load_state_dict(saved)


def _buffers_beside(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers of a model that are not in its state dict."""
    persistent = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in model.named_buffers() if name not in persistent}


def _load_buffers_beside(model: nn.Module, buffers: Mapping[str, torch.Tensor]) -> None:
    """Load what `_buffers_beside` returned on another worker, where a buffer may have another shape
    by now.
    """
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
