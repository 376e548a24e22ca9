"""The agent of the job on one node of a Ray cluster: an actor that runs the same code as
`lockstep run` does on a host.

It holds the resources of its workers, starts them as processes, and is connected to the agents of
the other nodes. What loads PyTorch is imported in the methods, after the actor's environment is
set.
"""

from __future__ import annotations

import logging
import socket
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from .. import environment
from ..errors import ConfigError, LockstepError
from ..job.messages import HostDescription
from ..launcher.options import JobOptions
from ..launcher.remote_hosts.host_description import describe_host
from ..launcher.worker_options import WorkerOptions
from ..launcher.worker_process.fork_server import prepare_workers
from ..launcher.worker_process.script import Script
from ..system.socket_folders import short_base
from .relay import Item, RelayedLog

if TYPE_CHECKING:
    from ..launcher.elastic_jobs.elastic_host import ElasticHost
    from ..launcher.links import OneHost

_VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def devices_of_worker(
    visible: Sequence[str], amount: float, local_rank: int, workers: int
) -> Sequence[str]:
    """Return the devices of a worker among those that Ray has given to its agent.

    Args:
        visible: the devices of the agent.
        amount: that each worker reserves; less than 1 if several share a device.
        local_rank: of the worker.
        workers: the most on its node.
    """
    if amount < 1:
        return visible[local_rank * len(visible) // workers :][:1]
    return visible[local_rank * int(amount) :][: int(amount)]


@dataclass(frozen=True)
class Call(Script):
    """A pickled call as the program of the workers of a node; rank 0 leaves its value in a file.

    Attributes:
        folder: with the call, and then with the value.
        workers: the most on this node.
        gpus: that each of them reserves.
        cluster: the variables with which a worker that uses Ray's API connects to the cluster.
        uses_ray: whether it connects before the call is rebuilt.
    """

    folder: Path = Path()
    workers: int = 1
    gpus: float = 0.0
    cluster: tuple[tuple[str, str], ...] = ()
    uses_ray: bool = False

    def run(self) -> None:
        """Run it in this process."""
        variables = environment.variables()
        chosen = dict(self.cluster)
        local_rank = environment.find_world().local_rank
        for name in _VISIBLE_DEVICES if self.gpus else ():
            if variables.get(name):
                visible = variables[name].split(",")
                devices = devices_of_worker(visible, self.gpus, local_rank, self.workers)
                chosen[name] = ",".join(devices)
        environment.set_variables(chosen)
        if self.uses_ray:
            import ray

            ray.init(log_to_driver=False, logging_level=logging.WARNING)
        from ..communicator.initialization import current
        from ..launcher.worker_status import run_stored_call

        def find_rank() -> int:
            comm = current()  # which knows the rank of a worker after others were lost
            return environment.find_world().rank if comm is None else comm.rank

        run_stored_call(self.folder / "call", self.folder / "value", find_rank)


@dataclass(frozen=True)
class NodeEnd:
    """How the part of a node ended.

    Attributes:
        value: of rank 0, pickled, if it has returned there.
        error: of the job.
        cause: of the error.
        error_here: the error of this node's workers, if that is another one.
        cause_here: of that error.
        is_over: whether the job is over on all nodes.
    """

    value: bytes | None = None
    error: BaseException | None = None
    cause: BaseException | None = None
    error_here: BaseException | None = None
    cause_here: BaseException | None = None
    is_over: bool = False


class AgentActor:
    """The agent of a node.

    Args:
        variables: of the environment.
        config: of the job, whose address is not known yet.
        workers: of this node, or the most here in an elastic job.
        gpus: that each worker reserves.
        uses_ray: whether workers connect to the cluster before they rebuild the call.
    """

    def __init__(
        self,
        variables: Mapping[str, str],
        config: JobOptions,
        workers: int,
        gpus: float,
        uses_ray: bool,
    ) -> None:
        environment.set_variables(variables)
        self._problem: ConfigError | None = None
        try:
            # The fork server loads PyTorch while Ray starts the agents of other nodes.
            prepare_workers(config, workers)
        except ConfigError as error:
            self._problem = error  # `run` raises it: to Ray it would be an actor that was lost
        self._uses_ray = uses_ray
        self._gpus = gpus
        self._log = RelayedLog()
        self._host: ElasticHost | None = None
        self._hosts: OneHost | None = None
        self._listener: socket.socket | None = None
        self._address: tuple[str, int] | None = None
        self._signals: list[int] = []  # of an elastic job those that came while it took no part
        self._takes_part = False
        self._lock = threading.Lock()
        self._lost = ""
        self._end: Future[NodeEnd] = Future()

    def describe(self) -> HostDescription:
        """Return the description of this host."""
        return describe_host(0)

    def listen(self) -> tuple[str, int]:
        """Listen for the agents of the other nodes; returns the address."""
        import ray

        from ..launcher.host_rendezvous import listen_for_hosts

        address = ray.util.get_node_ip_address()
        self._listener = listen_for_hosts(address, 0)
        return address, int(self._listener.getsockname()[1])

    def run(
        self,
        call: bytes,
        config: JobOptions,
        workers: int,
        addresses: list[tuple[str, int]],
    ) -> NodeEnd:
        """Run this node's part of the job.

        Args:
            call: pickled.
            config: of this node.
            workers: of this node, or the most here in an elastic job.
            addresses: of agents of the job; those of this one, if it is the first.
        """
        try:
            self._end.set_result(self._run(call, config, workers, addresses))
        except BaseException as error:
            self._end.set_exception(error)
        return self._end.result()

    def wait(self, seconds: float) -> NodeEnd | None:
        """Return what `run` has returned, for a driver that could not be reached then; None if it
        still runs after so long.
        """
        wait([self._end], seconds)
        return self._end.result() if self._end.done() else None

    def _run(
        self,
        call: bytes,
        config: JobOptions,
        workers: int,
        addresses: list[tuple[str, int]],
    ) -> NodeEnd:
        import ray

        with tempfile.TemporaryDirectory(prefix="lockstep-ray-", dir=short_base()) as name:
            folder = Path(name)
            (folder / "call").write_bytes(call)
            context = ray.get_runtime_context()
            cluster = (
                ("RAY_ADDRESS", context.gcs_address),
                ("RAY_NAMESPACE", context.namespace),
            )
            script = Call(
                "function",
                folder=folder,
                workers=workers,
                gpus=self._gpus,
                cluster=cluster,
                uses_ray=self._uses_ray,
            )
            error = None
            try:
                if self._problem is not None:
                    raise self._problem
                if config.elastic is None:
                    self._run_fixed(script, config, workers)
                else:
                    self._run_elastic(script, config, workers, addresses)
            except (LockstepError, KeyboardInterrupt) as raised:
                error = raised
            finally:
                self._log.close()
            value = None
            with suppress(FileNotFoundError):
                value = (folder / "value").read_bytes()
            is_over = self._host is None or self._host.knows_outcome
            if error is None:
                return NodeEnd(value, is_over=is_over)
            cause = error.__cause__
            error_here = cause if isinstance(cause, LockstepError) and cause.__cause__ else None
            cause_here = None if error_here is None else error_here.__cause__
            return NodeEnd(value, error, cause, error_here, cause_here, is_over)

    def _run_fixed(self, script: Script, config: JobOptions, workers: int) -> None:
        from ..launcher.fixed_host import OutputSettings, run_program
        from ..launcher.links import FixedHosts, OneHost
        from ..launcher.node import run_host

        several = config.nnodes > 1
        address = str(config.master_addr)
        hosts = (
            FixedHosts(address, config.master_port, config.node_rank, config.nnodes)
            if several
            else OneHost()
        )
        hosts.signals = self._signals
        self._hosts = hosts
        hosts.reason = self._lost or hosts.reason  # another thread may have set either
        options = WorkerOptions(workers, config.threads or 1, config.grace, exit_grace=config.grace)
        output = OutputSettings(self._log, quiet=True)
        run_workers = partial(run_program, script, options, output, hosts)
        if isinstance(hosts, FixedHosts):
            run_host(hosts, describe_host(workers), config, self._listener, run_workers)
            return
        with closing(hosts):
            run_workers()

    def _run_elastic(
        self, script: Script, config: JobOptions, slots: int, addresses: list[tuple[str, int]]
    ) -> None:
        from ..launcher.elastic_jobs.elastic_node import run_elastic_host
        from ..launcher.elastic_jobs.elastic_workers import elastic_setup

        setup = elastic_setup(script, config, slots, self._log)
        here = describe_host(slots)
        run_elastic_host(addresses, here, config, setup, self._listener, self._watch)

    def _watch(self, host: ElasticHost | None) -> None:
        with self._lock:
            self._takes_part = host is not None
            if host is not None:
                self._host = host
                self._address = host.mesh.own_entry.address, host.mesh.own_entry.port
                host.user.job_signals.extend(self._signals)
                self._signals.clear()

    def poll(self, seconds: float) -> tuple[list[Item], tuple[str, int] | None]:
        """Return the output since the last call, and where this agent listens, if it takes part in
        an elastic job.
        """
        return self._log.take(seconds), self._address

    def signal(self, number: int) -> None:
        """Forward a signal to the whole job."""
        with self._lock:
            if self._host is not None and self._takes_part:
                self._host.user.job_signals.append(number)
            else:
                self._signals.append(number)

    def end(self, reason: str) -> None:
        """The job of a fixed number of workers cannot go on, because of another node."""
        self._lost = reason
        if self._hosts is not None:
            self._hosts.reason = self._hosts.reason or reason
