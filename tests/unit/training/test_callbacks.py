"""Callbacks that write outlive a disk that does not; early stopping knows what better means."""

from __future__ import annotations

import csv
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lockstep
from lockstep import activity
from lockstep.errors import CheckpointError, ConfigError
from lockstep.system import atomic_files
from lockstep.training import callbacks as training_callbacks
from lockstep.training.callbacks import (
    Callback,
    CSVLog,
    Curve,
    EarlyStopping,
    Progress,
    TensorBoard,
)
from lockstep.training.callbacks import progress as progress_module
from lockstep.training.callbacks.base import Row
from lockstep.training.callbacks.curve import StepLosses, draw
from lockstep.training.callbacks.group import CallbackGroup
from lockstep.training.callbacks.progress import as_duration, as_line
from lockstep.training.recovery import Recovery
from support.clock import Clock

ROWS: list[Row] = [
    {
        "epoch": e,
        "step": 5 * e,
        "train_loss": 1 / e,
        "lr": 0.1,
        "seconds": 1.0,
        "samples_per_second": 67.0,
    }
    for e in (1, 2, 3)
]


class Run(SimpleNamespace):
    @property
    def steps_in_epoch(self) -> int:
        return self.step.steps_done - self.epoch * self.steps_per_epoch  # type: ignore[no-any-return]

    @property
    def epoch_ended(self) -> bool:
        return bool(self.steps_in_epoch == self.steps_per_epoch)


def trainer(out: Path | None) -> Any:
    """What callbacks look at of a trainer."""
    comm = SimpleNamespace(size=1, device=SimpleNamespace(type="cpu"))
    parts = {
        "run_dir": out,
        "history": [],
        "step": SimpleNamespace(steps_done=0, recovery=Recovery()),
        "comm": comm,
        "global_batch_size": 16,
    }
    return Run(**parts, epoch=0, epochs=3, total_steps=15, steps_per_epoch=5, stop_reason="")


def live(callback: Callback, run: Any) -> None:
    callback.on_train_start(run)
    for row in ROWS:
        for _ in range(5):
            run.step.steps_done += 1
            callback.on_loss(
                run,
                SimpleNamespace(step=run.step.steps_done - 1, grad_norm=torch.tensor(2.0)),
                row["lr"],
            )
        run.history.append(row)
        callback.on_row(run, row)
        callback.on_train_epoch_end(run, row)
    callback.on_train_end(run, None)


# --- files that cannot be written
# ---------------------------------------------------------------------------


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system on which a folder can be made, and nothing be written."""
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4k", "lockstep-test", str(path)]
    if (
        shutil.which("mount") is None
        or subprocess.run(command, capture_output=True, check=False).returncode
    ):
        pytest.skip("mounting a file system is not permitted here")
    (path / "filler").write_bytes(bytes(4096))
    yield path
    subprocess.run(["umount", str(path)], check=True)


@pytest.mark.parametrize(
    ("make", "name"), [(CSVLog, "metrics.csv"), (Curve, "curve.png"), (TensorBoard, "tensorboard")]
)
@pytest.mark.leaks(
    "matplotlib keeps its fonts open; an event file that cannot be flushed is left to the collector"
)
@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)  # of tensorboard's own thread
def test_a_full_disk_ends_no_training(
    full_disk: Path, caplog: pytest.LogCaptureFixture, make: type[Callback], name: str
) -> None:
    live(make(), trainer(full_disk))
    for thread in threading.enumerate():
        if "tensorboard" in type(thread).__module__:
            thread.join(10.0)  # its error is reported when it ends, which would be in another test
            assert not thread.is_alive()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        f"{full_disk / name} cannot be written: No space left on device. The training continues "
        "without it."
    )
    assert all(path.name in ("filler", "tensorboard") for path in full_disk.iterdir())


def test_a_log_is_whole_again_once_there_is_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write = atomic_files.write_text
    failing = iter([True, True, False])

    def sometimes(path: Path, text: str) -> None:
        if next(failing):
            raise PermissionError(13, "Permission denied")
        write(path, text)

    monkeypatch.setattr(atomic_files, "write_text", sometimes)
    live(CSVLog(), trainer(tmp_path))
    assert len(caplog.records) == 1
    assert len(list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))) == 3


def test_a_plot_without_matplotlib_is_missed_by_who_has_asked_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    (by_default,) = [
        each for each in training_callbacks.defaults(with_folder=True) if isinstance(each, Curve)
    ]
    live(by_default, trainer(tmp_path))
    assert not caplog.records
    live(Curve(), trainer(tmp_path))
    assert [record.getMessage() for record in caplog.records] == [
        "curve.png needs the package matplotlib: pip install 'lockstep-train[plots]'. The training "
        "continues without it."
    ]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("make", [CSVLog, Curve, TensorBoard])
def test_a_run_without_a_folder_has_no_files(make: type[Callback]) -> None:
    live(make(), trainer(None))


def test_events_have_a_tag_for_each_curve(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monitor = TensorBoard(every_steps=2)
    run = trainer(tmp_path)
    rows = [{**row, "val_loss": 0.5, "val_accuracy": 0.9} for row in ROWS]
    monitor.on_train_start(run)
    for step in range(6):
        monitor.on_loss(run, SimpleNamespace(step=step, grad_norm=torch.tensor(3.0)), 0.25)
    for row in rows:
        monitor.on_row(run, row)
    monitor.on_train_end(run, None)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    steps = {tag: [event.step for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    of_rows = (
        "loss/val",
        "accuracy/val",
        "loss/train_epoch",
        "learning_rate",
        "samples_per_second",
    )
    assert steps == {
        "loss/train": [2, 4, 6],
        "gradient_norm": [2, 4, 6],
        **{tag: [5, 10, 15] for tag in of_rows},
    }


def test_each_event_is_there_once_after_a_worker_that_was_killed_while_it_wrote(
    tmp_path: Path,
) -> None:
    """What it has flushed, or not, after its state was sent last; another worker gets the hooks
    since then again.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run, changing = trainer(tmp_path), Recovery()
    changing.has_fixed_workers = False
    run.step.recovery = changing
    writers: list[Any] = []

    def begin(state: dict[str, Any]) -> TensorBoard:
        monitor = TensorBoard(every_steps=2)
        if state:
            monitor.load_state_dict(state)
        monitor.on_train_start(run)
        writers.append(monitor._writer)
        return monitor

    def loss(monitor: TensorBoard, step: int) -> None:
        run.step.steps_done = step + 1
        monitor.on_loss(run, SimpleNamespace(step=step, grad_norm=None), float(step))

    first = begin({})
    for step in range(4):
        loss(first, step)
    state = first.state_dict()
    first.on_row(run, {**ROWS[0], "step": 4})
    loss(first, 5)
    first._writer.flush()  # the state was not sent again
    second = begin(state)
    second.on_row(run, {**ROWS[0], "step": 4})
    for step in (5, 6, 7):
        loss(second, step)
    third = begin(second.state_dict())
    loss(third, 9)
    for writer in writers[::2]:  # the second one is killed with events in its queue
        writer.close()
    shutil.copytree(tmp_path / "tensorboard", tmp_path / "copy")
    writers[1].close()
    events = EventAccumulator(str(tmp_path / "copy")).Reload()
    steps = {tag: [event.step for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert steps.pop("loss/train") == [2, 4, 6, 8, 10] and set(map(tuple, steps.values())) == {(4,)}


def test_losses_of_many_steps_are_means_over_more_and_more() -> None:
    losses = StepLosses(limit=8)
    for step in range(40):
        losses.add(float(step))
    assert (losses.steps_per_mean, losses.means) == (8, [3.5, 11.5, 19.5, 27.5, 35.5])
    again = StepLosses(limit=8)
    again.load_state_dict(losses.state_dict())
    again.add(1.0)
    assert again.state_dict() == {**losses.state_dict(), "sum": 1.0, "count": 1}


@pytest.mark.leaks("matplotlib keeps its fonts open")
@pytest.mark.parametrize("columns", [{}, {"val_loss": 0.1, "val_accuracy": 0.5}, {"val_f1": 0.5}])
def test_a_curve_is_a_picture(columns: dict[str, float]) -> None:
    rows = [{**row, **columns, "lr": row["train_loss"]} for row in ROWS]
    losses = StepLosses()
    losses.means = [100.0, 1.0]
    assert draw(rows, losses, 5, "quickstart-2").startswith(b"\x89PNG")


# --- early stopping
# -----------------------------------------------------------------------------------------

NAN = float("nan")


def history(values: list[float]) -> list[Row]:
    return [{"val_error": value} for value in values]


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
def test_early_stopping_counts_the_rows_since_the_best_one(
    options: dict[str, Any], values: list[float], waited: int
) -> None:
    assert EarlyStopping("val_error", **options).rows_since_best(history(values)) == waited


def test_rows_before_the_metric_was_measured_count_as_worst() -> None:
    assert EarlyStopping("val_error").rows_since_best([{"lr": 1.0}, *history([5.0])]) == 0


def stop_reasons(stopping: EarlyStopping, rows: list[Row]) -> list[str]:
    reasons: list[str] = []
    run = SimpleNamespace(history=rows, epochs=5, stop=reasons.append)
    stopping.on_row(run, rows[-1])  # type: ignore[arg-type]
    return reasons


@pytest.mark.parametrize(("values", "stops"), [([1.0, 2.0], False), ([1.0, 2.0, 3.0], True)])
def test_early_stopping_stops_when_its_patience_is_used_up(
    values: list[float], stops: bool
) -> None:
    reasons = stop_reasons(EarlyStopping("val_error", patience=2), history(values))
    assert reasons == (["2 validations without a better val_error"] if stops else [])


@pytest.mark.parametrize(
    ("epochs", "metric", "reason"),
    [
        ([1, 2], "val_error", "1 validation without a better val_error"),
        (
            [1, 1, 1],
            "val_error",
            "2 validations without a better val_error",
        ),  # three validations within the first epoch
        ([1, 2, 3], "train_loss", "2 epochs without a better train_loss"),
        ([2, 2, 3], "train_loss", "2 rows of the history without a better train_loss"),
        ([1, 1], "lr", "1 row of the history without a better lr"),
    ],
)
def test_the_reason_of_early_stopping_says_what_it_counted(
    epochs: list[int], metric: str, reason: str
) -> None:
    rows: list[Row] = [{"epoch": epoch, metric: 1.0} for epoch in epochs]
    assert stop_reasons(EarlyStopping(metric, patience=1, higher_is_better=False), rows) == [reason]


def test_the_reason_of_early_stopping_names_min_delta() -> None:
    reasons = stop_reasons(
        EarlyStopping("val_error", patience=1, min_delta=0.25), history([1.0, 0.9])
    )
    assert reasons == ["1 validation without a val_error that is better by more than 0.25"]


@pytest.mark.parametrize(
    "options",
    [
        {"patience": 0},
        {"patience": 1.5},
        {"patience": True},
        {"min_delta": -0.1},
        {"min_delta": NAN},
    ],
)
def test_bad_options(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        EarlyStopping(**options)


# --- the group
# ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (CSVLog, r"got the class CSVLog. Create an instance: CSVLog\(\.\.\.\)"),
        (print, "got builtin_function"),
    ],
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
    saved = CallbackGroup(
        [Counting(1), CSVLog(), CountingEverywhere(5), Counting(2)], 0
    ).state_dict()
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


def test_callbacks_without_state_are_not_saved() -> None:
    everyone = [Progress(), CSVLog(), EarlyStopping(), Strict()]
    group = CallbackGroup(everyone, 0)
    assert group.state_dict() == {}
    group.load_state_dict({})


@pytest.mark.parametrize("rank", [0, 1])
def test_state_of_others_and_missing_state_are_a_line_of_rank_0(
    caplog: pytest.LogCaptureFixture, rank: int
) -> None:
    member = CountingEverywhere(3)
    CallbackGroup([member, EarlyStopping()], rank).load_state_dict({"Vanished": {"a": 1}})
    assert (member.count, member.loaded) == (3, False)
    assert [record.getMessage() for record in caplog.records] == [
        "the checkpoint has no state of the callback CountingEverywhere, which starts anew",
        "the checkpoint has state of a callback Vanished, which this run does not have",
    ][: 0 if rank else 2]


def test_state_that_a_callback_cannot_load_is_an_error_that_names_it() -> None:
    with pytest.raises(
        CheckpointError, match=r"the callback Strict cannot load its state .*: KeyError: 'momentum'"
    ):
        CallbackGroup([Strict()], 0).load_state_dict({"Strict": {"momentum": 1}})


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (
            object(),
            r"callbacks\.Counting\.count: expected None, .*, got an object of type builtins\.object",
        ),
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

    with pytest.raises(
        ConfigError, match=r"callbacks\.Wrong: expected a dict from state_dict\(\), got a list"
    ):
        CallbackGroup([Wrong()], 0).state_dict()


# --- the display
# --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("error", "shown"), [(None, True), (KeyError(), False)])
def test_the_reason_of_an_early_end_is_shown(
    error: BaseException | None, shown: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    progress, run = Progress(), shown_run()
    run.stop_reason = "enough"
    progress.on_train_start(run)
    progress.on_train_end(run, error)
    assert capsys.readouterr().out.endswith("stopped early: enough\n") == shown


def shown_run() -> Any:
    """A run of two epochs of 200 steps, at the beginning of the second."""
    run = trainer(None)
    run.epochs, run.total_steps, run.steps_per_epoch, run.epoch = 2, 400, 200, 1
    run.step.strategy = SimpleNamespace(devices=["cpu"])
    run.totals = SimpleNamespace(samples_per_second=5120.4)
    run.step.steps_done = 200
    return run


def progress_in_epoch(monkeypatch: pytest.MonkeyPatch) -> tuple[Clock, Progress, Any]:
    """A clock, the progress of a run at the beginning of its second epoch, and the run."""
    clock = Clock(monkeypatch)
    progress, run = Progress(), shown_run()
    monkeypatch.setattr(progress, "_refresh", lambda: None)  # the thread sees another clock
    progress.on_train_start(run)
    progress.on_train_epoch_start(run)
    return clock, progress, run


def test_without_a_terminal_a_line_every_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock, progress, run = progress_in_epoch(monkeypatch)
    for step in range(200, 236):
        run.step.steps_done = step + 1
        clock.pass_s(0.7)
        progress.on_train_step_end(run, SimpleNamespace(step=step))
        progress.on_loss(run, SimpleNamespace(step=step), 0.25)
    progress.on_train_end(run, None)
    assert capsys.readouterr().out.splitlines()[1:] == [
        "epoch 2/2  step 15/200  loss 0.2500  5,120 samples/s  2:10 left",
        "epoch 2/2  step 30/200  loss 0.2500  5,120 samples/s  1:59 left",
    ]


def test_a_refresh_after_an_epoch_that_was_shorter_than_an_update_shows_its_last_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock, progress, run = progress_in_epoch(monkeypatch)
    run.step.steps_done = 400
    progress.on_train_step_end(run, SimpleNamespace(step=399))
    progress.on_validation_start(run)
    clock.pass_s(11.0)
    progress._show(time.monotonic())
    progress.on_train_end(run, None)
    (line,) = capsys.readouterr().out.splitlines()[1:]
    assert "step 200/200" in line
    assert "evaluating (0:11)" in line


@pytest.mark.parametrize(
    ("hook", "arguments", "activity"),
    [
        ("on_train_epoch_start", (), "loading data"),
        ("on_train_step_start", (None,), "in the first step"),
        ("on_validation_start", (), "evaluating"),
        ("on_checkpoint_start", (), "saving"),
    ],
)
def test_what_takes_long_is_shown_while_it_lasts(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    hook: str,
    arguments: Any,
    activity: str,
) -> None:
    monkeypatch.setattr(progress_module, "_LINE_INTERVAL", 0.3)
    monkeypatch.setattr(progress_module._Lines, "interval", 0.3)
    progress, run = Progress(), shown_run()
    progress.on_train_start(run)
    getattr(progress, hook)(run, *arguments)
    time.sleep(2.2)
    progress.on_train_end(run, None)
    assert f"left  {activity} (0:0" in capsys.readouterr().out


def test_a_notebook_has_one_output_that_is_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[dict[str, str]] = []

    def display(bundle: dict[str, str], raw: bool, display_id: bool) -> Any:
        assert raw and display_id and not shown
        shown.append(bundle)
        return SimpleNamespace(update=lambda bundle, raw: shown.append(bundle))

    shell = SimpleNamespace(kernel=object())
    fake = SimpleNamespace(get_ipython=lambda: shell, display=SimpleNamespace(display=display))
    monkeypatch.setitem(sys.modules, "IPython", fake)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "IPython.display", fake.display)
    run = shown_run()
    live(progress := Progress(), run)
    assert isinstance(progress._display, progress_module._Notebook)
    assert shown[-1]["text/html"].count("<tr>") == 4
    assert "\x1b" not in str(shown)
    assert "<progress" not in shown[-1]["text/html"]


def piped(monkeypatch: pytest.MonkeyPatch, display: str) -> tuple[str, str]:
    """What a launcher that shows the output on `display` gets from a run of one epoch through its
    two pipes.
    """
    monkeypatch.setenv("LOCKSTEP_DISPLAY", display)
    pipes = [os.pipe() for _ in range(2)]
    with os.fdopen(pipes[0][1], "w") as out, os.fdopen(pipes[1][1], "w") as errors:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", errors)
        progress, run = Progress(), shown_run()
        progress.on_train_start(run)
        run.step.steps_done += 50
        progress._next_update = 0.0  # at once
        progress.on_train_step_end(run, None)  # type: ignore[arg-type]
        print("of the program")
        progress.on_row(run, ROWS[1])
        progress._next_update = 0.0
        progress.on_train_step_end(run, None)  # type: ignore[arg-type]
        progress.on_train_end(run, None)
    with os.fdopen(pipes[0][0], newline="") as first, os.fdopen(pipes[1][0], newline="") as second:
        return first.read(), second.read()


def test_a_bar_for_the_launchers_terminal_is_drawn_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines, bars = piped(monkeypatch, "120")
    heading, printed, row = lines.splitlines()
    assert heading.startswith("global batch 16") and row.startswith("epoch 2/2  ")
    assert printed == "of the program"  # and no part of the bar
    bar, last = re.fullmatch(r"\r(.*)\r(.*)\r \n", bars).groups()  # type: ignore[union-attr]
    assert re.match(r"epoch 1/2 #{10}-{30} 50/200  loss", bar) and len(bar) <= 110 and last == bar
    assert "\x1b" not in lines + bars
    assert max(map(len, re.split(r"[\r\n]", piped(monkeypatch, "50")[1]))) <= 40


def test_the_launchers_notebook_gets_what_to_display(monkeypatch: pytest.MonkeyPatch) -> None:
    lines, errors = piped(monkeypatch, "notebook")
    assert not errors
    bundles = [
        json.loads(line.removeprefix(activity.NOTEBOOK_MARK))
        for line in lines.splitlines()
        if line != "of the program"
    ]
    assert all(set(bundle) == {"text/plain", "text/html"} for bundle in bundles)
    assert "<progress" in bundles[1]["text/html"] and "<tr>" in bundles[-1]["text/html"]


def test_without_a_pipe_to_the_launcher_there_are_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCKSTEP_DISPLAY", "120")  # the rank's output goes to a file
    progress, run = Progress(), shown_run()
    progress.on_train_start(run)
    progress.on_row(run, ROWS[1])
    progress.on_train_end(run, None)
    assert "\r" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.4, "0:00"), (7, "0:07"), (750, "12:30"), (11045, "3:04:05")]
)
def test_times_left(seconds: float, shown: str) -> None:
    assert as_duration(seconds) == shown


def test_an_epoch_is_a_line_of_80_columns() -> None:
    row = {**ROWS[0], "epoch": 10, "val_loss": 1.23456, "val_accuracy": 0.98765, "seconds": 123.4}
    line = as_line({**row, "samples_per_second": 123_456.0}, 15)
    assert line == "epoch 10/15  loss 1.0000  val loss 1.2346  accuracy 98.77%  123.4 s  123,456/s"
    assert len(line) <= 80


def test_callbacks_are_imported_by_their_short_name() -> None:
    from lockstep import callbacks
    from lockstep.callbacks import Callback as ByName

    assert ByName is Callback is lockstep.callbacks.Callback
    assert set(callbacks.__all__) == set(training_callbacks.__all__)


def test_a_method_with_the_name_of_no_hook_is_refused() -> None:
    class Counts(Callback):
        def on_step_end(self, trainer: object, result: object) -> None:
            """What other libraries call on_train_step_end."""

    with pytest.raises(
        ConfigError,
        match=r"callbacks.Counts: expected one of on_.*got 'on_step_end'. Did you mean ",
    ):
        CallbackGroup([Counts()], 0)
