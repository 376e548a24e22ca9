"""What `lockstep.init()` would do in a program that is started as this one is."""

from __future__ import annotations

from .. import environment
from ..errors import ConfigError
from .report import Problem, Section

__all__ = ["examine_job"]


def examine_job() -> Section:
    """The launcher that the environment speaks of, this process's place, and where the workers would meet."""
    section = Section("job")
    try:
        world = environment.find_world()
        if not environment.is_launched():
            section.add("launcher", "none: init() makes one worker, which is alone")
            return section
        section.add("launcher", world.source)
        place = f"rank {world.rank} of {world.world_size}, local rank {world.local_rank} of {world.local_world_size}"
        section.add("place", f"{place}, node {world.node} of {world.nodes}")
        section.add("meeting", _meeting())
    except ConfigError as error:
        section.add("launcher", "init() would raise an error", Problem(str(error), error.hint or "Set it right."))
    return section


def _meeting() -> str:
    from .. import rendezvous

    variables = environment.variables()
    found = rendezvous.find_meeting(environment.find_world(variables), variables)
    if found.kind == "address":
        return f"at MASTER_ADDR and MASTER_PORT: {variables['MASTER_ADDR']}:{variables['MASTER_PORT']}"
    return {
        "tcp": f"at {found.host}:{found.port}, the first node of the step",
        "here": "on this machine, at a port that rank 0 tells the others",
        "mpi": "over MPI",
    }[found.kind]
