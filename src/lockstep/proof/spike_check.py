"""Whether a spike comes from the data or from a chip: a step that has one is computed again, by
other workers too, before anything is decided about it.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..flight_recorder import named
from ..parallel.invariant import Invariant
from ..training.step.guards import PendingStep
from ..training.step.train_step import TrainStep
from .faults import FaultReports, FoundFault
from .repeated_passes import RepeatedPasses

__all__ = ["SpikeCheck"]


class SpikeCheck:
    """Computes a step with a spike once more. With virtual workers the same data give the same bits
    on every worker: what comes out otherwise is a worker's fault.

    The passes of the step are run again. If its numbers are others then, it is run a third time: a
    worker was wrong once if that agrees with one of the two, which is reported, and the step goes
    on with the numbers of two. If the numbers have a spike again, each worker's passes are repeated
    by the next one: a worker whose gradients differ from those of others again and again ends the
    training by name, or leaves an elastic job. Without a spike nothing of this happens, and nothing
    is kept for it.

    Nothing is computed again without virtual workers, whose passes need not have the same bits, nor
    if the model or the loss has changed the batch. With sync_batchnorm, whose passes wait for each
    other, and on one worker, only a fault that happens once is found.

    Args:
        step: the training step.
    """

    def __init__(self, step: TrainStep) -> None:
        self._step = step
        self._reports = FaultReports(step)
        self._attempts: list[Mapping[str, float]] = []  # the numbers of the step in progress

    @property
    def faults(self) -> list[FoundFault]:
        """What was found, on all ranks the same."""
        return self._reports.faults

    def begin_step(self) -> None:
        """Forget the step before."""
        self._attempts = []
        self._reports.begin_step()

    def wants_repeat(
        self, pending: PendingStep, values: Mapping[str, float], has_spike: bool
    ) -> bool:
        """Return whether the passes of the step are to be run again, alike on all workers.

        Args:
            pending: the step.
            values: its numbers, which are the same on all workers.
            has_spike: whether they have a spike.

        Raises:
            FaultyWorkerError: for a worker that computes wrong numbers again and again.
            MembershipChangedError: in an elastic job, which goes on without that worker.
        """
        strategy = self._step.strategy
        if not isinstance(strategy, Invariant):
            return False
        if not self._attempts and (not has_spike or pending.has_changed_batch()):
            return False
        self._attempts.append(values)
        *before, now = self._attempts
        agreeing = [_are_the_same(attempt, now) for attempt in before]
        if not before or (len(before) == 1 and not agreeing[0]):
            return True
        if not any(agreeing):
            return False  # the model computes something else each time: that tells nothing
        if not all(agreeing):
            with named("check of a spike"):
                self._reports.report_once(pending)
        if has_spike and self._step.comm.size > 1 and not strategy.joint_layers:
            with named("check of a spike"):
                faults = RepeatedPasses(self._step, strategy).compare_all(pending)
                if faults:
                    self._reports.report("gradient", faults, pending)
        return False

    def tell_guards(self, pending: PendingStep) -> None:
        """Leave what was found in the notes of the step, for the guards after this one."""
        self._reports.tell_guards(pending)

    def forget_ranks(self) -> None:
        """Forget what was noted by rank: the workers have changed."""
        self._reports.forget_ranks()


def _are_the_same(some: Mapping[str, float], others: Mapping[str, float]) -> bool:
    """Return whether numbers have the same values; all NaN are alike."""
    return some.keys() == others.keys() and all(
        value == others[name] or (value != value and others[name] != others[name])
        for name, value in some.items()
    )
