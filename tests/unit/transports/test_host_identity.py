"""Which ranks share memory, how much of it, and what they exchange for that."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
import torch.distributed as dist

from lockstep.errors import TransportError
from lockstep.transports.runtime import host_identity
from lockstep.transports.runtime.host_identity import Host, find_hosts, host_key
from lockstep.transports.shm import segment

Answers = list[tuple[str, int | None]]


def agreed(answers: Answers, rank: int, monkeypatch: pytest.MonkeyPatch) -> list[Host]:
    """The hosts that `rank` finds where the ranks publish these answers."""
    store = dist.HashStore()
    for other, answer in enumerate(answers):
        if other != rank:
            store.set(f"host/{other}", json.dumps({"key": answer[0], "size": answer[1]}))
    store.add("host/here", len(answers) - 1)
    key, size = answers[rank]
    monkeypatch.setattr(host_identity, "host_key", lambda: key)
    return find_hosts(store, rank, len(answers), size)


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([("a", None)], [Host((0,), None)]),
        ([("a", None), ("a", None)], [Host((0, 1), None)]),
        (
            [("b", 5), ("a", None), ("b", 3), ("a", 9), ("c", 0)],
            [Host((0, 2), 3), Host((1, 3), 9), Host((4,), 0)],
        ),
    ],
)
def test_every_rank_finds_the_same_hosts(
    answers: Answers, expected: list[Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all(agreed(answers, rank, monkeypatch) == expected for rank in range(len(answers)))


@pytest.mark.parametrize("space", ["pid", "net"])
def test_another_namespace_is_another_host(space: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes cannot be seen from here, or not be told apart from others of their numbers."""
    real, here = os.readlink, host_key()
    assert host_key() == here
    monkeypatch.setattr(
        os, "readlink", lambda path: "elsewhere" if str(path).endswith(space) else real(path)
    )
    assert host_key() != here


def test_another_user_is_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    here = host_key()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert host_key() != here


def test_without_proc_the_host_is_identified_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(path: Path) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", none)
    assert host_key() == socket.gethostname()


def mapped_by_rank_1(path: str, nbytes: int) -> str:
    """The error of rank 1 when the store names `path` as rank 0's memory; "" if it maps that."""
    store = dist.HashStore()
    for way, named in (("_memfd", path), ("_unnamed_file", "")):
        store.set(f"{way}/path", named)
        store.set(f"{way}/mapped/0", "")
        store.add(f"{way}/mapped/here", 1)
    try:
        assert segment.share(store, 1, 2, nbytes).bytes.numel() == nbytes
    except TransportError as error:
        return str(error)
    return ""


def test_a_rank_maps_nothing_but_another_process_memory(tmp_path: Path) -> None:
    """The path comes from the store, in which others may write; mapped, the file would be written
    to.
    """
    file = tmp_path / "weights"
    file.write_bytes(bytes(4096))
    link = tmp_path / "5"
    link.symlink_to(file)
    odd = [
        str(file),
        str(link),
        f"/proc/{os.getpid()}/fd/../../../{file}",
        "/proc/self/fd/3",
        "/proc/1/fd/0\n",
    ]
    for path in (*odd, f"/proc/{os.getpid()}/root/{file}", "/proc/٣/fd/3", "/dev/mem"):
        error = mapped_by_rank_1(path, 4096)
        assert "rank 1: ValueError: expected /proc/PID/fd/NUMBER" in error and repr(path) in error
    assert file.read_bytes() == bytes(4096)


def test_a_rank_maps_memory_of_the_right_size_and_user_alone() -> None:
    descriptor = os.memfd_create("test")
    try:
        os.ftruncate(descriptor, 4096)
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
        assert mapped_by_rank_1(path, 4096) == ""
        assert f"{path} is not 8192 bytes of this user's memory" in mapped_by_rank_1(path, 8192)
        if os.getuid() == 0:
            os.fchown(descriptor, 12345, -1)
            assert f"{path} is not 4096 bytes of this user's memory" in mapped_by_rank_1(path, 4096)
        with Path("/dev/zero").open("r+b") as device:
            assert "this user's memory" in mapped_by_rank_1(
                f"/proc/{os.getpid()}/fd/{device.fileno()}", 4096
            )
    finally:
        os.close(descriptor)
