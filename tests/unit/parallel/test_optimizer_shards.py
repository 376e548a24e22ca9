"""Who owns which tensor."""

from __future__ import annotations

import random

from lockstep.parallel.optimizer_shards import assign_owners


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
