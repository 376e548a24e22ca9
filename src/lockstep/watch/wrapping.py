"""Process groups whose every call is recorded and compared, around or in place of those that torch has made."""

# torch's stubs lack some of the names of torch.distributed
# mypy: disable-error-code="attr-defined,misc"

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from .member import Member, Started
from .signs import KINDS, Key
from .work import WatchedWork

__all__ = ["AroundGroup", "watched"]

_MESSAGES = ("send", "recv", "recv_anysource")


def watched(group: Any) -> Any:
    """`group` with watched calls: itself if it is written in Python, otherwise one around it.

    Its member is still to be set: until then, and from when it is None again, nothing is recorded.
    """
    if type(group) is not dist.ProcessGroup:
        kind: Any = type(group)
        group.__class__ = _with_watched_calls(kind)
        return group
    return _Around(group)


@functools.cache
def _with_watched_calls(kind: Any) -> Any:
    names = [name for name in (*KINDS, *_MESSAGES) if hasattr(kind, name)]
    methods = {name: _watched(name, getattr(kind, name)) for name in names}
    if hasattr(kind, "_end_coalescing"):
        methods["_end_coalescing"] = _end_coalescing(kind._end_coalescing)
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, "__doc__": kind.__doc__, **methods})


def _watched(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    if name in _MESSAGES:
        return _message(name, method)
    operation, key_of = KINDS[name]

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        member: Member | None = self.__dict__.get("watch_member")
        thread = threading.get_ident()
        if member is None or thread in member.inside:
            return method(self, *args, **kwargs)
        args = (*args, *kwargs.values())  # `barrier` gets its options by name
        started = member.enter(operation, _key(key_of, args))
        opts = args[-1] if args else None
        if getattr(opts, "asyncOp", True):
            return _start(self, member, started, thread, method, args)
        return _carry_out(self, member, started, thread, method, args)

    return call


def _key(key_of: Callable[..., Key], args: tuple[Any, ...]) -> Key:
    try:
        return key_of(*args)
    except (AttributeError, IndexError, TypeError, RuntimeError):  # the backend will say what is wrong with them
        return ()


def _carry_out(
    group: Any, member: Member, started: Started, thread: int, method: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    """A call that returns when it is done."""
    session, recorder, inside = member.session, member.session.recorder, member.inside
    recorder.wait(started.number)
    inside.add(thread)
    session.begin(thread)  # not `session.blocking`: this is the way that has to be short
    try:
        work = method(group, *args)
        if work is not None and not work.is_completed():
            work.wait()
    except BaseException as error:
        _refused(member, started, error)
        session.explain(error)
        raise
    finally:
        session.inside.discard(thread)
        inside.discard(thread)
        now = recorder.run()
    member.leave(started, now)
    return work


def _start(
    group: Any, member: Member, started: Started, thread: int, method: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    """A call that returns at once."""
    member.inside.add(thread)
    try:
        work = method(group, *args)
    except BaseException as error:
        _refused(member, started, error)
        member.session.explain(error)
        raise
    finally:
        member.inside.discard(thread)
    if work is None:  # inside a batch that is started together
        return work
    started.work = work
    return WatchedWork(work, member, started)


def _refused(member: Member, started: Started, error: BaseException) -> None:
    if isinstance(error, ValueError | TypeError | NotImplementedError):
        member.take_back(started)


def _message(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        member: Member | None = self.__dict__.get("watch_member")
        thread = threading.get_ident()
        if member is None or thread in member.inside or kwargs:
            return method(self, *args, **kwargs)
        peer = member.ranks[args[1]] if name != "recv_anysource" else -1
        started = member.send_or_receive(name, args[0], peer)
        return _start(self, member, started, thread, method, args)

    return call


def _end_coalescing(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def end(self: Any, *args: Any, **kwargs: Any) -> Any:
        work, member = method(self, *args, **kwargs), self.__dict__.get("watch_member")
        return work if member is None or work is None else WatchedWork(work, member, Started(0, 0, 0.0))

    return end


class AroundGroup(dist.ProcessGroup):
    """A process group that hands every call to another one.

    Args:
        group: one of c10d's own.
    """

    def __init__(self, group: Any) -> None:
        # with a store, torch would not look for this class's methods
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self._group = group
        self._set_default_backend(_kind(group))
        for device in group._device_types:
            self._register_backend(device, _kind(group), group._get_backend(device))
        self._set_group_name(group.group_name)
        self._set_group_desc(group.group_desc)
        if group.bound_device_id is not None:
            self.bound_device_id = group.bound_device_id

    def getBackendName(self) -> str:  # noqa: N802 - c10d's name
        """The name that `init_process_group` knows."""
        return str(self._group.name())

    def getGroupName(self) -> str:  # noqa: N802 - c10d's name
        """The name under which torch finds the group again."""
        return str(self._group.group_name)

    def getGroupDesc(self) -> str:  # noqa: N802 - c10d's name
        """What the group is for, as its maker says."""
        return str(self._group.group_desc)

    def __getattr__(self, name: str) -> Any:
        if name == "_group":
            raise AttributeError(name)
        return getattr(self._group, name)


def _kind(group: Any) -> Any:
    name = str(group.name()).upper()
    return getattr(dist.ProcessGroup.BackendType, name, dist.ProcessGroup.BackendType.CUSTOM)


def _handing_on(name: str) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._group, name)(*args, **kwargs)

    call.__name__ = name
    call.__doc__ = f"{name} of the group around which this one is."
    return call


_OTHERS = ("shutdown", "abort", "set_timeout", "get_group_store", "monitored_barrier")

for _name in (*KINDS, *_MESSAGES, *_OTHERS):
    if hasattr(dist.ProcessGroup, _name):
        setattr(AroundGroup, _name, _handing_on(_name))

_Around: Any = _with_watched_calls(AroundGroup)
