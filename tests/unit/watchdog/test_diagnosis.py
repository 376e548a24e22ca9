"""How long a monitor thread has observed something, and exceptions in words."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.watchdog.diagnosis import ObservationClock, exception_finding, missing_finding
from lockstep.watchdog.report import Finding, RankStatus
from lockstep.watchdog.states import DESTROYED_GROUPS, exception_line
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
    """A whole job may be stopped for an hour: none of its ranks is late or frozen because of
    that.
    """
    clock_of = ObservationClock()
    clock_of.observed_s("late")
    clock.pass_s(3600)
    assert clock_of.tick() == 3600
    assert clock_of.observed_s("late") <= 0.5


def test_the_first_line_of_an_exception() -> None:
    words = (
        'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\nValueError: '
        "one\n  two\nthree\n"
    )
    assert exception_line(words) == "ValueError: one"
    assert exception_line("") == ""


def found(row: RankStatus, where: str = "all_reduce(x) at a.py:9 in f", **details: Any) -> Finding:
    finding = missing_finding(row, where, **details)
    assert finding is not None
    assert finding.culprits == (row.rank,)
    return finding


def test_an_exit_while_others_are_in_a_method_of_lockstep_names_that() -> None:
    row = RankStatus(1, "ended")
    named = found(
        row, "Trainer.evaluate: sums of loss and metrics: all_reduce(x) at a.py:9 in f", batches=3
    )
    assert (
        named.cause.startswith("It did not call Trainer.evaluate")
        and "Call Trainer.evaluate" in named.advice
    )
    assert found(row, batches=3).cause.startswith("It had fewer batches")


@pytest.mark.parametrize(
    ("row", "process", "kind", "sentence"),
    [
        (RankStatus(1, "died"), "", "lost", "Rank 1 died while other ranks waited for it in {}."),
        (
            RankStatus(1, "died"),
            "process 7 on here",
            "lost",
            "Rank 1 died while other ranks waited for it in {}: its process 7 on here is gone.",
        ),
        (
            RankStatus(1, "died", host="b"),
            "",
            "lost",
            "Rank 1 on b died while other ranks waited for it in {}.",
        ),
        (
            RankStatus(1, "ended"),
            "",
            "left",
            "Rank 1 exited while other ranks waited for it in {}.",
        ),
        (
            RankStatus(1, "ended", DESTROYED_GROUPS, "b"),
            "",
            "left",
            "Rank 1 on b destroyed its process group while other ranks waited for it in {}.",
        ),
        (
            RankStatus(1, "frozen"),
            "process 7 on here",
            "frozen",
            "Rank 1 (process 7 on here) is stopped while other ranks wait for it in {}.",
        ),
        (
            RankStatus(1, "lost", host="b"),
            "",
            "lost",
            "Rank 1 on b and its host are unreachable while other ranks wait for it in {}.",
        ),
    ],
)
def test_a_rank_that_will_never_come_is_named_with_what_it_did(
    row: RankStatus, process: str, kind: str, sentence: str
) -> None:
    finding = found(row, "barrier() at a.py:9 in f", process=process)
    assert (finding.kind, finding.sentence) == (kind, sentence.format("barrier() at a.py:9 in f"))


@pytest.mark.parametrize("state", ["waits", "runs", "raised"])
def test_a_rank_that_may_still_come_is_no_finding(state: str) -> None:
    assert missing_finding(RankStatus(1, state), "barrier()") is None


def test_a_breakpoint_without_a_terminal_names_the_option_that_gives_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def raised(note: str) -> Finding:
        finding = exception_finding([RankStatus(0, "waits"), RankStatus(1, "raised", note)])
        assert finding is not None
        return finding

    finding = raised("bdb.BdbQuit")
    assert finding.sentence == "Rank 1 raised bdb.BdbQuit."
    assert "no terminal" in finding.cause and "`lockstep run --debug-rank 1 ...`" in finding.advice
    assert "--debug-rank" not in raised("ValueError: x").advice
    monkeypatch.setenv("LOCKSTEP_DEBUG_RANK", "1")  # the user has left the debugger
    assert "--debug-rank" not in raised("bdb.BdbQuit").advice
    assert exception_finding([RankStatus(0, "waits")]) is None
