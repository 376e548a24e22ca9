"""Data parallelism with the same bits at any number of workers: a separate pass for each shard of a step."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ..communicator import Communicator
from ..errors import ConfigError
from .buffers import MutatedBuffers
from .determinism import DeterminismSettings
from .module_sync import broadcast_tensors, expanded_dimensions, sync_module
from .ordered_reducer import OrderedReducer
from .shards import check_virtual_workers
from .strategy import Strategy, accumulation_dtype
from .sync_batchnorm import SyncBatchNorm, convert_marked
from .unchanged_parameters import UnchangedParameters
from .unsupported_layers import check_joint_passes, check_supported

__all__ = ["Invariant", "ShardBuffers"]


# --- Buffers per shard ------------------------------------------------------------------------------------------------


class ShardBuffers:
    """The buffers that forward passes change: running statistics of normalisation layers, and others.

    Each shard starts with the buffers of the beginning of the step. Running statistics become the mean over shards of
    each shard's result, weighted by samples; their counters, and all other buffers, become the result of shard 0.
    Buffers outside normalisation layers are all copied at the first step, because it is not known which of them change;
    later only those that change are copied again.

    Args:
        model: the model, on its device.
        device: the device.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._norms = [m for m in model.modules() if isinstance(m, _NormBase) and m.track_running_stats]
        self._empty = torch.empty(0, dtype=accumulation_dtype(device), device=device)
        self._averaged, self._counters = _SavedBuffers(self._empty), _SavedBuffers(self._empty)
        norms = {id(layer) for layer in self._norms}
        self._others = [
            _SavedBuffer(layer, name) for layer in model.modules() if id(layer) not in norms for name in layer._buffers
        ]

    def begin(self) -> None:
        """Save the buffers at the beginning of a step; each of its shards starts with these values."""
        # The statistics of frozen layers, in evaluation mode, do not change; a mean of equal numbers would round.
        buffers = [b for layer in self._norms if layer.training for b in layer.buffers(recurse=False)]
        self._averaged.save([b for b in buffers if b.is_floating_point()])
        self._counters.save([b for b in buffers if not b.is_floating_point()])
        for other in self._others:
            other.begin()

    def restore(self) -> None:
        """Restore the values of the beginning of the step, before the next shard."""
        self._averaged.restore()
        self._counters.restore()
        for other in self._others:
            other.restore()

    def others_changed(self) -> bool:
        """Return whether a buffer outside normalisation layers has changed since `begin` or the last `restore`."""
        return any(other.changed() for other in self._others)

    def shard_statistics(self, samples: int, first: bool) -> torch.Tensor:
        """Return a shard's statistics after its forward pass, to be summed over all shards; a 1-d tensor.

        Args:
            samples: samples in the shard; without any, nothing has changed.
            first: whether it is shard 0.
        """
        if first:
            for other in self._others:
                other.save_result()
        if not self._averaged.numel + self._counters.numel:
            return self._empty
        counters = self._counters.flat()
        return torch.cat([self._averaged.flat().mul_(samples), counters if first else counters.zero_()])

    def set_statistics(self, sums: torch.Tensor, samples: int | torch.Tensor) -> None:
        """Set the buffers at the end of a step.

        Args:
            sums: the sum of all shards' `shard_statistics`.
            samples: samples in the global batch.
        """
        split = self._averaged.numel
        self._averaged.set(sums[:split] / samples)
        self._counters.set(sums[split:])
        for other in self._others:
            other.finish()


class _SavedBuffers:
    """Buffers and copies of their values at the beginning of a step, in persistent memory."""

    def __init__(self, empty: torch.Tensor) -> None:
        self._empty = empty
        self._buffers: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []
        self.numel = 0

    def save(self, buffers: list[torch.Tensor]) -> None:
        if [id(b) for b in buffers] != [id(b) for b in self._buffers]:
            self._buffers, self._copies = buffers, [torch.empty_like(b) for b in buffers]
            self.numel = sum(b.numel() for b in buffers)
        if buffers:
            torch._foreach_copy_(self._copies, buffers)

    def restore(self) -> None:
        if self._buffers:
            torch._foreach_copy_(self._buffers, self._copies)

    def flat(self) -> torch.Tensor:
        """Return the current values as a 1-d tensor of the accumulation dtype."""
        if not self._buffers:
            return self._empty.clone()
        return torch.cat([b.reshape(-1) for b in self._buffers]).to(self._empty.dtype, copy=True)

    def set(self, values: torch.Tensor) -> None:
        """Set the buffers from a 1-d tensor as `flat` returns it."""
        if self._buffers:
            parts = torch.split(values, [b.numel() for b in self._buffers])
            torch._foreach_copy_(self._buffers, [p.view_as(b) for p, b in zip(parts, self._buffers, strict=True)])


class _SavedBuffer:
    """One buffer outside normalisation layers, looked up by name, because a model may replace the tensor."""

    def __init__(self, layer: nn.Module, name: str) -> None:
        self._layer, self._name = layer, name
        self._saved: torch.Tensor | None = None  # the tensor at the beginning of the step
        self._copy: torch.Tensor | None = None  # a copy of its values then
        self._result: torch.Tensor | None = None  # a copy of its values after shard 0, if changed
        self._saved_version = -2  # not a version: the first step makes the copy

    @property
    def _current(self) -> torch.Tensor | None:
        return self._layer._buffers.get(self._name)

    def _version(self) -> int:
        return -1 if self._current is None else self._current._version

    def changed(self) -> bool:
        return self._current is not self._saved or self._version() != self._saved_version

    def begin(self) -> None:
        if self.changed():  # by the last step, or after it
            self._saved, self._saved_version = self._current, self._version()
            self._copy = None if self._current is None else self._current.clone()
        self._result = None

    def restore(self) -> None:
        if not self.changed():
            return
        self._layer._buffers[self._name] = self._saved
        changed_in_place = self._saved is not None and self._saved._version != self._saved_version
        if changed_in_place and self._saved is not None and self._copy is not None:
            with torch.no_grad():
                self._saved.copy_(self._copy)
        self._saved_version = self._version()

    def save_result(self) -> None:
        if self.changed() and self._current is not None:
            self._result = self._current.clone()

    def finish(self) -> None:
        self.restore()
        if self._result is None or self._current is None:
            return
        if expanded_dimensions(self._current):  # it cannot be written
            self._layer._buffers[self._name] = self._result
        else:
            with torch.no_grad():
                self._current.copy_(self._result)


# --- Strategy ---------------------------------------------------------------------------------------------------------

_log = logging.getLogger(__name__)


class Invariant(Strategy):
    """Trains one model on all workers, with a separate pass for each of `virtual_workers` shards of a step.

    Gradients, losses and running statistics are added in one fixed tree, see `lockstep.parallel.ordered_reducer`.

    Args:
        comm: communicator over the workers.
        virtual_workers: number of shards of each global batch.
        threads: threads within an operation on the CPU, see `lockstep.parallel.determinism`; 1 on the CPU when None.

    Raises:
        ConfigError: for fewer virtual workers than workers.

    Attributes:
        joint_layers: the layers of the prepared model that use all shards at once.
    """

    virtual_workers: int

    def __init__(self, comm: Communicator, virtual_workers: int, threads: int | None = None) -> None:
        super().__init__(comm)
        self.virtual_workers = check_virtual_workers(virtual_workers, comm.size)
        self.determinism = DeterminismSettings(comm.device, threads)
        self._log_threads()
        self._model: nn.Module | None = None
        self._prepared: tuple[OrderedReducer, ShardBuffers, MutatedBuffers] | None = None
        self.joint_layers: list[SyncBatchNorm] = []
        self._changed_buffers: list[bool] = []
        self._unchanged: UnchangedParameters | None = None
        self._has_begun = False

    def _log_threads(self) -> None:
        threads, current = self.determinism.threads, torch.get_num_threads()
        if threads is not None and threads != current and self.comm.rank == 0:
            _log.warning(
                "with virtual workers, steps are computed with threads=%d in each worker, not %d", threads, current
            )

    def with_virtual_workers(self, virtual_workers: int, threads: int | None) -> Strategy:
        """Return this strategy."""
        return self

    def determinism_settings(self) -> dict[str, Any]:
        """Return the number of virtual workers, and the settings of `lockstep.parallel.determinism`."""
        return {"virtual_workers": self.virtual_workers, **self.determinism.describe()}

    def prepare(self, model: nn.Module) -> None:
        """Move `model` to the device, broadcast rank 0's values, and check that all workers have the same.

        Raises:
            MismatchError: if the models differ in their parameters or buffers.
            ConfigError: if the model has an unsupported layer, or the workers have different determinism settings.
        """
        check_supported(model, self.comm.device)
        self.joint_layers = convert_marked(model, self.comm)
        if self.joint_layers:
            check_joint_passes(model)
        self._model = model.to(self.comm.device)
        sync_module(model, self.comm)
        if self.comm.size > 1 and not self.comm.is_joining:
            self.determinism.check_same(self.comm)
        self._unchanged = UnchangedParameters(model)
        reducer = OrderedReducer(model.parameters(), self.virtual_workers, self.comm, bare=True)
        everything = self.with_loss(model)
        mutated = MutatedBuffers(everything, self.comm, at_once=True)
        self._prepared = reducer, ShardBuffers(everything, self.comm.device), mutated

    def wrap(self, module: nn.Module) -> nn.Module:
        """Return `module` unchanged: the reducer itself finds out which parameters are trained."""
        return module

    def deterministic(self) -> AbstractContextManager[object]:
        """Return a context manager that applies the determinism settings."""
        return self.determinism.applied()

    @property
    def threads(self) -> int | None:
        """Threads within an operation on the CPU."""
        return self.determinism.threads

    @property
    def reducer(self) -> OrderedReducer:
        """The reducer of the prepared model."""
        return self._prepared_parts[0]

    @property
    def buffers(self) -> ShardBuffers:
        """The buffers of the prepared model."""
        return self._prepared_parts[1]

    @property
    def _prepared_parts(self) -> tuple[OrderedReducer, ShardBuffers, MutatedBuffers]:
        if self._prepared is None:
            raise ConfigError("strategy", "prepare(model) before anything else", found="no call of it")
        return self._prepared

    def begin(self) -> None:
        """Save the buffers, and the versions of parameters and buffers, at the beginning of a step."""
        _, buffers, mutated = self._prepared_parts
        assert self._unchanged is not None
        self._unchanged.note()
        buffers.begin()
        self._has_begun = True
        if self.comm.size > 1:
            mutated.snapshot()

    def count_new_buffers(self) -> int:
        """Return how many buffers have changed for the first time; called after this worker's last forward pass."""
        if self.comm.size == 1:
            return 0
        mutated = self._prepared_parts[2]
        self._changed_buffers = mutated.changed()
        return mutated.count_new(self._changed_buffers)

    def end(self, sums: torch.Tensor, samples: int | torch.Tensor, count_new: torch.Tensor) -> None:
        """Set the buffers that the passes have changed, equally on every worker.

        Args:
            sums: the sums of `ShardBuffers.shard_statistics` over all shards.
            samples: samples in the global batch.
            count_new: the sum of the workers' `count_new_buffers`.

        Raises:
            ConfigError: if a forward pass has changed a parameter, which other shards and workers would not get.
        """
        assert self._unchanged is not None
        self._unchanged.check()
        _, buffers, mutated = self._prepared_parts
        buffers.set_statistics(sums, samples)
        if self.comm.size > 1:
            mutated.sync(self._changed_buffers, count_new)

    def begin_step(self) -> None:
        """Note that no pass has changed the buffers yet: each step saves them itself."""
        self._has_begun = False

    def abandon_step(self) -> None:
        """Restore the buffers, if passes of the step may have changed them."""
        if self._has_begun:
            self.buffers.restore()

    def regroup(self, model: nn.Module) -> None:
        """Adapt to the communicator's new workers.

        Raises:
            ConfigError: for fewer virtual workers than workers.
        """
        _, buffers, _ = self._prepared_parts
        reducer = OrderedReducer(model.parameters(), self.virtual_workers, self.comm, bare=True)
        self._prepared = reducer, buffers, MutatedBuffers(self.with_loss(model), self.comm, at_once=True)

    def sync_buffers(self) -> None:
        """Broadcast rank 0's buffers, including those changed outside of steps."""
        if self._model is not None and self.comm.size > 1:
            broadcast_tensors(self.with_loss(self._model).buffers(), self.comm)
