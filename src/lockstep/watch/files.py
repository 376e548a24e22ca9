"""A report in the folder of a run: as JSON for `lockstep explain`, and as text for everybody."""

from __future__ import annotations

from pathlib import Path

from .. import atomic
from .render import as_text
from .report import Report

__all__ = ["write"]


def write(folder: Path, report: Report) -> str:
    """Write ``report.json`` and ``report.txt`` and return the path of the first; "" where that is not possible.

    Whatever keeps them from being written, a full disk say, must not keep the report from being shown.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        atomic.write_text(folder / "report.json", report.to_json() + "\n")
        atomic.write_text(folder / "report.txt", as_text(report) + "\n")
    except OSError:
        return ""
    return str(folder / "report.json")
