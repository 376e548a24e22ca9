"""Starts what ``lockstep run`` was asked for: on this host, as one of several, on several, or as a
Slurm step.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace

from .. import environment
from ..activity import Activity
from ..environment.schedulers import SCHEDULERS, find_node
from ..environment.variable_table import DISPLAY
from ..errors import ConfigError, LockstepError
from ..hosts import Host
from ..interruption import deferred_signals
from ..topology import World
from .host_requirements import check_loopback
from .network_interface import check_interface
from .options import AUTO, JobOptions, check_debug_rank, check_network
from .output.log_multiplexer import LogMultiplexer
from .remote_hosts.remote_command import requested_variables
from .remote_hosts.starter import Starter
from .worker_process.fork_server import default_workers, prepare_workers
from .worker_process.script import HOROVOD_SETUP, Script


def config_for_slurm_task(
    config: JobOptions, world: World, variables: Mapping[str, str]
) -> JobOptions:
    """Return `config` with the nodes of the Slurm step in which this launcher is the task at
    `world`.

    The master address is the first node of the step, and the port is derived from the job and step
    IDs, unless MASTER_ADDR and MASTER_PORT are among the `variables` or `config` sets them.

    Raises:
        LockstepError: srun started several launchers on one node.
        ConfigError: -H is given under srun.
    """
    if config.hosts:
        hint = "Leave -H out, or start `lockstep run -H` without srun."
        raise ConfigError(
            "hosts",
            "no -H or --hostfile under srun, which starts a launcher on each node",
            found="both",
            hint=hint,
        )
    if world.local_world_size > 1:
        raise LockstepError(
            f"srun started {world.local_world_size} launchers on this node, but one starts all "
            f"its workers: srun --ntasks-per-node=1 lockstep run -np {world.local_world_size} "
            "..., or let srun start the workers: srun python SCRIPT"
        )
    if config.nnodes > 1:  # the user gave the nodes
        return config
    from ..bootstrap import find_rendezvous

    meeting = find_rendezvous(world, variables)
    by_address = meeting.kind == "address"
    host = variables["MASTER_ADDR"] if by_address else meeting.host
    port = int(variables["MASTER_PORT"]) if by_address else meeting.port
    host = config.master_addr or host
    return replace(
        config, nnodes=world.nodes, node_rank=world.node, master_addr=host, master_port=port
    )


def config_for_node(config: JobOptions, variables: Mapping[str, str], host: str) -> JobOptions:
    """Return `config` with the place that a scheduler has given this node, for ``--nodes auto``.

    Args:
        config: of the user.
        variables: of the environment.
        host: the fully qualified name of this host.

    Raises:
        ConfigError: no scheduler has, or its variables are incomplete.
    """
    place = find_node(variables, host)
    if place is None:
        hint = (
            "`lockstep doctor` shows what there is. Without a scheduler: --nnodes N --node-rank I "
            "--master-addr ADDR, or -H."
        )
        *names, last = (scheduler.title for scheduler in SCHEDULERS)
        expected = f"a node of {', '.join(names)} or {last}"
        raise ConfigError("nnodes", expected, found="no variables of any", hint=hint)
    port = place.port or config.master_port
    return replace(
        config,
        nnodes=place.nodes,
        node_rank=place.node,
        master_addr=place.address,
        master_port=port,
    )


def start(config: JobOptions, listed: Callable[[], Sequence[Host]] | None = None) -> None:
    """Run the program of `config` to completion.

    Args:
        config: of the run.
        listed: returns the hosts that an elastic job shall have now, with `config.hosts` at the
            start; None if these stay.

    Raises:
        ConfigError: the configuration is invalid; found before any worker starts.
        WorkerError: the rank that failed first.
        InterruptedRunError, KeyboardInterrupt: after a signal.
        LockstepError: workers cannot be started.
    """
    starter = None
    if config.as_host:  # before anything reads or writes the standard streams
        starter = Starter(prefixes=not config.no_prefix)
    config = _apply_slurm_step(config)
    if config.nnodes == AUTO:
        config = config_for_node(config, environment.variables(), socket.getfqdn())
    if os.isatty(1) and not config.as_host:
        environment.set_defaults({DISPLAY.name: str(shutil.get_terminal_size().columns)})
    if not config.hosts:
        environment.set_variables(requested_variables(config, environment.variables()))
    setup = HOROVOD_SETUP if config.as_horovod else ""
    script = Script(config.program[0], config.program[1:], config.module, setup)
    if config.hosts:
        from .remote_hosts import ssh

        ssh.run_on_hosts(config, listed)
    elif (
        config.nnodes > 1
        or config.as_host
        or (config.elastic is not None and config.master_addr is not None)
    ):
        _run_on_several_hosts(script, config, starter)
    else:
        script.check()
        _run_on_this_host(script, config)


def _apply_slurm_step(config: JobOptions) -> JobOptions:
    """Return `config` with the nodes of the Slurm step; refuse to start inside a worker of any
    other launcher.
    """
    world = environment.find_world()
    if world.source == "slurm" and not config.as_host:
        return config_for_slurm_task(config, world, environment.variables())
    is_node = config.nnodes == AUTO and environment.gives_nodes_ranks()
    if environment.is_launched() and not config.as_host and not is_node:
        what = (
            f"this process is already a worker ({world.source}, rank {world.rank} of "
            f"{world.world_size})"
        )
        cure = (
            "If its variables are left over from another job, `env -u RANK -u WORLD_SIZE lockstep "
            "run ...` starts."
        )
        raise LockstepError(f"`lockstep run` starts workers, but {what}. {cure}")
    return config


# Neither this module nor what it imports at its top loads PyTorch, so that the fork server loads it
# at the same time.


def _run_on_this_host(script: Script, config: JobOptions) -> None:
    """Run the program on this host only."""
    check_loopback()
    with _loading_pytorch(config):
        workers = config.workers or (config.elastic[0] if config.elastic else default_workers())
        check_debug_rank(config, workers)
        check_network(config.network, workers)
        prepare_workers(config, workers)
        with deferred_signals():
            if config.elastic is not None:
                from .elastic_jobs import elastic_host, elastic_workers
            else:
                from . import fixed_host, links

    multiplexer = LogMultiplexer(
        (1, 2), colours=environment.wants_colours(), prefixes=not config.no_prefix
    )
    if config.elastic is not None:
        setup = elastic_workers.elastic_setup(script, config, workers, multiplexer)
        elastic_host.run_on_one_host(setup)
        return
    with closing(links.OneHost()) as hosts:
        fixed_host.run_host_share(script, config, workers, multiplexer, hosts)


def _run_on_several_hosts(script: Script, config: JobOptions, starter: Starter | None) -> None:
    """Run this host's share of the program."""
    with _loading_pytorch(config):
        workers = config.workers or default_workers()
        problem = _prepare_host(script, config, workers)
        with deferred_signals():
            from . import node

            kind: type[node.HostPart] = node.FixedPart
            if config.elastic is not None:
                from .elastic_jobs import elastic_node

                kind = elastic_node.ElasticPart

    node.run_as_node(kind(script, workers, problem), config, starter)


def _prepare_host(script: Script, config: JobOptions, workers: int) -> str:
    """Prepare for the workers; return why this host cannot run them, which all hosts are told, or
    "".
    """
    try:
        prepare_workers(config, workers)
        script.check()
        check_interface(config.network_interface)
    except ConfigError as error:
        return str(error)
    return ""


def _loading_pytorch(config: JobOptions) -> Activity:
    return Activity("lockstep run: loading PyTorch", shown=not (config.quiet or config.as_host))
