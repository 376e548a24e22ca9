"""``lockstep explain``: what it shows of a report, and what it says of a file that is none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lockstep.cli import main
from lockstep.watchdog.report import RankStatus, Report, write_once


def write(folder: Path, sentence: str) -> Path:
    folder.mkdir(parents=True)
    assert write_once(
        folder, Report("lost", sentence, (RankStatus(0, "died", "a \x1b[31mred\x1b[0m end"),))
    )
    return folder / "report.json"


def test_a_file_a_folder_or_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    old, new = (
        write(tmp_path / "runs" / "b", "The old."),
        write(tmp_path / "runs" / "a", "The new."),
    )
    os.utime(old, (1, 1))
    for words, said in [([str(old)], "The old."), (["runs/b"], "The old."), ([], "The new.")]:
        assert main(["explain", *words]) == 0
        assert capsys.readouterr().out == f"{said}\n\n  rank  where\n  0     died: a red end\n"
    new.unlink()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            [],
            "FILE: expected a report in reports/ or runs/, got none. Name one: lockstep explain "
            "FILE.",
        ),
        (["gone.json"], "FILE: expected an existing report, got 'gone.json'"),
        (
            ["folder"],
            "FILE: expected a report, or a folder with report.json, got folder (it has none)",
        ),
        (["damaged.json"], "damaged.json is damaged, or no report of Lockstep's: "),
        (["damaged.json", "--hlep"], "--help"),
    ],
)
def test_what_is_no_report(
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "damaged.json").write_text('{"lockstep_report": 1,\x1b[2J')
    assert main(["explain", *words]) == 2
    told = capsys.readouterr().err
    assert told.startswith("lockstep explain: error: ") and said in told
    assert "\x1b" not in told and len(told.splitlines()) == 1
