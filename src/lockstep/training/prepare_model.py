"""Preparation of a model for training: synchronised batch norm, memory format and compilation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from .. import arguments
from ..communicator import Communicator
from ..errors import ConfigError
from ..parallel.module_sync import move_module
from ..parallel.sync_batchnorm import SyncBatchNorm, convert
from .formats import COMPILE_MODES


def prepare_model(
    model: nn.Module,
    comm: Communicator,
    *,
    sync_batchnorm: bool = False,
    channels_last: bool = False,
    compile_model: bool = False,
    compile_mode: str = "default",
    fixed_shapes: bool = False,
) -> nn.Module:
    """Move `model` to the worker's device, and change it in place; its parameters stay the same
    objects.

    Args:
        model: any module.
        comm: communicator over the workers.
        sync_batchnorm: use the statistics of the global batch in batch norm.
        channels_last: use the channels-last memory format; 4-d inputs are converted.
        compile_model: compile it with `torch.compile`. Names in the state dict do not change.
        compile_mode: the mode of `torch.compile`; "reduce-overhead" records CUDA graphs, for models
            with small steps.
        fixed_shapes: compile separately for each shape of inputs, so that the program for a shape
            does not depend on earlier shapes; for training with virtual workers.

    Returns:
        `model`, or its replacement if it is a batch-norm layer.

    Raises:
        ConfigError: for an invalid argument.
    """
    arguments.instance("model", model, nn.Module, "a torch.nn.Module")
    arguments.instance("comm", comm, Communicator, "the communicator that lockstep.init() returns")
    flags = {
        "sync_batchnorm": sync_batchnorm,
        "channels_last": channels_last,
        "compile_model": compile_model,
    }
    for name, value in flags.items():
        arguments.flag(name, value)
    arguments.choice("compile_mode", compile_mode, COMPILE_MODES)
    if compile_mode != "default" and not compile_model:
        hint = "Pass compile_model=True as well."
        raise ConfigError("compile_mode", '"default" without compile_model', compile_mode, hint)
    move_module(model, comm.device)
    if sync_batchnorm:
        model = convert(model, comm)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        model.register_forward_pre_hook(_to_channels_last)
    if compile_model:
        _compile_in_place(
            model,
            partial(torch.compile, dynamic=False if fixed_shapes else None, mode=compile_mode),
        )
    return model


def _compile_in_place(model: nn.Module, compiled: Callable[[Any], Any]) -> None:
    """Replace the model's forward pass by a compiled one; names and parameters stay the same."""
    for layer in model.modules():
        if isinstance(layer, SyncBatchNorm):  # collectives cannot be traced
            eager = torch.compiler.disable(SyncBatchNorm.forward)  # type: ignore[no-untyped-call]
            layer.forward = MethodType(eager, layer)  # type: ignore[method-assign]
    forward = model.forward
    unbound = getattr(forward, "__func__", lambda _, *args, **kwargs: forward(*args, **kwargs))

    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return unbound(module, *args, **kwargs)

    # nn.Module.compile() does nothing for torch's own containers (seen with torch 2.13), because
    # the compiler skips frames of torch itself; `run` is a frame that it compiles. A bound method,
    # because a deep copy rebinds it; a plain function would keep running the original.
    model.forward = MethodType(compiled(run), model)


def _to_channels_last(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        x.contiguous(memory_format=torch.channels_last)
        if isinstance(x, torch.Tensor) and x.dim() == 4
        else x
        for x in inputs
    )
