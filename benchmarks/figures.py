"""Draws what the benchmarks measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from collective_tables import COPY, size_text
from common import TITLES

# Of Okabe and Ito's palette, which is told apart by colour-blind readers, and by lightness in
# print.
COLOURS = {1: "#9CC9E8", 2: "#0072B2"}
WIDTH = 0.38  # of a bar; the two of a side take 2 × 0.38 of the 1 between sides

# side → colour, style and width of its line: Python's form of shm is dashed, the memory's own speed
# dotted
LINES: dict[str, tuple[str, str, float]] = {
    "shm": ("#0072B2", "-", 2.4),
    "shm-python": ("#56B4E9", "--", 1.6),
    "gloo": ("#D55E00", "-", 1.6),
    "mpich": ("#009E73", "-", 1.6),
    COPY: ("#777777", ":", 1.6),
}


def draw_scaling(rows: list[dict[str, Any]], titles: dict[str, str], path: Path) -> None:
    """One panel a model, one pair of bars a side.

    Args:
        rows: as `scaling.summarise` makes them, of one model or several.
        titles: side → what it is called.
        path: the PNG file.
    """
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, panels = plt.subplots(
        1, len(models), figsize=(5.4 * len(models), 4.2), sharey=True, squeeze=False
    )
    for panel, model in zip(panels[0], models, strict=True):
        own = [row for row in rows if row["model"] == model]
        _draw_panel(panel, own, [titles[row["side"]] for row in own])
        panel.set_title(f"{TITLES[model]}, global batch {own[0]['global_batch_size']}", fontsize=11)
    first = titles[rows[0]["side"]]
    panels[0][0].set_ylabel(f"samples/s over those of {first}\nwith one worker")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(labels), frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    _save(figure, path)


def draw_one_idea(
    lockstep: dict[str, list[float]],
    ddp: dict[str, list[float]],
    pauses: dict[str, float],
    path: Path,
) -> None:
    """The losses by number of workers, those of DDP beside those of Lockstep, and the pauses after
    a loss of a worker.

    Args:
        lockstep: number of workers → the test loss after 0, 1, 2, … epochs; all of them are equal.
        ddp: the same of DDP.
        pauses: what recovers → seconds, the shortest first.
        path: the PNG file.
    """
    figure, (fan, line, bars) = plt.subplots(1, 3, figsize=(11.0, 3.7))
    # the same blue, darker the more workers there are, so that lightness alone tells them apart
    colours = ("#8FC1E8", "#4A94CF", "#1F669E", "#0B3558")
    for (workers, losses), colour, marker in zip(ddp.items(), colours, "osD^", strict=True):
        fan.plot(
            range(len(losses)), losses, color=colour, linewidth=2.0, marker=marker, markersize=4
        )
        label = f"{workers} worker{'s' if workers != '1' else ''}"
        end = (len(losses) - 1, losses[-1])
        fan.annotate(label, end, (8, 0), textcoords="offset points", va="center", fontsize=10)
    for losses, colour, width in zip(
        lockstep.values(), colours, (12.0, 8.5, 5.0, 1.8), strict=True
    ):
        line.plot(range(len(losses)), losses, color=colour, linewidth=width, solid_capstyle="round")
    *others, most = lockstep
    text = f"{', '.join(others)} and {most} workers:\nequal in every bit"
    arrow = {"arrowstyle": "-", "color": "#555555", "shrinkB": 8}
    line.annotate(text, (3, losses[3]), xytext=(3.9, 0.9), arrowprops=arrow, fontsize=10)
    fan.set_title("PyTorch DDP\n64 samples a step on each worker", fontsize=11)
    line.set_title("Lockstep\n64 samples a step over all workers", fontsize=11)
    fan.set_ylabel("loss on test images")
    for panel in (fan, line):
        panel.set_yscale("log")
        panel.set_ylim(0.025, 3.2)
        panel.set_yticks([0.03, 0.1, 0.3, 1, 3], ["0.03", "0.1", "0.3", "1", "3"])
        panel.yaxis.set_minor_locator(NullLocator())
        panel.set_xlabel("epoch")
        panel.set_xticks(range(0, len(ddp["1"]), 2))
        panel.grid(axis="y", color="#DDDDDD", linewidth=0.8)
        panel.set_axisbelow(True)
    fan.set_xlim(right=len(ddp["1"]) + 3.2)  # room for the labels
    _draw_pauses(bars, pauses)
    for panel in (fan, line, bars):
        panel.spines[["top", "right"]].set_visible(False)
    figure.tight_layout(w_pad=2.0)
    _save(figure, path)


def _draw_pauses(panel: Axes, pauses: dict[str, float]) -> None:
    names = list(pauses)
    heights = list(pauses.values())
    colours = ["#D55E00" if name == "Lockstep" else "#999999" for name in names]
    panel.barh(names, heights, 0.6, color=colours)
    for place, seconds in enumerate(heights):
        label = f"{seconds:.1f} s" if seconds >= 1 else f"{seconds:.2f} s"
        panel.annotate(
            label, (seconds, place), (4, 0), textcoords="offset points", va="center", fontsize=10
        )
    panel.invert_yaxis()  # the first on top
    panel.set_xlim(right=1.25 * max(heights))
    panel.set_xlabel("seconds")
    panel.set_title("One of four workers is killed:\ntime to the next completed step", fontsize=11)


def draw_elastic_losses(
    undisturbed: list[float],
    losses: list[float],
    workers: dict[str, list[int]],
    events: dict[int, str],
    path: Path,
) -> None:
    """The losses of an elastic job over those of an undisturbed one; below them, the workers of
    each host.

    Args:
        undisturbed: the loss of each step.
        losses: those of the elastic job.
        workers: host → the number of its workers at each step.
        events: step → what has happened, where it changed the workers.
        path: the PNG file.
    """
    steps = range(len(losses))
    size: Any = {"figsize": (9.6, 5.0), "height_ratios": (3, 2), "sharex": True}
    figure, (curves, counts) = plt.subplots(2, 1, **size)
    curves.plot(steps, undisturbed, color="#9CC9E8", linewidth=5.0, label="undisturbed, one worker")
    curves.plot(
        steps,
        losses,
        color="#D55E00",
        linewidth=1.0,
        label="losses of workers and of a host, joins, resizes",
    )
    curves.set_title("The same losses, bit for bit, whatever happens to the workers", fontsize=11)
    curves.set_ylabel("loss")
    curves.set_ylim(bottom=0)
    curves.legend(loc="upper right", bbox_to_anchor=(1.0, 0.85), edgecolor="none", framealpha=1.0)
    colours = ("#0072B2", "#56B4E9", "#009E73")
    names = [f"host {host}" for host in workers]
    counts.stackplot(
        steps, *workers.values(), step="post", colors=colours, labels=names, linewidth=0
    )
    most = max(map(sum, zip(*workers.values(), strict=True)))
    counts.set_ylim(0, most + 0.5)
    counts.set_yticks(range(0, most + 1, 2))
    counts.set_ylabel("workers")
    counts.set_xlabel("step")
    counts.legend(frameon=False, ncols=len(names), loc="upper center", bbox_to_anchor=(0.5, -0.28))
    for step, text in events.items():
        for panel in (curves, counts):
            panel.axvline(step, color="#777777", linewidth=0.8, linestyle=":")
        curves.annotate(
            text,
            (step, 0.97),
            xycoords=("data", "axes fraction"),
            fontsize=8,
            va="top",
            xytext=(2, 0),
            textcoords="offset points",
        )
    for panel in (curves, counts):
        panel.spines[["top", "right"]].set_visible(False)
        panel.margins(x=0)
    figure.tight_layout()
    _save(figure, path)


def draw_long_run(samples: list[dict[str, Any]], path: Path) -> None:
    """Memory of the processes of a long run over time, and below it the number of workers.

    Args:
        samples: as `long_run.LongRun.take_sample` makes them.
        path: the PNG file.
    """
    size: Any = {"figsize": (9.6, 5.0), "height_ratios": (4, 1), "sharex": True}
    figure, (memory, workers) = plt.subplots(2, 1, **size)
    lines = {
        "survivor": ("#D55E00", "the worker that is never killed"),
        "loader of the survivor": ("#E69F00", "its loader processes, the largest"),
        "launcher": ("#0072B2", "launcher"),
        "fork server": ("#009E73", "fork server"),
    }
    for role, (colour, label) in lines.items():
        # of several loader processes the largest
        points = [
            (sample["seconds"] / 60, max(held))
            for sample in samples
            if (held := [row["private"] for row in sample["held"] if row["role"] == role])
        ]
        if points:
            memory.plot(*zip(*points, strict=True), color=colour, label=label, linewidth=1.6)
    others = [
        (sample["seconds"] / 60, row["private"])
        for sample in samples
        for row in sample["held"]
        if row["role"] == "worker"
    ]
    if others:
        style: Any = {"s": 2.0, "color": "#BBBBBB", "label": "all other workers"}
        memory.scatter(*zip(*others, strict=True), **style, zorder=0)
    memory.set_ylabel("MB of its own")
    memory.set_ylim(0, 1.25 * memory.get_ylim()[1])
    memory.set_title("Memory under losses of workers, resizes and load", fontsize=11)
    memory.legend(loc="upper right", ncols=2, edgecolor="none", framealpha=0.9, fontsize=9)
    minutes = [sample["seconds"] / 60 for sample in samples]
    counts = [sample["workers"] for sample in samples]
    workers.step(minutes, counts, where="post", color="#444444", linewidth=0.8)
    workers.set_ylabel("workers")
    workers.set_ylim(0, max(counts) + 0.5)
    workers.set_xlabel("minutes")
    for panel in (memory, workers):
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", color="#DDDDDD", linewidth=0.8)
        panel.set_axisbelow(True)
        panel.margins(x=0)
    figure.tight_layout()
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
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
        panel.bar(
            places,
            heights,
            WIDTH,
            yerr=errors,
            color=colour,
            ecolor="#444444",
            capsize=3,
            label=label,
        )
        for place, height in zip(places, heights, strict=True):
            # At the foot, where neither the spread nor the ideal can cross it.
            panel.annotate(
                f"{height:.2f}",
                (place, 0.06),
                ha="center",
                color="black" if workers == 1 else "white",
            )
    for number, row in enumerate(rows):
        ideal = 2 * row["over_first_alone"][1]["median"]
        label = "ideal: twice the side's own one worker" if number == 0 else ""
        panel.hlines(
            ideal, number, number + WIDTH, colors="#D55E00", linestyles="dashed", label=label
        )
    panel.set_xticks(range(len(rows)), [name.replace(", ", ",\n") for name in names], fontsize=9)
    panel.set_ylim(bottom=0)
    panel.spines[["top", "right"]].set_visible(False)
    panel.set_axisbelow(True)
    panel.grid(axis="y", color="#DDDDDD", linewidth=0.8)


def draw_collectives(rows: list[dict[str, Any]], titles: dict[str, str], path: Path) -> None:
    """Time over size, both logarithmic: one panel for each operation and number of ranks.

    Args:
        rows: as `collectives.summarise` makes them.
        titles: side → what it is called.
        path: the PNG file.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(f"{row['operation']}, {row['ranks']} ranks", []).append(row)
    across = min(3, len(found))
    down = -(-len(found) // across)
    size = (1.2 + 3.6 * across, 1.3 + 2.7 * down)  # inches, also of what stands above and below
    figure, panels = plt.subplots(
        down, across, figsize=size, sharex=True, sharey=True, squeeze=False
    )
    for panel, (title, own) in zip(panels.flat, found.items(), strict=False):
        _draw_times(panel, own, {**titles, COPY: "Tensor.copy_ on one rank"})
        panel.set_title(title, fontsize=10)
    for panel in panels.flat[len(found) :]:
        panel.set_visible(False)
    figure.supxlabel("size", fontsize=10)
    figure.supylabel("time of a call", fontsize=10)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="upper center",
        ncols=5 if across == 3 else 3,
        frameon=False,
        fontsize=9,
    )
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.5 / size[1]))
    _save(figure, path)


def _draw_times(panel: Axes, rows: list[dict[str, Any]], titles: dict[str, str]) -> None:
    sizes = [row["bytes"] for row in rows]
    for side, (colour, style, width) in LINES.items():
        if side not in rows[0]["seconds"]:
            continue
        spreads = [row["seconds"][side] for row in rows]
        lows, highs = ([spread[end] for spread in spreads] for end in ("low", "high"))
        panel.fill_between(sizes, lows, highs, color=colour, alpha=0.2, linewidth=0)
        medians = [spread["median"] for spread in spreads]
        panel.plot(
            sizes,
            medians,
            style,
            color=colour,
            linewidth=width,
            label=titles[side],
            marker="o",
            markersize=2.5,
        )
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks([4, 256, 16 << 10, 1 << 20, 64 << 20])
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size_text(int(value))))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _plain_time(value)))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.spines[["top", "right"]].set_visible(False)
    panel.set_axisbelow(True)
    panel.grid(color="#DDDDDD", linewidth=0.8)


def _plain_time(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.999 * factor:
            return f"{seconds / factor:g} {unit}"
    return f"{seconds * 1e6:g} µs"
