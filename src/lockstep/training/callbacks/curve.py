"""Draws loss and metrics over the epochs to `curve.png`."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from ... import atomic
from .base import Callback, Row
from .writing import Writing

if TYPE_CHECKING:
    from ..trainer import Trainer

__all__ = ["Curve", "draw"]


class Curve(Callback):
    """A picture of the run in its folder, drawn when it ends, however it ends.

    Where it cannot be written, the log says so.
    """

    def on_end(self, trainer: Trainer, error: BaseException | None) -> None:
        """Draw all epochs so far, if there are any."""
        if trainer.out is not None and trainer.history:
            path = trainer.out / "curve.png"
            with Writing().to(path):
                atomic.write_bytes(path, draw(trainer.history))


def draw(history: list[Row]) -> bytes:
    """The picture as PNG: the losses on the left, the metrics (in per cent where they are shares) on the right."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    metrics = [name for name in history[-1] if name.startswith("test_") and name != "test_loss"]
    figure = Figure(figsize=(9 if metrics else 5, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2 if metrics else 1, squeeze=False)[0]
    _panel(panels[0], history, [name for name in ("train_loss", "test_loss") if name in history[-1]], "loss")
    if metrics:
        _panel(panels[1], history, metrics, " / ".join(name.removeprefix("test_") for name in metrics))
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    return picture.getvalue()


def _panel(axes: Any, history: list[Row], names: list[str], title: str) -> None:
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    epochs = [row["epoch"] for row in history]
    for name in names:
        values = [row.get(name, float("nan")) for row in history]
        last = f"{values[-1]:.2%}" if name == "test_accuracy" else f"{values[-1]:.4g}"
        label = f"{name.replace('_', ' ')}: {last}"
        axes.plot(epochs, values, marker="o" if len(epochs) < 40 else "", markersize=3, linewidth=1.5, label=label)
    if names == ["test_accuracy"]:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(title=title, xlabel="epoch")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
