"""The monitor thread goes on, whatever fails in one of its checks."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lockstep.flight_recorder import CallSignature, FlightRecorder, RecorderReader, RecordLog
from lockstep.system.processes import ProcessStatus
from lockstep.watchdog import monitor_thread
from lockstep.watchdog.diagnosis import ObservationClock, why_held_up
from lockstep.watchdog.monitor_thread import MonitorThread
from lockstep.watchdog.report import Finding
from lockstep.watchdog.shared_state import Limits, PendingCall
from support.clock import Clock


def bare_thread(**state: Any) -> Any:
    found = MonitorThread.__new__(MonitorThread)
    written: list[str] = []
    found._state = cast("Any", SimpleNamespace(rank=0, write_message=written.append, **state))
    found._monitors = []
    found._rounds = {}
    found._stop, found._clock = threading.Event(), ObservationClock()
    return found, written


def test_a_full_disk_ends_the_log_and_not_the_watch(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path, 0, 1, "here", "program")
    with RecorderReader(recorder.path) as own:
        log = RecordLog(tmp_path, own)
        log._file.close()
        log._file._file = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115 - the log closes it
        recorder.enter(
            1, recorder.open_group(1), 1, CallSignature(1, "barrier()", 0), 0, 0, 0, 0, -1
        )
        recorder.leave(1, 1.0)
        thread_, said = bare_thread()
        thread_._log, thread_._thread = log, threading.current_thread()
        thread_._write_log()
        assert len(said) == 1
        assert "No space left" in said[0]
        thread_._write_log()
        assert len(said) == 1
        thread_._log = log
        thread_.stop()
    recorder.close()


def test_the_watchdog_continues_whatever_fails() -> None:
    """What fails is said once, and what does not fail is still looked at."""
    looks: list[str] = []
    found = Finding("left", "found")

    def failing(name: str, error: BaseException) -> Callable[..., Any]:
        def fail(*_: Any) -> Any:
            looks.append(name)
            raise error

        fail.__qualname__ = name
        return fail

    def fail(finding: Finding) -> None:
        looks.append(finding.sentence)
        if looks.count(finding.sentence) > 1:
            thread_._stop.set()
        raise MemoryError(finding.sentence)

    recorder = SimpleNamespace(
        pid=os.getpid(), phase="runs", record_heartbeat=failing("beat", SystemError("no"))
    )
    reap, first = failing("reap", RuntimeError("no")), failing("first", TypeError("no"))
    monitors = [SimpleNamespace(reap_completed=reap, first_pending=first, pending_receives=[])]
    state = {
        "recorder": recorder,
        "readers": {},
        "current_wait": lambda: None,
        "limits": SimpleNamespace(debugging=False),
        "health": SimpleNamespace(poll=failing("health", IndexError("no"))),
        "poll_report": failing("look", AttributeError("no")),
        "update_last_solo": failing("solo", NameError("no")),
        "fail": fail,
    }
    thread_, said = bare_thread(**state)
    thread_._monitors = monitors
    thread_._cross_host = SimpleNamespace(tick=failing("tick", ZeroDivisionError("no")))
    thread_._failures, thread_._reported, thread_._log = {}, set(), None
    vars(thread_)["_find_deadlock"] = lambda: found
    thread = threading.Thread(target=thread_._run)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert {"beat", "health", "look", "reap", "first", "tick", "found", "solo"} == set(looks)
    assert all(looks.count(name) == 2 for name in set(looks) - {"first"}), looks
    kinds = {text.rpartition("retried: ")[2].partition(":")[0] for text in said}
    words = (
        "SystemError RuntimeError TypeError IndexError AttributeError ZeroDivisionError "
        "MemoryError NameError"
    )
    assert kinds == set(words.split())
    assert len(said) == 9, said  # once for each part; two of them ask for the first collective


def test_a_momentary_failure_is_not_reported() -> None:
    thread_, said = bare_thread()
    thread_._failures, thread_._reported = {}, set()

    def fail() -> None:
        raise ValueError("memory of a rank that is ending")

    for _ in range(49):
        assert thread_._try(fail) is None
    assert not said
    thread_._try(fail)
    assert len(said) == 1


def straggler(
    activity: str, is_own: bool, waited: float, stack: tuple[str, ...], patch: pytest.MonkeyPatch
) -> str:
    """The warning of rank 1, which waits for rank 0; "" for none."""
    reader = SimpleNamespace(rank=0, phase="runs", activity=activity, activity_is_own=is_own)
    patch.setattr(monitor_thread, "why_held_up", lambda *_: "")
    patch.setattr(monitor_thread, "collect_stacks", lambda *_: {0: stack} if stack else {})
    limits = Limits(False, warning_s=5, stall_s=600, debugging=False)
    made, said = bare_thread(
        peers={0: reader},
        limits=limits,
        folder=None,
        seconds_since_solo=lambda waited: 0.0,
        health=SimpleNamespace(status=lambda rank: None),
    )
    made._state.rank, made._warned = 1, {}
    made._state.own_reader = None
    patch.setattr(monitor_thread, "describe_record", lambda *_: "all_gather(x) at a.py:3 in f")
    made._clock = SimpleNamespace(observed_s=lambda _: waited)
    monitor = SimpleNamespace(key=7, limits=limits, limit_s=0.0)
    assert made._check_stragglers(PendingCall(1, 1, 0.0), [0], (0, 1), monitor) is None
    return "".join(said)


def test_the_warning_of_a_straggler_names_its_callback(monkeypatch: pytest.MonkeyPatch) -> None:
    text = straggler(
        "the callback Mine.on_row",
        False,
        5.1,
        ("t.py:7 in f: x = {\u2026", "t.py:9 in g"),
        monkeypatch,
    )
    assert text.splitlines() == [
        "straggler: rank 0 has not reached all_gather(x) at a.py:3 in f for 5.1 s; rank 1 waits.",
        "  Rank 0 is in the callback Mine.on_row, at t.py:7 in f: x = {\u2026 < t.py:9 in g",
    ]
    assert straggler("", False, 5.1, (), monkeypatch).count("\n") == 0


def test_work_of_locksteps_own_is_no_straggler_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the first plot, for which matplotlib is imported."""
    assert straggler("the callback Curve.on_train_end", True, 29.0, (), monkeypatch) == ""
    assert "is in the callback Curve" in straggler(
        "the callback Curve.on_train_end", True, 31.0, (), monkeypatch
    )


class Held:
    """Rank 0's monitor thread, which waits in a collective that ranks 1 and 2 have called, too."""

    def __init__(self, patch: pytest.MonkeyPatch, clock: Clock, **limits: Any) -> None:
        self.states = {1: "S", 2: "S"}
        self.clock = clock
        readers = {rank: SimpleNamespace(rank=rank, pid=70 + rank, host="b") for rank in (1, 2)}
        self.found: list[Any] = []
        health = SimpleNamespace(
            is_stopped=lambda rank: self.states[rank] == "T",
            status=lambda rank: ProcessStatus(self.states[rank], 1, 1),
        )
        self.thread, self.said = bare_thread(
            peers=readers,
            limits=Limits(False, warning_s=5, stall_s=600, **{"debugging": False, **limits}),
            health=health,
            own_reader=None,
        )
        self.thread._warned = {}
        patch.setattr(monitor_thread, "describe_record", lambda *_: "all_gather(x) at a.py:3 in f")
        patch.setattr(monitor_thread, "why_held_up", self.why)
        self.silent = set[int]()

    def why(self, reader: Any, status: ProcessStatus) -> str:
        age = 9.0 if reader.rank in self.silent else 0.0
        alive = SimpleNamespace(
            pid=reader.pid, host=reader.host, floats=dict.fromkeys(range(99), self.clock.now - age)
        )
        return why_held_up(cast("Any", alive), status)

    def watch(self, seconds: float) -> None:
        monitor = SimpleNamespace(key=7, diagnose=lambda *args: self.found.append(args[1]))
        for _ in range(round(seconds / 0.1)):
            self.clock.pass_s(0.1)
            self.thread._clock.tick()
            self.thread._check_held_up(PendingCall(1, 1, 0.0), [1, 2], monitor)


def test_a_collective_that_takes_long_while_all_run_is_nobodys_fault(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    held = Held(monkeypatch, clock)
    held.watch(60)
    assert held.said == []


def test_a_rank_in_uninterruptible_sleep_is_named_and_not_ended(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    held = Held(monkeypatch, clock)
    held.states[2] = "D"
    held.watch(4)
    assert held.said == []
    held.watch(1.5)
    assert held.said == [
        "held up: ranks 0 and 1 have waited in all_gather(x) at a.py:3 in f for 5.0 s, though all "
        "have called it.\n  Rank 2 is in uninterruptible sleep (process 72 on b, state D: it waits "
        "for a disk, a network file system, swapped memory or a driver)"
    ]
    held.watch(20)
    assert len(held.said) == 1
    held.watch(6)  # after six times as long again
    assert len(held.said) == 2
    assert not any(held.found)


def test_a_process_that_waits_for_a_disk_now_and_then_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    held = Held(monkeypatch, clock)
    for _ in range(20):
        held.states[1] = "D"
        held.watch(0.5)
        held.states[1] = "R"
        held.watch(0.3)
    assert held.said == []


def test_a_rank_without_a_heartbeat_is_named(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """It is swapped out, or its control group is frozen."""
    held = Held(monkeypatch, clock)
    held.silent.add(1)
    held.watch(6)
    assert len(held.said) == 1
    assert "Rank 1 is without a heartbeat for 9.0 s (process 71 on b, state S)" in held.said[0]


def test_a_stopped_rank_is_reported_and_in_an_elastic_job_warned_about(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """`diagnose` makes an error of it, but where the launcher sees to stopped workers."""
    held = Held(monkeypatch, clock, expects_losses=True)
    held.states[2] = "T"
    held.watch(6)
    assert held.found[-1] == [2]
    assert len(held.said) == 1
    assert (
        "Rank 2 is stopped by a signal (process 72 on b, state T; `kill -CONT 72`" in held.said[0]
    )
    debugged = Held(monkeypatch, clock, debugging=True)
    debugged.states[2] = "T"
    debugged.watch(60)
    assert debugged.said == debugged.found == []
