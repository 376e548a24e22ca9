"""One fixed association for a sum over numbered leaves, whoever holds which of them; pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

__all__ = ["Node", "TreeSum", "is_left_fold", "nodes", "total"]

T = TypeVar("T")

Node = tuple[int, int]
"""(first leaf, width): the subtree over the leaves [first, first + width), of which those past the last leaf of all are
left out. The width is a power of two that divides the first leaf."""


def nodes(start: int, stop: int, leaves: int) -> list[Node]:
    """The largest subtrees that lie within the leaves [start, stop) of all `leaves`, in order.

    Beyond the last leaf nothing is missing, so the last run's subtrees may reach past it: of 7 leaves the run [4, 7)
    is the one subtree (4, 4). A run of n leaves has fewer than 2·log2(n) + 2.
    """
    end = _padded(leaves) if stop >= leaves else stop
    found = []
    while start < stop:
        width = start & -start or _padded(leaves)
        while start + width > end:
            width //= 2
        found.append((start, width))
        start += width
    return found


def _padded(leaves: int) -> int:
    """The width of the whole tree: the next power of two."""
    return 1 << max(0, leaves - 1).bit_length()


class TreeSum(Generic[T]):
    """A sum over `leaves` leaves, in the association of the binary tree over their numbers.

    The tree is that over the next power of two, with the leaves that are missing left out:

        leaves = 7:  ((0 + 1) + (2 + 3)) + ((4 + 5) + 6)

    Subtrees come in order. Two siblings are added as soon as both are complete, as a binary counter carries, so that
    a run of n leaves from the first on never needs more than log2(n) + 1 values at once.

    Args:
        leaves: their number, at least 1.
        add: (left, right) → their sum; may change either.
    """

    def __init__(self, leaves: int, add: Callable[[T, T], T]) -> None:
        self._leaves, self._add = leaves, add
        self._held: list[tuple[Node, T]] = []

    def push(self, node: Node, value: T) -> None:
        """Take in the sum over a subtree, the next in order after the one before."""
        first, width = node
        while first or width < self._leaves:
            if not first & width:  # a left child: its sibling is still to come, unless it has no leaves
                if first + width < self._leaves:
                    break
            elif self._held and self._held[-1][0] == (first - width, width):
                (first, _), left = self._held.pop()
                value = self._add(left, value)
            else:
                break
            width *= 2
        self._held.append(((first, width), value))

    @property
    def held(self) -> list[tuple[Node, T]]:
        """The subtrees that are complete but have no complete sibling, in order, with their sums."""
        return list(self._held)

    def total(self) -> T:
        """The sum over all leaves.

        Raises:
            ValueError: when some have not been taken in.
        """
        if len(self._held) != 1 or self._held[0][0][0] != 0 or self._held[0][0][1] < self._leaves:
            raise ValueError(f"held: expected the whole tree over {self._leaves} leaves, got {self._nodes()}")
        return self._held[0][1]

    def _nodes(self) -> list[Node]:
        return [node for node, _ in self._held]

    def clear(self) -> None:
        """Begin anew."""
        self._held.clear()


def total(leaves: Iterable[T], add: Callable[[T, T], T]) -> T:
    """The sum over all `leaves`, at least one, in the association of `TreeSum`."""
    values = list(leaves)
    tree = TreeSum(len(values), add)
    for number, value in enumerate(values):
        tree.push((number, 1), value)
    return tree.total()


def is_left_fold(runs: list[list[Node]], leaves: int) -> bool:
    """Whether the tree over the holders' subtrees is ((x0 + x1) + x2) + …, with one subtree from each holder.

    Args:
        runs: for each holder, in order, its `nodes`.
        leaves: of the whole tree.
    """
    if any(len(run) != 1 for run in runs):
        return False
    tree: TreeSum[str] = TreeSum(leaves, lambda left, right: f"({left}+{right})")
    for holder, run in enumerate(runs):
        tree.push(run[0], str(holder))
    fold = "0"
    for holder in range(1, len(runs)):
        fold = f"({fold}+{holder})"
    return tree.total() == fold
