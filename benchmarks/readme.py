"""Draws the README's picture, and puts its table into README.md and README.zh.md, from what has
been measured before.

python benchmarks/readme.py      # seconds; after one_idea.py, scaling.py, launch.py or elastic.py
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import DOCS, RESULTS, markdown_table, write_between

PICTURE = DOCS / "figures/one_idea.png"


@dataclass(frozen=True)
class Language:
    """The words of the table in one language; the rows are in the order of `measured`."""

    file: str
    header: tuple[str, ...]
    rows: tuple[str, ...]


ENGLISH = Language(
    "README.md",
    ("Linux, 2 CPU cores, no GPU", "Lockstep", "DDP under torchrun", "measured"),
    (
        "LeNet, 1 worker: images trained per second",
        "LeNet, 2 workers: images trained per second",
        "ResNet-18, 1 worker: images trained per second",
        "ResNet-18, 2 workers: images trained per second",
        "2 workers: seconds from the command to the first all-reduce",
        "4 workers, one is killed: seconds to the next completed step",
    ),
)
CHINESE = Language(
    "README.zh.md",
    ("Linux,2 个 CPU 核,无 GPU", "Lockstep", "torchrun 下的 DDP", "测量"),
    (
        "LeNet,1 个工作进程:每秒训练的图像数",
        "LeNet,2 个工作进程:每秒训练的图像数",
        "ResNet-18,1 个工作进程:每秒训练的图像数",
        "ResNet-18,2 个工作进程:每秒训练的图像数",
        "2 个工作进程:从输入命令到第一次 all-reduce 完成的秒数",
        "4 个工作进程,其中一个被杀死:到下一步完成的秒数",
    ),
)


def read(name: str) -> dict[str, Any]:
    """Return what a benchmark has measured."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def where(result: dict[str, Any]) -> str:
    """The day, and the maker of the processor."""
    machine = result["machine"]
    return (
        f"{machine['date'].split()[0]}, "
        f"{machine['processor'].replace('(R)', '').removesuffix(' Processor')}"
    )


def recoveries() -> dict[str, float]:
    """What recovers → median seconds from the kill of one of four workers to the next completed
    step.
    """
    names = {
        "lockstep": "Lockstep",
        "torchrun": "torchrun",
        "torchft": "torchft",
        "ray": "Ray Train",
    }
    losses = {row["side"]: row["losses"] for row in read("elastic")["others"]}
    return {
        name: statistics.median(loss["pause"] for loss in losses[side])
        for side, name in names.items()
    }


def measured() -> list[tuple[str, ...]]:
    """The rows of the table: Lockstep's figure, that of DDP under torchrun, and where they were
    measured.
    """
    scaling = read("scaling")
    launch = read("launch")
    speeds = {(row["model"], row["side"]): row["samples_per_second"] for row in scaling["rows"]}
    rows: list[tuple[str, ...]] = [
        (
            *(f"{speeds[model, side][workers]['median']:,.0f}" for side in ("lockstep", "ddp")),
            where(scaling),
        )
        for model in ("lenet", "resnet18")
        for workers in ("1", "2")
    ]
    start = next(
        row["seconds"] for row in launch["rows"] if (row["case"], row["ranks"]) == ("start", 2)
    )
    rows.append(
        (*(f"{start[side]['median']:.2f}" for side in ("lockstep run", "torchrun")), where(launch))
    )
    rows.append(
        (
            *(f"{recoveries()[name]:.2f}" for name in ("Lockstep", "torchrun")),
            where(read("elastic")),
        )
    )
    return rows


def table(language: Language) -> str:
    """The table."""
    rows = zip(language.rows, measured(), strict=True)
    return markdown_table(language.header, [(name, *figures) for name, figures in rows])


def draw() -> None:
    """Draw the picture."""
    from figures import draw_one_idea

    curves = read("one_idea")
    lockstep, ddp = (
        {n: run["losses"] for n, run in curves[side].items()} for side in ("lockstep", "ddp")
    )
    draw_one_idea(lockstep, ddp, recoveries(), PICTURE)


def main() -> None:
    """Draw the picture and write the tables."""
    draw()
    for language in (ENGLISH, CHINESE):
        write_between(Path(DOCS.parent, language.file), "measured", table(language))


if __name__ == "__main__":
    main()
