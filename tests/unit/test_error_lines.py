"""Lines of Lockstep beside a progress bar that the program draws."""

from __future__ import annotations

import io
import logging
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep import error_lines

PROGRAM = """
import logging, sys, tqdm, lockstep
for number in tqdm.tqdm(range(2), mininterval=0, ncols=30):
    if number == 1:
        logging.getLogger("lockstep.training").warning("a warning")
"""


def run(*words: str, **options: object) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        stderr=subprocess.PIPE,
        text=True,
        check=True,
        env=os.environ | {"LOCKSTEP_PROGRESS": "off"},
        **options,  # type: ignore[call-overload]
    )
    return str(done.stderr)


def test_a_warning_is_a_line_of_its_own_beside_a_bar_in_a_file(tmp_path: Path) -> None:
    assert "a warning" in run("-c", PROGRAM).splitlines()
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    lines = run("-m", "lockstep", "run", "-q", "-np", "1", "--no-prefix", str(program)).splitlines()
    assert "a warning" in lines
    assert not any("%" in line and "warning" in line for line in lines)


def test_a_warning_takes_the_place_of_a_bar_on_a_terminal() -> None:
    leader, follower = pty.openpty()
    try:
        subprocess.run([sys.executable, "-c", PROGRAM], stderr=follower, check=True)
        written = os.read(leader, 1 << 16).decode()
    finally:
        os.close(leader)
        os.close(follower)
    assert "\r\x1b[Ka warning\r\n" in written


def test_without_a_bar_a_line_is_written_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    error_lines.write_error_line("a line")
    assert stream.getvalue() == "a line\n"


def test_warnings_go_where_the_program_has_them_go(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, own = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(logging.root, "handlers", [])
    logger = logging.getLogger("lockstep")
    logger.warning("without")
    monkeypatch.setattr(logging.root, "handlers", [logging.StreamHandler(own)])
    logger.warning("with")
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging, "lastResort", None)
    logger.warning("not at all")
    assert (stream.getvalue(), own.getvalue()) == ("without\n", "with\n")
