"""The cross-check: workers repeat passes of their neighbours, and compare gradients and weights
before the update.
"""

from __future__ import annotations

import logging
import os
import platform
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from .. import arguments, devices
from ..communicator import Communicator
from ..data.loader import Batch
from ..errors import ConfigError, FaultyWorkerError
from ..flight_recorder import named
from ..parallel.fingerprints import INTEGERS, mix_bits
from ..parallel.invariant import Invariant
from ..parallel.nested import map_tensors
from ..training.model_state import StateOfStep
from ..training.recovery import share
from ..training.step.guards import Decision, Guard, PendingStep
from ..training.step.train_step import TrainStep
from .verdicts import Answers, Digests, Fault, judge_pass, judge_weights

_log = logging.getLogger(__name__)

_PASSES = "cross-check of passes"  # what the watchdog calls its collectives

_MOST_FAULTS = 3
"""Transient faults of one worker in a run, after which it is taken for defective. Cosmic rays are
much rarer.
"""


class FoundFault(NamedTuple):
    """A fault that the cross-check has found.

    Attributes:
        step: the step.
        kind: "gradient" or "weights": what was wrong.
        ranks: the worker's rank; of two or more, where it cannot be known which.
        devices: the host and the device of each, in words.
        is_persistent: whether the worker was wrong again.
        parameter: the first parameter whose gradient or values differ.
    """

    step: int
    kind: str
    ranks: tuple[int, ...]
    devices: tuple[str, ...]
    is_persistent: bool
    parameter: str

    def __str__(self) -> str:
        workers = [
            f"rank {rank} ({device})" for rank, device in zip(self.ranks, self.devices, strict=True)
        ]
        what = "computes another gradient" if self.kind == "gradient" else "has other weights"
        text = f"{' or '.join(workers)} {what} than the others, first in {self.parameter}"
        if len(workers) > 1:
            return f"{text}; it cannot be known which"
        return f"{text}, and again when it was repeated" if self.is_persistent else f"{text}, once"


@dataclass(frozen=True)
class _Pass:
    """The pass of a virtual worker, as one worker sends it to another."""

    shard: int
    data: Any
    samples: int


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
        faults: what was found, on all ranks the same.
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
        self.faults: list[FoundFault] = []
        self.checked_passes = 0
        self._step = step
        self._strategy = strategy
        self._every = every
        self._sums: BitSums | None = None
        self._after_update: torch.Tensor | None = (
            None  # the checksum of the weights, on two workers
        )
        self._own: _Pass | None = (
            None  # the pass of this worker that another one repeats in this step
        )
        self._other: _Pass | None = None  # the pass of another worker that this one repeats
        self._digests: dict[int, torch.Tensor] = {}  # of the gradient of its own pass, in the step
        self._hooks: list[RemovableHandle] = []
        self._counts: Counter[int] = Counter()  # of faults, by rank
        self._wrong_in_step: set[int] = set()
        self._untold: list[FoundFault] = []  # faults that no guard was told of yet
        if step.comm.size == 1 and step.recovery.has_fixed_workers:
            text = "cross_check=%d: one worker computes everything, so nothing is compared"
            _log.warning(text, every)

    @property
    def _comm(self) -> Communicator:
        return self._step.comm

    def _parameters(self) -> list[tuple[str, nn.Parameter]]:
        return list(self._step.model.named_parameters())

    def before_passes(self, step: int, batch: Batch) -> None:
        """Send the pass that another worker repeats: passes may change their data in place."""
        self._stop_watching()
        self._wrong_in_step = set()
        self._own = None
        self._other = None
        if self._comm.size == 1:
            return
        if self._after_update is None and self._comm.size == 2:
            self._after_update = self._weights()
        if step % self._every == 0:
            self._sums = None  # layers may have been replaced
            parts = zip(self._strategy.reducer.local_shards, self._step.parts(batch), strict=True)
            passes = [_Pass(shard, data, size) for shard, (data, size) in parts if size]
            if passes:
                chosen = passes[step // self._every % len(passes)]
                self._own = replace(chosen, data=map_tensors(torch.clone, chosen.data))
            with named(_PASSES):
                self._other = self._passed_on(self._distance(step))
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
        if self._untold:
            pending.notes["faults"] = self._untold
            self._untold = []

    def on_regroup(self) -> None:
        """Forget what was noted by rank."""
        self._after_update = None
        self._counts.clear()

    def _weights(self) -> torch.Tensor:
        """Return the checksum of the weights."""
        if self._sums is None:
            self._sums = BitSums([parameter for _, parameter in self._parameters()])
        return self._sums.total()

    def _distance(self, step: int) -> int:
        """Return the distance in the ring of a worker and the one that repeats its pass."""
        return 1 + step // self._every % (self._comm.size - 1)

    def _passed_on(self, distance: int) -> _Pass | None:
        """Send this worker's pass to the one at a distance in the ring; returns what comes in."""
        comm = self._comm
        own = self._own
        sent = None
        if own is not None:
            sent = replace(own, data=map_tensors(lambda tensor: tensor.cpu(), own.data))
        to = (comm.rank + distance) % comm.size
        received = comm.alltoall_object([sent if rank == to else None for rank in range(comm.size)])
        came = received[(comm.rank - distance) % comm.size]
        if came is None:
            return None
        on_device = map_tensors(lambda tensor: tensor.to(comm.device), came.data)
        return replace(came, data=on_device)

    def _check_passes(self, pending: PendingStep) -> Decision:
        """Repeat the pass of another worker, and judge where the gradients differ."""
        comm = self._comm
        distance = self._distance(pending.step)
        own = self._listed(self._digests)
        first = comm.allgather_object((own, self._repeated(self._other, pending)))
        self.checked_passes += 1
        checkers = [(rank + distance) % comm.size for rank in range(comm.size)]
        owners = [rank for rank in range(comm.size) if first[rank][0] != first[checkers[rank]][1]]
        if not owners:
            return Decision.GO
        # Both compute it once more, and so does a third worker, where there is one.
        of_third: list[int | None] = []
        further = distance % (comm.size - 1) + 1
        again = self._repeated(self._own, pending), self._repeated(self._other, pending)
        if comm.size > 2:
            of_third = self._repeated(self._passed_on(further), pending)
        second = comm.allgather_object((*again, of_third))
        has_wrong_sum = False
        faults: list[Fault] = []
        for rank in owners:
            owner = Answers(rank, [first[rank][0], second[rank][0]])
            checker = checkers[rank]
            other = Answers(checker, [first[checker][1], second[checker][1]])
            third = (rank + further) % comm.size
            one_more = Answers(third, [second[third][2]]) if comm.size > 2 else None
            of_pass = judge_pass(owner, other, one_more)
            has_wrong_sum |= any(rank in fault.ranks for fault in of_pass)
            faults += of_pass
        # A worker may be wrong in its own pass and in that of another one: that is one fault.
        of_worker = {fault.ranks: fault for fault in faults if not fault.is_persistent}
        of_worker |= {fault.ranks: fault for fault in faults if fault.is_persistent}
        self._report("gradient", list(of_worker.values()), pending)
        return Decision.REPEAT if has_wrong_sum else Decision.GO

    def _repeated(self, repeated: _Pass | None, pending: PendingStep) -> list[int | None]:
        """Return the checksums of the gradient of a pass, computed once more."""
        digests: dict[int, torch.Tensor] = {}
        if repeated is not None:
            data = map_tensors(torch.clone, repeated.data)
            hooks = self._noting(digests, lambda: True)
            try:
                part = data, repeated.samples
                self._step.repeat_shard(repeated.shard, part, pending.batch.global_size)
            finally:
                for hook in hooks:
                    hook.remove()
        return self._listed(digests)

    def _watch(self) -> None:
        """Note the gradient of this worker's pass that another one repeats, as the step computes
        it.
        """
        self._digests = {}
        if self._own is not None:
            reducer = self._strategy.reducer
            shard = self._own.shard
            self._hooks = self._noting(self._digests, lambda: reducer.shard == shard)

    def _stop_watching(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _noting(
        self, digests: dict[int, torch.Tensor], is_wanted: Callable[[], bool]
    ) -> list[RemovableHandle]:
        """Return hooks that note the checksum of each gradient, by the number of its parameter."""

        def note(number: int, gradient: torch.Tensor) -> None:
            if is_wanted():
                digests[number] = bit_sum(gradient)

        trained = [
            (number, p) for number, (_, p) in enumerate(self._parameters()) if p.requires_grad
        ]
        return [
            parameter.register_hook(partial(note, number))  # type: ignore[no-untyped-call]
            for number, parameter in trained
        ]

    def _listed(self, digests: dict[int, torch.Tensor]) -> list[int | None]:
        """Return checksums in the order of the model; waits for the device once."""
        values = torch.stack(list(digests.values())).tolist() if digests else []
        by_number = dict(zip(digests, values, strict=True))
        return [by_number.get(number) for number in range(len(self._parameters()))]

    def _replace_wrong_weights(self, pending: PendingStep, now: int) -> None:
        """Name the worker whose weights differ, and give it the state of another one."""
        comm = self._comm
        parts: Digests = [int(bit_sum(parameter)) for _, parameter in self._parameters()]
        after = None if self._after_update is None else int(self._after_update)
        all_now, all_after, all_parts = zip(
            *comm.allgather_object((now, after, parts)), strict=True
        )
        faults = judge_weights(all_now, all_after, all_parts)
        self._report("weights", faults, pending)
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

    def _report(self, kind: str, faults: Sequence[Fault], pending: PendingStep) -> None:
        """Tell of faults; a worker that is wrong again leaves an elastic job, or ends another one.

        Raises:
            FaultyWorkerError, MembershipChangedError: see `before_update`.
        """
        places = self._comm.allgather_object(_place(self._comm.device))
        names = [name for name, _ in self._parameters()]
        found = []
        for fault in faults:
            self._counts.update(fault.ranks)
            was_wrong = any(
                rank in self._wrong_in_step or self._counts[rank] >= _MOST_FAULTS
                for rank in fault.ranks
            )
            of_ranks = tuple(places[rank] for rank in fault.ranks)
            is_again = fault.is_persistent or was_wrong
            place = names[fault.place]
            found.append(FoundFault(pending.step, kind, fault.ranks, of_ranks, is_again, place))
        self._wrong_in_step.update(rank for fault in faults for rank in fault.ranks)
        self.faults += found
        self._untold += found
        for each in found:
            if self._comm.rank == 0:
                _log.error("step %d: %s", pending.step, each)
        for each in found:
            if each.is_persistent:
                if len(each.ranks) == 1:
                    self._step.recovery.leave_out(each.ranks[0])
                what = f"step {pending.step}: {each}. The update was not made"
                hint = "Resume from the newest checkpoint without the device"
                raise FaultyWorkerError(f"{what}. {hint}.", each.ranks)


def bit_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a dense tensor's bits, as whole numbers of 64 bits, modulo 2^64.

    Any single bit that flips changes it. Values that trade places may not, as `checksum_of` would
    notice, which takes ten times as long; a fault does not sort.

    Returns:
        0-dim tensor of int64 on the device of the tensor, which nothing waits for.
    """
    return _as_integers(tensor).sum()


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a tensor as whole numbers; a view, if its memory is contiguous."""
    flat = tensor.detach()
    if flat.is_complex():
        flat = torch.view_as_real(flat)
    flat = flat.contiguous().view(-1)
    size = flat.element_size()
    is_wide = flat.numel() * size % 8 == 0 and flat.storage_offset() * size % 8 == 0
    return flat.view(torch.int64 if is_wide else INTEGERS[size])


class BitSums:
    """One checksum of several tensors on one device, whose values are read again and again.

    Args:
        tensors: at least one; each of them keeps its shape, and may be changed in place.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        self._places = torch.arange(len(self._tensors), device=self._tensors[0].device)
        self._look()

    def _look(self) -> None:
        """Keep views of the tensors' memory: making one takes longer than adding up few values."""
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        views = [_as_integers(tensor) for tensor in self._tensors]
        self._views = [
            view if view.data_ptr() == address else None
            for view, address in zip(views, self._addresses, strict=True)
        ]

    def total(self) -> torch.Tensor:
        """Return a checksum of all tensors; any single bit that flips in one of them changes it.

        Returns:
            0-dim tensor of int64 on their device, which nothing waits for.
        """
        if [tensor.data_ptr() for tensor in self._tensors] != self._addresses:
            self._look()
        pairs = zip(self._tensors, self._views, strict=True)
        sums = [bit_sum(tensor) if view is None else view.sum() for tensor, view in pairs]
        return mix_bits(torch.stack(sums), self._places).sum()


def _place(device: torch.device) -> str:
    """Return the host and the device of this worker in words."""
    host = platform.node()
    if device.type != "cpu":
        return f"host {host}, {device}, {devices.name_of(device)}"
    cores = sorted(os.sched_getaffinity(0))
    return (
        f"host {host}, core {cores[0]}"
        if len(cores) == 1
        else f"host {host}, cores {cores[0]} to {cores[-1]}"
    )


def make_guard(step: TrainStep, every: int) -> CrossCheck:
    """Return the guard for the argument `cross_check` of `Trainer`."""
    return CrossCheck(step, every)
