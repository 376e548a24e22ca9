"""Lets a backward pass come by every parameter, also by those that it has no gradient for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

__all__ = ["ReachingAll", "reach"]


class _Reach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, sparse: frozenset[int], *parameters: torch.Tensor) -> torch.Tensor:
        ctx.nothing = [_no_rows(p) if id(p) in sparse else None for p in parameters]
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None, *ctx.nothing


def _no_rows(parameter: torch.Tensor) -> torch.Tensor:
    """The sparse gradient of an embedding none of whose rows was looked up."""
    indices = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
    values = parameter.new_empty(0, *parameter.shape[1:])
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)


def reach(loss: torch.Tensor, parameters: Sequence[nn.Parameter], sparse: frozenset[int] = frozenset()) -> torch.Tensor:
    """`loss`, whose backward pass comes by all of `parameters` and adds nothing to their gradients.

    No value of theirs is looked at, so that an infinite one does no harm: 0 times it would be NaN.

    Args:
        loss: 0-dim tensor.
        parameters: the trained ones.
        sparse: the id() of those whose gradient is sparse: the reducer wants one from each, if only without rows.
    """
    reached: torch.Tensor = _Reach.apply(loss, sparse, *parameters)  # type: ignore[no-untyped-call]
    return reached


def _sparse_ones(module: nn.Module) -> frozenset[int]:
    layers = [layer for layer in module.modules() if isinstance(layer, (nn.Embedding, nn.EmbeddingBag))]
    return frozenset(id(layer.weight) for layer in layers if layer.sparse)


class ReachingAll(nn.Module):
    """A module whose loss reaches every trained parameter: what `DistributedDataParallel` counts on.

    Its reducer waits for each parameter. One that takes no part in a worker's forward pass (a head that is not in use,
    a layer that was skipped, an expert without tokens) would make it fail, or leave a gradient as it is on this worker.
    Its own option for this, find_unused_parameters, sends a map of the used ones at every step, and leaves out those
    that nobody used; but which they were is known on the device alone, and waiting for it there stalls the host. Here
    nothing is sent: a parameter that took no part adds nothing to the sum, and its gradient is zero. `TrainStep` sees
    to the same on one worker. It costs 0.6 µs for each parameter tensor and step.

    Args:
        module: (data, n) → (sum of the loss, what it is a sum over).
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._trained = [p for p in module.parameters() if p.requires_grad]
        self._sparse = _sparse_ones(module)
        self._reentrant: bool | None = None

    def forward(self, data: Any, size: int) -> tuple[torch.Tensor, torch.Tensor | int]:
        """What the module returns, the loss with a way to every parameter."""
        loss, count = self.module(data, size)
        if not loss.requires_grad:  # a mistake in the model, which the backward pass shall say as on one worker
            return loss, count
        if self._reentrant is None and size:
            self._reentrant = _has_reentrant_checkpoint(loss)
        return (loss if self._reentrant else reach(loss, self._trained, self._sparse)), count


def _has_reentrant_checkpoint(loss: torch.Tensor) -> bool:
    """Whether `torch.utils.checkpoint` was used with use_reentrant=True.

    It runs a backward pass of its own inside, which comes by its parameters; another way to them would be a second
    time, which the reducer refuses.
    """
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if node.name() == "CheckpointFunctionBackward":
            return True
        seen.add(node)
        waiting.extend(following for following, _ in node.next_functions)
    return False
