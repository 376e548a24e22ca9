"""Faults of an accelerator, played on the toy device: full memory, a device that is lost, and one
for two workers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.errors import ConfigError
from lockstep.training.step.out_of_memory import OutOfMemoryError
from support import toy_device
from support.pool import Pool, RanksFailedError

FULL = "toy out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 16.00 GiB."
TAKEN = (
    "(2.50 GiB more were asked for; 8.0 GiB of 16.0 GiB are this process's, 4.0 GiB those of "
    "others)"
)
STEP = (
    f"rank 0: toy:0 is out of memory in step 2, with 16 of the 16 samples of the global batch {TAKEN}. "
    'Try gradient_accumulation_steps=2, which changes no result, precision="bf16", a smaller global batch, or more '
    "workers."
)
COPY = (
    "rank 0: toy:0 is out of memory in the copy of a batch after step 2 of epoch 0, with global "
    f"batches of 16 samples {TAKEN}. Try a smaller global batch, or more workers: several passes "
    "over a batch need all of it on the device."
)


def data() -> TensorDataset:
    draws = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(96, 8, generator=draws), torch.arange(96) % 2)


def start() -> tuple[Any, nn.Module, torch.optim.Optimizer]:
    toy_device.register()
    comm = lockstep.init()
    torch.manual_seed(0)
    trained = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    return comm, trained, torch.optim.AdamW(trained.parameters(), 0.1)


class FailsAt(lockstep.callbacks.Callback):
    """Lets an operation of the device fail from the beginning of a step on."""

    every_rank = True

    def __init__(self, step: int, operation: str, error: Callable[[], BaseException]) -> None:
        self.step, self.operation, self.error = step, operation, error

    def on_train_step_start(self, trainer: Any, batch: Any) -> None:
        if batch.step == self.step:
            toy_device.play(self.fail)

    def fail(self, operation: str) -> None:
        if self.operation in ("any", operation):
            raise self.error()


def full() -> BaseException:
    return torch.OutOfMemoryError(FULL)


def lost() -> BaseException:
    return torch.AcceleratorError("toy error: the device is lost")


def trainer(operation: str) -> str:
    _, trained, optimizer = start()
    callbacks = [FailsAt(2, operation, full)]
    fitted = lockstep.Trainer(trained, optimizer, nn.CrossEntropyLoss(), 16, callbacks=callbacks)
    try:
        with pytest.raises(OutOfMemoryError) as caught:
            fitted.fit(data(), 1)
    finally:
        toy_device.play(None)
    return str(caught.value)


@pytest.mark.parametrize(
    ("operation", "said"),
    [
        ("addmm", STEP),  # forward
        ("threshold_backward", STEP),
        ("addcdiv", STEP),  # the update
        ("copy to the device", COPY),
    ],
)
def test_memory_that_is_full(toy_pool: Pool, operation: str, said: str) -> None:
    assert toy_pool.run(trainer, operation, workers=1, init=False) == [said]


def loop_with_prepare() -> str:
    _, trained, optimizer = start()
    trained, optimizer, loader = lockstep.prepare(trained, optimizer, DataLoader(data(), 16))
    try:
        with pytest.raises(OutOfMemoryError) as caught:
            for number, (inputs, labels) in enumerate(loader):
                nn.functional.cross_entropy(trained(inputs), labels).backward()
                optimizer.step()
                optimizer.zero_grad()
                if number == 2:
                    toy_device.play(FailsAt(0, "copy to the device", full).fail)
    finally:
        toy_device.play(None)
    return str(caught.value)


def test_memory_that_is_full_in_a_copy_for_a_loop_with_prepare(toy_pool: Pool) -> None:
    assert toy_pool.run(loop_with_prepare, workers=1, init=False) == [COPY]


def losing(rank: int) -> None:
    comm, trained, optimizer = start()
    callbacks = [FailsAt(2, "any", lost)] if comm.rank == rank else []
    fitted = lockstep.Trainer(trained, optimizer, nn.CrossEntropyLoss(), 16, callbacks=callbacks)
    try:
        fitted.fit(data(), 1)
    finally:
        toy_device.play(None)


def test_a_device_that_is_lost_ends_the_job_with_its_own_error(toy_pool: Pool) -> None:
    with pytest.raises(RanksFailedError) as caught:
        toy_pool.run(losing, 1, workers=2, init=False, env=toy_device.ONE_EACH)
    first, second = caught.value.outcomes
    assert (second.kind, second.message) == ("AcceleratorError", "toy error: the device is lost")
    assert "rank 1" in first.message or first.ending == "died"


def joins() -> None:
    toy_device.register()
    lockstep.init("toy")


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({}, "at most as many workers on a node as it has devices of type toy (1), got 2 workers"),
        (
            {**toy_device.ONE_EACH, "TOY_UUID": "TOY-a"},
            "a GPU of its own for each worker on a node, got GPU TOY-a on rank",
        ),
    ],
)
def test_two_workers_with_one_device_are_refused(
    toy_pool: Pool, env: dict[str, str], said: str
) -> None:
    outcomes = toy_pool.outcomes(joins, workers=2, init=False, env=env)
    refused = [outcome for outcome in outcomes if outcome.kind == ConfigError.__name__]
    assert refused and all(said in outcome.message for outcome in refused)
