"""``lockstep verify SCRIPT``: compares the first steps of a user's script at several numbers of
workers.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..activity import Activity

if TYPE_CHECKING:
    from ..verification.analysis import Analysis
    from ..verification.held import Held
    from ..verification.records import RunRecord


def verify_script(parsed: argparse.Namespace, counts: Sequence[int], steps: int) -> int:
    """Run the script at each number of workers, print what differs and why, and return 1 if
    anything does.

    Args:
        parsed: the arguments of the command line.
        counts: numbers of workers.
        steps: recorded steps of each optimizer.

    Raises:
        LockstepError: the script cannot be run, fails or takes no step.
    """
    from rich.console import Console

    with Activity("lockstep verify: loading PyTorch"):
        from ..launcher.worker_process.script import Script
        from ..verification.analysis import analyse
        from ..verification.runs import record_run
    words = [str(word) for word in parsed.arguments]
    if words[:1] == ["--"]:
        del words[0]
    script = Script(str(parsed.script), tuple(words), bool(parsed.module))

    def run(count: int, held: Held, name: str) -> list[RunRecord]:
        with Activity(f"lockstep verify: {script.name} on {name}"):
            return record_run(script, count, steps, max(counts), held)

    analysis = analyse(run, counts)
    console = Console(highlight=False, markup=False, emoji=False)
    _print_table(console, analysis)
    if analysis.verdict is None:
        compared = [row.comparison for row in analysis.rows if row.comparison is not None]
        if all(comparison.same_bits for comparison in compared):
            console.print("The same bits at every number of workers.", style="bold green")
        else:
            console.print(
                "The same at every number of workers, up to rounding.", style="bold green"
            )
    else:
        console.print(f"Cause: {analysis.verdict.cause}. {analysis.verdict.evidence}", style="bold")
        console.print(f"What to do: {analysis.verdict.remedy}")
    for note in analysis.notes:
        console.print(f"Note: {note}")
    return 0 if analysis.verdict is None else 1


def _print_table(console: Any, analysis: Analysis) -> None:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("run")
    table.add_column("steps", justify="right")
    table.add_column("gradients, compared with the first run")
    for row in analysis.rows:
        if row.comparison is None:
            said = ""
        elif row.comparison.difference is not None:
            said = f"differ from step {max(row.comparison.difference.step, 0)}"
        elif row.comparison.same_bits:
            said = "the same bits"
        else:
            said = f"differ by {row.comparison.largest:.1e} of their norm, which is rounding"
        table.add_row(row.name, str(row.steps), said)
    console.print(table)
