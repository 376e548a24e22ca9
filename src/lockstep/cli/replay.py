"""``lockstep replay``: computes a step of a run again, compares it with the ledger, and looks into
it.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import arguments
from ..activity import Activity
from ..errors import ConfigError, counted
from ..system.terminal_text import plain
from .parser import Help

if TYPE_CHECKING:
    from ..proof.replay import PlannedReplay, Replayed

_DESCRIPTION = """\
Compute a step of a run again: its program runs as it did, resumes from the newest
checkpoint before the step, and ends in it. Each step is compared with the ledger,
bit by bit. Then come the losses of its shards and samples, and the norms of the
gradients of its layers. Nothing is written into the run, and trackers are silent.

With virtual workers any number of workers gives the same bits. Without, replay on
as many as the run had (the default), or it is compared within rounding.
"""

_EXAMPLES = """
examples:
  lockstep replay runs/a --step 47
  lockstep replay runs/a --step 47 -np 2
  lockstep replay runs/a --step 47 --debug    open Python's debugger before the
                                              passes of the step, with model,
                                              batch and indices at hand

exit codes: 0 the same as in the ledger; 1 not the same; 2 bad input
"""

_MOST_ROWS = 8


def add_to(commands: Any, name: str) -> None:
    """Add this command to the subparsers `commands`."""
    parser = commands.add_parser(
        name,
        help="compute a step of a run again, and look into it",
        usage="%(prog)s RUN --step N [-np K] [--debug]",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=Help,
        allow_abbrev=False,
    )
    parser.add_argument("run_dir", metavar="RUN", help="a run directory with a ledger")
    parser.add_argument(
        "--step", metavar="N", required=True, help="the step, as `lockstep ledger RUN` numbers them"
    )
    parser.add_argument("-np", metavar="K", dest="workers", help="number of workers")
    parser.add_argument("--debug", action="store_true", help="open the debugger in the step")
    parser.set_command(run_command)


def whole_or_none(flag: str, text: str | None, least: int) -> int | None:
    """Return the value of an option that is a whole number; None if it is not given."""
    return None if text is None else arguments.parse_whole(flag, text, least=least)


def announce(planned: PlannedReplay) -> None:
    """Say on standard error what is replayed, before it takes time."""
    print(f"lockstep: replaying {planned.in_words()}", file=sys.stderr)


def run_command(parsed: argparse.Namespace) -> int:
    """Run the command with the `parsed` arguments, and return the exit code."""
    step = arguments.parse_whole("--step", parsed.step, least=0)
    workers = whole_or_none("-np", parsed.workers, least=1)
    with Activity("lockstep replay: loading PyTorch"):
        from ..proof.ledger import ledger
        from ..proof.replay import PlannedReplay

    planned = PlannedReplay(ledger(Path(parsed.run_dir)), step, workers)
    announce(planned)
    if parsed.debug:
        if planned.workers > 1:
            hint = "With virtual workers one worker computes the same bits: leave -np out."
            raise ConfigError(
                "-np", "1 with --debug, whose debugger needs the terminal", planned.workers, hint
            )
        replayed = planned.replayed(planned.run("lockstep.proof.probes:debug", interactive=True))
        return print_comparison(replayed)
    with Activity("lockstep replay: the program runs"):
        replayed = planned.replayed(planned.run("lockstep.proof.probes:look_into"))
    code = print_comparison(replayed)
    _print_step(replayed)
    return code


def print_comparison(replayed: Replayed) -> int:
    """Print whether the steps are those of the ledger, and return the exit code."""
    count = replayed.compared
    rounding = replayed.rounding
    steps = counted(count, "step")
    if replayed.difference is None:
        same = (
            "the same within rounding, as there are no virtual workers"
            if rounding
            else "the same bits"
        )
        print(f"{steps} compared with the ledger: {same}")
        return 0
    print(f"{steps} compared with the ledger; the first that differs: {replayed.difference}")
    if replayed.changed:
        print("changed since: " + "; ".join(map(plain, replayed.changed)))
    else:
        print(
            "changed since: nothing that is known; what is not known is the content of samples, "
            "other files of the program, and the hardware"
        )
    return 1


def _print_step(replayed: Replayed) -> None:
    """Print the losses of shards and samples, and the norms of gradients, side by side."""
    if replayed.why_no_shards:
        print(f"no losses of shards and samples: {plain(replayed.why_no_shards)}")
        return

    def order(loss: float) -> float:
        return -math.inf if math.isnan(loss) else -loss

    shards = [["shard", "loss", "gradient"]]
    shards += [
        [str(shard.number), f"{shard.loss:.4g}", f"{shard.gradient_norm:.4g}"]
        for shard in replayed.shards
    ]
    losses = [["sample", "largest losses"]]
    losses += [
        [str(index), f"{loss:.4g}"]
        for index, loss in sorted(replayed.losses, key=lambda pair: order(pair[1]))
    ]
    norms = [["gradient of", "norm"]]
    largest = sorted(replayed.gradient_norms.items(), key=lambda pair: order(pair[1]))
    norms += [[plain(name), f"{norm:.4g}"] for name, norm in largest]
    tables = [_aligned(table[: _MOST_ROWS + 1]) for table in (shards, losses, norms)]
    print()
    for number in range(max(map(len, tables))):
        cells = [table[number] if number < len(table) else " " * len(table[0]) for table in tables]
        print("    ".join(cells).rstrip())


def _aligned(table: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for row in table:
        first, *others = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        lines.append(
            "  ".join([row[0].ljust(widths[0]) if not row[0].isdigit() else first, *others])
        )
    return lines
