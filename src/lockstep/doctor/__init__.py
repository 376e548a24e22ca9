"""Checks the hosts that a job would run on, and lists what to fix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..hosts import Host
from .findings import Fact, Problem, Section, as_json
from .remote import Ssh

__all__ = ["Fact", "Host", "Problem", "Section", "Ssh", "as_json", "examine"]


def examine(hosts: Sequence[Host] = (), ssh: Ssh | None = None, limit: float = 60.0) -> Iterator[Section]:
    """Run all checks and yield each section as soon as it is complete.

    Args:
        hosts: other hosts, reached by ssh.
        ssh: its options; ssh's configuration alone if None.
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
    if hosts:
        yield remote.examine_hosts(hosts, ssh or Ssh())
