"""The picture of a prediction: speed by the number of workers, and what a step is spent on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..system import atomic_files
from .prediction import Forecast

_PARTS = ("compute", "stragglers", "loader", "bandwidth", "latency")
_COLOURS = ("#4878a8", "#c9a227", "#8a6d3b", "#c44e52", "#e39c9e")


def draw(
    path: Path, forecasts: Sequence[Forecast], title: str, measured: Mapping[int, float]
) -> None:
    """Write a PNG or another format that matplotlib knows by the ending of `path`.

    Args:
        path: the file.
        forecasts: in the order of the numbers of workers.
        title: of the picture.
        measured: seconds of a step by the number of workers, which are marked.

    Raises:
        OSError: it cannot be written.
        ValueError: the format is not known.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    speed, steps = figure.subplots(1, 2)
    figure.suptitle(title)
    _draw_speed(speed, forecasts, measured)
    _draw_steps(steps, forecasts)
    with atomic_files.file(path) as temporary:
        figure.savefig(temporary, format=path.suffix.lstrip(".") or "png", dpi=130)


def _draw_speed(axes: Any, forecasts: Sequence[Forecast], measured: Mapping[int, float]) -> None:
    counts = [forecast.workers for forecast in forecasts]
    lows = [forecast.samples_per_s * forecast.step_s / forecast.high_s for forecast in forecasts]
    highs = [forecast.samples_per_s * forecast.step_s / forecast.low_s for forecast in forecasts]
    alone = forecasts[0].samples_per_s / forecasts[0].speedup
    axes.fill_between(
        counts, lows, highs, color=_COLOURS[0], alpha=0.25, linewidth=0, label="90 % interval"
    )
    axes.plot(
        counts,
        [forecast.samples_per_s for forecast in forecasts],
        "o-",
        color=_COLOURS[0],
        ms=4,
        label="predicted",
    )
    axes.plot(
        counts,
        [alone * count for count in counts],
        ":",
        color="0.5",
        label="each worker as fast as one",
    )
    known = [forecast for forecast in forecasts if forecast.workers in measured]
    if known:
        speeds = [
            forecast.samples_per_s * forecast.step_s / measured[forecast.workers]
            for forecast in known
        ]
        axes.plot(
            [forecast.workers for forecast in known],
            speeds,
            "x",
            color="black",
            ms=8,
            label="measured",
        )
    _count_axis(axes, counts)
    axes.set(ylabel="samples per second", ylim=(0, 1.15 * max(highs)), title="Speed")
    axes.grid(alpha=0.3)
    axes.legend(loc="best")


def _draw_steps(axes: Any, forecasts: Sequence[Forecast]) -> None:
    positions = range(len(forecasts))
    longest = max(forecast.step_s for forecast in forecasts)
    scale, unit = (1.0, "s") if longest >= 1 else (1e3, "ms")
    floor = [0.0] * len(forecasts)
    for name, colour in zip(_PARTS, _COLOURS, strict=True):
        values = [scale * forecast.shares.get(name, 0.0) for forecast in forecasts]
        axes.bar(positions, values, bottom=floor, color=colour, label=name, width=0.8)
        floor = [low + value for low, value in zip(floor, values, strict=True)]
    every = max(1, -(-len(forecasts) // 12))
    axes.set_xticks(
        [*positions][::every], [str(forecast.workers) for forecast in forecasts][::every]
    )
    axes.set(xlabel="workers", ylabel=f"{unit} in a step", title="What a step is spent on")
    axes.set_ylim(0, 1.25 * scale * longest)  # room for the legend
    axes.legend(loc="upper center", ncols=3)


def _count_axis(axes: Any, counts: Sequence[int]) -> None:
    axes.set_xlabel("workers")
    if counts[-1] > 32:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    elif len(counts) <= 12:
        axes.set_xticks(counts)
