"""Parameters in groups whose gradients are summed and sent together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from ..errors import ConfigError
from ..tree import Node, TreeSum

__all__ = ["Bucket", "Gradients", "grouped", "view_like"]

Gradients = list[torch.Tensor | None]
"""One gradient for each parameter of a bucket; None where it took no part, which adds nothing."""

# Elements to which a parameter's place in a flat tensor is rounded up: 64 bytes of float32, as torch's allocations
# begin, so that no kernel finds another alignment in a bucket than in a tensor of its own.
_ALIGN = 16


class Bucket:
    """Some parameters of one dtype on one device, and the tree sum of their gradients over this worker's shards.

    Args:
        parameters: dense ones.
        shards: of the global batch, the leaves of the tree.

    Attributes:
        tree: the sum so far.
        numel: elements of a flat tensor with room for all gradients.
        waiting: parameters whose last gradient has not arrived yet.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], shards: int) -> None:
        self.parameters = list(parameters)
        self.tree: TreeSum[Gradients] = TreeSum(shards, self._added)
        self._spare: list[Gradients] = []
        self.waiting = len(self.parameters)
        self._starts, self.numel = _places(self.parameters)

    def _added(self, left: Gradients, right: Gradients) -> Gradients:
        self._spare.append(right)
        return added(left, right)

    def release(self) -> None:
        """Let go of one set of gradients that has been added to another, as a new one is about to be made.

        Freed all at once, their memory would go back to the system, which has to clear it when it is asked for again:
        a tenth of the time of a step for a model of 10 M parameters.
        """
        if self._spare:
            self._spare.pop()

    def retire(self) -> None:
        """The sums have been copied elsewhere: begin anew, and keep their memory for `release`."""
        self._spare += [gradients for _, gradients in self.tree.held]
        self.tree.clear()

    def take(self, node: Node) -> None:
        """Take the gradients that the parameters have now as those of `node`, the next in order; leaves them None.

        Raises:
            ConfigError: when one is sparse.
        """
        gradients = [p.grad for p in self.parameters]
        _check_dense(gradients)
        for p in self.parameters:
            p.grad = None
        self.tree.push(node, gradients)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The places of the parameters in `flat`, a 1-d tensor of at least `numel` elements."""
        return [view_like(p, flat, start) for p, start in zip(self.parameters, self._starts, strict=True)]


def added(left: Gradients, right: Gradients) -> Gradients:
    """The sums of two sets of gradients, made in the memory of the left ones."""
    if _all_there(left) and _all_there(right):
        torch._foreach_add_(left, right)  # type: ignore[arg-type]
        return left
    return [b if a is None else a if b is None else a.add_(b) for a, b in zip(left, right, strict=True)]


def _all_there(gradients: Gradients) -> bool:
    return not any(gradient is None for gradient in gradients)


def view_like(parameter: torch.Tensor, flat: torch.Tensor, start: int) -> torch.Tensor:
    """The elements of `flat` from `start` on, as a tensor with the shape and the strides of `parameter`.

    The strides too, as autograd gives them to a gradient, and a norm adds elements in the order in which they lie.
    """
    strides = parameter.stride() if _is_dense(parameter) else torch.empty(parameter.shape, device="meta").stride()
    return flat.as_strided(parameter.shape, strides, flat.storage_offset() + start)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill a stretch of memory without gaps and without sharing any."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _places(parameters: Sequence[nn.Parameter]) -> tuple[list[int], int]:
    starts, end = [], 0
    for p in parameters:
        starts.append(end)
        end += -(-p.numel() // _ALIGN) * _ALIGN
    return starts, end


def grouped(
    parameters: Sequence[nn.Parameter], limit: int | None, make: Callable[[Sequence[nn.Parameter]], Bucket]
) -> list[Bucket]:
    """Buckets of `parameters` in order, each of one dtype and device and, given a `limit`, about so many bytes.

    They come in the order in which they will be complete when gradients arrive in the order of `parameters`.
    """
    filling: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    done: list[list[nn.Parameter]] = []
    for p in parameters:
        group = filling.setdefault((p.dtype, p.device), [])
        group.append(p)
        if limit is not None and sum(q.numel() * q.element_size() for q in group) >= limit:
            done.append(filling.pop((p.dtype, p.device)))
    place = {id(p): number for number, p in enumerate(parameters)}
    return [make(group) for group in sorted([*done, *filling.values()], key=lambda group: place[id(group[-1])])]


def _check_dense(gradients: Gradients) -> None:
    if any(gradient is not None and gradient.layout is not torch.strided for gradient in gradients):
        hint = "Make embeddings with sparse=False."
        raise ConfigError(
            "parameters", "parameters with dense gradients", found="one with a sparse gradient", hint=hint
        )
