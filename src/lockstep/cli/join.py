"""``lockstep join``: adds this machine to a running elastic job."""

from __future__ import annotations

import argparse
from typing import Any

from .. import arguments
from ..errors import ConfigError
from .parser import Help

_DESCRIPTION = """\
Add this machine to a job that was started with `lockstep run --elastic MIN:MAX`
and -H, --nnodes or --master-addr, while it trains. Its workers join after a
step; no step is lost or repeated, and the result does not change. The program
and its options are those of the job; the program's folder has the same path
here. When the network to the other hosts was cut, this machine joins again.
"""

_EXAMPLES = """
examples:
  lockstep join --show                    on a machine of the job: print the command for another one
  LOCKSTEP_JOB_KEY=5d41... lockstep join 10.0.0.1:40211 -np 4
                                          on the other one: up to 4 workers here
"""


def add_to(commands: Any, name: str) -> None:
    """Add this command to the subparsers `commands`."""
    parser = commands.add_parser(
        name,
        help="add this machine to a running elastic job",
        usage="%(prog)s [options] HOST:PORT",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=Help,
        allow_abbrev=False,
    )
    parser.add_argument(
        "address", nargs="?", metavar="HOST:PORT", help="of any launcher of the job"
    )
    parser.add_argument(
        "-np",
        "--nproc",
        dest="workers",
        metavar="N",
        help="the most workers to run here (default: one per GPU, or 1 without GPUs)",
    )
    parser.add_argument(
        "--show",
        nargs="?",
        const="",
        metavar="PID or DIR",
        help="print the command with which another machine joins the job that runs here",
    )
    parser.add_debug()
    parser.set_command(run_command)


def run_command(parsed: argparse.Namespace) -> int:
    """Run the command with the `parsed` arguments, and return the exit code."""
    if parsed.show is not None:
        from ..elastic.control import request
        from .resize import elastic_job

        print(request(elastic_job(parsed.show or None).control, "address"))
        return 0
    host, _, port = (parsed.address or "").rpartition(":")
    expected = "the address that `lockstep join --show` prints on a machine of the job"
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError("HOST:PORT", expected, parsed.address or "nothing")
    host = arguments.parse_host("HOST:PORT", host.strip("[]"), expected)
    workers = parsed.workers
    if workers is not None:
        workers = arguments.parse_whole("-np", workers, least=1, most=120)
    from ..launcher.elastic_jobs import elastic_node

    elastic_node.join_running_job(host, int(port), workers)
    return 0
