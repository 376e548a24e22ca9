"""How long a monitor thread has observed something, and exceptions in words."""

from __future__ import annotations

import pytest

from lockstep.watchdog.diagnosis import ObservationClock, exception_finding, exception_line, exit_finding
from support.clock import Clock


def test_a_duration_counts_while_it_is_observed_in_every_tick(clock: Clock) -> None:
    clock_of = ObservationClock()
    for seconds in range(4):
        assert clock_of.observed_s("late") == pytest.approx(0.1 * seconds)
        clock.pass_s(0.1)
        assert clock_of.tick() == pytest.approx(0.1)
    clock_of.tick()  # not seen in this one
    clock_of.tick()
    assert clock_of.observed_s("late") == 0


def test_durations_stand_still_while_the_process_is_stopped(clock: Clock) -> None:
    """A whole job may be stopped for an hour: none of its ranks is late or frozen because of that."""
    clock_of = ObservationClock()
    clock_of.observed_s("late")
    clock.pass_s(3600)
    assert clock_of.tick() == 3600
    assert clock_of.observed_s("late") <= 0.5


def test_the_first_line_of_an_exception() -> None:
    words = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\nValueError: one\n  two\nthree\n'
    assert exception_line(words) == "ValueError: one"
    assert exception_line("") == ""


def test_an_exit_while_others_are_in_a_method_of_lockstep_names_that() -> None:
    found = exit_finding(1, "Trainer.evaluate: sums of loss and metrics: all_reduce(x) at a.py:9 in f", batches=3)
    assert found.cause.startswith("It did not call Trainer.evaluate") and "Call Trainer.evaluate" in found.advice
    assert exit_finding(1, "all_reduce(x) at a.py:9 in f", batches=3).cause.startswith("It had fewer batches")


def test_a_breakpoint_without_a_terminal_names_the_option_that_gives_one(monkeypatch: pytest.MonkeyPatch) -> None:
    found = exception_finding(1, "bdb.BdbQuit", "")
    assert found.sentence == "Rank 1 raised bdb.BdbQuit."
    assert "no terminal" in found.cause and "`lockstep run --debug-rank 1 ...`" in found.advice
    assert "--debug-rank" not in exception_finding(1, "ValueError: x", "").advice
    monkeypatch.setenv("LOCKSTEP_DEBUG_RANK", "1")  # the user has left the debugger
    assert "--debug-rank" not in exception_finding(1, "bdb.BdbQuit", "").advice
