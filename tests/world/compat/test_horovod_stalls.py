"""No wait for a rank is endless: the watchdog sees to Horovod's operations, by Horovod's limits."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

import pytest

from support.desyncs import program
from support.programs import Ending, ProgramServer

PRELOAD = ("lockstep.watchdog.patches", "lockstep.compat.horovod.torch")
WARN = "HOROVOD_STALL_CHECK_TIME_SECONDS"
SHUTDOWN = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"

Run = Callable[[Sequence[tuple[str, int]]], list[list[Ending]]]

START = """
import signal
import lockstep.compat.horovod.torch as hvd
hvd.init()
hvd.barrier()
"""
LATE = """
if last: time.sleep(3)
assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="x").item() == size
print("done")
"""
ABSENT = """
if last:
    while not all(os.path.exists(f"{path}-{other}") for other in range(size - 1)): time.sleep(0.05)
try:
    hvd.allreduce(torch.ones(1), name="x")
finally:
    open(f"{path}-{rank}", "w").close()
"""
OTHER_NAMES = """
hvd.allreduce(torch.ones(1), name="y" if last else "x")
"""
DIES = """
if last: os._exit(7)
hvd.allreduce(torch.ones(1), name="x")
"""
RAISES = """
if last: raise ValueError("mine")
hvd.synchronize(hvd.allreduce_async(torch.ones(1), name="x"))
"""
FAILS = """
if last:
    def fail(*_): raise MemoryError("none left")
    hvd.global_process_set.engine._message_table.add = fail
hvd.allreduce(torch.ones(1), name="x")
"""
STOPPED = """
pids = hvd.allgather(torch.tensor([os.getpid()])).tolist()
if last: os.kill(os.getpid(), signal.SIGSTOP)
try:
    hvd.allreduce(torch.ones(1), name="x")
finally:
    os.kill(pids[-1], signal.SIGCONT)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    with closing(ProgramServer(PRELOAD)) as server:
        yield lambda programs: server.run(
            programs, tmp_path_factory.mktemp("programs"), 115, at_once=3
        )


def text_of(ending: Ending) -> str:
    """What a rank has written to standard error, on one line."""
    return " ".join(ending.err.replace("[rank0]:", "").split())


def test_a_warning_ends_nothing_and_the_check_can_be_disabled(run: Run) -> None:
    soon = {WARN: "1"}
    off = {**soon, SHUTDOWN: "1.5", "HOROVOD_STALL_CHECK_DISABLE": "1"}
    *warned, silent = run(
        [
            (program(START + LATE, "shm", **soon), 2),
            (program(START + LATE, "gloo", "AB", **soon), 2),
            (program(START + LATE, "shm", **off), 2),
        ]
    )
    for ended in (*warned, silent):
        assert [(e.code, e.out.endswith("done\n")) for e in ended] == [(0, True)] * 2, ended
    for ended in warned:
        said = " ".join(map(text_of, ended))
        assert "straggler: rank 1 has not reached allreduce 'x' at program:" in said
    assert [ending.err for ending in silent] == ["", ""]


def test_the_shutdown_time_is_an_error_on_all_ranks(run: Run) -> None:
    late = {SHUTDOWN: "1.5"}
    *absent, named = run(
        [
            (program(START + ABSENT, "shm", **late), 3),
            (program(START + ABSENT, "gloo", "ABB", **late), 3),
            (program(START + OTHER_NAMES, "shm", **late, **{WARN: "0.3"}), 2),
        ]
    )
    for ended in absent:
        for ending in ended:
            assert ending.code == 1, ended
            assert "StallError: Rank 2 did not reach allreduce 'x' at" in text_of(ending), ended
            assert f"{SHUTDOWN} sets this limit" in text_of(ending), ended
        assert "HorovodInternalError: allreduce 'x': StallError" in text_of(ended[0])
    said = " ".join(map(text_of, named))
    assert "rank 1 has not submitted allreduce 'x', for which rank 0 has waited" in said
    for ending in named:
        assert ending.code == 1
        assert "not submitted allreduce" in text_of(ending)
        assert "StallError" in text_of(ending)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (DIES, r"Rank 2 (on \S+ )?died while other ranks waited for it"),
        (RAISES, r"Rank 2 raised ValueError: mine"),
        (FAILS, r"Rank 2 raised .*HorovodInternalError: .*MemoryError: none left"),
        (STOPPED, r"is stopped while other ranks wait for it in allreduce 'x' at program:"),
    ],
    ids=["dies", "raises", "fails", "stopped"],
)
def test_a_rank_that_never_comes_is_named(run: Run, text: str, words: str) -> None:
    """Also on another host."""
    here, there = run(
        [(program(START + text, "shm"), 3), (program(START + text, "gloo", "ABB"), 3)]
    )
    for ended in (here, there):
        assert re.search(words, text_of(ended[0])), ended
        assert "HorovodInternalError" in ended[0].err
