"""``lockstep timeline``: the records of a run as a trace, and where the time of each rank has gone."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from .parser import Help

if TYPE_CHECKING:
    from ..timeline import RankTime

__all__ = ["add_to", "run_command"]

_DESCRIPTION = """\
Turn the records that a run has kept into a trace with a lane for each rank:
what it computed, every collective with its shapes and its line in your program,
and within that how long it waited for the others. Open the file at
https://ui.perfetto.dev or in Chrome at chrome://tracing; it stays on your
machine.
"""

_EXAMPLES = """
examples:
  lockstep run -np 4 --timeline records train.py     keeps the records
  lockstep timeline records                          writes records/trace.json
  lockstep timeline records -o trace.json.gz         a tenth of the size
  LOCKSTEP_TIMELINE=records torchrun --nproc-per-node 4 train.py
      under other launchers, for programs that call lockstep.init()

how to read it: a rank that computes while the others show `waiting` is the one
that they wait for. Click on a slice for its line in the program. With overlap
(DDP's backward pass) a collective lies above the computation that goes on.

exit codes: 0; 2 for a folder without records, or with damaged ones
"""


def add_to(commands: Any, name: str) -> None:
    """Add this command to the subparsers `commands`."""
    parser = commands.add_parser(
        name,
        help="turn the records of a run into a trace, a lane for each rank",
        usage="%(prog)s DIR [-o FILE]",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=Help,
        allow_abbrev=False,
    )
    parser.add_argument("folder", metavar="DIR", help="what `lockstep run --timeline` was given")
    parser.add_argument("-o", "--out", metavar="FILE", help="where to write (default: DIR/trace.json)")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(run=run_command, known=[flag for action in parser._actions for flag in action.option_strings])


def run_command(arguments: argparse.Namespace) -> int:
    """Do what the parsed `arguments` ask for."""
    from ..timeline import write_trace

    folder = Path(arguments.folder).expanduser()
    if not folder.is_dir():
        raise ConfigError(
            "DIR", "a folder with the records of a run", found=f"{arguments.folder} (there is no such folder)"
        )
    path = folder / "trace.json" if arguments.out is None else Path(arguments.out).expanduser()
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError("--out", "a file in a folder that is there", got=str(path))
    try:
        times = write_trace(folder, path)
    except OSError as error:
        raise ConfigError("--out", "a file that can be written", found=f"{path} ({error.strerror})") from None
    print("\n".join(_table(times)))
    print(f"\nWrote {path}: open it at https://ui.perfetto.dev or chrome://tracing")
    return 0


def _table(times: Sequence[RankTime]) -> list[str]:
    rows = [["rank", "host", "seconds", "collectives", "computing", "in collectives", "of that waiting", "came last"]]
    for each in times:
        share = [each.seconds - each.inside_s, each.inside_s, each.waiting_s]
        parts = [f"{part / each.seconds:.0%}" if each.seconds else "-" for part in share]
        rows.append(
            [str(each.rank), each.host[:16], f"{each.seconds:.1f}", str(each.collectives), *parts, str(each.last)]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
