"""The spike rule: what stands out, what does not, and that it goes on as it was from its state."""

from __future__ import annotations

import math
import random

import pytest

from lockstep.proof.spikes import Spike, SpikeDetector, SpikeRule, find_spikes


def healthy(steps: int, seed: int = 0) -> dict[str, list[float]]:
    draw = random.Random(seed)
    falling = [2.3 * math.exp(-step / 200) + 0.1 for step in range(steps)]
    return {
        "loss": [value * draw.uniform(0.8, 1.2) for value in falling],
        "gradient_norm": [2 * value * draw.lognormvariate(0, 0.4) for value in falling],
        "buffers_norm": [1 + 0.01 * draw.random() for _ in falling],
    }


def test_a_healthy_run_has_none() -> None:
    columns = healthy(2000)
    assert find_spikes(range(2000), columns) == []


@pytest.mark.parametrize(
    ("column", "factor"),
    [("loss", 100), ("gradient_norm", 1000), ("buffers_norm", 50), ("loss", math.nan)],
)
def test_a_value_that_is_far_off_is_found_with_its_column(column: str, factor: float) -> None:
    columns = healthy(300)
    columns[column][100] *= factor
    ((step, spike),) = find_spikes(range(300), columns)
    assert (step, spike.column) == (100, column)
    assert spike.spreads > 20
    assert str(spike).startswith(
        {"l": "the loss is", "g": "the norm of the gradient is", "b": "the norm of"}[column[0]]
    )


def test_a_value_that_is_not_finite_is_one_from_the_first_step_on() -> None:
    spike = SpikeDetector().spike({"loss": math.inf})
    assert spike is not None
    assert spike[:2] == ("loss", math.inf)
    assert str(spike) == "the loss is inf"


@pytest.mark.parametrize("column", ["loss", "gradient_norm", "buffers_norm"])
def test_a_jump_of_one_step_is_found_also_in_the_first_steps(column: str) -> None:
    columns = healthy(60)
    columns[column][4] *= 60
    # its consequences are larger
    for step in range(5, 12):
        columns["loss"][step] *= 10.0**step
    ((step, spike),) = find_spikes(range(60), columns)
    assert (step, spike.column) == (4, column)


def test_fast_growth_of_the_first_steps_is_none() -> None:
    detector = SpikeDetector()
    for step in range(40):
        values = {"loss": 2.0, "gradient_norm": 1.15**step}
        assert detector.spike(values) is None
        detector.note(values)


def test_of_spikes_close_to_each_other_the_first_counts_and_the_largest_orders_them() -> None:
    columns = healthy(400)
    columns["loss"][100] *= 60
    columns["loss"][200] *= 40
    for step, factor in ((201, 1e3), (202, 1e6)):
        columns["gradient_norm"][step] *= factor
    assert [step for step, _ in find_spikes(range(400), columns)] == [200, 100]


def test_columns_may_be_missing_and_steps_begin_anywhere() -> None:
    columns = {"loss": healthy(300)["loss"]}
    columns["loss"][250] *= 100
    assert [step for step, _ in find_spikes(range(1000, 1300), columns)] == [1250]


def test_what_was_noted_goes_on_elsewhere() -> None:
    columns = healthy(200)
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    whole, first, second = SpikeDetector(), SpikeDetector(), SpikeDetector()
    for number, row in enumerate(rows):
        whole.note(row)
        (first if number < 120 else second).note(row)
        if number == 119:
            second.load_state_dict(first.state_dict())
    assert second.state_dict() == whole.state_dict()
    odd = {"loss": 50.0}
    assert second.spike(odd) == whole.spike(odd) is not None


def test_a_step_with_a_spike_does_not_change_what_is_usual() -> None:
    detector = SpikeDetector(SpikeRule())
    for _ in range(100):
        detector.note({"loss": 1.0})
    for _ in range(100):
        detector.note({"loss": 1000.0})
    assert detector.spike({"loss": 1000.0}) == Spike("loss", 1000.0, 1.0, 9990.0)
