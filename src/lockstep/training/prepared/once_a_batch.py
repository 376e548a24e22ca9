"""Learning-rate schedulers and averages of weights in a prepared loop: both act once in a global
batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from ...errors import ConfigError
from ..batch_parts import BatchParts
from .repeated_batches import RepeatedBatches


class OnceABatch:
    """The schedulers and averages of a loop, whose body calls them in each of this worker's shards.

    They act outside of a batch, and in the last shard of one; but not in a body that runs again,
    because the workers have changed before its step.

    Args:
        model: the models that are trained.
        parts: the shards of each batch.
        repeats: the batches that may run again.
        prepared: the ids of the optimizers that `prepare` was given.
        schedulers: those that it was given.
        averages: those that it was given.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: BatchParts,
        repeats: RepeatedBatches,
        prepared: Collection[int],
        schedulers: Sequence[LRScheduler],
        averages: Sequence[AveragedModel],
    ) -> None:
        self._model = model
        self._parts = parts
        self._repeats = repeats
        self._prepared = prepared
        self._schedulers = schedulers
        self._averages = averages
        self._after_batch: list[Callable[[], None]] = []

    def begin_batch(self) -> None:
        """Begin a batch, and forget what an earlier one that was left was to do at its end."""
        self._after_batch = []

    def end_batch(self) -> None:
        """Do what was put off until the buffers of the models have their values of the global
        batch.
        """
        for call in self._after_batch:
            call()

    def _acts(self) -> bool:
        shard = self._parts.current
        return shard is None or (shard.last and not self._repeats.is_abandoned)

    def _in_earlier_shard(self) -> bool:
        shard = self._parts.current
        return shard is not None and not shard.last

    def lets_step(self, scheduler: LRScheduler) -> bool:
        """Return whether a scheduler that is stepped in a body acts there: not where nothing acts,
        if `prepare` was given it.

        Raises:
            ConfigError: for one of a prepared optimizer that was not given, in a shard that is not
                the last one of a batch.
        """
        if any(prepared is scheduler for prepared in self._schedulers):
            if not self._acts():
                return False
            if self._repeats.is_within_batch:
                self._repeats.do_not_repeat("a scheduler that is stepped before the optimizer")
        elif id(scheduler.optimizer) in self._prepared:
            if self._in_earlier_shard():
                raise _not_given("scheduler", "scheduler.step()")
            self._repeats.do_not_repeat(
                "a scheduler in its bodies that lockstep.prepare() was not given"
            )
        return True

    def update_average(
        self, average: AveragedModel, model: Any, update: Callable[[], None]
    ) -> None:
        """Update an average of a prepared model once a batch.

        The buffers of a model have their values of the global batch when the batch ends.

        Args:
            average: the average.
            model: the model whose values it is given.
            update: updates it as torch does.

        Raises:
            ConfigError: if `prepare` was not given it, in a shard that is not the last one of a
                batch.
        """
        known = {id(p) for p in self._model.parameters()}
        if not any(id(p) in known for p in model.parameters()):
            update()
            return
        is_given = any(prepared is average for prepared in self._averages)
        if not is_given:
            if self._in_earlier_shard():
                raise _not_given("average", "update_parameters()")
            self._repeats.do_not_repeat(
                "an AveragedModel in its bodies that lockstep.prepare() was not given"
            )
        if not self._acts():
            return
        if self._repeats.is_within_batch:
            self._repeats.do_not_repeat(
                "an AveragedModel that is updated before the optimizer's step"
            )
        if self._parts.virtual_workers == 1 or not any(True for _ in model.buffers()):
            update()
        elif average.use_buffers:
            self._after_batch.append(update)
        else:
            update()
            self._after_batch.append(partial(_copy_buffers, average, model))


def _not_given(noun: str, call: str) -> ConfigError:
    """Return the error for an object that acts in a shard that is not the last one of a batch.

    Args:
        noun: "scheduler" or "average".
        call: what the loop calls.
    """
    kind = "a learning-rate scheduler" if noun == "scheduler" else "an AveragedModel"
    return ConfigError(
        noun,
        f"{call} once a global batch",
        found=f"{kind} that lockstep.prepare() was not given, in each of several shards of a batch",
        hint=f"Give the {noun} to lockstep.prepare() too, or call {call} only if "
        "optimizer.stepped.",
    )


def _copy_buffers(average: AveragedModel, model: nn.Module) -> None:
    """Copy the buffers of a model to its average, as `AveragedModel.update_parameters` does."""
    for ours, theirs in zip(average.module.buffers(), model.buffers(), strict=True):
        ours.detach().copy_(theirs.detach())
