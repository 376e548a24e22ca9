"""Communicators of some of the workers."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lockstep
from lockstep.communicator import Communicator, wait_all
from lockstep.errors import ConfigError
from support.pool import Pool

TRANSPORTS = ("gloo", "shm")


def of_a_group() -> None:
    group = dist.new_group([2, 0])
    if dist.get_rank() == 1:
        with pytest.raises(
            ConfigError, match="group: expected a process group that this process is in"
        ):
            Communicator(group)
        return
    comm = Communicator(group)
    assert comm.group is group
    assert (comm.rank, comm.size, comm.local_rank, comm.local_size) == (
        dist.get_rank() // 2,
        2,
        comm.rank,
        2,
    )
    assert comm.broadcast_object(dist.get_rank(), root=1) == 2
    with comm:  # is not its own to destroy
        pass
    assert comm.allreduce(torch.ones(1)).item() == 2


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_of_a_group(pool: Pool, transport: str) -> None:
    pool.run(of_a_group, workers=3, backend=transport)


def on_two_hosts() -> list[Any]:
    comm = lockstep.init("cpu")
    told = [(comm.local_rank, comm.local_size, comm.node, comm.nodes)]
    group = dist.new_group([1, 2, 3])
    if comm.rank:
        part = Communicator(group)
        told.append((part.local_rank, part.local_size, part.node, part.nodes))
    with comm.split(min(comm.rank, 1), -comm.rank) as part:
        return [*told, (part.local_rank, part.local_size, part.node, part.nodes)]


def test_split_gives_the_ranks_on_two_hosts(pool: Pool) -> None:
    def variables(rank: int) -> dict[str, str]:
        place = {
            "LOCAL_RANK": rank % 2,
            "LOCAL_WORLD_SIZE": 2,
            "GROUP_RANK": rank // 2,
            "GROUP_WORLD_SIZE": 2,
        }
        return {name: str(value) for name, value in place.items()}

    assert pool.run(on_two_hosts, workers=4, env=variables) == [
        [(0, 2, 0, 2), (0, 1, 0, 1)],
        [(1, 2, 0, 2), (0, 1, 0, 2), (0, 1, 0, 2)],
        [(0, 2, 1, 2), (0, 2, 1, 2), (1, 2, 1, 2)],
        [(1, 2, 1, 2), (1, 2, 1, 2), (0, 2, 1, 2)],
    ]


def parts_of_parts() -> None:
    """Ranks that have been in different numbers of groups still find each other."""
    comm = Communicator()
    with comm.split(comm.rank // 2) as pair:
        with pair.split(0 if comm.rank == 0 else 1) as single:  # ranks 2 and 3 stay together
            assert single.size == (1 if comm.rank < 2 else 2)
        if comm.rank < 2:
            pair.dup()
        with comm.split(comm.rank % 2, -comm.rank) as other:
            assert other.allgather_object(comm.rank) == [comm.rank % 2 + 2, comm.rank % 2]
            assert dist.get_rank(other.group) == other.rank
            assert dist.get_backend(other.group) == dist.get_backend()
            # the numbers of ranks are those of the part, for torch.distributed too
            tensor = torch.tensor([float(comm.rank)])
            dist.broadcast(tensor, group=other.group, group_src=0)
            assert tensor.item() == comm.rank % 2 + 2
        # messages of one communicator do not reach another
        with comm.dup() as twin:
            ahead, behind = (comm.rank + 1) % 4, (comm.rank - 1) % 4
            out = [torch.zeros(1), torch.zeros(1)]
            receiving = [twin.irecv(out[0], behind), comm.irecv(out[1], behind)]
            sending = [
                comm.isend(torch.tensor([1.0]), ahead),
                twin.isend(torch.tensor([2.0]), ahead),
            ]
            wait_all([*receiving, *sending])
            assert [each.item() for each in out] == [2, 1]
    assert comm.allreduce(torch.ones(1)).item() == 4


def freed() -> None:
    """Nothing of a freed communicator reaches other ranks by way of the default group."""
    comm = Communicator()
    part = comm.dup()
    part.free()
    part.free()
    with pytest.raises(
        ConfigError,
        match="communicator: expected one that has a process group, got one without, or that was "
        "freed",
    ):
        part.allreduce(torch.ones(1))
    with pytest.raises(ZeroDivisionError), comm.dup() as part:
        part.barrier()
        if comm.rank == 0:
            raise ZeroDivisionError  # and does not wait for the others, which know nothing of it
        raise ZeroDivisionError
    assert part.group is None
    for _ in range(5):
        with comm.dup() as part:
            part.allreduce(torch.ones(1))
    last = comm.dup()
    last.barrier()  # else a rank may leave while another still connects to it
    dist.destroy_process_group()
    last.__exit__(ValueError, ValueError(), None)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("body", [parts_of_parts, freed])
def test_parts(pool: Pool, transport: str, body: Callable[[], None]) -> None:
    pool.run(body, workers=4, backend=transport)


def waits_for_all(folder: Path) -> None:
    """Rank 1 goes on only after rank 0 has begun to free."""
    comm = Communicator()
    part = comm.dup()
    if comm.rank == 0:
        begun = comm.isend(torch.ones(1), 1)
        part.free()
        begun.wait()
        assert (folder / "rank 1 came").exists()
    else:
        comm.recv(torch.ones(1), 0)
        (folder / "rank 1 came").touch()
        part.free()


def test_freeing_waits_for_all(pool: Pool, tmp_path: Path) -> None:
    pool.run(waits_for_all, tmp_path, workers=2, backend="shm")


def limits(transport: str) -> list[float]:
    dist.init_process_group(transport, timeout=timedelta(seconds=31))
    with Communicator().dup() as part:
        group: Any = part.group
        limit = (
            group.timeout
            if transport == "shm"
            else group._get_backend(torch.device("cpu")).options._timeout
        )
        return [limit.total_seconds()]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_time_limit_is_that_of_the_whole(pool: Pool, transport: str) -> None:
    assert pool.run(limits, transport, workers=2, init=False) == [[31.0]] * 2
