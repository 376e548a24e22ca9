"""Sums over numbered leaves in the fixed association of a binary tree, however leaves are
distributed (pure).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")

Node = tuple[int, int]
"""(first leaf, width): the subtree over the leaves [first, first + width), without those past the
last leaf of the tree. The width is a power of two that divides the first leaf."""


def nodes(start: int, stop: int, leaves: int) -> list[Node]:
    """Return the largest subtrees within the leaves [start, stop) of a tree over `leaves` leaves,
    in order.

    A subtree may extend past the last leaf of the tree: of 7 leaves the range [4, 7) is the one
    subtree (4, 4). A range of n leaves has fewer than 2·log2(n) + 2 subtrees.
    """
    end = _padded(leaves) if stop >= leaves else stop
    subtrees = []
    while start < stop:
        width = start & -start or _padded(leaves)
        while start + width > end:
            width //= 2
        subtrees.append((start, width))
        start += width
    return subtrees


def _padded(leaves: int) -> int:
    """Return the width of the whole tree: the next power of two."""
    return 1 << max(0, leaves - 1).bit_length()


class TreeSum(Generic[T]):
    """A sum over `leaves` leaves, in the association of the binary tree over their numbers.

    The width of the tree is the next power of two; leaves past the last one are left out:

        leaves = 7:  ((0 + 1) + (2 + 3)) + ((4 + 5) + 6)

    Subtrees are pushed in order. Two siblings are added as soon as both are complete, as a binary
    counter carries, so that n leaves from the first on never need more than log2(n) + 1 values at
    once.

    Args:
        leaves: number of leaves, at least 1.
        add: (left, right) → their sum; may change either operand.
    """

    def __init__(self, leaves: int, add: Callable[[T, T], T]) -> None:
        self._leaves = leaves
        self._add = add
        self._partial_sums: list[tuple[Node, T]] = []

    def push(self, node: Node, value: T) -> None:
        """Add the sum over a subtree, the next one in order."""
        first, width = node
        while first or width < self._leaves:
            if not first & width:  # a left child: its sibling follows, unless it has no leaves
                if first + width < self._leaves:
                    break
            elif self._partial_sums and self._partial_sums[-1][0] == (first - width, width):
                (first, _), left = self._partial_sums.pop()
                value = self._add(left, value)
            else:
                break
            width *= 2
        self._partial_sums.append(((first, width), value))

    @property
    def partial_sums(self) -> list[tuple[Node, T]]:
        """The complete subtrees whose sibling is not complete, in order, with their sums."""
        return list(self._partial_sums)

    def total(self) -> T:
        """Return the sum over all leaves.

        Raises:
            ValueError: if a leaf is missing.
        """
        subtrees = [node for node, _ in self._partial_sums]
        if len(subtrees) != 1 or subtrees[0][0] != 0 or subtrees[0][1] < self._leaves:
            raise ValueError(
                f"partial_sums: expected the whole tree over {self._leaves} leaves, got {subtrees}"
            )
        return self._partial_sums[0][1]

    def clear(self) -> None:
        """Remove all values."""
        self._partial_sums.clear()


def total(leaves: Iterable[T], add: Callable[[T, T], T]) -> T:
    """Return the sum over all `leaves`, at least one, in the association of `TreeSum`."""
    values = list(leaves)
    tree = TreeSum(len(values), add)
    for number, value in enumerate(values):
        tree.push((number, 1), value)
    return tree.total()


def is_left_fold(by_rank: list[list[Node]], leaves: int) -> bool:
    """Return whether each rank holds one subtree and the tree over them is ((x0 + x1) + x2) + … in
    rank order.

    Args:
        by_rank: the `nodes` of each rank, in rank order.
        leaves: number of leaves of the whole tree.
    """
    if any(len(subtrees) != 1 for subtrees in by_rank):
        return False
    tree: TreeSum[str] = TreeSum(leaves, lambda left, right: f"({left}+{right})")
    for rank, subtrees in enumerate(by_rank):
        tree.push(subtrees[0], str(rank))
    fold = "0"
    for rank in range(1, len(by_rank)):
        fold = f"({fold}+{rank})"
    return tree.total() == fold
