"""Names the samples that caused a spike: the step stands out in the ledger, and is replayed to look
into it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ..errors import DataError
from .culprits import Culprit, Culprits
from .ledger import Ledger, ledger
from .replay import PlannedReplay, Replayed
from .spikes import Spike

__all__ = ["Blamed", "PlannedBlame", "blame"]


@dataclass(frozen=True)
class Blamed:
    """What caused a step to stand out.

    Attributes:
        step: its number.
        spike: what stands out; None for a step that was chosen and does not.
        kind: what was looked at: "gradient", "not finite" or "running statistics".
        culprits: the samples, the worst first; none if no few samples cause it.
        largest: the largest share of the gradient that a sample has, where no few cause it.
        replayed: the replay of the step.
        passes: how many forward and backward passes over a shard, or a part of it, it took.
    """

    step: int
    spike: Spike | None
    kind: str
    culprits: list[Culprit]
    largest: float
    replayed: Replayed
    passes: tuple[int, int]


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

    def run(self) -> Blamed:
        """Replay the step, and return the culprits."""
        column = "loss" if self.spike is None else self.spike.column
        folder = self.replay.ledger.folder.resolve() / "blame"
        answer = self.replay.run(
            "lockstep.proof.culprits:find_culprits", column=column, folder=str(folder)
        )
        found = msgspec.convert(answer.found, Culprits)
        for culprit in found.samples:
            if culprit.picture:  # as the run directory was given
                culprit.picture = str(
                    self.replay.ledger.folder / "blame" / Path(culprit.picture).name
                )
        replayed = self.replay.replayed(msgspec.structs.replace(answer, found=None))
        passes = found.forward, found.backward
        return Blamed(
            self.replay.step, self.spike, found.kind, found.samples, found.largest, replayed, passes
        )
