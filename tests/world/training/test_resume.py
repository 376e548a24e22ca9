"""What resumes from a checkpoint or an earlier call of `fit`: the state, not the options, and all
of it or nothing.
"""

from __future__ import annotations

import copy
import logging
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.checkpoint import folder
from lockstep.data.loader import Loader
from lockstep.errors import CheckpointError, ConfigError, InterruptedRunError
from lockstep.parallel.fingerprints import fingerprint
from lockstep.training.callbacks import Checkpoints
from lockstep.training.step.step_result import StepNumbers, StepResult
from lockstep.training.trainer import Trainer
from support.pool import Pool
from support.runs import At, fit, images, make, send, timeless

LOGGER = "lockstep.training.run.run_state"


def sgd(momentum: float = 0.9, weight_decay: float = 0.0) -> Any:
    return lambda parameters, lr: torch.optim.SGD(
        parameters, lr, momentum=momentum, weight_decay=weight_decay
    )


def groups(trainer: Trainer, *names: str) -> list[float]:
    return [trainer.optimizer.param_groups[0][name] for name in names]


# --- hyperparameters
# ----------------------------------------------------------------------------------------


def test_hyperparameters_constructed_otherwise_win_and_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(tmp_path, Checkpoints(), epochs=1, optimizer=sgd(0.9), lr=0.05)
    trainer = make(tmp_path, [], optimizer=sgd(0.5, weight_decay=0.1), lr=0.01)
    trainer.resume("latest")
    assert groups(trainer, "lr", "initial_lr", "momentum", "weight_decay") == [0.01, 0.01, 0.5, 0.1]
    assert caplog.record_tuples == [
        (
            LOGGER,
            logging.WARNING,
            "the run continues with other hyperparameters than before: lr 0.05 → 0.01, momentum "
            "0.9 → 0.5, weight_decay 0.0 → 0.1",
        )
    ]
    assert trainer.optimizer.state_dict()["state"][0]["momentum_buffer"].abs().sum() > 0


def test_the_learning_rate_that_is_constructed_is_the_one_that_is_used(tmp_path: Path) -> None:
    schedule = {"schedule": lambda step: 1.0 / (step + 1)}
    fit(tmp_path, Checkpoints(), epochs=1, optimizer=sgd(), lr=0.05, **schedule)
    rates: list[float] = []
    note = At(5, lambda trainer: rates.append(groups(trainer, "lr")[0]))
    fit(tmp_path, note, epochs=2, optimizer=sgd(), lr=0.6, resume="latest", **schedule)
    assert rates == [pytest.approx(0.1)]  # 0.6 / 6: the schedule goes on at the sixth step


def test_the_same_hyperparameters_change_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def move(trainer: Trainer) -> None:
        trainer.optimizer.param_groups[0]["lr"] = 0.002  # as a user without a schedule may
        trainer.optimizer.param_groups[0]["betas"] = (0.8, 0.99)

    fit(tmp_path, At(3, move), Checkpoints(), epochs=1)
    trainer = make(tmp_path, [])
    trainer.resume("latest")
    assert groups(trainer, "lr", "initial_lr", "betas") == [0.002, 0.01, (0.8, 0.99)]
    assert caplog.records == []


def test_only_rank_0_warns_about_it(pool: Pool, tmp_path: Path) -> None:
    def warned(lr: float, epochs: int) -> int:
        records: list[logging.LogRecord] = []
        handler = logging.Handler()
        handler.emit = records.append  # type: ignore[method-assign]
        logging.getLogger(LOGGER).addHandler(handler)
        try:
            fit(tmp_path, Checkpoints(), epochs=epochs, lr=lr, resume="latest")
        finally:
            logging.getLogger(LOGGER).removeHandler(handler)
        return len(records)

    assert pool.run(warned, 0.01, 1, workers=2) == [0, 0]
    assert pool.run(warned, 0.02, 2, workers=2) == [1, 0]


# --- a refused checkpoint changes nothing
# -------------------------------------------------------------------


def two_groups(parameters: Any, lr: float) -> torch.optim.Optimizer:
    first, *rest = parameters
    return torch.optim.AdamW([{"params": [first]}, {"params": rest}], lr)


def reversed_order(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(parameters)[::-1], lr)


def fewer(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(parameters)[:-1], lr)


def everything(trainer: Trainer) -> list[Any]:
    state = {
        **trainer.state_dict(),
        "model": None,
        "optimizer": trainer.optimizer.state_dict()["param_groups"],
    }
    return [fingerprint(trainer.model, trainer.optimizer), copy.deepcopy(state)]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"width": 17}, "another model"),
        ({"optimizer": sgd()}, "of a run with SGD"),
        ({"optimizer": two_groups}, "expected 2 parameter groups as here, got 1"),
        ({"optimizer": reversed_order}, "group 0: here 4.bias, in the checkpoint 1.weight"),
        ({"optimizer": fewer}, "group 0: here no more, in the checkpoint 4.bias"),
        ({"seed": 9}, "seed was 0, here it is 9"),
    ],
)
def test_a_refused_checkpoint_has_changed_nothing(
    tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    fit(tmp_path, Checkpoints(), epochs=1)
    trainer = make(tmp_path, [], **options)
    before = everything(trainer)
    with pytest.raises(CheckpointError, match=said):
        trainer.fit(images(), 2, resume="latest")
    assert everything(trainer) == before


def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path) -> None:
    trainer = make(tmp_path, [])
    with pytest.raises(CheckpointError, match="got one without model, optimizer, hyperparameters"):
        trainer.load_state_dict({"step": {}, "loader": None, "totals": {}, "history": []})


def test_a_checkpoint_that_one_rank_cannot_load_is_loaded_by_none(
    pool: Pool, tmp_path: Path
) -> None:
    def attempt() -> tuple[str, int]:
        trainer = make(tmp_path, [])
        if trainer.comm.rank == 1:
            trainer.state.hyperparameters = []
        with pytest.raises(CheckpointError) as caught:
            trainer.resume("latest")
        return str(caught.value), trainer.step.steps_done

    pool.run(fit, tmp_path, Checkpoints(), epochs=1, workers=2)
    (first, steps), second = pool.run(attempt, workers=2)
    assert (first, steps) == second
    assert steps == 0
    assert "expected 0 parameter groups as here, got 1" in first


def test_a_group_that_was_added_later_is_not_overlooked(tmp_path: Path) -> None:
    def first(parameters: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW([next(iter(parameters))], lr)

    def add_rest(trainer: Trainer) -> None:
        _, *rest = trainer.model.parameters()
        trainer.optimizer.add_param_group({"params": rest, "lr": 0.03})

    fit(tmp_path, At(3, add_rest), Checkpoints(), epochs=1, optimizer=first)
    with pytest.raises(CheckpointError, match="expected 1 parameter groups as here, got 2"):
        fit(tmp_path, epochs=2, resume="latest", optimizer=first)
    trainer = make(tmp_path, [], optimizer=two_groups, lr=0.02)
    trainer.resume("latest")
    assert [group["lr"] for group in trainer.optimizer.param_groups] == [0.02, 0.02]


def test_a_state_loaded_by_hand_is_saved_again(tmp_path: Path) -> None:
    trainer, other = make(tmp_path, []), make(None, [], lr=0.5)
    trainer.fit(images(), 1)
    other.fit(images(), 1)
    trainer.save()
    trainer.load_state_dict(other.state_dict())
    saved = folder.read(trainer.save()).state["model"]
    assert all(torch.equal(saved[name], value) for name, value in other.model.state_dict().items())


# --- one folder, one run
# ------------------------------------------------------------------------------------


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("sign", ["checkpoints", "config.json", "config.yaml", "result.json"])
def test_a_run_beside_an_earlier_one_gets_a_number(
    tmp_path: Path, sign: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "run" / sign).mkdir(parents=True)
    for number in (2, 3):
        fit(tmp_path / "run", Checkpoints(), epochs=1)
        assert files(tmp_path / f"run-{number}/checkpoints")[0] == "step-0000000005"
        assert f"this run writes to {tmp_path}/run-{number} (fit(..., resume=" in caplog.text
    assert files(tmp_path / "run") == [sign]


def test_a_checkpoint_from_elsewhere_begins_a_run_of_its_own(tmp_path: Path) -> None:
    fit(tmp_path / "a", Checkpoints(), epochs=1)
    fit(tmp_path / "b", Checkpoints(), epochs=1)
    (checkpoint,) = (tmp_path / "a/checkpoints").iterdir()
    before = files(tmp_path / "b")
    assert len(fit(tmp_path / "b", Checkpoints(), epochs=2, resume=str(checkpoint))[1]) == 2
    assert files(tmp_path / "b") == before
    assert files(tmp_path / "b-2/checkpoints")[0] == "step-0000000010"


@pytest.mark.parametrize("resume", ["latest", "run-2"])
def test_a_numbered_run_is_resumed_in_its_own_folder(tmp_path: Path, resume: str) -> None:
    fit(tmp_path / "run", Checkpoints(), epochs=1)
    fit(tmp_path / "run", Checkpoints(), epochs=2)
    before = files(tmp_path / "run")
    given = resume if resume == "latest" else str(tmp_path / resume)
    assert len(fit(tmp_path / "run", Checkpoints(), epochs=3, resume=given)[1]) == 3
    assert files(tmp_path / "run") == before
    assert "step-0000000015" in {path.name for path in (tmp_path / "run-2/checkpoints").iterdir()}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run-2"]


def test_resuming_an_older_checkpoint_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    fit(tmp_path / "a", Checkpoints(), epochs=2)
    older, newest = sorted((tmp_path / "a/checkpoints").iterdir())
    with pytest.raises(
        ConfigError, match=f"resume: expected the newest checkpoint of that run, {newest}"
    ):
        fit(tmp_path / "a", resume=str(older))
    assert len(fit(tmp_path / "b", resume=str(older))[1]) == 3
    trainer = make(tmp_path / "a", [])
    trainer.resume(older)  # to look at it is fine
    assert trainer.step.steps_done == 5


def test_a_folder_in_which_no_file_can_be_made_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    steps: list[int] = []
    with pytest.raises(
        ConfigError, match=r"run_dir: expected a folder that can be written.*No space left"
    ):
        fit(tmp_path, At(0, lambda trainer: steps.append(1)))
    assert steps == []


@pytest.mark.parametrize(("keep", "kept"), [(1, [15]), (2, [10, 15]), (5, [5, 10, 15])])
def test_how_many_checkpoints_are_kept(tmp_path: Path, keep: int, kept: list[int]) -> None:
    fit(tmp_path, Checkpoints(), keep_checkpoints=keep)
    assert [int(path.name[-2:]) for path in sorted((tmp_path / "checkpoints").iterdir())] == kept


@pytest.mark.parametrize("keep", [0, -1, 1.0, True])
def test_bad_numbers_of_checkpoints_to_keep(keep: Any) -> None:
    with pytest.raises(
        ConfigError, match="keep_checkpoints: expected a whole number of at least 1"
    ):
        make(None, [], keep_checkpoints=keep)


# --- fit, again
# ---------------------------------------------------------------------------------------------


def sharded_state(out: Path | None, how: str) -> Any:
    """Three epochs, in two or three calls."""
    trainer = make(out, [Checkpoints()] if out else [])
    held_out = images(31, seed=6)
    data: Any = images()
    if how == "same loader":
        data = Loader(data, 16)
    trainer.fit(data, 1, validate=held_out)
    if how == "resume":
        trainer = make(out, [Checkpoints()])
        trainer.resume("latest")
        assert trainer.position.epoch == 1
    if how == "loader used":
        data = Loader(data, 16)
        next(iter(data.epoch(7)))
    trainer.fit(data, 2, validate=held_out)
    history = trainer.fit(data, 3, validate=held_out)
    return fingerprint(trainer.model, trainer.optimizer), history


@pytest.mark.parametrize("how", ["data set", "same loader", "loader used", "resume"])
def test_a_second_call_continues_with_the_next_epoch(pool: Pool, tmp_path: Path, how: str) -> None:
    straight = pool.run(fit, tmp_path / "straight", Checkpoints(), workers=2)
    parts = pool.run(sharded_state, tmp_path / "parts", how, workers=2)
    assert parts[0][0] == straight[0][0]
    assert timeless(parts[0][1]) == timeless(straight[0][1])


@pytest.mark.parametrize("step", [6, 4])
def test_a_call_after_an_interruption_resumes_within_the_epoch(step: int) -> None:
    straight = fit(None)
    trainer = make(None, [At(step, send(signal.SIGTERM, 0))])
    with pytest.raises(InterruptedRunError):
        trainer.fit(images(), 3, validate=images(31, seed=6))
    history = trainer.fit(images(), 3, validate=images(31, seed=6))
    assert fingerprint(trainer.model, trainer.optimizer) == straight[0]
    assert timeless(history) == timeless(straight[1])


def test_a_reason_to_stop_is_forgotten_at_the_next_call(tmp_path: Path) -> None:
    trainer = make(tmp_path, [At(1, lambda trainer: trainer.stop("enough")), Checkpoints()])
    assert len(trainer.fit(images(), 4)) == 1
    assert trainer.stop_reason == "enough"
    assert len(trainer.fit(images(), 1, resume="latest")) == 1  # which is done already
    assert trainer.stop_reason == ""
    trainer.stop("nothing runs")
    assert len(trainer.fit(images(), 3)) == 3
    assert trainer.stop_reason == ""


def test_losses_of_an_earlier_call_are_forgotten() -> None:
    trainer = make(None, [])
    nan, zero, one = torch.tensor([float("nan"), 0, 1]).unbind()
    trainer.steps_in_flight.add(StepResult(0, StepNumbers(nan, one, zero), 0.1))
    assert len(trainer.fit(images(), 1)) == 1


def test_a_loader_that_another_run_has_used_begins_at_the_beginning() -> None:
    loader, histories = Loader(images(), 16), []
    for _ in range(2):
        histories.append(timeless(make(None, []).fit(loader, 2)))
        loader.load_state_dict({**loader.state_dict(), "epoch": 0, "step": 3})
    assert histories[0] == histories[1]


def test_fewer_epochs_than_are_done_are_refused(tmp_path: Path) -> None:
    trainer = make(tmp_path, [Checkpoints()])
    trainer.fit(images(), 2)
    for epochs in (1, 2):
        with pytest.raises(
            ConfigError, match=r"epochs: expected a whole number of at least 3, as 2 are done"
        ):
            trainer.fit(images(), epochs)
    assert len(trainer.fit(images(), 3)) == 3
    with pytest.raises(
        ConfigError, match=r"epochs: expected a whole number of at least 3, as 3 are done"
    ):
        fit(tmp_path, epochs=2, resume="latest")
    assert len(fit(tmp_path, epochs=3, resume="latest")[1]) == 3


def test_a_run_in_its_third_epoch_has_begun_three(tmp_path: Path) -> None:
    with pytest.raises(InterruptedRunError):
        fit(tmp_path, At(11, send(signal.SIGTERM, 0)), Checkpoints("0"), epochs=4)
    with pytest.raises(ConfigError, match="at least 3, as 2 are done"):
        fit(tmp_path, epochs=2, resume="latest")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoints",
        "ledger.bin",
        "ledger.jsonl",
    ]
