"""Patches of torch: every new process group is watched, batches are counted, and the models of DDP
are compared.
"""

from __future__ import annotations

import dis
import math
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
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
from .call_sites import digest, is_internal
from .last_rank import LastRankWatch
from .preflight import PreflightCheck
from .process_groups import replace_group, watch_group
from .rendezvous import NoSpaceError, rendezvous
from .rounds import Rounds
from .session import Session, record_exception, record_exit
from .shared_state import Limits, WatchdogState

__all__ = [
    "BatchLoops",
    "batch_replacements",
    "ddp_replacements",
    "exclude_group",
    "install",
    "interrupt",
    "report_exception",
    "report_exit",
    "uninstall",
    "watch_rounds",
    "watch_wait",
]


# --------------------------------------------------------------------------------------------------
# MessageReader the batch that a program is on: each step of a loop over a `DataLoader` counts.


@dataclass(slots=True)
class _Loop:
    """A loop over batches.

    Attributes:
        iterator: of the batches.
        key: 64-bit digest of the line of the loop.
    """

    iterator: weakref.ref[Any]
    key: int


class BatchLoops:
    """The loops over batches that this rank is in, the innermost last."""

    def __init__(self, recorder: FlightRecorder) -> None:
        self._recorder = recorder
        self._open: list[_Loop] = []

    def note(self, iterator: Any, number: int) -> None:
        """Record that `iterator` has yielded its batch `number`, from 0."""
        if not _is_program_loop():
            return
        at = next((i for i, loop in enumerate(self._open) if loop.iterator() is iterator), -1)
        if at >= 0:
            del self._open[at + 1 :]  # a loop inside this one is over
        else:
            self._remove_dropped()
            # a method of this object would keep it, and the flight recorder, in a cycle
            own = weakref.WeakMethod(self._dropped)

            def note_dropped(_: object) -> None:
                dropped = own()
                if dropped is not None:
                    dropped()

            self._open.append(_Loop(weakref.ref(iterator, note_dropped), _loop_loop_key()))
        self._recorder.note_batch(number, self._open[-1].key)

    def end(self, iterator: Any, count: int) -> None:
        """Record that `iterator` has ended after `count` batches."""
        if not _is_program_loop():
            return
        loop = next((loop for loop in self._open if loop.iterator() is iterator), None)
        key = loop.key if loop is not None else _loop_loop_key()
        self._open = [each for each in self._open if each is not loop]
        self._recorder.note_batch(-2 - count, key)

    def _dropped(self) -> None:
        """Record that a loop was left before its end; the loop around it records its batch with its
        next one.
        """
        if self._open and self._open[-1].iterator() is None:
            self._recorder.note_batch(-1, 0)
        self._remove_dropped()

    def _remove_dropped(self) -> None:
        self._open = [loop for loop in self._open if loop.iterator() is not None]


def _is_program_loop() -> bool:
    """Return whether a for loop of the main thread takes the batch.

    A thread that prefetches is ahead of the program by a number of batches that differs between
    ranks; and a program that calls `next` itself may take a different number of batches on each
    rank.
    """
    if threading.get_ident() != threading.main_thread().ident:
        return False
    frame = _calling_frame()
    return not dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith(("CALL", "PRECALL"))


def _calling_frame() -> FrameType:
    frame = sys._getframe(2)
    while frame.f_back is not None and is_internal(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _loop_loop_key() -> int:
    frame = _calling_frame()
    return digest(f"{frame.f_code.co_filename}:{frame.f_lineno}")


def batch_replacements(state: WatchdogState) -> list[Replaced]:
    """Patch torch's loaders to count batches, while the session lasts."""
    from torch.distributed.algorithms.join import Join
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    loops = BatchLoops(state.recorder)

    def count(original: Callable[..., Any]) -> Callable[..., Any]:
        def step(self: Any) -> Any:
            try:
                data = original(self)
            except StopIteration:
                loops.end(self, self._num_yielded)
                raise
            loops.note(self, self._num_yielded - 1)
            return data

        return step

    def enter_join(original: Callable[..., Any]) -> Callable[..., Any]:
        def enter(self: Any) -> Any:
            state.uneven_batches += bool(self._enable)
            return original(self)

        return enter

    def leave_join(original: Callable[..., Any]) -> Callable[..., Any]:
        def leave(self: Any, *args: Any) -> Any:
            try:
                return original(self, *args)
            finally:
                state.uneven_batches -= bool(self._enable)

        return leave

    return [
        Replaced(_BaseDataLoaderIter, "__next__", count),
        Replaced(Join, "__enter__", enter_join),
        Replaced(Join, "__exit__", leave_join),
    ]


# --- DistributedDataParallel: models are compared, and the backward pass raises the root cause
# ------------------------


def ddp_replacements(state: WatchdogState) -> list[Replaced]:
    """Patch `DistributedDataParallel` and the backward pass, while the session lasts."""
    import torch.nn.parallel.distributed as ddp

    def compare(original: Callable[..., Any]) -> Callable[..., Any]:
        def verify(process_group: Any, tensors: Iterable[torch.Tensor], logger: Any = None) -> Any:
            tensors = list(tensors)
            monitor = getattr(process_group, "watchdog_monitor", None)
            if monitor is not None:
                monitor.used_by_ddp = True
                # not a collective of c10d: only a record, by which ranks with different models are
                # found
                made = getattr(sys._getframe(1).f_locals.get("self"), "module", None)
                pending = monitor.enter("model", _layout(tensors, made))
                if monitor.preflight is not None:
                    with state.blocking(pending.number, monitor.ranks):
                        monitor.preflight.check(pending)
                monitor.finish(pending, pending.entered)
            return original(process_group, tensors, logger)

        return verify

    def explain(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            except RuntimeError as error:
                state.raise_root_cause(error, None)
                raise

        return run

    return [
        Replaced(ddp, "_verify_param_shape_across_processes", compare),
        Replaced(torch.autograd, "_engine_run_backward", explain),
    ]


def _layout(tensors: list[torch.Tensor], model: torch.nn.Module | None) -> tuple[Any, ...]:
    """Return shape, dtype, name and layer of each parameter: two layers of one shape may be
    swapped.
    """
    names = {
        id(tensor): f"{f'{path}.' * bool(path)}{name} of {type(layer).__name__}"
        for path, layer in (model.named_modules() if model is not None else ())
        for name, tensor in layer.named_parameters(recurse=False)
    }
    return tuple(((tensor.shape, tensor.dtype), names.get(id(tensor), "")) for tensor in tensors)


# --- Process groups
# --------------------------------------------------------------------------------------------------

# torch's stubs lack some of the names of torch.distributed
# mypy: disable-error-code="attr-defined"


_HOST_BACKENDS = {
    "shm",
    "gloo",
    "mpi",
    "mpi4py",
}  # backends whose operations have completed when their works say so


class _Watchdog:
    """The patches of this process.

    Args:
        host_key, lasting: see `watchdog.install`.

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
            Replaced(c10d, "_new_process_group_helper", self._making),
            Replaced(c10d, "destroy_process_group", self._destroying),
        ]
        # torch.distributed has its own reference to the same function
        self._hooks.append(
            Replaced(dist, "destroy_process_group", lambda _: c10d.destroy_process_group)
        )

    def uninstall(self) -> None:
        self.end()
        for hook in reversed(self._hooks):
            hook.undo()

    def _making(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def make(
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
            with self._sockets.tracking(), _creation(self.session, name, ranks, backend, args, kw):
                group, own = original(group_size, group_rank, ranks, backend, store, *args, **kw)
            self._sockets.retransmit_often()
            # most backends have synchronised the ranks by now, so that none is late by much
            if not ranks:
                self._begin(group_size, group_rank, store)
            return self._wrap(self.session, group, ranks, _limit_s(args, kw)), own

        return make

    def _begin(self, size: int, rank: int, store: Any) -> None:
        if size < 2:
            self._record_alone(rank)
            return
        try:
            found = rendezvous(store, rank, size, self._host_key(), self._limits.heartbeat_s)
            self.session = Session(found, self._limits, self._sockets)
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

    def _wrap(self, session: Session | None, group: Any, ranks: list[int], limit_s: float) -> Any:
        if (
            session is None
            or group is None
            or group == dist.GroupMember.NON_GROUP_MEMBER
            or "watchdog_monitor" in getattr(group, "__dict__", ())
        ):
            return group
        made = watch_group(group)
        if made is not group:
            replace_group(group, made)
        name = str(c10d._world.pg_names[made])
        members = tuple(ranks) or tuple(range(session.state.recorder.world_size))
        title = (
            (made.group_desc if made.group_desc not in ("", "undefined") else name) if ranks else ""
        )
        made.watchdog_monitor = session.add_group(name, title, members, limit_s)
        backends = {part.partition(":")[2] for part in c10d.get_backend_config(made).split(",")}
        made.watchdog_monitor.completes_on_host = backends <= _HOST_BACKENDS
        made.watchdog_monitor.sizes_must_fit = "gloo" in backends
        made.watchdog_monitor.moved = getattr(made, "count_moved", None)
        made.watchdog_monitor.waits_in_slices = (
            session.state.limits.expects_losses and "gloo" in backends
        )
        if made.watchdog_monitor.remote_ranks and backends <= {
            "gloo",
            "shm",
        }:  # these connect all ranks by Gloo
            monitor = made.watchdog_monitor
            check = PreflightCheck(
                made, session.state, monitor.key, monitor.ranks, monitor.swaps, monitor.abandon
            )
            monitor.preflight = check
        session.groups[made] = made.watchdog_monitor
        return made

    def _destroying(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def destroy(group: Any = None) -> Any:
            session = self.session
            if session is None:
                return original(group)
            destroys_all = group is None or group == dist.GroupMember.WORLD
            known = session.state.error
            if (
                destroys_all
                and session.state.recorder.phase != "raised"
                and not session.is_interrupted
            ):
                session.cross_host.compare_at_exit()
            found = session.state.error is not known
            destroyed = list(session.groups) if destroys_all else [group]
            if any(map(_may_be_freed_by_ddp, destroyed)):
                time.sleep(_RELEASE_PAUSE_S)
            for each in destroyed:
                session.remove_group(each)
            if destroys_all:
                session.mark_groups_destroyed()
            try:
                return original(group)
            finally:
                if destroys_all:
                    self.end()
                if found:
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
    monitor = getattr(group, "watchdog_monitor", None)
    return monitor is not None and monitor.used_by_ddp and "gloo" in c10d.get_backend_config(group)


def _given_timeout(args: tuple[Any, ...], kw: dict[str, Any]) -> timedelta | None:
    return kw.get("timeout", next((each for each in args if isinstance(each, timedelta)), None))


def _limit_s(args: tuple[Any, ...], kw: dict[str, Any]) -> float:
    """Return the timeout in seconds that the user has set for a group; 0 if torch has filled in its
    default.
    """
    given = _given_timeout(args, kw)
    is_default = any(
        given is each for each in (c10d.default_pg_timeout, c10d.default_pg_nccl_timeout)
    )
    return 0.0 if given is None or is_default else float(given.total_seconds())


_CREATION_POLL_S = 1e-3


def _creation(
    session: Session | None,
    name: str,
    ranks: list[int],
    backend: Any,
    args: tuple[Any, ...],
    kw: dict[str, Any],
) -> AbstractContextManager[None]:
    """Return a context in which this rank makes the group `name` together with the other `ranks`.

    Args:
        session: None without a watchdog.
        name, ranks, backend: of the group.
        args, kw: the other arguments of c10d's function.
    """
    if session is None or session.state.rank not in ranks or len(ranks) < 2:
        return nullcontext()
    given = _given_timeout(args, kw)
    own_limit_s = math.inf if given is None else given.total_seconds()
    return _watched_creation(
        session, name, tuple(ranks), _connects_at_once(backend), own_limit_s, _limit_s(args, kw)
    )


@contextmanager
def _watched_creation(
    session: Session,
    name: str,
    ranks: tuple[int, ...],
    connects: bool,
    own_limit_s: float,
    limit_s: float,
) -> Iterator[None]:
    """Record that this rank makes a group.

    Args:
        session: of the watchdog.
        name, ranks: of the group.
        connects: whether the ranks wait for each other in its constructor, in C++, from which no
            error gets them: they wait here.
        own_limit_s: seconds after which the constructor gives up.
        limit_s: timeout in seconds that the user has set for the group; 0 for none.
    """
    state = session.state
    if not state.recorder.has_free_slot:
        yield
        return
    monitor = session.add_group(f"creation of {name}", name, ranks, limit_s)
    try:
        pending = monitor.enter("new_group", (str(list(ranks)),))
        with state.blocking(pending.number, ranks):
            deadline = time.monotonic() + own_limit_s
            while (
                connects and monitor.missing_ranks(pending.sequence) and time.monotonic() < deadline
            ):
                state.check()
                time.sleep(_CREATION_POLL_S)
            state.check()
            yield
        monitor.finish(pending, time.monotonic())
    finally:
        session.remove_monitor(monitor)


def _connects_at_once(backend: Any) -> bool:
    parts = {part.rpartition(":")[2] for part in str(backend).split(",")}
    return parts <= {"gloo", "shm"}


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
    failed = state.has_failed and environment.under_launcher()  # the worker itself says so
    return state.error is not None or failed or state.recorder.phase == "waits"


def _open_log(state: WatchdogState) -> RecordLog | None:
    folder = environment.timeline_dir()
    try:
        return RecordLog(folder, state.own) if folder is not None else None
    except OSError as error:
        state.write_message(f"rank {state.rank} does not record its timeline: {error}")
        return None


_watchdog: _Watchdog | None = None


def install(host_key: Callable[[], str], lasting: bool) -> None:
    """See `watchdog.install`."""
    global _watchdog
    if _watchdog is None and environment.watchdog_mode() != "off":
        _watchdog = _Watchdog(host_key, lasting)


def uninstall() -> None:
    """See `watchdog.uninstall`."""
    global _watchdog
    if _watchdog is not None:
        found = _watchdog
        _watchdog = None
        found.uninstall()


def report_exception(error: BaseException) -> None:
    """See `watchdog.report_exception`."""
    if _watchdog is not None and _watchdog.session is not None:
        record_exception(_watchdog.session.state, error)


def report_exit() -> None:
    """See `watchdog.report_exit`."""
    if _watchdog is not None and _watchdog.session is not None:
        record_exit(_watchdog.session.state)
    last_rank.note_end()


def interrupt(error: TransportError) -> None:
    """See `watchdog.interrupt`."""
    if _watchdog is not None and _watchdog.session is not None:
        _watchdog.session.interrupt(error)


def unfinished_works() -> list[Any]:
    """See `watchdog.unfinished_works`."""
    if _watchdog is None or _watchdog.session is None:
        return []
    return [
        work for monitor in list(_watchdog.session.monitors) for work in monitor.unfinished_works()
    ]


def exclude_group(group: Any) -> None:
    """See `watchdog.exclude_group`."""
    if _watchdog is not None and _watchdog.session is not None:
        _watchdog.session.exclude_group(group)


def watch_rounds(
    group: Any, purpose: Callable[[], str], warning_s: float, stall_s: float, setting: str
) -> Rounds | None:
    """See `watchdog.watch_rounds`."""
    if _watchdog is None or _watchdog.session is None:
        return None
    return _watchdog.session.watch_rounds(group, purpose, warning_s, stall_s, setting)


@contextmanager
def watch_wait(group: Any, operation: str) -> Iterator[Callable[[], None]]:
    """See `watchdog.watch_wait`."""
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
