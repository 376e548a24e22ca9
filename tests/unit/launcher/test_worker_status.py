"""What the launcher makes of a report on all ranks: who is blamed, and what it adds."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from lockstep.errors import DesyncError, LockstepError, WorkerError
from lockstep.flight_recorder import FlightRecorder, layout
from lockstep.job.messages import Failure
from lockstep.launcher import fixed_host
from lockstep.launcher.coordinator import Round
from lockstep.launcher.fixed_host import FixedHost, _raise_failure
from lockstep.launcher.host_workers import HostSetup
from lockstep.launcher.links import OneHost
from lockstep.launcher.output.worker_output import FileOutput
from lockstep.launcher.pulse import Patience
from lockstep.launcher.supervisor import WatchdogFiles
from lockstep.launcher.worker_options import WatchdogOptions, WorkerOptions
from lockstep.launcher.worker_status import (
    FORCED_EXIT_CODE,
    WorkerResults,
    first_failure,
    later_failures,
    raise_failure,
)
from lockstep.watchdog.report import RankStatus, Report, from_json

DIED = Report(
    "lost",
    "Rank 5 has died.",
    (RankStatus(4, "waits"), RankStatus(5, "died", "gone"), RankStatus(6, "runs")),
    (5,),
)


def report_of(rank: int, kind: str = "RankLostError", time: int = 1, **more: object) -> Failure:
    """What the local `rank` says that has raised what the joint report says."""
    return replace(
        Failure(rank, time, kind, f"reason of {rank}", f"trace of {rank}", repeats_watchdog=True),
        **more,
    )  # type: ignore[arg-type]


def raised(results: WorkerResults) -> tuple[WorkerError, Report]:
    with pytest.raises(WorkerError) as caught:
        raise_failure(results)
    return caught.value, from_json(caught.value.report_json)


def test_a_rank_that_died_is_the_culprit_and_its_exit_is_reported() -> None:
    codes = {0: 1, 1: -9, 2: FORCED_EXIT_CODE}
    error, report = raised(
        WorkerResults(
            [report_of(0, time=0)], [1], codes, workers=3, first_rank=4, watchdog_report=DIED
        )
    )
    assert (error.rank, error.kind, error.exit_code, error.others) == (5, "exit", 137, "")
    assert [row.note for row in report.ranks] == [
        "",
        "killed by SIGKILL (as the kernel does when memory runs out)",
        "",
    ]


def test_a_rank_that_its_watchdog_has_ended_is_not_the_culprit() -> None:
    error, _ = raised(
        WorkerResults(
            [report_of(0)],
            [2, 1],
            {0: 1, 1: 7, 2: FORCED_EXIT_CODE},
            workers=3,
            first_rank=4,
            watchdog_report=DIED,
        )
    )
    assert (error.rank, error.exit_code) == (5, 7)
    stalled = replace(DIED, kind="stall", culprits=())
    error, _ = raised(
        WorkerResults(
            [report_of(0)],
            [],
            {0: 1, 2: FORCED_EXIT_CODE},
            workers=3,
            first_rank=4,
            watchdog_report=stalled,
        )
    )
    assert (error.rank, error.kind) == (4, "RankLostError")


def test_ranks_that_their_watchers_have_ended_have_failed_all_the_same() -> None:
    """Threads kept all of them alive, so that none has said a word to the launcher."""
    for kind, expected in (
        ("desync", "DesyncError"),
        ("lost", "RankLostError"),
        ("stall", "StallError"),
    ):
        report = replace(
            DIED, kind=kind, culprits=(), ranks=(RankStatus(4, "waits"), RankStatus(5, "waits"))
        )
        error, told = raised(
            WorkerResults(
                [],
                [],
                {0: FORCED_EXIT_CODE, 1: FORCED_EXIT_CODE},
                workers=2,
                first_rank=4,
                watchdog_report=report,
            )
        )
        assert (error.rank, error.kind, error.reason, error.exit_code) == (
            4,
            expected,
            DIED.sentence,
            1,
        )
        assert told.sentence == DIED.sentence
        with pytest.raises(KeyboardInterrupt):  # they were ended because others had left on Ctrl-C
            raise_failure(
                WorkerResults(
                    [],
                    [],
                    {0: FORCED_EXIT_CODE, 1: FORCED_EXIT_CODE},
                    signals=[2],
                    workers=2,
                    watchdog_report=report,
                )
            )
    own = replace(
        DIED,
        kind="raised",
        ranks=(RankStatus(4, "runs"), RankStatus(5, "raised", "ValueError: x", traceback="here")),
    )
    error, _ = raised(
        WorkerResults(
            [],
            [],
            {0: FORCED_EXIT_CODE, 1: FORCED_EXIT_CODE},
            workers=2,
            first_rank=4,
            watchdog_report=own,
        )
    )
    assert (error.rank, error.kind, error.reason, error.worker_traceback) == (
        5,
        "ValueError",
        "x",
        "here",
    )
    unread = first_failure(WorkerResults([], [], {1: FORCED_EXIT_CODE}, workers=2))
    assert unread is not None and (unread.rank, unread.exit_code) == (1, FORCED_EXIT_CODE)


def test_a_report_is_printed_though_another_node_was_the_first_to_fail() -> None:
    why = "rank 5 on beta has failed"
    with pytest.raises(WorkerError, match="reason of 0") as caught:
        _raise_failure(
            WorkerResults(
                [report_of(0)], [], {0: 1}, workers=1, first_rank=4, watchdog_report=DIED
            ),
            why,
        )
    failure = Failure.from_error(caught.value, "alpha")
    assert failure.repeats_watchdog and from_json(failure.report).sentence == DIED.sentence
    for joint in (None, DIED):  # ended by the launcher, before it could say anything
        with pytest.raises(LockstepError, match=f"the run was ended: {why}"):
            _raise_failure(
                WorkerResults([], [], {}, workers=1, first_rank=4, watchdog_report=joint), why
            )
    _raise_failure(WorkerResults([], [], {}, workers=1), "")


def test_of_several_that_died_silently_the_culprit_of_the_report_is_named() -> None:
    error = first_failure(
        WorkerResults([], [0, 1], {0: -6, 1: -9}, workers=3, first_rank=4, watchdog_report=DIED)
    )
    assert error is not None and error.rank == 5


def test_the_traceback_of_the_one_that_failed_is_in_the_report() -> None:
    report = replace(
        DIED,
        kind="raised",
        ranks=(RankStatus(4, "waits"), RankStatus(5, "raised", "ValueError: x", traceback="old")),
    )
    own = Failure(1, 9, "ValueError", "x", "the traceback")
    error, told = raised(
        WorkerResults(
            [report_of(0), own], [], {0: 1}, workers=2, first_rank=4, watchdog_report=report
        )
    )
    assert (error.rank, error.kind) == (5, "ValueError")
    assert told.ranks[1].traceback == "the traceback"


def test_one_that_has_raised_and_waits_for_its_threads_is_known_from_the_report() -> None:
    row = RankStatus(5, "raised", "ValueError: the: reason", traceback="the traceback")
    report = replace(DIED, kind="raised", ranks=(RankStatus(4, "waits"), row))
    error, _ = raised(
        WorkerResults([report_of(0)], [], {0: 1}, workers=2, first_rank=4, watchdog_report=report)
    )
    assert (error.rank, error.kind, error.reason) == (5, "ValueError", "the: reason")
    assert error.worker_traceback == "the traceback"
    error, _ = raised(
        WorkerResults([report_of(0)], [], {0: 1}, workers=1, first_rank=4, watchdog_report=report)
    )
    assert (error.rank, error.kind) == (
        4,
        "RankLostError",
    )  # the other host's launcher speaks for its ranks


@pytest.mark.parametrize("name", ["ValueError", "library.errors.ValueError"])
def test_all_lines_of_its_message_are_shown_though_the_report_has_only_the_first(name: str) -> None:
    text = (
        'ValueError: the reason\n\nTraceback ...\n    raise ValueError("the reason\\nin two '
        'lines")\n'
    )
    row = RankStatus(
        5, "raised", "ValueError: the reason", traceback=f"{text}{name}: the reason\nin two lines\n"
    )
    report = replace(DIED, kind="raised", ranks=(RankStatus(4, "waits"), row))
    error, _ = raised(
        WorkerResults([report_of(0)], [], {0: 1}, workers=2, first_rank=4, watchdog_report=report)
    )
    assert error.reason == "the reason\nin two lines"


def test_one_that_was_ended_after_the_report_is_not_the_culprit() -> None:
    report = replace(
        DIED,
        kind="raised",
        ranks=(RankStatus(4, "waits"), RankStatus(5, "raised", "ValueError: x")),
    )
    error, _ = raised(
        WorkerResults(
            [report_of(0)], [0, 1], {0: 1}, workers=2, first_rank=4, watchdog_report=report
        )
    )
    assert (error.rank, error.kind) == (5, "ValueError")


def test_the_report_names_how_a_rank_left_too_early() -> None:
    report = replace(
        DIED, kind="left", ranks=(RankStatus(4, "waits"), RankStatus(5, "ended", "too soon"))
    )
    own = Failure(1, 9, "SystemExit", "left with exit code 3", exit_code=3)
    error, told = raised(
        WorkerResults(
            [report_of(0), own], [], {1: 3}, workers=2, first_rank=4, watchdog_report=report
        )
    )
    assert (error.rank, error.exit_code, told.ranks[1].note) == (5, 3, "left with exit code 3")


def test_where_all_errors_repeat_the_report_the_culprits_is_shown() -> None:
    report = Report("desync", "Parted.", (RankStatus(0, "waits"), RankStatus(1, "waits")), (1,))
    error, _ = raised(
        WorkerResults(
            [report_of(0), report_of(1, "DesyncError", 2)],
            [],
            {0: 1, 1: 1},
            workers=2,
            watchdog_report=report,
        )
    )
    assert (error.rank, error.kind) == (1, "DesyncError")


def test_the_error_that_all_ranks_have_carries_the_report() -> None:
    from base64 import b64encode

    from lockstep.launcher.worker_status import pickle_by_value

    report = Report("desync", "Parted.", (RankStatus(0, "waits"), RankStatus(1, "waits")))
    packed = b64encode(pickle_by_value(DesyncError("Parted.", report.to_json()))).decode()
    words = [report_of(rank, "DesyncError", reason="Parted.", pickled=packed) for rank in range(2)]
    for said in (words, words[1:]):  # one may have come to its end meanwhile
        with pytest.raises(DesyncError, match=r"Parted\.") as caught:
            raise_failure(WorkerResults(said, [], {}, workers=2, watchdog_report=report))
        assert from_json(caught.value.report_json) == report
        assert isinstance(caught.value.__cause__, WorkerError)


def test_after_a_signal_what_the_report_names_is_no_failure() -> None:
    with pytest.raises(KeyboardInterrupt):
        raise_failure(
            WorkerResults([report_of(0)], [], {0: 1}, signals=[2], workers=2, watchdog_report=DIED)
        )


def test_errors_that_repeat_the_report_are_not_shown_again() -> None:
    first = WorkerError(5, "exit", "")
    assert later_failures(
        WorkerResults(
            [report_of(0), report_of(2, "ValueError", repeats_watchdog=False)], first_rank=4
        ),
        first,
    ) == ("rank 6 failed later with ValueError")


def test_between_hosts_a_failure_comes_before_the_reports_of_others_about_it() -> None:
    echo = Failure(0, 1, "RankLostError", "", host="a", report="{}", repeats_watchdog=True)
    cause = Failure(5, 2, "exit", "killed", host="b")
    first = Failure.earliest([echo, cause])
    assert first == replace(cause, report="{}", others="")
    assert first.as_error().report_json == "{}"
    error = WorkerError(0, "RankLostError", "")
    assert not Failure.from_error(error).repeats_watchdog
    error.report_json = "{}"
    assert Failure.from_error(error).repeats_watchdog and Failure.from_error(error).report == "{}"


def test_what_workers_find_in_their_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(layout, "parent", lambda: tmp_path)
    monkeypatch.delenv("LOCKSTEP_WATCHDOG", raising=False)

    def variables(options: WatchdogOptions, debug_rank: int | None = None) -> dict[str, str]:
        watchdog = WatchdogFiles("run", options, debug_rank, print)
        watchdog.start_attempt(3, 0, 2)
        found = watchdog.variables()
        watchdog.close()
        assert found.pop("LOCKSTEP_WATCHDOG_DIR").endswith(
            "/run/attempt-3" if options.mode != "off" else ""
        )
        return found

    assert variables(WatchdogOptions()) == {}
    assert variables(WatchdogOptions("off")) == {"LOCKSTEP_WATCHDOG": "off"}
    assert variables(WatchdogOptions(stall_timeout=3.0)) == {"LOCKSTEP_STALL_TIMEOUT": "3.0"}
    week = str(7 * 24 * 3600.0)
    assert variables(WatchdogOptions(), 1) == {
        "LOCKSTEP_STALL_TIMEOUT": week,
        "LOCKSTEP_STALL_WARNING": week,
    }
    monkeypatch.setenv("LOCKSTEP_WATCHDOG", "off")
    assert (
        not WatchdogFiles("run", WatchdogOptions(), None, print).is_enabled
        and WatchdogFiles("run", WatchdogOptions("strict"), None, print).is_enabled
    )


FAILURES = [
    (
        Failure(2, 0, "exit", "killed by SIGABRT", host="beta"),
        "lost",
        "Rank 2 on beta died: killed by SIGABRT.",
    ),
    (
        Failure(2, 0, "SystemExit", "left with exit code 3", host="beta"),
        "left",
        "left with exit code 3",
    ),
    (
        Failure(2, 0, "ValueError", "two\nlines", "trace", host="beta"),
        "raised",
        "raised ValueError: two.",
    ),
    (Failure(2, 0, "DesyncError", "x", host="beta", report=DIED.to_json()), "lost", DIED.sentence),
]


def host_of(folder: Path, hosts: OneHost, options: WorkerOptions) -> FixedHost:
    """Return a host whose workers are about to be started for the first time."""
    setup = HostSetup(int, "train.py", options, Patience.of(several_hosts=False), print, {})
    host = FixedHost(setup, hosts, folder, FileOutput(folder))
    host.begin_attempt(Round(0, 0, options.workers, 0))
    return host


@pytest.mark.parametrize(("failure", "kind", "said"), FAILURES)
def test_workers_get_the_failure_of_those_of_another_node(
    failure: Failure, kind: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "parent", lambda: tmp_path)
    monkeypatch.setattr(fixed_host, "LOCAL_DETECTION_SECONDS", 0.0)
    (tmp_path / "run").mkdir()
    hosts = OneHost()
    hosts.failure = failure
    host = host_of(tmp_path / "run", hosts, WorkerOptions(2, 1))
    watchdog = host.workers.watchdog
    assert watchdog.folder is not None
    recorder = FlightRecorder(watchdog.folder, 0, 3, "alpha", "train.py")
    host.deliver_remote_failure()
    report = watchdog.report()
    assert report is not None and report.kind == kind and said in report.sentence
    if not failure.report:
        assert (report.ranks[0].rank, report.ranks[0].host, report.ranks[0].state) == (
            0,
            "alpha",
            "runs",
        )
        assert (report.ranks[1].rank, report.ranks[1].traceback, report.culprits) == (
            2,
            failure.traceback,
            (2,),
        )
    hosts.failure = replace(failure, rank=1)
    host.deliver_remote_failure()  # once
    watchdog.deliver_failure(replace(failure, rank=1))  # the first report is that of all
    assert watchdog.report() == report
    recorder.close()
    host.workers.close()
    hosts.close()


def test_reports_of_an_attempt_are_awaited_unless_workers_are_restarted_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each restart would take two seconds longer."""
    monkeypatch.setattr(layout, "parent", lambda: tmp_path)
    (tmp_path / "run").mkdir()
    hosts = OneHost()
    host = host_of(tmp_path / "run", hosts, WorkerOptions(2, 1, restarts=1))
    for local_rank in (0, 1):
        host.workers.processes.add(local_rank, None)
    monkeypatch.setattr(host.workers.watchdog, "any_recorded", lambda ranks: ranks == [0, 1])
    assert host.awaits_reports(0)
    assert not host.awaits_reports(1)
    host.workers.close()
    hosts.close()


def test_the_newest_checkpoint_travels_with_the_failure_of_a_host() -> None:
    error = WorkerError(1, "exit", "killed")
    error.checkpoint = "runs/é/checkpoints/step-6"
    first = Failure.earliest([Failure(0, 1, "ValueError", "x"), Failure.from_error(error)])
    assert first is not None and first.as_error().run_dir == "runs/é"
