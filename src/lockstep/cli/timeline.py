"""``lockstep timeline``: converts the records of a run to a trace, and prints where each rank spent
its time.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import arguments
from ..errors import ConfigError
from .parser import Help

if TYPE_CHECKING:
    from ..timeline import RankTime

_DESCRIPTION = """\
Convert the records of a run to a trace with one track per rank: computation,
every collective with its shapes and call site, and the part of it spent waiting
for other ranks. Open the file at https://ui.perfetto.dev or in Chrome at
chrome://tracing; it is not uploaded.
"""

_EXAMPLES = """
examples:
  lockstep run -np 4 --timeline records train.py     writes the records
  lockstep timeline records                          writes records/trace.json
  lockstep timeline records -o trace.json.gz         a tenth of the size
  LOCKSTEP_TIMELINE=records torchrun --nproc-per-node 4 train.py
      under other launchers, for programs that call lockstep.init()

A rank that computes while the others show `waiting` is the straggler. Click on
a slice for its source line. If communication overlaps with computation (DDP's
backward pass), a collective is drawn above the computation.

exit codes: 0; 2 for a folder without records or with damaged ones
"""


def add_to(commands: Any, name: str) -> None:
    """Add this command to the subparsers `commands`."""
    parser = commands.add_parser(
        name,
        help="convert the records of a run to a trace",
        usage="%(prog)s DIR [-o FILE]",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=Help,
        allow_abbrev=False,
    )
    parser.add_argument(
        "folder", metavar="DIR", help="the folder given to `lockstep run --timeline`"
    )
    parser.add_argument("-o", "--out", metavar="FILE", help="output file (default: DIR/trace.json)")
    parser.add_debug()
    parser.set_command(run_command)


def run_command(parsed: argparse.Namespace) -> int:
    """Run the command with the `parsed` arguments, and return the exit code."""
    from ..timeline import write_trace

    folder = Path(parsed.folder).expanduser()
    if not folder.is_dir():
        raise ConfigError(
            "DIR",
            "a folder with the records of a run",
            found=f"{parsed.folder} (there is no such folder)",
        )
    path = folder / "trace.json" if parsed.out is None else Path(parsed.out).expanduser()
    arguments.output_file("--out", path)
    try:
        times = write_trace(folder, path)
    except OSError as error:
        raise ConfigError(
            "--out", "a file that can be written", found=f"{path} ({error.strerror})"
        ) from None
    print("\n".join(_table(times)))
    print(f"\nWrote {path}: open it at https://ui.perfetto.dev or chrome://tracing")
    return 0


def _table(times: Sequence[RankTime]) -> list[str]:
    rows = [
        [
            "rank",
            "host",
            "seconds",
            "collectives",
            "computing",
            "in collectives",
            "of that waiting",
            "entered last",
        ]
    ]
    for rank in times:
        parts = [rank.seconds - rank.inside_s, rank.inside_s, rank.waiting_s]
        percentages = [f"{part / rank.seconds:.0%}" if rank.seconds else "-" for part in parts]
        start = [str(rank.rank), rank.host[:16], f"{rank.seconds:.1f}", str(rank.collectives)]
        rows.append([*start, *percentages, str(rank.last)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
