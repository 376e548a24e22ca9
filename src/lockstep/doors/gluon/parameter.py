"""Parameters of a model that is on several devices: one name, a value and a gradient on each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lockstep.errors import ConfigError

from . import autograd
from .context import Context, as_contexts, cpu, tagged
from .nd import NDArray

__all__ = ["ContextError", "Home", "Parameter", "ParameterDict", "home_of"]


class ContextError(ConfigError, RuntimeError):
    """A parameter or model is not on the device that was asked for."""


@dataclass
class Home:
    """Where a layer of a model is.

    Attributes:
        contexts: what it was initialised on.
        copies: of the layer in each of them; none as long as its shapes are not known.
    """

    contexts: list[Context]
    copies: dict[Context, nn.Module] = field(default_factory=dict)

    def copy(self, context: Context, what: str) -> nn.Module:
        """The layer in a context.

        Raises:
            ContextError: when it is not there, or has no shapes yet.
        """
        if context not in self.contexts:
            raise ContextError("ctx", f"a device that {what} was initialised on, one of {self.contexts}", context)
        if not self.copies:
            hint = "Call the model once on a batch, whose shape tells it those of its parameters."
            raise ContextError(what, "parameters with shapes", "none yet", hint)
        return self.copies[context]


def home_of(layer: nn.Module, what: str) -> Home:
    """Where a layer is.

    Raises:
        ContextError: when it has not been initialised.
    """
    home: Home | None = vars(layer).get("_home")
    if home is None:
        raise ContextError(what, "to be initialised", "not yet", "Call initialize(ctx=...) of the model first.")
    return home


class Parameter:
    """One parameter of a layer, on every device that its model was initialised on.

    Args:
        layer: the layer it belongs to.
        attribute: its name there.
        name: its whole name.
    """

    def __init__(self, layer: nn.Module, attribute: str, name: str) -> None:
        self._layer, self._attribute, self.name = layer, attribute, name

    @property
    def grad_req(self) -> str:
        """What a backward pass does to its gradient: 'write', 'add', or 'null' if it is not trained."""
        own = getattr(self._layer, self._attribute)
        return getattr(own, "_lockstep_grad_req", "write") if own.requires_grad else "null"

    @grad_req.setter
    def grad_req(self, value: str) -> None:
        home: Home | None = vars(self._layer).get("_home")
        for layer in (self._layer, *(home.copies.values() if home else ())):
            autograd.want_gradient(getattr(layer, self._attribute), value)

    @property
    def shape(self) -> tuple[int, ...] | None:
        """None as long as it is not known."""
        own = getattr(self._layer, self._attribute)
        return None if is_lazy(own) else tuple(own.shape)

    def list_ctx(self) -> list[Context]:
        """The devices it is on."""
        return list(home_of(self._layer, self.name).contexts)

    def trained(self) -> dict[Context, nn.Parameter]:
        """What the copies of the model compute with, by context."""
        return {context: self._copy(context) for context in self.list_ctx()}

    def _copy(self, context: Context) -> nn.Parameter:
        found: nn.Parameter = getattr(home_of(self._layer, self.name).copy(context, self.name), self._attribute)
        return found

    def _context(self, ctx: Any) -> Context:
        contexts = home_of(self._layer, self.name).contexts
        default = contexts[0] if len(contexts) == 1 else cpu()
        return default if ctx is None else as_contexts(ctx)[0]

    def data(self, ctx: Any = None) -> NDArray:
        """Its value in a context: the only one, or cpu(0), when None. What is written into it is the model's.

        Raises:
            ContextError: when it is not there, naming where it is.
        """
        context = self._context(ctx)
        return _array(self._copy(context).detach(), context)

    def list_data(self) -> list[NDArray]:
        """Its value in every context."""
        return [self.data(context) for context in self.list_ctx()]

    def grad(self, ctx: Any = None) -> NDArray:
        """Its gradient in a context, that of the last step if there is none since; zeros before the first."""
        context = self._context(ctx)
        value = self._copy(context)
        last = getattr(value, "_lockstep_last_grad", None) if value.grad is None else value.grad
        return _array(torch.zeros_like(value).detach() if last is None else last, context)

    def list_grad(self) -> list[torch.Tensor]:
        """Its gradient in every context."""
        return [self.grad(context) for context in self.list_ctx()]

    def set_data(self, value: torch.Tensor) -> None:
        """Set its value in every context."""
        with torch.no_grad():
            for own in self.trained().values():
                own.copy_(value)

    def zero_grad(self) -> None:
        """Forget its gradients."""
        for own in self.trained().values():
            own.grad = None

    def __repr__(self) -> str:
        return f"Parameter({self.name}, shape={self.shape})"


class ParameterDict(dict[str, Parameter]):
    """Parameters by name."""

    def get(self, name: str, default: Any = None) -> Any:
        """The parameter of that name, or the only one whose name ends with it."""
        ending = [own for own in self if own == name or own.endswith(f".{name}")]
        return self[ending[0]] if len(ending) == 1 else super().get(name, default)

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for parameter in self.values():
            parameter.zero_grad()

    @classmethod
    def of(cls, module: nn.Module) -> ParameterDict:
        """All parameters of a module and its layers."""
        return cls((name, Parameter(layer, attribute, name)) for name, layer, attribute in _named(module))


def _array(tensor: torch.Tensor, context: Context) -> NDArray:
    return tagged(tensor.as_subclass(NDArray), context)  # type: ignore[return-value]


def _named(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    for prefix, layer in module.named_modules():
        for attribute, parameter in layer._parameters.items():
            if parameter is not None:
                yield f"{prefix}.{attribute}" if prefix else attribute, layer, attribute
