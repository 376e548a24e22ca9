"""Weights that a finite loss has made NaN are never saved as good, resumed from or recommended."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.callbacks import Checkpoints
from lockstep.checkpoint import folder
from lockstep.errors import CheckpointError, DivergedError
from lockstep.training.run import checkpoint_manager
from lockstep.training.trainer import Trainer
from support.pool import Pool
from support.runs import At, send

X = torch.randn(64, 5, generator=torch.Generator().manual_seed(0))
X[17] = 0  # the norm of its error is 0, and the gradient of that is NaN
DATA = TensorDataset(X, torch.zeros(64, 1))


def distance(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().sum(1).sqrt()


def make(run_dir: Path | None, *callbacks: Any, **options: Any) -> Trainer:
    lockstep.init("cpu")
    torch.manual_seed(0)
    model = nn.Linear(5, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    return Trainer(
        model, optimizer, distance, 16, run_dir=run_dir, callbacks=list(callbacks), **options
    )


def message(trainer: Trainer, epochs: int = 3, resume: str | None = None) -> str:
    with pytest.raises(DivergedError) as caught:
        trainer.fit(DATA, epochs, resume=resume)
    return str(caught.value)


def step_of(text: str) -> int:
    found = re.match(
        r"the trained weights are not finite after step (\d+): 5 of 5 values of weight\. ", text
    )
    assert found is not None, text
    return int(found[1])


def saved_steps(run_dir: Path) -> list[int]:
    paths = sorted((run_dir / "checkpoints").glob("step-*"))
    return [int(path.name.removeprefix("step-")) for path in paths]


@pytest.mark.leaks("a device mesh outlives its job, and its group with it")
@pytest.mark.parametrize(
    ("workers", "options"),
    [
        (1, {}),
        (2, {"async_save": True}),
        (2, {"strategy": "sharded"}),  # of the only row of weights the second worker has nothing
        (2, {"virtual_workers": 4}),
    ],
)
def test_nan_weights_are_not_saved(
    pool: Pool, workers: int, options: dict[str, Any], tmp_path: Path
) -> None:
    def body() -> tuple[str, str]:
        first = message(make(tmp_path, Checkpoints("1step"), **options))
        return first, message(make(tmp_path, Checkpoints("1step"), **options), resume="latest")

    for first, resumed in pool.run(body, workers=workers):
        step = step_of(first)
        assert saved_steps(tmp_path)[-1] == step - 1
        assert first.endswith(
            f" The last checkpoint is {tmp_path}/checkpoints/step-{step - 1:010d}."
        )
        assert resumed == first


def test_a_run_that_saves_nothing_ends_with_the_error_too() -> None:
    def note(trainer: Trainer) -> None:
        if not torch.isfinite(trainer.model.weight).all():
            trainer.stop("now")

    trainer = make(None, At(3, note))
    text = message(trainer, epochs=1)
    assert step_of(text) == 4 and text.endswith("There is no checkpoint yet.")
    with pytest.raises(DivergedError, match="not finite after step 4"):
        trainer.step.check_weights()


def test_neither_an_interruption_nor_the_best_nor_a_program_saves_them(
    pool: Pool, tmp_path: Path
) -> None:
    def body() -> list[str]:
        interrupted = message(make(tmp_path / "a", At(3, send(signal.SIGTERM, only=0))))
        best = make(tmp_path / "b", Checkpoints("0", best="train_loss"))
        found = [interrupted, message(best, epochs=1)]
        with pytest.raises(DivergedError) as caught:
            best.save()
        return [*found, str(caught.value)]

    for texts in pool.run(body):
        assert {step_of(text) for text in texts} == {4}
        assert all(text.endswith("There is no checkpoint yet.") for text in texts)
    assert saved_steps(tmp_path / "a") == saved_steps(tmp_path / "b") == []


class Masked(nn.Module):
    """Infinite values everywhere but in what training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 4)
        with torch.no_grad():
            self.linear.bias[3] = -torch.inf  # no sample is of the last class
        self.mask = nn.Parameter(torch.tensor([0.0, 0.0, 0.0, -torch.inf]), requires_grad=False)
        self.register_buffer("limits", torch.tensor([-torch.inf, torch.inf]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).clamp(*self.limits) + self.mask  # type: ignore[no-any-return]


def test_values_that_are_infinite_from_the_beginning_are_not_training_s(tmp_path: Path) -> None:
    data = TensorDataset(X, torch.arange(64) % 3)

    def train(epochs: int, resume: str | None = None, again: bool = False) -> Any:
        lockstep.init("cpu")
        torch.manual_seed(0)
        model = Masked()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        callbacks = [Checkpoints()]
        trainer = Trainer(
            model, optimizer, nn.CrossEntropyLoss(), 16, run_dir=tmp_path, callbacks=callbacks
        )
        trainer.fit(data, epochs, resume=resume)
        return trainer.fit(data, epochs + 1) if again else trainer.history

    train(1)
    assert len(train(2, resume="latest", again=True)) == 3


def written_before(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Train as before weights were checked; returns the error."""
    with monkeypatch.context() as patch:
        patch.setattr("lockstep.training.step.finite_weights.FiniteWeights.error", lambda *_: None)
        patch.setattr(checkpoint_manager, "FINITE", "other")
        return message(make(run_dir, Checkpoints("1step")))


def test_a_checkpoint_with_nan_of_an_earlier_version_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert written_before(tmp_path, monkeypatch).startswith("the loss is nan at step 4 ")
    assert saved_steps(tmp_path) == [2, 3, 4]
    text = message(make(tmp_path, Checkpoints("1step")), resume="latest")
    assert step_of(text) == 4
    newest, good = (tmp_path / "checkpoints" / f"step-{step:010d}" for step in (4, 3))
    assert text.endswith(f"The last checkpoint is {good}.")
    expected = (
        f"A CHECKPOINT CANNOT BE USED: {newest}: expected weights without NaN, got some in weight. "
    )
    assert expected + f"Trying the one before it, {good}." in caplog.messages
    with pytest.raises(
        CheckpointError, match=f"got some in weight. The newest undamaged one is {good}"
    ):
        make(tmp_path / "other").fit(DATA, 3, resume=str(newest))
    assert folder.CheckpointStore(tmp_path / "checkpoints").newest_good() == good
    assert load_file(newest / "model.safetensors")["weight"].isnan().all()  # nothing was removed


def test_a_loop_of_ones_own_can_check_them_before_it_saves(pool: Pool) -> None:
    def body() -> str:
        comm = lockstep.init("cpu")
        torch.manual_seed(0)
        model = nn.Linear(5, 1, bias=False)
        step = lockstep.TrainStep(model, torch.optim.SGD(model.parameters(), 0.01), distance)
        for batch in lockstep.Loader(DATA, 16, comm=comm).epoch(0):
            step.check_weights()
            step(batch)
        with pytest.raises(DivergedError) as caught:
            step.check_weights()
        return str(caught.value)

    for text in pool.run(body):
        assert step_of(text) == 4
