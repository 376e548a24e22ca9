"""What is held the same at every number of workers, to see whether the rest of a script still
differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler

from ..system.patching import Replaced

DROPOUTS = (
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "alpha_dropout",
    "feature_alpha_dropout",
)
"""The functions of `torch.nn.functional` that set values to zero at random."""


@dataclass(frozen=True)
class Held:
    """What is held.

    Attributes:
        batch_parts: the batches of each worker are divided, so that the global batch is the same at
            every number of workers: their sizes can be divided by this number. 0 leaves them.
        order: samplers of torch shuffle an epoch alike at every number of workers.
        dropout: there is no dropout.
        batch_norm: batch norm uses its running statistics.
    """

    batch_parts: int = 0
    order: bool = False
    dropout: bool = False
    batch_norm: bool = False


def hold(held: Held, workers: int) -> list[Replaced]:
    """Change torch in this process as `held` says; whoever calls this undoes it.

    Args:
        held: what is held.
        workers: number of workers of the job.
    """
    replaced: list[Replaced] = []
    if held.batch_parts:
        parts = held.batch_parts

        def divide(original: Callable[..., None]) -> Callable[..., None]:
            def make(
                self: BatchSampler, sampler: Any, batch_size: int, *rest: Any, **named: Any
            ) -> None:
                # one that cannot be divided is multiplied first, at every number of workers
                whole = batch_size if batch_size % parts == 0 else batch_size * parts
                original(self, sampler, whole // workers, *rest, **named)

            return make

        replaced.append(Replaced(BatchSampler, "__init__", divide))
    if held.order:
        replaced += [
            Replaced(RandomSampler, "__iter__", _shuffle_alike),
            Replaced(DistributedSampler, "__iter__", _shuffle_parts_alike),
        ]
    if held.dropout:
        replaced += [Replaced(F, name, _without_dropout) for name in DROPOUTS]
        replaced.append(Replaced(F, "scaled_dot_product_attention", _without_attention_dropout))
    if held.batch_norm:
        replaced.append(Replaced(_BatchNorm, "forward", _with_running_statistics))
    return replaced


def _shuffle_alike(original: Callable[..., Iterator[int]]) -> Callable[..., Iterator[int]]:
    epochs: dict[int, int] = {}

    def iterate(self: Any) -> Iterator[int]:
        if self.replacement:
            return original(self)
        epoch = epochs[id(self)] = epochs.get(id(self), -1) + 1
        size = len(self.data_source)
        indices: list[int] = []
        for _ in range(math.ceil(self.num_samples / size)):
            indices += torch.randperm(size, generator=torch.Generator().manual_seed(epoch)).tolist()
        return iter(indices[: self.num_samples])

    return iterate


def _shuffle_parts_alike(original: Callable[..., Iterator[int]]) -> Callable[..., Iterator[int]]:
    epochs: dict[int, int] = {}

    def iterate(self: Any) -> Iterator[int]:
        epoch = epochs[id(self)] = epochs.get(id(self), -1) + 1
        before = (self.seed, self.epoch)
        self.seed = 0
        self.epoch = epoch
        try:
            return original(self)
        finally:
            self.seed, self.epoch = before

    return iterate


def _without_dropout(original: Callable[..., Any]) -> Callable[..., Any]:
    def keep(input: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        return input

    return keep


def _without_attention_dropout(original: Callable[..., Any]) -> Callable[..., Any]:
    def attend(
        query: Any, key: Any, value: Any, attn_mask: Any = None, *rest: Any, **named: Any
    ) -> Any:
        if rest:
            rest = (0.0, *rest[1:])
        return original(
            query, key, value, attn_mask, *rest, **{**named, **({} if rest else {"dropout_p": 0.0})}
        )

    return attend


def _with_running_statistics(original: Callable[..., Any]) -> Callable[..., Any]:
    def normalise(self: Any, input: torch.Tensor) -> Any:
        if self.running_mean is None:
            return original(self, input)
        return F.batch_norm(
            *(input, self.running_mean, self.running_var, self.weight, self.bias),
            training=False,
            eps=self.eps,
        )

    return normalise
