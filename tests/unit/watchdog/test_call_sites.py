"""Call sites and stacks show the user's lines."""

from __future__ import annotations

import linecache
import subprocess
import sys
from multiprocessing import process
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.training import trainer
from lockstep.watchdog import delivery
from lockstep.watchdog.call_sites import CallSites, describe, is_internal, stack_of


def test_a_call_site_is_described_where_the_current_folder_has_been_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert describe("/a/train.py", 3, "main")[0] == "/a/train.py:3 in main"


def test_equal_code_in_two_files_has_two_call_sites(tmp_path: Path) -> None:
    texts: list[str] = []

    def number(text: str) -> int:
        texts.append(text)
        return len(texts)

    known = CallSites(number)
    found = []
    for name in ("a.py", "b.py"):
        space: dict[str, Any] = {"known": known}
        exec(
            compile(
                "import sys\ndef f(): return known.lookup(sys._getframe())",
                str(tmp_path / name),
                "exec",
            ),
            space,
        )
        found += [space["f"](), space["f"]()]
    assert [place.text for place in found] == [1, 1, 2, 2]
    assert found[0].line != found[2].line


def test_a_stack_begins_below_the_watch_itself() -> None:
    frames = [(delivery.__file__, 1, "own_stack"), ("/home/me/train.py", 7, "main")]
    assert stack_of(frames) == ("/home/me/train.py:7 in main",)


def test_a_stack_shows_the_users_frames_and_where_it_is_inside() -> None:
    frames = [
        (torch.__file__, 1, "inner"),
        ("/home/me/train.py", 7, "main"),
        ("/home/me/train.py", 9, "<module>"),
    ]
    shown = stack_of(frames)
    first, second = shown
    assert first.startswith("/home/me/train.py:7 in main (inside ") and first.endswith(
        "/__init__.py:1 in inner)"
    )
    assert second == "/home/me/train.py:9 in <module>"
    assert not is_internal("<stdin>")


def test_a_stack_shows_the_users_frames_and_not_those_of_libraries() -> None:
    library = "/env/lib/python3.11/site-packages/matplotlib"
    frames = [
        (f"{library}/cbook.py", 3, "f"),
        (f"{library}/axis.py", 4, "g"),
        ("/home/me/train.py", 7, "main"),
    ]
    assert stack_of(frames) == ("/home/me/train.py:7 in main (inside matplotlib/cbook.py:3 in f)",)
    assert stack_of(frames[:2]) == ("matplotlib/cbook.py:3 in f", "matplotlib/axis.py:4 in g")
    command = [*frames[:2], (trainer.__file__, 1, "run")]
    (shown,) = stack_of(command)
    assert "lockstep/training/trainer.py:1 in run" in shown
    assert shown.endswith(" (inside matplotlib/cbook.py:3 in f)")
    assert stack_of([]) == ()


@pytest.mark.parametrize(
    "line, shown",
    [
        ("need_scale = {", "need_scale = { …"),
        ("[tick.label1.get_window_extent(renderer)", "[tick.label1.get_window_extent(renderer) …"),
        ("for tick in ticks])", "… for tick in ticks])"),
        ("a(b[0], {1: 2})", "a(b[0], {1: 2})"),
        ("), key=f(", "… ), key=f( …"),
        ("x = 1 + \\", "x = 1 + \\ …"),
        ("a" * 200, "a" * 140 + " …"),
    ],
)
def test_a_line_that_is_part_of_a_statement_is_marked(
    tmp_path: Path, line: str, shown: str
) -> None:
    (tmp_path / "train.py").write_text(f"{line}\n")
    linecache.checkcache()
    assert describe(str(tmp_path / "train.py"), 1, "main")[1] == shown


def test_a_stack_does_not_show_how_multiprocessing_has_started_the_process() -> None:
    frames = [
        ("/home/me/train.py", 7, "main"),
        (process.__file__, 1, "run"),
        ("<string>", 1, "<module>"),
    ]
    assert [line.rpartition("/")[2] for line in stack_of(frames)] == ["train.py:7 in main"]
    assert len(stack_of([frames[0], frames[2]])) == 2


def test_a_program_without_a_line_of_the_users_is_where_lockstep_is() -> None:
    program = """
import sys, threading
from lockstep.training import trainer
from lockstep.watchdog.call_sites import CallSites

def of_lockstep():
    texts = []
    CallSites(texts.append).lookup(sys._getframe())
    print(texts[0].splitlines()[0])

code = of_lockstep.__code__.replace(co_filename=trainer.__file__)
thread = threading.Thread(target=type(of_lockstep)(code, globals()))
def spawn_main(): pass  # as in the line with which multiprocessing starts a process
spawn_main.__module__ = "multiprocessing.spawn"
thread.start(); thread.join()
"""
    shown = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert shown.strip().endswith("lockstep/training/trainer.py:8 in of_lockstep")
