"""A callback that plots losses, metrics and the learning rate of a run to `curve.png`."""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ... import arguments
from ...errors import MissingPackageError
from ...system import atomic_files
from .base import Callback, Row, TrainingContext
from .writing import WriteGuard

if TYPE_CHECKING:
    from ..step.step_result import StepResult

_log = logging.getLogger(__name__)

_RATIO = 20  # of the largest loss to the smallest one, from which on a logarithmic scale shows more


class StepLosses:
    """The losses of the steps of a run: at most `limit` means over equal numbers of consecutive
    steps.

    When there are more, each two neighbours are replaced by their mean.
    """

    def __init__(self, limit: int = 1000) -> None:
        self._limit = limit
        self.steps_per_mean = 1
        self.means: list[float] = []
        self._sum = 0.0
        self._count = 0

    def add(self, loss: float) -> None:
        """Add the loss of the next step."""
        self._sum = self._sum + loss
        self._count = self._count + 1
        if self._count < self.steps_per_mean:
            return
        self.means.append(self._sum / self._count)
        self._sum = 0.0
        self._count = 0
        if len(self.means) == self._limit:
            self.means = [
                (a + b) / 2 for a, b in zip(self.means[::2], self.means[1::2], strict=True)
            ]
            self.steps_per_mean *= 2

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {
            "steps_per_mean": self.steps_per_mean,
            "means": list(self.means),
            "sum": self._sum,
            "count": self._count,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self.steps_per_mean = int(state["steps_per_mean"])
        self.means = [float(value) for value in state["means"]]
        self._sum = float(state["sum"])
        self._count = int(state["count"])


class Curve(Callback):
    """Plots the run to `curve.png` in its run directory when it ends, with or without an error.

    If the file cannot be written, or matplotlib is not installed, a warning is logged. A run to
    which Lockstep itself adds this callback has no plot without matplotlib, and no warning.
    """

    needs_run_dir = True

    def __init__(self) -> None:
        self._losses = StepLosses()
        self._is_wanted = True
        self._can_draw = True

    def state_dict(self) -> dict[str, Any]:
        """Return the losses of the steps."""
        return self._losses.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self._losses.load_state_dict(state)

    def on_train_start(self, trainer: TrainingContext) -> None:
        """Say at once if no plot can be made that the user has asked for."""
        try:
            arguments.require_package("matplotlib", "curve.png", "plots")
        except MissingPackageError as error:
            self._can_draw = False
            if self._is_wanted:
                _log.warning("%s. The training continues without it.", error)

    def on_loss(self, trainer: TrainingContext, result: StepResult, loss: float) -> None:
        """Keep the loss of a step."""
        self._losses.add(loss)

    def on_train_end(self, trainer: TrainingContext, error: BaseException | None) -> None:
        """Plot all epochs so far, if there are any."""
        if trainer.run_dir is not None and trainer.history and self._can_draw:
            path = trainer.run_dir / "curve.png"
            with WriteGuard().to(path):
                picture = draw(
                    trainer.history, self._losses, trainer.steps_per_epoch, trainer.run_dir.name
                )
                atomic_files.write_bytes(path, picture)


def curve_by_default() -> Curve:
    """Return the callback for a run whose user has not asked for a plot: without matplotlib it is
    silent.
    """
    curve = Curve()
    curve._is_wanted = False
    return curve


def draw(history: list[Row], losses: StepLosses, steps_per_epoch: int | None, name: str) -> bytes:
    """Return the plot as PNG: losses, metrics (accuracy in per cent) and, if it changes, the
    learning rate, by epoch.

    Args:
        history: the rows of the run, at least one.
        losses: the losses of its steps.
        steps_per_epoch: steps of a whole epoch; None if that is not known, to plot by step.
        name: the name of the run, the title.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    metrics = [
        column for column in history[-1] if column.startswith("val_") and column != "val_loss"
    ]
    rates = [row["lr"] for row in history]
    widths = [3.0, *([2.2] if metrics else []), *([1.3] if len(set(rates)) > 1 else [])]
    figure = Figure(figsize=(1.8 * sum(widths), 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(name, fontsize="medium")
    panels = list(figure.subplots(1, len(widths), squeeze=False, width_ratios=widths)[0])
    unit, steps = ("step", 1) if steps_per_epoch is None else ("epoch", steps_per_epoch)
    places = [row["step"] / steps for row in history]
    _draw_losses(panels.pop(0), history, places, losses, losses.steps_per_mean / steps, unit)
    if metrics:
        _draw_metrics(panels.pop(0), history, places, metrics, unit)
    if panels:
        panels[0].plot(places, rates, color="tab:gray", linewidth=1.5)
        _finish(panels[0], "learning rate", unit)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    return picture.getvalue()


def _draw_losses(
    axes: Any, history: list[Row], places: list[float], losses: StepLosses, width: float, unit: str
) -> None:
    middles = [(number + 0.5) * width for number in range(len(losses.means))]
    axes.plot(middles, losses.means, color="tab:blue", alpha=0.35, linewidth=0.8, label="each step")
    columns = [column for column in ("train_loss", "val_loss") if column in history[-1]]
    for column in columns:
        _plot_column(axes, history, places, column, unit, best=column == "val_loss")
    shown = [
        *losses.means,
        *(row[column] for row in history for column in columns if column in row),
    ]
    if min(shown) > 0 and max(shown) > _RATIO * min(shown):
        axes.set_yscale("log")
    _finish(axes, "loss", unit)


def _draw_metrics(
    axes: Any, history: list[Row], places: list[float], metrics: Sequence[str], unit: str
) -> None:
    from matplotlib.ticker import PercentFormatter

    for column in metrics:
        _plot_column(axes, history, places, column, unit, best=column == "val_accuracy")
    if list(metrics) == ["val_accuracy"]:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    _finish(axes, " / ".join(column.removeprefix("val_") for column in metrics), unit)


def _plot_column(
    axes: Any, history: list[Row], places: list[float], column: str, unit: str, best: bool
) -> None:
    values = [row.get(column, math.nan) for row in history]
    percent = column == "val_accuracy"
    last = f"{values[-1]:.2%}" if percent else f"{values[-1]:.4g}"
    label = f"{column.replace('_', ' ')}: {last}"
    marker = "o" if len(history) < 40 else ""
    (line,) = axes.plot(places, values, marker=marker, markersize=3, linewidth=1.5, label=label)
    known = [number for number, value in enumerate(values) if not math.isnan(value)]
    if not best or len(known) < 2:
        return
    at = (max if percent else min)(known, key=values.__getitem__)
    text = f"best: {values[at]:.2%}" if percent else f"best: {values[at]:.4g}"
    label = f"{text}, {unit} {places[at]:g}"
    axes.plot(
        places[at],
        values[at],
        "*",
        color=line.get_color(),
        markersize=11,
        linestyle="none",
        label=label,
    )


def _finish(axes: Any, title: str, unit: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axes.set(title=title, xlabel=unit)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize="small")
    axes.spines[["top", "right"]].set_visible(False)
