"""The virtual time of a rank: how late it would be with a core of its own, however many ranks share
the cores here.

A thread's virtual time goes on by what it computes, times the dilation, and by what it waits for;
not by the time for which it was ready while other threads had its core. Messages are sent and
received in virtual time. A thread whose virtual time is ahead of real time sleeps before it sends.
So with a dilation that leaves this host room, real time follows the virtual one, and no rank is
late because of the others. Without dilation, virtual time is real time.

Threads that only move messages have no virtual time of their own: a real cluster's network cards
work beside the cores. An operation that is done in the background has one; it begins when it was
called, after those before it.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_SPIN_S = (
    1e-4  # a sleep without slack ends some 20 µs late, and up to 80 µs where the core has slept
)
_PR_SET_TIMERSLACK = 29
_thread = threading.local()


def sleep_until(when: float, spin_s: float = _SPIN_S) -> None:
    """Return at `when` (of `time.monotonic`), or a few microseconds later; the last `spin_s`
    seconds it spins.
    """
    if not getattr(_thread, "is_exact", False):
        _thread.is_exact = True
        if sys.platform == "linux":  # the kernel may be 50 µs late otherwise
            ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1)
    while (left := when - time.monotonic()) > 0:
        if left > spin_s:
            time.sleep(left - spin_s)


_SLICE_S = 0.05  # longer than what a rank computes between two messages, most often
_SCHED_SETATTR = {
    "x86_64": 314,
    "aarch64": 274,
}  # the number of the system call, for which libc has no function


def prefer_long_slices() -> None:
    """Ask the kernel to let the threads of this process keep a core for longer: changing costs them
    their caches.

    The length of a slice can be asked for since Linux 6.12; before, there is only the policy for
    batches.
    """
    if sys.platform != "linux":
        return
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    number = _SCHED_SETATTR.get(os.uname().machine)
    if number is not None:  # an older kernel ignores the slice
        niceness = os.getpriority(os.PRIO_PROCESS, 0)
        attributes = struct.pack(
            "=IIQiIQQQ", 48, os.SCHED_BATCH, 0, niceness, 0, round(_SLICE_S * 1e9), 0, 0
        )
        ctypes.CDLL(None).syscall(number, 0, attributes, 0)


_SPINS_BY_S = 0.01


class AwakeCore:
    """A thread that spins whenever a core has nothing else to do, until `close`.

    Ranks that are ahead of their virtual time sleep. A core that has slept computes more slowly for
    a while: its clock is low, and another virtual machine has had its caches. (Steps of LeNet took
    a quarter longer.)
    """

    def __init__(self) -> None:
        self._lock = ctypes.c_int()
        self._libc = ctypes.CDLL(None)
        self._thread: threading.Thread | None = None
        if sys.platform == "linux" and hasattr(self._libc, "pthread_spin_lock"):
            self._libc.pthread_spin_init(ctypes.byref(self._lock), 0)
            self._libc.pthread_spin_lock(ctypes.byref(self._lock))
            self._thread = threading.Thread(
                target=self._spin, name="lockstep awake core", daemon=True
            )
            self._thread.start()
            # who is idle must not hold Python's lock, which it has given back by then
            time.sleep(_SPINS_BY_S)
            self._schedule(os.SCHED_IDLE)

    def _spin(self) -> None:
        self._libc.pthread_spin_lock(ctypes.byref(self._lock))

    def _schedule(self, policy: int) -> None:
        assert self._thread is not None and self._thread.native_id is not None
        with suppress(OSError):
            os.sched_setscheduler(self._thread.native_id, policy, os.sched_param(0))

    def close(self) -> None:
        """End it."""
        if self._thread is not None:
            self._schedule(os.SCHED_OTHER)
            self._libc.pthread_spin_unlock(ctypes.byref(self._lock))
            self._thread = None


class _ThreadTime:
    """The virtual time of one thread.

    Args:
        thread: of this process; it is running.
        dilation: see `VirtualTime`.

    Attributes:
        now: the virtual time, on the scale of `time.monotonic`.
        lock: to be held around every method.
    """

    def __init__(self, thread: threading.Thread, dilation: float) -> None:
        assert thread.ident is not None and thread.native_id is not None
        self._dilation = dilation
        self._cpu_clock = (
            time.pthread_getcpuclockid(thread.ident) if sys.platform == "linux" else -1
        )
        self._delays, self._state = (
            _open_status(thread.native_id, name) for name in ("schedstat", "stat")
        )
        self.lock = threading.Lock()
        self.now = time.monotonic()
        self._last = self._read()

    def _read(self) -> tuple[float, float, float]:
        """Return the real time, and the seconds for which it has computed, and has been ready
        without a core.
        """
        computed = delayed = 0.0
        if sys.platform == "linux":
            computed = time.clock_gettime(self._cpu_clock)
        if self._delays >= 0:
            delayed = int(os.pread(self._delays, 64, 0).split()[1]) * 1e-9
        return time.monotonic(), computed, delayed

    def advance(self, at_least_s: float = 0.0, counts_waits: bool = True) -> float:
        """Add what has passed since the last call, and return the time.

        Args:
            at_least_s: less computing than this does not count, in seconds.
            counts_waits: whether to add the time for which the thread was blocked as well.
        """
        if self._dilation == 1:
            self.now = time.monotonic()
            return self.now
        last = self._last
        self._last = self._read()
        wall, computed, delayed = (new - old for new, old in zip(self._last, last, strict=True))
        computed = self._dilation * computed if computed >= at_least_s else 0.0
        if not counts_waits:
            self.now += computed
        elif self._delays >= 0:
            self.now += computed + max(0.0, wall - computed / self._dilation - delayed)
        else:  # the kernel does not tell waits from having no core
            self.now += max(computed, wall)
        return self.now

    def wait_until(self, when: float) -> None:
        """Note that it has waited until the virtual time `when`; what it did to wait does not
        count.
        """
        self.now = max(self.now, when)
        self._last = self._read()

    def is_blocked(self) -> bool:
        """Return whether the thread waits for something; False if it has ended."""
        if self._state < 0:
            return True
        try:
            return os.pread(self._state, 512, 0).rpartition(b")")[2].split()[0] == b"S"
        except OSError:
            return False

    def close(self) -> None:
        """Close the descriptors; it must not be used any more."""
        for descriptor in (self._delays, self._state):
            if descriptor >= 0:
                os.close(descriptor)


def _open_status(thread: int, name: str) -> int:
    """Return a descriptor of one of Linux's files about a thread of this process; -1 where there
    are none.
    """
    try:
        return os.open(f"/proc/self/task/{thread}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


class OperationTime:
    """The virtual time of an operation that is done in the background, by whichever thread has
    time.

    Args:
        now: when it was called.
    """

    def __init__(self, now: float) -> None:
        self.now = now
        self.lock = threading.Lock()

    def advance(self, at_least_s: float = 0.0, counts_waits: bool = True) -> float:
        """Return the time; what threads do for the operation does not count."""
        return self.now

    def wait_until(self, when: float) -> None:
        """Note that it has waited until `when`."""
        self.now = max(self.now, when)


_POLLING_S = 2e-4  # of computing between two polls: less than this is the polling itself


class VirtualTime:
    """The virtual times of the threads of this process that communicate, on the scale of
    `time.monotonic`.

    Args:
        dilation: how many times slower than real time it is.

    Attributes:
        behind_s: by how many seconds real time is behind since the last wait; without dilation,
            where virtual time does not catch up, by how many all waits were longer than they should
            have been.
    """

    def __init__(self, dilation: float) -> None:
        self._dilation = dilation
        self._threads: dict[int, _ThreadTime] = {}
        self._local = threading.local()
        self.behind_s = 0.0

    def _own(self) -> _ThreadTime | OperationTime:
        operation: OperationTime | None = getattr(self._local, "operation", None)
        if operation is not None:
            return operation
        thread_time: _ThreadTime | None = getattr(self._local, "thread", None)
        if thread_time is None:
            thread_time = self._local.thread = _ThreadTime(
                threading.current_thread(), self._dilation
            )
            ended = self._threads.get(threading.get_ident())
            self._threads[threading.get_ident()] = thread_time
            if ended is not None:
                ended.close()
        return thread_time

    def now(self) -> float:
        """Return the virtual time of the calling thread; if that is ahead of real time, sleep until
        then first.
        """
        current = self._own()
        with current.lock:
            now = current.advance()
            if now > time.monotonic():
                self.sleep_until(now)
                current.wait_until(now)
            return now

    def sleep_until(self, when: float) -> None:
        """Sleep until `when`, as exactly as the dilation needs; being late counts less the slower
        time passes.
        """
        sleep_until(when, _SPIN_S / self._dilation)

    def skip(self) -> None:
        """Leave out what the calling thread has done since the last call of any method: the
        emulation's own work.
        """
        current = self._own()
        with current.lock:
            current.wait_until(current.now)

    def begin_wait(self) -> None:
        """Note that the calling thread begins to wait, until `end_wait`."""
        current = self._own()
        with current.lock:
            current.advance()

    def poll(self) -> None:
        """Note that the calling thread has asked whether it still has to wait."""
        current = self._own()
        with current.lock:
            current.advance(_POLLING_S, counts_waits=False)

    def end_wait(self, when: float) -> None:
        """Note that the calling thread has waited until the virtual time `when`."""
        current = self._own()
        with current.lock:
            current.wait_until(when)
            behind_s = max(0.0, time.monotonic() - current.now)
            self.behind_s = behind_s + (self.behind_s if self._dilation == 1 else 0.0)

    def release(self, thread: int, when: float) -> None:
        """Note that what the thread `thread` waits for, if it does, has come at the virtual time
        `when`.
        """
        thread_time = self._threads.get(thread)
        if (
            thread_time is None
            or not thread_time.is_blocked()
            or not thread_time.lock.acquire(blocking=False)
        ):
            return  # who holds the lock is in one of the methods above, and does not wait for this
        try:
            thread_time.advance(counts_waits=False)
            thread_time.wait_until(when)
        finally:
            thread_time.lock.release()

    @contextmanager
    def within(self, operation: OperationTime) -> Iterator[None]:
        """Do the body for an operation, in its time instead of the thread's."""
        before = getattr(self._local, "operation", None)
        self._local.operation = operation
        try:
            yield
        finally:
            self._local.operation = before

    def close(self) -> None:
        """Forget all threads."""
        for thread_time in self._threads.values():
            thread_time.close()
        self._threads.clear()
        self._local = threading.local()
