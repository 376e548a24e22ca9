"""Slurm's short forms of lists: nodes, and the number of tasks on each of them (pure)."""

from __future__ import annotations

import itertools
import re

__all__ = ["expand_nodes", "expand_tasks"]

# what stands between two commas: names, and brackets with lists of numbers of their own
_NAME = re.compile(r"(?:[^\[\],\s]|\[[^\[\]\s]+\])+")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def expand_nodes(text: str) -> list[str]:
    """The names in a node list such as ``node[01-03,7],gpu4``, in its order.

    Raises:
        ValueError: for another text.
    """
    names = _NAME.findall(text)
    if ",".join(names) != text or not names:
        raise ValueError(f"not a list of nodes: {text!r}")
    return [node for name in names for node in _expand_name(name)]


def _expand_name(name: str) -> list[str]:
    parts = re.split(r"\[(.+?)\]", name)  # text and the inside of brackets, in turn
    choices = [_expand_numbers(part) if i % 2 else [part] for i, part in enumerate(parts)]
    return ["".join(chosen) for chosen in itertools.product(*choices)]


def _expand_numbers(text: str) -> list[str]:
    numbers: list[str] = []
    for part in text.split(","):
        found = _RANGE.fullmatch(part)
        if found is None:
            raise ValueError(f"not a range of numbers: {part!r}")
        first, last = found[1], found[2] or found[1]
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def expand_tasks(text: str) -> list[int]:
    """The number of tasks on each node, from a text such as ``2(x3),1``.

    Raises:
        ValueError: for another text.
    """
    counts: list[int] = []
    for part in text.split(","):
        found = _TASKS.fullmatch(part)
        if found is None:
            raise ValueError(f"not a list of numbers of tasks: {text!r}")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts
