"""``lockstep resize``: changes the number of workers of a running elastic job, or its hosts."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from .parser import Help
from .top import select_jobs

if TYPE_CHECKING:
    from ..flight_recorder.jobs import JobDescription

_DESCRIPTION = """\
Change the number of workers of a job that was started with `lockstep run
--elastic MIN:MAX`, while it trains, or let one of its hosts leave. Workers join
or leave after a step; no step is lost or repeated, and the result does not
change. Run it on any host of the job. `lockstep join` adds a host.
"""

_EXAMPLES = """
examples:
  lockstep resize 4               4 workers, if only one elastic job is running
  lockstep resize 12345 4         4 workers in the job of that PID, see lockstep top
  lockstep resize --remove beta   the host beta leaves, with its workers
"""


def add_to(commands: Any, name: str) -> None:
    """Add this command to the subparsers `commands`."""
    parser = commands.add_parser(
        name,
        help="change the number of workers of a running elastic job",
        usage="%(prog)s [options] [PID or DIR] WORKERS\n       %(prog)s [options] [PID or DIR] "
        "--remove HOST",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=Help,
        allow_abbrev=False,
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="[PID or DIR] WORKERS",
        help="the job, if several are running, and the number of workers that it shall have",
    )
    parser.add_argument("--remove", metavar="HOST", help="let this host of the job leave instead")
    parser.add_debug()
    parser.set_command(run_command)


def run_command(parsed: argparse.Namespace) -> int:
    """Run the command with the `parsed` arguments, and return the exit code."""
    from ..elastic.control import request

    words = list(parsed.words)
    workers = words.pop() if words and parsed.remove is None else ""
    if len(words) > 1 or (parsed.remove is None and (not workers.isdecimal() or int(workers) < 1)):
        got = " ".join(parsed.words)
        expected = "the number of workers, 1 or more, after at most one job"
        hint = "--remove HOST takes no number of workers." if parsed.remove is not None else ""
        raise ConfigError("WORKERS", expected, got, hint, found="" if got else "none")
    job = elastic_job(words[0] if words else None)
    if parsed.remove is None:
        done = request(job.control, "resize", int(workers))
    else:
        done = request(job.control, "remove", host=parsed.remove)
    print(f"lockstep resize: {done}")
    return 0


def elastic_job(choice: str | None) -> JobDescription:
    """Return the elastic job that runs here, with the PID or the folder that was given, if any.

    Raises:
        ConfigError: there is none, or there are several.
    """
    from ..flight_recorder import jobs

    matching = select_jobs(jobs.find_jobs(), choice)
    elastic = [job for job in matching.values() if job.control]
    if len(elastic) != 1:
        running = ", ".join(f"{job.pid} ({job.program})" for job in elastic)
        if choice is None and running:
            raise ConfigError(
                "job", f"the PID of one of: {running}", found="none, and several run here"
            )
        if elastic or (choice is not None and running):
            raise ConfigError("job", f"the PID of one of: {running}", choice)
        hint = (
            "Start it with `lockstep run --elastic MIN:MAX`; `lockstep top` lists the jobs that "
            "run here."
        )
        got = f"{choice}, which is none" if choice is not None else "no elastic job on this host"
        raise ConfigError(
            "job", "a running job that was started with --elastic", found=got, hint=hint
        )
    return elastic[0]
