"""Examines the machines that a job would run on, and says what to fix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..hosts import Host
from .remote import Ssh
from .report import Fact, Problem, Section, as_json

__all__ = ["Fact", "Host", "Problem", "Section", "Ssh", "as_json", "examine"]


def examine(hosts: Sequence[Host] = (), ssh: Ssh | None = None, limit: float = 60.0) -> Iterator[Section]:
    """Look at everything, and yield each section as soon as it is known.

    Args:
        hosts: other machines, to be reached by ssh.
        ssh: how; ssh's own configuration alone when None.
        limit: seconds after which a trial of a backend is given up.
    """
    from . import backends, devices, job, machine, network, remote, versions

    yield machine.examine_machine()
    yield devices.examine_devices()
    yield versions.examine_versions()
    yield network.examine_network()
    yield job.examine_job()
    yield backends.examine_backends(limit)
    if hosts:
        yield remote.examine_hosts(hosts, ssh or Ssh())
