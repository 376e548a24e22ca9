"""What the workers of an elastic job say of themselves, in tests of those that read it."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from lockstep.elastic.membership import Coordinator
from lockstep.launcher.elastic_jobs.elastic_job import ElasticJob

__all__ = ["say"]


def say(to: Coordinator | ElasticJob, number: int, **changes: Any) -> None:
    """Let a worker say what has changed in its state, after it has taken the newest view."""
    coordinator = to.coordinator if isinstance(to, ElasticJob) else to
    worker = coordinator._workers[number]
    state = worker.state
    view = coordinator._newest
    if view is not None and number in view.members and state.generation < view.generation:
        training = coordinator._training_of(worker)
        state = structs.replace(state, phase="member", generation=view.generation, fit=training)
    to.receive(number, structs.replace(state, **{"failed": None, **changes}))
