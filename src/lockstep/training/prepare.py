"""Changes to a model before training that the training step need not know of."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from ..communicator import Communicator
from ..strategies.sync_batchnorm import SyncBatchNorm, convert

__all__ = ["prepare_model"]


def prepare_model(
    model: nn.Module,
    comm: Communicator,
    *,
    sync_batchnorm: bool = False,
    channels_last: bool = False,
    compile_model: bool = False,
    fixed_shapes: bool = False,
) -> nn.Module:
    """`model` on the worker's device, changed in place as asked; its parameters stay the same objects.

    Args:
        model: any module.
        comm: the workers.
        sync_batchnorm: batch norm with the statistics of the global batch.
        channels_last: convolutions with channels in the innermost dimension; 4-d inputs are converted.
        compile_model: run it through `torch.compile`. Names in the state dict do not change.
        fixed_shapes: compile once for each shape of inputs, so that what is run for a shape does not depend on the
            shapes that came before it; for training with shards.
    """
    model = model.to(comm.device)
    if sync_batchnorm:
        model = convert(model, comm)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        model.register_forward_pre_hook(_to_channels_last)
    if compile_model:
        _compile_in_place(model, partial(torch.compile, dynamic=False) if fixed_shapes else torch.compile)
    return model


def _compile_in_place(model: nn.Module, compiled: Callable[[Any], Any]) -> None:
    """Compile the model's forward, and keep the model itself, with its names and its optimizer."""
    for layer in model.modules():
        if isinstance(layer, SyncBatchNorm):  # collectives cannot be traced
            eager = torch.compiler.disable(SyncBatchNorm.forward)  # type: ignore[no-untyped-call]
            layer.forward = MethodType(eager, layer)  # type: ignore[method-assign]
    forward = model.forward
    of_class = getattr(forward, "__func__", lambda _, *args, **kwargs: forward(*args, **kwargs))

    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return of_class(module, *args, **kwargs)

    # nn.Module.compile() does nothing for torch's own containers (seen with torch 2.13): the compiler passes over
    # frames of torch itself, so a Sequential has none that it would take. This frame is ours. As a method it follows
    # a deep copy, which would go on running the model that it was made of otherwise.
    model.forward = MethodType(compiled(run), model)


def _to_channels_last(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        x.contiguous(memory_format=torch.channels_last) if isinstance(x, torch.Tensor) and x.dim() == 4 else x
        for x in inputs
    )
