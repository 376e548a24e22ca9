"""Several devices in one process: replicas of a model, scatter and gather, collectives, and a
thread per device.
"""

from __future__ import annotations

from .parallel.replicas.copies import replicate
from .parallel.replicas.joined_graph import allreduce_, broadcast_
from .parallel.replicas.replica_threads import ReplicaError, Threads, parallel_apply
from .parallel.replicas.replicated import Engine
from .parallel.replicas.scatter import Device, as_devices, gather, scatter

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
