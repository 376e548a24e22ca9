"""What a step, an evaluation and a checkpoint ask of the way in which a model is spread over workers and devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..communicator import Communicator
from ..errors import ConfigError
from ..fingerprints import fingerprint
from .whole import filled_model, filled_optimizer

__all__ = ["Strategy"]


class Strategy:
    """One whole model on each worker, and nothing sent: right for one worker, and what the others begin with.

    A `TrainStep` calls, in this order: `check`, `prepare` and `adopt` once; `wrap` once, and again when other
    parameters are trained; then for each step `reducing` around each pass, `reduce_step` in the last of them. A model
    with more parameters than before is given to `prepare` and `adopt` again.

    Args:
        comm: the workers.

    Attributes:
        shards: into how many shards a step is cut; None where it is cut by the number of workers alone.
        in_step: whether a forward pass sends something, so that every worker has to make as many as the others, also
            one without samples.
        in_parts: whether tensors are a DTensor, of which each worker writes and reads its part of a checkpoint.
    """

    shards: int | None = None
    in_step: bool = False
    in_parts: bool = False

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    @property
    def devices(self) -> list[torch.device]:
        """Where this worker computes, the device of its batches and losses first."""
        return [self.comm.device]

    # --- before the first step --------------------------------------------------------------------------------

    def in_shards(self, shards: int, threads: int | None) -> Strategy:
        """The strategy that computes each step in so many shards, in place of this one.

        Raises:
            ConfigError: where there is none.
        """
        raise ConfigError("shards", f"none with the strategy {type(self).__name__.lower()}", shards)

    def check(self, optimizer: Optimizer, precision: str) -> None:
        """See that this strategy can train with them, before anything is changed.

        Raises:
            ConfigError: when it cannot.
        """

    def prepare(self, model: nn.Module) -> None:
        """Bring the model to where it is trained, with rank 0's values."""

    def adopt(self, optimizer: Optimizer) -> None:
        """Let the optimizer have the parameters that `prepare` has put in the place of its own, if any."""

    def wrap(self, module: nn.Module) -> nn.Module:
        """What a step calls in place of `module`, (data, samples) → (sum of the loss, what it is a sum over).

        Its gradients are *averaged* over the workers.
        """
        return module

    # --- a step, an evaluation --------------------------------------------------------------------------------

    def determined(self) -> AbstractContextManager[object]:
        """Around a step: nothing is fixed but by the user."""
        return nullcontext()

    def reducing(self, now: bool) -> AbstractContextManager[object]:
        """Around one of several passes of a step: whether its gradients are reduced now, or added up until later."""
        return nullcontext()

    def reduce_step(self, totals: torch.Tensor, weight: float) -> Callable[[], torch.Tensor]:
        """Start summing a step's `totals` over the workers; calling what is returned waits for the sums.

        Called between the last forward pass and its backward, so that it runs beside it.

        Args:
            totals: 1-d floating tensor.
            weight: this worker's share of the step's samples, 0 to 1.
        """
        return self.comm.allreduce_async(totals)

    def spread(self, module: nn.Module) -> nn.Module:
        """What an evaluation calls in place of `module`, (data, samples) → a tensor of sums over these samples."""
        return module

    def sync_buffers(self) -> None:
        """Give every worker rank 0's buffers, also those that something else than a step has changed."""

    # --- the state, as one worker with one device would have it; all workers call these together ----------------
    # Where a worker does not want what it gets, it may get nothing. What is loaded may be stored tensors.

    def model_state(self, model: nn.Module, wanted: bool = True) -> dict[str, Any]:
        """The model's state dict, of whole tensors."""
        return model.state_dict()

    def optimizer_state(self, model: nn.Module, optimizer: Optimizer, wanted: bool = True) -> dict[str, Any]:
        """The optimizer's state dict, of whole tensors, by the number of the parameter."""
        return optimizer.state_dict()

    def load_model_state(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Take up what `model_state` has given, here or under another strategy; it has been found to fit."""
        model.load_state_dict(filled_model(model, state, self.comm))

    def load_optimizer_state(self, model: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Take up what `optimizer_state` has given, here or under another strategy; it has been found to fit."""
        optimizer.load_state_dict(filled_optimizer(optimizer, state, self.comm))

    def fingerprint(self, model: nn.Module, optimizer: Optimizer) -> str:
        """See `lockstep.fingerprint`; that of the whole tensors."""
        return fingerprint(model, optimizer)

    def conditions_of(self) -> dict[str, Any]:
        """What the bits of a run depend on beside its program, by name; empty where nothing is promised."""
        return {}
