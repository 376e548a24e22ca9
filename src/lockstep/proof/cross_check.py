"""The cross-check: workers repeat passes of their neighbours, and compare gradients and weights
before the update.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from .. import arguments
from ..communicator import Communicator
from ..data.loader import Batch
from ..errors import ConfigError
from ..flight_recorder import named
from ..parallel.invariant import Invariant
from ..parallel.nested import map_tensors
from ..training.model_state import StateOfStep
from ..training.recovery import share
from ..training.step.guards import Decision, Guard, PendingStep
from ..training.step.train_step import TrainStep
from .bit_sums import BitSums, bit_sum
from .faults import FaultReports, FoundFault
from .repeated_passes import Pass, RepeatedPasses
from .verdicts import Digests, judge_weights

_log = logging.getLogger(__name__)

_PASSES = "cross-check of passes"  # what the watchdog calls its collectives


class CrossCheck(Guard):
    """Finds workers that compute wrong numbers, before these get into the weights.

    At every step all workers compare the checksums of their weights. At every `every`-th step each
    repeats the pass of one virtual worker of another one, with the same bits if both are sound:
    neighbours at one distance in a ring, distance and virtual worker in turn. Where they differ,
    both and a third one compute the pass once more. A worker that was wrong once is reported, and
    the step is repeated from its beginning, so that it goes on with the right gradient; wrong
    weights are replaced by those of another worker before that. One that is wrong again ends the
    training with an error that names it; in an elastic job it leaves, and the others go on.

    Faults that all workers have alike, before a batch is collated, or in the sum itself, are not
    found; a transient one in a pass only if that pass is checked: one of virtual_workers · every /
    workers.

    On an accelerator the host waits for the device once a step, to compare the weights before the
    update.

    Args:
        step: the training step, with virtual workers.
        every: steps between two in which passes are repeated.

    Attributes:
        checked_passes: the number of passes that each worker has repeated of another one.

    Raises:
        ConfigError: without virtual workers, with shard_optimizer, or with sync_batchnorm, whose
            passes do not run alone.
    """

    name = "cross-check"

    def __init__(self, step: TrainStep, every: int) -> None:
        every = arguments.whole("cross_check", every, least=1)
        strategy = step.strategy
        if not isinstance(strategy, Invariant):
            hint = "Only then has the same pass the same bits on every worker."
            raise ConfigError("cross_check", "virtual_workers with it", every, hint)
        if strategy.joint_layers:
            hint = "Their passes wait for each other, so that none can be repeated alone."
            raise ConfigError("cross_check", "none with sync_batchnorm", every, hint)
        if step.shards_optimizer:
            hint = "Weights are compared before each worker has updated all of them."
            raise ConfigError("cross_check", "none with shard_optimizer", every, hint)
        self.checked_passes = 0
        self._step = step
        self._strategy = strategy
        self._passes = RepeatedPasses(step, strategy)
        self._reports = FaultReports(step)
        self._every = every
        self._sums: BitSums | None = None
        self._after_update: torch.Tensor | None = (
            None  # the checksum of the weights, on two workers
        )
        # the pass of this worker that another one repeats in this step, and the other way round
        self._own: Pass | None = None
        self._other: Pass | None = None
        self._digests: dict[int, torch.Tensor] = {}  # of the gradient of its own pass, in the step
        self._hooks: list[RemovableHandle] = []
        if step.comm.size == 1 and step.recovery.has_fixed_workers:
            text = "cross_check=%d: one worker computes everything, so nothing is compared"
            _log.warning(text, every)

    @property
    def faults(self) -> list[FoundFault]:
        """What was found, on all ranks the same."""
        return self._reports.faults

    @property
    def _comm(self) -> Communicator:
        return self._step.comm

    def _parameters(self) -> list[tuple[str, nn.Parameter]]:
        return list(self._step.model.named_parameters())

    def before_passes(self, step: int, batch: Batch) -> None:
        """Send the pass that another worker repeats: passes may change their data in place."""
        self._stop_watching()
        self._reports.begin_step()
        self._own = None
        self._other = None
        if self._comm.size == 1:
            return
        if self._after_update is None and self._comm.size == 2:
            self._after_update = self._weights()
        if step % self._every == 0:
            self._sums = None  # layers may have been replaced
            passes = self._passes.of_batch(batch)
            if passes:
                chosen = passes[step // self._every % len(passes)]
                self._own = replace(chosen, data=map_tensors(torch.clone, chosen.data))
            with named(_PASSES):
                self._other = self._passes.passed_on(self._own, self._distance(step))
            self._watch()

    def before_update(self, pending: PendingStep) -> Decision:
        """Compare the weights, and the passes if it is time.

        Raises:
            FaultyWorkerError: for a worker that is wrong again, or if it cannot be known which.
            MembershipChangedError: in an elastic job, which goes on without that worker.
        """
        self._stop_watching()
        if self._comm.size == 1:
            return Decision.GO
        now = self._weights()
        # the inverse of x is -1 - x, which exists for every x
        extremes = torch.stack([now, ~now]).to(self._comm.device)
        with named("cross-check of weights"):
            largest, of_inverse = self._comm.allreduce(extremes, "max").tolist()
        decision = Decision.GO
        if largest != ~of_inverse:
            self._replace_wrong_weights(pending, int(now))
            decision = Decision.REPEAT
        elif pending.step % self._every == 0:
            with named(_PASSES):
                decision = self._check_passes(pending)
        if decision is Decision.REPEAT and pending.step % self._every == 0:
            self._watch()
        return decision

    def after_step(self, pending: PendingStep) -> None:
        """Note the weights after the update, and tell the other guards what was found."""
        self._stop_watching()
        if self._comm.size == 2:
            self._after_update = self._weights()
        self._reports.tell_guards(pending)

    def on_regroup(self) -> None:
        """Forget what was noted by rank."""
        self._after_update = None
        self._reports.forget_ranks()

    def _weights(self) -> torch.Tensor:
        """Return the checksum of the weights."""
        if self._sums is None:
            self._sums = BitSums([parameter for _, parameter in self._parameters()])
        return self._sums.total()

    def _distance(self, step: int) -> int:
        """Return the distance in the ring of a worker and the one that repeats its pass."""
        return 1 + step // self._every % (self._comm.size - 1)

    def _check_passes(self, pending: PendingStep) -> Decision:
        """Repeat the pass of another worker, and judge where the gradients differ."""
        own_digests = self._passes.listed(self._digests)
        distance = self._distance(pending.step)
        compared = self._passes.compare(own_digests, self._own, self._other, distance, pending)
        self.checked_passes += 1
        if compared.faults:
            self._reports.report("gradient", compared.faults, pending)
        return Decision.REPEAT if compared.has_wrong_sum else Decision.GO

    def _watch(self) -> None:
        """Note the gradient of this worker's pass that another one repeats, as the step computes
        it.
        """
        self._digests = {}
        if self._own is not None:
            reducer = self._strategy.reducer
            shard = self._own.shard
            self._hooks = self._passes.noting(self._digests, lambda: reducer.shard == shard)

    def _stop_watching(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _replace_wrong_weights(self, pending: PendingStep, now: int) -> None:
        """Name the worker whose weights differ, and give it the state of another one."""
        comm = self._comm
        parts: Digests = [int(bit_sum(parameter)) for _, parameter in self._parameters()]
        after = None if self._after_update is None else int(self._after_update)
        all_now, all_after, all_parts = zip(
            *comm.allgather_object((now, after, parts)), strict=True
        )
        faults = judge_weights(all_now, all_after, all_parts)
        self._reports.report("weights", faults, pending)
        wrong = [fault.ranks[0] for fault in faults]
        source = next(rank for rank in range(comm.size) if rank not in wrong)
        state = StateOfStep(self._step)
        state.commit(None)
        sent = state.of_operations() if comm.rank == source else None
        received = share(comm, source, sent, wanted=comm.rank in wrong)
        if received:
            state.load_operations(received)
        if comm.size == 2:
            self._after_update = self._weights()
        for guard in self._step.guards:
            if guard is not self:
                guard.on_regroup()  # what a worker alone has noted before is not that of the others


def make_guard(step: TrainStep, every: int) -> CrossCheck:
    """Return the guard for the argument `cross_check` of `Trainer`."""
    return CrossCheck(step, every)
