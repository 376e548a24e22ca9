"""One host of a job on several, started by hand, by Slurm, or by `lockstep run -H` on another host.

In the last case it is controlled by that launcher, the starter; see `starter`.
"""

from __future__ import annotations

import os
import signal
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial

import msgspec
from typing_extensions import override

from .. import environment
from ..errors import InterruptedRunError, LockstepError, WorkerError
from ..job.messages import Failure, HostDescription, JobEnd, Request
from .fixed_host import run_host_share
from .host_rendezvous import listen_for_hosts
from .links import FIRST, FixedHosts
from .network_interface import choose_interface
from .options import JobOptions
from .output.log_multiplexer import LogMultiplexer
from .remote_hosts.host_description import describe_host
from .remote_hosts.starter import Starter
from .worker_options import FAILURE_GRACE
from .worker_process.script import Script

__all__ = ["FixedPart", "HostPart", "failure_of", "run_as_node", "run_host"]


class HostPart(ABC):
    """This host's part of a job on several hosts.

    Args:
        script: the program.
        workers: of this host; what they need is prepared.
        problem: why this host cannot run them, or "".

    Attributes:
        description: of this host.
        starter: of this launcher; None if it was not started by `lockstep run -H`.
        listener: where the launchers of the other hosts connect, if this host is the first.
        is_ended: whether the starter has ended the job.
    """

    def __init__(self, script: Script, workers: int, problem: str) -> None:
        self.script = script
        self.description = describe_host(workers, problem)
        self.starter: Starter | None = None
        self.listener: socket.socket | None = None
        self.is_ended = False

    def listen(self, address: str, port: int) -> int:
        """Listen there for the launchers of the other hosts; 0 for a port that the system chooses.
        Returns the port.

        Raises:
            ConfigError: the port is in use, or the address is unknown.
        """
        self.listener = listen_for_hosts(address, port)
        return int(self.listener.getsockname()[1])

    @abstractmethod
    def run(self, config: JobOptions, log: LogMultiplexer, address: str, port: int) -> None:
        """Run this part to its end.

        Args:
            config: of the run.
            log: prints the workers' lines.
            address, port: where the launcher of the first host listens, or of any that takes part.
        """

    def take(self, request: Request) -> None:
        """The starter asks for something."""
        match request.what:
            case "signal":
                self.signal(request.count)
            case "end":
                self.end()

    def signal(self, number: int) -> None:
        """Take a signal that the job is to get."""
        os.kill(os.getpid(), number)

    def end(self) -> None:
        """End the job, once."""
        if not self.is_ended:
            self.is_ended = True
            self.signal(signal.SIGTERM)
            self.signal(signal.SIGINT)  # the second signal ends the grace period

    def lose_starter(self) -> None:
        """The starter or the connection to it is gone: the job ends with it."""
        self.end()

    def failure_of(self, error: LockstepError) -> Failure | None:
        """Return the failure of a worker that the starter is to be told with `error`."""
        return None

    @property
    def knows_outcome(self) -> bool:
        """Whether the job is over for all hosts, though not all need have told their starter so."""
        return False


def run_as_node(part: HostPart, config: JobOptions, starter: Starter | None) -> None:
    """Run this host's part of a job, as `lockstep run` was told, or as its starter tells it.

    Args:
        part: of this host.
        config: of the run.
        starter: of this launcher; None if it was not started by `lockstep run -H`.

    Raises:
        ConfigError: the hosts do not meet, or are incompatible.
        WorkerError: the rank that failed first, on any host.
        as `start.start`.
    """
    if starter is None:
        log = LogMultiplexer(
            (1, 2), colours=environment.wants_colours(), prefixes=not config.no_prefix
        )
        address = str(config.master_addr)
        if config.node_rank == FIRST:
            part.listen(address, config.master_port)
        part.run(config, log, address, config.master_port)
        return
    part.starter = starter
    connection = environment.variables().get("SSH_CONNECTION", "")
    description = msgspec.structs.replace(part.description, connection=connection)
    # only now is it known by which address the other hosts reach this one
    meeting_point = starter.meet(description, lambda address: part.listen(address, 0))
    if meeting_point is None:
        return
    starter.follow(part.take, part.lose_starter)
    try:
        part.run(
            replace(config, quiet=True), starter.log, meeting_point.address, meeting_point.port
        )
    except (LockstepError, KeyboardInterrupt) as error:
        failure = part.failure_of(error) if isinstance(error, LockstepError) else None
        starter.end(error, failure)
    finally:
        if part.knows_outcome:
            starter.send(JobEnd())


class FixedPart(HostPart):
    """This host's part of a job with a fixed number of workers, which ends with its starter."""

    @override
    def run(self, config: JobOptions, log: LogMultiplexer, address: str, port: int) -> None:
        hosts = FixedHosts(address, port, config.node_rank, config.nnodes)
        workers = self.description.workers
        run_workers = partial(run_host_share, self.script, config, workers, log, hosts)
        run_host(hosts, self.description, config, self.listener, run_workers, self._report)

    def _report(self, failure: Failure) -> None:
        if self.starter is not None:
            self.starter.send(failure)


def run_host(
    hosts: FixedHosts,
    description: HostDescription,
    config: JobOptions,
    listener: socket.socket | None,
    run_workers: Callable[[], None],
    report: Callable[[Failure], object] = lambda failure: None,
) -> None:
    """Run one host's part of a job on several, and agree with the others on the first failure.

    Args:
        hosts: of the job.
        description: of this host.
        config: of the run.
        listener: where the others connect, if this host is the first.
        run_workers: runs the workers of this host, as `run_host_share` and `run_program` do.
        report: called with the failure of this host's workers, before the others are waited for.

    Raises:
        ConfigError: the hosts do not meet, or are incompatible.
        WorkerError: the rank that failed first, on any host; its cause is the error of this host.
        as `run_host_share`.
    """
    of_this_host: Failure | None = None
    error: LockstepError | None = None
    with closing(hosts):
        hosts.meet(description, config, listener)
        choose_interface(config.network_interface, hosts.address if hosts.nodes > 1 else None)
        try:
            run_workers()
        except InterruptedRunError:
            raise
        except LockstepError as raised:
            _check_interruption(raised, hosts)
            of_this_host = failure_of(raised, hosts.clock_offset_ns)
            error = raised
        if of_this_host is not None:
            report(of_this_host)
        first = hosts.end(of_this_host, FAILURE_GRACE + 2)
    if first is not None:
        if of_this_host is None or of_this_host.rank != first.rank:  # one host shows the traceback
            first = msgspec.structs.replace(first, traceback="")
        raise first.as_error() from error
    if error is not None:
        raise error


def _check_interruption(error: LockstepError, hosts: FixedHosts) -> None:
    """Raise InterruptedRunError if workers failed, or cannot continue, because those of an
    interrupted host exited.
    """
    from ..watchdog import report

    interruption = hosts.interruption
    cause = error if isinstance(error, WorkerError) else error.__cause__
    if isinstance(cause, WorkerError):
        follows = cause.in_collective or (
            error.report_json and report.from_json(error.report_json).kind != "raised"
        )
    else:
        follows = bool(hosts.reason)  # that host, or the first one, is gone
    if interruption is not None and follows:
        name = signal.Signals(interruption.count).name
        text = f"stopped by {name} on {interruption.host}: its workers have exited"
        raise InterruptedRunError(text, interruption.count)


def failure_of(error: LockstepError, clock_offset_ns: int = 0) -> Failure | None:
    """Return the failure of a worker; an error that all of this host's workers share counts as the
    first worker's.
    """
    cause = error if isinstance(error, WorkerError) else error.__cause__
    if not isinstance(cause, WorkerError):
        return None
    return Failure.from_error(cause, socket.gethostname(), clock_offset_ns)
