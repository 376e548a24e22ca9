"""What a command shows while it starts."""

from __future__ import annotations

import os
import pty
import sys
import time
from pathlib import Path

import pytest

from lockstep import activity
from lockstep.activity import Activity


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCKSTEP_PROGRESS")
    monkeypatch.setattr(activity, "_FIRST_S", 0.02)
    monkeypatch.setattr(activity, "_LINE_INTERVAL_S", 0.02)
    monkeypatch.setattr(activity, "_REFRESH_INTERVAL_S", 0.02)


class Log:
    """All that was written to standard error so far."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self._capture, self._text = capture, ""

    def text(self) -> str:
        self._text += self._capture.readouterr().err
        return self._text

    def wait_for(self, text: str, count: int = 1) -> str:
        """Wait until `text` occurs so often."""
        deadline = time.monotonic() + 30
        while self.text().count(text) < count:
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.01)
        return self.text()


@pytest.fixture
def log(capfd: pytest.CaptureFixture[str]) -> Log:
    return Log(capfd)


def test_lines_go_on_until_the_block_ends(log: Log) -> None:
    with Activity("lockstep train: loading PyTorch"):
        text = log.wait_for("\n", 2)
    assert text.startswith(
        "lockstep train: loading PyTorch ... 0 s\nlockstep train: loading PyTorch ... "
    )
    after = log.text()
    time.sleep(0.06)
    assert log.text() == after


def test_what_ends_soon_is_not_shown(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity, "_FIRST_S", 60.0)
    with Activity("lockstep: short"):
        time.sleep(0.05)
    assert log.text() == ""


def test_of_nested_blocks_the_innermost_is_shown(log: Log) -> None:
    with Activity("outer"):
        log.wait_for("outer")
        with Activity("inner"):
            before = log.wait_for("inner").count("outer")
            assert (
                log.wait_for("inner", 4).count("outer") <= before + 1
            )  # one that was being written
        log.wait_for("outer", log.text().count("outer") + 1)


@pytest.mark.parametrize("how", ["not shown", "switched off"])
def test_nothing_is_shown_of_quiet_commands(
    log: Log, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    if how == "switched off":
        monkeypatch.setenv("LOCKSTEP_PROGRESS", "off")
    with Activity("lockstep: quiet", shown=how == "switched off"):
        time.sleep(0.08)
    assert log.text() == ""


def test_a_terminal_gets_one_line_that_disappears(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, stream = pty.openpty()
    shown = ""
    with os.fdopen(stream, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        with Activity("lockstep: starting"):
            while shown.count("starting") < 2:
                shown += os.read(terminal, 1000).decode()
        shown += os.read(terminal, 1000).decode()
    os.close(terminal)
    assert "\n" not in shown
    assert shown.startswith("\r\x1b[Klockstep: starting ... 0 s")
    assert shown.endswith("\r\x1b[K")


def test_a_closed_standard_error_is_no_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with (tmp_path / "log").open("w") as stream:
        pass
    monkeypatch.setattr(sys, "stderr", stream)
    with Activity("lockstep: closed"):
        time.sleep(0.05)
