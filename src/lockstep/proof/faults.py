"""Workers that have computed wrong numbers: what is said of them, and who has to go."""

from __future__ import annotations

import logging
import os
import platform
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .. import devices
from ..errors import FaultyWorkerError
from ..training.step.guards import PendingStep
from ..training.step.train_step import TrainStep
from .verdicts import Fault

__all__ = ["FaultReports", "FoundFault"]

_log = logging.getLogger(__name__)

_MOST_FAULTS = 3
"""Transient faults of one worker in a run, after which it is taken for defective. Cosmic rays are
much rarer.
"""


class FoundFault(NamedTuple):
    """A fault that has been found.

    Attributes:
        step: the step.
        kind: "gradient" or "weights": what was wrong; "step": numbers of a step that has others now
            that it was repeated.
        ranks: the worker's rank; of two or more, where it cannot be known which.
        devices: the host and the device of each, in words.
        is_persistent: whether the worker was wrong again.
        parameter: the first parameter whose gradient or values differ; "" where it is not known.
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
        if self.kind == "step":
            text = (
                f"{' or '.join(workers)} computed wrong numbers once: repeated, the step has others"
            )
            return text if len(workers) == 1 else f"{text}; it cannot be known which"
        what = "computes another gradient" if self.kind == "gradient" else "has other weights"
        text = f"{' or '.join(workers)} {what} than the others, first in {self.parameter}"
        if len(workers) > 1:
            return f"{text}; it cannot be known which"
        return f"{text}, and again when it was repeated" if self.is_persistent else f"{text}, once"


class FaultReports:
    """Tells of the faults of a training, and lets go who is wrong again and again. All workers call
    its methods together.

    Args:
        step: the training step.

    Attributes:
        faults: what was found, on all ranks the same.
    """

    def __init__(self, step: TrainStep) -> None:
        self.faults: list[FoundFault] = []
        self._step = step
        self._counts: Counter[int] = Counter()  # of faults, by rank
        self._wrong_in_step: set[int] = set()
        self._untold: list[FoundFault] = []  # faults that no guard was told of yet

    def begin_step(self) -> None:
        """Forget who was wrong in the step before."""
        self._wrong_in_step = set()

    def forget_ranks(self) -> None:
        """Forget what was noted by rank: the workers have changed."""
        self._counts.clear()

    def tell_guards(self, pending: PendingStep) -> None:
        """Leave what was found in the notes of the step, for the guards after this one."""
        if self._untold:
            pending.notes["faults"] = [*pending.notes.get("faults", ()), *self._untold]
            self._untold = []

    def report_once(self, pending: PendingStep) -> None:
        """Tell that a worker was wrong once, of which the step does not say which it was."""
        places = self._step.comm.allgather_object(_place(self._step.comm.device))
        fault = FoundFault(
            pending.step, "step", tuple(range(len(places))), tuple(places), False, ""
        )
        self.faults.append(fault)
        self._untold.append(fault)
        if self._step.comm.rank == 0:
            _log.error("step %d: %s", pending.step, fault)

    def report(self, kind: str, faults: Sequence[Fault], pending: PendingStep) -> None:
        """Tell of faults; a worker that is wrong again leaves an elastic job, or ends another one.

        Args:
            kind: "gradient" or "weights": what was wrong.
            faults: the verdicts, the same on all workers.
            pending: the step.

        Raises:
            FaultyWorkerError: for a worker that is wrong again, or if it cannot be known which.
            MembershipChangedError: in an elastic job, which goes on without that worker.
        """
        places = self._step.comm.allgather_object(_place(self._step.comm.device))
        names = [name for name, _ in self._step.model.named_parameters()]
        new_faults = []
        for fault in faults:
            self._counts.update(fault.ranks)
            was_wrong = any(
                rank in self._wrong_in_step or self._counts[rank] >= _MOST_FAULTS
                for rank in fault.ranks
            )
            of_ranks = tuple(places[rank] for rank in fault.ranks)
            is_again = fault.is_persistent or was_wrong
            place = names[fault.place]
            new_faults.append(
                FoundFault(pending.step, kind, fault.ranks, of_ranks, is_again, place)
            )
        self._wrong_in_step.update(rank for fault in faults for rank in fault.ranks)
        self.faults += new_faults
        self._untold += new_faults
        for new_fault in new_faults:
            if self._step.comm.rank == 0:
                _log.error("step %d: %s", pending.step, new_fault)
        for new_fault in new_faults:
            if new_fault.is_persistent:
                if len(new_fault.ranks) == 1:
                    self._step.recovery.leave_out(new_fault.ranks[0])
                what = f"step {pending.step}: {new_fault}. The update was not made"
                hint = "Resume from the newest checkpoint without the device"
                raise FaultyWorkerError(f"{what}. {hint}.", new_fault.ranks)


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
