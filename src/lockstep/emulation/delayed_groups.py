"""Process groups over Gloo whose operations end when they would on the emulated network, and their
installation.
"""

# torch's stubs lack some of the names of torch.distributed
# mypy: disable-error-code="attr-defined,misc"

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from .. import environment
from ..environment.variable_table import NETWORK
from ..errors import LockstepError, TransportError
from ..network import VirtualNetwork, parse_network
from ..system.patching import Replaced
from ..transports.runtime import virtual_host
from ..transports.runtime.backoff import Steps
from ..transports.runtime.c10d import Store
from ..watchdog.process_groups import GroupProxy, OuterWork, replace_group
from ..watchdog.signatures import OPERATIONS
from .link_clock import GroupClock, LinkClock
from .message_schedules import ROUNDS
from .virtual_time import AwakeCore, OperationTime, VirtualTime, prefer_long_slices

# a poll sleeps for the rest of a wait that is shorter, as those who poll may sleep for 1 ms
_NEAR_S = 2e-3
_POLL_S = 50e-6
_CHECK_S = 0.05


class DelayedWork(OuterWork):
    """The `Work` of an operation that ends when both the real one and the emulated one have.

    Args:
        inner: of the real operation.
        done_at: returns the virtual time at which the emulated one ends, None as long as it is not
            known; infinity if it never ends.
        clock: of the job.
        limit: seconds that a wait may take.
    """

    def __init__(
        self, inner: Any, done_at: Callable[[], float | None], clock: LinkClock, limit: float
    ) -> None:
        super().__init__(inner)
        self._done_at = done_at
        self._clock = clock
        self._limit = limit
        self._began = time.monotonic()
        self._caller = threading.get_ident()
        self._has_ended = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the operation has ended.

        Raises:
            TransportError: a message was sent over a link that is lost, and the time limit is over.
            RuntimeError: as the real operation.
        """
        self._clock.virtual.begin_wait()
        answer, done = self._wait(timeout)
        self._end(done)
        return answer

    def _wait(self, timeout: timedelta | None = None) -> tuple[bool, float]:
        """Wait in real time; return what the real operation's `wait` has, and when the emulated one
        ended.
        """
        limit = timeout.total_seconds() if timeout else self._limit
        answer = bool(self.inner.wait(timeout) if timeout else self.inner.wait())
        while (done := self._done_at()) is None or done - time.monotonic() > _NEAR_S:
            if time.monotonic() > self._began + limit:
                raise TransportError(
                    "emulated network: "
                    + ("a link is lost" if done is not None else "a rank has not called it")
                    + f": no message has arrived for {limit:.3g} s"
                )
            time.sleep(
                _POLL_S if done is None else min(_CHECK_S, done - time.monotonic() - _NEAR_S / 2)
            )
        self._clock.virtual.sleep_until(done)
        return answer, done

    def is_completed(self) -> bool:
        """Return whether the operation has ended; sleeps if it is about to."""
        self._clock.virtual.poll()
        if not self.inner.is_completed():
            return False
        done = self._done_at()
        if done is None:
            return self._has_failed()
        if done - time.monotonic() > _NEAR_S:
            return False
        self._clock.virtual.sleep_until(done)
        self._end(done)
        return True

    def _end(self, done: float) -> None:
        """Go on after the operation, which has ended at `done`."""
        self._clock.virtual.end_wait(done)
        if not self._has_ended:
            self._has_ended = True
            self._clock.note_wait()

    def _has_failed(self) -> bool:
        """Return whether the real operation, which has ended, has failed, so that the emulated one
        never ends.

        It may have ended well on this rank before another one has called it.
        """
        if time.monotonic() < self._began + _CHECK_S:
            return False
        try:
            self.inner.wait()  # returns at once
        except RuntimeError:
            return True
        return False

    def is_success(self) -> bool:
        """Return whether the operation has ended without an error."""
        return bool(self.is_completed() and self.inner.is_success())

    def synchronize(self) -> None:
        """Wait."""
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future with the result, which a thread sets when the operation has ended."""
        inner = self.inner.get_future()
        future: torch.futures.Future[Any] = torch.futures.Future()

        def finish() -> None:
            try:
                _, done = self._wait()
                value = inner.wait()
                self._clock.virtual.release(self._caller, done)
                future.set_result(value)
            except Exception as error:
                future.set_exception(error)

        threading.Thread(target=finish, name="lockstep-network", daemon=True).start()
        return future


class _AllOf:
    """Several works of one operation as one, whose first is the operation's own."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        answers = [bool(work.wait(timeout) if timeout else work.wait()) for work in self._works]
        return all(answers)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._works[0], name)


_STAMP_TAG = 1 << 30  # beside the message of a tag travels the time of its arrival


class Delays:
    """Starts operations of a group over Gloo, which end when they would on the emulated network.

    Args:
        group: of c10d, over Gloo.
        clock: of this group.
        timeout: limit of one operation.
    """

    def __init__(self, group: Any, clock: GroupClock, timeout: timedelta) -> None:
        self.group = group
        self.clock = clock
        self.timeout_s = timeout.total_seconds()

    def collective(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Start the collective that c10d calls `name`."""
        operation = OPERATIONS[name][0]
        values = (*args, *kwargs.values())
        tensors = list(_tensors_in(_own_side(operation, values)))
        method = getattr(self.group, name)
        if operation not in ROUNDS or any(tensor.device.type != "cpu" for tensor in tensors):
            return method(*args, **kwargs)
        number = self.clock.call()
        size = float(sum(map(_nbytes, tensors)))
        root = next(
            (int(argument.rootRank) for argument in values if hasattr(argument, "rootRank")), 0
        )
        self.clock.arrive(number, operation, size, root, self.clock.clock.virtual.now())
        work = method(*args, **kwargs)
        if work is None:
            raise LockstepError(
                f"emulated network: {operation} within a batch of coalesced calls is not emulated"
            )
        self.clock.clock.virtual.skip()
        return DelayedWork(
            work, lambda: self.clock.done_at(number), self.clock.clock, self.timeout_s
        )

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> Any:
        """Start to send a message, and the time at which it will arrive."""
        now = self.clock.clock.virtual.now()
        left, arrives = self._send_times(peer, float(sum(map(_nbytes, tensors))), now)
        stamp = torch.tensor([arrives], dtype=torch.float64)
        works = [
            self.group.send(tensors, peer, tag),
            self.group.send([stamp], peer, tag | _STAMP_TAG),
        ]
        return DelayedWork(_AllOf(works), lambda: left, self.clock.clock, self.timeout_s)

    def _send_times(self, peer: int, size: float, now: float) -> tuple[float, float]:
        here = self.clock.host_of(self.group.rank())
        there = self.clock.host_of(peer)
        if here == there:
            return now, now
        with self.clock.clock.cards() as cards:
            cards.forget(now)
            return cards.send(here, there, size, now)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> Any:
        """Start to receive a message, and the time at which it arrives."""
        stamp = torch.zeros(1, dtype=torch.float64)
        works = [
            self.group.recv(tensors, peer, tag),
            self.group.recv([stamp], peer, tag | _STAMP_TAG),
        ]
        return DelayedWork(_AllOf(works), stamp.item, self.clock.clock, self.timeout_s)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> Any:
        """Start to receive a message from any rank; the time of its arrival is received once its
        source is known.
        """
        work = self.group.recv_anysource(tensors, tag)
        known: list[float] = []

        def done_at() -> float | None:
            if not known:
                stamp = torch.zeros(1, dtype=torch.float64)
                self.group.recv([stamp], work._source_rank(), tag | _STAMP_TAG).wait()
                known.append(stamp.item())
            return known[0]

        return DelayedWork(work, done_at, self.clock.clock, self.timeout_s)


def _own_side(operation: str, values: tuple[Any, ...]) -> Any:
    """Return the tensors among a call's arguments by whose bytes its messages are counted."""
    if operation == "barrier":
        return ()
    second = (
        "all_gather",
        "all_gather_into_tensor",
        "gather",
        "reduce_scatter",
        "reduce_scatter_tensor",
    )
    return values[1] if operation in (*second, "all_to_all", "all_to_all_single") else values[0]


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors_in(part)


def _nbytes(tensor: torch.Tensor) -> int:
    if tensor.layout is torch.strided:
        return tensor.nbytes
    return (
        tensor._nnz() * tensor.element_size() * (1 + tensor.dense_dim()) if tensor.is_sparse else 0
    )


class DelayedGroup:
    """A group over Gloo between virtual hosts, as the hierarchical transport uses it: not one of
    c10d's tables.
    """

    def __init__(self, delays: Delays) -> None:
        self._delays = delays

    def __getattr__(self, name: str) -> Any:
        delays = self.__dict__["_delays"]
        if name in OPERATIONS:
            return lambda *args, **kwargs: delays.collective(name, args, kwargs)
        return getattr(delays if name in _MESSAGES else delays.group, name)


_MESSAGES = ("send", "recv", "recv_anysource")


class EmulatedGroup(GroupProxy):
    """A process group of the backend "gloo" on virtual hosts.

    Args:
        group: c10d's own.
        delays: of its operations.
    """

    def __init__(self, group: Any, delays: Delays) -> None:
        super().__init__(group)
        self._delays = delays

    def allreduce_unwatched(self, tensors: Any, opts: Any) -> Any:
        """Do the same as `allreduce`, for a call of the watchdog itself."""
        return self._delays.collective("allreduce", (tensors, opts), {})


def _delayed(name: str) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if name in _MESSAGES:
            return getattr(self._delays, name)(*args, **kwargs)
        return self._delays.collective(name, args, kwargs)

    call.__name__ = name
    call.__doc__ = f"Start {name}, which ends when it would on the emulated network."
    return call


for _name in (*OPERATIONS, *_MESSAGES):
    if hasattr(dist.ProcessGroup, _name):
        setattr(EmulatedGroup, _name, _delayed(_name))


class Emulation(virtual_host.Host):
    """This process as a rank on a virtual host, until `undo`.

    Args:
        network: with its dilation resolved.
        folder: of the job, for the link clocks.
        host: this process's virtual host.
    """

    def __init__(self, network: VirtualNetwork, folder: Path, host: int) -> None:
        self.clock = LinkClock(folder, network)
        self.host = host
        self._groups: list[GroupClock] = []
        self._awake = AwakeCore()
        self._hook = Replaced(c10d, "_new_process_group_helper", self._making)
        virtual_host.enter(self)

    def undo(self) -> None:
        """Be on the real host again; groups that were made meanwhile cannot be used any more."""
        self.unhook()
        for group in self._groups:
            group.close()
        self.clock.close()
        self._awake.close()

    def unhook(self) -> None:
        """Undo what was replaced in torch and in the transports."""
        virtual_host.leave()
        self._hook.undo()

    def key(self, real: str) -> str:
        """Return the key of the virtual host."""
        return f"{real} virtual host {self.host}"

    def group_between_hosts(self, group: Any, store: Store, timeout: timedelta) -> Any:
        """Return the group with the delays of the emulated network."""
        return DelayedGroup(self._delays(group, store, timeout))

    def timed(self, queue: Any, steps: Steps) -> tuple[Steps, virtual_host.WorkTime | None]:
        """Return the steps in a virtual time of their own."""
        virtual = self.clock.virtual
        operation = OperationTime(virtual.now())
        return _timed(queue, steps, operation, virtual), _VirtualWorkTime(virtual, operation)

    def _delays(self, group: Any, store: Store, timeout: timedelta) -> Delays:
        name = store.compare_set("emulated network", "", secrets.token_hex(8)).decode()
        if not name.isalnum():  # it becomes part of a path
            raise TransportError(
                f"emulated network: expected a hexadecimal name of the group, got {name!r}"
            )
        self._groups.append(GroupClock(self.clock, name, group.rank(), group.size(), self.host))
        return Delays(group, self._groups[-1], timeout)

    def _making(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def make(*args: Any, **kw: Any) -> Any:
            group, store = original(*args, **kw)
            if type(group) is not dist.ProcessGroup or group.size() < 2:
                return group, store
            backends = c10d.get_backend_config(group).split(",")  # such as cpu:gloo
            if all(backend.partition(":")[2] != "gloo" for backend in backends):
                return group, store
            timeout = next(
                (argument for argument in (*args, *kw.values()) if isinstance(argument, timedelta)),
                None,
            )
            emulated = EmulatedGroup(
                group, self._delays(group, store, timeout or c10d.default_pg_timeout)
            )
            replace_group(group, emulated)
            return emulated, store

        return make


class _VirtualWorkTime:
    """The virtual time of an operation, which the calling thread queues."""

    def __init__(self, virtual: VirtualTime, operation: OperationTime) -> None:
        self._virtual = virtual
        self._operation = operation
        self._caller = threading.get_ident()

    def note_queued(self, work: Any) -> None:
        """Release the caller when the operation has ended."""
        self._virtual.skip()
        work.add_done_callback(lambda _: self._virtual.release(self._caller, self._operation.now))

    def begin_wait(self) -> None:
        """Stop the clock of this thread."""
        self._virtual.begin_wait()

    def end_wait(self) -> None:
        """Let this thread be as late as the operation."""
        self._virtual.end_wait(self._operation.now)


def _timed(queue: Any, steps: Steps, operation: OperationTime, virtual: VirtualTime) -> Steps:
    """Give the steps of an operation, done in its own time, which begins after those before it in
    the queue.
    """
    operation.wait_until(getattr(queue, "virtual_end", 0.0))
    try:
        while True:
            with virtual.within(operation):
                try:
                    step = next(steps)
                except StopIteration:
                    return
            yield step
    finally:
        queue.virtual_end = operation.now
        steps.close()


_emulation: Emulation | None = None


def install(network: VirtualNetwork, folder: Path, host: int) -> None:
    """Put this process on the virtual host `host`; groups that are made from now on are
    emulated.
    """
    global _emulation
    uninstall()
    _emulation = Emulation(network, folder, host)


def uninstall() -> None:
    """Undo `install`."""
    global _emulation
    if _emulation is not None:
        emulation = _emulation
        _emulation = None
        emulation.undo()


def install_from_environment() -> None:
    """Put this worker on the virtual host that its launcher's variables say, if they do.

    Its local rank, the number of workers on its host and so on become those on the virtual host.
    """
    settings = environment.emulated_network()
    if settings is None:
        return
    network = parse_network(settings[0], NETWORK.name)
    world = environment.find_world()
    host = network.host_of(world.rank, world.world_size)
    local_rank, local_size = network.place_of(world.rank, world.world_size)
    place = {"LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_size}
    place |= {"GROUP_RANK": host, "GROUP_WORLD_SIZE": network.hosts}
    environment.set_variables({name: str(value) for name, value in place.items()})
    prefer_long_slices()
    install(network, settings[1], host)


def _after_fork() -> None:
    global _emulation
    if _emulation is not None:  # a child is not a rank, and has none of the threads
        _emulation.unhook()
    _emulation = None


os.register_at_fork(after_in_child=_after_fork)
