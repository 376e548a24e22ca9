"""The only message of a small model's step is made and read on the device, and nothing waits for
it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.parallel.one_bucket import OneBucket
from support.gpu import DEVICE, no_waiting

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]


def test_nothing_waits_for_the_message() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(64, 3)).to(DEVICE)
    parameters = list(model.parameters())
    # the other of two workers sends zeros
    comm: Any = SimpleNamespace(
        rank=0, size=2, device=torch.device(DEVICE), allreduce=lambda message: message
    )
    assert OneBucket.fits(parameters, comm, numbers=3)
    bucket, inputs = OneBucket(parameters, comm), torch.ones(2, 1, 6, 6, device=DEVICE)
    numbers = torch.tensor([1.0, 2.0**40 + 1, 1 / 3], dtype=torch.float64, device=DEVICE)
    for _ in range(2):  # the first one allocates the message
        model.zero_grad()
        model(inputs).sum().backward()
        local = [p.grad for p in parameters if p.grad is not None]
        with no_waiting():
            sums = bucket.average(numbers)
    assert sums.equal(numbers)
    averages = [p.grad for p in parameters if p.grad is not None]
    assert len(averages) == len(local) == 4
    for average, own in zip(averages, local, strict=True):
        assert average.equal(own / 2)
