"""How a run ends, and what that leaves: in a folder, for a run that goes on, and for the program
around it.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from lockstep.checkpoint import folder
from lockstep.data.loader import Loader
from lockstep.errors import CheckpointError, InterruptedRunError
from lockstep.training.callbacks import Callback, Checkpoints, EarlyStopping
from lockstep.training.callbacks.base import Row
from lockstep.training.trainer import Trainer
from support.pool import Pool
from support.runs import At, fit, images, make, send

HELD_OUT = images(31, seed=6)


class Signal(Callback):
    """SIGTERM at one moment."""

    def __init__(self, moment: str, epoch: int = 1) -> None:
        self.moment, self.epoch = moment, epoch

    def on_train_start(self, trainer: Trainer) -> None:
        self.send("on_train_start", self.epoch)

    def on_train_epoch_end(self, trainer: Trainer, row: Row) -> None:
        self.send("on_train_epoch_end", int(row["epoch"]))

    def on_train_end(self, trainer: Trainer, error: BaseException | None) -> None:
        self.send("on_train_end", self.epoch)

    def send(self, moment: str, epoch: int) -> None:
        if (moment, epoch) == (self.moment, self.epoch):
            os.kill(os.getpid(), signal.SIGTERM)


def stopping(patience: int) -> EarlyStopping:
    return EarlyStopping(
        "lr", patience, higher_is_better=False
    )  # which stays the same, so that the first epoch is the best


# --- early stopping
# -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_that_stopped_early_stays_stopped_unless_there_is_more_patience(
    pool: Pool, tmp_path: Path, workers: int
) -> None:
    def run(patience: int, resume: str | None) -> tuple[int, str]:
        trainer = make(tmp_path, [stopping(patience), Checkpoints()])
        return len(trainer.fit(images(), 6, resume=resume)), trainer.stop_reason

    stopped = [(2, "1 epoch without a better lr")] * workers
    assert pool.run(run, 1, None, workers=workers) == stopped
    assert pool.run(run, 1, "latest", workers=workers) == stopped
    assert (
        pool.run(run, 3, "latest", workers=workers)
        == [(4, "3 epochs without a better lr")] * workers
    )


def test_a_metric_that_was_never_measured_stops_nothing_at_the_start(tmp_path: Path) -> None:
    make(tmp_path, [Checkpoints()]).fit(images(), 3)
    trainer = make(tmp_path, [EarlyStopping("val_loss", 1)])
    assert len(trainer.fit(images(), 4, validate=HELD_OUT, resume="latest")) == 4


def test_a_signal_in_the_epoch_that_stops_early_makes_it_no_longer(tmp_path: Path) -> None:
    with pytest.raises(InterruptedRunError):
        make(tmp_path, [stopping(1), Signal("on_train_epoch_end", 2), Checkpoints()]).fit(
            images(), 6
        )
    trainer = make(tmp_path, [stopping(1), Checkpoints()])
    assert len(trainer.fit(images(), 6, resume="latest")) == 2


# --- signals
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("moment", "epoch"), [("on_train_start", 1), ("on_train_epoch_end", 2), ("on_train_end", 1)]
)
@pytest.mark.parametrize("every", ["0", "1epoch"])
def test_a_signal_at_any_moment_reaches_the_program(
    tmp_path: Path, moment: str, epoch: int, every: str
) -> None:
    trainer = make(tmp_path, [Checkpoints(every), Signal(moment, epoch)])
    with pytest.raises(InterruptedRunError, match="stopped by SIGTERM after step") as caught:
        trainer.fit(images(), 2)
    path = Path(str(caught.value.checkpoint))
    assert folder.read(path).step == (0 if moment == "on_train_start" else 10)
    assert trainer.done == (moment != "on_train_start")
    # and going on ends as if nothing had been
    assert fit(tmp_path, resume="latest")[0] == fit(None)[0]


def test_a_signal_to_one_worker_at_the_end_reaches_all(pool: Pool) -> None:
    def run() -> str:
        with pytest.raises(InterruptedRunError) as caught:
            make(None, [At(4, send(signal.SIGTERM, 1))]).fit(images(), 1)
        return str(caught.value)

    said = (
        "stopped by SIGTERM after step 5 (epoch 1 of 1); nothing was saved, as the run has no run "
        "directory"
    )
    assert pool.run(run, workers=2) == [said] * 2


# --- what is saved
# ------------------------------------------------------------------------------------------


def saved_bias(out: Path, trainer: Trainer) -> tuple[Any, Any]:
    """(the last layer's bias in the newest checkpoint, that of the model)."""
    newest = max((out / "checkpoints").iterdir())
    return folder.read(newest).state["model"]["4.bias"].tolist(), trainer.model.get_parameter(
        "4.bias"
    ).tolist()


class Change(Callback):
    every_rank = True

    def on_train_epoch_end(self, trainer: Trainer, row: Row) -> None:
        trainer.model.get_parameter("4.bias").data.fill_(float(row["epoch"]))


@pytest.mark.parametrize("every", ["1epoch", "5steps"])
def test_what_a_callback_changes_after_an_epoch_is_saved(tmp_path: Path, every: str) -> None:
    trainer = make(tmp_path, [Checkpoints(every), Change()])
    trainer.fit(images(), 2)
    if every == "5steps":
        trainer.save()  # the step has a checkpoint, of before the callback
    saved, model = saved_bias(tmp_path, trainer)
    assert saved == model == [2.0] * 4


# --- going on
# -----------------------------------------------------------------------------------------------


def test_other_data_are_refused_with_the_checkpoints_name_before_a_folder_is_made(
    tmp_path: Path,
) -> None:
    fit(tmp_path / "first", Checkpoints(), epochs=1)
    path = tmp_path / "first/checkpoints/step-0000000005"
    with pytest.raises(CheckpointError, match=f"^{path}: "):
        make(tmp_path / "second", []).fit(images(70), 2, resume=path)
    assert not (tmp_path / "second").exists()


def test_a_run_folder_stands_for_its_newest_checkpoint(pool: Pool, tmp_path: Path) -> None:
    straight = pool.run(fit, None, workers=2)
    pool.run(fit, tmp_path / "first", Checkpoints(), epochs=2, workers=2)
    resumed = pool.run(fit, tmp_path / "second", resume=str(tmp_path / "first"), workers=2)
    assert [mark for mark, _ in resumed] == [mark for mark, _ in straight]


def test_a_run_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "first/checkpoints").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="first/checkpoints"):
        make(None, []).fit(Loader(images(), 16), 2, resume=tmp_path / "first")


def test_a_run_that_fails_leaves_its_folder_free_for_the_next(tmp_path: Path) -> None:
    def fail(trainer: Trainer) -> None:
        raise KeyError("in a step")

    with pytest.raises(KeyError, match="in a step"):
        make(tmp_path, [At(1, fail)]).fit(images(), 1)
    assert len(make(tmp_path, [Checkpoints()]).fit(images(), 1)) == 1
