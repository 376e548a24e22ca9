"""Checks the hosts that a job would run on, and lists what to fix."""

from __future__ import annotations

from collections.abc import Iterator

from ..launcher.options import JobOptions
from .findings import Fact, Problem, Section, as_json

__all__ = ["Fact", "Problem", "Section", "as_json", "examine"]


def examine(job: JobOptions, limit: float = 60.0) -> Iterator[Section]:
    """Run all checks and yield each section as soon as it is complete.

    Args:
        job: its hosts, if it has any, are reached by ssh, as `lockstep run` would reach them.
        limit: seconds after which the test of a backend is aborted.
    """
    from . import backends, cluster, remote, this_host

    yield this_host.examine_host()
    yield this_host.examine_devices()
    yield this_host.examine_versions()
    yield this_host.examine_network()
    yield this_host.examine_job()
    yield cluster.examine_cluster()
    yield backends.examine_backends(limit)
    if job.hosts:
        yield remote.examine_hosts(job)
