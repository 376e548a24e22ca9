"""Virtual time goes on by computing and waiting, and not by the time for which other threads had
the core.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from lockstep.emulation import virtual_time
from lockstep.emulation.virtual_time import AwakeCore, OperationTime, VirtualTime, sleep_until

linux = pytest.mark.skipif(
    sys.platform != "linux", reason="the kernel does not tell how long a thread had no core"
)


def compute(seconds: float) -> None:
    """Have a core for so long."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


@contextmanager
def crowded_core() -> Iterator[None]:
    """This thread and another process share a core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        try:
            time.sleep(0.2)
            yield
        finally:
            other.kill()
            os.sched_setaffinity(0, before)


def test_a_sleep_never_ends_early() -> None:
    for seconds in (0.0, 1e-5, 2e-3):
        when = time.monotonic() + seconds
        sleep_until(when)
        assert time.monotonic() >= when


@linux
@pytest.mark.parametrize(
    ("dilation", "passed", "expected"),
    [
        (4.0, (0.5, 0.1, 0.3), 0.4 + 0.1),  # wall, computed, delayed: 0.1 s were waits
        (4.0, (0.4, 0.1, 0.3), 0.4),
        (1.5, (0.1, 0.1, 0.0), 0.15),
    ],
)
def test_computing_is_dilated_and_having_no_core_does_not_count(
    dilation: float, passed: tuple[float, ...], expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = iter(
        [(10.0, 2.0, 1.0), tuple(a + b for a, b in zip((10.0, 2.0, 1.0), passed, strict=True))]
    )
    monkeypatch.setattr(virtual_time._ThreadTime, "_read", lambda _: next(read))
    own = virtual_time._ThreadTime(threading.current_thread(), dilation)
    began = own.now
    assert own.advance() - began == pytest.approx(expected)
    own.close()


@linux
def test_other_processes_make_no_difference() -> None:
    with closing(VirtualTime(3.0)) as virtual, crowded_core():
        began = virtual.now()
        wall = time.monotonic()
        compute(0.05)
        virtual.begin_wait()
        virtual.end_wait(0.0)
        passed = virtual.now() - began
        assert time.monotonic() - wall >= 0.07, "the core was not shared"
    assert 0.15 <= passed < 0.18


def test_a_thread_that_is_ahead_sleeps_before_it_sends() -> None:
    with closing(VirtualTime(4.0)) as virtual:
        wall = time.monotonic()  # before the virtual time, so that what comes between counts
        began = virtual.now()
        compute(0.02)
        assert virtual.now() - began >= 0.08
        assert time.monotonic() - wall >= 0.08


def test_without_dilation_it_is_real_time() -> None:
    with closing(VirtualTime(1.0)) as virtual:
        before = time.monotonic()
        compute(0.01)
        assert before + 0.01 <= virtual.now() <= time.monotonic()


def test_polling_is_no_computing() -> None:
    with closing(VirtualTime(100.0)) as virtual:
        began = virtual.now()
        until = time.monotonic() + 0.05
        while time.monotonic() < until:
            virtual.poll()
        virtual.end_wait(began + 1e-3)
        virtual.poll()
        assert virtual._own().now - began < 1.0  # 100 times 0.05 s would be 5 s


@linux
def test_who_is_waited_for_takes_the_waiting_thread_along() -> None:
    with closing(VirtualTime(2.0)) as virtual:
        found: list[float] = []
        go_on, began = threading.Event(), threading.Event()

        def wait() -> None:
            virtual.now()
            began.set()
            go_on.wait()
            found.append(virtual.now())

        thread = threading.Thread(target=wait)
        thread.start()
        began.wait()
        assert thread.ident is not None
        deadline = time.monotonic() + 10
        while not virtual._threads[thread.ident].is_blocked() and time.monotonic() < deadline:
            time.sleep(0.001)
        later = time.monotonic() + 0.1
        virtual.release(thread.ident, later)
        go_on.set()
        thread.join()
        assert found[0] >= later
        own = virtual.now()
        virtual.release(
            threading.get_ident(), own + 100
        )  # this thread computes, and does not wait for it
        assert virtual.now() < own + 50


@linux
def test_a_thread_that_has_ended_waits_for_nothing() -> None:
    with closing(VirtualTime(2.0)) as virtual:
        thread = threading.Thread(target=virtual.now)
        thread.start()
        thread.join()
        assert thread.ident is not None
        deadline = time.monotonic() + 10
        while Path(f"/proc/self/task/{thread.native_id}").exists() and time.monotonic() < deadline:
            time.sleep(0.001)
        virtual.release(thread.ident, time.monotonic())


def test_an_operation_in_the_background_has_its_own_time() -> None:
    with closing(VirtualTime(50.0)) as virtual:
        operation = OperationTime(7.0)
        with virtual.within(operation):
            compute(0.01)
            assert virtual.now() == 7.0
            virtual.end_wait(9.0)
        assert operation.now == 9.0
        assert virtual.now() > 9.0


@linux
def test_an_awake_core_spins_and_ends() -> None:
    def spinning() -> list[str]:
        return [each.name for each in threading.enumerate() if each.name == "lockstep awake core"]

    awake = AwakeCore()
    assert len(spinning()) == 1
    awake.close()
    deadline = time.monotonic() + 30
    while spinning() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not spinning()
