"""Compares two runs: what they were started with, their first step that differs, and the first
module in it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from .ledger import Difference, Ledger, StepValues, first_difference, ledger, values_of
from .replay import PlannedReplay
from .starts import differences

_CAUSES = {
    "samples": "they have other samples, or in another order",
    "learning_rate": "they have other learning rates",
    "count": "their losses count something else",
}


@dataclass(frozen=True)
class Compared:
    """What differs between two runs.

    Attributes:
        settings: what differs in what is known of their starts, in words.
        same: the number of steps, from the first that both have, that are the same, bit for bit.
        difference: the first that differs; None if all steps that both have are the same.
        also: the other values of that step that differ.
        cause: why it differs, where the ledgers say so; "" elsewhere.
        module: where the replays of that step differ first; "" if they were not made, or are the
            same.
    """

    settings: list[str]
    same: int
    difference: Difference | None
    also: list[Difference]
    cause: str = ""
    module: str = ""


def diff(
    one: str | os.PathLike[str], other: str | os.PathLike[str], *, replays: bool = True
) -> Compared:
    """Compare two runs.

    Args:
        one, other: the run directories.
        replays: whether to replay the first step that differs in both, to find the first module
            that does, if their ledgers do not say why.

    Raises:
        DataError: a run has no ledger.
        LockstepError: a program has ended before that step.
    """
    planned = PlannedDiff(ledger(one), ledger(other))
    return planned.run() if replays else planned.compared


class PlannedDiff:
    """The comparison of two ledgers, and the replays that it needs.

    Args:
        one, other: the ledgers.

    Attributes:
        compared: what the ledgers say.
        replays: of the first step that differs; none if the ledgers say why, or are the same.
    """

    def __init__(self, one: Ledger, other: Ledger) -> None:
        settings = differences(one.starts[0], other.starts[0])
        common = np.intersect1d(one.steps["step"], other.steps["step"])
        difference: Difference | None = None
        also: list[Difference] = []
        same = 0
        for step in common.tolist():
            was = values_of(one.find(step))
            now = values_of(other.find(step))
            difference = first_difference(step, was, now)
            if difference is not None:
                break
            same += 1
        if difference is not None:
            others = [name for name in was._fields if name != difference.name]
            for name in others:
                alone = first_difference(
                    step,
                    was,
                    StepValues(
                        *(getattr(now if field == name else was, field) for field in was._fields)
                    ),
                )
                also += [alone] if alone is not None else []
        cause = "" if difference is None else _CAUSES.get(difference.name, "")
        self.compared = Compared(settings, same, difference, also, cause)
        self.replays: list[PlannedReplay] = []
        if difference is not None and not cause:
            self.replays = [PlannedReplay(run, difference.step) for run in (one, other)]

    def run(self) -> Compared:
        """Replay the step in both runs, and return where they differ first."""
        compared = self.compared
        if not self.replays:
            return compared
        first, second = (
            planned.run("lockstep.proof.probes:trace").result for planned in self.replays
        )
        pairs = zip(first, second, strict=False)
        module = next((left[0] for left, right in pairs if left != right), "")
        return Compared(
            compared.settings,
            compared.same,
            compared.difference,
            compared.also,
            compared.cause,
            module,
        )
