"""The options of Horovod's launcher: those that mean something here, and those that are accepted for old commands."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

__all__ = ["IGNORED", "OPTIONS", "Ignored"]

Option = tuple[tuple[str, ...], dict[str, Any]]


def _option(*flags: str, **settings: Any) -> Option:
    return flags, settings


OPTIONS: dict[str, list[Option]] = {
    "workers": [
        _option("-np", "--num-proc", dest="workers", metavar="N", help="how many ranks (default: as `lockstep run`)"),
        _option("--output-filename", dest="output_dir", metavar="DIR", help="also write what rank N says into "
                "DIR/rank.N/stdout and DIR/rank.N/stderr"),
        _option("--start-timeout", metavar="S", help="seconds to wait for the machines (default: "
                "HOROVOD_START_TIMEOUT, or 60)"),
        _option("--verbose", action="store_true", help="say which `lockstep run` this is"),
        _option("--debug", action="store_true", help="show the traceback of the launcher's own errors"),
    ],
    "several machines": [
        _option("-H", "--hosts", dest="hosts", metavar="A:4,B:4", help="machines, and how many ranks each takes"),
        _option("-hostfile", "--hostfile", metavar="FILE", help="the same in a file, a line `A slots=4` for each"),
        _option("-p", "--ssh-port", metavar="PORT", help="port of ssh on all of them"),
        _option("-i", "--ssh-identity-file", dest="identity", metavar="FILE", help="key file for ssh"),
        _option("--network-interfaces", "--network-interface", dest="network_interfaces", metavar="A,B",
                action="append", help="what Gloo and NCCL use (default: the one towards the first machine)"),
    ],
    "elastic jobs (the number of ranks is that of the start)": [
        _option("--min-np", "--min-num-proc", dest="min_np", metavar="N", help="wait for so many slots (default: -np)"),
        _option("--max-np", "--max-num-proc", dest="max_np", metavar="N", help="start at most so many ranks"),
        _option("--host-discovery-script", metavar="FILE", help="a program that prints a line `host:slots` for each "
                "machine; asked until there are enough, and not again once the ranks have been started"),
        _option("--slots-per-host", metavar="N", help="of a machine that is printed without (default: 1)"),
        _option("--elastic-timeout", metavar="S", help="seconds to wait for enough slots (default: "
                "HOROVOD_ELASTIC_TIMEOUT, or 600)"),
    ],
    "timeline and stalls": [
        _option("--timeline-filename", metavar="FILE", help="write a trace of all operations there, for "
                "ui.perfetto.dev or chrome://tracing"),
        _option("--timeline-mark-cycles", action="store_true", help="mark in it where each round of the ranks begins"),
        _option("--no-timeline-mark-cycles", dest="timeline_mark_cycles", action="store_false",
                help=argparse.SUPPRESS),
        _option("--no-stall-check", action="store_true", help="ranks may wait for others as long as it takes"),
        _option("--stall-check", dest="no_stall_check", action="store_false", help=argparse.SUPPRESS),
        _option("--stall-check-warning-time-seconds", dest="stall_warning", metavar="S", help="of waiting after "
                "which there is a warning (default: 5)"),
        _option("--stall-check-shutdown-time-seconds", dest="stall_timeout", metavar="S", help="of waiting after "
                "which that is an error; 0 for never (default: 600)"),
    ],
    "about": [
        _option("-cb", "--check-build", action="store_true", help="show what can be used here"),
        _option("-v", "--version", dest="show_version", action="store_true", help="show the version"),
    ],
}  # fmt: skip

IGNORED: dict[int, str] = {
    0: """
        --disable-cache --hierarchical-allreduce --no-hierarchical-allreduce --hierarchical-allgather
        --no-hierarchical-allgather --autotune --no-autotune
        --mpi-threads-disable --no-mpi-threads-disable --tcp --log-with-timestamp --log-without-timestamp
        --log-hide-timestamp --no-log-hide-timestamp -prefix-timestamp --prefix-output-with-timestamp
        --gloo --mpi --jsrun
    """,
    1: """
        --fusion-threshold-mb --cycle-time-ms --cache-capacity --autotune-log-file --autotune-warmup-samples
        --autotune-steps-per-sample --autotune-bayes-opt-max-samples --autotune-gaussian-process-noise --reset-limit
        --mpi-args --binding-args --num-nccl-streams --thread-affinity --gloo-timeout-seconds --log-level
    """,
    2: "--blacklist-cooldown-range",
}
"""Number of values → the options without meaning here."""


class Ignored(argparse.Action):
    """Notes that an option has been given."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Called by argparse."""
        before: tuple[str, ...] = getattr(namespace, self.dest, ())
        if option_string and option_string not in before:
            setattr(namespace, self.dest, (*before, option_string))
