"""What the launcher makes of a report on all ranks: who is blamed, and what it adds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from lockstep.errors import DesyncError, LockstepError, WorkerError
from lockstep.launchers import local
from lockstep.launchers.failure import Failure
from lockstep.launchers.folder import Report as Word
from lockstep.launchers.local import _conclude
from lockstep.launchers.options import Options, Watch
from lockstep.launchers.outcome import FORCED, Ending, conclude, echoes, first_failure
from lockstep.launchers.watching import Watching
from lockstep.recorder import Recorder, places
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


def test_ranks_that_their_watchers_have_ended_have_failed_all_the_same() -> None:
    """Threads kept all of them alive, so that none has said a word to the launcher."""
    for kind, expected in (("desync", "DesyncError"), ("lost", "RankLostError"), ("stall", "StallError")):
        report = replace(DIED, kind=kind, culprits=(), ranks=(RankRow(4, "waits"), RankRow(5, "waits")))
        error, told = raised(Ending([], [], {0: FORCED, 1: FORCED}, workers=2, first_rank=4, joint=report))
        assert (error.rank, error.kind, error.reason, error.exit_code) == (4, expected, DIED.sentence, 1)
        assert told.sentence == DIED.sentence
        with pytest.raises(KeyboardInterrupt):  # they were ended because others had left on Ctrl-C
            conclude(Ending([], [], {0: FORCED, 1: FORCED}, signals=[2], workers=2, joint=report))
    own = replace(DIED, kind="raised", ranks=(RankRow(4, "runs"), RankRow(5, "raised", "ValueError: x", words="here")))
    error, _ = raised(Ending([], [], {0: FORCED, 1: FORCED}, workers=2, first_rank=4, joint=own))
    assert (error.rank, error.kind, error.reason, error.worker_traceback) == (5, "ValueError", "x", "here")
    unread = first_failure(Ending([], [], {1: FORCED}, workers=2))
    assert unread is not None and (unread.rank, unread.exit_code) == (1, FORCED)


def test_a_report_is_told_though_another_node_was_the_first_to_fail() -> None:
    why = "rank 5 on beta has failed"
    with pytest.raises(WorkerError, match="reason of 0") as caught:
        _conclude(Ending([word(0)], [], {0: 1}, workers=1, first_rank=4, joint=DIED), why)
    failure = Failure.of(caught.value, "alpha")
    assert failure.is_joint and from_json(failure.report).sentence == DIED.sentence
    for joint in (None, DIED):  # ended by the launcher, before it could say anything
        with pytest.raises(LockstepError, match=f"the run was ended: {why}"):
            _conclude(Ending([], [], {}, workers=1, first_rank=4, joint=joint), why)
    _conclude(Ending([], [], {}, workers=1), "")


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


def test_what_workers_find_in_their_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(places, "parent", lambda: tmp_path)
    monkeypatch.delenv("LOCKSTEP_WATCH", raising=False)

    def variables(options: Watch, debug_rank: int | None = None) -> dict[str, str]:
        watching = Watching("run", options, debug_rank, print)
        watching.begin(3, 0, 2)
        found = watching.variables()
        watching.close()
        assert found.pop("LOCKSTEP_WATCH_DIR").endswith("/run/attempt-3" if options.mode != "off" else "")
        return found

    assert variables(Watch()) == {}
    assert variables(Watch("off")) == {"LOCKSTEP_WATCH": "off"}
    assert variables(Watch(stall_timeout=3.0)) == {"LOCKSTEP_STALL_TIMEOUT": "3.0"}
    week = str(7 * 24 * 3600.0)
    assert variables(Watch(), 1) == {"LOCKSTEP_STALL_TIMEOUT": week, "LOCKSTEP_STALL_WARNING": week}
    monkeypatch.setenv("LOCKSTEP_WATCH", "off")
    assert not Watching("run", Watch(), None, print).is_on and Watching("run", Watch("strict"), None, print).is_on


FAILURES = [
    (Failure(2, "exit", "killed by SIGABRT", host="beta"), "lost", "Rank 2 on beta died: killed by SIGABRT."),
    (Failure(2, "SystemExit", "left with exit code 3", host="beta"), "left", "left with exit code 3"),
    (Failure(2, "ValueError", "two\nlines", "trace", host="beta"), "raised", "has raised ValueError: two."),
    (Failure(2, "DesyncError", "x", host="beta", report=DIED.to_json()), "lost", DIED.sentence),
]


@pytest.mark.parametrize(("failure", "kind", "said"), FAILURES)
def test_workers_are_told_how_those_of_another_node_have_failed(
    failure: Failure, kind: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "parent", lambda: tmp_path)
    monkeypatch.setattr(local, "ALONE_SECONDS", 0.0)
    (tmp_path / "run").mkdir()
    meeting = SimpleNamespace(heard=lambda: [failure])
    job = local.Job(tmp_path / "run", Options(2, 1), meeting, None)  # type: ignore[arg-type]
    job.begin(0, 0)
    assert job.watching.folder is not None
    recorder = Recorder(job.watching.folder, 0, 3, "alpha", "train.py")
    job.pass_on_failure()
    report = job.watching.report()
    assert report is not None and report.kind == kind and said in report.sentence
    if not failure.report:
        assert (report.ranks[0].rank, report.ranks[0].host, report.ranks[0].state) == (0, "alpha", "runs")
        assert (report.ranks[1].rank, report.ranks[1].words, report.culprits) == (2, failure.traceback, (2,))
    meeting.heard = lambda: [replace(failure, rank=1)]
    job.pass_on_failure()  # once
    job.watching.take(replace(failure, rank=1))  # the first report is that of all
    assert job.watching.report() == report
    recorder.close()
    job.watching.close()
