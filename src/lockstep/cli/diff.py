"""``lockstep diff``: where two runs part, and why."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..activity import Activity
from ..system.terminal_text import plain
from .parser import Help
from .replay import announce

_DESCRIPTION = """\
Compare two runs by their ledgers: what they were started with, and the first step
that differs. If the ledgers do not say why (other samples, another learning rate),
that step is replayed in both, and the first module whose output differs is named.
"""

_EXAMPLES = """
examples:
  lockstep diff runs/a runs/b
  lockstep diff runs/a runs/b --no-replay     only what the ledgers say

exit codes: 0 all steps that both have are the same, bit for bit; 1 they differ; 2 bad
input
"""


def add_to(commands: Any, name: str) -> None:
    """Add this command to the subparsers `commands`."""
    parser = commands.add_parser(
        name,
        help="find the first step in which two runs differ, and why",
        usage="%(prog)s RUN_A RUN_B [--no-replay]",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=Help,
        allow_abbrev=False,
    )
    parser.add_argument("one", metavar="RUN_A", help="a run directory with a ledger")
    parser.add_argument("other", metavar="RUN_B", help="another")
    parser.add_argument("--no-replay", action="store_true", help="compare the ledgers alone")
    parser.add_debug()
    parser.set_command(run_command)


def run_command(parsed: argparse.Namespace) -> int:
    """Run the command with the `parsed` arguments, and return the exit code."""
    with Activity("lockstep diff: loading PyTorch"):
        from ..proof.diff import PlannedDiff
        from ..proof.ledger import ledger

    planned = PlannedDiff(ledger(Path(parsed.one)), ledger(Path(parsed.other)))
    compared = planned.compared
    settings = "; ".join(map(plain, compared.settings))
    print(f"settings that differ: {settings or 'none that are known'}", flush=True)
    if compared.difference is None:
        if not compared.same:
            print("they have no step in common")
            return 1
        print(f"{compared.same:,} steps are the same, bit for bit")
        return 0
    print(f"{compared.same:,} steps are the same; the first that differs: {compared.difference}")
    others = [difference.name.replace("_", " ") for difference in compared.also]
    if others:
        print(f"others of its values that differ: {', '.join(others)}")
    if compared.cause:
        print(f"cause: {compared.cause}")
    elif planned.replays and not parsed.no_replay:
        for replay in planned.replays:
            announce(replay)
        with Activity("lockstep diff: the programs run"):
            compared = planned.run()
        where = plain(compared.module) or "nowhere: replayed here, both compute the same"
        print(f"first difference in that step: {where}")
    return 1
