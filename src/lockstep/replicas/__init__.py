"""One process and many devices: copies of a model, parts of a batch, sums over devices, and a thread for each."""

from __future__ import annotations

from .copies import replicate
from .devices import Device, as_devices
from .engine import Engine
from .failure import ReplicaError
from .spread import gather, scatter
from .summing import allreduce_, broadcast_
from .threads import Threads, parallel_apply

__all__ = [
    "Device",
    "Engine",
    "ReplicaError",
    "Threads",
    "allreduce_",
    "as_devices",
    "broadcast_",
    "gather",
    "parallel_apply",
    "replicate",
    "scatter",
]
