"""``hvd.elastic``: trainings that go on from the last commit when an operation has failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...common.basics import init, shutdown
from ...common.elastic import State, run_fn
from .sampler import ElasticSampler
from .state import ObjectState, TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator for a training function whose first argument is a `State`.

    The function is called again from the last commit when an operation has failed on all ranks, and from the state as
    it is when machines have come or gone. The same failure, again and without a commit in between, is raised. A lost
    worker is not replaced: HorovodInternalError is raised then.
    """
    return run_fn(func, _make_anew)


def _make_anew() -> None:
    shutdown()
    init()
