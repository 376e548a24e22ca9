"""What the launcher makes of a report on all ranks: who is blamed, and what it adds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lockstep.errors import DesyncError, WorkerError
from lockstep.launchers.failure import Failure
from lockstep.launchers.folder import Report as Word
from lockstep.launchers.options import Watch
from lockstep.launchers.outcome import FORCED, Ending, conclude, echoes, first_failure
from lockstep.launchers.watching import Watching
from lockstep.watch.report import RankRow, Report, from_json

DIED = Report("lost", "Rank 5 has died.", (RankRow(4, "waits"), RankRow(5, "died", "gone"), RankRow(6, "runs")), (5,))


def word(rank: int, kind: str = "RankLostError", time: int = 1, **more: object) -> Word:
    """What the local `rank` says that has raised what the joint report says."""
    return replace(Word(rank, time, kind, f"reason of {rank}", f"trace of {rank}", is_joint=True), **more)  # type: ignore[arg-type]


def raised(ending: Ending) -> tuple[WorkerError, Report]:
    with pytest.raises(WorkerError) as caught:
        conclude(ending)
    return caught.value, from_json(caught.value.report_json)


def test_a_rank_that_died_is_blamed_and_its_end_is_told() -> None:
    codes = {0: 1, 1: -9, 2: FORCED}
    error, report = raised(Ending([word(0, time=0)], [1], codes, workers=3, first_rank=4, joint=DIED))
    assert (error.rank, error.kind, error.exit_code, error.others) == (5, "exit", 137, "")
    assert [row.note for row in report.ranks] == ["", "killed by SIGKILL (as the system does when memory runs out)", ""]


def test_a_rank_that_its_watcher_has_ended_is_not_blamed() -> None:
    error, _ = raised(Ending([word(0)], [2, 1], {0: 1, 1: 7, 2: FORCED}, workers=3, first_rank=4, joint=DIED))
    assert (error.rank, error.exit_code) == (5, 7)
    stalled = replace(DIED, kind="stall", culprits=())
    error, _ = raised(Ending([word(0)], [], {0: 1, 2: FORCED}, workers=3, first_rank=4, joint=stalled))
    assert (error.rank, error.kind) == (4, "RankLostError")


def test_of_several_that_died_silently_the_one_that_the_report_blames_is_named() -> None:
    error = first_failure(Ending([], [0, 1], {0: -6, 1: -9}, workers=3, first_rank=4, joint=DIED))
    assert error is not None and error.rank == 5


def test_the_traceback_of_the_one_that_failed_is_in_the_report() -> None:
    report = replace(
        DIED, kind="raised", ranks=(RankRow(4, "waits"), RankRow(5, "raised", "ValueError: x", words="old"))
    )
    own = Word(1, 9, "ValueError", "x", "the traceback")
    error, told = raised(Ending([word(0), own], [], {0: 1}, workers=2, first_rank=4, joint=report))
    assert (error.rank, error.kind) == (5, "ValueError")
    assert told.ranks[1].words == "the traceback"


def test_one_that_has_raised_and_waits_for_its_threads_is_known_from_the_report() -> None:
    row = RankRow(5, "raised", "ValueError: the: reason", words="the traceback")
    report = replace(DIED, kind="raised", ranks=(RankRow(4, "waits"), row))
    error, _ = raised(Ending([word(0)], [], {0: 1}, workers=2, first_rank=4, joint=report))
    assert (error.rank, error.kind, error.reason) == (5, "ValueError", "the: reason")
    assert error.worker_traceback == "the traceback"
    error, _ = raised(Ending([word(0)], [], {0: 1}, workers=1, first_rank=4, joint=report))
    assert (error.rank, error.kind) == (4, "RankLostError")  # the other machine's launcher speaks for its ranks


def test_one_that_was_ended_after_the_report_is_not_blamed() -> None:
    report = replace(DIED, kind="raised", ranks=(RankRow(4, "waits"), RankRow(5, "raised", "ValueError: x")))
    error, _ = raised(Ending([word(0)], [0, 1], {0: 1}, workers=2, first_rank=4, joint=report))
    assert (error.rank, error.kind) == (5, "ValueError")


def test_how_a_rank_left_too_soon_is_told() -> None:
    report = replace(DIED, kind="left", ranks=(RankRow(4, "waits"), RankRow(5, "ended", "too soon")))
    own = Word(1, 9, "SystemExit", "left with exit code 3", exit_code=3)
    error, told = raised(Ending([word(0), own], [], {1: 3}, workers=2, first_rank=4, joint=report))
    assert (error.rank, error.exit_code, told.ranks[1].note) == (5, 3, "left with exit code 3")


def test_where_all_say_what_the_report_says_the_culprit_speaks_for_all() -> None:
    report = Report("desync", "Parted.", (RankRow(0, "waits"), RankRow(1, "waits")), (1,))
    error, _ = raised(Ending([word(0), word(1, "DesyncError", 2)], [], {0: 1, 1: 1}, workers=2, joint=report))
    assert (error.rank, error.kind) == (1, "DesyncError")


def test_the_error_that_all_ranks_have_carries_the_report() -> None:
    from base64 import b64encode

    from lockstep.launchers.call import pack

    report = Report("desync", "Parted.", (RankRow(0, "waits"), RankRow(1, "waits")))
    packed = b64encode(pack(DesyncError("Parted.", report.to_json()))).decode()
    words = [word(rank, "DesyncError", reason="Parted.", packed=packed) for rank in range(2)]
    for said in (words, words[1:]):  # one may have come to its end meanwhile
        with pytest.raises(DesyncError, match=r"Parted\.") as caught:
            conclude(Ending(said, [], {}, workers=2, joint=report))
        assert from_json(caught.value.report_json) == report
        assert isinstance(caught.value.__cause__, WorkerError)


def test_after_a_signal_what_the_report_says_is_no_failure() -> None:
    with pytest.raises(KeyboardInterrupt):
        conclude(Ending([word(0)], [], {0: 1}, signals=[2], workers=2, joint=DIED))


def test_those_that_say_what_the_report_says_are_no_news() -> None:
    first = WorkerError(5, "exit", "")
    assert echoes(Ending([word(0), word(2, "ValueError", is_joint=False)], first_rank=4), first) == (
        "rank 6 failed after that with ValueError"
    )


def test_between_machines_a_failure_comes_before_what_others_say_of_it() -> None:
    echo = Failure(0, "RankLostError", "", host="a", time=1, report="{}", is_joint=True)
    cause = Failure(5, "exit", "killed", host="b", time=2)
    first = Failure.first([echo, cause])
    assert first == replace(cause, report="{}", others="")
    assert first.as_error().report_json == "{}"
    error = WorkerError(0, "RankLostError", "")
    assert not Failure.of(error).is_joint
    error.report_json = "{}"
    assert Failure.of(error).is_joint and Failure.of(error).report == "{}"


def test_what_workers_find_in_their_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCKSTEP_WATCH", raising=False)

    def variables(options: Watch, debug_rank: int | None = None) -> dict[str, str]:
        found = Watching("run", options, debug_rank, print).variables(3)
        assert found.pop("LOCKSTEP_WATCH_DIR").endswith("/run/attempt-3" if options.mode != "off" else "")
        return found

    assert variables(Watch()) == {}
    assert variables(Watch("off")) == {"LOCKSTEP_WATCH": "off"}
    assert variables(Watch(stall_timeout=3.0)) == {"LOCKSTEP_STALL_TIMEOUT": "3.0"}
    week = str(7 * 24 * 3600.0)
    assert variables(Watch(), 1) == {"LOCKSTEP_STALL_TIMEOUT": week, "LOCKSTEP_STALL_WARNING": week}
    monkeypatch.setenv("LOCKSTEP_WATCH", "off")
    assert not Watching("run", Watch(), None, print).is_on and Watching("run", Watch("strict"), None, print).is_on
