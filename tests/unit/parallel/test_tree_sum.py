"""Sums over shards have one association, whoever holds which of them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from lockstep.parallel.shards import bounds
from lockstep.parallel.tree_sum import (
    Node,
    TreeSum,
    is_left_fold,
    nodes,
)

Sum = Any  # a leaf's number, or a pair of sums


def pair(left: Sum, right: Sum) -> Sum:
    return (left, right)


def padded_tree(first: int, width: int, leaves: int) -> Sum:
    """The association by its definition: halves of a power of two, without what is not there."""
    if width == 1:
        return first
    half = width // 2
    left = padded_tree(first, half, leaves)
    return left if first + half >= leaves else (left, padded_tree(first + half, half, leaves))


def whole(leaves: int) -> Sum:
    return padded_tree(0, 1 << (leaves - 1).bit_length(), leaves)


def in_a_run(start: int, stop: int, leaves: int) -> list[tuple[Node, Sum]]:
    tree: TreeSum[Sum] = TreeSum(leaves, pair)
    for leaf in range(start, stop):
        tree.push((leaf, 1), leaf)
    return tree.partial_sums


def over_workers(leaves: int, workers: int) -> Sum:
    tree: TreeSum[Sum] = TreeSum(leaves, pair)
    for worker in range(workers):
        for node, value in in_a_run(*bounds(leaves, workers, worker), leaves):
            tree.push(node, value)
    return tree.total()


@pytest.mark.parametrize("leaves", range(1, 41))
def test_any_number_of_workers_has_the_association_of_one(leaves: int) -> None:
    assert over_workers(leaves, 1) == whole(leaves)
    for workers in range(2, leaves + 1):
        assert over_workers(leaves, workers) == whole(leaves), workers


@pytest.mark.parametrize("leaves", range(1, 41))
def test_a_run_of_leaves_holds_the_predicted_nodes(leaves: int) -> None:
    for start in range(leaves):
        for stop in range(start + 1, leaves + 1):
            held = in_a_run(start, stop, leaves)
            assert [node for node, _ in held] == nodes(start, stop, leaves)
            for (first, width), value in held:
                assert value == padded_tree(first, width, leaves)


def test_seven_leaves() -> None:
    assert whole(7) == (((0, 1), (2, 3)), ((4, 5), 6))
    assert nodes(4, 7, 7) == [(4, 4)]
    assert nodes(4, 7, 8) == [(4, 2), (6, 1)]
    assert nodes(3, 3, 8) == []


def test_a_counter_holds_few_values_at_once() -> None:
    for leaves in range(1, 41):
        tree: TreeSum[Sum] = TreeSum(leaves, pair)
        most = 0
        for leaf in range(leaves):
            tree.push((leaf, 1), leaf)
            most = max(most, len(tree.partial_sums))
        assert most <= math.log2(leaves) + 1


def test_a_left_fold_or_one_node_a_worker_would_be_another_sum() -> None:
    def folded(leaves: int, workers: int) -> Sum:
        value: Sum = None
        for worker in range(workers):
            run: Sum = None
            for leaf in range(*bounds(leaves, workers, worker)):
                run = leaf if run is None else (run, leaf)
            value = run if value is None else (value, run)
        return value

    assert folded(8, 1) != folded(8, 2) != whole(8)
    assert folded(8, 3) != whole(8)


def test_an_unfinished_sum_is_no_sum() -> None:
    tree: TreeSum[Sum] = TreeSum(4, pair)
    for leaf in range(3):
        tree.push((leaf, 1), leaf)
    with pytest.raises(ValueError, match=r"whole tree over 4 leaves, got \[\(0, 2\), \(2, 1\)\]"):
        tree.total()
    tree.push((3, 1), 3)
    assert tree.total() == whole(4)
    tree.clear()
    with pytest.raises(ValueError, match="whole tree"):
        tree.total()


@pytest.mark.parametrize(
    ("leaves", "workers", "fold"),
    [
        (8, 2, True),
        (7, 2, True),
        (8, 3, False),
        (6, 3, True),
        (12, 3, True),
        (3, 3, True),
        (8, 4, False),
        (6, 2, False),
    ],
)
def test_where_the_tree_is_a_left_fold(leaves: int, workers: int, fold: bool) -> None:
    runs = [nodes(*bounds(leaves, workers, worker), leaves) for worker in range(workers)]
    assert is_left_fold(runs, leaves) == fold
