"""Several groups at once: subgroups that overlap, groups of two transports, threads, and groups
made again.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.conformance import Case, Ranks
from support.operations import OPERATIONS, perform
from support.pool import Pool

Body = Callable[[str], None]


def kinds(transport: str) -> list[str]:
    return [name for name in OPERATIONS if transport != "gloo" or not name.endswith("_rows")]


def subsets(size: int) -> list[list[int]]:
    """Every set of ranks."""
    return [
        list(ranks)
        for count in range(1, size + 1)
        for ranks in itertools.combinations(range(size), count)
    ]


def every_group(transport: str | None = None) -> list[Any]:
    """A group of every set of ranks; a stand-in for those in which this rank is not."""
    return [dist.new_group(ranks, backend=transport) for ranks in subsets(dist.get_world_size())]


def own_groups() -> list[Any]:
    """A group of every set of ranks in which this rank is."""
    return [group for group in every_group() if group is not dist.GroupMember.NON_GROUP_MEMBER]


# --- subgroups
# ------------------------------------------------------------------------------------------------


def every_subgroup(transport: str) -> None:
    """All operations in each group, the groups taken in turn."""
    groups = own_groups()
    for seed, name in enumerate(kinds(transport)):
        for group in groups:
            if dist.get_world_size(group) > 1 or name not in ("ring", "batch"):
                perform(
                    name, Case((4, 3), root=dist.get_world_size(group) - 1, seed=seed, group=group)
                )
    assert {dist.get_backend(group) for group in groups} == {transport}


def all_groups_at_once(transport: str) -> None:
    """Operations of all groups are under way together."""
    started = [
        OPERATIONS[name](Case((2000,), seed=seed, group=group), True)
        for seed, name in enumerate(("all_reduce", "all_gather", "broadcast", "all_to_all_single"))
        for group in own_groups()
    ]
    for works, check in reversed(started):
        for work in works:
            work.wait()
        check()


def beside_another_transport(transport: str) -> None:
    """Groups of both transports in one job, used in turn."""
    other = "gloo" if transport == "shm" else "shm"
    for group in every_group(other):
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            perform("all_reduce", Case(group=group))
            assert dist.get_backend(group) == other
        perform("all_gather", Case())


def opposite_orders(transport: str) -> None:
    """Ranks start operations of two groups in opposite orders; as nobody waits in between, all
    end.
    """
    groups = [dist.new_group(), dist.new_group()]
    for step, count in enumerate((3, 300_000)):
        works = {}
        tensors = [torch.full((count,), number + 1.0) for number in range(2)]
        for number in (0, 1) if dist.get_rank() == 0 else (1, 0):
            works[number] = dist.all_reduce(tensors[number], group=groups[number], async_op=True)
        for number in (0, 1) if dist.get_rank() % 2 == step else (1, 0):
            works[number].wait()
        assert [tensor[-1].item() for tensor in tensors] == [
            dist.get_world_size() * n for n in (1.0, 2.0)
        ]


def what_a_group_says(transport: str) -> None:
    size = dist.get_world_size()
    group = dist.new_group(list(range(size))[::-1], group_desc="mine")
    assert (group.rank(), group.size(), group.name(), group.group_desc) == (
        dist.get_rank(),
        size,
        transport,
        "mine",
    )
    assert group.group_name not in ("", dist.group.WORLD.group_name)
    assert torch.device("cpu") in group._device_types
    assert dist.get_process_group_ranks(group) == list(range(size))
    assert dist.get_backend_config(group).startswith(f"cpu:{transport}")
    if transport == "shm":
        # torch attaches its recorder to a group with devices while it makes the group; shm's has no
        # backends of c10d's
        dist.destroy_process_group(group)
        assert group._device_types == []


def outsiders(transport: str) -> None:
    """Ranks that are not in a group get its stand-in, and calls on it do nothing."""
    group = dist.new_group([1])
    if dist.get_rank() == 1:
        perform("all_reduce", Case(group=group))
    else:
        assert group is dist.GroupMember.NON_GROUP_MEMBER
        with pytest.warns(UserWarning, match="does not belong"):
            assert dist.all_reduce(torch.ones(1), group=group) is None
    dist.barrier()


def only_members_call(transport: str) -> None:
    """With local synchronization the other ranks need not take part in making a group."""
    last = dist.get_world_size() - 1
    if dist.get_rank() in (0, last):
        group = dist.new_group([0, last], use_local_synchronization=True)
        perform("all_reduce", Case(group=group))
        dist.destroy_process_group(group)
    perform("all_reduce", Case())


def groups_come_and_go(transport: str) -> None:
    """A subgroup is destroyed and made again while the default group stays; one is never used."""
    for seed in range(5):
        dist.new_group()
        group = dist.new_group()
        perform("all_gather", Case(seed=seed, group=group))
        dist.destroy_process_group(group)
        perform("all_reduce", Case(seed=seed))


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize(
    "body",
    [
        every_subgroup,
        all_groups_at_once,
        opposite_orders,
        what_a_group_says,
        outsiders,
        only_members_call,
        groups_come_and_go,
    ],
)
def test_groups(ranks: Ranks, body: Body) -> None:
    ranks.run(body, ranks.transport)


def test_groups_of_both_transports(ranks: Ranks) -> None:
    ranks.run(beside_another_transport, ranks.transport)


@pytest.mark.parametrize("size", [1])
def test_one_rank_alone(ranks: Ranks) -> None:
    def alone(names: list[str]) -> None:
        for name in names:
            perform(name, Case())

    ranks.run(alone, [name for name in kinds(ranks.transport) if name not in ("ring", "batch")])


# --- threads
# --------------------------------------------------------------------------------------------------


def run_threads(*bodies: Callable[[], None]) -> None:
    """Call all at the same time; raise what one has raised."""
    with ThreadPoolExecutor(len(bodies)) as threads:
        gate = threading.Barrier(len(bodies))
        for future in [threads.submit(lambda body=body: (gate.wait(), body())) for body in bodies]:
            future.result()


def a_thread_for_each_group(transport: str) -> None:
    groups = [dist.new_group() for _ in range(3)]

    def work(group: Any, offset: int) -> None:
        for seed in range(15):
            for name in ("all_reduce", "all_gather", "broadcast", "ring", "barrier"):
                perform(name, Case((501,), seed=100 * offset + seed, group=group))

    run_threads(
        *(
            lambda group=group, offset=offset: work(group, offset)
            for offset, group in enumerate(groups)
        )
    )


def messages_beside_collectives(transport: str) -> None:
    """In one group: one thread sends and receives, another has the collectives."""

    def messages() -> None:
        for seed in range(40):
            perform("ring", Case((501,), seed=seed))

    def collectives() -> None:
        for seed in range(40):
            perform("all_reduce", Case((501,), seed=seed))

    run_threads(messages, collectives)


def a_thread_for_each_tag(transport: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()

    def talk(tag: int) -> None:
        for step in range(20):
            out = torch.zeros(3)
            work = dist.isend(torch.full((3,), 100.0 * tag + step), (rank + 1) % size, tag=tag)
            dist.recv(out, (rank - 1) % size, tag=tag)
            work.wait()
            assert out.eq(100 * tag + step).all()

    run_threads(*(lambda tag=tag: talk(tag) for tag in range(4)))


@pytest.mark.parametrize(
    "body", [a_thread_for_each_group, messages_beside_collectives, a_thread_for_each_tag]
)
def test_threads(ranks: Ranks, body: Body) -> None:
    ranks.run(body, ranks.transport)


# --- jobs
# --------------------------------------------------------------------------------------------------


def test_jobs_follow_each_other_in_the_same_processes(pool: Pool, transport: str) -> None:
    """Of changing size and order; each starts afresh."""

    def job(seed: int) -> int:
        perform("all_reduce", Case(seed=seed))
        return dist.get_world_size()

    for seed, workers in enumerate((2, 4, 1, 3, 2)):
        assert pool.run(job, seed, workers=workers, backend=transport) == [workers] * workers
