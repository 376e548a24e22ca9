"""``lockstep verify``: compares the bits of the same training at several numbers of workers."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .. import arguments
from ..activity import Activity
from ..errors import ConfigError
from ..option_table import Option, options_of
from ..parallel.shards import DEFAULT_VIRTUAL_WORKERS
from ..registry import import_path_here
from ..training.options import FILES, TrainOptions
from .parser import Help
from .resolved_options import resolve
from .verify_script import verify_script

if TYPE_CHECKING:
    from ..verification.trained_bits import Record

_DESCRIPTION = """\
Run the first steps of the same training at each number of workers, and report
the first step and tensor that differ, and the likely cause.

With a script: your own program, unmodified, with any optimizer of torch. The
hyperparameters, gradients and buffers of each step are compared, the bits or, of
scripts without virtual workers, up to rounding. It ends after these steps; a
Trainer's run directory is a temporary one, other files that it writes are written.

Without a script: a training with the options of `lockstep train`, of which all
parameters, buffers and optimizer states are compared bit by bit.
"""

_EXAMPLES = """
examples:
  lockstep verify train.py
  lockstep verify --workers 1,2,4 --steps 10 train.py --lr 0.1
  lockstep verify
  lockstep verify --model resnet18 --data cifar10 --workers 1,2,4 --steps 10
  lockstep verify --model mynet:Net --data mydata:load --optimizer adamw
  lockstep verify --compare-ddp      also run plain DDP, for comparison

exit codes:
  0  the same at every number of workers
  1  not the same
  2  bad input; of a script that fails, its own exit code
"""

_EXCLUDED = (
    "workers",
    "epochs",
    "run_dir",
    "keep_checkpoints",
    "checkpoint_every",
    "resume",
    "allow_different_hardware",
    "log",
    "quiet",
)
_DIGITS = 8  # of a fingerprint in the table


def add_to(commands: Any, name: str) -> None:
    """Add this command to the subparsers `commands`."""
    parser = commands.add_parser(
        name,
        help="check that a training is the same at any number of workers",
        usage="%(prog)s [options] [script [arguments]]",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=Help,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("script", nargs="?", default=None, help="a Python file; with -m, a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    parser.add_argument(
        "-m", "--module", action="store_true", default=False, help="the script is a module's name"
    )
    comparison = parser.add_argument_group("what to compare")
    comparison.add_argument(
        "--workers",
        dest="counts",
        metavar="K,K",
        default="1,2,3",
        help="numbers of workers (default: 1,2,3)",
    )
    comparison.add_argument(
        "--steps", metavar="N", help="number of steps (default: 20; of a script 5)"
    )
    comparison.add_argument(
        "--compare-ddp",
        action="store_true",
        default=False,
        help="run training without virtual workers as well",
    )
    parser.add_options(_options())
    text = "YAML, TOML or JSON file with options; flags win over it"
    parser.group(FILES).add_argument("--config", metavar="FILE", help=text)
    parser.group(FILES).add_argument(
        "--debug", action="store_true", help="print the traceback of an error"
    )
    parser.set_command(run_command)


def _options() -> list[Option]:
    """Return the options of `lockstep train` that this command has too."""
    return [option for option in options_of(TrainOptions) if option.name not in _EXCLUDED]


def run_command(parsed: argparse.Namespace) -> int:
    """Run the command with the `parsed` arguments, and return 1 if the bits differ."""
    counts = _counts(parsed.counts)
    steps = getattr(parsed, "steps", None)
    if parsed.script is not None:
        _refuse_training_options(parsed)
        return verify_script(
            parsed, counts, arguments.parse_whole("--steps", steps or "5", least=1)
        )
    if parsed.module:
        raise ConfigError("-m", "the name of a module after it", found="none")
    import_path_here()
    steps = arguments.parse_whole("--steps", steps or "20", least=1)
    options = resolve(parsed)
    options = replace(
        options,
        run_dir=None,
        quiet=True,
        workers="auto",
        virtual_workers=options.virtual_workers or DEFAULT_VIRTUAL_WORKERS,
    )
    if max(counts) > int(options.virtual_workers or 0):
        raise ConfigError(
            "--workers",
            f"at most as many as there are virtual workers ({options.virtual_workers})",
            max(counts),
        )
    same = _verify(f"{options.virtual_workers} virtual workers", options, counts, steps)
    if parsed.compare_ddp:
        _verify(
            "plain DDP, no virtual workers",
            replace(options, virtual_workers=None, threads=None),
            counts,
            steps,
        )
    return 0 if same else 1


def _refuse_training_options(parsed: argparse.Namespace) -> None:
    """Check that no option of `lockstep train` is given with a script, which would have no effect.

    Raises:
        ConfigError: naming the first one.
    """
    names = [option.name for option in _options()]
    for name in (*names, "config", "compare_ddp"):
        if getattr(parsed, name, False) is not False:
            flag = f"--{name.replace('_', '-')}"
            hint = f"Give it to the script, after {parsed.script}, if that has such an option."
            raise ConfigError(
                flag, "none with a script, which sets up its own training", found=flag, hint=hint
            )


def _verify(title: str, options: TrainOptions, counts: Sequence[int], steps: int) -> bool:
    """Run the trainings, print the comparison, and return whether all were the same."""
    from rich.console import Console

    with Activity("lockstep verify: loading PyTorch"):
        from ..verification.trained_bits import first_divergence, likely_cause

    console = Console(highlight=False, markup=False, emoji=False)
    records = []
    for count in counts:
        with Activity(f"lockstep verify: {title}: {count} worker{'s'[: count != 1]}"):
            records.append(_run(options, count, steps))
    divergences = [first_divergence(records[0], other) for other in records[1:]]
    repeated = None
    if any(divergences):
        with Activity(f"lockstep verify: {title}: {counts[0]} again"):
            repeated = first_divergence(records[0], _run(options, counts[0], steps))
    _print_table(console, title, records)
    diverged = [
        (other, divergence_of_run)
        for other, divergence_of_run in zip(records[1:], divergences, strict=True)
        if divergence_of_run is not None
    ]
    for other, divergence in diverged:
        where = "in the loss only"
        if divergence.tensors:
            where = (
                f"first in {divergence.tensors[0]} ({len(divergence.tensors)} of {divergence.of} "
                "tensors)"
            )
        console.print(
            f"{other.workers} workers diverge from {records[0].workers} at step "
            f"{divergence.step}, {where}."
        )
    if not diverged:
        console.print("The same bits at every number of workers.", style="bold green")
        return True
    other, divergence = diverged[0]
    cause = likely_cause(
        records[0], other, divergence, options.virtual_workers is not None, repeated
    )
    console.print(f"Likely cause: {cause}", style="bold")
    return False


def _run(options: TrainOptions, workers: int, steps: int) -> Record:
    from ..launcher import launch
    from ..verification.trained_bits import record

    # without virtual workers the default depends on the host and the number of workers
    result: Record = launch(record, options, steps, workers=workers, threads=options.threads or 1)
    return result


def _print_table(console: Any, title: str, records: Sequence[Record]) -> None:
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("step", justify="right")
    for record in records:
        table.add_column(f"{record.workers} worker{'s'[: record.workers != 1]}")
    for number, row in enumerate(zip(*(record.steps for record in records), strict=True)):
        cells = [step.fingerprint[:_DIGITS] for step in row]
        marked = [cell if cell == cells[0] else f"{cell} ≠" for cell in cells]
        table.add_row(str(number), *marked)
    console.print(table)


def _counts(text: str) -> list[int]:
    counts = [arguments.parse_whole("--workers", part.strip(), least=1) for part in text.split(",")]
    if len(counts) < 2 or len(set(counts)) != len(counts):
        raise ConfigError(
            "--workers", "two or more different numbers of workers, such as 1,2,3", text
        )
    return counts
