"""``lockstep explain``: prints the watchdog's report of a failed run again."""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from .. import environment
from ..errors import ConfigError, LockstepError, WorkerError
from .parser import Help
from .resolved_options import REPORTS, RUNS

if TYPE_CHECKING:
    from ..watchdog.report import Report


def text_for(stream: TextIO, report: Report, written: str = "", lead: int = 0) -> str:
    """Format `report` for `stream`: in the width and colours of its terminal, or else in 80
    columns.

    Args:
        stream: where the text goes, whose encoding it keeps to.
        report: of a failed job.
        written: path of the file to which the report was written; "" to leave that out.
        lead: columns of the first line that are taken already.
    """
    from ..watchdog.report_text import as_text

    terminal = stream.isatty()
    width = min(max(60, shutil.get_terminal_size().columns), 120) if terminal else 80
    text = as_text(report, width, terminal and environment.wants_colours(), written, lead)
    # source lines may have characters that the terminal lacks
    if isinstance(encoding := stream.encoding, str):
        text = text.encode(encoding, errors="backslashreplace").decode(encoding)
    return text


def failure_text(stream: TextIO, error: LockstepError, lead: int) -> str:
    """Return the message for an `error` with a report, from column `lead` on: the first failure,
    and the report.
    """
    from ..job.messages import WATCHDOG_ERROR_KINDS
    from ..watchdog.report import from_json

    try:
        report = from_json(error.report_json)
    except ValueError:  # written by a host with another version of Lockstep
        return str(error)
    written = (
        f"{error.report_path}; `{_command_for(error.report_path)}` shows it again."
        if error.report_path
        else ""
    )
    if isinstance(error, WorkerError) and error.kind not in WATCHDOG_ERROR_KINDS:
        where = f" on {error.host}" if error.host else ""
        others = f"\n({error.others})" if error.others else ""
        text = text_for(stream, report, written)
        return f"rank {error.rank}{where}: {error.kind}: {error.reason}{others}\n\n{text}"
    return text_for(stream, report, written, lead)


def _command_for(report: str) -> str:
    """Return the command that prints the file `report` of the run that has just ended."""
    folder = Path(report).parent
    return "lockstep explain" + (
        f" {shlex.quote(str(folder))}" if folder.parent not in (REPORTS, RUNS) else ""
    )


_DESCRIPTION = """\
Print the watchdog's report of a failed run: the error, where each rank was, the
last collectives, the likely cause and what to do. `lockstep run` prints it when
the run fails and writes it to a file.
"""

_EXAMPLES = """
examples:
  lockstep explain                        the newest report in reports/ or runs/
  lockstep explain reports/20260102       the report in that folder
  lockstep explain report.json            a file, from any host
  lockstep explain | less -R

The first line names the error. Ranks that wait in the same collective share a
row of the table; look at the row that differs. If the last collectives are
listed, all ranks called the same ones up to the last: look for a condition
above the source lines given there that is not the same on every rank.

exit codes: 0; 2 for a file that is missing, damaged or not a report
"""

_REPORT = "report.json"


def add_to(commands: Any, name: str) -> None:
    """Add this command to the subparsers `commands`."""
    parser = commands.add_parser(
        name,
        help="print the report of a failed run again",
        usage="%(prog)s [FILE]",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=Help,
        allow_abbrev=False,
    )
    parser.add_argument(
        "file",
        nargs="?",
        metavar="FILE",
        help="a report.json, or the directory of a run that has one",
    )
    parser.add_debug()
    parser.set_command(run_command)


def run_command(parsed: argparse.Namespace) -> int:
    """Run the command with the `parsed` arguments, and return the exit code."""
    from ..watchdog import report

    print(text_for(sys.stdout, report.read(_find(parsed.file))))
    return 0


def _find(name: str | None) -> Path:
    if name is None:
        return _newest()
    path = Path(name).expanduser()
    if path.is_dir() and not (path / _REPORT).exists():
        raise ConfigError(
            "FILE", f"a report, or a folder with {_REPORT}", found=f"{name} (it has none)"
        )
    if not path.exists():
        raise ConfigError("FILE", "an existing report", name)
    return path / _REPORT if path.is_dir() else path


def _newest() -> Path:
    reports = [path for parent in (REPORTS, RUNS) for path in parent.glob(f"*/{_REPORT}")]
    if not reports:
        hint = "Name one: lockstep explain FILE."
        raise ConfigError("FILE", f"a report in {REPORTS}/ or {RUNS}/", found="none", hint=hint)
    return max(reports, key=lambda path: path.stat().st_mtime)
