"""Batch normalisation with the statistics of all ranks' samples."""

from __future__ import annotations

from typing import Any

import torch

from lockstep.parallel import sync_batchnorm

from ..common.process_sets import ProcessSet, global_process_set
from ..engine.request import Sum
from .allreduce import allreduce_

__all__ = ["SyncBatchNorm"]


class _EngineCommunicator:
    """Sums over the ranks, by way of the engine, which orders them among the others."""

    def __init__(self, process_set: ProcessSet) -> None:
        self._process_set = process_set

    @property
    def rank(self) -> int:
        return self._process_set.rank()

    @property
    def size(self) -> int:
        return self._process_set.size()

    def allreduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return allreduce_(tensor, op=Sum, process_set=self._process_set)


class SyncBatchNorm(sync_batchnorm.SyncBatchNorm):
    """`torch.nn.BatchNorm` for 1, 2 or 3 dimensions with the mean and variance of all ranks'
    samples.

    It runs on CPUs and GPUs. The batches of the ranks may differ in size. All ranks must call it
    equally often.

    Args:
        num_features: C of an input (N, C, …).
        args: further arguments of `torch.nn.BatchNorm2d`: eps, momentum, affine,
            track_running_stats.
        process_set: the ranks.
        kwargs: the same arguments, by name.
    """

    def __init__(
        self,
        num_features: int,
        *args: Any,
        process_set: ProcessSet = global_process_set,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_features, *args, **kwargs)
        self.exchange = sync_batchnorm.WorkerExchange(_EngineCommunicator(process_set))
