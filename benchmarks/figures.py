"""Draws what the benchmarks measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from common import TITLES

# Of Okabe and Ito's palette, which is told apart by colour-blind readers, and by lightness in print.
COLOURS = {1: "#9CC9E8", 2: "#0072B2"}
WIDTH = 0.38  # of a bar; the two of a side take 2 × 0.38 of the 1 between sides


def draw_scaling(rows: list[dict[str, Any]], titles: dict[str, str], path: Path) -> None:
    """One panel a model, one pair of bars a side.

    Args:
        rows: as `scaling.summarise` makes them, of one model or several.
        titles: side → what it is called.
        path: the PNG file.
    """
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, panels = plt.subplots(1, len(models), figsize=(5.4 * len(models), 4.2), sharey=True, squeeze=False)
    for panel, model in zip(panels[0], models, strict=True):
        own = [row for row in rows if row["model"] == model]
        _draw_panel(panel, own, [titles[row["side"]] for row in own])
        panel.set_title(f"{TITLES[model]}, global batch {own[0]['global_batch']}", fontsize=11)
    first = titles[rows[0]["side"]]
    panels[0][0].set_ylabel(f"samples/s over those of {first}\nwith one worker")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(labels), frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    print(f"wrote {path}")


def _draw_panel(panel: Axes, rows: list[dict[str, Any]], names: list[str]) -> None:
    for workers, colour in COLOURS.items():
        spreads = [row["over_first_alone"][workers] for row in rows]
        heights = [spread["median"] for spread in spreads]
        errors = [
            [spread["median"] - spread["low"] for spread in spreads],
            [spread["high"] - spread["median"] for spread in spreads],
        ]
        places = [number + (workers - 1.5) * WIDTH for number in range(len(rows))]
        label = f"{workers} worker{'s' if workers > 1 else ''}"
        panel.bar(places, heights, WIDTH, yerr=errors, color=colour, ecolor="#444444", capsize=3, label=label)
        for place, height in zip(places, heights, strict=True):
            # At the foot, where neither the spread nor the ideal can cross it.
            panel.annotate(f"{height:.2f}", (place, 0.06), ha="center", color="black" if workers == 1 else "white")
    for number, row in enumerate(rows):
        ideal = 2 * row["over_first_alone"][1]["median"]
        label = "ideal: twice the side's own one worker" if number == 0 else ""
        panel.hlines(ideal, number, number + WIDTH, colors="#D55E00", linestyles="dashed", label=label)
    panel.set_xticks(range(len(rows)), [name.replace(", ", ",\n") for name in names], fontsize=9)
    panel.set_ylim(bottom=0)
    panel.spines[["top", "right"]].set_visible(False)
    panel.set_axisbelow(True)
    panel.grid(axis="y", color="#DDDDDD", linewidth=0.8)
