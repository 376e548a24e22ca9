"""The graph that autograd has recorded of a loss: its nodes, and walks over them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import torch

Node = Any  # torch.autograd.graph.Node, whose saved values differ from class to class

# How many nodes of a graph are looked at: a language model of 48 layers has some 3,000.
MOST_NODES = 50_000


def next_nodes(node: Node) -> list[Node]:
    """Return the nodes to which `node` passes gradients on."""
    return [following for following, _ in node.next_functions if following is not None]


def walk(roots: Iterable[Node], stop: Callable[[Node], bool] = lambda _: False) -> Iterator[Node]:
    """Yield each node below `roots` once; not what is below a node at which `stop` is true."""
    seen = set[Node]()
    waiting = list(roots)
    while waiting and len(seen) < MOST_NODES:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        if not stop(node):
            waiting += next_nodes(node)


def kind_of(node: Node) -> str:
    """Return the class of a node without its number: "MulBackward" for "MulBackward0"."""
    return _without_number(node.name())


@cache  # there are as many names as kinds of nodes
def _without_number(name: str) -> str:
    return name.rstrip("0123456789")


def parameters_reached(root: torch.Tensor) -> set[int]:
    """Return the ids of the leaf tensors that a backward pass from `root` reaches."""
    leaves = (getattr(node, "variable", None) for node in walk([root.grad_fn]))
    return {id(leaf) for leaf in leaves if leaf is not None}
