"""Ranks on several placement: shared memory inside each, Gloo between them, with the same results
as on one.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lockstep.errors import ConfigError
from lockstep.transports import creation
from support.conformance import FITS, LAYOUTS, MOVABLE, Case, offered
from support.faults import SOON_S, Ended, attempt, interrupted_nap, kill
from support.hosts import Network, inside, network, or_skip, pretending
from support.operations import OPERATIONS, perform
from support.pool import Pool

# the host of each rank: in order, by turns, and with one rank only on some
PLACEMENTS = ("AB", "AABB", "ABAB", "ABBC")
BETWEEN = (
    "all_reduce",
    "broadcast",
    "all_gather",
    "all_gather_tensor",
    "all_gather_rows",
    "barrier",
)

Place = Callable[[], AbstractContextManager[None]]


def check_collectives() -> None:
    """All that goes through shared memory and between the leaders of hosts."""
    for op, dtypes in FITS.items():
        for seed, dtype in enumerate(dtypes):
            perform("all_reduce", Case((5, 3), dtype, op, seed=seed))
    for root in range(dist.get_world_size()):
        for seed, dtype in enumerate(MOVABLE):
            perform("broadcast", Case((4, 3), dtype, root=root, seed=seed))
    for name in BETWEEN:
        for shape in ((), (0,), (3, 0), (1,), (300_000,)):
            perform(name, Case(shape))
        for seed, layout in enumerate(LAYOUTS):
            perform(name, Case((2, 3, 4, 5), layout=layout, seed=seed))
        works, check = OPERATIONS[name](Case((100_000,), torch.float64), True)
        for work in works:
            work.wait()
        check()
    for dtype in MOVABLE:
        perform("all_gather", Case((7,), dtype))


def check_uneven() -> None:
    """Rank r gives r rows, the first nothing at all."""
    for dtype in (torch.float32, torch.bool, torch.int16, torch.complex64):
        case = Case(dtype=dtype)
        rows = [case.bits(rank, shape=(rank, 2)) for rank in range(case.size)]
        parts = [torch.ones_like(row) for row in rows]
        dist.all_gather(parts, rows[case.rank])
        assert all(
            part.view(torch.uint8).equal(row.view(torch.uint8))
            for part, row in zip(parts, rows, strict=True)
        )


def check_the_rest() -> None:
    """What falls through to Gloo."""
    for name in OPERATIONS:
        for dtype in (torch.float32, torch.int64):
            for case in offered("gloo", name, [Case((4, 3), dtype)]):
                perform(name, case)
    rank, size = dist.get_rank(), dist.get_world_size()
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": each} for each in range(size)]
    world: Any = dist.group.WORLD
    world.monitored_barrier()
    model = DistributedDataParallel(torch.nn.Linear(3, 2, bias=False))
    model(torch.full((1, 3), float(rank))).sum().backward()
    assert model.module.weight.grad.eq(sum(range(size)) / size).all()  # type: ignore[union-attr]


def check_refusals() -> None:
    """What cannot be right is refused before anything is sent, and the group goes on."""
    one = torch.ones(1)
    for wrong in (
        lambda: dist.all_reduce(torch.ones(1).bool(), dist.ReduceOp.AVG),
        lambda: dist.all_gather([one] * (dist.get_world_size() + 1), one),
        lambda: dist.all_gather([torch.ones(2)] * dist.get_world_size(), one),
    ):
        with pytest.raises(ConfigError):
            wrong()
    dist.barrier()


CHECKS = (check_collectives, check_uneven, check_the_rest, check_refusals)


def start(place: Place) -> None:
    """Make the default group, on the host of this rank."""
    with place():
        dist.init_process_group("shm")
    world: Any = dist.group.WORLD
    assert type(world).__name__ == "HierarchicalGroup"


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_operation_gives_what_it_gives_on_one_host(pool: Pool, placement: str) -> None:
    def body() -> None:
        start(lambda: pretending(placement))
        for check in CHECKS:
            check()

    pool.run(body, workers=len(placement), init=False)


@pytest.mark.parametrize("placement", ["AABB", "ABBC"])
def test_a_subgroup_may_be_on_one_host_or_on_several(pool: Pool, placement: str) -> None:
    def body() -> list[str]:
        with pretending(placement):
            start(lambda: pretending(placement))
            groups = [dist.new_group(ranks) for ranks in ((0, 1), (1, 2), (0, 3))]
        mine = [group for group in groups if dist.get_rank(group) >= 0]
        for group in mine:
            perform("all_reduce", Case(group=group))
            perform("all_gather", Case(group=group))
        return [type(group).__name__ for group in mine]

    kinds = pool.run(body, workers=4, init=False)
    near, far = "ShmGroup", "HierarchicalGroup"
    same = [placement[a] == placement[b] for a, b in ((0, 1), (1, 2), (0, 3))]
    first, second, third = (near if each else far for each in same)
    assert kinds == [[first, third], [first, second], [second], [third]]


# --- a rank is lost
# -----------------------------------------------------------------------------------------------


def wait_for_all() -> None:
    dist.all_reduce(torch.ones(3))


def wait_asynchronously() -> None:
    work = dist.all_reduce(torch.ones(3), async_op=True)
    assert work is not None
    work.wait()


def wait_in_gloo() -> None:
    dist.all_to_all_single(torch.ones(4), torch.ones(4))


@pytest.mark.parametrize("operation", [wait_for_all, wait_asynchronously, wait_in_gloo])
@pytest.mark.parametrize("lost", [0, 1, 3])
def test_a_rank_that_is_killed_ends_the_others_on_every_host(
    pool: Pool, lost: int, operation: Callable[[], None]
) -> None:
    """Rank 0 and rank 2 lead their hosts, the others do not."""

    def body() -> list[Ended] | None:
        start(lambda: pretending("AABB"))
        dist.barrier()
        if dist.get_rank() == lost:
            kill()
        return [attempt(operation) for _ in range(2)]

    for outcome in pool.outcomes(body, workers=4, init=False):
        if outcome.rank == lost:
            assert outcome.ending == "died"
            continue
        assert outcome.ending == "returned", outcome.line() + outcome.trace
        # an operation that the lost rank was not needed for any more may have ended well
        first, second = outcome.value
        assert second.kind in ("TransportError", "RankLostError", "RuntimeError"), second
        assert first.seconds + second.seconds < SOON_S
        if operation is not wait_in_gloo and (outcome.rank < 2) == (lost < 2):
            assert f"rank {lost} (" in first.text, first


def test_a_leader_that_is_interrupted_while_it_waits_for_other_hosts(pool: Pool) -> None:
    """It does not wait for them any longer, and they learn of it although nobody has died."""

    def body() -> list[Ended]:
        start(lambda: pretending("AABB"))
        store: Any = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 2:
            with interrupted_nap():
                ended = attempt(wait_for_all)
            store.set("interrupted", "")
            return [ended, attempt(wait_for_all)]
        if dist.get_rank() == 0:
            store.wait(["interrupted"], timedelta(seconds=SOON_S))
        return [attempt(wait_for_all) for _ in range(2)]

    first, second, leader, last = pool.run(body, workers=4, init=False)
    assert (leader[0].kind, leader[0].seconds < SOON_S) == ("KeyboardInterrupt", True)
    assert "rank 2 gave up: KeyboardInterrupt" in last[0].text
    for endings in (first, second, leader, last):
        assert endings[1].kind == "TransportError", endings
        assert endings[0].seconds + endings[1].seconds < SOON_S


def test_hosts_whose_leader_has_left(pool: Pool) -> None:
    def body() -> Ended | None:
        start(lambda: pretending("AABB"))
        dist.barrier()
        if dist.get_rank() == 2:
            dist.destroy_process_group()
            return None
        return attempt(wait_for_all)

    first, second, _, last = pool.run(body, workers=4, init=False)
    assert (last.kind, last.names) == ("RankLostError", (2,))
    for ended in (first, second):
        assert ended.kind == "TransportError"
        assert "between hosts (Gloo)" in ended.text
        assert ended.seconds < SOON_S


# --- network namespaces
# -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hosts() -> Iterator[Network]:
    """Three namespaces, which are as far from each other as hosts are."""
    with or_skip(network(3)) as found:
        yield found


@pytest.mark.parametrize("placement", ["AABB", "ABBC"])
def test_ranks_in_network_namespaces(pool: Pool, hosts: Network, placement: str) -> None:
    def place() -> AbstractContextManager[None]:
        return inside(hosts.names["ABC".index(placement[int(os.environ["RANK"])])])

    def body() -> None:
        with place():
            dist.init_process_group("shm")
            world: Any = dist.group.WORLD
            assert type(world).__name__ == "HierarchicalGroup"
            for check in CHECKS:
                check()
            dist.destroy_process_group()

    env = {"MASTER_ADDR": hosts.address, "GLOO_SOCKET_IFNAME": "eth0"}
    pool.run(body, workers=4, init=False, env=env)


def test_a_rank_that_is_killed_in_another_namespace(pool: Pool, hosts: Network) -> None:
    def body() -> Ended | None:
        with inside(hosts.names[int(os.environ["RANK"]) // 2]):
            dist.init_process_group("shm")
            dist.barrier()
            if dist.get_rank() == 3:
                kill()
            return attempt(wait_for_all)

    env = {"MASTER_ADDR": hosts.address, "GLOO_SOCKET_IFNAME": "eth0"}
    for outcome in pool.outcomes(body, workers=4, init=False, env=env)[:3]:
        assert outcome.ending == "returned", outcome.line() + outcome.trace
        assert outcome.value.kind in ("TransportError", "RankLostError"), outcome.value
        assert outcome.value.seconds < SOON_S


# --- large groups
# -------------------------------------------------------------------------------------------------


def connected() -> int:
    """How many connections over the network this process has."""
    found = 0
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the one of the listing; one that is not connected
            if path.is_socket():
                with socket.socket(fileno=os.dup(int(path.name))) as one:
                    one.getpeername()
                    found += one.family != socket.AF_UNIX
    return found


@contextmanager
def large() -> Iterator[None]:
    """Let every group on several hosts be one that is too large to connect every rank with each
    other.
    """
    before, creation.MAX_FULL_MESH = creation.MAX_FULL_MESH, 0
    try:
        yield
    finally:
        creation.MAX_FULL_MESH = before


@pytest.mark.parametrize("placement", ["AABB", "ABBC"])
def test_every_operation_of_a_large_group(pool: Pool, placement: str) -> None:
    def body() -> None:
        with large():
            start(lambda: pretending(placement))
            for check in CHECKS:
                check()
            dist.destroy_process_group()

    pool.run(body, workers=4, init=False)


def test_only_the_leaders_of_a_large_group_are_connected(pool: Pool) -> None:
    def body() -> list[int]:
        with large():
            before = connected()
            start(lambda: pretending("AABB"))
            dist.all_reduce(torch.ones(3))
            dist.all_gather([torch.empty(2) for _ in range(4)], torch.ones(2))
            dist.barrier()
            found = [connected() - before]
            if dist.get_rank() in (1, 3):
                perform_message(1, 3)
            found.append(connected() - before)
            dist.barrier()
            dist.destroy_process_group()
            return found

    first, second, third, fourth = pool.run(body, workers=4, init=False)
    assert first == third == [2, 2], "to the store, and to the other leader"
    assert second[0] == fourth[0] == 1, (
        "all-reduce, all-gather and barrier need no connection of theirs"
    )
    assert second[1] == fourth[1] == 3, (
        "to the other rank, and one more to the store, where the two have met"
    )


def perform_message(source: int, dest: int) -> None:
    tensor = torch.arange(3.0)
    if dist.get_rank() == source:
        dist.send(tensor, dest, tag=5)
    else:
        got = torch.zeros(3)
        assert dist.recv(got, source, tag=5) == source
        assert got.equal(tensor)


def test_messages_in_a_large_group_wait_for_no_third_rank(pool: Pool) -> None:
    """Gloo's own way to connect late waits in `isend` for the other rank, which may wait for what
    comes after that.
    """

    def body() -> None:
        with large():
            start(lambda: pretending("ABC"))
            a, b = torch.ones(1), torch.full((1,), 2.0)
            for _ in range(3):
                if dist.get_rank() == 0:
                    first, second = dist.isend(a, 1, tag=1), dist.isend(b, 1, tag=2)
                    dist.send(a, 2)
                    assert first is not None
                    assert second is not None
                    first.wait()
                    second.wait()
                elif dist.get_rank() == 2:
                    dist.recv(a, 0)
                    dist.send(a, 1)
                else:
                    got = torch.zeros(1)
                    dist.recv(a, 2)
                    waiting = dist.irecv(got, 0, tag=2)
                    dist.recv(a, 0, tag=1)
                    assert waiting is not None
                    waiting.wait()
                    assert (a.item(), got.item()) == (1, 2)
            with pytest.raises(ConfigError, match="any rank"):
                dist.recv(a)
            dist.barrier()
            dist.destroy_process_group()

    pool.run(body, workers=3, init=False)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_of_a_large_group_is_lost_while_others_wait_in_gloo(pool: Pool, lost: int) -> None:
    def body() -> list[Ended]:
        with large():
            start(lambda: pretending("AABB"))
            wait_in_gloo()
            if dist.get_rank() == lost:
                kill()
            return [attempt(wait_in_gloo) for _ in range(2)]

    for outcome in pool.outcomes(body, workers=4, init=False):
        if outcome.rank != lost:
            assert outcome.ending == "returned", outcome.line() + outcome.trace
            first, second = outcome.value
            assert second.kind in ("TransportError", "RankLostError", "RuntimeError"), second
            assert first.seconds + second.seconds < SOON_S
