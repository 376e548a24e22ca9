"""What ranks write, as lines and progress bars, and how the launcher's screen shows it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.launcher.output import log_multiplexer
from lockstep.launcher.output.log_multiplexer import LogMultiplexer
from lockstep.launcher.output.output_lines import LineSplitter, OutputLine


def line(text: bytes) -> OutputLine:
    return OutputLine(text, False, True)


def bar(text: bytes, is_complete: bool = False) -> OutputLine:
    return OutputLine(text, True, is_complete)


def pieces(*data: bytes) -> list[OutputLine]:
    lines = LineSplitter()
    return [piece for part in data for piece in lines.feed(part)] + list(lines.end())


@given(
    st.lists(st.binary(max_size=8).filter(lambda text: b"\n" not in text and b"\r" not in text)),
    st.data(),
)
def test_lines_come_out_whole_however_they_come_in(texts: list[bytes], data: st.DataObject) -> None:
    written = b"".join(text + data.draw(st.sampled_from([b"\n", b"\r\n"])) for text in texts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(written)), max_size=5)))
    parts = [written[a:b] for a, b in zip([0, *cuts], [*cuts, len(written)], strict=True)]
    assert pieces(*parts) == [line(text) for text in texts]


def test_what_is_left_without_an_end_of_line_comes_at_the_end() -> None:
    assert pieces(b"one\ntwo", b" more") == [line(b"one"), line(b"two more")]


def test_a_line_that_is_drawn_anew_is_a_bar_in_all_its_states() -> None:
    assert pieces(b"\r10%", b"\r50%", b"\r100%\n", b"next\n") == [
        bar(b"10%"),
        bar(b"50%"),
        bar(b"100%", is_complete=True),
        line(b"next"),
    ]


def test_of_states_that_come_together_the_last_counts() -> None:
    assert pieces(b"\r1%\r2%\r3%") == [bar(b"3%"), bar(b"3%", is_complete=True)]


def test_a_bar_whose_carriage_return_comes_last_is_shown_with_what_comes_next() -> None:
    assert pieces(b"50%\r", b"80%\r", b"100%\n") == [bar(b"80%"), bar(b"100%", is_complete=True)]


def test_a_very_long_line_is_passed_on_before_its_end() -> None:
    lines = LineSplitter()
    assert [len(piece.text) for piece in lines.feed(b"x" * (1 << 21))] == [1 << 21]
    assert list(lines.end()) == []


@pytest.fixture
def ends() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    yield reading, writing
    os.close(reading)
    os.close(writing)


def shown(reading: int) -> bytes:
    return os.read(reading, 1 << 16)


def test_lines_are_marked_with_their_rank(ends: tuple[int, int]) -> None:
    multiplexer = LogMultiplexer((ends[1], ends[1]), colours=True)
    multiplexer.write(3, 0, line(b"hello"))
    assert shown(ends[0]) == b"[3] hello\n"


def test_without_a_terminal_a_bar_is_shown_once_and_at_its_end(ends: tuple[int, int]) -> None:
    multiplexer = LogMultiplexer((ends[1], ends[1]), colours=True)
    for rank in (1, 0):
        multiplexer.write(rank, 1, bar(b"10%"))
        multiplexer.write(rank, 1, bar(b"100%", is_complete=True))
    multiplexer.close()
    assert shown(ends[0]) == b"[1] 100%\n"


def test_live_a_bar_stays_below_the_lines(ends: tuple[int, int]) -> None:
    multiplexer = LogMultiplexer((ends[1], ends[1]), colours=False, live=True)
    multiplexer.write(0, 1, bar(b"10%"))
    multiplexer.write(1, 0, line(b"hello"))
    clear = b"\r\x1b[K"
    assert shown(ends[0]) == clear + b"[0] 10%" + clear + b"[1] hello\n" + b"[0] 10%"
    multiplexer.close()
    assert shown(ends[0]) == b"\n"


def test_a_bar_that_ends_blank_is_removed(ends: tuple[int, int]) -> None:
    reading, writing = ends
    merged = LogMultiplexer((writing, writing), colours=False, live=True)
    for piece in pieces(b"\rhalf", b"\r \n"):
        merged.write(0, 0, piece)
    assert shown(reading) == b"\r\x1b[K[0] half\r\x1b[K"


def test_a_notebook_shows_lines_and_one_output_that_is_updated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    displayed: list[dict[str, str]] = []

    def display(bundle: dict[str, str]) -> Any:
        assert not displayed
        displayed.append(bundle)
        return SimpleNamespace(update=lambda bundle, raw: displayed.append(bundle))

    monkeypatch.setattr(log_multiplexer, "display_in_notebook", display)
    output = log_multiplexer.NotebookOutput()
    mark = log_multiplexer.NOTEBOOK_MARK.encode()
    for stream, text in (
        (0, b"printed"),
        (0, mark + b'{"text/plain": "half"}'),
        (1, b"warned"),
        (0, mark + b"{dama"),
    ):
        output.write(0, stream, line(text))
    output.write(1, 0, bar(b"whole"))
    assert displayed == [{"text/plain": "half"}, {"text/plain": "whole"}]
    assert capsys.readouterr() == ("printed\n", "warned\n")


def test_a_reader_that_has_ended_is_noticed() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    multiplexer = LogMultiplexer((writing, writing), colours=False)
    multiplexer.write(0, 0, line(b"hello"))
    os.close(writing)
    assert multiplexer.is_broken


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_output_that_finds_no_space_is_said_once() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    reading, writing = os.pipe()
    multiplexer = LogMultiplexer((full, writing), colours=False)
    for _ in range(2):
        multiplexer.write(0, 0, OutputLine(b"a line", False, True))
    multiplexer.write_message("the end")
    os.close(full)
    os.close(writing)
    with os.fdopen(reading, "rb") as errors:
        said = errors.read()
    assert said.count(b"standard output: no space left on its device") == 1
    assert said.endswith(b"the end\n")
