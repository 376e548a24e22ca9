"""``lockstep verify SCRIPT``: compares the first steps of a user's script at several numbers of
workers.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..activity import Activity

if TYPE_CHECKING:
    from ..verification.comparison import Comparison, Difference, RunRecord

__all__ = ["verify_script"]


def verify_script(parsed: argparse.Namespace, counts: Sequence[int], steps: int) -> int:
    """Run the script at each number of workers, twice at the first, print what differs, and return
    1 if anything does.

    Args:
        parsed: the arguments of the command line.
        counts: numbers of workers.
        steps: recorded steps of each optimizer.

    Raises:
        LockstepError: the script cannot be run, fails or takes no step.
    """
    from rich.console import Console

    with Activity("lockstep verify: loading PyTorch"):
        from ..launcher.script import Script
        from ..verification.comparison import compare, diverging_ranks
        from ..verification.runs import record_run
    words = [str(word) for word in parsed.arguments]
    if words[:1] == ["--"]:
        del words[0]
    script = Script(str(parsed.script), tuple(words), bool(parsed.module))
    console = Console(highlight=False, markup=False, emoji=False)
    runs: dict[str, list[RunRecord]] = {}
    for count in (counts[0], *counts):
        name = f"{_workers(count)} again" if _workers(count) in runs else _workers(count)
        with Activity(f"lockstep verify: {script.name} on {name}"):
            runs[name] = record_run(script, count, steps, max(counts))
    reference, again = (records[0] for records in list(runs.values())[:2])
    compared = {name: compare(reference, records[0]) for name, records in runs.items()}
    _print_table(console, runs, compared)
    for name, records in runs.items():
        diverged = diverging_ranks(records)
        if diverged is not None:
            rank, step, parameter = diverged
            console.print(
                f"On {name}, rank {rank} has another {parameter} than rank 0 before step {step}: "
                "the gradients are not summed over the workers, or each of them updates its model "
                "by its own rules.",
                style="bold",
            )
            return 1
    repeated = compare(reference, again).difference
    for name, records in runs.items():
        difference = compared[name].difference
        if difference is not None:
            _explain(console, name, reference, records[0], difference, repeated)
            return 1
    if all(each.same_bits for each in compared.values()):
        console.print("The same bits at every number of workers.", style="bold green")
    else:
        console.print("The same at every number of workers, up to rounding.", style="bold green")
    return 0


def _print_table(
    console: Any, runs: Mapping[str, Sequence[RunRecord]], compared: Mapping[str, Comparison]
) -> None:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("run")
    table.add_column("steps", justify="right")
    table.add_column("gradients, compared with the first run")
    for number, (name, records) in enumerate(runs.items()):
        comparison = compared[name]
        if number == 0:
            said = ""
        elif comparison.difference is not None:
            said = "differ"
        elif comparison.same_bits:
            said = "the same bits"
        else:
            said = f"differ by {comparison.largest:.1e} of their norm, which is rounding"
        table.add_row(name, str(len(records[0].steps)), said)
    console.print(table)


def _explain(
    console: Any,
    name: str,
    reference: RunRecord,
    record: RunRecord,
    difference: Difference,
    repeated: Difference | None,
) -> None:
    from ..verification.comparison import likely_cause

    several = len({step.optimizer for step in reference.steps}) > 1
    where = f"step {difference.step}" + (f" of optimizer {difference.optimizer}" if several else "")
    first = _workers(reference.workers)
    if difference.kind == "steps":
        text = f"{name} made {difference.values[1]} steps, {first} made {difference.values[0]}."
    elif difference.kind == "hyperparameter":
        text = (
            f"{difference.name} at {where}: {difference.values[0]} on {first}, "
            f"{difference.values[1]} on {name}."
        )
    else:
        far = (
            ""
            if not math.isfinite(difference.distance)
            else f", by {difference.distance:.2g} of its norm"
        )
        kind = "gradient of " if difference.kind == "gradient" else f"{difference.kind} "
        text = f"{name} and {first} differ first at {where}, in the {kind}{difference.name}{far}."
    console.print(text, style="bold")
    console.print(f"Likely cause: {likely_cause(reference, record, difference, repeated)}")


def _workers(count: int) -> str:
    return f"{count} worker{'s'[: count != 1]}"
