"""What depends on the division of a global batch is said once, at the start, and only where it
matters.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.communicator.elastic_communicator import ElasticCommunicator
from lockstep.errors import ConfigError
from lockstep.parallel.sync_batchnorm import SyncBatchNorm, convert
from lockstep.training.divided_batches import describe_division


class Everything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.drops = nn.ModuleList(nn.Dropout(0.1) for _ in range(5))
        self.out = nn.Linear(4, 1)


def hooked() -> nn.Module:
    model = nn.Linear(4, 1)
    model.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
    model.bias.register_post_accumulate_grad_hook(lambda parameter: None)
    return model


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Everything(), "dropout draws other masks (drops.0, drops.1, drops.2 and 2 more); "),
        (Everything(), "batch norm has the statistics of a part (norm)"),
        (nn.LSTM(2, 2, num_layers=2, dropout=0.5), "dropout draws other masks (the model itself)"),
        (nn.MultiheadAttention(4, 2, dropout=0.5), "dropout draws other masks (the model itself)"),
        (hooked(), "a hook of a parameter sees the gradient of a part (weight, bias)"),
    ],
)
def test_what_is_listed_is_named(model: nn.Module, said: str) -> None:
    for division in ((2, 1, 1), (1, 2, 1), (1, 1, 2)):
        assert said in describe_division(model, *division)
    assert describe_division(model, 1, 1, 1) == ""
    assert describe_division(model, 2, 3, 1).startswith(
        "2 workers, 3 passes of each worker: results may depend on"
    )


def test_nothing_is_said_of_what_does_not_matter() -> None:
    plain = nn.Sequential(
        nn.Linear(4, 4), nn.LayerNorm(4), nn.Dropout(0.0), nn.GroupNorm(2, 4), nn.InstanceNorm1d(4)
    )
    frozen = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5)).eval()
    assert describe_division(plain, 4, 4, 4) == ""
    assert describe_division(frozen, 4, 4, 4) == ""


class Two:
    size, rank = 2, 0


def test_synchronised_batch_norm_depends_on_passes_alone() -> None:
    comm: Any = Two()
    model = convert(nn.Sequential(nn.BatchNorm1d(4)), comm)
    assert isinstance(model.get_submodule("0"), SyncBatchNorm)
    assert describe_division(model, 2, 1, 1) == ""
    assert "batch norm has the statistics of a part (0)" in describe_division(model, 2, 2, 1)


def fit(model: nn.Module, loss: nn.Module | None = None, **options: Any) -> None:
    data = TensorDataset(torch.randn(8, 4), torch.randn(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = lockstep.Trainer(model, optimizer, loss or nn.MSELoss(), 8, callbacks=[], **options)
    trainer.fit(data, epochs=2)
    trainer.fit(data, epochs=3)


def test_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "lockstep.training.step.train_step")
    drops = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    fit(drops)
    fit(drops, virtual_workers=4)
    assert not [record for record in caplog.records if "divided" in record.getMessage()]
    fit(drops, gradient_accumulation_steps=2)
    assert len([record for record in caplog.records if "divided" in record.getMessage()]) == 1


class Noisy(nn.Linear):
    """Draws random numbers without a layer that says so."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(nn.functional.dropout(input, 0.1, self.training))


class Running(nn.Linear):
    """Has a constant, a counter, and a mean of its inputs that it uses."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("constant", torch.ones(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(4))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.calls += 1
            self.average.lerp_(input.mean(0), 0.1)
        return super().forward(input * self.constant - self.average)


class Centred(nn.Linear):
    """Subtracts a mean over the samples."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input - input.mean(0))


MIXES = (
    "an output for a sample depends on the others of the same pass, as by statistics of the batch"
)


class RunningLoss(nn.MSELoss):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(()))

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return super().forward(input, target)


class ChangingLoss(RunningLoss):
    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.average = self.average * 0.9 + target.mean() * 0.1
        return super().forward(input, target)


@pytest.mark.parametrize(
    ("model", "loss", "said"),
    [
        (Noisy(4, 1), nn.MSELoss(), "the passes draw random numbers, others in each part"),
        (Running(4, 1), nn.MSELoss(), f"a buffer is changed by a part (average); {MIXES}"),
        (Centred(4, 1), nn.MSELoss(), MIXES),
        (nn.Linear(4, 1), ChangingLoss(), "a buffer is changed by a part (loss.0.average)"),
        (nn.Linear(4, 1), RunningLoss(), ""),
        (nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 1)), nn.MSELoss(), ""),
    ],
)
def test_what_the_first_passes_do_is_named(
    model: nn.Module, loss: nn.Module, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "lockstep.training.step.train_step")
    fit(model, loss, gradient_accumulation_steps=2)
    found = "".join(
        record.getMessage() for record in caplog.records if "divided" in record.getMessage()
    )
    assert found.endswith(f": {said}") if said else found == ""


def test_sync_batchnorm_is_an_argument() -> None:
    with pytest.raises(
        ConfigError, match="sync_batchnorm: expected False with strategy='replicas', got True"
    ):
        fit(
            nn.Sequential(nn.Linear(4, 1)),
            strategy="replicas",
            devices=["cpu", "cpu"],
            sync_batchnorm=True,
        )
    fit(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)), sync_batchnorm=True)


class AloneAsYet(ElasticCommunicator):
    size, rank = 1, 0  # type: ignore[assignment]

    def __init__(self) -> None:
        pass


def test_batch_norm_is_synchronised_from_the_start_where_others_may_join() -> None:
    model = convert(nn.Sequential(nn.BatchNorm1d(4)), AloneAsYet())
    assert isinstance(model[0], SyncBatchNorm)  # type: ignore[index]
