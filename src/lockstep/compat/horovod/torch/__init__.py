"""Horovod's interface for PyTorch: ``import lockstep.compat.horovod.torch as hvd``."""

from __future__ import annotations

from . import elastic, mpi_ops
from .functions import (
    allgather_object,
    broadcast_object,
    broadcast_object_fn,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from .mpi_ops import *  # noqa: F403 - it defines __all__
from .optimizer import DistributedOptimizer
from .sync_batch_norm import SyncBatchNorm

__all__ = [
    "DistributedOptimizer",
    "SyncBatchNorm",
    "allgather_object",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "elastic",
]
__all__ += mpi_ops.__all__
