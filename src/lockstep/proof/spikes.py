"""The spike rule: which steps of a run stand out by their loss, or the norm of their gradient or
buffers.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

COLUMNS = ("loss", "gradient_norm", "buffers_norm")
"""The numbers of a step that are watched. With batch norm a sample that is far off shows in the
buffers alone.
"""

# The standard deviation of a normal distribution is so many times its median absolute deviation.
_NORMAL = 1.4826


@dataclass(frozen=True)
class SpikeRule:
    """What counts as a spike.

    A value is one if it is more than `spreads` spreads above the median of the last `window` values
    that were none, and more than `jump` times the largest of the last `recent` of them. A spread is
    the median absolute deviation, scaled to the standard deviation of a normal distribution, but at
    least `floor` times the median, so that a steady run has no spikes that matter to nobody, and at
    least `scale` times the largest median so far: what a run has coped with at its beginning harms
    nothing when it has converged. A value that is not finite always is one.

    Attributes:
        spreads: see above.
        window: see above, in steps.
        floor: see above.
        scale: see above.
        jump: see above; fast growth, as of gradients in the first steps, is none.
        recent: see above, in steps.
        watched: so many first values of gradients, which grow in the first steps, are spikes only
            by `early_jump` in place of `jump`.
        watched_others: so many of the other columns.
        early_jump: see above. Of eight small networks with up to four times their learning rate, no
            healthy run had more than 6.8 times the largest norm before in its first 33 steps, or
            more than 1.5 times that of step 0 in step 1.
        least: number of values that must come before a spike.
        apart: of several spikes with fewer steps between them the first counts: the others may be
            its consequences.
    """

    spreads: float = 20.0
    window: int = 64
    floor: float = 0.1
    scale: float = 0.1
    jump: float = 3.0
    recent: int = 16
    watched: int = 32
    watched_others: int = 8
    early_jump: float = 10.0
    least: int = 1
    apart: int = 16


RULE = SpikeRule()
"""The rule of a training that chooses no other; `benchmarks/spike_alarms.py` counts its false
alarms.
"""


class Spike(NamedTuple):
    """A value that stands out.

    Attributes:
        column: which of `COLUMNS`.
        value: the value.
        usual: the median of the values before it; NaN where there are none.
        spreads: how many spreads the value is above that; infinite if it is not finite.
    """

    column: str
    value: float
    usual: float
    spreads: float

    def __str__(self) -> str:
        what = {
            "loss": "the loss",
            "gradient_norm": "the norm of the gradient",
            "buffers_norm": "the norm of the buffers",
        }
        text = f"{what[self.column]} is {self.value:.4g}"
        if math.isfinite(self.spreads):
            text += f", {self.spreads:.0f} spreads above the usual {self.usual:.4g}"
        return text


class _Column:
    """The values of one column that were no spikes."""

    def __init__(self, name: str, rule: SpikeRule) -> None:
        self.name = name
        self._rule = rule
        self._watched = rule.watched if name == "gradient_norm" else rule.watched_others
        self.values: deque[float] = deque(maxlen=rule.window)
        self.largest_median = 0.0
        self.count = 0

    def spike(self, value: float) -> Spike | None:
        """Return the spike that a value is; None if it is none."""
        rule = self._rule
        if not math.isfinite(value):
            usual = median(self.values) if self.values else math.nan
            return Spike(self.name, value, usual, math.inf)
        if self.count < rule.least:
            return None
        before = list(self.values)
        jump = rule.early_jump if self.count < self._watched else rule.jump
        if value <= jump * max(before[-rule.recent :]):
            return None
        usual = median(before)
        deviation = _NORMAL * median(abs(value - usual) for value in before)
        spread = max(deviation, rule.floor * usual, rule.scale * self.largest_median)
        spreads = (value - usual) / spread if spread else math.inf
        return Spike(self.name, value, usual, spreads) if spreads > rule.spreads else None

    def accept(self, value: float) -> None:
        """Note a value that is no spike."""
        self.values.append(value)
        self.count += 1
        if self.count % self._rule.recent == 0:
            self.largest_median = max(self.largest_median, median(self.values))


class SpikeDetector:
    """Finds spikes step by step, from numbers that all workers have alike; so they all find the
    same.

    Args:
        rule: what counts as a spike.
    """

    def __init__(self, rule: SpikeRule = RULE) -> None:
        self._columns = {name: _Column(name, rule) for name in COLUMNS}

    def spike(self, values: Mapping[str, float]) -> Spike | None:
        """Return the largest spike of a step, which is not noted; None if it has none.

        Args:
            values: those of the step, by column; a column may be missing.
        """
        spikes = [self._columns[name].spike(value) for name, value in values.items()]
        return max(
            (spike for spike in spikes if spike is not None),
            key=lambda spike: spike.spreads,
            default=None,
        )

    def note(self, values: Mapping[str, float]) -> None:
        """Note the values of a step that are no spikes."""
        for name, value in values.items():
            if self._columns[name].spike(value) is None:
                self._columns[name].accept(value)

    def state_dict(self) -> dict[str, Any]:
        """Return what has been noted: plain values."""
        return {
            name: {
                "values": list(column.values),
                "largest_median": column.largest_median,
                "count": column.count,
            }
            for name, column in self._columns.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned."""
        for name, column in self._columns.items():
            column.values.clear()
            column.values.extend(map(float, state[name]["values"]))
            column.largest_median = float(state[name]["largest_median"])
            column.count = int(state[name]["count"])


def find_spikes(
    steps: Sequence[int], columns: Mapping[str, Sequence[float]], rule: SpikeRule = RULE
) -> list[tuple[int, Spike]]:
    """Return the steps of a run that stand out, with their spikes, those with the largest
    consequences first.

    Args:
        steps: the numbers of the steps, in order.
        columns: their values by the names of `COLUMNS`; a column may be missing.
        rule: what counts as a spike.
    """
    detector = SpikeDetector(rule)
    first: list[tuple[int, Spike]] = []  # of each group of steps that are close to each other
    largest: list[float] = []  # the spreads of the largest spike of each group
    last = -math.inf
    for step, row in zip(steps, zip(*columns.values(), strict=True), strict=True):
        values = {name: float(value) for name, value in zip(columns, row, strict=True)}
        spike = detector.spike(values)
        detector.note(values)
        if spike is None:
            continue
        if step - last >= rule.apart:
            first.append((int(step), spike))
            largest.append(spike.spreads)
        else:
            largest[-1] = max(largest[-1], spike.spreads)
        last = step
    order = sorted(range(len(first)), key=lambda number: -largest[number])
    return [first[number] for number in order]
