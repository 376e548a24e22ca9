"""The losses of a prepared loop's bodies, looked at before their backward passes; closely in few
batches only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from ..batch_parts import BatchParts, Shard
from ..check_schedule import is_due
from ..losses.model_check import is_compiled
from .graph_nodes import parameters_reached
from .loss_graphs import Refusal, refusal_of
from .loss_sums import (
    divided_by_whole_batch,
    divisor,
    fixed_divisor_doubt,
    fixed_divisor_error,
)
from .model_calls import ModelCalls


class BodyLosses:
    """What is wrong with the losses of a loop, and what they are divided by.

    Losses are looked at closely in the batches for which `is_due` says so, separately for the first
    pass over a batch, the second one and so on, as these may compute different things.

    Args:
        models: those that are trained.
        parts: the shards of each batch.

    Attributes:
        have_counts: whether a step has had a count, so that it is of interest what losses are
            divided by.
    """

    def __init__(self, models: Sequence[nn.Module], parts: BatchParts) -> None:
        self.have_counts = False
        self._models = models
        self._parts = parts
        self._looks = Counter[int]()  # by the number of the pass over a batch
        # how many looks were before that at the batch in progress, if it is looked at
        self._look: int | None = None
        self._latest_look = 0
        self._calls: ModelCalls | None = None  # of models in the running body, if it is looked at
        # of models, in the body that was looked at before
        self._inputs_before: list[torch.Tensor] | None = None
        # the samples of a whole batch, by which a sum was divided, and those of the part
        self._doubted: tuple[int, int] | None = None
        self._is_decided = False  # whether it is a fixed number

    def begin_batch(self, passes_before: int) -> None:
        """Begin a pass over a batch, before which there were so many over the same batch."""
        look = self._looks[passes_before]
        self._looks[passes_before] += 1
        self._look = look if is_due(look) else None

    def begin_body(self, shard: Shard, data: Any) -> None:
        """Begin to look at the calls of models in a body.

        Args:
            shard: whose body it is.
            data: that of the shard.
        """
        decides = self._doubted is not None and self._doubted[1] != shard.samples
        if (self._look is None and not decides) or not shard.samples:
            return
        models = [model for model in self._models if not is_compiled(model)]
        # The shards of virtual workers are the same on any number of workers, and so is what is
        # compared in them.
        exact = self._parts.exact
        refuses_changes = exact or self._parts.comm.size > 1
        before = self._inputs_before
        self._calls = ModelCalls(models, shard.samples, data, before, not exact, refuses_changes)
        if self._look is not None:
            self._latest_look = self._look

    def end_body(self) -> None:
        """End the look at the calls of models."""
        if self._calls is not None:
            self._calls.close()
            self._inputs_before = self._calls.inputs
            self._calls = None

    def refusals(self, roots: Sequence[torch.Tensor]) -> list[Refusal]:
        """Return what is wrong with losses, and note what they are divided by.

        Args:
            roots: the losses of a backward pass that is about to begin.
        """
        shard = self._parts.current
        if shard is None:
            return []
        if self.have_counts or self._calls is not None:
            with suppress(RuntimeError):
                shard.divisors += [divisor(root) for root in roots if root.grad_fn is not None]
        same_on_all = shard.whole_batch or self._parts.exact
        refusals = [refusal_of(root, self._calls, self._latest_look, same_on_all) for root in roots]
        if self._calls is not None and not same_on_all and not self._is_decided:
            with suppress(RuntimeError):  # a part of the graph has been freed
                refusals += [self._fixed_divisor(root, self._calls, shard) for root in roots]
        return [refusal for refusal in refusals if refusal is not None]

    def _fixed_divisor(self, root: torch.Tensor, calls: ModelCalls, shard: Shard) -> Refusal | None:
        """Return what is wrong with a loss that is a sum divided by the samples of the whole batch.

        The number may be a multiple of this part's samples by chance: ``2 * len(inputs)`` on two
        workers. A part of another size shows which it is.
        """
        if root.numel() != 1 or root.grad_fn is None:
            return None
        number = shard.total
        if self._doubted is not None:
            number, samples = self._doubted
            if samples == shard.samples:
                return None
        if number == shard.samples:
            return None
        description = divided_by_whole_batch(root, calls, number)
        is_first = self._doubted is None
        if is_first and description is None:
            return None
        self._doubted = number, shard.samples
        self._is_decided = not is_first or number % shard.samples > 0
        if description is None:
            return None
        comm = self._parts.comm
        doubt = ""
        if not self._is_decided:
            if comm.rank:
                return None  # rank 0 says it
            doubt = fixed_divisor_doubt(description, number, shard.samples, comm.size)
        error = fixed_divisor_error(description, number, shard.samples)
        return Refusal(error, parameters_reached(root), True, doubt=doubt)

    def state_dict(self) -> dict[str, Any]:
        """Return how often losses have been looked at, on which it depends when they are looked at
        next.
        """
        return {"looks": dict(self._looks), "counts": self.have_counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned on another worker."""
        self._looks = Counter(state["looks"])
        self.have_counts = state["counts"]
