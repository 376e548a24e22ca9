"""``lockstep ledger``: prints what each step of a run has computed."""

from __future__ import annotations

import argparse
import csv
import os
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, counted
from ..system.terminal_text import plain
from .parser import Help

if TYPE_CHECKING:
    from ..proof.ledger import Ledger

_DESCRIPTION = """\
Print the ledger of a run: of each step its loss, the norm of its gradient, the
learning rate, a digest of its samples' numbers, and what stands out. A Trainer
with a run directory keeps it: 64 bytes a step in ledger.bin, and a line for each
start of the program in ledger.jsonl.
"""

_EXAMPLES = """
examples:
  lockstep ledger runs/a                  the starts, the last steps, and spikes
  lockstep ledger runs/a --steps 40:50    steps 40 to 50; 40: and :50 work as well
  lockstep ledger runs/a --recomputed     steps that a resume computed again, with
                                          the result that each of them had before
  lockstep ledger runs/a --csv            all steps, with all digits

In Python, lockstep.ledger("runs/a").steps is a NumPy array with a row a step.
What to do about a spike: `lockstep blame runs/a` names the samples behind it.

exit codes: 0; 2 for a run without a ledger
"""

_LAST = 10  # steps that are shown without --steps


def add_to(commands: Any, name: str) -> None:
    """Add this command to the subparsers `commands`."""
    parser = commands.add_parser(
        name,
        help="show what each step of a run has computed",
        usage="%(prog)s RUN [options]",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=Help,
        allow_abbrev=False,
    )
    parser.add_argument("run_dir", metavar="RUN", help="a run directory")
    parser.add_argument("--steps", metavar="A:B", help="the steps from A to B")
    parser.add_argument(
        "--recomputed", action="store_true", help="only steps that were computed again"
    )
    parser.add_argument("--csv", action="store_true", help="write comma-separated values")
    parser.add_debug()
    parser.set_command(run_command)


def run_command(parsed: argparse.Namespace) -> int:
    """Run the command with the `parsed` arguments, and return the exit code."""
    from ..proof.ledger import ledger

    read = ledger(Path(parsed.run_dir))
    steps = read.steps["step"]
    last = int(steps[-1]) if len(steps) else 0
    chosen = (max(0, last - _LAST + 1), last)
    if parsed.steps is not None:
        chosen = _range(parsed.steps, last)
    elif parsed.csv or parsed.recomputed:
        chosen = (0, last)
    try:
        if parsed.csv:
            _write_csv(read, chosen, parsed.recomputed)
        elif parsed.recomputed:
            _print_recomputed(read, chosen)
        else:
            _print_head(read)
            _print_steps(read, chosen)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head`
        # Python flushes stdout again when it ends, and would report that error a second time.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _range(text: str, last: int) -> tuple[int, int]:
    match = re.fullmatch(r"(\d*)(:?)(\d*)", text.strip())
    if match is None or not (match[1] or match[3]):
        raise ConfigError(
            "--steps", "A:B, the numbers of the first and the last step, or one of them", text
        )
    first = int(match[1] or 0)
    if not match[2]:
        return first, first
    return first, int(match[3] or last)


def _print_head(read: Ledger) -> None:
    """Print what is known of the run, each of its starts, and what is damaged."""
    start = read.starts[-1]
    count = len(read.steps)
    starts = len(read.starts)
    words = [
        f"{plain(start.model) or 'a model'} of {start.parameters:,} parameters",
        plain(start.optimizer),
        f"global batch {start.settings.get('global_batch_size', '?')}",
        f"{start.virtual_workers} virtual workers"
        if start.virtual_workers
        else "no virtual workers",
    ]
    print(
        f"{read.folder}: {counted(count, 'step')}, {counted(starts, 'start')}; {', '.join(words)}"
    )
    for number, start_of_run in enumerate(read.starts):
        of_start = read.steps["step"][read.steps["start"] == number]
        steps = (
            f"steps {of_start[0]} to {of_start[-1]}"
            if len(of_start)
            else "its steps were computed again"
        )
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(start_of_run.time))
        on = f"{counted(start_of_run.workers, 'worker')}, {plain(start_of_run.device)}"
        resumed = (
            f", resumed from {plain(Path(start_of_run.resumed).name)}"
            if start_of_run.resumed
            else ""
        )
        print(
            f"  {when} on {plain(start_of_run.host)}, {on}: {steps}{resumed}: "
            f"{plain(' '.join(start_of_run.command))}"
        )
    if read.damaged:
        more = ", …" * (len(read.damaged) > 5)
        print(
            "left out, because they are damaged: records "
            f"{', '.join(map(str, read.damaged[:5]))}{more}"
        )
    if read.torn:
        print(f"{read.torn} bytes of a torn end, which the next start cuts off")
    if len(read.recomputed):
        again = len(read.recomputed)
        print(
            f"{again} step{'s were' if again > 1 else ' was'} computed again after a resume: "
            "--recomputed"
        )


def _print_steps(read: Ledger, chosen: tuple[int, int]) -> None:
    """Print a table of steps, and the spikes of the run."""
    from ..proof.ledger import SKIPPED

    spikes = dict(read.spikes())
    restored = dict(read.rollbacks)
    weights = {
        int(row["step"]): f"{int(row['parameters']) & 0xFFFFFFFF:08x}" for row in read.fingerprints
    }
    faults: dict[int, list[int]] = {}
    for step, rank in read.faults:
        faults.setdefault(step, []).append(rank)
    steps = read.steps["step"]
    rows = read.steps[(steps >= chosen[0]) & (steps <= chosen[1])]
    if len(rows):
        print("  step        loss   gradient   buffers         lr  samples     workers")
    for row in rows:
        step = int(row["step"])
        notes = [f"spike: {spikes[step]}"] if step in spikes else []
        if step in restored:
            notes.append(f"rolled back to step {restored[step]}")
        elif row["flags"] & SKIPPED:
            notes.append("left out")
        notes += [f"rank {rank} computed something else" for rank in faults.get(step, ())]
        if step + 1 in weights:
            notes.append(f"weights {weights[step + 1]}")
        numbers = (
            f"{row['loss']:10.4f} {row['gradient_norm']:10.4g} {row['buffers_norm']:9.4g} "
            f"{row['learning_rate']:10.4g}"
        )
        print(
            f"{step:6}  {numbers}  {int(row['samples']):010x}  {row['workers']:7}  "
            f"{'; '.join(notes)}".rstrip()
        )
    hidden = [step for step in spikes if not chosen[0] <= step <= chosen[1]]
    if hidden:
        print("spikes elsewhere:")
        for step in hidden[:5]:
            print(f"{step:6}  {spikes[step]}")
    if spikes:
        print(
            f"`lockstep blame {read.folder}` names the samples that caused step "
            f"{next(iter(spikes))}"
        )


def _print_recomputed(read: Ledger, chosen: tuple[int, int]) -> None:
    """Print both results of each step that was computed again, and whether they are the same."""
    from ..proof.ledger import first_difference, values_of

    if not len(read.recomputed):
        print(f"{read.folder}: no step was computed again: the run was not resumed")
        return
    print("  step        loss   gradient  before        gradient")
    differing = 0
    for row in read.recomputed:
        step = int(row["step"])
        if not chosen[0] <= step <= chosen[1]:
            continue
        now = read.record(step)
        difference = first_difference(step, values_of(row), values_of(now))
        differing += difference is not None
        said = "the same bits" if difference is None else str(difference).partition(": ")[2]
        numbers = (
            f"{now['loss']:10.4f} {now['gradient_norm']:10.4g}  {row['loss']:10.4f} "
            f"{row['gradient_norm']:10.4g}"
        )
        print(f"{step:6}  {numbers}  {said}")
    print(f"{len(read.recomputed)} steps were computed again, {differing} with another result")


def _write_csv(read: Ledger, chosen: tuple[int, int], recomputed: bool) -> None:
    """Write steps as CSV, with all digits."""
    rows = read.recomputed if recomputed else read.steps
    writer = csv.writer(sys.stdout, lineterminator="\n")
    names = list(rows.dtype.names or ())
    writer.writerow(names)
    for row in rows[(rows["step"] >= chosen[0]) & (rows["step"] <= chosen[1])]:
        writer.writerow(
            [
                f"{row[name].item():010x}" if name == "samples" else repr(row[name].item())
                for name in names
            ]
        )
