"""Lets every process group that is made from here on be watched."""

# torch's stubs lack some of the names of torch.distributed
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from .. import environment
from ..errors import LockstepError
from ..recorder import Log, current
from . import batches, ending, models, notes
from .agreement import Agreement
from .limits import Limits
from .meeting import NoRoomError, meet
from .replacing import Replaced
from .session import Session
from .sockets import Sockets
from .wrapping import watched

__all__ = ["blocking", "install", "leave_out", "left", "raised", "uninstall"]

_BLOCKING = {"shm", "gloo", "mpi", "mpi4py"}  # backends whose operations have ended when they say so


class _Watch:
    """The watch of this process. Attributes: session, while there are groups."""

    def __init__(self, machine: Callable[[], str], lasting: bool) -> None:
        self._machine, self._lasting = machine, lasting
        self.session: Session | None = None
        self._undo: list[Replaced] = []
        self._sockets, self._limits = Sockets(), Limits.read()
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
                self.end()
                self._sockets, self._limits = Sockets(), Limits.read()  # whatever is wrong with them is an error
            elif self.session is None:
                return original(group_size, group_rank, ranks, backend, store, *args, **kw)
            with self._sockets.watching():
                group, own = original(group_size, group_rank, ranks, backend, store, *args, **kw)
            if not ranks:  # now that most backends have let the ranks meet, nobody comes late by more than a moment
                self._begin(group_size, group_rank, store)
            return self._wrap(self.session, group, ranks, _limit_s(args, kw)), own

        return make

    def _begin(self, size: int, rank: int, store: Any) -> None:
        if size < 2:
            return
        try:
            found = meet(store, rank, size, self._machine(), self._limits.heartbeat_s)
            self.session = Session(found, self._limits, self._sockets)
        except NoRoomError as error:
            if rank == min(error.ranks):  # once for all
                notes.say(None, f"the ranks are not watched: {error}")
            return
        except (OSError, RuntimeError, LockstepError) as error:
            notes.say(None, f"rank {rank} is not watched: {error}")
            return
        session = self.session
        current.recorder = session.recorder
        self._undo = [
            *batches.replacements(session),
            *models.replacements(session),
            *session.captures.replacements(),
        ]
        session.start(self.end, _log(session))

    def _wrap(self, session: Session | None, group: Any, ranks: list[int], limit_s: float) -> Any:
        if (
            session is None
            or group is None
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
        made.watch_member = session.join(name, title, members, limit_s)
        backends = {part.partition(":")[2] for part in c10d.get_backend_config(made).split(",")}
        made.watch_member.ends_by_future = backends <= _BLOCKING
        if made.watch_member.far and backends <= {"gloo", "shm"}:  # they connect all ranks by Gloo
            made.watch_member.agreement = Agreement(made, made.watch_member)
        session.groups[made] = made.watch_member
        return made

    def _destroying(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def destroy(group: Any = None) -> Any:
            session = self.session
            if session is None:
                return original(group)
            whole = group is None or group == dist.GroupMember.WORLD
            known = session.error
            if whole and session.recorder.phase != "raised":
                session.far.settle()
            found = session.error is not known
            for each in list(session.groups) if whole else [group]:
                session.forget(each)
            if whole:
                session.leave_all()
            try:
                return original(group)
            finally:
                if whole:
                    self.end()
                if found:
                    session.check()

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


def _limit_s(args: tuple[Any, ...], kw: dict[str, Any]) -> float:
    """The seconds that the user lets a group's collectives take; 0 where torch has filled in its own limit."""
    given = kw.get("timeout", next((each for each in args if isinstance(each, timedelta)), None))
    usual = any(given is each for each in (c10d.default_pg_timeout, c10d.default_pg_nccl_timeout))
    return 0.0 if given is None or usual else float(given.total_seconds())


def _log(session: Session) -> Log | None:
    folder = environment.timeline_dir()
    try:
        return Log(folder, session.own) if folder is not None else None
    except OSError as error:
        session.say(f"rank {session.rank} does not record its timeline: {error}")
        return None


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


def leave_out(group: Any) -> None:
    """See `watch.leave_out`."""
    if _watch is not None and _watch.session is not None:
        _watch.session.leave_out(group)


@contextmanager
def blocking(group: Any, operation: str) -> Iterator[Callable[[], None]]:
    """See `watch.blocking`."""
    session = _watch.session if _watch is not None else None
    member = session.groups.get(group) if session is not None else None
    if session is None or member is None or group.watch_member is None or threading.get_ident() in member.inside:
        yield lambda: None
        return
    started = member.enter(operation, ())
    try:
        with session.blocking(started.number, member.ranks):
            yield session.check
    except BaseException:
        member.drop(started)
        raise
    member.leave(started, time.monotonic())


def _after_fork() -> None:
    """A forked child is no rank."""
    global _watch
    recorder, current.recorder = current.recorder, None
    if recorder is not None:
        with suppress(BufferError):  # another thread was at it
            recorder.close()  # loops over batches and groups may go on to use it
    if _watch is not None and _watch.session is not None:
        _watch.session.far.abandon()
        _watch.session = None


os.register_at_fork(after_in_child=_after_fork)
