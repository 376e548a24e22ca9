"""The pass of a virtual worker, computed once more, on another worker or the same one, and the
verdict where its gradient has other bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

from ..communicator import Communicator
from ..data.loader import Batch
from ..parallel.invariant import Invariant
from ..parallel.nested import map_tensors
from ..training.step.guards import PendingStep
from ..training.step.train_step import TrainStep
from .bit_sums import bit_sum
from .verdicts import Answers, Digests, Fault, judge_pass

__all__ = ["ComparedPasses", "Pass", "RepeatedPasses"]


@dataclass(frozen=True)
class Pass:
    """The pass of a virtual worker, as one worker sends it to another."""

    shard: int
    data: Any
    samples: int


class ComparedPasses(NamedTuple):
    """What follows from passes that two workers have computed, on all workers the same.

    Attributes:
        faults: one for each worker that was wrong; or of two, where it cannot be known which.
        has_wrong_sum: whether one of them was wrong in its own pass.
    """

    faults: list[Fault]
    has_wrong_sum: bool


class RepeatedPasses:
    """Repeats passes of the step in progress, before its update; all workers call `passed_on` and
    `compare` together.

    Args:
        step: the training step.
        strategy: its strategy, with virtual workers: only then has a pass the same bits on every
            worker.
    """

    def __init__(self, step: TrainStep, strategy: Invariant) -> None:
        self._step = step
        self._strategy = strategy

    @property
    def _comm(self) -> Communicator:
        return self._step.comm

    def of_batch(self, batch: Batch) -> list[Pass]:
        """Return this worker's passes that have samples."""
        parts = zip(self._strategy.reducer.local_shards, self._step.parts(batch), strict=True)
        return [Pass(shard, data, size) for shard, (data, size) in parts if size]

    def passed_on(self, sent: Pass | None, distance: int) -> Pass | None:
        """Send a pass of this worker, if it has one, to the one at a distance in the ring; returns
        what comes in.
        """
        comm = self._comm
        if sent is not None:
            sent = replace(sent, data=map_tensors(lambda tensor: tensor.cpu(), sent.data))
        to = (comm.rank + distance) % comm.size
        received = comm.alltoall_object([sent if rank == to else None for rank in range(comm.size)])
        came = received[(comm.rank - distance) % comm.size]
        if came is None:
            return None
        on_device = map_tensors(lambda tensor: tensor.to(comm.device), came.data)
        return replace(came, data=on_device)

    def compare(
        self,
        own_digests: Digests,
        ours: Pass | None,
        other: Pass | None,
        distance: int,
        pending: PendingStep,
    ) -> ComparedPasses:
        """Repeat the pass of another worker, and judge where the gradients differ.

        Args:
            own_digests: of the gradient of this worker's pass.
            ours: that pass, which the worker at `distance` in the ring repeats; None for none.
            other: the pass that this worker repeats, of the one at that distance before it.
            distance: 1 to size - 1.
            pending: the step.
        """
        comm = self._comm
        first = comm.allgather_object((own_digests, self.digests_of(other, pending)))
        checkers = [(rank + distance) % comm.size for rank in range(comm.size)]
        owners = [rank for rank in range(comm.size) if first[rank][0] != first[checkers[rank]][1]]
        if not owners:
            return ComparedPasses([], False)
        # Both compute it once more, and so does a third worker, where there is one.
        of_third: Digests = []
        further = distance % (comm.size - 1) + 1
        again = self.digests_of(ours, pending), self.digests_of(other, pending)
        if comm.size > 2:
            of_third = self.digests_of(self.passed_on(ours, further), pending)
        second = comm.allgather_object((*again, of_third))
        has_wrong_sum = False
        faults: list[Fault] = []
        for rank in owners:
            owner = Answers(rank, [first[rank][0], second[rank][0]])
            checker = checkers[rank]
            checked = Answers(checker, [first[checker][1], second[checker][1]])
            third = (rank + further) % comm.size
            one_more = Answers(third, [second[third][2]]) if comm.size > 2 else None
            of_pass = judge_pass(owner, checked, one_more)
            has_wrong_sum |= any(rank in fault.ranks for fault in of_pass)
            faults += of_pass
        # A worker may be wrong in its own pass and in that of another one: that is one fault.
        of_worker = {fault.ranks: fault for fault in faults if not fault.is_persistent}
        of_worker |= {fault.ranks: fault for fault in faults if fault.is_persistent}
        return ComparedPasses(list(of_worker.values()), has_wrong_sum)

    def digests_of(self, repeated: Pass | None, pending: PendingStep) -> Digests:
        """Return the checksums of the gradient of a pass, computed once more on this worker."""
        digests: dict[int, torch.Tensor] = {}
        if repeated is not None:
            data = map_tensors(torch.clone, repeated.data)
            hooks = self.noting(digests, lambda: True)
            try:
                part = data, repeated.samples
                self._step.repeat_shard(repeated.shard, part, pending.batch.global_size)
            finally:
                for hook in hooks:
                    hook.remove()
        return self.listed(digests)

    def noting(
        self, digests: dict[int, torch.Tensor], is_wanted: Callable[[], bool]
    ) -> list[RemovableHandle]:
        """Return hooks that note the checksum of each gradient, by the number of its parameter."""

        def note(number: int, gradient: torch.Tensor) -> None:
            if is_wanted():
                digests[number] = bit_sum(gradient)

        return [
            parameter.register_hook(partial(note, number))  # type: ignore[no-untyped-call]
            for number, parameter in enumerate(self._step.model.parameters())
            if parameter.requires_grad
        ]

    def listed(self, digests: dict[int, torch.Tensor]) -> Digests:
        """Return checksums in the order of the model; waits for the device once."""
        values = torch.stack(list(digests.values())).tolist() if digests else []
        by_number = dict(zip(digests, values, strict=True))
        count = len(list(self._step.model.parameters()))
        return [by_number.get(number) for number in range(count)]

    def compare_all(self, pending: PendingStep) -> list[Fault]:
        """Compute every pass of the step on its worker and on the next one, and judge where the
        gradients differ.

        Passes that have other bits each time on both workers tell nothing of the workers, and are
        left out: such a model changes with each pass.
        """
        passes = self.of_batch(pending.batch)
        most = max(self._comm.allgather_object(len(passes)))
        faults: dict[tuple[int, ...], Fault] = {}
        for number in range(most):
            ours = passes[number] if number < len(passes) else None
            other = self.passed_on(ours, 1)
            digests = self.digests_of(ours, pending)
            is_stable = digests == self.digests_of(ours, pending)
            if not any(self._comm.allgather_object(is_stable)):
                continue
            for fault in self.compare(digests, ours, other, 1, pending).faults:
                faults[fault.ranks] = fault
        return list(faults.values())
