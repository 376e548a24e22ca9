"""The report on all ranks as text for the terminal that is there."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from .. import environment
from ..errors import LockstepError, WorkerError
from .run_folders import RUNS

if TYPE_CHECKING:
    from ..watch.report import Report

__all__ = ["failure_text", "text_for"]


def text_for(stream: TextIO, report: Report, written: str = "", lead: int = 0) -> str:
    """`report` in the width and the colours of the terminal behind `stream`; in 80 columns where there is none.

    See `watch.render.as_text` for `written` and `lead`.
    """
    from ..watch.render import as_text

    terminal = stream.isatty()
    width = min(max(60, shutil.get_terminal_size().columns), 120) if terminal else 80
    text = as_text(report, width, terminal and environment.wants_colours(), written, lead)
    if isinstance(encoding := stream.encoding, str):  # source lines may have letters that the terminal lacks
        text = text.encode(encoding, errors="backslashreplace").decode(encoding)
    return text


def failure_text(stream: TextIO, error: LockstepError, lead: int) -> str:
    """What is to be said, from column `lead` on, of an `error` that has a report: what came first, and the report."""
    from ..launchers.failure import JOINT_KINDS
    from ..watch.report import from_json

    try:
        report = from_json(error.report_json)
    except ValueError:  # it has come from a machine with another version
        return str(error)
    written = f"{error.report_path}; `{_command_for(error.report_path)}` shows it again." if error.report_path else ""
    if isinstance(error, WorkerError) and error.kind not in JOINT_KINDS:
        where = f" on {error.host}" if error.host else ""
        others = f"\n({error.others})" if error.others else ""
        text = text_for(stream, report, written)
        return f"rank {error.rank}{where}: {error.kind}: {error.reason}{others}\n\n{text}"
    return text_for(stream, report, written, lead)


def _command_for(report: str) -> str:
    """What shows the file `report` of a run that has just ended."""
    folder = Path(report).parent
    return "lockstep explain" + (f" {shlex.quote(str(folder))}" if folder.parent != RUNS else "")
