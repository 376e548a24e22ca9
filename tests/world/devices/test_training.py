"""Training on an accelerator, played by the toy device: the numbers are the CPU's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.errors import ConfigError
from support import toy_device
from support.pool import Pool

OPTIONS: list[dict[str, Any]] = [
    {},
    {"virtual_workers": 4},
    {"precision": "bf16"},
    {"max_grad_norm": 1.0},
    {"gradient_accumulation_steps": 2},
]


def data() -> TensorDataset:
    draws = torch.Generator().manual_seed(1)
    x = torch.randn(90, 16, generator=draws)
    return TensorDataset(x, (x.sum(1) > 0).long())


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 2)
    )


def train(device: str, options: dict[str, Any], before: bool = False) -> list[tuple[float, float]]:
    """Return the losses of a training on a device; the model is put there before it, or by the
    trainer.
    """
    toy_device.register()
    lockstep.init(device)
    trained = model()
    if before:
        trained.to(device)
    optimizer = torch.optim.SGD(trained.parameters(), 0.1, momentum=0.9)
    trainer = lockstep.Trainer(
        trained, optimizer, nn.CrossEntropyLoss(), 24, callbacks=[], **options
    )
    trainer.fit(data(), 3, validate=data())
    assert {p.device.type for p in trained.parameters()} == {device}
    return [(row["train_loss"], row["val_loss"]) for row in trainer.history]


@pytest.mark.parametrize(
    "options", OPTIONS, ids=lambda options: "-".join(map(str, options)) or "plain"
)
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_losses_are_those_of_the_cpu(
    toy_pool: Pool, workers: int, options: dict[str, Any]
) -> None:
    on_cpu = toy_pool.run(train, "cpu", options, workers=workers, init=False)
    on_toy = toy_pool.run(
        train, "toy", options, workers=workers, init=False, env=toy_device.ONE_EACH
    )
    check_same(on_toy, on_cpu, exact=workers < 3 or "virtual_workers" in options)


def check_same(on_toy: list[Any], on_cpu: list[Any], exact: bool = True) -> None:
    """Check that losses are equal; not `exact` where the CPU's workers are summed in the order of
    shared memory.
    """
    for toy, cpu in zip(on_toy, on_cpu, strict=True):
        for (train_loss, val_loss), (expected_train, expected_val) in zip(toy, cpu, strict=True):
            assert train_loss == pytest.approx(
                expected_train, rel=1e-6
            )  # a float32 where the CPU has a sum of them
            assert val_loss == (expected_val if exact else pytest.approx(expected_val, rel=1e-5))


def test_a_model_that_its_owner_put_on_the_device(toy_pool: Pool) -> None:
    on_cpu = toy_pool.run(train, "cpu", {}, workers=2, init=False)
    on_toy = toy_pool.run(train, "toy", {}, True, workers=2, init=False, env=toy_device.ONE_EACH)
    check_same(on_toy, on_cpu)


def put_elsewhere() -> str:
    toy_device.register()
    comm = lockstep.init("cpu")
    trained = model().to("toy")
    said = []
    for start in (
        lambda: lockstep.TrainStep(
            trained, torch.optim.SGD(trained.parameters(), 0.1), nn.CrossEntropyLoss()
        ),
        lambda: lockstep.prepare_model(trained, comm),
        lambda: lockstep.prepare(trained, torch.optim.SGD(trained.parameters(), 0.1)),
    ):
        with pytest.raises(ConfigError) as caught:
            start()
        said.append(str(caught.value))
    assert len(set(said)) == 1
    return said[0]


def test_a_model_on_another_device_than_the_workers_is_refused(toy_pool: Pool) -> None:
    (said,) = toy_pool.run(put_elsewhere, workers=1, init=False)
    assert said == (
        "model: expected one on cpu, where this worker computes, got one on toy:0. "
        'lockstep.init("toy") at the start of the program chooses that device.'
    )
