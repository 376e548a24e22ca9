"""The sums of an epoch: loss by what it counts, speed by the clock."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from lockstep import environment
from lockstep.training.trainer import EpochTotals


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_the_loss_is_weighted_by_what_it_counts(clock: list[float]) -> None:
    totals = EpochTotals(torch.device("cpu"))
    assert totals.loss == 0
    totals.add(torch.tensor(1.0), torch.tensor(3.0), samples=10)
    totals.add(torch.tensor(5.0), 1, samples=10)
    assert totals.loss == 2.0


def test_speed_is_samples_by_time(clock: list[float]) -> None:
    totals = EpochTotals(torch.device("cpu"))
    assert totals.samples_per_second == 0
    for _ in range(3):
        totals.add(torch.tensor(1.0), 7, samples=20)
    clock[0] = 104.0
    assert (totals.seconds, totals.samples_per_second) == (4.0, 15.0)


def test_speed_is_that_of_the_emulated_hosts(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.emulation_variables(
        "4 hosts, 1Gbit, 1ms, dilation 4", Path("clocks")
    ).items():
        monkeypatch.setenv(name, value)
    totals = EpochTotals(torch.device("cpu"))
    totals.add(torch.tensor(1.0), 7, samples=20)
    clock[0] = 108.0
    assert (totals.seconds, totals.samples_per_second) == (2.0, 10.0)


def test_sums_are_resumed_and_the_clock_is_not(clock: list[float]) -> None:
    first = EpochTotals(torch.device("cpu"))
    first.add(torch.tensor(1.0), 4, samples=8)
    clock[0] = 110.0
    second = EpochTotals(torch.device("cpu"))
    second.load_state_dict(first.state_dict())
    second.add(torch.tensor(2.0), 4, samples=8)
    clock[0] = 112.0
    assert (second.loss, second.seconds, second.samples_per_second) == (1.5, 2.0, 4.0)
