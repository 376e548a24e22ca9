"""What watchers leave for the launcher's screen."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.watch.notes import Notes, say


def test_each_note_is_read_once_and_whole(tmp_path: Path) -> None:
    notes = Notes(tmp_path)
    assert notes.new() == []
    say(tmp_path, "first é\nsecond line")
    say(tmp_path, "x" * 10_000)
    with (tmp_path / "notes").open("ab") as file:
        file.write(b'{"text": "half')
    found = notes.new()
    assert found[0] == "first é\nsecond line"
    assert set(found[1]) == {"x"} and 1000 < len(found[1]) < 2000
    assert notes.new() == []
    with (tmp_path / "notes").open("ab") as file:
        file.write(b' a note"}\n')
    assert notes.new() == ["half a note"]


def test_what_is_no_note_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "notes").write_bytes(b'\xff\n3\n{"text": 3}\n{}\n\n{"text": "a\\u001b[2Jb"}\n')
    assert Notes(tmp_path).new() == ["ab"]


def test_without_a_folder_it_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    say(None, "a word")
    assert capsys.readouterr().err == "lockstep: a word\n"
