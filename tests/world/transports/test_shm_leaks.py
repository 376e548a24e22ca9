"""What a group in shared memory leaves behind, however and whenever its ranks end: nothing."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep.transports.runtime import op_queue
from lockstep.transports.shm import segment
from support.faults import attempt, attempt_to_start, kill
from support.leaks import LINGER
from support.pool import Pool


@contextmanager
def memory(way: str, folder: Path) -> Iterator[None]:
    """Have memory shared in the first way, or as if there were no memfd, by files in `folder`."""
    first, usual = os.memfd_create, segment.SHM
    if way == "file":
        segment.SHM = folder
        del os.memfd_create
    try:
        yield
    finally:
        os.memfd_create, segment.SHM = first, usual


def held() -> dict[str, int]:
    """What this process holds, counted."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": threading.active_count(),
        "shared mappings": sum("(deleted)" in line for line in maps),
    }


def place(turn: int = 0) -> dict[str, Any]:
    """Where a rank finds the others, with names of its own for each turn."""
    rank, size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    store = dist.PrefixStore(f"turn {turn}", dist.TCPStore("127.0.0.1", port, None, False))
    return {"store": store, "rank": rank, "world_size": size}


def exercise() -> None:
    """Collectives of every path, messages, and another group."""
    dist.all_reduce(torch.ones(3))
    dist.all_reduce(torch.ones(200_000, dtype=torch.half))
    work = dist.all_reduce(torch.ones(100_000), async_op=True)
    assert work is not None
    work.get_future().wait()
    rank, size = dist.get_rank(), dist.get_world_size()
    sent = dist.isend(torch.ones(600_000), (rank + 1) % size)
    dist.recv(torch.empty(600_000), (rank - 1) % size)
    assert sent is not None
    sent.wait()
    dist.barrier(dist.new_group())


# --- in one process
# -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["memfd", "file"])
def test_many_groups_one_after_the_other_leave_nothing(
    pool: Pool, tmp_path: Path, way: str
) -> None:
    """Without the garbage collector: memory is given back by the time the group is destroyed, not
    some time later.
    """

    def rounds() -> list[dict[str, int]]:
        counts, patience = [], op_queue._IDLE_EXIT_S
        op_queue._IDLE_EXIT_S = 60.0
        gc.collect()
        gc.disable()
        before = held()["shared mappings"]  # of earlier tests in this process
        for turn in range(20):
            dist.init_process_group("shm", **place(turn))
            exercise()
            group = dist.group.WORLD  # as a model may keep it
            dist.destroy_process_group()
            for thread in (
                threading.enumerate()
            ):  # the one that carries on with operations ends with the last group
                if thread.name == "lockstep-shm":
                    thread.join(LINGER)
                    assert not thread.is_alive()
            counts.append(held())
            del group
        gc.enable()
        op_queue._IDLE_EXIT_S = patience
        assert {each["shared mappings"] for each in counts} == {before}
        return counts

    def body() -> list[dict[str, int]]:
        with memory(way, tmp_path):
            return rounds()

    for counts in pool.run(body, init=False):
        assert counts[-1] == counts[1]
    assert list(tmp_path.iterdir()) == []


def rest() -> int:
    """Leave a group while the thread that carried on with its operations rests; what is mapped more
    a little later.
    """
    before = held()["shared mappings"]
    patience, op_queue._IDLE_EXIT_S = op_queue._IDLE_EXIT_S, 60.0
    gc.disable()
    try:
        group = dist.new_group()
        work = dist.all_reduce(torch.ones(100_000), group=group, async_op=True)
        assert work is not None
        work.get_future().wait()
        dist.destroy_process_group(group)
        del group, work
        deadline = time.monotonic() + LINGER
        while held()["shared mappings"] > before and time.monotonic() < deadline:
            os.sched_yield()
        return held()["shared mappings"] - before
    finally:
        gc.enable()
        op_queue._IDLE_EXIT_S = patience


def test_the_thread_holds_on_to_nothing_while_it_rests(pool: Pool) -> None:
    assert pool.run(rest, backend="shm") == [0, 0]


def abandon() -> None:
    """Leave while operations of every kind are under way; the pool looks for what is left."""
    if dist.get_rank() == 0:
        works: list[Any] = [dist.all_reduce(torch.ones(100_000), async_op=True) for _ in range(3)]
        works += [
            dist.irecv(torch.ones(4), 1),
            dist.irecv(torch.ones(4)),
            dist.isend(torch.ones(900_000), 1),
        ]
        works[0].get_future()
        dist.destroy_process_group()
        for work in works:
            assert "has been destroyed" in attempt(work.wait).text


def test_what_is_in_flight_ends_with_the_group(pool: Pool) -> None:
    pool.run(abandon, backend="shm")


# --- ranks that are killed
# ----------------------------------------------------------------------------------------

# Makes a segment again and again; the n-th time the process is killed at the n-th line of Lockstep
# that it comes to.
KILLED_ANYWHERE = """
import json, os, signal, sys
from pathlib import Path
import torch.distributed as dist
from lockstep.transports.shm import segment

folder = Path(sys.argv[1])
segment.SHM = folder
if sys.argv[2] == "file":
    del os.memfd_create
here = str(Path(segment.__file__).parent)
left, number, code = [], 0, None
while code != 0:
    number += 1
    pid = os.fork()
    if pid == 0:
        count = 0
        def trace(frame, event, argument):
            global count
            if not frame.f_code.co_filename.startswith((here, sys.argv[3])):
                return None
            count += event == "line"
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return trace
        sys.settrace(trace)
        segment.share(dist.HashStore(), 0, 1, 1 << 20)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, -9), code
    left += [f"{number}: {path.name}" for path in folder.iterdir()]
print(json.dumps([number, left]))
"""


@pytest.mark.parametrize("way", ["memfd", "file"])
def test_no_file_is_left_by_a_kill_at_any_line(tmp_path: Path, way: str) -> None:
    """Lines of `tempfile` count too, as it is there that a file gets its name, if it gets one."""
    import tempfile

    command = [sys.executable, "-c", KILLED_ANYWHERE, str(tmp_path), way, tempfile.__file__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    lines, left = json.loads(done.stdout)
    assert lines > 20, "the lines were not counted"
    assert left == []


@pytest.mark.parametrize("way", ["memfd", "file"])
def test_no_file_is_left_by_ranks_that_are_killed_in_their_work(
    pool: Pool, tmp_path: Path, way: str
) -> None:
    def body() -> None:
        with memory(way, tmp_path):
            dist.init_process_group("shm", **place())
        exercise()
        if dist.get_rank() > 0:
            attempt(dist.barrier)
        kill()

    outcomes = pool.outcomes(body, workers=3, init=False)
    assert [outcome.ending for outcome in outcomes] == ["died"] * 3
    assert list(tmp_path.iterdir()) == []


# --- memory that cannot be shared
# ---------------------------------------------------------------------------------


def fail_to_map(*arguments: object) -> int:
    raise OSError(24, "no more of it")


@pytest.mark.parametrize("rank", [0, 1])
def test_when_one_rank_cannot_map_it_all_raise_and_nothing_is_left(pool: Pool, rank: int) -> None:
    def body() -> tuple[str, int]:
        real, before = segment._map, held()
        if int(os.environ["RANK"]) == rank:
            segment._map = fail_to_map  # type: ignore[assignment]
        try:
            ended = attempt_to_start(**place())
        finally:
            segment._map = real
        after = held()
        assert ended.kind == "TransportError"
        assert after["shared mappings"] == 0
        return ended.text, after["descriptors"] - before["descriptors"]

    for text, descriptors in pool.run(body, workers=3, init=False):
        assert text.count(f"rank {rank}: OSError: [Errno 24] no more of it") == 2, text
        assert "LOCKSTEP_SHM_SIZE" in text
        assert descriptors <= 0
