"""Data parallelism that gives the same bits at any number of workers: every shard of a step is computed by itself."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from ..communicator import Communicator
from ..errors import ConfigError
from ..reductions.ordered import OrderedReducer
from ..shard_count import shard_count
from .base import Strategy
from .buffers import MovingBuffers
from .conditions import Conditions
from .consistency import broadcast_all, make_same
from .promise import check_meeting, check_modules
from .shard_buffers import ShardBuffers
from .sync_batchnorm import SyncBatchNorm, convert_noted

__all__ = ["Invariant"]

_log = logging.getLogger(__name__)


class Invariant(Strategy):
    """Trains one model on all workers, a pass for each of `shards` shards of a step, whoever computes them.

    Gradients, losses and running statistics are added in one fixed tree, see `lockstep.reductions.ordered`.

    Args:
        comm: the workers.
        shards: into how many parts each global batch is cut; True is 8.
        threads: within an operation on the CPU, see `lockstep.strategies.conditions`; 1 there when None.

    Raises:
        ConfigError: for fewer shards than workers.

    Attributes:
        meeting_layers: those of the prepared model that look at all shards at once.
    """

    shards: int

    def __init__(self, comm: Communicator, shards: int, threads: int | None = None) -> None:
        super().__init__(comm)
        self.shards = shard_count(shards, comm.size)
        self.conditions = Conditions(comm.device, threads)
        self._say_threads()
        self._model: nn.Module | None = None
        self._made: tuple[OrderedReducer, ShardBuffers, MovingBuffers] | None = None
        self.meeting_layers: list[SyncBatchNorm] = []
        self._moved: list[bool] = []
        self._unchanging: list[nn.Parameter] = []
        self._versions: list[int] = []

    def _say_threads(self) -> None:
        threads, own = self.conditions.threads, torch.get_num_threads()
        if threads is not None and threads != own and self.comm.rank == 0:
            _log.warning("with shards, steps are computed with threads=%d in each worker, not %d", threads, own)

    def in_shards(self, shards: int, threads: int | None) -> Strategy:
        """This one."""
        return self

    def conditions_of(self) -> dict[str, Any]:
        """The number of shards, and what `lockstep.strategies.conditions` describes."""
        return {"shards": self.shards, **self.conditions.describe()}

    def prepare(self, model: nn.Module) -> None:
        """Bring rank 0's values of `model` to every worker, and see that all are the same then.

        Raises:
            MismatchError: when the models differ in their parameters or buffers.
            ConfigError: when the model has a layer that would break the promise.
        """
        check_modules(model, self.comm.device)
        self.meeting_layers = convert_noted(model, self.comm)
        if self.meeting_layers:
            check_meeting(model)
        self._model = model.to(self.comm.device)
        make_same(model, self.comm)
        if self.comm.size > 1:
            self.conditions.check_same(self.comm)
        layers = [layer for layer in model.modules() if not getattr(layer, "same_bits", False)]
        self._unchanging = [p for layer in layers for p in layer.parameters(recurse=False)]
        reducer = OrderedReducer(model.parameters(), self.shards, self.comm, bare=True)
        self._made = reducer, ShardBuffers(model, self.comm.device), MovingBuffers(model, self.comm, at_once=True)

    def wrap(self, module: nn.Module) -> nn.Module:
        """`module` as it is: the reducer looks at parameters, and finds out by itself which of them are trained."""
        return module

    def determined(self) -> AbstractContextManager[object]:
        """Around all that must not depend on the machine's threads or on operations without a fixed order."""
        return self.conditions.fixed()

    @property
    def threads(self) -> int | None:
        """Within an operation on the CPU."""
        return self.conditions.threads

    @property
    def reducer(self) -> OrderedReducer:
        """Of the prepared model."""
        return self._parts[0]

    @property
    def buffers(self) -> ShardBuffers:
        """Those of the prepared model."""
        return self._parts[1]

    @property
    def _parts(self) -> tuple[OrderedReducer, ShardBuffers, MovingBuffers]:
        if self._made is None:
            raise ConfigError("strategy", "prepare(model) before anything else", found="no call of it")
        return self._made

    def begin(self) -> None:
        """A step begins."""
        _, buffers, moving = self._parts
        self._versions = [p._version for p in self._unchanging]
        buffers.begin()
        if self.comm.size > 1:
            moving.watch()

    def news(self) -> int:
        """After this worker's last forward pass: how many of its buffers have been changed for the first time."""
        if self.comm.size == 1:
            return 0
        moving = self._parts[2]
        self._moved = moving.moved()
        return moving.news(self._moved)

    def end(self, sums: torch.Tensor, samples: int, news: torch.Tensor) -> None:
        """Set the buffers that the passes have changed, on every worker alike.

        Args:
            sums: of the shards' `ShardBuffers.numbers`.
            samples: of the global batch.
            news: the sum of the workers' `news`.

        Raises:
            ConfigError: when they have changed a parameter, which is not given to the other shards and workers.
        """
        if [p._version for p in self._unchanging] != self._versions:
            raise self._changed()
        _, buffers, moving = self._parts
        buffers.take(sums, samples)
        if self.comm.size > 1:
            moving.sync(self._moved, news)

    def _changed(self) -> ConfigError:
        old = {id(p): version for p, version in zip(self._unchanging, self._versions, strict=True)}
        assert self._model is not None
        name = next(name for name, p in self._model.named_parameters() if p._version != old.get(id(p), p._version))
        hint = "Keep what it changes in a buffer. If you know better, set same_bits = True on the layer."
        return ConfigError(
            "model", "forward passes that change no parameter", found=f"one that changes {name}", hint=hint
        )

    def sync_buffers(self) -> None:
        """Give every worker rank 0's buffers, also those that something else than a step has changed."""
        if self._model is not None and self.comm.size > 1:
            broadcast_all(self._model.buffers(), self.comm)
