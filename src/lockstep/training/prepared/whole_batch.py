"""Outputs of the whole global batch on each worker, for losses in which samples are compared with
each other.
"""

from __future__ import annotations

from typing import Any

import torch

from ...communicator import Communicator
from ...errors import ConfigError
from ...flight_recorder import named
from ...parallel import shards
from .prepared_loop import running_loop


def whole_batch(output: torch.Tensor) -> torch.Tensor:
    """Return the rows of `output` for all samples of the global batch, in a loop prepared with
    `lockstep.prepare`.

    A loss that compares the samples of a batch, such as one with in-batch negatives, is computed
    from them on every worker, and has the value that it has on one worker:

        for images, texts in loader:
            optimizer.zero_grad()
            left = lockstep.whole_batch(image_model(images))
            right = lockstep.whole_batch(text_model(texts))
            loss = F.cross_entropy(left @ right.T, torch.arange(len(left), device=left.device))
            loss.backward()
            optimizer.step(loss=loss)

    Gradients go back through it to the worker that has computed the rows. Each worker calls it
    equally often in each body. It is not for loops with virtual workers, in which a worker computes
    its shards one after another.

    Args:
        output: a tensor with one row for each sample of this worker's part of the batch, (n, …).
            For several views call it for each: ``first, second = output.chunk(2)``.

    Returns:
        The rows of all workers in the order of the samples in the global batch, (global n, …).

    Raises:
        ConfigError: outside of the body of a loop over a prepared loader or `shards`, with virtual
            workers, or for another number of rows than there are samples.
    """
    loop = running_loop()
    if loop is None or loop.parts.current is None:
        hint = (
            "In an evaluation workers have different numbers of batches: use a metric with "
            "lockstep.whole_set."
        )
        expected = "a call in the body of a loop over a prepared loader or optimizer.shards(batch)"
        raise ConfigError(
            "whole_batch", expected, found="one outside, or where gradients are disabled", hint=hint
        )
    parts = loop.parts
    shard = loop.parts.current
    comm = parts.comm
    if parts.exact and parts.virtual_workers > 1:
        raise ConfigError(
            "virtual_workers",
            "none in a loop that uses the whole batch at once",
            parts.virtual_workers,
            "A worker computes its shards one after another, so that the outputs of all are never "
            "there at once.",
        )
    loop.repeats.do_not_repeat("lockstep.whole_batch()")
    rows = len(output) if output.dim() else 0
    if shard.samples and rows != shard.samples:
        hint = "Call it for each view of the samples: first, second = output.chunk(2)."
        raise ConfigError(
            "output", f"{shard.samples} rows, one for each sample of this part", rows, hint
        )
    shard.whole_batch = True
    if comm.size == 1:
        return output
    row_counts = (
        shards.sizes(shard.total, comm.size)
        if shard.left_out is None
        else comm.allgather_object(shard.samples)
    )
    gathered: torch.Tensor = _GatherRows.apply(output, row_counts, comm)  # type: ignore[no-untyped-call]
    return gathered


class _GatherRows(torch.autograd.Function):
    """Gathers rows; in the backward pass sums the gradients of all workers' losses, by their
    weights in the step.

    With weights w and losses L of the workers, the gradient of a step is that of the sum of w·L,
    and each worker adds w times its own ``.grad``. So its rows get the sum of w·dL/drows over all
    workers, divided by its own w.
    """

    @staticmethod
    def forward(
        ctx: Any, output: torch.Tensor, sizes: list[int], comm: Communicator
    ) -> torch.Tensor:
        ctx.sizes = sizes
        ctx.comm = comm
        ctx.shape = output.shape
        own_rows = output.detach()[: sizes[comm.rank]]
        padded = own_rows.new_zeros(max(sizes), *own_rows.shape[1:])
        padded[: len(own_rows)] = own_rows
        with named("rows of the whole batch"):
            parts = comm.allgather(padded)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        sizes = ctx.sizes
        comm = ctx.comm
        size = sizes[comm.rank]
        total = sum(sizes)
        weighted = gradient * (size / total) if size else torch.zeros_like(gradient)
        with named("gradients of the rows of the whole batch"):
            summed = comm.allreduce(weighted.contiguous())
        own_gradient = gradient.new_zeros(ctx.shape)
        if size:
            start = sum(sizes[: comm.rank])
            own_gradient[:size] = summed[start : start + size] * (total / size)
        return own_gradient, None, None
