"""``lockstep verify``: the same training at several numbers of workers, side by side."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ..registry import import_path_here
from ..shard_count import DEFAULT_SHARDS
from ..training.options import GROUPS, TrainOptions
from .gather import resolve
from .parser import Help
from .train import add_option

if TYPE_CHECKING:
    from ..verify import Record

__all__ = ["add_to", "run_command"]

_DESCRIPTION = """\
Run the first steps of the same training at each number of workers, and compare
every parameter, buffer and optimizer state bit by bit after every step. Where
they part, say at which step, in which tensor, and the likely cause.
"""

_EXAMPLES = """
examples:
  lockstep verify
  lockstep verify --model resnet18 --data cifar10 --workers 1,2,4 --steps 10
  lockstep verify --model mynet:Net --data mydata:load --optimizer adamw
  lockstep verify --compare-ddp      what plain data parallelism gives, beside it

exit codes:
  0  the same bits at every number of workers
  1  not the same
  2  bad input
"""

_NOT_HERE = ("workers", "epochs", "out", "keep", "checkpoint_every", "resume", "allow_different", "log", "quiet")
_SHOWN = 8  # digits of a fingerprint


def add_to(commands: Any, name: str) -> None:
    """Add this command to the subparsers `commands`."""
    parser = commands.add_parser(
        name,
        help="see whether a training gives the same bits at any number of workers",
        usage="%(prog)s [options]",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=Help,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    own = parser.add_argument_group("what to compare")
    own.add_argument("--workers", dest="counts", metavar="K,K", default="1,2,3", help="numbers of workers (1,2,3)")
    own.add_argument("--steps", metavar="N", default="20", help="how many steps (default: 20)")
    own.add_argument("--compare-ddp", action="store_true", default=False, help="show training without shards as well")
    groups = {title: parser.add_argument_group(title) for title in GROUPS}
    for option in fields(TrainOptions):
        if option.name not in _NOT_HERE:
            add_option(groups[option.metadata["group"]], option)
    groups[GROUPS[4]].add_argument("--config", metavar="FILE", help="YAML or TOML file with options; flags win over it")
    groups[GROUPS[4]].add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(run=run_command, known=[flag for action in parser._actions for flag in action.option_strings])


def run_command(arguments: argparse.Namespace) -> int:
    """Do what the parsed `arguments` ask for; returns 1 where the bits are not the same."""
    import_path_here()
    counts, steps = _counts(arguments.counts), _whole("--steps", arguments.steps)
    options = resolve(arguments)
    options = replace(options, out=None, quiet=True, workers="auto", shards=options.shards or DEFAULT_SHARDS)
    if max(counts) > int(options.shards or 0):
        raise ConfigError("--workers", f"at most as many as there are shards ({options.shards})", max(counts))
    same = _verify(f"{options.shards} shards", options, counts, steps)
    if arguments.compare_ddp:
        _verify("plain DDP, no shards", replace(options, shards=None, threads=None), counts, steps)
    return 0 if same else 1


def _verify(title: str, options: TrainOptions, counts: Sequence[int], steps: int) -> bool:
    """Run, show and explain; whether all runs were the same."""
    from rich.console import Console

    from ..verify import first_parting, likely_cause

    console = Console(highlight=False, markup=False, emoji=False)
    records = []
    with console.status("") as status:
        for count in counts:
            status.update(f"{title}: {count} worker{'s'[: count == 0 or count != 1]} ...")
            records.append(_run(options, count, steps))
        partings = [first_parting(records[0], other) for other in records[1:]]
        again = None
        if any(partings):
            status.update(f"{title}: {counts[0]} again ...")
            again = first_parting(records[0], _run(options, counts[0], steps))
    _show(console, title, records)
    for other, parting in zip(records[1:], partings, strict=True):
        if parting is None:
            continue
        where = f"first in {parting.tensors[0]}" if parting.tensors else "in the loss alone"
        many = f" ({len(parting.tensors)} of {parting.of} tensors)" if parting.tensors else ""
        console.print(f"{other.workers} workers part from {records[0].workers} at step {parting.step}, {where}{many}.")
    first = next((number for number, parting in enumerate(partings) if parting is not None), None)
    if first is None:
        console.print("The same bits at every number of workers.", style="bold green")
        return True
    parting = partings[first]
    assert parting is not None
    cause = likely_cause(records[0], records[1 + first], parting, options.shards is not None, again)
    console.print(f"Likely cause: {cause}", style="bold")
    return False


def _run(options: TrainOptions, workers: int, steps: int) -> Record:
    from ..launchers import launch
    from ..verify import record

    # the machine's threads must not decide: without shards the run has no number of its own
    found: Record = launch(record, options, steps, workers=workers, threads=options.threads or 1)
    return found


def _show(console: Any, title: str, records: Sequence[Record]) -> None:
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("step", justify="right")
    for each in records:
        table.add_column(f"{each.workers} worker{'s'[: each.workers != 1]}")
    for number, row in enumerate(zip(*(each.steps for each in records), strict=True)):
        cells = [step.fingerprint[:_SHOWN] for step in row]
        marked = [cell if cell == cells[0] else f"{cell} ≠" for cell in cells]
        table.add_row(str(number), *marked)
    console.print(table)


def _counts(text: str) -> list[int]:
    counts = [_whole("--workers", part.strip()) for part in text.split(",")]
    if len(counts) < 2 or len(set(counts)) != len(counts):
        raise ConfigError("--workers", "two or more different numbers of workers, such as 1,2,3", text)
    return counts


def _whole(flag: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(flag, "a whole number of at least 1", text)
    return int(text)
