"""Results are looked at late where that would make the device wait, and none is forgotten."""

from __future__ import annotations

import pytest
import torch

from lockstep.errors import DivergedError
from lockstep.training.in_flight import LAG, StepsInFlight
from lockstep.training.step.step_result import StepNumbers, StepResult


def result(step: int, loss: float = 1.0, stop: float = 0.0) -> StepResult:
    values = torch.tensor([loss, stop, 1.0]).unbind()
    return StepResult(step, StepNumbers(values[0], values[2], values[1]), 0.1)


@pytest.mark.parametrize(("device", "lag"), [("cpu", 0), ("meta", LAG)])
def test_a_stop_request_is_reported_once(device: str, lag: int) -> None:
    steps_in_flight = StepsInFlight(torch.device(device))
    heard = []
    for step in range(10):
        steps_in_flight.add(result(step, stop=float(step == 3)))
        heard.append(steps_in_flight.settle())
    assert heard == [step == 3 + lag for step in range(10)]


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), -float("inf")])
def test_a_loss_that_is_not_finite(loss: float) -> None:
    steps_in_flight = StepsInFlight(torch.device("meta"))
    steps_in_flight.add(result(7, loss))
    assert not steps_in_flight.settle()
    for _ in range(2):  # to look does not forget
        with pytest.raises(DivergedError, match="at step 7 with learning rate"):
            steps_in_flight.check()
