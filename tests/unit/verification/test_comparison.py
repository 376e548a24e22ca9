"""The first difference between the steps of two runs, told from rounding, and its likely cause."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pytest

from lockstep.verification.comparison import compare, diverging_ranks, tolerance
from lockstep.verification.records import RunRecord, StepRecord, TensorRecord


def tensor(*values: float) -> TensorRecord:
    return TensorRecord(repr(values), len(values), math.hypot(*values), values)


def step(
    number: int,
    gradients: Mapping[str, TensorRecord],
    buffers: Mapping[str, TensorRecord] | None = None,
    lr: float = 0.1,
    weight: float = 1.0,
) -> StepRecord:
    return StepRecord(
        0, number, ({"lr": str(lr)},), {"w": tensor(weight)}, dict(gradients), dict(buffers or {})
    )


def run(
    *steps: StepRecord, workers: int = 1, rank: int = 0, layers: Sequence[str] = ()
) -> RunRecord:
    return RunRecord(rank, workers, steps, tuple(layers))


ONE = run(
    step(0, {"w": tensor(1.0, 2.0), "b": tensor(3.0)}),
    step(1, {"w": tensor(2.0, 1.0), "b": tensor(1.0)}),
)


def test_equal_runs_have_the_same_bits() -> None:
    found = compare(ONE, ONE)
    assert (found.difference, found.same_bits, found.largest) == (None, True, 0.0)


def test_rounding_is_no_difference_but_is_measured() -> None:
    other = run(step(0, {"w": tensor(1.0, 2.00001), "b": tensor(3.0)}), ONE.steps[1], workers=2)
    found = compare(ONE, other)
    assert found.difference is None and not found.same_bits
    assert found.largest == pytest.approx(1e-5 / math.sqrt(14), rel=1e-3)


def test_the_first_gradient_beyond_rounding_is_named() -> None:
    other = run(ONE.steps[0], step(1, {"w": tensor(2.0, 1.0), "b": tensor(1.1)}), workers=2)
    found = compare(ONE, other).difference
    assert found is not None
    assert (found.step, found.kind, found.name) == (1, "gradient", "b")
    assert found.distance == pytest.approx(0.1) and found.ratio == pytest.approx(1.1)


def test_a_gradient_that_is_rounding_itself_is_not_named() -> None:
    """That of a bias before batch norm is zero up to rounding, and another rounding at each number
    of workers.
    """
    one = run(step(0, {"bias": tensor(1e-9), "w": tensor(1.0)}))
    other = run(step(0, {"bias": tensor(-3e-9), "w": tensor(1.0)}), workers=2)
    assert compare(one, other).difference is None
    other = run(step(0, {"bias": tensor(-3e-9), "w": tensor(1.5)}), workers=2)
    difference = compare(one, other).difference
    assert difference is not None and difference.name == "w"


def test_hyperparameters_precede_gradients() -> None:
    other = run(
        ONE.steps[0], step(1, {"w": tensor(9.0, 9.0), "b": tensor(1.0)}, lr=0.05), workers=2
    )
    found = compare(ONE, other).difference
    assert found is not None
    assert (found.step, found.kind, found.name, found.values) == (
        1,
        "hyperparameter",
        "lr",
        ("0.1", "0.05"),
    )


def test_models_that_begin_with_other_weights() -> None:
    other = run(step(0, ONE.steps[0].gradients, weight=1.5), workers=2)
    found = compare(run(ONE.steps[0]), other).difference
    assert found is not None and (found.step, found.kind, found.name) == (0, "parameter", "w")


def test_buffers_that_differ() -> None:
    gradients = ONE.steps[0].gradients
    one, other = (
        run(step(0, gradients, {"norm.running_mean": tensor(each)})) for each in (1.0, 1.2)
    )
    found = compare(one, other).difference
    assert found is not None and (found.kind, found.name) == ("buffer", "norm.running_mean")


def test_runs_of_other_lengths() -> None:
    found = compare(ONE, run(ONE.steps[0], workers=2)).difference
    assert found is not None and (found.kind, found.values) == ("steps", ("2", "1"))


def test_values_that_are_not_finite() -> None:
    """The same NaN is no difference, and one that only one run has is the largest."""
    broken = run(step(0, {"w": tensor(math.nan, 1.0)}))
    assert compare(broken, broken).difference is None
    found = compare(run(step(0, {"w": tensor(1.0, 1.0)})), broken).difference
    assert found is not None and found.name == "w"


def test_formats_of_16_bits_round_more() -> None:
    assert (
        tolerance(0, False)
        == 1e-4
        < tolerance(3, False)
        < tolerance(100, False)
        == tolerance(0, True)
    )


def test_ranks_that_went_apart() -> None:
    ranks = [
        run(ONE.steps[0]),
        run(ONE.steps[0], rank=1),
        run(step(0, ONE.steps[0].gradients, weight=2.0), rank=2),
    ]
    assert diverging_ranks(ranks) == (2, 0, "w")
    assert diverging_ranks(ranks[:2]) is None
