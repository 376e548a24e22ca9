"""Data parallelism: how a model and its training state are distributed over workers; the strategies
by name.
"""

from __future__ import annotations

from ..registry import Registry

__all__ = ["STRATEGIES"]

STRATEGIES = Registry(
    "strategy",
    {
        "distributed": "lockstep.parallel.distributed:Distributed",
        "sharded": "lockstep.parallel.sharded:Sharded",
        "replicas": "lockstep.parallel.replicas_strategy:Replicas",
    },
)
