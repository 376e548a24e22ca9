"""Learning rates follow the step, and the step alone."""

from __future__ import annotations

import pytest

from lockstep.errors import ConfigError
from lockstep.training.schedules import SCHEDULES, make_schedule, scaled_lr


def test_constant() -> None:
    assert {make_schedule("constant", 10)(step) for step in range(20)} == {1.0}


def test_cosine_goes_from_one_to_zero() -> None:
    schedule = make_schedule("cosine", 100)
    values = [schedule(step) for step in range(101)]
    assert values[0] == 1
    assert values[50] == pytest.approx(0.5)
    assert values[100] == pytest.approx(0)
    assert values == sorted(values, reverse=True)


def test_step_falls_three_times() -> None:
    schedule = make_schedule("step", 90)
    assert [schedule(step) for step in (29, 30, 60, 80, 89)] == pytest.approx(
        [1, 0.1, 0.01, 0.001, 0.001]
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_warm_up_comes_before(name: str) -> None:
    schedule = make_schedule(name, 50, warmup_steps=4, warmup_start=0.5)
    assert [schedule(step) for step in range(5)] == pytest.approx([0.6, 0.7, 0.8, 0.9, 1.0])


@pytest.mark.parametrize("warmup", [50, 60, -1])
def test_a_warm_up_must_fit(warmup: int) -> None:
    with pytest.raises(ConfigError, match="warmup_epochs"):
        make_schedule("constant", 50, warmup)


def test_unknown_names() -> None:
    with pytest.raises(ConfigError, match="Did you mean cosine"):
        make_schedule("cosin", 10)


def test_linear_scaling() -> None:
    assert scaled_lr(0.1, 1024, 256) == pytest.approx(0.4)
    assert scaled_lr(0.1, 1024, None) == 0.1
