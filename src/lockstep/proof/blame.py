"""Names the samples that caused a spike: the step stands out in the ledger, and is replayed to look
into it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from ..errors import DataError
from .culprits import Culprit, Culprits
from .ledger import Ledger, ledger
from .replay import PlannedReplay, Replayed
from .replaying import Answer, BadWeights
from .spikes import Spike


@dataclass(frozen=True)
class Blamed:
    """What caused a step to stand out.

    Attributes:
        step: its number.
        spike: what stands out; None for a step that was chosen and does not.
        kind: what was looked at: "gradient", "not finite" or "running statistics"; "update" if loss
            and gradient are finite, and the weights are not after the update.
        culprits: the samples, the worst first; none if no few samples cause it.
        largest: the largest share of the gradient that a sample has, where no few cause it.
        replayed: the replay of the step.
        passes: how many forward and backward passes over a shard, or a part of it, it took.
        bad_weights: the weights that were not finite before the step that was asked about, for
            which `step` is the one whose update made them so; None if all were finite.
    """

    step: int
    spike: Spike | None
    kind: str
    culprits: list[Culprit]
    largest: float
    replayed: Replayed
    passes: tuple[int, int]
    bad_weights: BadWeights | None = None


def blame(
    run: str | os.PathLike[str], *, step: int | None = None, workers: int | None = None
) -> Blamed:
    """Find the samples that caused a spike of a run; it replays the step.

    Args:
        run: the run directory.
        step: the step; when None, the one that stands out most.
        workers: see `lockstep.replay`.

    Raises:
        DataError: the run has no ledger, or none of its steps stands out.
        ConfigError: the ledger has no such step.
        LockstepError: the program has ended before that step.
    """
    return PlannedBlame(ledger(run), step, workers).run()


class PlannedBlame:
    """A search for the culprits of a step, before it is replayed.

    Args:
        read: the ledger.
        step: see `blame`.
        workers: see `blame`.

    Attributes:
        spike: what stands out in the step; None if nothing does.
        replay: the planned replay of the step.

    Raises:
        ConfigError, DataError: see `blame`.
    """

    def __init__(self, read: Ledger, step: int | None, workers: int | None) -> None:
        spikes = read.spikes()
        if step is None:
            if not spikes:
                count = len(read.steps)
                error = DataError(
                    f"none of {count} steps of {read.folder} stands out; --step N chooses one"
                )
                error.exit_code = 1
                raise error
            step = spikes[0][0]
        self.replay = PlannedReplay(read, step, workers)
        self.spike = dict(spikes).get(step)

    def run(self, on_replay: Callable[[PlannedReplay], None] | None = None) -> Blamed:
        """Replay the step, and return the culprits.

        If the weights were not finite before the step, no sample of it is to blame: the step whose
        update made them so is looked at instead.

        Args:
            on_replay: called before that step is replayed.
        """
        column = "loss" if self.spike is None else self.spike.column
        read = self.replay.ledger
        folder = read.folder.resolve() / "blame"
        answer = self.replay.run(
            "lockstep.proof.culprits:find_culprits",
            needs_finite_weights=True,
            column=column,
            folder=str(folder),
        )
        if answer.bad_weights is not None:
            return self._blame_update(answer, answer.bad_weights, on_replay)
        culprits = msgspec.convert(answer.result, Culprits)
        for culprit in culprits.samples:
            if culprit.picture:  # as the run directory was given
                culprit.picture = str(read.folder / "blame" / Path(culprit.picture).name)
        replayed = self.replay.replayed(msgspec.structs.replace(answer, result=None))
        passes = culprits.forward, culprits.backward
        return Blamed(
            self.replay.step,
            self.spike,
            culprits.kind,
            culprits.samples,
            culprits.largest,
            replayed,
            passes,
        )

    def _blame_update(
        self,
        answer: Answer,
        bad_weights: BadWeights,
        on_replay: Callable[[PlannedReplay], None] | None,
    ) -> Blamed:
        """Return what caused the update that made weights not finite."""
        step = bad_weights.step - 1
        planned = PlannedBlame(self.replay.ledger, step, self.replay.workers)
        record = self.replay.ledger.record(step)
        if math.isfinite(record["loss"]) and math.isfinite(record["gradient_norm"]):
            replayed = self.replay.replayed(answer)
            return Blamed(step, planned.spike, "update", [], 0.0, replayed, (0, 0), bad_weights)
        if on_replay is not None:
            on_replay(planned.replay)
        return replace(planned.run(), bad_weights=bad_weights)
