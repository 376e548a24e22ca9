"""Process groups whose every call is recorded and compared, around or in place of those that torch has made."""

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

from ..errors import ConfigError
from .blame import is_refusal
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
        methods["_start_coalescing"] = _start_coalescing(kind._start_coalescing)
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
        given = (*args, *kwargs.values()) if kwargs else args  # `barrier` gets its options by name
        started = member.enter(operation, _key(key_of, given))
        opts = given[-1] if given else None
        device = None if member.ends_by_future else _device(given)
        if getattr(opts, "asyncOp", True):
            return _start(member, started, thread, functools.partial(method, self, *args, **kwargs), device)
        # from here on what `_start` and `Session.blocking` do: this is the way that has to be short
        session, recorder, inside = member.session, member.session.recorder, member.inside
        recorder.wait(started.number, started.entered)
        inside.add(thread)
        session.begin(thread)
        try:
            if member.agreement is not None:
                member.agreement.ask(started, at_once=True).check()
            work = method(self, *args, **kwargs)
            if work is not None:
                work.wait()  # one that has failed by now as well, so that its error is explained
        except BaseException as error:
            _failed(member, started, error)
            raise
        finally:
            session.inside.discard(thread)
            inside.discard(thread)
            now = recorder.run()
        if device is None:
            member.leave(started, now)
        else:
            member.waited(started, work, device)
        return work

    return call


def _device(args: Any) -> torch.device | None:
    """That of the first tensor."""
    for each in args:
        if isinstance(each, torch.Tensor):
            return each.device
        found = _device(each) if isinstance(each, list | tuple) else None
        if found is not None:
            return found
    return None


def _key(key_of: Callable[..., Key], args: tuple[Any, ...]) -> Key:
    try:
        return key_of(*args)
    except (AttributeError, IndexError, TypeError, RuntimeError):  # the backend will say what is wrong with them
        return ()


def _start(
    member: Member, started: Started, thread: int, method: Callable[[], Any], device: torch.device | None = None
) -> Any:
    """A call that returns at once."""
    member.inside.add(thread)
    asked = None
    try:
        if member.agreement is not None and started.sequence:
            asked = member.agreement.ask(started).check_later()
        work = method()
    except BaseException as error:
        _failed(member, started, error)
        raise
    finally:
        member.inside.discard(thread)
    if thread in member.batches:
        member.batches[thread].append(started)
    if work is None:  # inside a batch that is started together
        return work
    if device is not None and member.session.captures.are_open:
        member.leave(started, started.entered)  # it runs when the graph does
    else:
        started.work = work
    return WatchedWork(work, member, started, asked, device)


def _failed(member: Member, started: Started, error: BaseException) -> None:
    """Raise what an error comes from; if that is the call itself, the program may go on, and is not in it any more."""
    if is_refusal(error):
        member.take_back(started)
    member.session.explain(error, member.ranks)
    member.drop(started)


def _message(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        member: Member | None = self.__dict__.get("watch_member")
        thread = threading.get_ident()
        anybody = name == "recv_anysource"
        if member is None or thread in member.inside or kwargs:
            return method(self, *args, **kwargs)
        if not anybody and not 0 <= args[1] < len(member.ranks):  # at which Gloo would wait for ever
            raise ConfigError("dst" if name == "send" else "src", f"a rank from 0 to {len(member.ranks) - 1}", args[1])
        started = member.send_or_receive(name, args[0], -1 if anybody else member.ranks[args[1]])
        device = None if member.ends_by_future or name == "send" else _device(args)
        return _start(member, started, thread, functools.partial(method, self, *args), device)

    return call


def _start_coalescing(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def start(self: Any, *args: Any, **kwargs: Any) -> None:
        method(self, *args, **kwargs)
        member = self.__dict__.get("watch_member")
        if member is not None:
            member.batches[threading.get_ident()] = []

    return start


def _end_coalescing(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def end(self: Any, *args: Any, **kwargs: Any) -> Any:
        member = self.__dict__.get("watch_member")
        batch = [] if member is None else member.batches.pop(threading.get_ident(), [])
        work = method(self, *args, **kwargs)
        return work if member is None or work is None else _WatchedBatch(work, member, batch)

    return end


class _WatchedBatch(WatchedWork):
    """What was started as one; for the record, who waits for it waits for the first, and all end with it."""

    def __init__(self, inner: Any, member: Member, batch: list[Started]) -> None:
        super().__init__(inner, member, batch[0] if batch else Started(0, 0, 0.0))
        self._batch = batch
        for started in batch:
            started.work = inner

    def wait(self, timeout: timedelta | None = None) -> bool:
        """See `WatchedWork.wait`."""
        answer = super().wait(timeout)
        now = time.monotonic()
        for started in self._batch[1:]:
            self._member.leave(started, now)
        return answer


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

    def coalesces(self, device: Any) -> bool:
        """Whether messages on `device` that are to travel side by side have to be given to the group as one."""
        return bool(self._group._get_backend(device).supports_coalescing)

    def allreduce_unwatched(self, tensors: Any, opts: Any) -> Any:
        """As `allreduce`, for a call that is none of the program's."""
        return self._group.allreduce(tensors, opts)

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


_OTHERS = (
    *("shutdown", "abort", "set_timeout", "get_group_store", "monitored_barrier"),
    *("_start_coalescing", "_end_coalescing"),
)

for _name in (*KINDS, *_MESSAGES, *_OTHERS):
    if hasattr(dist.ProcessGroup, _name):
        setattr(AroundGroup, _name, _handing_on(_name))

_Around: Any = _with_watched_calls(AroundGroup)
