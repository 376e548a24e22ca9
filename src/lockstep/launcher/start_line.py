"""The line that a job prints when its workers are about to be started."""

from __future__ import annotations

from collections.abc import Sequence

from .. import environment
from ..errors import counted
from ..hosts import Host
from .options import JobOptions
from .output.log_multiplexer import LogMultiplexer

__all__ = ["write_start_line", "write_start_line_of_hosts"]


def write_start_line(
    multiplexer: LogMultiplexer, config: JobOptions, workers: int, threads: int
) -> None:
    """Say that so many workers of this host are started, each with so many threads."""
    each = " each" if workers > 1 else ""
    cores = environment.usable_cores()
    text = f"{counted(workers, 'worker')}, {counted(threads, 'thread')}{each} ({cores} cores)"
    if config.output_dir is not None:
        text += f", output in {config.output_dir}/"
        text += "rank.*/std*" if config.tee else "rank-*.log"
    _write(multiplexer, config, text)


def write_start_line_of_hosts(
    multiplexer: LogMultiplexer, config: JobOptions, hosts: Sequence[Host]
) -> None:
    """Say that as many workers are started on each of `hosts` as it has slots."""
    workers = counted(sum(host.slots for host in hosts), "worker")
    if len(hosts) == 1:
        text = f"{workers} on {hosts[0].name}"
    else:
        places = ", ".join(f"{host.name} {host.slots}" for host in hosts)
        text = f"{workers}: {places}"
    _write(multiplexer, config, text)


def _write(multiplexer: LogMultiplexer, config: JobOptions, text: str) -> None:
    if not config.quiet:
        multiplexer.write_message(f"lockstep run: {text}")
