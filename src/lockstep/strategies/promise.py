"""Layers that would not give the same bits at any number of workers, with the reasons."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ..errors import ConfigError
from .sync_batchnorm import SyncBatchNorm

__all__ = ["BREAKING", "Breaking", "check_meeting", "check_modules"]


@dataclass(frozen=True)
class Breaking:
    """A kind of layer that is refused.

    Attributes:
        name: as documents name it.
        found: (layer, device) → whether it is one.
        reason: why it would break the promise.
        instead: what to do.
    """

    name: str
    found: Callable[[nn.Module, torch.device], bool]
    reason: str
    instead: str


BREAKING = (
    Breaking(
        "SyncBatchNorm of torch",
        lambda layer, _: isinstance(layer, nn.SyncBatchNorm),
        "it looks at the shards that workers have reached at the same moment, which depends on their number",
        "Use lockstep.prepare_model(..., sync_batchnorm=True), on the CPU, or ordinary batch norm.",
    ),
    Breaking(
        "SyncBatchNorm of Lockstep (sync_batchnorm), on a GPU",
        lambda layer, device: isinstance(layer, SyncBatchNorm) and device.type != "cpu",
        "the backward passes of shards that wait for each other need a thread each, and there share one",
        "Use ordinary batch norm, whose statistics are then those of a shard, or a group norm.",
    ),
    Breaking(
        "Embedding and EmbeddingBag with sparse=True",
        lambda layer, _: isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse,
        "its gradients are sparse, and their sums have no fixed order",
        "Make it with sparse=False.",
    ),
    Breaking(
        "Embedding and EmbeddingBag with max_norm",
        lambda layer, _: isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.max_norm is not None,
        "its forward pass changes its weights, on the worker that looks rows up alone",
        "Leave max_norm out, and norm the weights after each step.",
    ),
    Breaking(
        "RNN, LSTM and GRU with dropout, on a GPU",
        lambda layer, device: isinstance(layer, nn.RNNBase) and layer.dropout > 0 and device.type == "cuda",
        "cuDNN keeps a random state of its own, which cannot be set for each shard",
        "Make it with dropout=0, and put nn.Dropout between layers of one each.",
    ),
    Breaking(
        "DistributedDataParallel and DataParallel",
        lambda layer, _: isinstance(layer, (DistributedDataParallel, DataParallel)),
        "it sums gradients itself, in an order that depends on the number of workers",
        "Pass the model that it wraps.",
    ),
)
"""Whatever else a layer does outside of parameters and registered buffers cannot be seen here."""


def check_modules(model: nn.Module, device: torch.device) -> None:
    """See that `model` has no layer of the kinds in `BREAKING`, but for those with an attribute ``same_bits = True``.

    Raises:
        ConfigError: naming the first, the reason, and what to do.
    """
    for name, layer in model.named_modules():
        if getattr(layer, "same_bits", False):
            continue
        for kind in BREAKING:
            if kind.found(layer, device):
                where = f"{type(layer).__name__} at {name or 'its top'}: {kind.reason}"
                hint = f"{kind.instead} If you know better, set its attribute same_bits = True."
                raise ConfigError(
                    "model", "layers that give the same bits at any number of workers", found=where, hint=hint
                )


def check_meeting(model: nn.Module) -> None:
    """See that the passes of several shards can go through `model` at once, as synchronised batch norm needs.

    Raises:
        ConfigError: when it is compiled, or another layer has running statistics, which each shard would find changed.
    """
    for name, layer in model.named_modules():
        where = f"{type(layer).__name__} at {name or 'its top'}"
        if isinstance(layer, _NormBase) and layer.track_running_stats and not isinstance(layer, SyncBatchNorm):
            hint = "Make it without running statistics, or leave sync_batchnorm out."
            raise ConfigError(
                "model", "no other running statistics, with sync_batchnorm and shards", found=where, hint=hint
            )
        if layer._compiled_call_impl is not None or hasattr(layer.forward, "_torchdynamo_orig_callable"):
            hint = "Leave out one of the three."
            raise ConfigError(
                "model", "one that is not compiled, with sync_batchnorm and shards", found=where, hint=hint
            )
