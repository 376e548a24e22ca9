"""Gradients of the weights of large linear layers, computed once for all shards of a worker in
place of once in each pass.

With few samples in a shard, such a layer spends most of its time on the memory of its weight's
gradient: each pass writes it, and the tree sum reads it again. But the gradient in one shard is the
product of two small matrices, ``grad_output.T @ input``. So the passes keep these two. When the sum
over a subtree of shards is needed, it is computed by blocks of rows, which stay in the processor's
cache: the products of all shards for these rows, added up in the order of the tree.

All numbers have the bits that autograd would give them. A kernel might add up in another order in a
block than in the whole product: whether it does is tried before, for each shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

__all__ = ["LARGE", "MOST_ROWS", "Product", "Sum", "Value", "WeightGradients", "formed"]

LARGE = 1 << 20
"""Bytes of a weight from which on this is done."""

MOST_ROWS = 64
"""Rows of a layer's input in a shard up to which this is done: to multiply more of them takes
longer than what it saves.
"""

# Bytes of a block of rows. The cache has to hold one for each level of the tree, and a block must
# take longer than the calls of Python for it.
_BLOCK = 1 << 20
# Rows of a block are a multiple of these, so that each begins at a multiple of 64 bytes, as torch's
# allocations do: kernels may choose by that.
_ALIGN = 16


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """The gradient of a weight in one shard, which has not been computed.

    Attributes:
        gradient: of the layer's output, shape (rows, out_features).
        inputs: of the layer, shape (rows, in_features).
    """

    gradient: torch.Tensor
    inputs: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Sum:
    """The sum of two gradients, which has not been computed."""

    left: Value
    right: Value


Value = torch.Tensor | Product | Sum
"""A gradient, or what it is computed from."""


def formed(value: Value, weight: torch.Tensor) -> torch.Tensor:
    """Return a gradient of `weight` as a tensor, computed if it is not there yet."""
    if isinstance(value, torch.Tensor):
        return value
    gradient = torch.empty_like(weight, requires_grad=False)
    rows = _rows_of_block(weight.shape[1])
    memory = [gradient.new_empty(rows, weight.shape[1]) for _ in range(_levels(value))]
    with torch.no_grad():
        for start in range(0, len(gradient), rows):
            _form_block(value, start, gradient[start : start + rows], memory)
    return gradient


def _rows_of_block(columns: int) -> int:
    return max(1, _BLOCK // (4 * columns) // _ALIGN) * _ALIGN


def _levels(value: Value) -> int:
    """Return how many blocks the sum of one block needs memory for, beside its own."""
    if not isinstance(value, Sum):
        return 0
    return max(_levels(value.left), 1 + _levels(value.right))


def _form_block(
    value: Value, start: int, block: torch.Tensor, memory: Sequence[torch.Tensor]
) -> None:
    """Fill `block` with the rows of a gradient from `start` on."""
    stop = start + len(block)
    if isinstance(value, Sum):
        _form_block(value.left, start, block, memory)
        right = memory[0][: len(block)]
        _form_block(value.right, start, right, memory[1:])
        block.add_(right)
    elif isinstance(value, Product):
        torch.mm(value.gradient.t()[start:stop], value.inputs, out=block)
    else:
        block.copy_(value[start:stop])


@cache
def _blocks_have_same_bits(rows: int, shape: tuple[int, int], *settings: object) -> bool:
    """Return whether a product has the same bits by blocks as whole, which is tried with random
    numbers.

    The order in which a kernel adds up depends on shapes and settings, and not on the numbers.

    Args:
        rows: of the inputs, and of the gradient of the outputs.
        shape: of the weight.
        settings: of torch, by which it may choose kernels.
    """
    generator = torch.Generator().manual_seed(0)
    product = Product(
        torch.randn(rows, shape[0], generator=generator),
        torch.randn(rows, shape[1], generator=generator),
    )
    whole = product.gradient.t().mm(product.inputs)
    step = _rows_of_block(shape[1])
    memory = torch.empty(step, shape[1])
    for start in range(0, shape[0], step):
        expected = whole[start : start + step]
        block = memory[: len(expected)]
        _form_block(product, start, block, ())
        if not torch.equal(block, expected):
            return False
    return True


class WeightGradients:
    """Finds, in the graph of a pass, the layers whose weights' gradients need not be computed by
    its backward pass.

    A weight is one of them if its gradient comes from a single linear layer with a bias, and nobody
    else looks at it during the pass. In doubt autograd computes it.
    """

    def __init__(self) -> None:
        self._hooks: list[Any] = []

    def leaves_of(
        self,
        loss: torch.Tensor,
        trained: Iterable[nn.Parameter],
        on_product: Callable[[nn.Parameter, Product], None],
    ) -> tuple[torch.Tensor, ...]:
        """Return the leaves of a graph whose gradients its backward pass has to compute; none if
        that is all of them.

        Args:
            loss: the root of the graph.
            trained: the parameters whose gradients are wanted.
            on_product: called during the backward pass with each of these weights and its gradient.
                Only the graph keeps it, so that a method of the reducer makes no cycle with it.
        """
        self.forget()
        weights = {id(p): p for p in trained if p.nbytes >= LARGE and _may_be_left_out(p)}
        if not weights or loss.grad_fn is None:
            return ()
        leaves, layers = _walk(loss.grad_fn, weights)
        for key, layer in layers.items():
            del leaves[key]
            self._expect(weights[key], layer, on_product)
        return tuple(leaves.values()) if layers else ()

    def _expect(
        self,
        weight: nn.Parameter,
        layer: Any,
        on_product: Callable[[nn.Parameter, Product], None],
    ) -> None:
        def note(gradients: Any) -> None:
            hook.remove()  # which refers to the node that has it
            # Copies, which are small beside the weight: the program may use the memory again.
            gradient, inputs = (
                tensor.detach().clone(memory_format=torch.contiguous_format)
                for tensor in (gradients[0], layer._saved_mat1)
            )
            on_product(weight, Product(gradient, inputs))

        hook = layer.register_prehook(note)
        self._hooks.append(hook)

    def forget(self) -> None:
        """Remove what a pass has left that was not completed."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def _may_be_left_out(parameter: nn.Parameter) -> bool:
    """Return whether a parameter may be the weight of such a layer, and no hook looks at its
    gradient.
    """
    return (
        type(parameter) is nn.Parameter
        and parameter.dim() == 2
        and parameter.dtype is torch.float32
        and parameter.is_cpu
        and parameter.is_contiguous()
        and not parameter._backward_hooks
    )


def _walk(
    root: Any, weights: dict[int, nn.Parameter]
) -> tuple[dict[int, torch.Tensor], dict[int, Any]]:
    """Return the leaves of a graph, and the nodes of the linear layers of some of `weights`; all by
    the identity of the leaf.
    """
    leaves: dict[int, torch.Tensor] = {}
    users: dict[int, list[Any]] = {}  # of each weight, by its identity
    callers: dict[Any, list[Any]] = {}  # of each transposition
    seen = {root}
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if isinstance(node, BackwardCFunction):
            return {}, {}  # its backward pass may be any program, also one that needs all leaves
        for following, _ in node.next_functions:
            if following is None:
                continue
            leaf = getattr(following, "variable", None)
            if leaf is not None:
                leaves[id(leaf)] = leaf
                if id(leaf) in weights:
                    users.setdefault(id(leaf), []).append(node)
                continue
            if following.name() == "TBackward0":
                callers.setdefault(following, []).append(node)
            if following not in seen:
                seen.add(following)
                waiting.append(following)
    layers = {}
    for key, nodes in users.items():
        layer = callers.get(nodes[0], [])
        if len(nodes) == 1 and len(layer) == 1 and _is_linear(layer[0], nodes[0], weights[key]):
            layers[key] = layer[0]
    return leaves, layers


def _is_linear(layer: Any, transposition: Any, weight: nn.Parameter) -> bool:
    """Return whether a node is that of a linear layer with a trained bias and this weight, and the
    gradient of the weight has the same bits by blocks.
    """
    if layer.name() != "AddmmBackward0" or layer._saved_alpha != 1:
        return False
    bias, _, second = (following for following, _ in layer.next_functions)
    # The backward pass reaches the layer at any rate, for its bias.
    if second is not transposition or bias is None or not hasattr(bias, "variable"):
        return False
    # The inputs may be computed again when they are asked for, as by a checkpoint, and only once.
    if getattr(layer._raw_saved_mat1, "unpack_hook", True) is not None:
        return False
    rows = layer._saved_mat1_sym_sizes[0]
    settings = torch.get_num_threads(), torch.get_float32_matmul_precision()
    return rows <= MOST_ROWS and _blocks_have_same_bits(rows, tuple(weight.shape), *settings)
