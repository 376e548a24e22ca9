"""A callback that shows the progress of the training: on a terminal, in a notebook, or as lines in
a log.
"""

from __future__ import annotations

import html
import json
import os
import stat
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ... import arguments, environment
from ...activity import NOTEBOOK_MARK, display_in_notebook, in_notebook
from ...errors import counted
from .base import Callback, Row, TrainingContext

if TYPE_CHECKING:
    from ...data.loader import Batch
    from ..step.step_result import StepResult

_LINE_INTERVAL = 10.0  # seconds between lines, where there is neither a terminal nor a notebook


class Progress(Callback):
    """Shows what the run is doing, and the results of each epoch.

    On a terminal it is a progress bar below a line for each epoch; in a notebook one table that
    updates in place; elsewhere a line for each epoch, and one whenever 10 s have passed without
    any.

    Args:
        tokens: the number of tokens in a sample, to show tokens per second; None to show samples
            per second.
    """

    def __init__(self, tokens: int | None = None) -> None:
        if tokens is not None:
            arguments.number("tokens", tokens, above=0)
        self._unit, self._per_sample = ("samples", 1) if tokens is None else ("tokens", tokens)
        self._display: _Display | None = None
        self._status = _Status()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._next_update = 0.0
        self._began = 0.0
        self._steps_before = 0

    def on_train_start(self, trainer: TrainingContext) -> None:
        """Show the heading, and start to show the progress."""
        self._display = _find_display()
        self._status = _Status(epochs=trainer.epochs, steps=trainer.steps_per_epoch)
        self._display.begin(as_heading(trainer))
        self._began = time.monotonic()
        self._steps_before = trainer.step.steps_done
        self._next_update = self._began + self._display.interval
        self._ended.clear()
        # Refreshes while no step ends: while data is loaded, a model is compiled, evaluated or
        # saved.
        self._thread = threading.Thread(target=self._refresh, name="lockstep-progress", daemon=True)
        self._thread.start()

    def on_train_epoch_start(self, trainer: TrainingContext) -> None:
        """Show that the first batch is being loaded."""
        self._status.epoch = trainer.epoch + 1
        self._status.step = trainer.steps_in_epoch
        self._status.steps = trainer.steps_per_epoch
        self._set_activity("loading data")

    def on_train_step_start(self, trainer: TrainingContext, batch: Batch) -> None:
        """Show that a step is running."""
        self._set_activity(
            "in the first step" if trainer.step.steps_done == self._steps_before else ""
        )

    def on_train_step_end(self, trainer: TrainingContext, result: StepResult) -> None:
        """Update the display, at most ten times a second, or in a log every ten seconds."""
        self._set_activity("loading data")
        status = self._status
        status.step = trainer.steps_in_epoch  # also for a refresh before the next update
        now = time.monotonic()
        if now < self._next_update:
            return
        done = trainer.step.steps_done
        status.speed = f"{trainer.totals.samples_per_second * self._per_sample:,.0f} {self._unit}/s"
        rate = (now - self._began) / (done - self._steps_before)
        status.left = (
            ""
            if trainer.total_steps is None
            else f"{as_duration(rate * (trainer.total_steps - done))} left"
        )
        self._show(now)

    def on_loss(self, trainer: TrainingContext, result: StepResult, loss: float) -> None:
        """Store the latest loss on the host for the display; reading a newer one would stall the
        device.
        """
        self._status.loss = f"{loss:.4f}"

    def on_validation_start(self, trainer: TrainingContext) -> None:
        """Show that an evaluation is running."""
        self._set_activity("evaluating")

    def on_validation_end(self, trainer: TrainingContext, results: dict[str, float]) -> None:
        """Show that it has ended."""
        self._set_activity("")

    def on_checkpoint_start(self, trainer: TrainingContext) -> None:
        """Show that a checkpoint is being written."""
        self._set_activity("saving")

    def on_checkpoint_end(self, trainer: TrainingContext, path: Path) -> None:
        """Show that it was written."""
        self._set_activity("")

    def on_row(self, trainer: TrainingContext, row: Row) -> None:
        """Show the results of an epoch, or of a validation within one."""
        assert self._display is not None
        with self._lock:
            self._display.add_row(row, as_line(row, trainer.epochs, within=not trainer.epoch_ended))
            self._next_update = time.monotonic() + self._display.interval

    def on_train_end(self, trainer: TrainingContext, error: BaseException | None) -> None:
        """End the display, with the reason for an early end, if any."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        assert self._display is not None
        self._display.end(
            f"stopped early: {trainer.stop_reason}" if trainer.stop_reason and error is None else ""
        )

    def _set_activity(self, activity: str) -> None:
        self._status.activity = activity
        self._status.since = time.monotonic()

    def _refresh(self) -> None:
        while not self._ended.wait(0.5):
            now = time.monotonic()
            # A bar that has just been updated needs no refresh, which would take the interpreter
            # lock from the step.
            if now >= self._next_update + 0.5:
                self._show(now)

    def _show(self, now: float) -> None:
        assert self._display is not None
        with self._lock:
            self._next_update = now + self._display.interval
            self._display.show(self._status)


@dataclass
class _Status:
    """What a display shows. `since` is the time at which `activity` began."""

    epoch: int = 1
    epochs: int | None = 1
    step: int = 0
    steps: int | None = 1
    loss: str = "–"
    speed: str = "– samples/s"
    left: str = "– left"
    activity: str = ""
    since: float = 0.0

    def doing(self) -> str:
        """Return what the run has been doing for more than a second, and for how long; "" for a
        running step.
        """
        seconds = time.monotonic() - self.since
        return f"{self.activity} ({as_duration(seconds)})" if self.activity and seconds > 1 else ""

    def place(self) -> str:
        """Return the epoch, and their number if it is known."""
        return f"epoch {self.epoch}" + ("" if self.epochs is None else f"/{self.epochs}")

    def steps_done(self) -> str:
        """Return the steps of the epoch, and their number if it is known."""
        return f"{self.step}" + ("" if self.steps is None else f"/{self.steps}")

    def as_line(self) -> str:
        """Return the status as a line."""
        parts = [
            self.place(),
            f"step {self.steps_done()}",
            f"loss {self.loss}",
            self.speed,
            self.left,
            self.doing(),
        ]
        return "  ".join(filter(None, parts))


class _Display(Protocol):
    """Where the progress is shown. `interval` is the number of seconds between updates."""

    interval: float

    def begin(self, heading: str) -> None:
        """Show the heading."""

    def show(self, status: _Status) -> None:
        """Show the status."""

    def add_row(self, row: Row, line: str) -> None:
        """Show the results of an epoch, which are also given as a line."""

    def end(self, reason: str) -> None:
        """End with a reason, if there is one."""


class _Lines:
    """Lines in a log."""

    interval = _LINE_INTERVAL

    def __init__(self, console: Any) -> None:
        self._console = console

    def begin(self, heading: str) -> None:
        self._console.print(heading, soft_wrap=True)

    def show(self, status: _Status) -> None:
        self._console.print(status.as_line(), soft_wrap=True)

    def add_row(self, row: Row, line: str) -> None:
        self._console.print(line, soft_wrap=True)

    def end(self, reason: str) -> None:
        if reason:
            self._console.print(reason, soft_wrap=True)


class _Terminal(_Lines):
    """A progress bar below the lines of the epochs."""

    interval = 0.1

    def __init__(self, console: Any) -> None:
        super().__init__(console)
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as Bar

        self._bar = Bar(
            TextColumn("{task.fields[place]}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}  {task.fields[doing]}"),
            console=console,
            transient=True,
            auto_refresh=False,
        )
        self._task = self._bar.add_task("", total=1, place="epoch 1", loss="–", doing="")

    def begin(self, heading: str) -> None:
        super().begin(heading)
        self._bar.start()

    def show(self, status: _Status) -> None:
        doing = status.doing() or f"{status.speed}  {status.left}"
        fields: dict[str, Any] = {"place": status.place(), "loss": status.loss, "doing": doing}
        self._bar.update(self._task, completed=status.step, total=status.steps, **fields)
        self._bar.refresh()

    def end(self, reason: str) -> None:
        self._bar.stop()
        super().end(reason)


class _LauncherTerminal:
    """A bar that is drawn over itself in one line, which the launcher shows on its terminal below
    all other lines.

    It goes to standard error, so that what the program prints meanwhile is no part of that line.
    """

    interval = 0.2

    def __init__(self, columns: int) -> None:
        self._columns = columns - 10  # the launcher puts the rank in front
        self._is_drawn = False

    def begin(self, heading: str) -> None:
        print(heading, flush=True)

    def show(self, status: _Status) -> None:
        place = status.place()
        doing = status.doing() or f"{status.speed}  {status.left}"
        text = f"{status.steps_done()}  loss {status.loss}  {doing}"
        width = min(40, self._columns - len(place) - len(text) - 2)
        done = width * status.step // max(1, status.steps or 1)
        bar = (
            f" {'#' * done}{'-' * (width - done)}"
            if width >= 5 and status.steps is not None
            else ""
        )
        print("\r" + f"{place}{bar} {text}"[: self._columns], end="", file=sys.stderr, flush=True)
        self._is_drawn = True

    def add_row(self, row: Row, line: str) -> None:
        print(line, flush=True)

    def end(self, reason: str) -> None:
        if self._is_drawn:
            print("\r ", file=sys.stderr, flush=True)  # the launcher removes a bar that ends blank
        if reason:
            print(reason, flush=True)


class _Notebook:
    """One output of a notebook's cell that updates in place: a bar, and a table of the latest
    epochs.
    """

    interval = 0.5
    _ROWS = 10

    def __init__(self, open_output: Callable[[dict[str, str]], Any]) -> None:
        self._heading = ""
        self._reason = ""
        self._rows: list[Row] = []
        self._line = ""  # the latest row as a line
        self._status: _Status | None = None
        self._open_output = open_output
        self._handle: Any = None

    def begin(self, heading: str) -> None:
        self._heading = heading
        self._handle = self._open_output(self._bundle())

    def show(self, status: _Status) -> None:
        self._status = status
        self._handle.update(self._bundle(), raw=True)

    def add_row(self, row: Row, line: str) -> None:
        self._rows.append(row)
        self._line = line
        self._handle.update(self._bundle(), raw=True)

    def end(self, reason: str) -> None:
        self._status = None
        self._reason = reason
        self._handle.update(self._bundle(), raw=True)

    def _bundle(self) -> dict[str, str]:
        lines = [self._heading, *([self._status.as_line()] if self._status else []), self._reason]
        bar = ""
        if self._status is not None:
            bar = f'<progress value="{self._status.step}" max="{self._status.steps}"></progress> '
        paragraphs = "<br>".join(html.escape(line) for line in filter(None, lines[:1] + lines[-1:]))
        status = html.escape(self._status.as_line()) if self._status else ""
        plain = filter(None, [*lines, self._line])
        return {
            "text/plain": "\n".join(plain),
            "text/html": f"{paragraphs}<br>{bar}{status}{self._table()}",
        }

    def _table(self) -> str:
        if not self._rows:
            return ""
        names = [name for name in self._rows[-1] if name != "step"]
        head = "".join(f"<th>{html.escape(name.replace('_', ' '))}</th>" for name in names)
        rows = "".join(
            "<tr>"
            + "".join(f"<td>{row.get(name, float('nan')):.6g}</td>" for name in names)
            + "</tr>"
            for row in self._rows[-self._ROWS :]
        )
        return f"<table><tr>{head}</tr>{rows}</table>"


class _LauncherNotebook:
    """The output of a notebook whose program has launched this worker."""

    def __init__(self, bundle: dict[str, str]) -> None:
        self.update(bundle)

    def update(self, bundle: dict[str, str], raw: bool = True) -> None:
        print(NOTEBOOK_MARK + json.dumps(bundle), flush=True)


def _find_display() -> _Display:
    if in_notebook():
        return _Notebook(display_in_notebook)
    launchers = environment.display() if _is_pipe(sys.stdout) and _is_pipe(sys.stderr) else ""
    if launchers == "notebook":
        return _Notebook(_LauncherNotebook)
    if launchers:
        return _LauncherTerminal(int(launchers))
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    return _Terminal(console) if console.is_terminal else _Lines(console)


def _is_pipe(stream: Any) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode)
    except (AttributeError, OSError, ValueError):  # no file
        return False


def as_duration(seconds: float) -> str:
    """Return a time in seconds as "0:07", "12:30" or "3:04:05"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def as_heading(trainer: TrainingContext) -> str:
    """Return a line that describes the run, and a second one with its run directory, if any."""
    workers = trainer.comm.size
    threads = torch.get_num_threads()
    parts = [
        f"global batch {trainer.global_batch_size:,}",
        *(
            []
            if trainer.steps_per_epoch is None
            else [f"{counted(trainer.steps_per_epoch, 'step')} an epoch"]
        ),
        f"{workers} {'worker' if workers == 1 else 'workers'} on {trainer.comm.device.type}",
    ]
    if (devices := len(trainer.step.strategy.devices)) > 1:
        parts.append(f"{devices} replicas each")
    if trainer.comm.device.type == "cpu":
        parts.append(f"{threads} {'thread' if threads == 1 else 'threads'} each")
    return ", ".join(parts) + ("" if trainer.run_dir is None else f"\nfiles in {trainer.run_dir}")


def as_line(row: Row, epochs: int | None, within: bool = False) -> str:
    """Return a row of the history as one line of at most 80 columns; it ends with the samples, or
    tokens, per second.

    Args:
        row: the row.
        epochs: the number of epochs of the run, None if that is not known.
        within: whether the row is that of a validation within an epoch, whose step is named then.
    """
    of = "" if epochs is None else f"/{epochs}"
    parts = [f"epoch {int(row['epoch']):>{len(of) - 1 if of else 0}}{of}"]
    if within:
        parts.append(f"step {int(row['step'])}")
    parts.append(f"loss {row['train_loss']:.4f}")
    for name, value in row.items():
        if name.startswith("val_"):
            parts.append(_measured(name, value))
    parts.append(f"{row['seconds']:.1f} s")
    tokens = row.get("tokens_per_second")
    parts.append(
        f"{row['samples_per_second']:,.0f}/s" if tokens is None else f"{tokens:,.0f} tokens/s"
    )
    return "  ".join(parts)


def _measured(name: str, value: float) -> str:
    """Return a result of a validation as text."""
    if name == "val_accuracy":
        return f"accuracy {value:.2%}"
    if name == "val_perplexity":
        return f"perplexity {value:.4g}"
    return f"{name.replace('_', ' ')} {value:.4f}"
