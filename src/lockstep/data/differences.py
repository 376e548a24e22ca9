"""What differs between two readings of a sample, and whether they can be the same data all the
same.
"""

from __future__ import annotations

import math
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from .digest import Digest, Leaf


class Difference(NamedTuple):
    """A leaf that is another one in two readings of a sample.

    Attributes:
        path: its place in the sample.
        one, other: the leaf in both; None where there is none.
        only_rounded: whether rounding explains it.
        is_refused: whether these cannot be the same data.
    """

    path: str
    one: Leaf | None
    other: Leaf | None
    only_rounded: bool
    is_refused: bool

    @property
    def of_single_values(self) -> bool:
        """Whether both are single values, and not the numbers of tensors or arrays."""
        return all(leaf is not None and leaf.text != "" for leaf in (self.one, self.other))

    @property
    def values(self) -> tuple[str, str]:
        """The two values, for a message; of tensors and arrays, types and shapes."""
        return _value(self.one), _value(self.other)


def _value(leaf: Leaf | None) -> str:
    return "missing" if leaf is None else leaf.text or leaf.kind


def differences(
    left: Digest, right: Digest, passed_over: AbstractSet[str] = frozenset()
) -> list[Difference]:
    """Return the leaves in which two readings of a sample differ, but for those that are
    `passed_over`.

    What a collate function puts into batches is refused where it differs: tensors, arrays, numbers,
    texts and whatever else is in containers, which are tuples, lists, dicts, sets and dataclasses.
    Two kinds of values may be others in each process though nothing is wrong with the data:

    - attributes of an object of any other class: a number of a process, an open file, an address.
      Tensors and arrays in them are data, as in those of a graph, and refused where both readings
      have them;
    - the path of a file, such as a copy in a temporary folder, if the sample has a tensor or an
      array as well: those are what the training sees, and are compared. Without, the path is what
      the samples are made of.
    """
    paths = [path for path in sorted(left.keys() | right.keys()) if path not in passed_over]
    pairs = [(path, left.get(path), right.get(path)) for path in paths]
    numbers = [
        (a, b) for _, a, b in pairs if a is not None and b is not None and not a.text and not b.text
    ]
    same_numbers = bool(numbers) and all(_alike(a, b) for a, b in numbers)
    differing = []
    for path, a, b in pairs:
        if a is None or b is None:
            present = a or b
            differing.append(
                Difference(path, a, b, False, not (present is not None and present.of_object))
            )
        elif (a.kind, a.bits) != (b.kind, b.bits):
            rounded = _alike(a, b)
            if a.of_object or b.of_object:
                is_data = not a.text and not b.text
            else:
                is_data = not (a.is_path and b.is_path and same_numbers)
            differing.append(Difference(path, a, b, rounded, not rounded and is_data))
    return differing


def _alike(left: Leaf, right: Leaf) -> bool:
    """Return whether two leaves have the same values, up to rounding."""
    return left.kind == right.kind and (left.bits == right.bits or _rounded(left, right))


def _rounded(left: Leaf, right: Leaf) -> bool:
    if left.sketch is None or right.sketch is None:
        return False
    distance = math.dist(left.sketch[:-1], right.sketch[:-1])
    return distance <= left.tolerance * max(left.sketch[-1], right.sketch[-1])
