"""The watchdog in a process: every process group that torch makes is watched, from the first until
the last one is destroyed.

The functions behind those of the package, which do not import torch.
"""

# torch's stubs lack some of the names of torch.distributed
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from .. import environment
from ..errors import LockstepError, MembershipChangedError, TransportError
from ..flight_recorder import FlightRecorder, RecordLog, current, jobs
from ..flight_recorder.layout import StateWords
from ..gloo import SocketTracker
from ..system.patching import Replaced
from . import last_rank
from .batch_loops import batch_replacements
from .gloo_waits import EndableWaits
from .group_creation import limit_of_user, watch_creation
from .last_rank import LastRankWatch
from .preflight import PreflightCheck
from .process_groups import replace_group, watch_group
from .rendezvous import NoSpaceError, rendezvous
from .rounds import Rounds
from .session import Session
from .shared_state import Limits, WatchdogState


def ddp_replacements(state: WatchdogState) -> list[Replaced]:
    """Return the patches of `DistributedDataParallel`, whose models are compared among the ranks,
    and of the backward pass, which raises the root cause in place of a symptom.

    Args:
        state: of the watchdog; the patches hold while its session lasts.
    """
    import torch.nn.parallel.distributed as ddp

    def comparing(original: Callable[..., Any]) -> Callable[..., Any]:
        def verify(process_group: Any, tensors: Iterable[torch.Tensor], logger: Any = None) -> Any:
            tensors = list(tensors)
            monitor = getattr(process_group, "watchdog_monitor", None)
            if monitor is not None:
                monitor.used_by_ddp = True
                # not a collective of c10d: only a record, by which ranks with different models are
                # found
                model = getattr(sys._getframe(1).f_locals.get("self"), "module", None)
                pending = monitor.enter("model", _layout(tensors, model))
                if monitor.preflight is not None:
                    with state.blocking(pending.number, monitor.ranks):
                        monitor.preflight.check(pending)
                monitor.finish(pending, pending.entered)
            return original(process_group, tensors, logger)

        return verify

    def explaining(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            except RuntimeError as error:
                state.raise_root_cause(error, None)
                raise

        return run

    return [
        Replaced(ddp, "_verify_param_shape_across_processes", comparing),
        Replaced(torch.autograd, "_engine_run_backward", explaining),
    ]


def _layout(tensors: list[torch.Tensor], model: torch.nn.Module | None) -> tuple[Any, ...]:
    """Return shape, dtype, name and layer of each parameter: two layers of one shape may be
    swapped.
    """
    names = {
        id(tensor): f"{path}{'.' if path else ''}{name} of {type(layer).__name__}"
        for path, layer in (model.named_modules() if model is not None else ())
        for name, tensor in layer.named_parameters(recurse=False)
    }
    return tuple(((tensor.shape, tensor.dtype), names.get(id(tensor), "")) for tensor in tensors)


# backends whose operations have completed when their works say so
_HOST_BACKENDS = {"shm", "gloo", "mpi", "mpi4py"}
# backends that connect all ranks by Gloo, over which calls can be compared across hosts
_GLOO_BACKENDS = {"gloo", "shm"}


class _Watchdog:
    """The patches of torch in this process, and the session while there are groups.

    Args:
        host_key: returns a text that is the same for processes that can open each other's files.
        lasting: whether the patches stay after the default group has been destroyed.

    Attributes:
        session: None while there are no groups.
    """

    def __init__(self, host_key: Callable[[], str], lasting: bool) -> None:
        self._host_key = host_key
        self._lasting = lasting
        self.session: Session | None = None
        self._alone: FlightRecorder | None = None  # the record of the only rank
        self._undo: list[Replaced] = []
        self._sockets = SocketTracker()
        self._limits = Limits.read()
        self._hooks = [
            Replaced(c10d, "_new_process_group_helper", self._creating),
            Replaced(c10d, "destroy_process_group", self._destroying),
        ]
        # torch.distributed has its own reference to the same function
        self._hooks.append(
            Replaced(dist, "destroy_process_group", lambda _: c10d.destroy_process_group)
        )

    def uninstall(self) -> None:
        """End the session and undo the patches."""
        self.end()
        for hook in reversed(self._hooks):
            hook.undo()

    def _creating(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return c10d's function that makes a group, with the watch; `ranks` is empty for the
        default group, with which a session begins.
        """

        def create(
            group_size: int,
            group_rank: int,
            ranks: list[int],
            backend: Any,
            store: Any,
            *args: Any,
            **kw: Any,
        ) -> Any:
            if not ranks:
                self.end()
                last_rank.watch(None)
                # an invalid variable is an error here
                self._sockets = SocketTracker()
                self._limits = Limits.read()
            elif self.session is None:
                return original(group_size, group_rank, ranks, backend, store, *args, **kw)
            name = str(args[0] if args else kw.get("group_name", ""))
            with (
                self._sockets.tracking(),
                watch_creation(self.session, name, ranks, backend, args, kw),
            ):
                group, store_of_group = original(
                    group_size, group_rank, ranks, backend, store, *args, **kw
                )
            self._sockets.retransmit_often()
            # most backends have synchronised the ranks by now, so that none is late by much
            if not ranks:
                self._begin(group_size, group_rank, store)
            limit_s = limit_of_user(args, kw)
            return self._watch(self.session, group, ranks, limit_s), store_of_group

        return create

    def _begin(self, size: int, rank: int, store: Any) -> None:
        """Begin the session of a job of `size` ranks, or say why there is none."""
        if size < 2:
            self._record_alone(rank)
            return
        try:
            host_key = self._host_key()
            ranks = rendezvous(store, rank, size, host_key, self._limits.heartbeat_s)
            self.session = Session(ranks, self._limits, self._sockets)
        except NoSpaceError as error:
            if rank == min(error.ranks):  # once for all
                jobs.write_message(None, f"the watchdog is disabled: {error}")
            return
        except MembershipChangedError:
            raise  # there is another group at once
        except (OSError, RuntimeError, LockstepError) as error:
            jobs.write_message(None, f"the watchdog is disabled on rank {rank}: {error}")
            return
        session = self.session
        current.recorder = session.state.recorder
        self._undo = [
            *batch_replacements(session.state),
            *ddp_replacements(session.state),
            *session.state.captures.replacements(),
        ]
        session.start(self.end, _open_log(session.state))
        last_rank.watch(_last_rank_watch(session.state))

    def _record_alone(self, rank: int) -> None:
        """Keep the flight record of the only rank, for its launcher: there is nobody to watch, but
        steps are counted.
        """
        folder = environment.records_dir()
        if folder is None:
            return
        with suppress(OSError):  # there is no space, or no folder: nothing is counted
            self._alone = FlightRecorder(folder, rank, 1, socket.gethostname(), jobs.command_line())
            self._alone.floats[StateWords().heartbeat] = math.inf  # there is no thread that beats
            current.recorder = self._alone

    def _watch(self, session: Session | None, group: Any, ranks: list[int], limit_s: float) -> Any:
        """Watch a group that this rank has made, if it is one of its ranks and there is a session.

        Args:
            session: None without a watchdog.
            group: the group, or what c10d returns in its place.
            ranks: of the group; empty for the default group.
            limit_s: timeout in seconds that the user has set for the group; 0 for none.

        Returns:
            The group that the program gets: one that records what it is called with.
        """
        if (
            session is None
            or group is None
            or group == dist.GroupMember.NON_GROUP_MEMBER
            or "watchdog_monitor" in getattr(group, "__dict__", ())
        ):
            return group
        watched = watch_group(group)
        if watched is not group:
            replace_group(group, watched)
        name = str(c10d._world.pg_names[watched])
        members = tuple(ranks) or tuple(range(session.state.recorder.world_size))
        title = ""
        if ranks:
            has_description = watched.group_desc not in ("", "undefined")
            title = watched.group_desc if has_description else name
        backends = {part.partition(":")[2] for part in c10d.get_backend_config(watched).split(",")}
        monitor = session.add_group(name, title, members, limit_s)
        monitor.completes_on_host = backends <= _HOST_BACKENDS
        monitor.sizes_must_fit = "gloo" in backends
        monitor.moved = getattr(watched, "count_moved", None)
        if session.state.limits.expects_losses and "gloo" in backends:
            monitor.endable_waits = EndableWaits(session.state.check)
        watched.watchdog_monitor = monitor
        if monitor.remote_ranks and backends <= _GLOO_BACKENDS:
            monitor.preflight = PreflightCheck(
                watched, session.state, monitor.key, monitor.ranks, monitor.swaps, monitor.abandon
            )
        session.groups[watched] = monitor
        return watched

    def _destroying(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return c10d's function that destroys a group, or all of them, with which the session
        ends.
        """

        def destroy(group: Any = None) -> Any:
            session = self.session
            if session is None:
                return original(group)
            destroys_all = group is None or group == dist.GroupMember.WORLD
            error_before = session.state.error
            if (
                destroys_all
                and session.state.recorder.phase != "raised"
                and not session.is_interrupted
            ):
                session.cross_host.compare_at_exit()
            has_new_error = session.state.error is not error_before
            destroyed = list(session.groups) if destroys_all else [group]
            if any(map(_may_be_freed_by_ddp, destroyed)):
                time.sleep(_RELEASE_PAUSE_S)
            for destroyed_group in destroyed:
                session.remove_group(destroyed_group)
            if destroys_all:
                session.mark_groups_destroyed()
            try:
                return original(group)
            finally:
                if destroys_all:
                    self.end()
                if has_new_error:
                    session.state.check()

        return destroy

    def end(self) -> None:
        """End the session."""
        session = self.session
        self.session = None
        alone = self._alone
        self._alone = None
        if alone is not None and alone.pid == os.getpid():
            current.recorder = None
            alone.close()
        if session is None or session.state.recorder.pid != os.getpid():
            return
        current.recorder = None
        for replaced in reversed(self._undo):
            replaced.undo()
        self._undo = []
        session.close()
        if not self._lasting:
            uninstall()


# Gloo's threads release a collective's tensors and Python state a moment after the program has gone
# on, for which they need the interpreter lock. Where a DistributedDataParallel outlives the
# destroyed group, freeing it frees the group, which then waits for these threads with the lock
# held, for ever (torch 2.13; also without a launcher).
_RELEASE_PAUSE_S = 0.05


def _may_be_freed_by_ddp(group: Any) -> bool:
    """Return whether a DistributedDataParallel reduces over the group, by Gloo."""
    monitor = getattr(group, "watchdog_monitor", None)
    return monitor is not None and monitor.used_by_ddp and "gloo" in c10d.get_backend_config(group)


def _last_rank_watch(state: WatchdogState) -> LastRankWatch | None:
    """Return the watch for this rank; None where ranks may end before others on purpose, or be in a
    debugger.
    """
    if state.limits.expects_losses or state.limits.debugging or not state.peers:
        return None
    others = (
        "all other ranks" if len(state.rendezvous.hosts) == 1 else "all other ranks of this host"
    )
    settings = state.folder, state.rank, state.peers, others, state.limits.warning_s
    return LastRankWatch(*settings, lambda: _is_reported(state), state.write_message)


def _is_reported(state: WatchdogState) -> bool:
    """Return whether something is wrong, or other checks see to this rank's wait."""
    failed = state.program.has_failed and environment.under_launcher()  # the worker itself says so
    return state.error is not None or failed or state.recorder.phase == "waits"


def _open_log(state: WatchdogState) -> RecordLog | None:
    """Return the log of all records, if the user wants a timeline; None where it cannot be
    written, which is said.
    """
    folder = environment.timeline_dir()
    try:
        return RecordLog(folder, state.own_reader) if folder is not None else None
    except OSError as error:
        state.write_message(f"rank {state.rank} does not record its timeline: {error}")
        return None


_watchdog: _Watchdog | None = None


def install(host_key: Callable[[], str], lasting: bool) -> None:
    """Watch every group that is made from now on; see `watchdog.install` for the arguments."""
    global _watchdog
    if _watchdog is None and environment.watchdog_mode() != "off":
        _watchdog = _Watchdog(host_key, lasting)


def uninstall() -> None:
    """Stop watching, and undo all patches."""
    global _watchdog
    if _watchdog is not None:
        uninstalled = _watchdog
        _watchdog = None
        uninstalled.uninstall()


def report_exception(error: BaseException) -> None:
    """Report to the other ranks that this rank ends with `error`."""
    if _watchdog is not None and _watchdog.session is not None:
        state = _watchdog.session.state
        state.program.record_exception(error, state.error is not None)


def report_exit() -> None:
    """Report to the other ranks that this rank has reached the end of its program."""
    if _watchdog is not None and _watchdog.session is not None:
        _watchdog.session.state.program.record_exit()
    last_rank.note_end()


def interrupt(error: TransportError) -> None:
    """End all waits of this rank in its groups with `error`, from any thread."""
    if _watchdog is not None and _watchdog.session is not None:
        _watchdog.session.interrupt(error)


def unfinished_works() -> list[Any]:
    """Return the works of an elastic job's Gloo groups that have not ended."""
    if _watchdog is None or _watchdog.session is None:
        return []
    return [
        work for monitor in list(_watchdog.session.monitors) for work in monitor.unfinished_works()
    ]


def exclude_group(group: Any) -> None:
    """Stop watching `group`; its waits still end when something goes wrong."""
    if _watchdog is not None and _watchdog.session is not None:
        _watchdog.session.exclude_group(group)


def watch_rounds(
    group: Any, purpose: Callable[[], str], warning_s: float, stall_s: float, setting: str
) -> Rounds | None:
    """Watch the rounds of `group`, not its collectives; see `rounds.Rounds` for the arguments."""
    if _watchdog is None or _watchdog.session is None:
        return None
    return _watchdog.session.watch_rounds(group, purpose, warning_s, stall_s, setting)


@contextmanager
def watch_wait(group: Any, operation: str) -> Iterator[Callable[[], None]]:
    """Return a context in which the ranks of `group` wait for each other by means of their own,
    which is watched as the collective `operation`.
    """
    session = _watchdog.session if _watchdog is not None else None
    monitor = session.groups.get(group) if session is not None else None
    if (
        session is None
        or monitor is None
        or group.watchdog_monitor is None
        or threading.get_ident() in monitor.threads_inside
    ):
        yield lambda: None
        return
    pending = monitor.enter(operation, ())
    try:
        with session.state.blocking(pending.number, monitor.ranks):
            yield session.state.check
    except BaseException:
        monitor.remove_pending(pending)
        raise
    monitor.finish(pending, time.monotonic())


def _after_fork() -> None:
    """Stop the watchdog in a forked child, which is not a rank."""
    global _watchdog
    recorder = current.recorder
    current.recorder = None
    if recorder is not None:
        with suppress(BufferError):  # another thread is using it
            recorder.close()  # loops over batches and groups may still use it
    if _watchdog is not None and _watchdog.session is not None:
        _watchdog.session.cross_host.abandon()
        _watchdog.session = None


os.register_at_fork(after_in_child=_after_fork)
