"""What a launcher that srun has started on each node is told by Slurm (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..errors import ConfigError, LockstepError
from ..rendezvous import find_meeting
from ..topology import World
from .choices import Choices

__all__ = ["as_step"]


def as_step(choices: Choices, world: World, variables: Mapping[str, str]) -> Choices:
    """`choices` with the nodes of a Slurm step, of which this launcher is the task at `world`.

    The first node is that of the step's list, and the port made of the numbers of job and step, unless MASTER_ADDR and
    MASTER_PORT are among the `variables`, or `choices` say where.

    Raises:
        LockstepError: when srun has started several launchers on a node.
        ConfigError: for -H under srun.
    """
    if choices.hosts:
        hint = "Leave -H out, or start `lockstep run -H` without srun."
        raise ConfigError(
            "hosts", "not to be given under srun, which starts a launcher on each node", found="both", hint=hint
        )
    if world.local_world_size > 1:
        raise LockstepError(
            f"srun has started {world.local_world_size} launchers on this node, and one starts all its workers: "
            f"srun --ntasks-per-node=1 lockstep run -np {world.local_world_size} ..., "
            "or let srun start the workers: srun python SCRIPT"
        )
    if choices.nnodes > 1:  # said by the user, by hand
        return choices
    meeting = find_meeting(world, variables)
    by_address = meeting.kind == "address"
    host = variables["MASTER_ADDR"] if by_address else meeting.host
    port = int(variables["MASTER_PORT"]) if by_address else meeting.port
    host = choices.master_addr or host
    return replace(choices, nnodes=world.nodes, node_rank=world.node, master_addr=host, master_port=port)
