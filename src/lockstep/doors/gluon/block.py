"""Models that are on a list of devices, and compute where their input is."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

import lockstep
from lockstep.replicas import replicate

from . import autograd, nd
from .context import Context, as_contexts, context_of, cpu, tagged
from .init import Initializer, Uniform
from .parameter import Home, ParameterDict, home_of
from .sym import Symbol

__all__ = ["Block", "HybridBlock"]


class _Inside(threading.local):
    """Whether a block is being computed, whose layers are then no models of their own."""

    now = False


_INSIDE = _Inside()


@contextmanager
def _inside() -> Iterator[None]:
    before, _INSIDE.now = _INSIDE.now, True
    try:
        yield
    finally:
        _INSIDE.now = before


class Block(nn.Module):
    """A layer or model; subclasses have `forward`.

    After `initialize(ctx=[...])` it has a copy on each of these devices, and a call computes where its input is. It
    is in training within `autograd.record()`, and only there is a graph made. Sizes of input that were not given are
    learnt from the first batch.
    """

    def __init__(self, prefix: str | None = None, params: Any = None) -> None:
        super().__init__()
        self._home: Home | None = None
        self._initializer: Initializer | None = None
        self._compiled = False
        self._example: tuple[Any, ...] = ()

    @property
    def params(self) -> ParameterDict:
        """Its parameters by name."""
        return ParameterDict.of(self)

    def collect_params(self) -> ParameterDict:
        """All parameters, those of its layers as well."""
        return ParameterDict.of(self)

    def initialize(
        self, init: Initializer | None = None, ctx: Any = None, verbose: bool = False, force_reinit: bool = False
    ) -> None:
        """Give the weights first values, the same on all devices of `ctx`.

        Args:
            init: fills a weight; uniform from -0.07 to 0.07 when None. Biases are zero, scales of normalisation one.
            ctx: a context or a list of them; the processor when None.
            verbose: accepted, and does nothing.
            force_reinit: do so again; otherwise a model that is initialised stays as it is, which a warning says.

        Raises:
            ConfigError: for devices that are not there.
        """
        if self._home is not None and not force_reinit:
            warnings.warn(
                f"initialize: already initialised on {self._home.contexts}; nothing was changed. Pass "
                "force_reinit=True for new values or devices.",
                stacklevel=2,
            )
            return
        contexts = as_contexts(cpu() if ctx is None else ctx)
        for layer in self.modules():
            vars(layer)["_home"] = Home(contexts)
        self._initializer = init or Uniform()
        if not any(is_lazy(parameter) for parameter in self.parameters()):
            self._spread()

    def hybridize(self, active: bool = True, **options: Any) -> None:
        """Let it run compiled from now on, see `lockstep.hybridize`; nothing for a model that is no HybridBlock."""

    def _spread(self) -> None:
        """Set first values, and make the copies."""
        initializer = self._initializer or Uniform()
        home = home_of(self, type(self).__name__)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                _fill(name, parameter, initializer)
        for layer in self.modules():
            vars(layer)["_home"] = None  # no part of a copy
        copies = replicate(self, [context.device for context in home.contexts])
        for copy in copies:
            for original, parameter in zip(self.parameters(), copy.parameters(), strict=True):
                wanted = "write" if original.requires_grad else "null"
                autograd.want_gradient(parameter, getattr(original, "_lockstep_grad_req", wanted))
        for layer, *own in zip(self.modules(), *(copy.modules() for copy in copies), strict=True):
            vars(layer)["_home"] = Home(home.contexts, dict(zip(home.contexts, own, strict=True)))
        if self._compiled:
            self._compile()

    def _compile(self, **options: Any) -> None:
        home = vars(self).get("_home")
        for copy in home.copies.values() if home else ():
            lockstep.hybridize(copy, **options)

    def __call__(self, *args: Any) -> Any:
        """Compute on the copy where the input is.

        Raises:
            ContextError: when it has not been initialised there.
        """
        if _INSIDE.now:
            return super().__call__(*args)
        name = type(self).__name__
        home = home_of(self, name)
        if any(isinstance(arg, Symbol) for arg in args):
            return self._symbol(home, name)
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        plain = tuple(arg.as_subclass(torch.Tensor) if isinstance(arg, torch.Tensor) else arg for arg in args)
        if not home.copies:
            self._learn_shapes(plain)
            home = home_of(self, name)
        self._example = tuple(_two_samples(arg) if isinstance(arg, torch.Tensor) else arg for arg in plain)
        context = context_of(tensors[0]) if tensors else home.contexts[0]
        return _compute(home.copy(context, name), plain, context)

    def _symbol(self, home: Home, name: str) -> Symbol:
        """The model as a program, for inputs as those of the last call."""
        with _inside(), torch.no_grad():
            model = replicate(home.copy(home.contexts[0], name), ["cpu"])[0].eval()
            args = tuple(arg.cpu() if isinstance(arg, torch.Tensor) else arg for arg in self._example)
            return Symbol(f"{name.lower()}_fwd", torch.export.export(model, args))

    def _learn_shapes(self, args: tuple[Any, ...]) -> None:
        moved = [arg.cpu() if isinstance(arg, torch.Tensor) else arg for arg in args]
        self.eval()
        with _inside(), torch.no_grad():
            super().__call__(*moved)
        self._spread()


class HybridBlock(Block):
    """A block that can be compiled and exported; subclasses have `hybrid_forward(F, x)` or `forward(x)`."""

    def hybridize(self, active: bool = True, **options: Any) -> None:
        """Let it run compiled from its next call on, or no longer.

        Args:
            active: whether to.
            options: of `lockstep.hybridize`; `static_alloc` and `static_shape` are accepted, and do nothing.
        """
        for name in ("static_alloc", "static_shape"):
            options.pop(name, None)
        self._compiled = active
        if active:
            self._compile(**options)
        else:
            for copy in self._home.copies.values() if self._home else ():
                copy._compiled_call_impl = None

    def forward(self, *args: Any) -> Any:
        """Calls `hybrid_forward` with the module of array functions."""
        return self.hybrid_forward(nd, *args)

    def hybrid_forward(self, F: Any, *args: Any) -> Any:  # noqa: N803 - Gluon's name for it
        """What a subclass computes."""
        raise NotImplementedError(f"{type(self).__name__} needs a method hybrid_forward(F, x) or forward(x)")

    def export(self, path: str, epoch: int = 0) -> list[Any]:
        """Save the model as programs, see `lockstep.export`: ``path.pt2``, and ``path.onnx`` with the extra "onnx".

        Args:
            path: where, without a suffix.
            epoch: accepted, and does nothing.

        Raises:
            ContextError: when it has not been called yet, and so does not know its input.
        """
        home = home_of(self, type(self).__name__)
        model = home.copy(home.contexts[0], type(self).__name__)
        with _inside():
            return lockstep.export(model, self._example, f"{path}.pt2")


def _two_samples(tensor: torch.Tensor) -> torch.Tensor:
    """An example for a program that shall take any number of samples; from one of them it would take one alone."""
    return tensor.detach()[[0, -1]] if tensor.dim() and len(tensor) else tensor.detach()


def _compute(model: nn.Module, args: tuple[Any, ...], context: Context) -> Any:
    if model.training != autograd.is_training():
        model.train(autograd.is_training())
    with _inside(), torch.set_grad_enabled(autograd.is_recording()):
        found = model(*args)
    return tagged(found.as_subclass(nd.NDArray), context) if isinstance(found, torch.Tensor) else found


def _fill(name: str, parameter: torch.Tensor, initializer: Initializer) -> None:
    if parameter.dim() > 1:
        initializer(parameter)
    else:
        nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)
