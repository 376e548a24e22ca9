"""From a finding to a report and an error on this rank."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lockstep.errors import MembershipChangedError, TransportError
from lockstep.watchdog import patches
from lockstep.watchdog import report as reports
from lockstep.watchdog.gloo_waits import EndableWaits
from lockstep.watchdog.group_peers import GroupPeers
from lockstep.watchdog.program import Program
from lockstep.watchdog.report import Finding, Report
from lockstep.watchdog.session import Session
from lockstep.watchdog.shared_state import WatchdogState


def test_an_error_is_raised_even_if_no_report_can_be_made_of_it(tmp_path: Path) -> None:
    session = bare_session(tmp_path)

    def fail(finding: Finding) -> Any:
        raise RecursionError("no report")

    session.make_report = fail
    session.fail(Finding("lost", "it is so", (1,), key=1, sequence=3))
    with pytest.raises(TransportError, match="it is so"):
        session.state.check()


def test_a_log_that_cannot_be_created_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LOCKSTEP_TIMELINE", str(tmp_path / "file"))
    said: list[str] = []
    assert (
        patches._open_log(
            cast("Any", SimpleNamespace(rank=1, own_reader=None, write_message=said.append))
        )
        is None
    )
    assert "rank 1 does not record its timeline" in said[0]


def report(sentence: str = "it is so", kind: str = "lost") -> Report:
    return Report(kind, sentence, (), (1,), (), "", "", 0.0, "")


def bare_session(folder: Path, **more: Any) -> Any:
    """A session whose reports are made of nothing; what it has of the other ranks is in `more`."""
    session, state = Session.__new__(Session), WatchdogState.__new__(WatchdogState)
    session.state, state.folder, state.error, state.lock = state, folder, None, threading.RLock()
    state.fail, state.poll_report = session.fail, session.poll_report
    session._report_path = folder / "report.json"
    state.recorder = cast("Any", SimpleNamespace(world_size=2))
    session.cross_host = cast("Any", SimpleNamespace(publish_report=lambda made: made))
    state.program = Program(cast("Any", None))
    changes = {
        "make_report": lambda finding: report(finding.sentence),
        "_end_waits": lambda: None,
        **more,
    }
    vars(session).update(changes)
    return session


@pytest.mark.parametrize("there", ["", "{", '{"lockstep_report": 1}'])
def test_a_finding_is_an_error_here_whatever_the_folder_is_like(tmp_path: Path, there: str) -> None:
    """Nothing of it depends on a file that is damaged or cannot be written."""
    folder = tmp_path
    if there:
        (tmp_path / "report.json").write_text(there)
    else:
        folder = tmp_path / "gone"
    session = bare_session(folder)
    session.fail(Finding("lost", "found"))
    assert "found" in str(session.state.error)


def test_waits_are_ended_before_the_store_is_queried(tmp_path: Path) -> None:
    order: list[str] = []
    cross_host = SimpleNamespace(publish_report=lambda made: order.append("store"))
    session = bare_session(
        tmp_path, cross_host=cross_host, _end_waits=lambda: order.append("waits")
    )
    session.adopt_report(report())
    assert order == ["waits", "store"]


def test_a_thread_that_is_the_program_gets_the_error() -> None:
    program = Program(cast("Any", None))
    program.thread = threading.Thread(target=program.note_error)
    program.note_error()
    assert not program.has_error
    program.thread.start()
    program.thread.join()
    assert program.has_error


def test_two_threads_that_find_something_write_one_whole_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link: Callable[..., None] = os.link

    def link_late(*paths: Any) -> None:
        monkeypatch.setattr(os, "link", link)
        other = threading.Thread(target=reports.write_once, args=(tmp_path, report("second")))
        other.start()
        other.join()
        link(*paths)

    monkeypatch.setattr(os, "link", link_late)
    assert not reports.write_once(tmp_path, report("first"))
    assert reports.read(tmp_path / "report.json") == report("second")
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


@pytest.mark.parametrize(
    "kind, words", [("lines", "Call site mismatch at collective #1"), ("batches", "is on batch 3")]
)
def test_what_differs_is_printed_where_nothing_can_be_written(
    tmp_path: Path, kind: str, words: str
) -> None:
    said: list[str] = []
    record = SimpleNamespace(
        what="barrier()",
        call_site="a.py:1",
        source="",
        sequence=1,
        group="",
        batch=3,
        finished=False,
    )
    own = SimpleNamespace(record=lambda raw: record, memory=memoryview(b""))
    state = SimpleNamespace(
        folder=tmp_path / "gone",
        write_message=said.append,
        own_reader=own,
        rank=0,
        limits=SimpleNamespace(strict=False),
        peers={1: own},
        uneven_batches=0,
    )
    swaps = SimpleNamespace(has_announced=lambda *_: False)
    peers: Any = GroupPeers(cast("Any", state), 3, 0, [1], cast("Any", swaps))
    (peer,) = peers._peers
    mine = SimpleNamespace(fingerprint=5, name=0, loop=7, batch=1, line=1, sequence=1)
    theirs = SimpleNamespace(**vars(mine) | ({"line": 2} if kind == "lines" else {"batch": 2}))
    assert peers._difference(mine, peer, theirs) == kind
    peers._report(kind, mine, peer, theirs, raises=True)
    assert words in said[0]
    assert peers._difference(mine, peer, theirs) == ""  # as it was warned about
    theirs.fingerprint = 6
    assert peers._difference(mine, peer, theirs) == "desync"


class HangingWork:
    """A work of Gloo that never hears of anything."""

    def __init__(self) -> None:
        self.waits = 0

    def wait(self, timeout: timedelta | None = None) -> bool:
        assert timeout is not None, "nothing would end this wait"
        self.waits += 1
        raise RuntimeError("Operation timed out!")

    def is_completed(self) -> bool:
        return False


def test_a_wait_in_slices_ends_when_it_is_interrupted() -> None:
    work = HangingWork()

    def check() -> None:
        if work.waits == 3:
            raise MembershipChangedError(1)

    waits = EndableWaits(check)
    with pytest.raises(MembershipChangedError):
        waits.wait(work)
    assert work.waits == 3
    assert waits.abandoned == [work]  # whose group has to be kept


def test_a_work_that_fails_raises_its_own_error() -> None:
    work = SimpleNamespace(is_completed=lambda: True, wait=raising("connection closed"))
    with pytest.raises(RuntimeError, match="connection closed"):
        EndableWaits(lambda: None).wait(work)


def raising(text: str) -> Callable[..., bool]:
    def wait(*_: object) -> bool:
        raise RuntimeError(text)

    return wait


def test_in_an_elastic_job_a_lost_rank_is_no_finding() -> None:
    session = Session.__new__(Session)
    found: list[Finding] = []
    session.fail = found.append  # type: ignore[method-assign]
    for kind in ("lost", "left", "desync", "stall"):
        session._fail_unless_lost(Finding(kind, "it is so"))
    assert [finding.kind for finding in found] == ["desync", "stall"]
