"""Layers that virtual workers do not support, because their bits depend on the number of
workers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ..errors import ConfigError
from .sync_batchnorm import SyncBatchNorm


@dataclass(frozen=True)
class UnsupportedLayer:
    """A kind of unsupported layer.

    Attributes:
        name: its name in the documentation.
        matches: (layer, device) → whether the layer is of this kind.
        reason: why its bits depend on the number of workers.
        instead: what to use instead.
    """

    name: str
    matches: Callable[[nn.Module, torch.device], bool]
    reason: str
    instead: str


UNSUPPORTED = (
    UnsupportedLayer(
        "SyncBatchNorm of torch",
        lambda layer, _: isinstance(layer, nn.SyncBatchNorm),
        "it uses the shards that the workers compute at the same time, which depend on their "
        "number",
        "Use lockstep.prepare_model(..., sync_batchnorm=True), on the CPU, or ordinary batch norm.",
    ),
    UnsupportedLayer(
        "SyncBatchNorm of Lockstep (sync_batchnorm), on a GPU",
        lambda layer, device: isinstance(layer, SyncBatchNorm) and device.type != "cpu",
        "the backward passes of shards that wait for each other need a thread each, and autograd "
        "has one for each GPU",
        "Use ordinary batch norm, whose statistics are then those of a shard, or a group norm.",
    ),
    UnsupportedLayer(
        "Embedding and EmbeddingBag with sparse=True",
        lambda layer, _: isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse,
        "its gradients are sparse, and their sums have no fixed order",
        "Make it with sparse=False.",
    ),
    UnsupportedLayer(
        "Embedding and EmbeddingBag with max_norm",
        lambda layer, _: isinstance(layer, (nn.Embedding, nn.EmbeddingBag))
        and layer.max_norm is not None,
        "its forward pass changes its weights, only on the worker that looks rows up",
        "Leave max_norm out, and normalise the weights after each step.",
    ),
    UnsupportedLayer(
        "RNN, LSTM and GRU with dropout, on a GPU",
        lambda layer, device: isinstance(layer, nn.RNNBase)
        and layer.dropout > 0
        and device.type == "cuda",
        "cuDNN keeps a random state of its own, which cannot be set for each shard",
        "Make it with dropout=0, and put nn.Dropout between layers of one each.",
    ),
    UnsupportedLayer(
        "DistributedDataParallel and DataParallel",
        lambda layer, _: isinstance(layer, (DistributedDataParallel, DataParallel)),
        "it sums gradients itself, in an order that depends on the number of workers",
        "Pass the model that it wraps.",
    ),
)
"""Layers that keep other state than parameters and registered buffers cannot be detected."""


def check_supported(model: nn.Module, device: torch.device) -> None:
    """Check that `model` has no layer listed in `UNSUPPORTED`; layers with ``same_bits = True`` are
    skipped.

    Raises:
        ConfigError: naming the first one, the reason, and a remedy.
    """
    for name, layer in model.named_modules():
        if getattr(layer, "same_bits", False):
            continue
        for kind in UNSUPPORTED:
            if kind.matches(layer, device):
                where = f"{type(layer).__name__} at {name or 'its top'}: {kind.reason}"
                hint = f"{kind.instead} If you know better, set its attribute same_bits = True."
                raise ConfigError(
                    "model",
                    "layers that give the same bits at any number of workers",
                    found=where,
                    hint=hint,
                )


def check_joint_passes(model: nn.Module) -> None:
    """Check that `model` supports joint passes of several shards, which synchronised batch norm
    needs.

    Raises:
        ConfigError: if it is compiled, or another layer has running statistics, which the shards
            would change in turn.
    """
    for name, layer in model.named_modules():
        where = f"{type(layer).__name__} at {name or 'its top'}"
        if (
            isinstance(layer, _NormBase)
            and layer.track_running_stats
            and not isinstance(layer, SyncBatchNorm)
        ):
            hint = "Make it without running statistics, or leave sync_batchnorm out."
            raise ConfigError(
                "model",
                "no other running statistics, with sync_batchnorm and virtual workers",
                found=where,
                hint=hint,
            )
        if layer._compiled_call_impl is not None or hasattr(
            layer.forward, "_torchdynamo_orig_callable"
        ):
            hint = "Leave out one of the three."
            raise ConfigError(
                "model",
                "one that is not compiled, with sync_batchnorm and virtual workers",
                found=where,
                hint=hint,
            )


def check_synchronised(model: nn.Module, one_pass: bool) -> list[nn.Module]:
    """Check that a loop of one's own supports the synchronised batch norm of `model`, and return
    its layers; on one worker those that `convert` has marked.

    Args:
        model: the model.
        one_pass: whether there is one pass for each worker, and not one for each shard after
            another.

    Raises:
        ConfigError: if there are several passes: of the shards of a batch, those that workers
            compute at the same time would share their statistics, and how many these are depends on
            the number of workers. If a layer is torch's: it adds up gradients of means over parts,
            which may be of different sizes.
    """
    layers = []
    for name, layer in model.named_modules():
        where = name or "its top"
        if isinstance(layer, nn.SyncBatchNorm):
            raise ConfigError(
                "model",
                "Lockstep's synchronised batch norm with prepare()",
                found=f"torch's SyncBatchNorm at {where}, whose gradients are others where the "
                "workers' parts of a batch are of different sizes",
                hint="Use lockstep.prepare_model(model, comm, sync_batchnorm=True) with ordinary "
                "batch norm.",
            )
        if isinstance(layer, SyncBatchNorm) or getattr(layer, "synchronised", False):
            layers.append(layer)
            if not one_pass:
                raise ConfigError(
                    "model",
                    "batch norm that is not synchronised, with prepare(virtual_workers=...)",
                    found=f"sync_batchnorm of {where}: the body of the loop runs for one shard "
                    "after another, and has no statistics of the whole batch",
                    hint="Leave sync_batchnorm out: the statistics are then those of a shard, the "
                    "same on any number of workers. Or train with lockstep.Trainer or "
                    "lockstep.TrainStep, which run the shards of a batch together.",
                )
    return layers
