"""Shows on the terminal how far the training is."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from .base import Callback, Row

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from ..step import StepResult
    from ..trainer import Trainer

__all__ = ["Progress"]

_REFRESH = 0.1  # seconds; nobody reads faster


class Progress(Callback):
    """A bar for the current epoch on a terminal, and a line for each epoch anywhere."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(highlight=False, markup=False, emoji=False)
        self._bar: Bar | None = None
        self._task: Any = None
        self._next, self._loss = 0.0, "–"

    def on_start(self, trainer: Trainer) -> None:
        """Say what is about to happen, and begin the display where there is a terminal for it."""
        self._console.print(as_heading(trainer), soft_wrap=True)
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        if self._console.is_terminal:
            self._bar = Bar(
                TextColumn("epoch {task.fields[epoch]}/{task.fields[epochs]}"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TextColumn("loss {task.fields[loss]}  {task.fields[speed]} samples/s"),
                TimeRemainingColumn(compact=True),
                console=self._console,
                transient=True,
                # Drawn at our steps: a thread that redraws would take the interpreter from the training.
                auto_refresh=False,
            )
            self._task = self._bar.add_task("", total=trainer.total_steps, epoch="", epochs="", loss="–", speed="–")
            self._bar.start()

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        """Move the bar, ten times a second at most."""
        now = time.monotonic()
        if self._bar is None or now < self._next:
            return
        self._next = now + _REFRESH
        self._bar.update(
            self._task,
            completed=trainer.step.steps_done,
            epoch=trainer.epoch + 1,
            epochs=trainer.epochs,
            loss=self._loss,
            speed=f"{trainer.totals.samples_per_second:,.0f}",
        )
        self._bar.refresh()

    def on_loss(self, trainer: Trainer, result: StepResult, loss: float) -> None:
        """The bar shows the last loss that is here: asking for a newer one would stall the device."""
        self._loss = f"{loss:.4f}"

    def on_epoch(self, trainer: Trainer, row: Row) -> None:
        """A line with the epoch's numbers."""
        self._console.print(as_line(row, trainer.epochs), soft_wrap=True)

    def on_end(self, trainer: Trainer, error: BaseException | None) -> None:
        """Give the terminal back; say why the run ended early, if it did."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        if trainer.stop_reason and error is None:
            self._console.print(f"stopped early: {trainer.stop_reason}", soft_wrap=True)


def as_heading(trainer: Trainer) -> str:
    """The run in a line, and where its files are in another."""
    workers, threads = trainer.comm.size, torch.get_num_threads()
    parts = [
        f"global batch {trainer.global_batch:,}",
        f"{trainer.total_steps // trainer.epochs:,} steps an epoch",
        f"{workers} {'worker' if workers == 1 else 'workers'} on {trainer.comm.device.type}",
    ]
    if (devices := len(trainer.step.strategy.devices)) > 1:
        parts.append(f"{devices} replicas each")
    if trainer.comm.device.type == "cpu":
        parts.append(f"{threads} {'thread' if threads == 1 else 'threads'} each")
    return ", ".join(parts) + ("" if trainer.out is None else f"\nfiles in {trainer.out}")


def as_line(row: Row, epochs: int) -> str:
    """An epoch in one line, which a terminal of 80 columns shows as one; at its end, samples a second."""
    width = len(str(epochs))
    parts = [f"epoch {int(row['epoch']):>{width}}/{epochs}", f"loss {row['train_loss']:.4f}"]
    for name, value in row.items():
        if name.startswith("test_"):
            label = name.replace("_", " ")
            parts.append(f"accuracy {value:.2%}" if name == "test_accuracy" else f"{label} {value:.4f}")
    parts.append(f"{row['seconds']:.1f} s")
    parts.append(f"{row['samples_per_second']:,.0f}/s")
    return "  ".join(parts)
