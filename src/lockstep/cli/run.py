"""``lockstep run``: runs a program as the ranks of one job, on this host or on several."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .. import other_options
from ..errors import LockstepError
from ..hosts import Host
from ..launcher.options import JobOptions
from ..option_table import options_of
from .parser import Help
from .resolved_options import REPORTS, new_folder

_DESCRIPTION = """\
Run a program as the ranks of one job, each in its own process with RANK,
WORLD_SIZE, LOCAL_RANK etc. in its environment, as under torchrun.
lockstep.init() and torch.distributed.init_process_group() read them.
"""

_EXAMPLES = """
examples:
  lockstep run -np 4 train.py --lr 0.1
  lockstep run -np 2 -m mypackage.train
      on two hosts, reached by ssh:
  lockstep run -H serverA:4,serverB:4 train.py
  lockstep run -np 6 --hostfile hosts.txt train.py
      by hand, one command on each host:
  lockstep run --nnodes 2 --node-rank 0 --master-addr serverA -np 4 train.py
  lockstep run --nnodes 2 --node-rank 1 --master-addr serverA -np 4 train.py
      under Slurm, with one launcher per node, or without a launcher:
  srun --ntasks-per-node=1 lockstep run -np 4 train.py
  srun --ntasks-per-node=4 python train.py
      replace workers that are lost, and change their number by `lockstep resize 6`:
  lockstep run --elastic 2:8 -np 4 train.py
      the same on two hosts; `lockstep join` on another one adds it:
  lockstep run --elastic 2:8 -H serverA:4,serverB:4 -np 6 train.py
      debug rank 1 at breakpoint() while the others wait:
  lockstep run -np 2 --debug-rank 1 train.py
      profile communication (open trace.json at ui.perfetto.dev):
  lockstep run -np 4 --timeline records train.py
  lockstep timeline records -o trace.json

exit codes: that of the rank that failed first; 0 for success, 2 for invalid
options, 130 and 143 after Ctrl-C and SIGTERM
"""

# Options that programs hardly have themselves: after the script they might be meant for this
# command.
_BEFORE_THE_SCRIPT = (
    "-np",
    "--nproc",
    "--num-proc",
    "--nproc-per-node",
    "--nproc_per_node",
    "--elastic",
    "--hostfile",
)


def add_to(commands: Any, name: str) -> None:
    """Add this command to the subparsers `commands`."""
    parser = commands.add_parser(
        name,
        help="run a program as the ranks of one job",
        usage="%(prog)s [options] script [arguments]",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=Help,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("script", help="a Python file; with -m, a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the program")
    parser.add_options(options_of(JobOptions))
    parser.set_command(run_command, other_options.RUN_FLAGS, full_tracebacks=True)


def run_command(
    parsed: argparse.Namespace, listed: Callable[[], Sequence[Host]] | None = None
) -> int:
    """Run the command with the `parsed` arguments, and return the exit code.

    Args:
        parsed: the arguments of the command line.
        listed: as for `start.start`.
    """
    from ..launcher import start

    arguments = vars(parsed)
    program = [str(parsed.script), *map(str, parsed.arguments)]
    late = [word for word in program[1:] if word.partition("=")[0] in _BEFORE_THE_SCRIPT]
    if program[1:2] == ["--"]:
        del program[1]
    elif late and "quiet" not in arguments:
        text = (
            f"{', '.join(late)} after {program[0]} goes to the program; options of lockstep run "
            "come before it"
        )
        print(f"lockstep run: {text}", file=sys.stderr)
    config = JobOptions.parse({**arguments, "program": tuple(program)})
    try:
        start.start(config, listed)
    except LockstepError as error:
        if error.report_json:
            error.report_path = _write_report(error.report_json, config)
        raise
    return 0


def _write_report(report_json: str, config: JobOptions) -> str:
    """Write the watchdog's report into --output-dir or a new folder in ``reports/``, and return its
    path.
    """
    from ..watchdog.report import from_json
    from ..watchdog.report_text import write

    if config.output_dir is None:
        folder = new_folder(REPORTS, Path(config.program[0]).stem)
    else:
        folder = Path(config.output_dir)
    return write(folder, from_json(report_json))
