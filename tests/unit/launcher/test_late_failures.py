"""The failure of a program is reported though a thread, or a function of `atexit`, keeps it
running.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.errors import InterruptedRunError
from lockstep.launcher.worker_process import late_failures, worker


@pytest.fixture(autouse=True)
def no_reporter() -> Any:
    yield
    late_failures._reporters.clear()


def test_only_an_end_that_takes_long_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[BaseException] = []
    arrived = threading.Event()

    def reporter(error: BaseException) -> None:
        told.append(error)
        arrived.set()

    late_failures.set_reporter(reporter)
    with late_failures.reporting(ValueError("quick")):
        pass
    monkeypatch.setattr(late_failures, "LATE_S", 0.01)
    with late_failures.reporting(ValueError("late")):
        assert arrived.wait(60)
    assert [str(error) for error in told] == ["late"]


def report(error: BaseException, monkeypatch: pytest.MonkeyPatch, ranks: int = 2) -> Any:
    world = SimpleNamespace(rank=1, world_size=ranks)
    monkeypatch.setattr(worker, "find_world", lambda: world)
    monkeypatch.setattr(worker, "records_dir", lambda: None)
    told: list[Any] = []
    client: Any = SimpleNamespace(number=1, fail=told.append)
    worker._report_late(client, error)
    return told[0] if told else None


def test_the_report_has_the_code_and_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = report(SystemExit(4), monkeypatch)
    assert (found.exit_code, found.kind, found.reason) == (
        4,
        "SystemExit",
        "ended with exit code 4",
    )
    said = capsys.readouterr().err
    assert (
        "rank 1 has failed (SystemExit: ended with exit code 4) and does not end:\n  its main "
        "thread is at " in said
    )


@pytest.mark.parametrize(
    "error", [SystemExit(0), SystemExit(None), InterruptedRunError("stopped", 15)]
)
def test_what_has_not_failed_may_take_long(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    assert report(error, monkeypatch) is None


def test_a_job_of_one_rank_ends_as_python_does(monkeypatch: pytest.MonkeyPatch) -> None:
    assert report(SystemExit(4), monkeypatch, ranks=1) is None
