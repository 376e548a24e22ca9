"""A step that needs more memory than there is leaves the job with one line that says what to
try.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.data.loader import Batch, Loader
from lockstep.errors import LockstepError
from lockstep.training.evaluate import evaluate
from lockstep.training.step.out_of_memory import OutOfMemoryError
from lockstep.training.step.train_step import TrainStep

CUDA = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.11 GiB of "
    "which 1.20 GiB is free.\nProcess 12 has 77 GiB memory in use."
)


class Full(nn.Linear):
    """Needs more memory than there is."""

    def __init__(self, how: Any) -> None:
        super().__init__(4, 2)
        self.how = how

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.how()
        return super().forward(inputs)


def of_cuda() -> None:
    raise torch.OutOfMemoryError(CUDA)


def of_cpu() -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


def step_of(how: Any, **options: Any) -> TrainStep:
    model = Full(how)
    return TrainStep(
        model, torch.optim.SGD(model.parameters(), 0.1), nn.CrossEntropyLoss(), **options
    )


BATCH = Batch((torch.ones(6, 4), torch.zeros(6, dtype=torch.long)), torch.arange(6), 6, 6, 0, 0)


def test_the_line_names_rank_device_batch_and_what_to_try() -> None:
    with pytest.raises(OutOfMemoryError) as caught:
        step_of(of_cuda)(BATCH)
    assert str(caught.value) == (
        "rank 0: cpu is out of memory in step 0, with 6 of the 6 samples of the global batch (2.50 GiB more were asked "
        'for). Try gradient_accumulation_steps=2, which changes no result, precision="bf16", a smaller global batch, '
        "or more workers."
    )
    assert isinstance(caught.value, LockstepError)
    assert isinstance(caught.value, torch.OutOfMemoryError), (
        "handlers of torch's own error still get it"
    )


def test_memory_of_the_host_is_named_as_well() -> None:
    with pytest.raises(
        OutOfMemoryError, match=r"\(1152921504606846976 bytes more were asked for\)"
    ):
        step_of(of_cpu)(BATCH)


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        (
            {"gradient_accumulation_steps": 4},
            "Try gradient_accumulation_steps=8, which changes no result, p",
        ),
        (
            {"precision": "bf16"},
            "Try gradient_accumulation_steps=2, which changes no result, a smaller global batch,",
        ),
        (
            {"virtual_workers": 2},
            "Try more virtual workers, each of which computes its part in a pass of its own, p",
        ),
    ],
)
def test_the_advice_is_what_is_left_to_try(options: dict[str, Any], advice: str) -> None:
    with pytest.raises(OutOfMemoryError) as caught:
        step_of(of_cuda, **options)(BATCH)
    assert advice in str(caught.value)


def test_an_evaluation_says_what_helps_there() -> None:
    loader = Loader(
        TensorDataset(torch.ones(6, 4), torch.zeros(6, dtype=torch.long)), 3, shuffle=False
    )
    with pytest.raises(OutOfMemoryError) as caught:
        evaluate(Full(of_cuda), loader, nn.CrossEntropyLoss())
    assert str(caught.value) == (
        "rank 0: cpu is out of memory in an evaluation in batches of 3 samples (2.50 GiB more "
        "were asked for). Evaluate with a Loader with a smaller global_batch_size, or with more "
        "workers."
    )


def test_other_errors_stay_as_they_are() -> None:
    def fail() -> None:
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match=r"^something else$"):
        step_of(fail)(BATCH)
