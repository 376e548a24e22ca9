"""One host of a job on several, started by hand, by Slurm, or by `lockstep run -H` on another host.

In the last case it is controlled by that launcher, the starter; see `starter`.
"""

from __future__ import annotations

import os
import signal
import socket
from contextlib import closing, suppress
from dataclasses import replace

import msgspec

from .. import environment
from ..errors import InterruptedRunError, LockstepError, WorkerError
from ..job.messages import AgentFailure, HostDescription, HostFailure, Request
from ..system.heartbeat import address_towards
from .host_description import describe_host
from .links import FIRST, FixedHosts, interface_with_address, listen_for_hosts
from .local import run_host_share
from .log_multiplexer import LogMultiplexer
from .options import JobOptions
from .script import Script
from .starter import Starter
from .worker_options import FAILURE_GRACE

__all__ = ["failure_of", "run_as_node"]


def run_as_node(
    script: Script, config: JobOptions, workers: int, problem: str, starter: Starter | None
) -> None:
    """Meet the other hosts, and run the workers of this one.

    Args:
        script: the program.
        config: of the run.
        workers: of this host; what they need is prepared.
        problem: why this host cannot run them, or "".
        starter: of this launcher; None if it was not started by `lockstep run -H`.

    Raises:
        ConfigError: the hosts do not meet, or are incompatible.
        WorkerError: the rank that failed first, on any host.
        as `start.start`.
    """
    if starter is not None:
        _run_for_starter(script, config, workers, problem, starter)
        return
    multiplexer = LogMultiplexer(
        (1, 2), colours=environment.wants_colours(), prefixes=not config.no_prefix
    )
    address = str(config.master_addr)
    port = config.master_port
    listener = listen_for_hosts(address, port) if config.node_rank == FIRST else None
    hosts = FixedHosts(address, port, config.node_rank, config.nnodes)
    _run(script, config, describe_host(workers, problem), multiplexer, hosts, listener)


def _run_for_starter(
    script: Script, config: JobOptions, workers: int, problem: str, starter: Starter
) -> None:
    """Execute the commands of the starter, and report to it."""
    description = describe_host(workers, problem)
    listeners: list[socket.socket] = []

    def listen(
        address: str,
    ) -> int:  # only now is it known by which address the other hosts reach this one
        listeners.append(listen_for_hosts(address, 0))
        return int(listeners[0].getsockname()[1])

    connection = environment.variables().get("SSH_CONNECTION", "")
    begin = starter.meet(msgspec.structs.replace(description, connection=connection), listen)
    if begin is None:
        return
    starter.follow(_take_request, _end_this_host)
    hosts = FixedHosts(begin.address, begin.port, config.node_rank, config.nnodes)
    listener = listeners[0] if listeners else None
    try:
        _run(
            script, replace(config, quiet=True), description, starter.log, hosts, listener, starter
        )
    except (LockstepError, KeyboardInterrupt) as error:
        starter.end(error)


def _take_request(request: Request) -> None:
    if request.what == "signal":
        os.kill(os.getpid(), request.number)


def _end_this_host() -> None:
    """The starter or the connection to it is gone: end this host's part of the job."""
    for number in (signal.SIGTERM, signal.SIGINT):  # the second signal ends the grace period
        os.kill(os.getpid(), number)


def _run(
    script: Script,
    config: JobOptions,
    description: HostDescription,
    multiplexer: LogMultiplexer,
    hosts: FixedHosts,
    listener: socket.socket | None,
    starter: Starter | None = None,
) -> None:
    """Run this host's part, and agree with the others on the first failure.

    Args:
        script: the program.
        config: of the run.
        description: of this host.
        multiplexer: prints the workers' lines.
        hosts: of the job.
        listener: where the others connect, if this host is the first.
        starter: of this launcher.
    """
    own: HostFailure | None = None
    error: LockstepError | None = None
    with closing(hosts):
        hosts.meet(description, config, listener)
        _choose_interface(config, hosts)
        try:
            run_host_share(script, config, description.workers, multiplexer, hosts)
        except InterruptedRunError:
            raise
        except LockstepError as raised:
            _check_interruption(raised, hosts)
            own = failure_of(raised, hosts.clock_offset_ns)
            error = raised
        if own is not None and starter is not None:
            starter.send(AgentFailure(own))
        first = hosts.end(own, FAILURE_GRACE + 2)
    if first is not None:
        if own is None or own.rank != first.rank:  # one host shows the traceback
            first = msgspec.structs.replace(first, traceback="")
        raise first.as_error()
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
        name = signal.Signals(interruption.signal).name
        text = f"stopped by {name} on {interruption.host}: its workers have exited"
        raise InterruptedRunError(text, interruption.signal)


def failure_of(error: LockstepError, clock_offset_ns: int = 0) -> HostFailure | None:
    """Return the failure of a worker; an error that all of this host's workers share counts as the
    first worker's.
    """
    cause = error if isinstance(error, WorkerError) else error.__cause__
    if not isinstance(cause, WorkerError):
        return None
    return HostFailure.from_error(cause, socket.gethostname(), clock_offset_ns)


def _choose_interface(config: JobOptions, hosts: FixedHosts) -> None:
    """Make Gloo and NCCL use the network of the first host; by default Gloo uses the address of the
    host name.
    """
    name = config.network_interface
    if name is None and hosts.nodes > 1:
        with suppress(OSError):
            name = interface_with_address(address_towards(hosts.address))
    if name is not None:
        environment.set_defaults({"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name})
