"""What watchers leave for the launcher's screen."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.flight_recorder.jobs import MessageReader, write_message


def test_each_message_is_read_once_and_completely(tmp_path: Path) -> None:
    messages = MessageReader(tmp_path)
    assert messages.read() == []
    write_message(tmp_path, "first é\nsecond line")
    write_message(tmp_path, "x" * 10_000)
    with (tmp_path / "messages").open("ab") as file:
        file.write(b'"half')
    found = messages.read()
    assert found[0] == "first é\nsecond line"
    assert set(found[1]) == {"x"} and 1000 < len(found[1]) < 2000
    assert messages.read() == []
    with (tmp_path / "messages").open("ab") as file:
        file.write(b' a message"\n')
    assert messages.read() == ["half a message"]


def test_what_is_no_message_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "messages").write_bytes(b'\xff\n3\n{"text": 3}\n{}\n\n"a\\u001b[2Jb"\n')
    assert MessageReader(tmp_path).read() == ["ab"]


def test_without_a_folder_it_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    write_message(None, "a word")
    assert capsys.readouterr().err == "lockstep: a word\n"
