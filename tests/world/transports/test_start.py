"""Ways to start and end a job: every init method, again in one process, and a plain program."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from support.conformance import Case, Ranks
from support.operations import perform
from support.worker import fresh_store

Body = Callable[..., None]


def place() -> tuple[int, int]:
    """This rank and the number of ranks, as the launcher's variables say."""
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def work_and_leave(seed: int = 0) -> None:
    assert dist.is_initialized()
    perform("all_reduce", Case(seed=seed))
    perform("ring" if dist.get_world_size() > 1 else "broadcast", Case((1000,), seed=seed))
    perform("all_gather", Case((3,), seed=seed, group=dist.new_group()))
    dist.destroy_process_group()
    assert not dist.is_initialized()


# --- init methods
# ---------------------------------------------------------------------------------------------


def by_environment(transport: str, folder: Path, port: int) -> None:
    dist.init_process_group(transport)
    assert dist.get_backend() == transport
    work_and_leave()


def by_file(transport: str, folder: Path, port: int) -> None:
    rank, size = place()
    for turn in range(3):
        dist.init_process_group(
            transport, init_method=f"file://{folder}/turn{turn}", rank=rank, world_size=size
        )
        work_and_leave(turn)


def by_store(transport: str, folder: Path, port: int) -> None:
    """Five jobs, one after the other, in one store: each has its prefix."""
    rank, size = place()
    store = dist.TCPStore("127.0.0.1", port, size, False)
    for turn in range(5):
        own = dist.PrefixStore(f"turn {turn}", store)
        dist.init_process_group(transport, store=own, rank=rank, world_size=size)
        work_and_leave(turn)


def by_file_store(transport: str, folder: Path, port: int) -> None:
    rank, size = place()
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group(
        transport, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=50)
    )
    work_and_leave()


def by_device(transport: str, folder: Path, port: int) -> None:
    """The backend for tensors of the CPU, beside another for those of another device."""
    dist.init_process_group(f"cpu:{transport},cuda:gloo")
    assert transport in dist.get_backend_config()
    work_and_leave()


def in_turns(transport: str, folder: Path, port: int) -> None:
    """Both transports by turns in one process; the ranks' order changes."""
    rank, size = place()
    for turn, backend in enumerate(("gloo", transport, "gloo", transport)):
        url = f"file://{folder}/turn{turn}"
        dist.init_process_group(
            backend, init_method=url, rank=(rank + turn) % size, world_size=size
        )
        assert dist.get_rank() == (rank + turn) % size
        work_and_leave(turn)


@pytest.mark.parametrize(
    "body", [by_environment, by_file, by_store, by_file_store, by_device, in_turns]
)
def test_every_way_to_start(ranks: Ranks, tmp_path: Path, body: Body) -> None:
    store = fresh_store()
    ranks.run(body, ranks.transport, tmp_path, store.port, init=False)


def again_in_one_store(transport: str) -> None:
    """As under torchrun, whose store lives on: what an earlier group has left there does no
    harm.
    """
    for turn in range(3):
        dist.init_process_group(transport)
        work_and_leave(turn)


@pytest.mark.parametrize("transport", ["shm"])  # Gloo connects to addresses of the group before
def test_again_in_one_store(ranks: Ranks) -> None:
    ranks.run(again_in_one_store, ranks.transport, init=False)


def leave_early(transport: str, folder: Path, port: int) -> None:
    """Ranks leave at other moments; the last result that each has asked for is whole."""
    rank, size = place()
    dist.init_process_group(
        transport, init_method=f"file://{folder}/store", rank=rank, world_size=size
    )
    tensor = torch.full((500_000,), float(rank))
    dist.broadcast(tensor, 0)
    if rank == 0:
        dist.destroy_process_group()
        (folder / "left").touch()
    else:
        while not (folder / "left").exists():
            torch.ones(1000).sum()
        assert tensor.eq(0).all()
        dist.destroy_process_group()


def test_ranks_leave_one_after_the_other(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(leave_early, ranks.transport, tmp_path, 0, init=False)


def forked() -> None:
    """As a loader's processes are: copies of a rank that end while it goes on."""
    for step, count in enumerate((3, 1_000_000)):
        work = dist.all_reduce(torch.ones(count), async_op=True)
        child = os.fork()
        if child == 0:
            os._exit(torch.ones(3).sum().item() != 3)
        assert os.waitpid(child, 0)[1] == 0
        work.wait()
        perform("all_reduce", Case(seed=step))
        perform("ring", Case(seed=step))


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_processes_forked_from_a_rank(ranks: Ranks) -> None:
    ranks.run(forked)


# --- plain programs
# -------------------------------------------------------------------------------------------

PROGRAM = """
import sys, torch, torch.distributed as dist
import lockstep
transport, path, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
dist.init_process_group(transport, init_method="file://" + path, rank=rank, world_size=2)
total = torch.full((3,), rank + 1.0)
dist.all_reduce(total)
work = dist.all_reduce(torch.ones(3), async_op=True)
dist.barrier()
print(total.tolist())
if rank == 0:
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    "transport", ["gloo", "shm"]
)  # those of MPI are started by mpiexec: see test_mpi.py
def test_a_plain_program(transport: str, tmp_path: Path) -> None:
    """In processes of its own, with nothing but `import lockstep`; rank 0 leaves its group, rank 1
    just ends.
    """
    arguments = [sys.executable, "-W", "error", "-c", PROGRAM, transport, str(tmp_path / "store")]
    programs = [
        subprocess.Popen(
            [*arguments, str(rank)], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for rank in range(2)
    ]
    try:
        ended = [(*program.communicate(timeout=60), program.returncode) for program in programs]
    finally:
        for program in programs:
            program.kill()
            program.wait()
    assert ended == [("[3.0, 3.0, 3.0]\n", "", 0)] * 2
