"""Where two records of a training part, and what is said about it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lockstep.verify import Parting, Record, first_parting, likely_cause
from lockstep.verify.recording import Step


def step(loss: float, **tensors: str) -> Step:
    return Step("-".join([loss.hex(), *tensors.values()]), loss.hex(), tensors)


ONE = Record(1, (step(1.0, a="x", b="y"), step(0.5, a="u", b="v")), {"threads": 1}, ("Dropout", "Linear"))
TWO = replace(ONE, workers=2)


def test_equal_records_do_not_part() -> None:
    assert first_parting(ONE, TWO) is None


def test_the_first_step_and_its_tensors_are_named() -> None:
    other = replace(TWO, steps=(ONE.steps[0], step(0.5, a="u", b="w")))
    assert first_parting(ONE, other) == Parting(1, False, ("b",), 2)


def test_a_loss_that_differs_alone_is_a_parting() -> None:
    other = replace(TWO, steps=(step(1.5, a="x", b="y"), ONE.steps[1]))
    assert first_parting(ONE, other) == Parting(0, True, (), 2)


FORWARD, BACKWARD = Parting(0, True, ("a",), 2), Parting(0, False, ("a",), 2)


@pytest.mark.parametrize(
    ("other", "parting", "has_shards", "again", "said"),
    [
        (TWO, FORWARD, True, Parting(3, True, ("b",), 2), "two runs with 1 have parted too, at step 3, in b"),
        (TWO, FORWARD, False, None, "without shards"),
        (replace(TWO, conditions={"threads": 2}), BACKWARD, True, None, "threads: 1 against 2"),
        (TWO, FORWARD, True, None, "The model has Dropout"),
        (TWO, Parting(0, False, ("1.running_mean",), 2), True, None, "running statistics"),
        (TWO, BACKWARD, True, None, "backward pass without a fixed order"),
    ],
)
def test_the_likely_cause(other: Record, parting: Parting, has_shards: bool, again: Parting | None, said: str) -> None:
    assert said in likely_cause(ONE, other, parting, has_shards, again)
