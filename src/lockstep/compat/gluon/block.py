"""`Block` and `HybridBlock`: models on a list of devices, each computing on the device of its
input.
"""

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
from lockstep.compilation import compile_or_fallback
from lockstep.replicas import replicate

from . import autograd, nd
from .context import Context, as_contexts, context_of, cpu, set_context
from .init import Initializer, Uniform
from .parameter import ParameterDict, Placement, placement_of
from .sym import Symbol

__all__ = ["Block", "HybridBlock"]


class _CallState(threading.local):
    """Whether a model is being called; the blocks that it calls are its layers, and compute on the
    same device.
    """

    in_model = False


_CALL = _CallState()


@contextmanager
def _layer_calls() -> Iterator[None]:
    """Return a context in which blocks are called as layers of a model."""
    previous = _CALL.in_model
    _CALL.in_model = True
    try:
        yield
    finally:
        _CALL.in_model = previous


class Block(nn.Module):
    """A layer or model; subclasses define `forward`.

    After `initialize(ctx=[...])` it has a copy on each of these devices, and a call computes on the
    device of its input. Within `autograd.record()` it is in training mode and gradients are
    recorded. Input sizes that are not given are inferred from the first batch.
    """

    def __init__(self, prefix: str | None = None, params: Any = None) -> None:
        super().__init__()
        self._placement: Placement | None = None
        # on one device: it computes there at once; torch 2.9 compiles no `_CALL.in_model`
        self._is_copy = False
        self._initializer: Initializer | None = None
        self._compiled = False
        self._example: tuple[Any, ...] = ()

    @property
    def params(self) -> ParameterDict:
        """The parameters of the block and its layers, by name."""
        return ParameterDict.of(self)

    def collect_params(self) -> ParameterDict:
        """Return the parameters of the block and its layers, by name."""
        return ParameterDict.of(self)

    def initialize(
        self,
        init: Initializer | None = None,
        ctx: Any = None,
        verbose: bool = False,
        force_reinit: bool = False,
    ) -> None:
        """Initialise the parameters, to the same values on all devices of `ctx`.

        Args:
            init: the initializer of weights; None for `Uniform`. Biases are initialised to zero,
                scales of normalisation layers to one.
            ctx: a context, or a list of them; None for the CPU.
            verbose: accepted and ignored.
            force_reinit: initialise an initialised model again; otherwise it is not changed, and a
                warning is issued.

        Raises:
            ConfigError: a device does not exist.
        """
        if self._placement is not None and not force_reinit:
            warnings.warn(
                f"initialize: already initialised on {self._placement.contexts}; nothing was "
                "changed. Pass force_reinit=True for new values or devices.",
                stacklevel=2,
            )
            return
        # one copy for each device: its parts of a batch, if it is listed several times, add to the
        # same gradient
        contexts = list(dict.fromkeys(as_contexts(cpu() if ctx is None else ctx)))
        for layer in self.modules():
            vars(layer)["_placement"] = Placement(contexts)
        self._initializer = init or Uniform()
        if not any(is_lazy(parameter) for parameter in self.parameters()):
            self._initialize_copies()

    def hybridize(self, active: bool = True, **options: Any) -> None:
        """Compile the block if it is a `HybridBlock`; do nothing otherwise."""

    def _initialize_copies(self) -> None:
        """Initialise the parameters, and copy the block to each context."""
        initializer = self._initializer or Uniform()
        placement = placement_of(self, type(self).__name__)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                _initialize_parameter(name, parameter, initializer)
        for layer in self.modules():
            vars(layer)["_placement"] = None  # must not be copied
        copies = replicate(self, [context.device for context in placement.contexts])
        for copy in copies:
            for original, parameter in zip(self.parameters(), copy.parameters(), strict=True):
                default = "write" if original.requires_grad else "null"
                autograd.set_grad_req(parameter, getattr(original, "_lockstep_grad_req", default))
        for layer, *layer_copies in zip(
            self.modules(), *(copy.modules() for copy in copies), strict=True
        ):
            by_context = dict(zip(placement.contexts, layer_copies, strict=True))
            vars(layer)["_placement"] = Placement(placement.contexts, by_context)
            for layer_copy in layer_copies:
                vars(layer_copy)["_is_copy"] = True
        if self._compiled:
            self._compile()

    def _copies(self) -> list[nn.Module]:
        return list(self._placement.copies.values()) if self._placement else []

    def _compile(self, **options: Any) -> None:
        for copy in self._copies():
            compile_or_fallback(copy, **options)

    def __call__(self, *args: Any) -> Any:
        """Compute on the copy in the context of the first tensor in `args`.

        Raises:
            ContextError: the block has not been initialised in this context.
        """
        if self._is_copy or _CALL.in_model:
            return super().__call__(*args)
        name = type(self).__name__
        placement = placement_of(self, name)
        if any(isinstance(arg, Symbol) for arg in args):
            return self._export_symbol(placement, name)
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        torch_args = tuple(
            arg.as_subclass(torch.Tensor) if isinstance(arg, torch.Tensor) else arg for arg in args
        )
        if not placement.copies:
            self._infer_shapes(torch_args)
            placement = placement_of(self, name)
        self._example = tuple(
            _two_samples(arg) if isinstance(arg, torch.Tensor) else arg for arg in torch_args
        )
        context = context_of(tensors[0]) if tensors else placement.contexts[0]
        return _compute(placement.copy(context, name), torch_args, context)

    def _export_symbol(self, placement: Placement, name: str) -> Symbol:
        """Return the model as a program for inputs like those of the last call."""
        with _layer_calls(), torch.no_grad():
            model = replicate(placement.copy(placement.contexts[0], name), ["cpu"])[0].eval()
            args = tuple(
                arg.cpu() if isinstance(arg, torch.Tensor) else arg for arg in self._example
            )
            return Symbol(f"{name.lower()}_fwd", torch.export.export(model, args))

    def _infer_shapes(self, args: tuple[Any, ...]) -> None:
        cpu_args = [arg.cpu() if isinstance(arg, torch.Tensor) else arg for arg in args]
        self.eval()
        with _layer_calls(), torch.no_grad():
            super().__call__(*cpu_args)
        self._initialize_copies()


class HybridBlock(Block):
    """A block that can be compiled and exported; subclasses define `hybrid_forward(F, x)` or
    `forward(x)`.
    """

    def hybridize(self, active: bool = True, **options: Any) -> None:
        """Run the block compiled from its next call on, or uncompiled.

        Args:
            active: whether to run it compiled.
            options: options of `lockstep.compilation.compile_or_fallback`; `static_alloc` and
                `static_shape` are accepted and ignored.
        """
        for name in ("static_alloc", "static_shape"):
            options.pop(name, None)
        self._compiled = active
        if active:
            self._compile(**options)
        else:
            for copy in self._copies():
                copy._compiled_call_impl = None

    def forward(self, *args: Any) -> Any:
        """Call `hybrid_forward` with the module `nd` as `F`."""
        return self.hybrid_forward(nd, *args)

    def hybrid_forward(self, F: Any, *args: Any) -> Any:  # noqa: N803 - Gluon's name for it
        """Compute the output; subclasses override this or `forward`."""
        raise NotImplementedError(
            f"{type(self).__name__} needs a method hybrid_forward(F, x) or forward(x)"
        )

    def export(self, path: str, epoch: int = 0) -> list[Any]:
        """Save the model as ``path.pt2`` and, with the extra "onnx", as ``path.onnx``; see
        `lockstep.export`.

        Args:
            path: the path of the files, without a suffix.
            epoch: accepted and ignored.

        Raises:
            ContextError: the model has not been called yet, so that the shapes of its input are not
                known.
        """
        placement = placement_of(self, type(self).__name__)
        model = placement.copy(placement.contexts[0], type(self).__name__)
        with _layer_calls():
            return lockstep.export(model, self._example, f"{path}.pt2")


def _two_samples(tensor: torch.Tensor) -> torch.Tensor:
    """Return two samples of `tensor`: from an example of one, `torch.export` infers a fixed number
    of samples.
    """
    return tensor.detach()[[0, -1]] if tensor.dim() and len(tensor) else tensor.detach()


def _compute(model: nn.Module, args: tuple[Any, ...], context: Context) -> Any:
    if model.training != autograd.is_training():
        model.train(autograd.is_training())
    with _layer_calls(), torch.set_grad_enabled(autograd.is_recording()):
        output = model(*args)
    return (
        set_context(output.as_subclass(nd.NDArray), context)
        if isinstance(output, torch.Tensor)
        else output
    )


def _initialize_parameter(name: str, parameter: torch.Tensor, initializer: Initializer) -> None:
    if parameter.dim() > 1:
        initializer(parameter)
    else:
        nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)
