"""The variables that Horovod's launcher sets, for programs that read them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ..topology import World

__all__ = ["hand_down", "horovod_marks_cycles", "horovod_timeline", "set_horovod_variables", "with_variables"]


def set_horovod_variables(world: World, host: str, folder: str) -> None:
    """Let this process, and those that it starts, find what Horovod's launcher would have set.

    Args:
        world: its place in the job.
        host: the name of its machine.
        folder: put in front of PYTHONPATH.
    """
    places = {
        "HOROVOD_RANK": world.rank,
        "HOROVOD_SIZE": world.world_size,
        "HOROVOD_LOCAL_RANK": world.local_rank,
        "HOROVOD_LOCAL_SIZE": world.local_world_size,
        "HOROVOD_CROSS_RANK": world.node,
        "HOROVOD_CROSS_SIZE": world.nodes,
    }
    os.environ.update({name: str(value) for name, value in places.items()}, HOROVOD_HOSTNAME=host)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if folder not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, *filter(None, paths)])


def hand_down(variables: Mapping[str, str]) -> None:
    """Set `variables` for what this process starts."""
    os.environ.update(variables)


def horovod_timeline() -> str:
    """What HOROVOD_TIMELINE says: a file, DYNAMIC for one that is named later, or "" for none."""
    return os.environ.get("HOROVOD_TIMELINE", "").strip()


def horovod_marks_cycles() -> bool:
    """Whether HOROVOD_TIMELINE_MARK_CYCLES asks for the rounds of the ranks in the timeline."""
    return os.environ.get("HOROVOD_TIMELINE_MARK_CYCLES", "0").strip() not in ("", "0")


@contextmanager
def with_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Set `variables` while it lasts."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
