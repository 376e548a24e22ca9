"""Strategies: how a model and its training state are distributed over workers, by name."""

from __future__ import annotations

from ..registry import Registry

__all__ = ["STRATEGIES"]

STRATEGIES = Registry(
    "strategy",
    {
        "distributed": "lockstep.strategies.distributed:Distributed",
        "sharded": "lockstep.strategies.sharded:Sharded",
        "replicas": "lockstep.strategies.replicas:Replicas",
    },
)
