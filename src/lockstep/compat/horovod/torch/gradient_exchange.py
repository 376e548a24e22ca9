"""How the gradients of a `DistributedOptimizer` reach the other ranks: compressed, dense or sparse,
and by name.

The optimizer is an adapter of `lockstep.parallel.reducer.Reducer`, which knows which gradients are
complete, sends them while the backward pass runs, and puts the results into ``.grad``. Only the
exchange is Horovod's own. It goes through the engine, and not straight over a process group as that
of the reducer, for three promises of Horovod's:

- `hvd.join`: a rank without further batches takes part in the reductions of the others, of which it
  only learns from what they announce. So a rank cannot know in advance which gradients come next.
- Ranks may call operations in different orders: the steps of two optimizers, or reductions of
  gradients and other operations in between. The engine finds by name what belongs together; a
  process group needs one order.
- A gradient that differs in shape, dtype or reduction, or that a rank does not submit, is named in
  an error, in the warning of the stall check and in the timeline. So each gradient, or group, is a
  bucket of its own; the engine fuses those that are complete on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lockstep.parallel.gradient_buckets import Bucket, Gradients

from ..common.process_sets import ProcessSet
from .allreduce import start_gradient_allreduce
from .handles import synchronize
from .mpi_ops import start_sparse_allreduce

__all__ = ["EngineExchange", "NoExchange", "Reduction"]

Parameter = torch.Tensor


@dataclass
class Reduction:
    """How the gradients of one optimizer are reduced.

    Attributes:
        names: the name of each parameter.
        compression: a class with `compress` and `decompress`.
        process_set: the ranks.
        op: Average, Sum or Adasum.
        predivide: for Average, gradients are divided by it before the sum, and multiplied by it
            after.
        sparse_as_dense: whether sparse gradients are reduced as dense ones.
        sparse_dims: the number of sparse dimensions, for the parameters that have had a sparse
            gradient.
        left_out: whether gradients of this step were complete while there was no other rank.
    """

    names: dict[Parameter, str]
    compression: Any
    process_set: ProcessSet
    op: int
    predivide: float = 1.0
    sparse_as_dense: bool = False
    sparse_dims: dict[Parameter, int] = field(default_factory=dict)
    left_out: bool = False

    def is_alone(self) -> bool:
        """Return whether there is no other rank; in an elastic job that may change between two
        steps.
        """
        return not self.process_set.included() or self.process_set.size() == 1

    def refuse_further_pass(self) -> None:
        """Refuse a gradient that comes after the last backward pass of a step; a single rank may
        make any number.
        """
        if not self.is_alone():
            raise AssertionError(
                "gradients were computed more than backward_passes_per_step times before step() "
                "or synchronize(). Increase backward_passes_per_step to accumulate gradients over "
                "several passes."
            )


class EngineExchange:
    """Reduces the gradients of one bucket in one operation of the engine, under the name of its
    first parameter.

    If one of them is sparse, each is reduced by itself. A missing gradient is one of zeros. Results
    are in the tensors that the gradients are in already.

    Args:
        bucket: the bucket.
        reduction: how to reduce.
    """

    def __init__(self, bucket: Bucket, reduction: Reduction) -> None:
        self._parameters: Sequence[Parameter] = bucket.parameters
        self._reduction = reduction
        self._pending: list[Callable[[], list[torch.Tensor]]] = []

    def start(self, partial_sums: list[tuple[Any, Gradients]]) -> None:
        """Submit the gradients of this rank; on a single rank do nothing."""
        if self._reduction.is_alone():
            self._reduction.left_out = True
            return
        ((_, of_rank),) = partial_sums
        gradients = [
            self._present(p, gradient)
            for p, gradient in zip(self._parameters, of_rank, strict=True)
        ]
        if (
            any(gradient.is_sparse for gradient in gradients)
            and not self._reduction.sparse_as_dense
        ):
            pairs = zip(self._parameters, gradients, strict=True)
            self._pending = [
                self._start_sparse(p, gradient)
                if gradient.is_sparse
                else self._start_dense([p], [gradient])
                for p, gradient in pairs
            ]
        else:
            self._pending = [self._start_dense(self._parameters, gradients)]

    def _present(self, p: Parameter, gradient: torch.Tensor | None) -> torch.Tensor:
        sparse_dims = self._reduction.sparse_dims
        if gradient is None:
            zeros = torch.zeros_like(p)
            return zeros.to_sparse(sparse_dims[p]) if p in sparse_dims else zeros
        if gradient.is_sparse:
            sparse_dims[p] = gradient.sparse_dim()
        return gradient

    def _start_dense(
        self, parameters: Sequence[Parameter], gradients: list[torch.Tensor]
    ) -> Callable[[], list[torch.Tensor]]:
        reduction = self._reduction
        dense = [
            gradient.to_dense() if gradient.is_sparse else gradient.detach()
            for gradient in gradients
        ]
        compressed, ctxs = zip(
            *(reduction.compression.compress(tensor) for tensor in dense), strict=True
        )
        name = reduction.names[parameters[0]]
        handle = start_gradient_allreduce(
            compressed, name, reduction.op, reduction.predivide, reduction.process_set
        )

        def finish() -> list[torch.Tensor]:
            reduced = [
                reduction.compression.decompress(tensor, ctx)
                for tensor, ctx in zip(synchronize(handle), ctxs, strict=True)
            ]
            return [
                _stored_as(gradient, tensor)
                for gradient, tensor in zip(gradients, reduced, strict=True)
            ]

        return finish

    def _start_sparse(
        self, p: Parameter, gradient: torch.Tensor
    ) -> Callable[[], list[torch.Tensor]]:
        reduction = self._reduction
        wait = start_sparse_allreduce(
            gradient, reduction.names[p], reduction.op, reduction.process_set, urgent=False
        )
        return lambda: [wait().coalesce()]

    def add_up(self) -> None:
        """Do nothing: the engine returns whole results."""

    def wait(self) -> Gradients:
        """Wait for the results, and return one for each parameter.

        Raises:
            HorovodInternalError: a reduction has failed.
        """
        return [gradient for finish in self._pending for gradient in finish()]


def _stored_as(gradient: torch.Tensor, reduced: torch.Tensor) -> torch.Tensor:
    """Return `reduced` in the memory of `gradient`; of a sparse one, in its layout."""
    if gradient.is_sparse:
        return reduced.to_sparse(gradient.sparse_dim())
    if gradient.data_ptr() != reduced.data_ptr():
        gradient.detach().copy_(reduced)
    return gradient


class NoExchange:
    """Sends nothing: with Adasum, the ranks' steps are combined, and not their gradients.

    Args:
        bucket: the bucket.
    """

    def __init__(self, bucket: Bucket) -> None:
        pass

    def start(self, partial_sums: list[tuple[Any, Gradients]]) -> None:
        """Do nothing."""

    def add_up(self) -> None:
        """Do nothing."""

    def wait(self) -> Gradients:
        """Never called, as nothing is sent.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError
