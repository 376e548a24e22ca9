"""A report as text: short, whole, in 80 columns, and harmless to a terminal."""

from __future__ import annotations

import re

import pytest
from msgspec.structs import replace

from lockstep.system.terminal_text import plain, plain_lines
from lockstep.watchdog.report import (
    Call,
    CollectiveCalls,
    RankCalls,
    RankStatus,
    Report,
)
from lockstep.watchdog.report_text import as_text, rank_list, seconds

REDUCE = Call(
    "all_reduce(float32[10, 4], sum)", "train.py:31 in main", "dist.all_reduce(loss)", 7, "", 12
)
SEND = Call(
    "broadcast(float32[10, 4], src=0)", "train.py:35 in share", "dist.broadcast(x, 0)", 7, "", 13
)
BEFORE = Call("barrier()", "train.py:20 in main", "dist.barrier()", 6, "", 12)

DESYNC = Report(
    "desync",
    "Ranks called different collectives as number 7.",
    (
        RankStatus(0, "waits", batch=12, call=REDUCE, waiting_s=0.41),
        RankStatus(1, "waits", batch=13, call=SEND, waiting_s=0.0),
        RankStatus(2, "waits", batch=12, call=REDUCE, waiting_s=0.38),
    ),
    (1,),
    (
        CollectiveCalls(6, "", (RankCalls((0, 1, 2), BEFORE),)),
        CollectiveCalls(7, "", (RankCalls((0, 2), REDUCE), RankCalls((1,), SEND))),
    ),
    "Rank 1 took another branch.",
    "Look at the condition above train.py:35.",
)

WHOLE = """\
Ranks called different collectives as number 7.

  rank  batch  waiting  where
  0,2   12     0.4 s    in all_reduce(float32[10, 4], sum) #7
                          train.py:31 in main: dist.all_reduce(loss)
  1     13     0.0 s    in broadcast(float32[10, 4], src=0) #7
                          train.py:35 in share: dist.broadcast(x, 0)

Last collectives, diverging at #7:
  #6 all ranks:   barrier()
                    train.py:20 in main: dist.barrier()
  #7 ranks 0,2:   all_reduce(float32[10, 4], sum) (batch 12)
                    train.py:31 in main: dist.all_reduce(loss)
     rank 1:      broadcast(float32[10, 4], src=0) (batch 13)
                    train.py:35 in share: dist.broadcast(x, 0)

Likely cause:
  Rank 1 took another branch.

What to do:
  Look at the condition above train.py:35.

Written to runs/x/report.txt"""


def test_a_report_of_a_desync() -> None:
    assert as_text(DESYNC, written="runs/x/report.txt") == WHOLE


def test_equal_calls_of_ranks_share_a_line_and_the_first_line_may_be_indented() -> None:
    steps = tuple(
        CollectiveCalls(n, "", (RankCalls((0, 1, 2), replace(BEFORE, number=n, batch=n)),))
        for n in (3, 4, 5, 6)
    )
    text = as_text(
        replace(
            DESYNC, last_collectives=(*steps, DESYNC.last_collectives[1]), sentence="word " * 30
        ),
        lead=22,
    )
    assert "  #3-6 all ranks: barrier()\n" in text and "#4" not in text
    first, second, *_ = text.splitlines()
    assert first == ("word " * 11).strip() and second == ("word " * 16).strip()


def test_colours_change_nothing_but_colours() -> None:
    text = as_text(DESYNC, written="runs/x/report.txt", colours=True)
    assert text != WHOLE and re.sub(r"\x1b\[[0-9;]+m", "", text) == WHOLE


def test_the_traceback_of_the_culprit_is_the_end_and_whole() -> None:
    traceback = (
        'Traceback (most recent call last):\n  File "train.py", line 3\n    fail()\nFailed: the '
        "reason\n"
    )
    rows = (
        RankStatus(0, "waits", host="a", call=REDUCE, waiting_s=700),
        RankStatus(1, "raised", "Failed: the reason", "b", call=BEFORE, traceback=traceback),
        RankStatus(2, "died", "killed by SIGKILL", "b", traceback="what it said"),
        RankStatus(
            3,
            "runs",
            host="b",
            stack=("loader.py:4 in __next__: time.sleep(9)", "train.py:9 in main: next(it)"),
        ),
    )
    text = as_text(Report("raised", "Rank 1 raised Failed.", rows, (1,)))
    assert text.endswith(f"\n\nTraceback of rank 1 on b:\n{traceback.rstrip()}")
    assert "what it said" not in text
    assert as_text(Report("lost", "s", rows[2:3])).endswith(
        "\n\nTraceback of rank 2 on b:\nwhat it said"
    )
    assert "  0     a     12 min   in all_reduce(" in text
    assert "  1     b              raised an exception: Failed: the reason\n" in text
    assert "last: barrier() #6\n" in text
    assert "  2     b              died: killed by SIGKILL\n" in text
    assert (
        "is at loader.py:4 in __next__: time.sleep(9)\n" in text
        and "   in train.py:9 in main: next(it)\n" in text
    )


def test_a_named_collective_shows_what_it_is_for() -> None:
    call = Call(
        "all_reduce(float32[9], sum)", "train.py:3", number=7, batch=263, name="gradient all-reduce"
    )
    rows = (RankStatus(0, "waits", call=call, waiting_s=3.0), RankStatus(1, "runs", call=call))
    calls = CollectiveCalls(7, "", (RankCalls((0,), call), RankCalls((1,))))
    text = " ".join(as_text(Report("stall", "s", rows, (1,), (calls,))).split())
    assert "in gradient all-reduce, batch 263: all_reduce(float32[9], sum) #7" in text
    assert "last: gradient all-reduce, batch 263: all_reduce(float32[9], sum) #7" in text
    assert "#7 rank 0: gradient all-reduce: all_reduce(float32[9], sum)" in text


def test_long_things_stay_within_the_width() -> None:
    call = Call(
        f"all_to_all({'float32[1024, 1024], ' * 9}sum)",
        f"{'deep/' * 15}x.py:3 in f",
        f"f({'x' * 200})",
        123456,
    )
    rows = (
        RankStatus(
            0,
            "waits",
            host="a-host-of-a-very-long.domain.example",
            batch=123456,
            call=call,
            waiting_s=3.0,
        ),
        RankStatus(
            1, "runs", "n" * 100, call=call, stack=(f"{'y' * 90}.py:1 in g: {'z' * 100}",) * 9
        ),
    )
    report = Report(
        "stall",
        "word " * 40,
        rows,
        (),
        (CollectiveCalls(7, "g", (RankCalls((0,), call), RankCalls((1,)))),),
        "c " * 90,
    )
    for width in (80, 120):
        assert max(map(len, as_text(report, width, written="w " * 90).splitlines())) <= width


def test_many_ranks_that_do_the_same_share_a_row() -> None:
    rows = [RankStatus(r, "waits", pid=r + 9, call=REDUCE, waiting_s=r / 100) for r in range(1000)]
    rows[700] = RankStatus(700, "frozen", "stopped by a signal")
    text = as_text(Report("frozen", "Rank 700 does not move.", tuple(rows), (700,)))
    assert "  0-699,701-999  10 s     in all_reduce(" in text and len(text.splitlines()) < 10
    assert "  700                     stopped: stopped by a signal" in text


def test_many_rows_are_counted() -> None:
    rows = tuple(RankStatus(r, "runs", stack=(f"x.py:{r} in f: f()",)) for r in range(100))
    text = as_text(Report("stall", "s", rows))
    assert "... and 84 more ranks" in text and len(text.splitlines()) < 60


@pytest.mark.parametrize(
    "evil",
    [
        "a\x1b[2Jb",
        "a\x1b]0;title\x07b",
        "a\x1b]8;;http://x\x1b\\b",
        "a\u202eb",
        "a\x9b31mb",
        "a\rb",
        "a\x00\x07b",
        "a\nb\x1b",
    ],
)
def test_nothing_reaches_the_terminal_but_visible_text(evil: str) -> None:
    call = Call(evil, evil, evil, 1, evil, 1)
    row = RankStatus(0, "runs", evil, evil, 1, 1, call, 1.0, (evil,), evil)
    report = Report(
        "desync",
        evil,
        (row, RankStatus(1, "waits", call=call)),
        (),
        (CollectiveCalls(1, evil, (RankCalls((0,), call),)),),
        evil,
        evil,
    )
    text = as_text(report, written=evil)
    assert all(letter == "\n" or letter.isprintable() for letter in text)
    assert text.count("a") > 5


def test_plain_text() -> None:
    assert plain("  a\tb\n c\x1b[1;31md\x1b[0m ") == "a b cd"
    assert plain("naïve – 日本") == "naïve – 日本"
    assert plain_lines("  x\n\ty\r\nz\x07") == ["  x", "    y", "z"]


def test_small_words() -> None:
    assert rank_list([3, 0, 1, 2, 7, 8, 10]) == "0-3,7,8,10"
    assert [seconds(x) for x in (-1, 0.04, 9.94, 9.96, 599.0, 600.0)] == [
        "0.0 s",
        "0.0 s",
        "9.9 s",
        "10 s",
        "599 s",
        "10 min",
    ]
