"""Batch normalisation with the statistics of all ranks' samples."""

from __future__ import annotations

from typing import Any, cast

import torch

from lockstep import Communicator
from lockstep.strategies import sync_batchnorm

from ..common.process_sets import ProcessSet, global_process_set
from ..engine.request import Sum
from .reducing import allreduce_

__all__ = ["SyncBatchNorm"]


class _Sums:
    """What a layer needs of a communicator, by operations that do not come into the way of the others."""

    def __init__(self, process_set: ProcessSet) -> None:
        self._set = process_set

    @property
    def rank(self) -> int:
        return self._set.rank()

    @property
    def size(self) -> int:
        return self._set.size()

    def allreduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return allreduce_(tensor, op=Sum, process_set=self._set)


class SyncBatchNorm(sync_batchnorm.SyncBatchNorm):
    """`torch.nn.BatchNorm` for 1, 2 or 3 dimensions with the mean and variance of all ranks' samples.

    On the CPU and on GPUs; the parts of the ranks may be of different sizes. All ranks must run it equally often.

    Args:
        num_features: c of an input (n, c, …).
        args: as of `torch.nn.BatchNorm2d`: eps, momentum, affine, track_running_stats.
        process_set: the ranks.
        kwargs: the same by name.
    """

    def __init__(
        self, num_features: int, *args: Any, process_set: ProcessSet = global_process_set, **kwargs: Any
    ) -> None:
        super().__init__(num_features, *args, **kwargs)
        self.comm = cast("Communicator", _Sums(process_set))
