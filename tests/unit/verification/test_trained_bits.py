"""Where two records of a training part, and what is said about it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lockstep.verification.trained_bits import (
    Divergence,
    Record,
    Step,
    first_divergence,
    likely_cause,
)


def step(loss: float, **tensors: str) -> Step:
    return Step("-".join([loss.hex(), *tensors.values()]), loss.hex(), tensors)


ONE = Record(
    1, (step(1.0, a="x", b="y"), step(0.5, a="u", b="v")), {"threads": 1}, ("Dropout", "Linear")
)
TWO = replace(ONE, workers=2)


def test_equal_records_do_not_part() -> None:
    assert first_divergence(ONE, TWO) is None


def test_the_first_step_and_its_tensors_are_named() -> None:
    other = replace(TWO, steps=(ONE.steps[0], step(0.5, a="u", b="w")))
    assert first_divergence(ONE, other) == Divergence(1, False, ("b",), 2)


def test_a_loss_that_differs_alone_is_a_divergence() -> None:
    other = replace(TWO, steps=(step(1.5, a="x", b="y"), ONE.steps[1]))
    assert first_divergence(ONE, other) == Divergence(0, True, (), 2)


FORWARD, BACKWARD = Divergence(0, True, ("a",), 2), Divergence(0, False, ("a",), 2)


@pytest.mark.parametrize(
    ("other", "divergence", "has_virtual_workers", "repeated", "said"),
    [
        (
            TWO,
            FORWARD,
            True,
            Divergence(3, True, ("b",), 2),
            "two runs with 1 worker diverge too, at step 3, in b",
        ),
        (TWO, FORWARD, False, None, "without virtual workers"),
        (replace(TWO, settings={"threads": 2}), BACKWARD, True, None, "threads: 1 against 2"),
        (TWO, FORWARD, True, None, "The model has Dropout"),
        (TWO, Divergence(0, False, ("1.running_mean",), 2), True, None, "running statistics"),
        (TWO, BACKWARD, True, None, "backward pass has no fixed order"),
    ],
)
def test_the_likely_cause(
    other: Record,
    divergence: Divergence,
    has_virtual_workers: bool,
    repeated: Divergence | None,
    said: str,
) -> None:
    assert said in likely_cause(ONE, other, divergence, has_virtual_workers, repeated)
