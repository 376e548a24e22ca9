"""The memory of a group: nobody else's, as large as was asked for, and taken only where it is
written to.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lockstep
from lockstep.transports.shm import segment
from lockstep.transports.shm.memory_layout import default_size
from support.faults import attempt, attempt_to_start
from support.hosts import pretending
from support.pool import Pool
from support.programs import run_programs

NOBODY = 65534
as_root = pytest.mark.skipif(
    os.getuid() != 0, reason="only root can become another user, or mount a file system"
)


def memory_files() -> list[int]:
    """The descriptors of this process that are shared memory of Lockstep's."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        target = str(entry.readlink()) if entry.is_symlink() else ""
        if target.startswith(("/memfd:lockstep", f"{segment.SHM}/#")):
            found.append(int(entry.name))
    return found


@contextmanager
def files_in(folder: Path) -> Iterator[None]:
    """As if there were no memfd, and `folder` were /dev/shm."""
    first, usual = os.memfd_create, segment.SHM
    segment.SHM = folder
    del os.memfd_create
    try:
        yield
    finally:
        os.memfd_create, segment.SHM = first, usual


# --- whose it is
# --------------------------------------------------------------------------------------------------


def can_open(path: str, user: int) -> bool:
    """Whether a process of `user` can open `path`, for reading or for writing."""
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            for mode in (os.O_RDONLY, os.O_RDWR):
                try:
                    os.open(path, mode)
                    os._exit(1)
                except PermissionError:
                    pass
            os._exit(0)
        finally:
            os._exit(2)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 1)
    return code == 1


@as_root
@pytest.mark.parametrize("way", ["memfd", "file"])
def test_another_user_cannot_open_it(pool: Pool, tmp_path: Path, way: str) -> None:
    def look() -> list[Any]:
        dist.init_process_group("shm")
        (number,) = memory_files()
        status = os.fstat(number)
        return [
            oct(status.st_mode & 0o777),
            status.st_nlink,
            can_open(f"/proc/{os.getpid()}/fd/{number}", NOBODY),
        ]

    def body() -> list[Any]:
        if way == "memfd":
            return look()
        with files_in(tmp_path):
            return look()

    for seen in pool.run(body, init=False):
        assert seen == ["0o600", 0, False]


# --- how large it is
# ----------------------------------------------------------------------------------------------


def sizes(options: object = None) -> int:
    dist.init_process_group("shm", pg_options=options)
    (number,) = memory_files()
    total = torch.full((50_000,), 1.0)
    dist.all_reduce(total)
    assert total.eq(dist.get_world_size()).all()
    return os.fstat(number).st_size


def test_the_size_is_the_default_or_the_variable_or_the_option(pool: Pool) -> None:
    whole = pool.run(sizes, init=False)[0]
    assert 4 << 20 < whole <= default_size(2)
    for text, limit in (("3M", 3 << 20), ("700k", 700 << 10), ("2000000", 2_000_000)):
        size = pool.run(sizes, init=False, env={"LOCKSTEP_SHM_SIZE": text})[0]
        assert 0.8 * limit < size <= limit, text
    option = pool.run(
        sizes,
        lockstep.transports.ShmOptions(size=1 << 20),
        init=False,
        env={"LOCKSTEP_SHM_SIZE": "3M"},
    )[0]
    assert 0.8 * (1 << 20) < option <= 1 << 20


def test_the_least_of_the_ranks_limits_holds_for_all(pool: Pool) -> None:
    """With a layout for each rank of its own they would write where others do not look."""

    def body() -> int:
        wish = [None, 1 << 20, 2 << 20][int(os.environ["RANK"])]
        return sizes(lockstep.transports.ShmOptions(size=wish))

    found = set(pool.run(body, workers=3, init=False))
    assert len(found) == 1
    assert found.pop() <= 1 << 20


@pytest.mark.parametrize("given", ["option", "variable"])
def test_too_small_a_size_is_refused_on_every_rank_with_the_least_that_is_enough(
    pool: Pool, given: str
) -> None:
    def body(size: int) -> tuple[str, str]:
        if given == "variable":
            os.environ["LOCKSTEP_SHM_SIZE"] = str(size)
        ended = attempt_to_start(
            pg_options=lockstep.transports.ShmOptions(size=size) if given == "option" else None
        )
        return ended.kind, ended.text

    outcomes = pool.run(body, 5000, workers=3, init=False)
    assert {kind for kind, _ in outcomes} == {"ConfigError"}
    (least,) = {
        int(re.search(r"expected at least (\d+) bytes for 3 ranks", text)[1])
        for _, text in outcomes
    }  # type: ignore[index]
    assert pool.run(body, least, workers=3, init=False) == [("", "")] * 3


def test_too_small_a_size_on_one_host_is_refused_on_all(pool: Pool) -> None:
    def body() -> tuple[str, str]:
        with pretending("AAB"):
            size = 5000 if os.environ["RANK"] == "1" else None
            ended = attempt_to_start(pg_options=lockstep.transports.ShmOptions(size=size))
        return ended.kind, ended.text

    for kind, text in pool.run(body, workers=3, init=False):
        assert kind == "ConfigError"
        assert "bytes for 2 ranks on one host, got 5000" in text


@pytest.mark.parametrize("size", [0, -5, "1M"])
def test_what_is_no_size_is_refused(pool: Pool, size: Any) -> None:
    (ended,) = pool.run(
        attempt_to_start,
        pg_options=lockstep.transports.ShmOptions(size=size),
        workers=1,
        init=False,
    )
    assert ended.kind == "ConfigError"


def test_a_variable_that_is_no_size_is_refused(pool: Pool) -> None:
    def body() -> tuple[str, str]:
        ended = attempt_to_start()
        return ended.kind, ended.text

    for kind, text in pool.run(body, init=False, env={"LOCKSTEP_SHM_SIZE": "much"}):
        assert kind == "ConfigError"
        assert "LOCKSTEP_SHM_SIZE: expected a size such as 64M" in text


@as_root
def test_too_small_a_folder_is_an_error_and_never_a_bus_error(pool: Pool, tmp_path: Path) -> None:
    """A folder of 1 MiB: what does not fit is refused at once, and what fits can be written to to
    the end.
    """

    def body() -> list[Any]:
        with files_in(tmp_path):
            ended = attempt(lambda: dist.init_process_group("shm"))
            dist.init_process_group(
                "shm", pg_options=lockstep.transports.ShmOptions(size=900 << 10)
            )
        total = torch.ones(1_000_000)
        dist.all_reduce(total)
        dist.send(total, 1) if dist.get_rank() == 0 else dist.recv(total, 0)
        return [ended.kind, ended.text, total.eq(2).all().item()]

    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", tmp_path], check=False
    ).returncode:
        pytest.skip("a file system cannot be mounted here")
    try:
        outcomes = pool.run(body, init=False)
    finally:
        subprocess.run(["umount", "--lazy", tmp_path], check=True)
    for kind, text, right in outcomes:
        assert kind == "TransportError"
        assert "No space left on device" in text
        assert "LOCKSTEP_SHM_SIZE, or ShmOptions(size=...), asks for less" in text
        assert right


def test_what_is_never_written_takes_no_memory(pool: Pool) -> None:
    def body() -> int:
        dist.barrier()
        text = Path("/proc/self/smaps").read_text()
        mine = text[text.index("/memfd:lockstep") :]
        return int(re.search(r"^Rss: +(\d+) kB", mine, re.MULTILINE)[1])  # type: ignore[index]

    assert all(kilobytes <= 64 for kilobytes in pool.run(body, backend="shm"))


# --- more ranks than cores
# ----------------------------------------------------------------------------------------

CROWD = """
import os, sys, time, torch, torch.distributed as dist, lockstep
rank, size, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("shm", init_method="file://" + path, rank=rank, world_size=size)
begin = time.monotonic()
for turn in range(50):
    total = torch.full((7,), rank + turn)
    dist.all_reduce(total)
    assert total.eq(15 + 6 * turn).all()
    parts = [torch.empty(5) for _ in range(size)]
    dist.all_gather(parts, torch.full((5,), float(rank)))
    assert [part[0].item() for part in parts] == list(range(size))
    values = torch.full((9,), rank)
    dist.broadcast(values, turn % size)
    assert values.eq(turn % size).all()
    dist.barrier()
took = time.monotonic() - begin
begin, used = time.monotonic(), os.times()
if rank == 0:
    time.sleep(2)
dist.barrier()
now = os.times()
share = (now.user + now.system - used.user - used.system) / (time.monotonic() - begin)
print(took, share)
"""


def test_more_ranks_than_cores_work_and_hardly_use_them_while_they_wait(tmp_path: Path) -> None:
    (ended,) = run_programs([(CROWD, 6)], tmp_path)
    assert [rank.code for rank in ended] == [0] * 6, ended
    for rank in ended:
        took, share = map(float, rank.out.split())
        assert took < 20, (
            "200 collectives take less than a second; a rank that burns its core lets the others "
            "wait"
        )
        assert share < 0.1
