"""``lockstep explain``: shows the report of a run whose ranks had parted once more."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .parser import Help
from .run_folders import RUNS

__all__ = ["add_to", "run_command"]

_DESCRIPTION = """\
Show the report of a run that failed because its ranks waited for each other in
vain: what is wrong, where each rank was, the last collectives, the likely cause
and what to do. `lockstep run` shows it when it happens and writes it down.
"""

_EXAMPLES = """
examples:
  lockstep explain                        the newest report below runs/
  lockstep explain runs/20260102-train    that of a run
  lockstep explain report.json            a file, from any machine
  lockstep explain | less -R

how to read it: the first line says what is wrong. Ranks that wait in the same
collective share a row of the table; the row that differs is the one to look at.
Where the last collectives are listed, the ranks went the same way until the
last one: look for a condition above the lines named there that is not the same
on every rank.

exit codes: 0; 2 for a file that is missing, damaged or no report
"""

_REPORT = "report.json"


def add_to(commands: Any, name: str) -> None:
    """Add this command to the subparsers `commands`."""
    parser = commands.add_parser(
        name,
        help="show again why the ranks of a run waited in vain",
        usage="%(prog)s [FILE]",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=Help,
        allow_abbrev=False,
    )
    parser.add_argument("file", nargs="?", metavar="FILE", help="a report.json, or the folder of a run that has one")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(run=run_command, known=[flag for action in parser._actions for flag in action.option_strings])


def run_command(arguments: argparse.Namespace) -> int:
    """Do what the parsed `arguments` ask for."""
    from ..watch import report
    from .report_text import text_for

    print(text_for(sys.stdout, report.read(_find(arguments.file))))
    return 0


def _find(name: str | None) -> Path:
    if name is None:
        return _newest()
    path = Path(name).expanduser()
    if path.is_dir() and not (path / _REPORT).exists():
        raise ConfigError("FILE", f"a report, or a folder with {_REPORT}", found=f"{name} (it has none)")
    if not path.exists():
        raise ConfigError("FILE", "a report that is there", name)
    return path / _REPORT if path.is_dir() else path


def _newest() -> Path:
    found = list(RUNS.glob(f"*/{_REPORT}"))
    if not found:
        hint = "Name one: lockstep explain FILE."
        raise ConfigError("FILE", f"a report below {RUNS}/", found="none there", hint=hint)
    return max(found, key=lambda path: path.stat().st_mtime)
