"""The buffers that forward passes change: running statistics, and others; after each step all
workers have the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ..communicator import Communicator
from ..errors import ConfigError
from .module_sync import broadcast_tensors, expanded_dimensions
from .strategy import accumulation_dtype

# Where their buffers, the weights of classes, are None, no pass makes one of them, and none need be
# looked for there.
_TORCH_LOSSES = "torch.nn.modules.loss"


def is_running_statistic(layer: nn.Module, buffer: torch.Tensor) -> bool:
    """Return whether a buffer of `layer` is a running mean or variance, of which parts of a batch
    have an average.
    """
    return isinstance(layer, _NormBase) and buffer.is_floating_point()


class Buffers:
    """The buffers of a model that forward passes change.

    Each shard of a step's batch starts with the buffers of the beginning of the step. At its end,
    running statistics of normalisation layers become the mean over the shards of what each has made
    of them, weighted by samples; their counters and all other buffers become those of shard 0,
    which always has samples. A step is `begin`; for each of this worker's shards `restore` (but for
    the first one), its forward passes, and `of_shard`; then `set` with the sums of what `of_shard`
    has returned for all shards of all workers. `restore` also undoes a step that was not completed.

    Most buffers outside of normalisation layers are constants, such as masks and position tables,
    and need neither be copied nor broadcast. All are copied at the first step, because it is not
    known which of them change; later only those that have changed are copied again. A buffer that
    has changed once on any worker is broadcast from then on.

    Args:
        model: the model, on its device, with the same buffers on every worker.
        comm: communicator over the workers; None to save and restore only.
        saves: whether `restore` is called, because this worker has several shards or a step may be
            undone.
        at_once: broadcast a newly changed buffer in the same step, even if the host has to wait for
            the device.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator | None = None,
        *,
        saves: bool = True,
        at_once: bool = False,
    ) -> None:
        self._model = model
        self._comm = comm
        self._saves = saves
        self._at_once = at_once
        self._is_alone = comm is None or comm.size == 1
        self._device = torch.device("cpu") if comm is None else comm.device
        self._norms = [
            m for m in model.modules() if isinstance(m, _NormBase) and m.track_running_stats
        ]
        norms = {id(layer) for layer in self._norms}
        self._others = [
            _OtherBuffer(layer, name, saves)
            for layer in model.modules()
            if id(layer) not in norms
            for name, buffer in layer._buffers.items()
            if buffer is not None or type(layer).__module__ != _TORCH_LOSSES
        ]
        self._averaged: list[torch.Tensor] = []  # running statistics in this step
        self._counters: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []  # of both, at the beginning of the step
        self._frozen: list[
            tuple[torch.Tensor, int]
        ] = []  # counters of layers in evaluation mode, and their versions
        self._steps = 0

    def __bool__(self) -> bool:
        """Whether the model has any buffers."""
        return bool(self._norms or self._others)

    @property
    def most_numbers(self) -> int:
        """The most numbers that `of_shard` may return, where all normalisation layers are in
        training mode.
        """
        of_norms = [
            buffer
            for layer in self._norms
            for buffer in layer._buffers.values()
            if buffer is not None
        ]
        return sum(buffer.numel() for buffer in of_norms) + bool(self._others)

    def begin(self) -> None:
        """Begin a step: each of its shards starts with the present values."""
        before = [*self._averaged, *self._counters]
        self._averaged = []
        self._counters = []
        self._frozen = []
        for layer in self._norms:
            present = [buffer for buffer in layer._buffers.values() if buffer is not None]
            counters = [buffer for buffer in present if not buffer.is_floating_point()]
            if layer.training:
                self._averaged += [buffer for buffer in present if buffer.is_floating_point()]
                self._counters += counters
            # the statistics of frozen layers do not change; a mean of equal numbers would round
            else:
                self._frozen += [(counter, counter._version) for counter in counters]
        changing = [*self._averaged, *self._counters]
        if self._saves:
            if [id(buffer) for buffer in changing] != [id(buffer) for buffer in before]:
                self._copies = [torch.empty_like(buffer) for buffer in changing]
            if changing:
                torch._foreach_copy_(self._copies, changing)
        for other in self._others:
            other.begin()

    def restore(self) -> None:
        """Restore the values of the beginning of the step, for its next shard or because the step
        is undone.
        """
        if self._copies:
            torch._foreach_copy_([*self._averaged, *self._counters], self._copies)
        for other in self._others:
            other.restore()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Return a context in which all have the values of the beginning of the step, and then
        those of now again.
        """
        now = [
            (layer, name, buffer, None if buffer is None else buffer.clone())
            for layer in self._model.modules()
            for name, buffer in layer._buffers.items()
        ]
        self.restore()
        try:
            yield
        finally:
            for layer, name, buffer, values in now:
                layer._buffers[name] = buffer
                if buffer is not None and values is not None and not expanded_dimensions(buffer):
                    with torch.no_grad():
                        buffer.copy_(values)

    def others_changed(self) -> bool:
        """Return whether a buffer outside of normalisation layers has changed in this step."""
        return any(other.has_changed() for other in self._others)

    def of_shard(self, weight: float, *, first: bool, last: bool) -> torch.Tensor:
        """Return what a shard has made of the buffers, after its forward passes; summed over all
        shards for `set`.

        Args:
            weight: what the shard weighs in the running statistics, such as its samples; 0 if it
                has none.
            first: whether it is shard 0.
            last: whether it is the last of this worker's shards.

        Returns:
            1-d tensor, of one size for all shards.

        Raises:
            ConfigError: if a normalisation layer was put into training mode by a forward pass.
        """
        self._note_shard(first)
        averaged = sum(buffer.numel() for buffer in self._averaged)
        counters = sum(buffer.numel() for buffer in self._counters)
        has_new = self._others and not self._is_alone
        dtype = accumulation_dtype(self._device)
        vector = torch.zeros(averaged + counters + bool(has_new), dtype=dtype, device=self._device)
        if averaged:
            torch.cat(
                [buffer.reshape(-1) for buffer in self._averaged], out=vector[:averaged]
            ).mul_(weight)
        if counters and first:
            flat = [buffer.reshape(-1) for buffer in self._counters]
            torch.cat(flat, out=vector[averaged : averaged + counters])
        if has_new and last:
            vector[-1].fill_(self._newly_changed())  # an assignment of a number waits for a device
        return vector

    def numbers_of_shard(self, *, first: bool, last: bool) -> list[float] | None:
        """Return what `of_shard` does as numbers of the host; None in a step with running
        statistics, which are not.

        Args:
            first, last: see `of_shard`.

        Raises:
            ConfigError: see `of_shard`.
        """
        if self._averaged or self._counters:
            return None
        self._note_shard(first)
        if not self._others or self._is_alone:
            return []
        return [float(self._newly_changed() if last else 0)]

    def _note_shard(self, first: bool) -> None:
        self._check_modes()
        if first:
            for other in self._others:
                other.note_result()

    def _newly_changed(self) -> int:
        """Return how many buffers this worker's passes have changed that are not broadcast yet."""
        return sum(other.has_changed() and not other.is_broadcast for other in self._others)

    def _check_modes(self) -> None:
        """Check that no layer that was in evaluation mode has counted a batch.

        Raises:
            ConfigError: otherwise.
        """
        if any(counter._version != version for counter, version in self._frozen):
            raise ConfigError(
                "model",
                "normalisation layers that are in training mode before a step, or in none of its "
                "forward passes",
                found="one that a forward pass has put into training mode",
                hint="Call its train() before the step.",
            )

    def set(
        self, sums: torch.Tensor | Sequence[float | torch.Tensor], weight: float | torch.Tensor = 1
    ) -> None:
        """Set the buffers at the end of a step, equally on every worker.

        Off the CPU, reading the number of newly changed buffers makes the host wait for the device.
        It is read at steps 0, 1, 2, 4, 8 and so on only, unless `at_once`; a buffer that first
        changes in between is broadcast from the next of them on.

        Args:
            sums: the sum of all shards' `of_shard`, or of their `numbers_of_shard`.
            weight: the sum of the weights.
        """
        changed = [other.has_changed() for other in self._others]
        averaged = sum(buffer.numel() for buffer in self._averaged)
        counters = sum(buffer.numel() for buffer in self._counters)
        if isinstance(sums, torch.Tensor) and averaged:
            is_mean = isinstance(weight, int) and weight == 1
            _set(self._averaged, sums[:averaged] if is_mean else sums[:averaged] / weight)
        if isinstance(sums, torch.Tensor) and counters:
            _set(self._counters, sums[averaged : averaged + counters])
        for other in self._others:
            other.finish()
        if self._others and not self._is_alone:
            self._broadcast_changed(changed, sums[-1])

    def _broadcast_changed(self, changed: list[bool], new: float | torch.Tensor) -> None:
        """Broadcast rank 0's values of buffers that have changed, after the workers have agreed on
        which these are.

        Args:
            changed: which have changed on this worker in this step.
            new: how many have on any worker that are not broadcast yet.
        """
        assert self._comm is not None
        due = self._at_once or self._device.type == "cpu" or self._steps & (self._steps - 1) <= 0
        self._steps += 1
        if due and not all(other.is_broadcast for other in self._others) and float(new) > 0:
            counts = self._comm.allreduce(
                torch.tensor(changed, dtype=torch.float32, device=self._device)
            )
            for other, count in zip(self._others, counts.tolist(), strict=True):
                other.is_broadcast |= count > 0
        buffers = [other.current for other in self._others if other.is_broadcast]
        broadcast_tensors([buffer for buffer in buffers if buffer is not None], self._comm)

    def broadcast(self) -> None:
        """Broadcast rank 0's values of all buffers, including those changed outside of steps."""
        if self._comm is not None and self._comm.size > 1:
            broadcast_tensors(self._model.buffers(), self._comm)


def _set(buffers: list[torch.Tensor], values: torch.Tensor) -> None:
    """Set `buffers` from the values of all of them in a 1-d tensor."""
    parts = torch.split(values, [buffer.numel() for buffer in buffers])
    torch._foreach_copy_(
        buffers, [part.view_as(buffer) for part, buffer in zip(parts, buffers, strict=True)]
    )


_NEVER = -2  # in place of a version: before the first step
_NO_TENSOR = -1  # of a buffer that is None


class _OtherBuffer:
    """One buffer outside of normalisation layers, looked up by name, because a model may replace
    the tensor.

    Args:
        layer: the layer that has it.
        name: its name there.
        saves: whether the values of the beginning of a step are kept, for `restore`.

    Attributes:
        is_broadcast: whether all workers take rank 0's values after each step.
    """

    def __init__(self, layer: nn.Module, name: str, saves: bool) -> None:
        self._layer = layer
        self._name = name
        self._saves = saves
        self._saved: torch.Tensor | None = None  # the tensor at the beginning of the step
        self._copy: torch.Tensor | None = None  # a copy of its values then
        self._result: torch.Tensor | None = None  # a copy of its values after shard 0, if changed
        self._saved_version = _NEVER  # the first step makes the copy
        self._was_changed = False  # by an earlier shard of the step
        self.is_broadcast = False

    @property
    def current(self) -> torch.Tensor | None:
        """The tensor that the layer has now."""
        return self._layer._buffers.get(self._name)

    def _version(self) -> int:
        return _NO_TENSOR if self.current is None else self.current._version

    def _differs(self) -> bool:
        """Return whether a pass has changed it since `begin` or the last `restore`."""
        return self.current is not self._saved or self._version() != self._saved_version

    def has_changed(self) -> bool:
        """Return whether a pass has changed it since `begin`."""
        return self._was_changed or self._differs()

    def begin(self) -> None:
        if self._differs():  # by the last step, or after it
            self._saved = self.current
            self._saved_version = self._version()
            self._copy = self.current.clone() if self._saves and self.current is not None else None
        self._result = None
        self._was_changed = False

    def restore(self) -> None:
        if self._saved_version == _NEVER or not self._differs():
            return
        self._was_changed = True
        self._layer._buffers[self._name] = self._saved
        changed_in_place = self._saved is not None and self._saved._version != self._saved_version
        if changed_in_place and self._saved is not None and self._copy is not None:
            with torch.no_grad():
                self._saved.copy_(self._copy)
        self._saved_version = self._version()

    def note_result(self) -> None:
        """Note what shard 0 has made of it."""
        if self._saves and self._differs() and self.current is not None:
            self._result = self.current.clone()

    def finish(self) -> None:
        """Set it to what shard 0 has made of it, if this worker has that shard."""
        if not self._saves:  # a single shard, whose result it is
            return
        self.restore()
        if self._result is None or self.current is None:
            return
        if expanded_dimensions(self.current):  # it cannot be written
            self._layer._buffers[self._name] = self._result
        else:
            with torch.no_grad():
                self.current.copy_(self._result)
