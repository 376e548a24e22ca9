"""``hvd.elastic``: trainings that resume from the last commit after an operation has failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...common.basics import init, shutdown
from ...common.elastic import State, run_fn
from .sampler import ElasticSampler
from .state import ObjectState, TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a training function, whose first argument is a `State`, so that it is called again after a failure.

    After an operation has failed on all ranks, the function is called with the state of the last commit; after hosts
    have joined or left, with the current state. A second failure without a commit in between is raised. Lost workers
    are not replaced: HorovodInternalError is raised if one is lost.
    """
    return run_fn(func, _reset)


def _reset() -> None:
    shutdown()
    init()
