"""Unused parameters: connects every parameter to the loss, so that a backward pass reaches it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


class _ConnectParameters(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, loss: torch.Tensor, sparse: frozenset[int], *parameters: torch.Tensor
    ) -> torch.Tensor:
        ctx.gradients = [_empty_sparse_gradient(p) if id(p) in sparse else None for p in parameters]
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None, *ctx.gradients


def _empty_sparse_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Return the sparse gradient of an embedding without looked-up rows."""
    indices = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
    values = parameter.new_empty(0, *parameter.shape[1:])
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)


def connect_parameters(
    loss: torch.Tensor, parameters: Sequence[nn.Parameter], sparse: frozenset[int] = frozenset()
) -> torch.Tensor:
    """Return `loss` with a graph that reaches all of `parameters` and adds nothing to their
    gradients.

    It does not read the parameters' values: 0 times an infinite one would be NaN.

    Args:
        loss: 0-dim tensor.
        parameters: the trained parameters.
        sparse: id() of the parameters with sparse gradients; the reducer needs a gradient of each,
            even without rows.
    """
    connected: torch.Tensor = _ConnectParameters.apply(loss, sparse, *parameters)  # type: ignore[no-untyped-call]
    return connected


def sparse_parameters(module: nn.Module) -> frozenset[int]:
    """Return the id() of the parameters with sparse gradients."""
    layers = [
        layer for layer in module.modules() if isinstance(layer, (nn.Embedding, nn.EmbeddingBag))
    ]
    return frozenset(id(layer.weight) for layer in layers if layer.sparse)


class ConnectAllParameters(nn.Module):
    """A module whose loss reaches every trained parameter, as `DistributedDataParallel` requires.

    DDP's reducer waits for each parameter. A parameter that a worker's forward pass does not use
    (an unused head, a skipped layer, an expert without tokens) would make it fail, or keep its
    local gradient on this worker. DDP's find_unused_parameters reduces a map of the used parameters
    at every step, and skips those that no worker used; but that map is known on the device only,
    and reading it stalls the host. Here nothing is sent: an unused parameter adds nothing to the
    sum, and its gradient is zero. `TrainStep` does the same on one worker. The cost is 0.6 µs for
    each parameter tensor and step.

    Args:
        module: (data, n) → (sum of the loss, what it is a sum over).
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._trained = [p for p in module.parameters() if p.requires_grad]
        self._sparse = sparse_parameters(module)
        self._reentrant: bool | None = None

    def forward(self, data: Any, size: int) -> tuple[torch.Tensor, torch.Tensor | int]:
        """Return the module's output, with every parameter connected to the loss."""
        loss, count = self.module(data, size)
        # an error of the model, which the backward pass raises as on one worker
        if not loss.requires_grad:
            return loss, count
        if self._reentrant is None and size:
            self._reentrant = _has_reentrant_checkpoint(loss)
        return (
            loss if self._reentrant else connect_parameters(loss, self._trained, self._sparse)
        ), count


def _has_reentrant_checkpoint(loss: torch.Tensor) -> bool:
    """Return whether the graph contains `torch.utils.checkpoint` with use_reentrant=True.

    It runs a nested backward pass that reaches its parameters; another path to them would reach
    them twice, which the reducer refuses.
    """
    stack = [loss.grad_fn]
    seen = set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        if node.name() == "CheckpointFunctionBackward":
            return True
        seen.add(node)
        stack.extend(next_node for next_node, _ in node.next_functions)
    return False
