"""Callbacks that write outlive a disk that does not; early stopping knows what better means."""

from __future__ import annotations

import csv
import io
import logging
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import rich.console
import torch

from lockstep import atomic
from lockstep.errors import CheckpointError, ConfigError
from lockstep.training.callbacks import Callback, CSVLog, Curve, EarlyStopping, Progress, TensorBoard
from lockstep.training.callbacks.base import Row
from lockstep.training.callbacks.group import CallbackGroup
from lockstep.training.callbacks.progress import as_line

ROWS: list[Row] = [
    {"epoch": e, "step": 5 * e, "train_loss": 1 / e, "lr": 0.1, "seconds": 1.0, "samples_per_second": 67.0}
    for e in (1, 2, 3)
]


def trainer(out: Path | None) -> Any:
    """What callbacks look at of a trainer."""
    comm = SimpleNamespace(size=1, device=SimpleNamespace(type="cpu"))
    parts = {"out": out, "history": [], "step": SimpleNamespace(steps_done=0), "comm": comm, "global_batch": 16}
    return SimpleNamespace(**parts, epoch=0, epochs=3, total_steps=15, stop_reason="")


def live(callback: Callback, run: Any) -> None:
    callback.on_start(run)
    for row in ROWS:
        run.history.append(row)
        callback.on_epoch(run, row)
    callback.on_end(run, None)


# --- files that cannot be written ---------------------------------------------------------------------------


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system on which a folder can be made, and nothing be written."""
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4k", "lockstep-test", str(path)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system is not permitted here")
    (path / "filler").write_bytes(bytes(4096))
    yield path
    subprocess.run(["umount", str(path)], check=True)


@pytest.mark.parametrize(
    ("make", "name"), [(CSVLog, "metrics.csv"), (Curve, "curve.png"), (TensorBoard, "tensorboard")]
)
@pytest.mark.leaks("matplotlib keeps its fonts open; an event file that cannot be flushed is left to the collector")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of tensorboard's own thread
def test_a_full_disk_ends_no_training(
    full_disk: Path, caplog: pytest.LogCaptureFixture, make: type[Callback], name: str
) -> None:
    live(make(), trainer(full_disk))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        f"{full_disk / name} cannot be written: No space left on device. The training goes on without it."
    )
    assert all(path.name in ("filler", "tensorboard") for path in full_disk.iterdir())


def test_a_log_is_whole_again_once_there_is_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write = atomic.write_text
    failing = iter([True, True, False])

    def sometimes(path: Path, text: str) -> None:
        if next(failing):
            raise PermissionError(13, "Permission denied")
        write(path, text)

    monkeypatch.setattr(atomic, "write_text", sometimes)
    live(CSVLog(), trainer(tmp_path))
    assert len(caplog.records) == 1
    assert len(list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))) == 3


@pytest.mark.parametrize("make", [CSVLog, Curve, TensorBoard])
def test_a_run_without_a_folder_has_no_files(make: type[Callback]) -> None:
    live(make(), trainer(None))


# --- early stopping -----------------------------------------------------------------------------------------

NAN = float("nan")


def history(values: list[float]) -> list[Row]:
    return [{"test_f1": value} for value in values]


@pytest.mark.parametrize(
    ("options", "values", "waited"),
    [
        ({}, [3.0], 0),
        ({}, [3.0, 2.0, 1.0], 0),
        ({}, [1.0, 2.0, 3.0], 2),
        ({}, [1.0, 1.0], 1),
        ({"higher_is_better": True}, [1.0, 2.0, 3.0], 0),
        ({"higher_is_better": True}, [3.0, 2.0, 1.0], 2),
        ({"min_delta": 0.5}, [3.0, 2.5, 2.4, 2.3], 1),  # 2.5 is no better than 3, 2.4 is
        ({"min_delta": 0.5, "higher_is_better": True}, [1.0, 1.4, 1.6, 1.7], 1),
        ({}, [NAN, 2.0], 0),
        ({}, [NAN, 2.0, 1.0], 0),
        ({}, [2.0, NAN, NAN], 2),
        ({}, [2.0, NAN, 1.0], 0),
        ({}, [NAN, NAN, NAN], 2),
        ({"higher_is_better": True, "min_delta": 0.1}, [NAN, 2.0], 0),
    ],
)
def test_epochs_without_anything_better(options: dict[str, Any], values: list[float], waited: int) -> None:
    assert EarlyStopping("test_f1", **options).waited(history(values)) == waited


def test_epochs_before_the_metric_was_measured_count_as_worst() -> None:
    assert EarlyStopping("test_f1").waited([{"lr": 1.0}, *history([5.0])]) == 0


@pytest.mark.parametrize(("values", "stops"), [([1.0, 2.0], False), ([1.0, 2.0, 3.0], True)])
def test_patience(values: list[float], stops: bool) -> None:
    reasons: list[str] = []
    run = SimpleNamespace(history=history(values), stop=reasons.append)
    EarlyStopping("test_f1", patience=2).on_epoch(run, run.history[-1])  # type: ignore[arg-type]
    assert reasons == (["test_f1 has not improved for 2 epochs"] if stops else [])


@pytest.mark.parametrize(
    "options", [{"patience": 0}, {"patience": 1.5}, {"patience": True}, {"min_delta": -0.1}, {"min_delta": NAN}]
)
def test_bad_options(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        EarlyStopping(**options)


# --- the group ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [(CSVLog, r"got the class CSVLog. Make one of it: CSVLog\(\.\.\.\)"), (print, "got one of type builtin_function")],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_no_callback_is_refused(given: Any, said: str, rank: int) -> None:
    with pytest.raises(ConfigError, match=f"callbacks: expected instances of Callback, {said}"):
        CallbackGroup([Progress(), given], rank)


class Counting(Callback):
    """Has state of every kind that can be kept."""

    def __init__(self, count: Any = 0) -> None:
        self.count, self.loaded = count, False

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "seen": torch.full((2,), 0.5), "by step": {3: (1, None)}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.loaded = state["count"], True


class CountingEverywhere(Counting):
    every_rank = True


class Strict(Callback):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("momentum")


def test_callbacks_of_one_class_have_states_of_their_own() -> None:
    saved = CallbackGroup([Counting(1), CSVLog(), CountingEverywhere(5), Counting(2)], 0).state_dict()
    assert [(name, state["count"]) for name, state in saved.items()] == [
        ("Counting", 1),
        ("CountingEverywhere", 5),
        ("Counting-2", 2),
    ]
    members = [Counting(), Counting(), CountingEverywhere(), CSVLog()]
    CallbackGroup(members, 0).load_state_dict(saved)
    assert [member.count for member in members[:3]] == [1, 2, 5]  # type: ignore[attr-defined]


def test_a_rank_gives_and_takes_the_state_of_what_runs_on_it() -> None:
    members = [Counting(7), CountingEverywhere(8)]
    group = CallbackGroup(members, 1)
    assert list(group.state_dict()) == ["CountingEverywhere"]
    group.load_state_dict({"Counting": {"count": 1}, "CountingEverywhere": {"count": 2}})
    assert [member.count for member in members] == [7, 2]


def test_callbacks_without_state_take_no_place() -> None:
    everyone = [Progress(), CSVLog(), Curve(), EarlyStopping(), Strict()]
    group = CallbackGroup(everyone, 0)
    assert group.state_dict() == {}
    group.load_state_dict({})


@pytest.mark.parametrize("rank", [0, 1])
def test_state_of_others_and_missing_state_are_a_line_of_rank_0(caplog: pytest.LogCaptureFixture, rank: int) -> None:
    member = CountingEverywhere(3)
    CallbackGroup([member, EarlyStopping()], rank).load_state_dict({"Vanished": {"a": 1}})
    assert (member.count, member.loaded) == (3, False)
    assert [record.getMessage() for record in caplog.records] == [
        "the checkpoint has no state of the callback CountingEverywhere, which begins anew",
        "the checkpoint has state of a callback Vanished, which this run does not have",
    ][: 0 if rank else 2]


def test_state_that_a_callback_cannot_load_is_an_error_that_names_it() -> None:
    with pytest.raises(CheckpointError, match=r"the callback Strict cannot load its state .*: KeyError: 'momentum'"):
        CallbackGroup([Strict()], 0).load_state_dict({"Strict": {"momentum": 1}})


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (object(), r"callbacks\.Counting\.count: expected None, .*, got an object of type builtins\.object"),
        ({"deep": [{1, 2}]}, r"callbacks\.Counting\.count\.deep\.0: expected .* builtins\.set"),
    ],
    ids=["object", "set"],
)
def test_state_that_cannot_be_stored_is_named_with_callback_and_key(count: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        CallbackGroup([Counting(count)], 0).state_dict()


def test_state_is_a_dict() -> None:
    class Wrong(Callback):
        def state_dict(self) -> Any:
            return [1]

    with pytest.raises(ConfigError, match=r"callbacks\.Wrong: expected a dict from state_dict\(\), got a list"):
        CallbackGroup([Wrong()], 0).state_dict()


# --- the display --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("error", "shown"), [(None, True), (KeyError(), False)])
def test_the_reason_of_an_early_end_is_shown(error: BaseException | None, shown: bool) -> None:
    progress, text = Progress(), io.StringIO()
    progress._console = rich.console.Console(file=text)
    run = trainer(None)
    run.stop_reason = "enough"
    progress.on_end(run, error)
    assert (text.getvalue() == "stopped early: enough\n") == shown


def test_an_epoch_is_a_line_of_80_columns() -> None:
    row = {**ROWS[0], "epoch": 10, "test_loss": 1.23456, "test_accuracy": 0.98765, "seconds": 123.4}
    line = as_line({**row, "samples_per_second": 123_456.0}, 15)
    assert line == "epoch 10/15  loss 1.0000  test loss 1.2346  accuracy 98.77%  123.4 s  123,456/s"
    assert len(line) <= 80
