"""Watched process groups: every call of a collective is recorded and compared with the other
ranks'.
"""

# torch's stubs lack some of the names of torch.distributed
# mypy: disable-error-code="attr-defined,misc"

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ..errors import ConfigError
from .delivery import is_rejection
from .monitor import GroupMonitor
from .preflight import PendingCheck
from .shared_state import PendingCall
from .signatures import OPERATIONS

__all__ = ["GroupProxy", "OuterWork", "WatchedWork", "replace_group", "watch_group"]


class OuterWork(dist.Work):
    """A `Work` around another one, whose result and error it has.

    Args:
        inner: the other work.

    Attributes:
        inner: the other work.
    """

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def exception(self) -> BaseException | None:
        """Return the error of the operation, if it failed."""
        error: BaseException | None = self.inner.exception()
        return error

    def result(self) -> list[torch.Tensor]:
        """Return the output tensors."""
        tensors: list[torch.Tensor] = self.inner.result()
        return tensors

    def source_rank(self) -> int:
        """Return the source of the message of a receive from any rank."""
        rank: int = self.inner._source_rank()
        return rank

    _source_rank = source_rank


class WatchedWork(OuterWork):
    """A `Work` around the backend's own, whose errors say what has gone wrong.

    Args:
        inner: the backend's own work.
        monitor: of the group.
        pending: the operation.
        check: its pre-flight check, if there is one.
        device: of its tensors, in a group whose waits may return before an operation has completed;
            else None.
    """

    def __init__(
        self,
        inner: Any,
        monitor: GroupMonitor,
        pending: PendingCall,
        check: PendingCheck | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(inner)
        self._device = device
        # a step queries no device
        self._can_poll = monitor.completes_on_host or (device is not None and device.type == "cpu")
        self._monitor = monitor
        self._pending = pending
        self._check = check

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the operation has completed.

        Raises:
            DesyncError, RankLostError, StallError: it never will.
        """
        state = self._monitor.state
        if timeout:
            self._monitor.extend_limit(timeout.total_seconds())
        if state.error is None and self._can_poll and self.is_completed():
            answer = self._wait_for_completed()
        else:
            with state.blocking(
                self._pending.number, self._monitor.ranks, not self._pending.sequence
            ):
                if self._check is not None:
                    self._check.wait()
                answer = self.inner.wait(timeout) if timeout else self._wait_without_limit()
        self._monitor.finish_wait(self._pending, self.inner, self._device)
        return answer

    def _wait_without_limit(self) -> bool:
        waits = self._monitor.endable_waits
        if waits is None:
            return bool(self.inner.wait())
        if self._pending.sequence:
            return waits.wait(self.inner)
        return waits.wait_for_message(self.inner)

    def _wait_for_completed(self) -> bool:
        try:
            if self._check is not None:
                self._check.wait()
            answer: bool = self.inner.wait()
        except BaseException as error:
            self._monitor.state.raise_root_cause(error, self._monitor.ranks)
            raise
        return answer

    def block_current_stream(self) -> None:
        """Make the current stream wait for the operation; as `wait` on devices without streams."""
        self.inner.block_current_stream()

    def is_completed(self) -> bool:
        """Return whether the operation has completed or failed."""
        ended: bool = self.inner.is_completed() and (self._check is None or self._check.is_done())
        return ended

    def is_success(self) -> bool:
        """Return whether the operation has completed without an error."""
        well: bool = self.inner.is_success()
        return well

    def synchronize(self) -> None:
        """Wait as the backend does."""
        self.inner.synchronize()

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future with the result, or with the error of the operation."""
        future: torch.futures.Future[Any] = self.inner.get_future()
        if self._check is not None:
            future = self._check.guard(future)
        state = self._monitor.state
        if state.keeps_log and self._monitor.completes_on_host:
            recorder = state.recorder
            number = self._pending.number
            future.add_done_callback(lambda _: recorder.leave(number, time.monotonic()))
        return future


_MESSAGES = ("send", "recv", "recv_anysource")


def watch_group(group: Any) -> Any:
    """Return `group` with watched calls: the group itself if it is written in Python, otherwise a
    proxy of it.

    Its `watchdog_monitor` is set by the caller. While that is None, nothing is recorded.
    """
    if type(group) is not dist.ProcessGroup:
        kind: Any = type(group)
        group.__class__ = _watched_class(kind)
        return group
    return _WatchedProxy(group)


@functools.cache
def _watched_class(kind: Any) -> Any:
    names = [name for name in (*OPERATIONS, *_MESSAGES) if hasattr(kind, name)]
    takes_op = getattr(kind, "takes_blocking_op", ())
    methods = {
        name: _watched_collective(name, getattr(kind, name), name in takes_op) for name in names
    }
    if hasattr(kind, "monitored_barrier"):
        methods["monitored_barrier"] = _watched_barrier(kind.monitored_barrier)
    if hasattr(kind, "_end_coalescing"):
        methods["_start_coalescing"] = _start_coalescing(kind._start_coalescing)
        methods["_end_coalescing"] = _end_coalescing(kind._end_coalescing)
    attributes = {
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
        "watchdog_monitor": None,
        **methods,
    }
    return type(kind.__name__, (kind,), attributes)


def _watched_collective(
    name: str, method: Callable[..., Any], takes_op: bool
) -> Callable[..., Any]:
    """Return a watched form of a method.

    Args:
        name: of the method.
        method: of the group's class.
        takes_op: whether a synchronous call is also given the hash of its reduce op, which is the
            last in its key, so that it is read once; see `ShmGroup.allreduce`.
    """
    if name in _MESSAGES:
        return _watched_message(name, method)
    operation, key_of = OPERATIONS[name]

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        monitor: GroupMonitor | None = self.watchdog_monitor
        thread = threading.get_ident()
        if monitor is None or thread in monitor.threads_inside:
            return method(self, *args, **kwargs)
        arguments = (
            (*args, *kwargs.values()) if kwargs else args
        )  # `barrier` gets its options by name
        try:
            key = key_of(*arguments)
        except (AttributeError, IndexError, TypeError, RuntimeError):  # the backend will reject it
            key = ()
        pending = monitor.enter(operation, key)
        device = None if monitor.completes_on_host else _device(arguments)
        try:
            is_async = arguments[-1].asyncOp
        except (AttributeError, IndexError):
            is_async = True
        if is_async:
            start = functools.partial(method, self, *args, **kwargs)
            return _start(monitor, pending, thread, start, device, arguments)
        # from here on what `_start` and `WatchdogState.blocking` do, inlined: this path has to be
        # short
        state = monitor.state
        recorder = state.recorder
        recorder.begin_wait(pending.number, pending.entered)
        monitor.threads_inside.add(thread)
        state.enter_wait(thread)
        try:
            if monitor.preflight is not None:
                start = functools.partial(method, self, *args, **kwargs)
                work = monitor.preflight.run(pending, start, operation)
            elif takes_op and key:
                work = method(self, *arguments, key[-1])
            else:
                work = method(self, *args, **kwargs)
            if work is not None:
                # also if it has failed by now, so that its root cause is raised
                if monitor.endable_waits is None:
                    work.wait()
                else:
                    monitor.endable_waits.wait(work)
        except BaseException as error:
            _failed(monitor, pending, error)
            raise
        finally:
            state.waiting_threads.discard(thread)
            monitor.threads_inside.discard(thread)
            now = time.monotonic()
            recorder.end_wait(now)
        if device is None:
            monitor.finish(pending, now)
        else:
            monitor.finish_wait(pending, work, device)
        return work

    return call


def _device(args: Any) -> torch.device | None:
    """Return the device of the first tensor."""
    for argument in args:
        if isinstance(argument, torch.Tensor):
            return argument.device
        device = _device(argument) if isinstance(argument, list | tuple) else None
        if device is not None:
            return device
    return None


def _start(
    monitor: GroupMonitor,
    pending: PendingCall,
    thread: int,
    method: Callable[[], Any],
    device: torch.device | None = None,
    arguments: Any = (),
) -> Any:
    """Make a call that returns a work at once; `arguments` are those of a collective."""
    monitor.threads_inside.add(thread)
    check = None
    try:
        if monitor.preflight is not None and pending.sequence:
            own_device = _device(arguments)
            can_wait = thread not in monitor.coalesced and (
                own_device is None or own_device.type == "cpu"
            )
            call = functools.partial(_call_in_any_thread, monitor, pending, method)
            work, check = monitor.preflight.start(pending, call, can_wait)
        else:
            work = method()
    except BaseException as error:
        _failed(monitor, pending, error)
        raise
    finally:
        monitor.threads_inside.discard(thread)
    if thread in monitor.coalesced:
        monitor.coalesced[thread].append(pending)
    if work is None:  # inside a coalesced batch
        return work
    if device is not None and monitor.state.captures.are_open:
        monitor.finish(pending, pending.entered)  # it runs when the graph is replayed
    else:
        pending.work = work
    return WatchedWork(work, monitor, pending, check, device)


def _call_in_any_thread(
    monitor: GroupMonitor, pending: PendingCall, method: Callable[[], Any]
) -> Any:
    """Start a collective, in the program's thread or in that in which its pre-flight check has
    ended.
    """
    thread = threading.get_ident()
    if thread in monitor.threads_inside:
        return method()
    monitor.threads_inside.add(thread)
    try:
        return method()
    except Exception as error:
        if is_rejection(error):
            monitor.cancel_call(pending)
        monitor.remove_pending(pending)
        raise
    finally:
        monitor.threads_inside.discard(thread)


def _failed(monitor: GroupMonitor, pending: PendingCall, error: BaseException) -> None:
    """Raise the root cause of an error; if that is the call itself, the program may continue
    without it.
    """
    if is_rejection(error):
        monitor.cancel_call(pending)
    monitor.state.raise_root_cause(error, monitor.ranks)
    monitor.remove_pending(pending)


def _watched_message(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        monitor: GroupMonitor | None = self.watchdog_monitor
        thread = threading.get_ident()
        from_any = name == "recv_anysource"
        if monitor is None or thread in monitor.threads_inside or kwargs:
            return method(self, *args, **kwargs)
        if not from_any and not 0 <= args[1] < len(monitor.ranks):  # Gloo would wait for ever
            raise ConfigError(
                "dst" if name == "send" else "src",
                f"a rank from 0 to {len(monitor.ranks) - 1}",
                args[1],
            )
        peer = -1 if from_any else monitor.ranks[args[1]]
        tag = args[2] if len(args) > 2 else 0
        if from_any:
            tag = args[1]
        pending = monitor.send_or_receive(name, args[0], peer, int(tag))
        device = None if monitor.completes_on_host or name == "send" else _device(args)
        return _start(monitor, pending, thread, functools.partial(method, self, *args), device)

    return call


def _watched_barrier(method: Callable[..., Any]) -> Callable[..., Any]:
    """Watch `monitored_barrier`, which keeps its own, shorter limit: no pre-flight check waits
    before it.
    """

    @functools.wraps(method)
    def call(self: Any, timeout: timedelta | None = None, *args: Any, **kwargs: Any) -> None:
        monitor: GroupMonitor | None = self.watchdog_monitor
        thread = threading.get_ident()
        if monitor is None or thread in monitor.threads_inside:
            method(self, timeout, *args, **kwargs)
            return
        if timeout is not None and timeout is not c10d.default_pg_timeout:
            monitor.extend_limit(timeout.total_seconds())
        pending = monitor.enter("monitored_barrier", ())
        monitor.threads_inside.add(thread)
        over: RuntimeError | None = None
        try:
            with monitor.state.blocking(pending.number, monitor.ranks):
                try:
                    method(self, timeout, *args, **kwargs)
                except RuntimeError as error:
                    waited_s = time.monotonic() - pending.entered
                    if (
                        timeout is None
                        or waited_s < timeout.total_seconds()
                        or monitor.state.error is not None
                    ):
                        raise
                    over = (
                        error  # the limit is the program's own, which may ask with it who is there
                    )
        except BaseException:
            monitor.remove_pending(pending)
            raise
        finally:
            monitor.threads_inside.discard(thread)
        if over is not None:
            monitor.cancel_call(pending)
            monitor.remove_pending(pending)
            raise over
        monitor.finish(pending, time.monotonic())

    return call


def _start_coalescing(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def start(self: Any, *args: Any, **kwargs: Any) -> None:
        method(self, *args, **kwargs)
        monitor = self.watchdog_monitor
        if monitor is not None:
            monitor.coalesced[threading.get_ident()] = []

    return start


def _end_coalescing(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def end(self: Any, *args: Any, **kwargs: Any) -> Any:
        monitor = self.watchdog_monitor
        calls = [] if monitor is None else monitor.coalesced.pop(threading.get_ident(), [])
        work = method(self, *args, **kwargs)
        return work if monitor is None or work is None else _CoalescedWork(work, monitor, calls)

    return end


class _CoalescedWork(WatchedWork):
    """The work of a coalesced batch; a wait for it is recorded as one for its first call, and all
    complete with it.
    """

    def __init__(self, inner: Any, monitor: GroupMonitor, calls: list[PendingCall]) -> None:
        super().__init__(inner, monitor, calls[0] if calls else PendingCall(0, 0, 0.0))
        self._calls = calls
        for pending in calls:
            pending.work = inner

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when all calls of the batch have completed, and note that they have.

        Raises:
            DesyncError, RankLostError, StallError: they never will.
        """
        answer = super().wait(timeout)
        now = time.monotonic()
        for pending in self._calls[1:]:
            self._monitor.finish(pending, now)
        return answer


class GroupProxy(dist.ProcessGroup):
    """A process group that forwards every call to another one.

    Args:
        group: one of c10d's own, written in C++.
    """

    def __init__(self, group: Any) -> None:
        # given a store, torch would not call this class's methods
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self._group = group
        self._set_default_backend(_backend_type(group))
        for device in group._device_types:
            self._register_backend(device, _backend_type(group), group._get_backend(device))
        self._set_group_name(group.group_name)
        self._set_group_desc(group.group_desc)
        if group.bound_device_id is not None:
            self.bound_device_id = group.bound_device_id

    def getBackendName(self) -> str:  # noqa: N802 - c10d's name
        """Return the name that `init_process_group` knows."""
        return str(self._group.name())

    def getGroupName(self) -> str:  # noqa: N802 - c10d's name
        """Return the name under which torch finds the group again."""
        return str(self._group.group_name)

    def getGroupDesc(self) -> str:  # noqa: N802 - c10d's name
        """Return the description that its creator has given it."""
        return str(self._group.group_desc)

    def coalesces(self, device: Any) -> bool:
        """Return whether concurrent messages on `device` have to be coalesced."""
        return bool(self._group._get_backend(device).supports_coalescing)

    def allreduce_unwatched(self, tensors: Any, opts: Any) -> Any:
        """Do the same as `allreduce`, for a call of the watchdog itself."""
        return self._group.allreduce(tensors, opts)

    def allreduce_beside(
        self, tensor: torch.Tensor, opts: Any, on_completion: Callable[[], object]
    ) -> Callable[[Any], Any]:
        """Start such an all-reduce right before a call that goes on at the same time.

        Args:
            tensor: this rank's words.
            opts: of the all-reduce.
            on_completion: called when the words of all are there, where the call may have to be
                ended before it is over.

        Returns:
            A function that is called with the work of the call, None if the call has failed, and
            returns that of the all-reduce; None if that has failed as well.
        """
        work = self.allreduce_unwatched([tensor], opts)
        return lambda _: work

    def __getattr__(self, name: str) -> Any:
        if name == "_group":
            raise AttributeError(name)
        return getattr(self._group, name)


def replace_group(group: Any, replacement: Any) -> None:
    """Put `replacement` in the place of `group` in torch's tables."""
    world = c10d._world
    # pg_flight_recorder_hooks is new in torch 2.15
    names = (
        "pg_map",
        "pg_names",
        "pg_group_ranks",
        "pg_backend_config",
        "pg_to_tag",
        "pg_flight_recorder_hooks",
    )
    for table in (getattr(world, name, {}) for name in names):
        if group in table:
            table[replacement] = table.pop(group)
    for groups in world.tags_to_pg.values():
        groups[:] = [replacement if member is group else member for member in groups]
    name = world.pg_names[replacement]
    c10d._unregister_process_group(name)
    c10d._register_process_group(name, replacement)


def _backend_type(group: Any) -> Any:
    name = str(group.name()).upper()
    return getattr(dist.ProcessGroup.BackendType, name, dist.ProcessGroup.BackendType.CUSTOM)


def _forward(name: str) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._group, name)(*args, **kwargs)

    call.__name__ = name
    call.__doc__ = f"Forward {name} to the group."
    return call


_OTHERS = (
    *("shutdown", "abort", "set_timeout", "get_group_store", "monitored_barrier"),
    *("_start_coalescing", "_end_coalescing"),
)

for _name in (*OPERATIONS, *_MESSAGES, *_OTHERS):
    if hasattr(dist.ProcessGroup, _name):
        setattr(GroupProxy, _name, _forward(_name))

_WatchedProxy: Any = _watched_class(GroupProxy)
