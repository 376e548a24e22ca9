"""Splits batches over devices."""

from __future__ import annotations

from typing import Any

import torch

from lockstep.errors import ConfigError
from lockstep.replicas import scatter

from .context import as_contexts, set_context
from .nd import NDArray

__all__ = ["split_and_load"]


def split_and_load(
    data: Any, ctx_list: Any, batch_axis: int = 0, even_split: bool = True
) -> list[torch.Tensor]:
    """Split `data` into contiguous parts and copy one to each context; the first parts get the
    remaining samples.

    Args:
        data: a tensor, or anything that `torch.as_tensor` accepts.
        ctx_list: contexts, or names of devices.
        batch_axis: the dimension of the samples.
        even_split: raise an error if the number of samples is not divisible by the number of
            contexts.

    Raises:
        ConfigError: the samples cannot be split evenly, or a device does not exist.
    """
    contexts = as_contexts(ctx_list)
    tensor = torch.as_tensor(data)
    samples = tensor.shape[batch_axis]
    if even_split and samples % len(contexts):
        hint = "Pass even_split=False for parts that differ by one sample."
        raise ConfigError(
            "data", f"a number of samples that {len(contexts)} devices share evenly", samples, hint
        )
    parts = scatter(tensor, [context.device for context in contexts], batch_axis)
    return [
        set_context(part.as_subclass(NDArray), context)
        for part, context in zip(parts, contexts, strict=True)
    ]
