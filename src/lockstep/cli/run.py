"""``lockstep run``: a program as the ranks of one job, on this machine or on several."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..errors import ConfigError, LockstepError
from ..launchers.choices import Choices
from .parser import Help
from .run_folders import choose_folder

__all__ = ["add_to", "run_command"]

_DESCRIPTION = """\
Run a program as the ranks of one job. Each rank is a process that finds its
place in RANK, WORLD_SIZE, LOCAL_RANK and the like, as under torchrun:
lockstep.init() or torch.distributed.init_process_group() reads them.
"""

_EXAMPLES = """
examples:
  lockstep run -np 4 train.py --lr 0.1
  lockstep run -np 2 -m mypackage.train
      on two machines, reached by ssh as your own ssh configuration says:
  lockstep run -H serverA:4,serverB:4 train.py
  lockstep run -np 6 --hostfile hosts.txt train.py
      by hand, a command on each machine:
  lockstep run --nnodes 2 --node-rank 0 --master-addr serverA -np 4 train.py
  lockstep run --nnodes 2 --node-rank 1 --master-addr serverA -np 4 train.py
      under Slurm, one launcher for each machine, or no launcher at all:
  srun --ntasks-per-node=1 lockstep run -np 4 train.py
  srun --ntasks-per-node=4 python train.py
      stop at breakpoint() in rank 1 while the others wait:
  lockstep run -np 2 --debug-rank 1 train.py
      where does the time go? (open trace.json at ui.perfetto.dev)
  lockstep run -np 4 --timeline records train.py
  lockstep timeline records -o trace.json

exit codes: that of the rank that failed first; 0 when all ended well, 2 for
bad input, 130 and 143 after Ctrl-C and SIGTERM
"""


def add_to(commands: Any, name: str) -> None:
    """Add this command to the subparsers `commands`."""
    parser = commands.add_parser(
        name,
        help="run a program of yours as the ranks of one job",
        usage="%(prog)s [options] script [arguments]",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=Help,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("script", help="a Python file; with -m, a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the program finds in sys.argv")
    parser.add_argument("-m", "--module", action="store_true", help="`script` names a module, as in python -m")
    for title, options in _OPTIONS.items():
        group = parser.add_argument_group(title)
        for flags, settings in options:
            group.add_argument(*flags, **settings)
    actions = [action for action in parser._actions if action.option_strings]
    known = [flag for action in actions for flag in action.option_strings]
    # as errors call them
    sources = {action.dest: action.option_strings[0] for action in actions}
    parser.set_defaults(run=run_command, known=known, whole_tracebacks=True, sources=sources)


_NOT_CHOSEN = ("run", "known", "whole_tracebacks", "sources")


def _option(*flags: str, **settings: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    return flags, settings


_OPTIONS = {
    "workers": [
        _option("-np", "-n", "--num-proc", dest="workers", metavar="N", help="how many ranks (default: one for each "
                "GPU, one without GPUs; with -H, one for each slot; with --nnodes, on each machine)"),
        _option("--threads", metavar="N", help="threads of PyTorch in each rank (default: OMP_NUM_THREADS, "
                "or cores / ranks)"),
        _option("--restarts", metavar="N", help="start all ranks afresh when one fails, up to N times (default: 0)"),
        _option("--start-method", metavar="M", help="forkserver: ranks are forked from a process that has PyTorch "
                "loaded, which is quick (default); spawn: they begin from nothing"),
        _option("--preload", metavar="MODULES", help="modules that this process loads too, e.g. torchvision,numpy"),
        _option("--as-horovod", action="store_true", help="a program of Horovod's as it is: `import horovod.torch` is "
                "Lockstep's door, and HOROVOD_RANK and the like are set"),
        _option("--grace", metavar="S", help="seconds that ranks may take to save after Ctrl-C, where they ask for "
                "it, as Lockstep's Trainer does (default: 120); others are ended after 1 s"),
    ],
    "several machines": [
        _option("-H", "--hosts", dest="hosts", metavar="A:4,B:4", help="machines, and how many ranks each takes"),
        _option("--hostfile", "-hostfile", metavar="FILE", help="the same in a file, a line `A slots=4` for each"),
        _option("--ssh-port", "-p", metavar="PORT", help="port of ssh on all of them"),
        _option("--identity", "-i", metavar="FILE", help="key file for ssh"),
        _option("--remote-python", metavar="PATH", help="Python on the other machines (default: the path of this one)"),
        _option("--dry-run", action="store_true", help="show the commands for the machines, and run nothing"),
        _option("-x", "--env", dest="env", metavar="NAME", action="append", help="hand on this environment variable, "
                "or NAME=VALUE (which `ps` shows to all users of this machine, as the variable's name alone does not); "
                "PYTHONPATH and those of Lockstep, PyTorch, NCCL and Gloo are in any case"),
        _option("--nnodes", metavar="N", help="by hand: how many machines"),
        _option("--node-rank", metavar="I", help="by hand: the number of this one, from 0"),
        _option("--master-addr", metavar="ADDR", help="name or address of the first machine, as the others reach it"),
        _option("--master-port", metavar="PORT", help="by hand: a free port there (default: 29500)"),
        _option("--network-interface", metavar="NAME", help="what Gloo and NCCL use (default: the one towards the "
                "first machine)"),
        _option("--start-timeout", metavar="S", help="seconds to wait for the other machines (default: 60)"),
    ],
    "the watch over ranks that wait for each other": [
        _option("--stall-timeout", metavar="S", help="seconds that ranks may wait in a collective for one that does "
                "not come, until that is an error that names it (default: 600); after 5 s there is a warning"),
        _option("--strict", action="store_true", help="refuse collectives that are alike and called at different "
                "lines of the program, where a warning is the rule"),
        _option("--no-watch", action="store_true", help="do not compare what ranks call, nor look for the missing"),
        _option("--timeline", metavar="DIR", help="keep records of all collectives there, for `lockstep timeline DIR`"),
    ],
    "output": [
        _option("--output-dir", metavar="DIR", help="a file for each rank instead: DIR/rank-0.log, ..."),
        _option("--tee", action="store_true", help="with --output-dir: show the output too, and keep the two streams "
                "of each rank apart, in DIR/rank.0/stdout and stderr"),
        _option("--no-prefix", action="store_true", help="do not mark lines with [rank]"),
        _option("--quiet", "-q", action="store_true", help="say nothing but what goes wrong"),
        _option("--debug-rank", metavar="R", help="give that rank the terminal, for breakpoint(); collectives of all "
                "ranks wait as long as it takes"),
        _option("--debug", action="store_true", help="show the traceback of the launcher's own errors"),
        _option("--as-host", help=argparse.SUPPRESS, action="store_true"),  # started by the launcher of another machine
    ],
}  # fmt: skip


def run_command(arguments: argparse.Namespace) -> int:
    """Do what the parsed `arguments` ask for."""
    from ..launchers import start

    given = {name: value for name, value in vars(arguments).items() if name not in _NOT_CHOSEN}
    program = [str(arguments.script), *map(str, arguments.arguments)]
    if program[1:2] == ["--"]:
        del program[1]
    choices = Choices.of({**given, "program": tuple(program)})
    if choices.output_dir is not None and Path(choices.output_dir).is_file():
        raise ConfigError("output_dir", "a folder, made where it is missing", choices.output_dir)
    try:
        start.start(choices)
    except LockstepError as error:
        if error.report_json and not choices.as_host:
            error.report_path = _keep(error.report_json, choices)
        raise
    return 0


def _keep(report_json: str, choices: Choices) -> str:
    """Write the report on all ranks into the folder of the run; returns where it is."""
    from ..watch import files, report

    given = choices.output_dir
    folder = choose_folder(None, None, Path(choices.program[0]).stem) if given is None else Path(given)
    return files.write(folder, report.from_json(report_json))
