"""`fit` by steps: its end, validations, checkpoints and hooks within an epoch, also after a
resume.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep import callbacks
from lockstep.checkpoint import folder
from lockstep.errors import ConfigError
from support.pool import Pool

DATA = TensorDataset(torch.arange(80.0).reshape(20, 4) / 80, torch.arange(20) % 3)
TIMES = ("seconds", "samples_per_second")


def trainer(
    run_dir: Path | None = None, made: list[callbacks.Callback] | None = None, **options: Any
) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss = nn.CrossEntropyLoss()
    return lockstep.Trainer(
        model, optimizer, loss, 4, run_dir=run_dir, callbacks=made or [], **options
    )


def timeless(history: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{name: value for name, value in row.items() if name not in TIMES} for row in history]


def places(history: list[dict[str, float]]) -> list[tuple[float, float]]:
    return [(row["epoch"], row["step"]) for row in history]


def test_a_run_ends_after_max_steps_and_may_resume() -> None:
    made = trainer()
    assert places(made.fit(DATA, max_steps=7, validate=DATA)) == [(1, 5), (2, 7)]
    assert made.epochs == 2 and made.step.steps_done == 7
    assert places(made.fit(DATA, 3)) == [(1, 5), (2, 7), (2, 10), (3, 15)]
    straight = trainer()
    straight.fit(DATA, 3)
    assert lockstep.fingerprint(made.model) == lockstep.fingerprint(straight.model)
    assert straight.history[1]["train_loss"] == pytest.approx(made.history[2]["train_loss"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "epochs: expected a number of epochs, or max_steps=, got neither"),
        ({"max_steps": 0}, "max_steps: expected a whole number of at least 1, got 0"),
        ({"epochs": 1, "validate_every": 2}, "validate_every: expected validate= with it"),
        (
            {"epochs": 1, "validate_every": 0, "validate": DATA},
            "validate_every: expected a whole number of steps",
        ),
    ],
)
def test_bad_arguments_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer().fit(DATA, **options)


def test_steps_that_are_done_already_are_named() -> None:
    made = trainer()
    made.fit(DATA, max_steps=5)
    with pytest.raises(
        ConfigError, match="max_steps: expected a whole number of at least 6, as 5 are done already"
    ):
        made.fit(DATA, max_steps=5)


class Recorder(callbacks.Callback):
    """Keeps the names of the hooks in the order of their calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []


def _recording(hook: str) -> Any:
    return lambda self, *_: self.calls.append(hook)


HOOKS = [name for name in vars(callbacks.Callback) if name.startswith("on_")]
for _hook in HOOKS:
    setattr(Recorder, _hook, _recording(_hook))


def test_hooks_are_called_in_order(tmp_path: Path) -> None:
    recorder = Recorder()
    made = trainer(tmp_path / "run", [recorder, callbacks.Checkpoints("3steps")])
    made.fit(DATA, 1, validate=DATA, validate_every=2)
    step = ["on_train_step_start", "on_train_step_end", "on_loss"]
    validation = ["on_validation_start", "on_validation_end", "on_row"]
    saving = ["on_checkpoint_start", "on_checkpoint_end", "on_checkpoint_complete"]
    assert recorder.calls == [
        *("on_train_start", "on_train_epoch_start"),
        *(*step, *step, *validation),
        # a checkpoint holds the losses of all steps before it
        *("on_train_step_start", "on_train_step_end", "on_loss", *saving),
        *(*step, *validation),
        *(*step, *validation, "on_train_epoch_end"),
        *(*saving, "on_train_end"),  # `Checkpoints` is the last callback, and the first to end
    ]
    assert set(recorder.calls) == set(HOOKS)


def stopped(run_dir: Path, at: int) -> None:
    class Stop(callbacks.Callback):
        every_rank = True

        def on_train_step_end(self, trainer: Any, result: Any) -> None:
            if trainer.step.steps_done == at:
                raise RuntimeError("stopped")

    made = trainer(run_dir, [callbacks.Checkpoints("1steps"), Stop()], virtual_workers=4)
    with pytest.raises(RuntimeError):
        made.fit(DATA, max_steps=12, validate=DATA, validate_every=2)


def resumed(run_dir: Path) -> tuple[list[Any], str]:
    made = trainer(run_dir, [callbacks.Checkpoints("1steps")], virtual_workers=4)
    made.fit(DATA, max_steps=12, validate=DATA, validate_every=2, resume="latest")
    return timeless(made.history), lockstep.fingerprint(made.model)


# the checkpoint is that of the step before, or at 2 and 4 of a step whose validation is still to
# come
@pytest.mark.parametrize("at", [3, 4, 5, 7, 12])
def test_a_resumed_run_has_the_rows_of_an_undisturbed_one(
    pool: Pool, tmp_path: Path, at: int
) -> None:
    straight = pool.run(resumed, tmp_path / "straight", workers=2)[0]
    assert places(straight[0]) == [(1, 2), (1, 4), (1, 5), (2, 6), (2, 8), (2, 10), (3, 12)]
    pool.run(stopped, tmp_path / "run", at, workers=2)
    assert pool.run(resumed, tmp_path / "run", workers=1)[0] == straight


def test_early_stopping_ends_a_run_within_an_epoch() -> None:
    made = trainer(made=[callbacks.EarlyStopping("val_loss", patience=1, min_delta=10.0)])
    assert places(made.fit(DATA, 3, validate=DATA, validate_every=2)) == [(1, 2), (1, 4)]
    assert made.stop_reason == "1 validation without a val_loss that is better by more than 10"


class Scores(callbacks.Callback):
    """Gives the rows another score."""

    every_rank = True
    adds_columns = ("val_score",)

    def __init__(self, scores: list[float]) -> None:
        self.scores = scores

    def on_row(self, trainer: Any, row: Any) -> None:
        row["val_score"] = self.scores[len(trainer.history) - 1]


@pytest.mark.parametrize("async_save", [False, True])
def test_the_best_checkpoint_is_kept_beside_the_newest(tmp_path: Path, async_save: bool) -> None:
    scores = [0.1, 0.9, 0.3, float("nan"), 0.9, 0.2]
    made = trainer(
        tmp_path / "run",
        [Scores(scores), callbacks.Checkpoints(best="val_score", higher_is_better=True)],
        keep_checkpoints=1,
        async_save=async_save,
    )
    made.fit(DATA, 6)
    folder = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == [
        "best",
        "step-0000000010",
        "step-0000000030",
    ]
    assert (folder / "best").resolve() == folder / "step-0000000010"
    other = trainer()
    other.resume(folder / "best")
    assert other.step.steps_done == 10
    assert other.checkpoint_manager.last_path == folder / "step-0000000010"


class Uploads(callbacks.Callback):
    """Notes what is called of checkpoints; with `async_save` one is written after its
    `on_checkpoint_end`.
    """

    every_rank = True

    def __init__(self, may_write: threading.Event) -> None:
        self.may_write = may_write
        self.calls: list[str] = []

    def on_checkpoint_start(self, trainer: Any) -> None:
        self.may_write.clear()

    def on_checkpoint_end(self, trainer: Any, path: Path) -> None:
        self.calls.append(f"end {path.name[-2:]}, {'there' if path.exists() else 'not there'}")
        self.may_write.set()

    def on_checkpoint_complete(self, trainer: Any, path: Path) -> None:
        folder.verify(path)
        self.calls.append(f"complete {path.name[-2:]}")


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("async_save", [False, True])
def test_callbacks_are_told_when_a_checkpoint_is_complete(
    pool: Pool, tmp_path: Path, workers: int, async_save: bool
) -> None:
    def body() -> list[list[str]]:
        may_write = threading.Event()
        write = folder.write_tensors

        def write_later(*arguments: Any) -> Any:
            assert not async_save or may_write.wait(60)
            return write(*arguments)

        runs = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(folder, "write_tensors", write_later)
            for epochs in (1, 2):
                told = Uploads(may_write)
                saves = callbacks.Checkpoints("2steps")
                made = trainer(tmp_path / "run", [told, saves], async_save=async_save)
                made.fit(DATA, epochs, resume="latest")
                runs.append(told.calls)
        return runs

    for first, resumed in pool.run(body, workers=workers):
        assert [each.partition(",")[0] for each in first] == [
            *("end 02", "complete 02", "end 04", "complete 04", "end 05", "complete 05")
        ]
        assert [each.partition(",")[0] for each in resumed][:2] == ["end 06", "complete 06"]
        assert len([each for each in resumed if each.startswith("complete")]) == 3
        if workers == 1:
            assert ("end 02, not there" in first) == async_save


def test_the_best_validation_within_an_epoch_is_saved(tmp_path: Path) -> None:
    best = callbacks.Checkpoints(best="val_score", higher_is_better=True)
    made = trainer(tmp_path / "run", [Scores([0.1, 0.9, 0.3]), best])
    made.fit(DATA, 1, validate=DATA, validate_every=2)
    assert (tmp_path / "run" / "checkpoints" / "best").resolve().name == "step-0000000004"


def test_a_best_of_what_is_not_measured_is_an_error(tmp_path: Path) -> None:
    made = trainer(tmp_path / "run", [callbacks.Checkpoints(best="val_accuracy")])
    with pytest.raises(
        ConfigError,
        match=r"callbacks.Checkpoints: expected one of epoch, step, train_loss, .* Pass validate=",
    ):
        made.fit(DATA, 1)


@pytest.mark.parametrize("limit", [float("inf"), 0.01])
def test_a_step_gives_the_norm_of_its_whole_gradient(pool: Pool, limit: float) -> None:
    def norms(workers: int) -> list[float]:
        kept: list[float] = []

        class Norms(callbacks.Callback):
            every_rank = True

            def on_loss(self, trainer: Any, result: Any, loss: float) -> None:
                kept.append(float(result.grad_norm))

        trainer(made=[Norms()], max_grad_norm=limit).fit(DATA, 1)
        return kept

    one, two = (pool.run(norms, workers, workers=workers)[0] for workers in (1, 2))
    assert one == pytest.approx(two) and min(one) > 0.05
