"""Parameters of a model on several devices: one name, and a value and a gradient on each device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lockstep.errors import ConfigError

from . import autograd
from .context import Context, as_contexts, cpu, set_context
from .nd import NDArray

__all__ = ["ContextError", "Parameter", "ParameterDict", "Placement", "placement_of"]


class ContextError(ConfigError, RuntimeError):
    """A parameter or model has not been initialised on the requested device."""


@dataclass
class Placement:
    """The devices of a layer.

    Attributes:
        contexts: the contexts on which it was initialised.
        copies: the copy of the layer in each context; empty until all shapes are known.
    """

    contexts: list[Context]
    copies: dict[Context, nn.Module] = field(default_factory=dict)

    def copy(self, context: Context, what: str) -> nn.Module:
        """Return the copy of the layer in `context`.

        Args:
            context: the context.
            what: the name of the layer or parameter, for the error.

        Raises:
            ContextError: there is no copy in this context, or the shapes are not known yet.
        """
        if context not in self.contexts:
            raise ContextError(
                "ctx", f"a device that {what} was initialised on, one of {self.contexts}", context
            )
        if not self.copies:
            hint = "Call the model once on a batch, from which the shapes are inferred."
            raise ContextError(
                what, "parameters with known shapes", found="unknown shapes", hint=hint
            )
        return self.copies[context]


def placement_of(layer: nn.Module, what: str) -> Placement:
    """Return the placement of a layer.

    Raises:
        ContextError: the layer has not been initialised.
    """
    placement: Placement | None = vars(layer).get("_placement")
    if placement is None:
        hint = "Call initialize(ctx=...) of the model first."
        raise ContextError(what, "to be initialised", found="not initialised", hint=hint)
    return placement


class Parameter:
    """One parameter of a layer, on every device that its model was initialised on.

    Args:
        layer: the layer that has the parameter.
        attribute: the name of the parameter in the layer.
        name: the name of the parameter in the model.
    """

    def __init__(self, layer: nn.Module, attribute: str, name: str) -> None:
        self._layer = layer
        self._attribute = attribute
        self.name = name

    @property
    def grad_req(self) -> str:
        """What a backward pass does with the gradient: 'write', 'add' or 'null'; see
        `autograd.set_grad_req`.
        """
        parameter = getattr(self._layer, self._attribute)
        return (
            getattr(parameter, "_lockstep_grad_req", "write") if parameter.requires_grad else "null"
        )

    @grad_req.setter
    def grad_req(self, value: str) -> None:
        placement: Placement | None = vars(self._layer).get("_placement")
        for layer in (self._layer, *(placement.copies.values() if placement else ())):
            autograd.set_grad_req(getattr(layer, self._attribute), value)

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape; None until it is known."""
        parameter = getattr(self._layer, self._attribute)
        return None if is_lazy(parameter) else tuple(parameter.shape)

    def list_ctx(self) -> list[Context]:
        """Return the contexts of the parameter."""
        return list(placement_of(self._layer, self.name).contexts)

    def copies(self) -> dict[Context, nn.Parameter]:
        """Return the parameter of each copy of the model, by context."""
        return {context: self._copy(context) for context in self.list_ctx()}

    def _copy(self, context: Context) -> nn.Parameter:
        copy = placement_of(self._layer, self.name).copy(context, self.name)
        parameter: nn.Parameter = getattr(copy, self._attribute)
        return parameter

    def _context(self, ctx: Any) -> Context:
        """Return `ctx` as a context; for None the only context of the parameter, or else
        `cpu(0)`.
        """
        if ctx is not None:
            return as_contexts(ctx)[0]
        contexts = self.list_ctx()
        return contexts[0] if len(contexts) == 1 else cpu()

    def data(self, ctx: Any = None) -> NDArray:
        """Return the value in a context, as a view: writing to it changes the model.

        Args:
            ctx: the context; None for the only context of the parameter, or else `cpu(0)`.

        Raises:
            ContextError: the parameter is not in this context; the message lists its contexts.
        """
        context = self._context(ctx)
        return _array(self._copy(context).detach(), context)

    def list_data(self) -> list[NDArray]:
        """Return the value in every context."""
        return [self.data(context) for context in self.list_ctx()]

    def grad(self, ctx: Any = None) -> NDArray:
        """Return the gradient in a context; without a new one that of the last step, before the
        first step zeros.
        """
        context = self._context(ctx)
        parameter = self._copy(context)
        gradient = (
            getattr(parameter, "_lockstep_last_grad", None)
            if parameter.grad is None
            else parameter.grad
        )
        return _array(
            torch.zeros_like(parameter).detach() if gradient is None else gradient, context
        )

    def list_grad(self) -> list[torch.Tensor]:
        """Return the gradient in every context."""
        return [self.grad(context) for context in self.list_ctx()]

    def set_data(self, value: torch.Tensor) -> None:
        """Set the value in every context."""
        with torch.no_grad():
            for parameter in self.copies().values():
                parameter.copy_(value)

    def zero_grad(self) -> None:
        """Remove the gradient in every context."""
        for parameter in self.copies().values():
            parameter.grad = None

    def __repr__(self) -> str:
        return f"Parameter({self.name}, shape={self.shape})"


class ParameterDict(dict[str, Parameter]):
    """Parameters by name."""

    def get(self, name: str, default: Any = None) -> Any:
        """Return the parameter `name`, or the only one whose name ends with ".name"."""
        matches = [key for key in self if key == name or key.endswith(f".{name}")]
        return self[matches[0]] if len(matches) == 1 else super().get(name, default)

    def zero_grad(self) -> None:
        """Remove all gradients."""
        for parameter in self.values():
            parameter.zero_grad()

    @classmethod
    def of(cls, module: nn.Module) -> ParameterDict:
        """Return all parameters of a module and its submodules."""
        return cls(
            (name, Parameter(layer, attribute, name))
            for name, layer, attribute in _named_parameters(module)
        )


def _array(tensor: torch.Tensor, context: Context) -> NDArray:
    return set_context(tensor.as_subclass(NDArray), context)  # type: ignore[return-value]


def _named_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield (name, layer, attribute) of each parameter."""
    for prefix, layer in module.named_modules():
        for attribute, parameter in layer._parameters.items():
            if parameter is not None:
                yield f"{prefix}.{attribute}" if prefix else attribute, layer, attribute
