"""The gradients of all optimizers of a prepared loop together, and the steps that may use them."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim import Optimizer

from ...errors import ConfigError
from ...flight_recorder import recorded_collectives
from ...parallel.fingerprints import checksum_of
from ...parallel.gradient_buckets import Gradients
from ..batch_parts import BatchParts
from .loss_graphs import Refusal
from .shard_gradients import ShardGradients

_log = logging.getLogger(__name__)


class AllGradients:
    """The gradients of all optimizers of a loop, and what a step of one of them means for those of
    the others.

    Args:
        model: the models that are trained.
        parts: the shards of each batch.
        prepared: the ids of the optimizers that `prepare` was given.
        has_loader: whether it was given a loader.
    """

    def __init__(
        self, model: nn.Module, parts: BatchParts, prepared: Collection[int], has_loader: bool
    ) -> None:
        self._model = model
        self._parts = parts
        self._prepared = prepared
        self._may_repeat = not has_loader  # whether all workers may compute the same batches
        self._of_optimizers: list[ShardGradients] = []
        self._is_updating = False  # whether the step of a prepared optimizer runs
        self._deferred: list[tuple[nn.Parameter, torch.Tensor | None, int]] = []
        # by a backward pass, without an optimizer
        self._left: list[tuple[nn.Parameter, torch.Tensor, int]] = []

    def add(self, are_divided: bool) -> ShardGradients:
        """Return what holds the gradients of one more optimizer.

        Args:
            are_divided: whether a step may leave a worker those of some parameters alone.
        """
        gradients = ShardGradients(are_divided)
        self._of_optimizers.append(gradients)
        return gradients

    def note_backward(self, refusals: Iterable[Refusal]) -> None:
        """Note that a backward pass has ended, and why steps may not use its gradients."""
        if not self._prepared:
            present = [(p, p.grad) for p in self._model.parameters()]
            self._left = [
                (p, gradient, gradient._version) for p, gradient in present if gradient is not None
            ]
        for refusal in refusals:
            for gradients in self._of_optimizers:
                gradients.refuse(refusal)

    def note_used(self, by: ShardGradients) -> None:
        """Note that a step has used gradients, which other optimizers may have as well."""
        for gradients in self._of_optimizers:
            gradients.note_used(by)

    @contextmanager
    def update(self) -> Iterator[None]:
        """Within it the step of a prepared optimizer runs, with the gradients of the global
        batch.
        """
        self._is_updating = True
        try:
            yield
        finally:
            self._is_updating = False
        for gradients in self._of_optimizers:
            gradients.note_step()

    # A worker with several shards puts a step off until its last one.

    def note_deferred_step(self) -> None:
        """Note all gradients when a step is put off until this worker's last shard."""
        parameters = [p for gradients in self._of_optimizers for p in gradients.trained]
        self._deferred = [
            (p, p.grad, -1 if p.grad is None else p.grad._version) for p in parameters
        ]

    def forget_deferred_step(self) -> None:
        """Forget them at the end of a shard."""
        self._deferred = []

    def check_deferred_step(self) -> None:
        """Check that no backward pass has run since a step was put off: it would have used the old
        parameters.

        Raises:
            ConfigError: otherwise.
        """
        if any(
            p.grad is not None and (p.grad is not g or g._version != version)
            for p, g, version in self._deferred
        ):
            raise ConfigError(
                "step",
                "no backward pass after an optimizer's step within one shard",
                found="one: this worker has several shards, and parameters are updated after the "
                "last of them",
                hint="Loop over loader.batches(), and for each optimizer over "
                "optimizer.shards(batch).",
            )

    # Optimizers that were not given.

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Check that an optimizer which steps in a body was prepared, if it has parameters of a
        prepared model.

        If none was, the loop may sum the gradients itself.

        Raises:
            ConfigError: otherwise.
        """
        if (
            self._is_updating
            or id(optimizer) in self._prepared
            or (not self._prepared and self._may_be_summed())
        ):
            return
        known = {id(p) for p in self._model.parameters()}
        if any(
            id(p) in known and p.grad is not None
            for group in optimizer.param_groups
            for p in group["params"]
        ):
            raise ConfigError(
                "optimizer",
                "a step of optimizers that were given to lockstep.prepare()",
                found=f"one of {type(optimizer).__name__}, which was not: its gradients are those "
                "of one's own samples",
                hint="Give it to lockstep.prepare() too. One that steps with another one inside, "
                "as a SAM does, is written as two: the page on training has an example.",
            )

    def _may_be_summed(self) -> bool:
        """Return whether the loop may have summed gradients itself since the backward pass:
        changed, or sent them.
        """
        shard = self._parts.current
        same = all(
            p.grad is gradient and p.grad._version == version for p, gradient, version in self._left
        )
        sent = shard is not None and shard.collectives != recorded_collectives()
        return self._parts.comm.size == 1 or not same or sent

    def look_at_repeated(self, gradients: Gradients) -> None:
        """Say so once, on rank 0, if no loader was given and the workers' first gradients are all
        the same.

        Args:
            gradients: those of an optimizer that steps outside of a batch, on each worker.
        """
        comm = self._parts.comm
        if not self._may_repeat or comm.size == 1:
            return
        self._may_repeat = False  # once
        present = [gradient.detach() for gradient in gradients if gradient is not None]
        digest = checksum_of(present) if present else torch.zeros((), dtype=torch.int64)
        digest = digest.to(comm.device)
        largest, negated_smallest = comm.allreduce(torch.stack([digest, -digest]), "max")
        if present and bool(largest == -negated_smallest) and comm.rank == 0:
            _log.warning(
                "lockstep.prepare() was given no loader, and all %d workers have computed the "
                "same gradients: each of them repeats the same batches, and more workers make "
                "nothing faster. Give the DataLoader to lockstep.prepare(), or loop over "
                "optimizer.shards(batch).",
                comm.size,
            )
