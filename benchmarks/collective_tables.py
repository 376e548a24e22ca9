"""The tables of `collectives.py`, for the screen and for the documentation."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from common import Spread, machine_line, markdown_table
from ranks import SHM, TITLES

MPICH = "mpich"
COPY = "copy"
NOTHING = "nothing"
SIDES = {**TITLES, MPICH: "MPICH"}

RATIOS = {
    "gloo_over_shm": "Gloo / shm",
    "mpich_over_shm": "MPICH / shm",
    "python_over_shm": "shm, Python only / shm",
    "shm_over_copy": "shm / copy_",
}

Row = dict[str, Any]


def size_text(nbytes: int) -> str:
    """E.g. "64 KiB"."""
    for unit, factor in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes / factor:g} {unit}"
    return f"{nbytes} B"


def time_text(seconds: float) -> str:
    """Three digits, e.g. "8.12 µs" or "64.1 ms"."""
    value, unit = (seconds * 1e3, "ms") if seconds >= 1e-3 else (seconds * 1e6, "µs")
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f} {unit}"


def _one_table(rows: list[Row]) -> str:
    """Times and ratios of one operation, a row for each size."""
    sides = [side for side in SIDES if side in rows[0]["seconds"]]
    ratios = [name for name in RATIOS if rows[0][name] is not None]
    cells = [
        [
            size_text(row["bytes"]),
            *(time_text(row["seconds"][side]["median"]) for side in [*sides, COPY]),
            *(Spread(**row[name]).text(2) for name in ratios),
        ]
        for row in rows
    ]
    return markdown_table(
        ["", *(SIDES[side] for side in sides), "copy_", *(RATIOS[name] for name in ratios)], cells
    )


def _groups(rows: list[Row]) -> list[tuple[str, list[Row]]]:
    """The rows of each number of ranks and operation, with a title."""
    keys = dict.fromkeys((row["ranks"], row["operation"]) for row in rows)
    return [
        (
            f"{key[0]} ranks, {key[1]}",
            [row for row in rows if (row["ranks"], row["operation"]) == key],
        )
        for key in keys
    ]


def tables(rows: list[Row]) -> str:
    """Everything, for the screen."""
    parts = [f"{title}\n{_one_table(own)}" for title, own in _groups(rows)]
    return "\n\n".join([*parts, _nothing(rows)])


def _nothing(rows: list[Row]) -> str:
    """What the wrapper takes."""
    costs = [row["seconds"][NOTHING]["median"] for row in rows if NOTHING in row["seconds"]]
    if not costs:
        return ""
    return (
        f"`torch.distributed.all_reduce` takes {time_text(min(costs))} with a backend that does "
        "nothing."
    )


def _overview(rows: list[Row]) -> str:
    """One table for a number of ranks: sizes down, operations across, without all-reduce, which has
    its own.
    """
    operations = [
        name for name in dict.fromkeys(row["operation"] for row in rows) if name != "all-reduce"
    ]
    found = {(row["operation"], row["bytes"]): row for row in rows}
    lines = []
    for nbytes in dict.fromkeys(row["bytes"] for row in rows):
        own = [found[operation, nbytes] for operation in operations]
        lines.append([size_text(nbytes), *(_brief(row) for row in own)])
    return markdown_table(["", *operations], lines)


def _brief(row: Row) -> str:
    time = time_text(row["seconds"][SHM]["median"])
    return f"{time}; {row['gloo_over_shm']['median']:.1f}; {row['mpich_over_shm']['median']:.1f}"


def documented(rows: list[Row], machine: dict[str, Any], picture: PurePath) -> str:
    """What goes into the documentation: all-reduce in full, the others in brief."""
    parts = []
    for ranks in dict.fromkeys(row["ranks"] for row in rows):
        own = [row for row in rows if row["ranks"] == ranks]
        parts += [f"### {ranks} ranks", "All-reduce:"]
        parts += [_one_table([row for row in own if row["operation"] == "all-reduce"])]
        parts += ["The other operations: time over shm; Gloo / shm; MPICH / shm.", _overview(own)]
    versions = f"MPICH {machine['mpich']}, mpi4py {machine['mpi4py']}"
    shown = f"![Time of a call over the size, for each operation and side]({picture.as_posix()})"
    return "\n\n".join([*parts, _nothing(rows), shown, machine_line(machine, versions)])
