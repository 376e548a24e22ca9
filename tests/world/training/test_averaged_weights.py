"""`AveragedWeights`: averages of weights that no number of workers, checkpoint or evaluation
changes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.callbacks import AveragedWeights, Callback, Checkpoints, EarlyStopping
from lockstep.checkpoint.folder import load_weights
from lockstep.errors import ConfigError
from support.pool import Pool

DATA = TensorDataset(
    torch.randn(40, 6, generator=torch.Generator().manual_seed(1)), torch.arange(40) % 3
)


class Kept(Callback):
    """Keeps the weights of each step."""

    every_rank = True

    def __init__(self) -> None:
        self.states: list[dict[str, Tensor]] = []

    def on_train_step_end(self, trainer: Any, result: Any) -> None:
        self.states.append(
            {name: value.clone() for name, value in trainer.model.state_dict().items()}
        )


def made(*callbacks: Callback, run_dir: Path | None = None, **options: Any) -> Any:
    lockstep.init("cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.2)
    loss = nn.CrossEntropyLoss()
    return lockstep.Trainer(
        model, optimizer, loss, 8, run_dir=run_dir, callbacks=list(callbacks), **options
    )


def close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name].to(value.dtype))


def test_a_moving_average_and_a_mean_are_those_of_their_formulas() -> None:
    moving, mean, kept = AveragedWeights(0.75), AveragedWeights(None, start=4, every=3), Kept()
    made(moving, mean, kept).fit(DATA, 3)
    expected = kept.states[0]
    for state in kept.states[1:]:
        expected = {name: 0.75 * old + 0.25 * state[name] for name, old in expected.items()}
    newest = {"1.num_batches_tracked": kept.states[-1]["1.num_batches_tracked"]}
    close(dict(moving.model.state_dict()), expected | newest)
    chosen = kept.states[3::3]
    of_mean = {
        name: torch.stack([state[name].double() for state in chosen]).mean(0) for name in expected
    }
    close(
        dict(mean.model.state_dict()),
        of_mean | {"1.num_batches_tracked": chosen[-1]["1.num_batches_tracked"]},
    )


def test_a_resumed_run_has_the_average_of_an_undisturbed_one_and_writes_it(tmp_path: Path) -> None:
    straight, again = AveragedWeights(0.9), AveragedWeights(0.9)
    made(straight, Checkpoints(), run_dir=tmp_path / "straight").fit(DATA, 3)
    made(AveragedWeights(0.9), Checkpoints(), run_dir=tmp_path / "run").fit(DATA, max_steps=7)
    made(again, Checkpoints(), run_dir=tmp_path / "run").fit(DATA, 3, resume="latest")
    expected = straight.model.state_dict()
    for found in (
        again.model.state_dict(),
        load_weights(tmp_path / "run" / "averaged.safetensors"),
    ):
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_the_average_is_evaluated_beside_the_model(pool: Pool) -> None:
    def train() -> Any:
        averaged = AveragedWeights(0.5, start=6, validate=DATA, results=("loss", "accuracy"))
        stops = EarlyStopping("val_averaged_accuracy", patience=5)
        trainer = made(averaged, stops, virtual_workers=2)
        rows = trainer.fit(DATA, 2, validate=DATA)
        loss = lockstep.evaluate(
            averaged.model, lockstep.Loader(DATA, 8, shuffle=False), nn.CrossEntropyLoss()
        )["loss"]
        columns = ("val_loss", "val_averaged_loss", "val_accuracy", "val_averaged_accuracy")
        return (
            [[row[name] for name in columns] for row in rows],
            loss,
            lockstep.fingerprint(averaged.model),
        )

    one, two = pool.run(train, workers=1)[0], pool.run(train, workers=2)[0]
    assert (one[0], one[2]) == (two[0], two[2])
    (before, after), loss, _ = one
    assert before[0] == before[1] and before[2] == before[3]  # it has not begun
    assert after[0] != after[1] == pytest.approx(loss)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"decay": 1.0},
            "decay: expected a number from 0 to below 1, or None for the mean, got 1.0",
        ),
        ({"every": 0}, "every: expected a whole number of at least 1, got 0"),
        ({"start": True}, "start: expected"),
    ],
)
def test_what_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        AveragedWeights(**options)


@pytest.mark.leaks("a device mesh outlives its job, and its group with it")
def test_workers_without_whole_weights_are_refused(pool: Pool) -> None:
    def train() -> str:
        with pytest.raises(ConfigError) as error:
            made(AveragedWeights(), strategy="sharded").fit(DATA, 1)
        return str(error.value)

    assert (
        'expected AveragedWeights() with another strategy than "sharded"'
        in pool.run(train, workers=2)[0]
    )


def test_a_result_that_is_not_measured_and_a_model_that_is_not_there_are_named() -> None:
    averaged = AveragedWeights(validate=DATA, results=("loss", "f1"))
    with pytest.raises(ConfigError, match=r"fit.. has begun, got none"):
        _ = averaged.model
    with pytest.raises(ConfigError, match="results: expected names among loss, accuracy, got 'f1'"):
        made(averaged).fit(DATA, 1, validate=DATA)
