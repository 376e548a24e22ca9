"""Starts what ``lockstep run`` was asked for: on this machine, as one of several, or on several."""

from __future__ import annotations

from .. import environment
from ..errors import LockstepError
from .choices import Choices
from .command import chosen_variables
from .part import check_debug_rank, default_workers, prepare, run_part
from .screen import Screen
from .script import Script

__all__ = ["start"]

_HOROVOD = "lockstep.doors.horovod.as_horovod:enter"  # above this floor: the worker imports it when it is asked to


def start(choices: Choices) -> None:
    """Run the program to its end.

    Raises:
        ConfigError: for what can be seen to be wrong before the start.
        WorkerError: for the rank that failed first.
        InterruptedRunError, KeyboardInterrupt: after a signal.
        LockstepError: when workers cannot be started.
    """
    choices = _with_place(choices)
    if not choices.hosts:
        environment.put(chosen_variables(choices, environment.variables()))
    before = _HOROVOD if choices.as_horovod else ""
    script = Script(choices.program[0], choices.program[1:], choices.module, before)
    if choices.hosts:
        from . import remote

        remote.run_on_hosts(choices)
    elif choices.nnodes > 1 or choices.as_host:
        from . import node

        node.run_as_node(script, choices)
    else:
        script.check()
        run_here(script, choices)


def _with_place(choices: Choices) -> Choices:
    """`choices` with this launcher's place among those that Slurm has started; no other launcher starts launchers."""
    world = environment.find_world()
    if world.source == "slurm" and not choices.as_host:
        from .slurm_step import as_step

        return as_step(choices, world, environment.variables())
    if environment.is_launched() and not choices.as_host:
        what = f"this process is a worker already ({world.source}, rank {world.rank} of {world.world_size})"
        raise LockstepError(f"`lockstep run` starts workers, and {what}")
    return choices


def run_here(script: Script, choices: Choices) -> None:
    """Run the program on this machine alone."""
    workers = choices.workers or default_workers()
    check_debug_rank(choices, workers)
    prepare(choices, workers)
    from . import meeting

    screen = Screen((1, 2), colours=environment.wants_colours(), prefixes=not choices.no_prefix)
    run_part(script, choices, workers, screen, meeting.one_machine())
