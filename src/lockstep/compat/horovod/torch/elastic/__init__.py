"""``hvd.elastic``: trainings that resume from the last commit after an operation has failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...common.basics import init, shutdown
from ...common.elastic import State, run_fn
from ...engine.regrouping import ElasticTraining
from .sampler import ElasticSampler
from .state import ObjectState, TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a training function, whose first argument is a `State`, so that it is called again
    after a failure.

    After an operation has failed on all ranks, the function is called with the state of the last
    commit; after hosts have joined or left, with the current state. A second failure without a
    commit in between is raised, unless ranks were lost. Only in an elastic job (``lockstep
    horovodrun --min-np``, ``lockstep run --elastic``) do the others go on after the loss of a rank;
    in any other one that is an error.
    """
    return run_fn(func, _reset, lambda: ElasticTraining.in_this_job(shutdown, init))


def _reset() -> None:
    shutdown()
    init()
