"""Who owns which tensor."""

from __future__ import annotations

import random

from lockstep.parallel.optimizer_shards import assign_owners, assign_second_owners, reassign


def test_the_largest_tensor_goes_to_whoever_has_least() -> None:
    assert assign_owners([3, 8, 5, 4], 2) == [0, 0, 1, 1]
    assert assign_owners([1, 1, 1], 2) == [0, 1, 0]  # of equal loads the lower rank counts
    assert assign_owners([7, 2], 4) == [0, 1]
    assert assign_owners([], 3) == []


def test_no_worker_has_much_more_than_the_mean() -> None:
    draw = random.Random(0)
    for workers in range(1, 9):
        costs = [draw.randrange(1, 1000) for _ in range(draw.randrange(1, 60))]
        loads = [0] * workers
        for cost, owner in zip(costs, assign_owners(costs, workers), strict=True):
            loads[owner] += cost
        assert max(loads) <= sum(costs) / workers + max(costs)


def loads_of(costs: list[int], ranks: list[int], workers: int) -> list[int]:
    loads = [0] * workers
    for cost, rank in zip(costs, ranks, strict=True):
        loads[rank] += cost
    return loads


def test_second_owners_are_on_another_host_and_have_about_as_much() -> None:
    draw = random.Random(1)
    for hosts in ([0, 0], [0, 1], [0, 0, 1, 1], [0, 0, 0, 1], [0, 1, 2], [0, 0, 1, 1, 2, 2]):
        workers = len(hosts)
        costs = [draw.randrange(1, 1000) for _ in range(60)]
        owners = assign_owners(costs, workers)
        seconds = assign_second_owners(costs, owners, [-1] * 60, hosts)
        for owner, second in zip(owners, seconds, strict=True):
            assert owner != second
            assert len(set(hosts)) == 1 or hosts[owner] != hosts[second]
        if len({hosts.count(host) for host in hosts}) == 1:
            assert max(loads_of(costs, seconds, workers)) <= sum(costs) / workers + max(costs)


def test_few_tensors_change_hands_when_a_worker_is_lost_or_joins() -> None:
    """Of four workers one is lost, and then one joins."""
    draw = random.Random(2)
    costs = [draw.randrange(1, 1000) for _ in range(200)]
    owners = assign_owners(costs, 4)
    seconds = assign_second_owners(costs, owners, [-1] * 200, [0] * 4)
    holders = [list(pair) for pair in zip(owners, seconds, strict=True)]
    left = [[rank - 1 for rank in ranks if rank != 0] for ranks in holders]  # rank 0 is lost
    after = reassign(costs, left, [0] * 3, 2)
    moved = sum(
        cost * len(set(new) - set(old)) for cost, new, old in zip(costs, after, left, strict=True)
    )
    assert moved < 0.8 * sum(costs)  # half of the tensors need another holder
    joined = reassign(costs, after, [0] * 4, 2)
    moved = sum(
        cost * len(set(new) - set(old)) for cost, new, old in zip(costs, joined, after, strict=True)
    )
    assert moved < 0.8 * sum(costs)
    for pairs, workers in ((after, 3), (joined, 4)):
        assert all(len(set(pair)) == 2 for pair in pairs)
        for place in (0, 1):
            loads = loads_of(costs, [pair[place] for pair in pairs], workers)
            assert max(loads) <= sum(costs) / workers + max(costs)


def test_owners_of_other_numbers_of_workers() -> None:
    assert reassign([5, 3], [[0], [0]], [0], 2) == [[0], [0]]  # a single worker has everything
    assert reassign([5, 3], [[0, 1], [1, 0]], [0, 0], 2) == [[0, 1], [1, 0]]  # nothing moves
    assert reassign([5, 3], [[], [0]], [0, 0], 1) == [[1], [0]]
