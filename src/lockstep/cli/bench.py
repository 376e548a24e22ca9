"""``lockstep bench``: measures the network between workers, for `lockstep plan`."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import arguments
from ..errors import ConfigError
from ..hosts import parse_hosts
from .parser import Help, can_draw

if TYPE_CHECKING:
    from ..planning.measurement import NetworkMeasurement

_DESCRIPTION = """\
Measure latency and bandwidth between the ranks of a job: messages between pairs
and every collective, by message size, over every transport that is there, idle
and while the ranks compute. Shows a table, and writes network.json for
`lockstep plan` and a picture next to it.

Experimental: may change in any release.
"""

_EXAMPLES = """
examples:
  lockstep bench
  lockstep bench -np 4 -o network.json
  lockstep bench -H nodeA:4,nodeB:4 -o network.json
  lockstep plan --workers 1..16 --network network.json train.py

exit codes:
  0  measured
  1  too noisy to be a result, or the ranks failed
  2  bad input
"""

_MAX_WORKERS = 120


def add_to(commands: Any, name: str) -> None:
    """Add this command to the subparsers `commands`."""
    parser = commands.add_parser(
        name,
        help="measure the network between workers",
        usage="%(prog)s [options]",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=Help,
        allow_abbrev=False,
    )
    parser.add_argument(
        "-np", "--nproc", metavar="N", help="number of ranks (default: 2, or one per slot of -H)"
    )
    parser.add_argument(
        "-H", "--hosts", metavar="A:4,B:4", help="hosts, reached by ssh as `lockstep run -H` does"
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", default="network.json", help="(default: network.json)"
    )
    parser.add_argument(
        "--seconds",
        metavar="S",
        default="30",
        help="of sending messages; starting the ranks comes on top, a few seconds for each of one "
        "or two jobs (default: 30)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the measurement as JSON instead of the table"
    )
    parser.add_debug()
    parser.set_command(run_command)


def run_command(parsed: argparse.Namespace) -> int:
    """Run the command with the `parsed` arguments; return 1 if the measurement is too noisy."""
    hosts = [] if parsed.hosts is None else parse_hosts(parsed.hosts, "-H")
    workers = sum(host.slots for host in hosts) or 2
    if parsed.nproc is not None:
        workers = arguments.parse_whole("-np", parsed.nproc, least=1, most=_MAX_WORKERS)
    if workers < 2:
        raise ConfigError("-np", "at least 2 ranks: a network is between them", workers)
    seconds = arguments.parse_whole("--seconds", parsed.seconds, least=1, most=3600)
    path = arguments.output_file("-o", Path(parsed.output).expanduser())

    with_picture = can_draw("lockstep bench")
    from ..planning import network_bench

    start = ["-np", str(workers)] + (["-H", parsed.hosts] if hosts else [])
    with _Progress() as progress:
        began = time.monotonic()
        measured = network_bench.bench(start, workers, not hosts, seconds, progress.show)
        took = time.monotonic() - began
    written = network_bench.write(measured, path, with_picture)
    if parsed.json:
        print(path.read_text(), end="")
    else:
        _print(measured)
        print(
            f"took {took:.0f} s: {seconds} s for messages, the rest to start the ranks and to "
            "copy in memory"
        )
        print(f"\nWritten: {', '.join(map(str, written))}")
    if not measured.is_result:
        print(f"lockstep bench: {network_bench.verdict(measured)}", file=sys.stderr)
    return int(not measured.is_result)


def _print(measured: NetworkMeasurement) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from ..planning import network_bench

    console = Console(highlight=False, markup=False, emoji=False)
    heading, *rows = network_bench.table(measured)
    shown = Table(*heading, box=box.SIMPLE)
    for column in shown.columns[2:]:
        column.justify = "right"
    for row in rows:
        shown.add_row(*row)
    title = (
        f"{measured.workers} ranks on {len(measured.hosts)} host{'s'[: len(measured.hosts) != 1]}, "
        f"{measured.cores} cores"
    )
    console.print(f"{title}: {measured.description}")
    console.print(shown)
    console.print(
        f"copy in memory: {measured.copy_bandwidth / 1e9:.2f} GB/s by each rank, noise "
        f"{measured.copy_noise:.0%}"
    )
    for name, transport in measured.transports.items():
        if transport.compute_slowdown:
            console.print(
                f"computing beside an all-reduce over {name}: "
                f"{transport.compute_slowdown:.2f} x as long"
            )
    if measured.is_result:
        console.print(network_bench.verdict(measured))


class _Progress:
    """Shows on standard error what is being measured: one line on a terminal, else a line for each
    transport.
    """

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._on_terminal = sys.stderr.isatty()
        self._last = ""

    def __enter__(self) -> _Progress:
        self.show("starting the ranks")
        return self

    def __exit__(self, *_: object) -> None:
        if self._on_terminal:
            sys.stderr.write("\r\x1b[K")

    def show(self, text: str) -> None:
        """Show `text`."""
        line = f"lockstep bench: {text} ({time.monotonic() - self._began:.0f} s)"
        if self._on_terminal:
            sys.stderr.write(f"\r\x1b[K{line}")
        elif text.partition(":")[0] != self._last:
            sys.stderr.write(f"{line}\n")
            self._last = text.partition(":")[0]
        sys.stderr.flush()
