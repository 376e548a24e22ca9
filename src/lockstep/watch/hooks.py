"""Lets every process group that is made from here on be watched."""

# torch's stubs lack some of the names of torch.distributed
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from .. import environment
from ..errors import LockstepError
from ..recorder import Log, current
from . import batches, ending, models
from .limits import Limits
from .meeting import meet
from .replacing import Replaced
from .session import Session
from .wrapping import watched

__all__ = ["install", "left", "raised", "uninstall"]


class _Watch:
    """The watch of this process. Attributes: session, while there are groups."""

    def __init__(self, machine: Callable[[], str], lasting: bool) -> None:
        self._machine, self._lasting = machine, lasting
        self.session: Session | None = None
        self._undo: list[Replaced] = []
        self._hooks = [
            Replaced(c10d, "_new_process_group_helper", self._making),
            Replaced(c10d, "destroy_process_group", self._destroying),
        ]
        # torch.distributed has the same function under its own name
        self._hooks.append(Replaced(dist, "destroy_process_group", lambda _: c10d.destroy_process_group))

    def uninstall(self) -> None:
        self.end()
        for hook in reversed(self._hooks):
            hook.undo()

    def _making(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def make(
            group_size: int, group_rank: int, ranks: list[int], backend: Any, store: Any, *args: Any, **kw: Any
        ) -> Any:
            if not ranks:
                self._begin(group_size, group_rank, store)
            session = self.session
            if session is None:
                return original(group_size, group_rank, ranks, backend, store, *args, **kw)
            with session.sockets.watching():
                group, own = original(group_size, group_rank, ranks, backend, store, *args, **kw)
            return self._wrap(session, group, ranks), own

        return make

    def _begin(self, size: int, rank: int, store: Any) -> None:
        self.end()
        if size < 2:
            return
        limits = Limits.read()  # whatever is wrong with them is an error
        try:
            self.session = Session(meet(store, rank, size, self._machine()), limits)
        except (OSError, RuntimeError, LockstepError) as error:
            from .notes import say

            say(None, f"rank {rank} is not watched: {error}")
            return
        session = self.session
        timeline = environment.timeline_dir()
        log = Log(timeline, session.own) if timeline is not None else None
        current.recorder = session.recorder
        self._undo = [*batches.replacements(session), *models.replacements(session)]
        session.start(self.end, log)

    def _wrap(self, session: Session, group: Any, ranks: list[int]) -> Any:
        if (
            group is None
            or group == dist.GroupMember.NON_GROUP_MEMBER
            or "watch_member" in getattr(group, "__dict__", ())
        ):
            return group
        made = watched(group)
        if made is not group:
            _replace(group, made)
        name = str(c10d._world.pg_names[made])
        members = tuple(ranks) or tuple(range(session.recorder.world_size))
        title = (made.group_desc if made.group_desc not in ("", "undefined") else name) if ranks else ""
        made.watch_member = session.join(name, title, members)
        session.groups[made] = made.watch_member
        return made

    def _destroying(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def destroy(group: Any = None) -> Any:
            session = self.session
            if session is None:
                return original(group)
            whole = group is None or group == dist.GroupMember.WORLD
            for each in list(session.groups) if whole else [group]:
                session.forget(each)
            if whole:
                session.leave_all()
            try:
                return original(group)
            finally:
                if whole:
                    self.end()

        return destroy

    def end(self) -> None:
        """End the session."""
        session, self.session = self.session, None
        if session is None or session.recorder.pid != os.getpid():
            return
        current.recorder = None
        for replaced in reversed(self._undo):
            replaced.undo()
        self._undo = []
        session.close()
        if not self._lasting:
            uninstall()


def _replace(group: Any, made: Any) -> None:
    """Let torch take `made` for `group`."""
    world = c10d._world
    table: Any
    for table in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag):
        if group in table:
            table[made] = table.pop(group)
    for groups in world.tags_to_pg.values():
        groups[:] = [made if each is group else each for each in groups]
    name = world.pg_names[made]
    c10d._unregister_process_group(name)
    c10d._register_process_group(name, made)


_watch: _Watch | None = None


def install(machine: Callable[[], str], lasting: bool) -> None:
    """See `watch.install`."""
    global _watch
    if _watch is None and environment.watch_mode() != "off":
        _watch = _Watch(machine, lasting)


def uninstall() -> None:
    """See `watch.uninstall`."""
    global _watch
    if _watch is not None:
        found, _watch = _watch, None
        found.uninstall()


def raised(error: BaseException) -> None:
    """See `watch.raised`."""
    if _watch is not None and _watch.session is not None:
        ending.note_error(_watch.session, error)


def left() -> None:
    """See `watch.left`."""
    if _watch is not None and _watch.session is not None:
        ending.note_end(_watch.session)


def _after_fork() -> None:
    """A forked child is no rank."""
    global _watch
    current.recorder = None
    if _watch is not None:
        _watch.session = None


os.register_at_fork(after_in_child=_after_fork)
