"""Cuts batches into a part for each device."""

from __future__ import annotations

from typing import Any

import torch

from lockstep.errors import ConfigError
from lockstep.replicas import scatter

from .context import as_contexts, tagged
from .nd import NDArray

__all__ = ["split_and_load"]


def split_and_load(data: Any, ctx_list: Any, batch_axis: int = 0, even_split: bool = True) -> list[torch.Tensor]:
    """A part of `data` for each context, on it: contiguous, in order, the first ones taking the rest.

    Args:
        data: a tensor, or what `torch.as_tensor` takes.
        ctx_list: contexts, or names of devices.
        batch_axis: the dimension of the samples.
        even_split: refuse a number of samples that the contexts cannot share evenly.

    Raises:
        ConfigError: for samples that are not shared evenly, and devices that are not there.
    """
    contexts = as_contexts(ctx_list)
    tensor = torch.as_tensor(data)
    samples = tensor.shape[batch_axis]
    if even_split and samples % len(contexts):
        hint = "Pass even_split=False for parts that differ by one sample."
        raise ConfigError("data", f"a number of samples that {len(contexts)} devices share evenly", samples, hint)
    parts = scatter(tensor, [context.device for context in contexts], batch_axis)
    return [tagged(part.as_subclass(NDArray), context) for part, context in zip(parts, contexts, strict=True)]
