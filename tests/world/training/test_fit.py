"""What `fit` is given and what it leaves alone: loaders, frozen layers, losses that nobody has
looked at yet.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from lockstep.checkpoint.folder import CheckpointStore
from lockstep.data.loader import Loader
from lockstep.errors import ConfigError, DivergedError, InterruptedRunError
from lockstep.training.callbacks import Callback, Checkpoints
from lockstep.training.callbacks.base import Row
from lockstep.training.in_flight import LAG, StepsInFlight
from lockstep.training.step.step_result import StepResult
from lockstep.training.trainer import Trainer
from support.pool import Pool
from support.runs import At, fit, images, make, send, timeless

# --- loaders
# ------------------------------------------------------------------------------------------------


def test_a_loader_of_another_global_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match="global_batch_size: expected 16, the trainer's, got 64"):
        make(None, []).fit(Loader(images(), 64), 1)
    # an evaluation may take as many at once as it likes
    assert len(make(None, []).fit(Loader(images(), 16), 1, validate=Loader(images(31), 31))) == 1


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_training_loader_may_also_be_evaluated_on(tmp_path: Path, num_workers: int) -> None:
    def run(out: Path, epochs: int, resume: str | None, shared: bool) -> list[Row]:
        loader = Loader(images(), 16, num_workers=num_workers)
        held_out = loader if shared else images()
        try:
            trainer = make(out, [Checkpoints()])
            return timeless(trainer.fit(loader, epochs, validate=held_out, resume=resume))
        finally:
            loader.close()

    expected = run(tmp_path / "straight", 3, None, shared=False)
    run(tmp_path / "shared", 1, None, shared=True)
    rows = run(tmp_path / "shared", 3, "latest", shared=True)
    for ours, theirs in zip(rows, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)  # the evaluation adds up in another order


def test_not_in_the_middle_of_an_epoch() -> None:
    loader = Loader(images(), 16)
    with pytest.raises(
        ConfigError, match="dataset: expected another Loader than that of the epoch"
    ):
        make(None, [At(2, lambda trainer: trainer.evaluate(loader))]).fit(loader, 1)
    assert make(None, [At(2, lambda trainer: trainer.evaluate(loader.dataset))]).fit(loader, 1)


def test_a_further_fit_may_have_another_data_set(tmp_path: Path) -> None:
    within: list[tuple[int, int]] = []  # steps done in the epoch, and of a whole one
    at_3 = At(3, lambda trainer: within.append((trainer.steps_in_epoch, trainer.steps_per_epoch)))
    at_10 = At(10, lambda trainer: within.append((trainer.steps_in_epoch, trainer.steps_per_epoch)))
    trainer = make(tmp_path / "run", [at_3, at_10, Checkpoints()])
    trainer.fit(images(64), 2)  # 4 steps an epoch
    trainer.fit(images(64), max_steps=9)
    assert (trainer.position.epoch, trainer.position.step) == (2, 1)
    trainer.fit(images(160), 4)  # the rest of epoch 2 of the other data set is not there
    assert (trainer.epochs, trainer.total_steps, trainer.step.steps_done) == (4, 19, 19)
    assert within == [(4, 4), (2, 10)]  # At counts from 0
    assert [(row["epoch"], row["step"]) for row in trainer.history] == [
        (1, 4),
        (2, 8),
        (3, 9),
        (4, 19),
    ]
    resumed = make(tmp_path / "run", [])
    resumed.fit(images(160), 5, resume="latest")
    assert (resumed.total_steps, resumed.step.steps_done) == (29, 29)


def test_epochs_that_are_done_say_how_to_go_on() -> None:
    trainer = make(None, [])
    trainer.fit(images(), 2)
    with pytest.raises(
        ConfigError, match=r"at least 3, as 2 are done already, got 2. .* epochs=4 trains 2 more"
    ):
        trainer.fit(images(), 2)


def closing_loaders(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    closed: list[Any] = []
    close = Loader.close
    monkeypatch.setattr(
        Loader, "close", lambda loader: (closed.append(loader.dataset), close(loader))[1]
    )
    return closed


@pytest.mark.parametrize("fails", [False, True])
def test_loaders_that_fit_has_made_are_closed(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    def children() -> set[int]:
        return {child.pid for child in psutil.Process().children()}

    def fail(trainer: Trainer) -> None:
        assert len(children() - before) == 1  # the second loader's is not needed yet
        if fails:
            raise KeyError("in an epoch")

    closed, before = closing_loaders(monkeypatch), children()
    train, held_out = images(), images(31)
    trainer = make(None, [At(1, fail)], num_workers=1)
    if fails:
        with pytest.raises(KeyError, match="in an epoch"):
            trainer.fit(train, 1, validate=held_out)
    else:
        trainer.fit(train, 1, validate=held_out)
    assert closed == [held_out, train]
    assert children() == before


def test_the_users_own_loaders_stay_open(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = closing_loaders(monkeypatch)
    trainer = make(None, [])
    trainer.fit(Loader(images(), 16), 1, validate=Loader(images(31), 16))
    assert closed == []
    other = images(31)
    trainer.evaluate(other)
    assert closed == [other]


# --- frozen layers
# ------------------------------------------------------------------------------------------


class Modes(Callback):
    """Notes the mode of each layer at each step; leaves the model in evaluation mode behind each
    epoch.
    """

    def __init__(self) -> None:
        self.seen: list[list[bool]] = []

    def on_train_step_end(self, trainer: Trainer, result: StepResult) -> None:
        self.seen.append([layer.training for layer in trainer.model.modules()])

    def on_train_epoch_end(self, trainer: Trainer, row: Row) -> None:
        trainer.model.eval()


def test_layers_that_are_frozen_stay_so() -> None:
    modes = Modes()
    trainer = make(None, [modes])
    trainer.model[3].eval()  # type: ignore[index]
    trainer.fit(images(), 1, validate=images(31))
    trainer.fit(images(), 3, validate=images(31))
    assert len(modes.seen) == 15
    assert all(mode == [True, True, True, True, False, True] for mode in modes.seen)


def test_a_model_in_evaluation_mode_is_trained_as_a_whole() -> None:
    modes = Modes()
    trainer = make(None, [modes])
    trainer.model.eval()
    trainer.fit(images(), 1)
    assert all(mode == [True] * 6 for mode in modes.seen)


# --- losses that nobody has looked at yet
# -------------------------------------------------------------------


def as_off_the_cpu(trainer: Trainer, poisoned: int) -> None:
    """Let the trainer look at losses late, as where that waits for the device, and let one of them
    be NaN.
    """
    run = trainer.step.run

    def step(*args: Any, **kwargs: Any) -> StepResult:
        result = run(*args, **kwargs)
        if result.step != poisoned:
            return result
        return replace(result, on_hand=result.on_hand._replace(loss=result.loss * float("nan")))

    trainer.step.run = step  # type: ignore[method-assign]


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    # any device but the CPU; the results are kept where they are
    monkeypatch.setattr(
        "lockstep.training.trainer.StepsInFlight",
        lambda _, *rest: StepsInFlight(torch.device("meta"), *rest),
    )


def poisoned_run(
    out: Path | None, poisoned: int, callbacks: list[Callback], steps: list[int]
) -> str:
    trainer = make(out, [*callbacks, Steps(steps)])
    as_off_the_cpu(trainer, poisoned)
    with pytest.raises(DivergedError) as caught:
        trainer.fit(images(), 3)
    return str(caught.value)


class Steps(Callback):
    def __init__(self, seen: list[int]) -> None:
        self.seen = seen

    def on_train_step_end(self, trainer: Trainer, result: StepResult) -> None:
        self.seen.append(result.step)


@pytest.mark.usefixtures("late")
def test_a_loss_is_checked_a_few_steps_later() -> None:
    steps: list[int] = []
    assert "the loss is nan at step 5 " in poisoned_run(None, 5, [], steps)
    assert steps == list(range(5 + LAG + 1))


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize(("every", "poisoned"), [("2steps", 7), ("1epoch", 9)])
def test_a_loss_is_checked_before_a_callback_saves(
    tmp_path: Path, every: str, poisoned: int
) -> None:
    steps: list[int] = []
    message = poisoned_run(tmp_path, poisoned, [Checkpoints(every)], steps)
    assert f"the loss is nan at step {poisoned} " in message
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert int(names[-1][-2:]) <= poisoned
    assert f"The last checkpoint is {tmp_path}/checkpoints/{names[-1]}." in message


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("poisoned", [4, 14])
def test_a_loss_is_checked_before_its_epoch_ends(poisoned: int) -> None:
    rows: list[Row] = []

    class Rows(Callback):
        def on_train_epoch_end(self, trainer: Trainer, row: Row) -> None:
            rows.append(row)

    steps: list[int] = []
    assert f"the loss is nan at step {poisoned} " in poisoned_run(None, poisoned, [Rows()], steps)
    assert len(rows) == poisoned // 5
    assert steps[-1] == poisoned


@pytest.mark.usefixtures("late")
def test_a_stop_request_takes_effect_a_few_steps_later() -> None:
    trainer = make(None, [At(2, send(signal.SIGTERM, 0))])
    # told by the fourth step, and seen when LAG younger ones are queued
    with pytest.raises(InterruptedRunError, match=f"after step {4 + LAG} "):
        trainer.fit(images(200), 1)


def test_a_program_may_save_as_often_as_it_likes_and_the_end_saves_no_step_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    prepare: Callable[..., Callable[[], Path]] = CheckpointStore.prepare

    def note(store: CheckpointStore, state: Any, **options: Any) -> Callable[[], Path]:
        written.append(options["step"])
        return prepare(store, state, **options)

    monkeypatch.setattr(CheckpointStore, "prepare", note)
    paths: list[Path] = []
    twice = At(6, lambda trainer: paths.extend(trainer.save() for _ in range(2)))
    fit(tmp_path, twice, Checkpoints("5steps"), epochs=2)
    assert written == [5, 7, 7, 10]
    assert paths == [tmp_path / "checkpoints/step-0000000007"] * 2


# --- the mean of an epoch
# -----------------------------------------------------------------------------------


def count_some(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    kept = target > 0  # every batch has another share of them
    return nn.functional.cross_entropy(output[kept], target[kept], reduction="sum"), kept.sum()


def test_the_loss_of_an_epoch_is_the_mean_over_what_the_loss_counts(pool: Pool) -> None:
    def run() -> tuple[float, float]:
        # with a learning rate of 0 the model stays, so that its loss over the data set is that of
        # the epoch
        trainer = make(None, [], loss_fn=count_some, lr=0.0, dropout=0.0)
        data = images()
        (row,) = trainer.fit(data, 1)
        return row["train_loss"], trainer.evaluate(data)["loss"]

    for workers in (1, 2):
        for trained, evaluated in pool.run(run, workers=workers):
            assert trained == pytest.approx(evaluated, rel=1e-5)


# --- what is no mean over samples
# ---------------------------------------------------------------------------


def summed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, target, reduction="sum")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation_steps": 3},
        {"virtual_workers": 4},
        pytest.param(
            {"strategy": "sharded"},
            marks=pytest.mark.leaks("a device mesh outlives its job, and its group with it"),
        ),
        {"strategy": "replicas", "devices": ["cpu", "cpu"]},
    ],
)
def test_a_loss_that_is_no_mean_over_samples_is_refused_before_the_first_update(
    pool: Pool, options: dict[str, Any]
) -> None:
    def refused() -> int:
        trainer = make(None, [], loss_fn=summed, **options)
        said = r"loss_fn: expected a mean over samples, .*\(sum, count\), got summed, which .* samples of rank 0 "
        with pytest.raises(ConfigError, match=said):
            trainer.fit(images(), 1)
        assert trainer.optimizer.state == {}
        return trainer.step.steps_done

    assert pool.run(refused, workers=2) == [0, 0]


def test_one_rank_alone_that_finds_it_ends_all(pool: Pool) -> None:
    def refused() -> str:
        def weighted(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            weights = torch.arange(1.0, 5.0) if trainer.comm.rank else None
            return nn.functional.cross_entropy(output, target, weights)

        trainer = make(None, [], loss_fn=weighted, dropout=0.0)
        with pytest.raises(ConfigError) as caught:
            trainer.fit(images(), 1)
        return str(caught.value)

    messages = pool.run(refused, workers=2)
    assert messages[0] == messages[1]
    assert "weighted, which gives" in messages[0]
    assert " for 8 samples of rank 1 " in messages[0]


def test_a_metric_follows_the_rule_of_losses(pool: Pool) -> None:
    def measured() -> tuple[dict[str, float], str]:
        def right(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return output.argmax(1) == target

        metrics = {
            "mean": lambda o, t: right(o, t).float().mean(),
            "each": right,
            "counted": lambda o, t: (right(o, t).sum(), len(t)),
        }
        found = make(None, [], metrics=metrics).evaluate(images())
        with pytest.raises(ConfigError) as caught:
            make(None, [], metrics={"hits": lambda o, t: right(o, t).float().sum()}).evaluate(
                images()
            )
        return found, str(caught.value)

    for workers in (1, 2):
        for found, refused in pool.run(measured, workers=workers):
            assert found["mean"] == pytest.approx(found["counted"])
            assert found["each"] == pytest.approx(found["counted"])
            assert 0 < found["mean"] < 1
            assert refused.startswith(
                "metrics: expected a mean over samples, one value for each sample, or (sum, "
                "count), got hits"
            )
