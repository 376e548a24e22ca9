"""The pulse of a launcher: when it beats, who notices that it does not, and what is said then."""

from __future__ import annotations

import math
import os
import threading

import pytest

from lockstep.launcher import pulse
from lockstep.launcher.output import log_multiplexer
from lockstep.launcher.output.log_multiplexer import LogMultiplexer
from lockstep.launcher.pulse import (
    ELASTIC_LIMIT_S,
    Patience,
    Pulse,
    SilenceWatch,
    write_to_launcher,
)
from support.clock import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def look(watch: SilenceWatch, clock: Clock, seconds: float, value: int) -> tuple[int, int]:
    """Look at a pulse four times a second; returns how often it was due and over."""
    due = over = 0
    for _ in range(round(seconds * 4)):
        clock.pass_s(0.25)
        watch.tick()
        due += watch.is_due("a", value)
        over += watch.is_over("a", value)
    return due, over


def test_a_silence_is_said_once_and_is_over_at_the_limit(clock: Clock) -> None:
    watch = SilenceWatch(Patience(30.0, 120.0))
    assert look(watch, clock, 29, 1) == (0, 0)
    assert look(watch, clock, 2, 1) == (1, 0)
    assert look(watch, clock, 88, 1) == (0, 0)
    assert look(watch, clock, 2, 1)[1] > 0


def test_a_launcher_that_goes_on_in_time_is_as_before(clock: Clock) -> None:
    watch = SilenceWatch(Patience(30.0, 120.0))
    assert look(watch, clock, 100, 1) == (1, 0)
    assert look(watch, clock, 29, 2) == (0, 0)
    assert look(watch, clock, 2, 2) == (1, 0)


def test_time_in_which_the_observer_was_stopped_itself_does_not_count(clock: Clock) -> None:
    watch = SilenceWatch(Patience(30.0, 120.0))
    look(watch, clock, 1, 1)
    clock.pass_s(8 * 3600)
    assert look(watch, clock, 20, 1) == (0, 0)


def test_a_launcher_alone_is_waited_for_without_end_unless_a_limit_is_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("LOCKSTEP_LAUNCHER_TIMEOUT", "LOCKSTEP_HEARTBEAT_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    assert Patience.of(several_hosts=False) == Patience(30.0, math.inf)
    assert Patience.of(several_hosts=True) == Patience(30.0, 120.0)
    assert Patience.of(True, ELASTIC_LIMIT_S) == Patience(
        5.0, 10.0
    )  # who is dropped in vain joins again
    assert Patience.of(False, ELASTIC_LIMIT_S) == Patience(30.0, math.inf)
    monkeypatch.setenv("LOCKSTEP_LAUNCHER_TIMEOUT", "40")
    assert (
        Patience.of(several_hosts=False) == Patience.of(several_hosts=True) == Patience(20.0, 40.0)
    )
    assert Patience.of(True, ELASTIC_LIMIT_S) == Patience(20.0, 40.0)
    monkeypatch.setenv("LOCKSTEP_LAUNCHER_TIMEOUT", "inf")
    assert Patience.of(True, ELASTIC_LIMIT_S).limit_s == math.inf


def test_it_beats_while_the_loop_turns_or_waits_for_a_reader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pulse, "_BEAT_S", 0.01)
    blocked, beat = threading.Event(), threading.Event()
    with Pulse(beat.set, blocked.is_set) as sign:
        assert beat.wait(20.0)
        monkeypatch.setattr(pulse, "_TURN_S", -1.0)  # the loop hangs
        assert not sign.beats()
        blocked.set()
        beat.clear()
        assert beat.wait(20.0)
        assert sign.beats() and sign.longest_lapse_s < 20


def test_it_does_not_beat_while_the_loop_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[bool] = []
    looked_twice = threading.Event()

    def is_blocked() -> bool:
        looks.append(False)
        if len(looks) > 1:
            looked_twice.set()
        return False

    monkeypatch.setattr(pulse, "_BEAT_S", 0.01)
    monkeypatch.setattr(pulse, "_TURN_S", -1.0)
    with Pulse(lambda: pytest.fail("it beats"), is_blocked):
        assert looked_twice.wait(20.0)


def test_a_lapse_is_the_time_between_two_beats(clock: Clock) -> None:
    sign = Pulse(lambda: None)
    clock.pass_s(50)
    sign.turn()
    assert sign.longest_lapse_s == 50
    assert sign.take_lapse_s() == 50 and sign.take_lapse_s() == 0


def test_after_a_stop_it_beats_only_once_the_loop_has_turned(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop asks first whether the others are without this launcher."""
    beaten: list[float] = []
    sign = Pulse(lambda: beaten.append(clock.now))
    waits = iter([(0.5, False), (3.0, False), (0.5, False), (0.5, True), (0.5, False)])

    def wait(seconds: float) -> bool:
        passed, turns = next(waits, (0.0, False))
        clock.pass_s(passed)
        if turns:
            sign.turn()
        return passed == 0.0

    monkeypatch.setattr(sign._stopping, "wait", wait)
    sign._run()
    assert beaten == [1000.5, 1004.5, 1005.0]


def test_what_a_launcher_does_not_read_is_written_beside_it(
    capfd: pytest.CaptureFixture[str],
) -> None:
    write_to_launcher(os.getpid(), "it does not answer")
    assert "it does not answer\n" in capfd.readouterr().err


def test_a_launcher_whose_output_nobody_reads_is_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_multiplexer, "_BLOCKED_S", 0.0)
    out, end = os.pipe()
    multiplexer = LogMultiplexer((end, end), colours=False)
    assert not multiplexer.is_blocked
    thread = threading.Thread(target=multiplexer.write_message, args=("x" * (1 << 20),))
    thread.start()
    while not multiplexer.is_blocked:
        pass
    size = 0
    while size <= 1 << 20:
        size += len(os.read(out, 1 << 16))
    thread.join()
    assert not multiplexer.is_blocked
    os.close(out)
    os.close(end)
