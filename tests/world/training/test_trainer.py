"""A run can be saved, stopped and taken up again, on another number of workers as well."""

from __future__ import annotations

import csv
import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep.checkpoint.folder import verify
from lockstep.errors import CheckpointError, ConfigError, DivergedError, InterruptedRunError
from lockstep.parallel.fingerprints import fingerprint
from lockstep.training.callbacks import (
    Callback,
    Checkpoints,
    CSVLog,
    Curve,
    EarlyStopping,
    TensorBoard,
)
from lockstep.training.step.step_result import StepResult
from lockstep.training.trainer import Trainer
from support.pool import Pool
from support.runs import At, fit, images, make, send, timeless


def interrupted(out: Path, step: int, number: int, rank: int) -> tuple[str, int, str | None]:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(InterruptedRunError) as caught:
        fit(out, At(step, send(number, rank)), Checkpoints("0"))
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    return str(caught.value), caught.value.exit_code, caught.value.checkpoint


# 67 samples in batches of 16: five steps an epoch, so steps 6 and 7 lie in the second, 4 and 9 end
# one
@pytest.mark.parametrize("step", [6, 4, 9])
@pytest.mark.parametrize(
    ("workers", "rank", "number"), [(1, 0, signal.SIGINT), (2, 1, signal.SIGTERM)]
)
def test_a_stopped_run_resumes_to_the_same_end(
    pool: Pool, tmp_path: Path, workers: int, rank: int, number: int, step: int
) -> None:
    straight = pool.run(fit, tmp_path / "straight", workers=workers)
    for message, code, checkpoint in pool.run(
        interrupted, tmp_path / "run", step, number, rank, workers=workers
    ):
        assert code == 128 + number
        assert signal.Signals(number).name in message
        # noticed by all at the end of the step after the one in which it came, or of its epoch
        done = step + 1 if step in (4, 9) else step + 2
        assert checkpoint is not None
        assert checkpoint.endswith(f"step-{done:010}")
        assert checkpoint in message
    resumed = pool.run(fit, tmp_path / "run", workers=workers, resume="latest")
    assert [print_ for print_, _ in resumed] == [print_ for print_, _ in straight]
    assert timeless(resumed[0][1]) == timeless(straight[0][1])


def test_a_stopped_run_resumes_with_other_numbers_of_workers(pool: Pool, tmp_path: Path) -> None:
    # without dropout, whose masks depend on the number of workers
    options: dict[str, Any] = {"optimizer": torch.optim.SGD, "dropout": 0.0}

    def stop(step: int, resume: str | None) -> None:
        with pytest.raises(InterruptedRunError):
            fit(
                tmp_path,
                At(step, send(signal.SIGTERM, 0)),
                Checkpoints("0"),
                resume=resume,
                **options,
            )

    straight = pool.run(fit, tmp_path / "straight", workers=1, **options)[0][1]
    pool.run(stop, 2, None, workers=3)
    pool.run(stop, 7, "latest", workers=2)
    resumed = pool.run(fit, tmp_path, workers=1, resume="latest", **options)[0][1]
    for ours, theirs in zip(timeless(resumed), timeless(straight), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


def test_latest_without_any_checkpoint_starts_afresh(tmp_path: Path) -> None:
    assert len(fit(tmp_path, epochs=1, resume="latest")[1]) == 1


def test_a_finished_run_resumed_does_nothing(tmp_path: Path) -> None:
    done = fit(tmp_path, Checkpoints(), epochs=2)
    assert fit(tmp_path, Checkpoints(), epochs=2, resume="latest") == done
    longer = fit(tmp_path, Checkpoints(), epochs=3, resume="latest")
    assert timeless(longer[1])[:2] == timeless(done[1])


@pytest.mark.parametrize(
    ("every", "steps"), [("1epoch", [5, 10, 15]), ("7steps", [7, 14, 15]), ("2epochs", [10, 15])]
)
def test_when_checkpoints_are_made(tmp_path: Path, every: str, steps: list[int]) -> None:
    fit(tmp_path, Checkpoints(every))
    assert (
        sorted(
            int(path.name.removeprefix("step-")) for path in (tmp_path / "checkpoints").iterdir()
        )
        == steps
    )


@pytest.mark.parametrize("every", ["often", "-1epochs", "1.5epochs", "2 weeks"])
def test_intervals_that_are_none(every: str) -> None:
    with pytest.raises(ConfigError, match="every: expected a number of epochs or steps"):
        Checkpoints(every)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"width": 17},
            "another model. The first difference is 1.weight: here of shape [17, 64], in the "
            "checkpoint",
        ),
        ({"optimizer": torch.optim.SGD}, "a checkpoint of a run with SGD, got one with AdamW"),
        ({"seed": 9}, "seed was 0, here it is 9"),
    ],
)
def test_checkpoints_of_other_runs_are_refused(
    tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    fit(tmp_path, Checkpoints(), epochs=1)
    with pytest.raises(CheckpointError) as caught:
        fit(tmp_path, resume="latest", **options)
    assert said in str(caught.value)


def damage(path: Path) -> None:
    with (path / "model.safetensors").open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"\x55")


def test_a_damaged_checkpoint_is_refused_and_the_last_good_one_offered(tmp_path: Path) -> None:
    fit(tmp_path, Checkpoints(), epochs=2)
    older, newest = sorted((tmp_path / "checkpoints").iterdir())
    damage(newest)
    with pytest.raises(CheckpointError) as caught:
        fit(tmp_path, resume=str(newest))
    assert str(caught.value).startswith(
        f"{newest}: model.safetensors: expected content with sha256 "
    )
    assert f"The newest undamaged one is {older}" in str(caught.value)
    assert len(fit(tmp_path, resume=str(older))[1]) == 3


def after_damage(out: Path, which: str) -> tuple[str, Any, list[str]]:
    """(the result of a run that goes on after damage, what it has logged)."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("lockstep.training.run.checkpoint_manager").addHandler(handler)
    try:
        return *fit(out, Checkpoints(), resume=which), [record.getMessage() for record in records]
    finally:
        logging.getLogger("lockstep.training.run.checkpoint_manager").removeHandler(handler)


@pytest.mark.parametrize("which", ["latest", "folder"])
def test_damaged_checkpoints_are_passed_over_loudly_where_none_was_named(
    pool: Pool, tmp_path: Path, which: str
) -> None:
    straight, _ = pool.run(fit, tmp_path, Checkpoints(), workers=2)
    good, damaged, newest = sorted((tmp_path / "checkpoints").iterdir())
    damage(newest)
    (damaged / "manifest.json").unlink()
    first, second = pool.run(
        after_damage, tmp_path, str(tmp_path) if which == "folder" else which, workers=2
    )
    assert first[0] == second[0]
    assert first[0] == straight[0]
    assert first[1][0] == straight[1][0]  # the epoch that was not lost, down to its seconds
    assert timeless(first[1]) == timeless(straight[1])
    assert second[2] == []
    assert [line.partition(": ")[0] for line in first[2]] == ["A CHECKPOINT CANNOT BE USED"] * 2
    assert all(
        line.endswith(f" {path}.") for line, path in zip(first[2], (damaged, good), strict=True)
    )
    for path in (damaged, newest):
        verify(path)  # made again


class Plateau(Callback):
    """Lowers the learning rate when the loss has not fallen for two epochs: it needs to
    remember.
    """

    every_rank = True

    def __init__(self) -> None:
        self.best, self.waited, self.seen = float("inf"), 0, torch.zeros(2)

    def on_train_epoch_end(self, trainer: Trainer, row: dict[str, float]) -> None:
        self.seen[0] += 1
        self.waited = 0 if row["val_accuracy"] > 1e9 else self.waited + 1
        if self.waited == 2:
            trainer.optimizer.param_groups[0]["lr"] *= 0.1

    def state_dict(self) -> dict[str, Any]:
        return {"waited": self.waited, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.waited, self.seen = state["waited"], state["seen"]


def remembering(out: Path, epochs: int, **options: Any) -> tuple[str, float, float]:
    plateau, resume = Plateau(), options.pop("resume", None)
    trainer = make(out, [plateau, Checkpoints()], **options)
    history = trainer.fit(images(), epochs, validate=images(31, seed=6), resume=resume)
    found = trainer.step.strategy.fingerprint(trainer.model, trainer.optimizer)
    return found, history[-1]["lr"], float(plateau.seen[0])


@pytest.mark.parametrize("strategy", ["distributed", "sharded"])
@pytest.mark.leaks("a device mesh outlives its job, and its group with it")
def test_callbacks_resume_with_their_state(pool: Pool, tmp_path: Path, strategy: str) -> None:
    straight, *_ = pool.run(remembering, tmp_path / "straight", 3, strategy=strategy, workers=2)
    pool.run(remembering, tmp_path / "parts", 1, strategy=strategy, workers=2)
    for found in pool.run(
        remembering, tmp_path / "parts", 3, strategy=strategy, resume="latest", workers=2
    ):
        assert found[1:] == straight[1:]
        assert strategy == "sharded" or found[0] == straight[0]
    assert straight[1] == pytest.approx(0.001)
    assert straight[2] == 3


def forgetful(out: Path, count: Any) -> str:
    class Counting(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"count": count}

    with pytest.raises(ConfigError) as caught:
        fit(out, Counting(), Checkpoints(), epochs=1)
    return str(caught.value)


def test_state_of_a_callback_on_rank_0_that_cannot_be_saved_is_an_error_of_all(
    pool: Pool, tmp_path: Path
) -> None:
    first, second = pool.run(forgetful, tmp_path, object(), workers=2)
    assert first == second
    assert first.startswith("callbacks.Counting.count: expected ")
    assert not (tmp_path / "checkpoints").exists()


def in_background(out: Path) -> str:
    """A run whose every checkpoint is written beside it, and which is interrupted."""
    trainer = make(out, [At(7, send(signal.SIGTERM, 0)), Checkpoints("2steps")], async_save=True)
    with pytest.raises(InterruptedRunError) as caught:
        trainer.fit(images(), 3, validate=images(31, seed=6))
    verify(Path(str(caught.value.checkpoint)))
    return fingerprint(trainer.model, trainer.optimizer)


def test_an_interrupted_run_that_saves_in_the_background_resumes_as_any_other(
    pool: Pool, tmp_path: Path
) -> None:
    straight, _ = pool.run(fit, None, workers=2)
    pool.run(in_background, tmp_path, workers=2)
    first, _ = pool.run(
        fit, tmp_path, Checkpoints("2steps"), resume="latest", async_save=True, workers=2
    )
    assert first[0] == straight[0]
    assert timeless(first[1]) == timeless(straight[1])
    assert (
        sorted(path.name for path in (tmp_path / "checkpoints").iterdir())[-1] == "step-0000000015"
    )


def test_a_run_that_diverges_while_it_saves_names_the_checkpoint_it_has_then(
    tmp_path: Path,
) -> None:
    def poison(trainer: Trainer) -> None:
        with torch.no_grad():
            next(trainer.model.parameters()).fill_(float("nan"))

    with pytest.raises(DivergedError) as caught:
        fit(tmp_path, At(3, poison), Checkpoints("3steps"), async_save=True)
    (path,) = (tmp_path / "checkpoints").iterdir()
    assert f"The last checkpoint is {path}." in str(caught.value)


def test_a_run_of_which_no_checkpoint_is_good_does_not_begin_anew(tmp_path: Path) -> None:
    fit(tmp_path, Checkpoints(), epochs=1)
    (newest,) = (tmp_path / "checkpoints").iterdir()
    damage(newest)
    with pytest.raises(CheckpointError, match=f"^{newest}: .*There is no undamaged one beside it"):
        fit(tmp_path, resume="latest")


def saving_fails(out: Path) -> str:
    def break_folder(trainer: Trainer) -> None:
        if trainer.comm.rank == 0:
            (out / "checkpoints").rmdir()
            (out / "checkpoints").write_text("in the way")

    with pytest.raises(CheckpointError) as caught:
        fit(out, At(3, break_folder), Checkpoints())
    return str(caught.value)


def test_when_saving_fails_every_rank_raises_the_reason(pool: Pool, tmp_path: Path) -> None:
    messages = pool.run(saving_fails, tmp_path, workers=2)
    assert messages[0] == messages[1]
    assert str(tmp_path / "checkpoints") in messages[0]


def test_saving_without_a_folder_is_an_error() -> None:
    with pytest.raises(CheckpointError, match="run_dir="):
        fit(None, At(1, Trainer.save), epochs=1)


def test_an_interrupted_run_without_a_folder_reports_that_nothing_is_saved() -> None:
    with pytest.raises(InterruptedRunError, match="nothing was saved") as caught:
        fit(None, At(2, send(signal.SIGINT, 0)))
    assert caught.value.checkpoint is None


def test_the_second_signal_acts_at_once(tmp_path: Path) -> None:
    def twice(trainer: Trainer) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, At(2, twice))


def test_divergence_names_step_rate_and_last_checkpoint(tmp_path: Path) -> None:
    def poison(trainer: Trainer) -> None:
        next(trainer.model.parameters()).data.fill_(float("nan"))

    with pytest.raises(DivergedError) as caught:
        fit(tmp_path, At(7, poison), Checkpoints())
    assert "the loss is nan at step 8 with learning rate 0.01" in str(caught.value)
    assert f"The last checkpoint is {tmp_path}/checkpoints/step-0000000005" in str(caught.value)


def test_early_stopping(tmp_path: Path) -> None:
    _, history = fit(
        tmp_path,
        EarlyStopping("lr", patience=2, higher_is_better=False),
        Checkpoints("0"),
        epochs=20,
    )
    assert len(history) == 3  # the rate is constant: the first value stays the best
    with pytest.raises(ConfigError, match="one of epoch, step, train_loss"):
        fit(tmp_path, EarlyStopping("test_f1"))


def test_any_worker_may_request_a_stop(pool: Pool, tmp_path: Path) -> None:
    def ask(trainer: Trainer) -> None:
        if trainer.comm.rank == 1:
            trainer.stop("enough")

    histories = [history for _, history in pool.run(fit, tmp_path, At(6, ask), workers=2, epochs=9)]
    assert [len(history) for history in histories] == [2, 2]


@pytest.mark.leaks("matplotlib keeps its fonts open")
def test_the_files_of_a_run(tmp_path: Path) -> None:
    _, history = fit(tmp_path, CSVLog(), Curve(), TensorBoard())
    rows = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    assert [int(row["epoch"]) for row in rows] == [1, 2, 3]
    assert float(rows[-1]["val_accuracy"]) == pytest.approx(history[-1]["val_accuracy"])
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert list((tmp_path / "tensorboard").glob("events*"))


def test_evaluation_counts_every_sample_once(pool: Pool) -> None:
    def measure() -> dict[str, float]:
        trainer = make(None, [])
        return trainer.evaluate(images(31))

    (alone,) = pool.run(measure, workers=1)
    for size in (2, 4):
        for measured in pool.run(measure, workers=size):
            assert measured["accuracy"] == alone["accuracy"]
            assert measured["loss"] == pytest.approx(alone["loss"], rel=1e-5)


def test_evaluation_leaves_each_layers_mode() -> None:
    trainer = make(None, [])
    trainer.model.train()
    trainer.model[3].eval()  # type: ignore[index]
    trainer.evaluate(images(31))
    assert [module.training for module in trainer.model.modules()] == [
        True,
        True,
        True,
        True,
        False,
        True,
    ]


class Counting(nn.Module):
    """Changes a buffer of its own in each step, on each rank in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.layer = nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += lockstep.init().rank + 1
        return self.layer(x.flatten(1))


@pytest.mark.parametrize("when", ["evaluation", "checkpoint"])
def test_other_buffers_are_those_of_rank_0(pool: Pool, tmp_path: Path, when: str) -> None:
    def seen() -> tuple[float, float]:
        lockstep.init("cpu")
        net = Counting()
        trainer = Trainer(
            net,
            torch.optim.SGD(net.parameters(), 0.1),
            nn.CrossEntropyLoss(),
            16,
            run_dir=tmp_path,
            callbacks=[],
        )
        trainer.fit(images(), 1)
        own = float(net.seen)
        if when == "checkpoint":
            trainer.save()
        else:
            trainer.evaluate(images(16))
        return own, float(net.seen)

    first, second = pool.run(seen, workers=2)
    assert first == second
    assert first[0] == first[1] > 0


def test_callbacks_end_whatever_happens(tmp_path: Path) -> None:
    ended: list[str] = []

    class Watch(Callback):
        def on_train_end(self, trainer: Trainer, error: BaseException | None) -> None:
            ended.append(type(error).__name__)
            raise RuntimeError("while ending")

    def fail(trainer: Trainer) -> None:
        raise KeyError("first")

    with pytest.raises(KeyError, match="first"):
        fit(tmp_path, Watch(), Watch(), At(1, fail))
    assert ended == ["KeyError", "KeyError"]
    with pytest.raises(RuntimeError, match="while ending"):
        fit(tmp_path, Watch(), epochs=1)


def test_a_callback_that_cannot_start_is_an_error_for_the_others(tmp_path: Path) -> None:
    class Unable(Callback):
        def on_train_start(self, trainer: Trainer) -> None:
            raise KeyError("cannot start")

    with pytest.raises(KeyError, match="cannot start"):
        fit(tmp_path, Checkpoints(), Unable())
    assert not (tmp_path / "checkpoints").exists()


def test_a_test_loss_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    def poison(trainer: Trainer) -> None:
        next(trainer.model.parameters()).data.fill_(float("nan"))

    with pytest.raises(DivergedError, match="the validation loss is nan after step 5"):
        fit(tmp_path, At(4, poison), Checkpoints())
    assert not (tmp_path / "checkpoints").exists()


def test_rank_zero_alone_has_ordinary_callbacks(pool: Pool) -> None:
    class Note(Callback):
        def __init__(self) -> None:
            self.steps = 0

        def on_train_step_end(self, trainer: Trainer, result: StepResult) -> None:
            self.steps += 1

    def count() -> int:
        note = Note()
        fit(None, note, epochs=1)
        return note.steps

    assert pool.run(count, workers=2) == [5, 0]


@pytest.mark.parametrize("epochs", [0, -1, 1.5, True])
def test_bad_numbers_of_epochs(epochs: Any) -> None:
    with pytest.raises(ConfigError, match="epochs"):
        fit(None, epochs=epochs)


def test_an_unknown_strategy() -> None:
    with pytest.raises(ConfigError, match="Did you mean distributed"):
        make(None, [], strategy="distribute")
