"""``lockstep resize``: changes the number of workers of a running elastic job."""

from __future__ import annotations

import argparse
from typing import Any

from ..errors import ConfigError
from .parser import Help
from .top import select_jobs

__all__ = ["add_to", "run_command"]

_DESCRIPTION = """\
Change the number of workers of a job that was started with `lockstep run
--elastic MIN:MAX`, while it trains. Workers join or leave after a step; no step
is lost or repeated, and the result does not change.
"""

_EXAMPLES = """
examples:
  lockstep resize 4               4 workers, if only one elastic job is running
  lockstep resize 12345 4         4 workers in the job of that PID, see lockstep top
"""


def add_to(commands: Any, name: str) -> None:
    """Add this command to the subparsers `commands`."""
    parser = commands.add_parser(
        name,
        help="change the number of workers of a running elastic job",
        usage="%(prog)s [options] [PID or DIR] WORKERS",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=Help,
        allow_abbrev=False,
    )
    parser.add_argument("job", nargs="?", metavar="PID or DIR", help="the job, if several are running")
    parser.add_argument("workers", metavar="WORKERS", help="the number of workers that it shall have")
    parser.add_argument("--debug", action="store_true", help="print the traceback of an error")
    parser.set_command(run_command)


def run_command(arguments: argparse.Namespace) -> int:
    """Run the command with the parsed `arguments`, and return the exit code."""
    from ..elastic.control import request_workers
    from ..watchdog import jobs

    if not arguments.workers.isdecimal() or int(arguments.workers) < 1:
        raise ConfigError("WORKERS", "a number of at least 1", arguments.workers)
    found = select_jobs(jobs.find_jobs(), arguments.job)
    elastic = {folder: job for folder, job in found.items() if job.control}
    if len(elastic) != 1:
        running = ", ".join(f"{job.pid} ({job.program})" for job in elastic.values())
        given = arguments.job or "no PID"
        expected = f"the PID of one of: {running}" if running else "a running job that was started with --elastic"
        raise ConfigError("job", expected, given)
    (job,) = elastic.values()
    print(f"lockstep resize: {request_workers(job.control, int(arguments.workers))}")
    return 0
