"""`DataParallel`: one model on several devices of one process, a replacement of torch's class of
that name.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from .. import arguments
from ..errors import ConfigError
from ..parallel.nested import map_tensors
from ..parallel.replicas.replicated import Engine
from ..parallel.replicas.scatter import (
    Device,
    all_devices,
    as_devices,
    leaves,
    scatter,
)
from ..parallel.strategy import number_on
from .losses.loss import Loss, LossFn


class DataParallel(nn.Module):
    """`module` on several devices of one process, each with its part of every batch.

    It replaces `torch.nn.DataParallel` and takes the same arguments. Differences:

    - Devices may be CPUs, and may be listed several times: ``["cpu", "cpu"]`` trains on two cores.
    - Replicas persist from step to step, and each has a thread. Forward and backward passes run on
      all devices in parallel.
    - With `loss`, ``model(inputs, target=labels)`` returns the loss, computed on each device for
      its own outputs, so that no device has more work than the others. Loss and gradients are means
      over the whole batch, weighted by samples (or by what the loss counts, such as labels that are
      not ignored), however the batch is split.
    - Running statistics are the average over the replicas, weighted by samples; other buffers are
      those of the first replica.
    - Dropout and other random functions of torch draw different numbers on each replica, and the
      same numbers again after the same ``torch.manual_seed``.
    - ``state_dict()`` has the names of `module`, without a prefix, and is on the CPU.
      ``load_state_dict`` accepts names with and without "module.".

    A batch with fewer samples than devices uses one device for each sample. Second derivatives and
    random layers under `torch.utils.checkpoint` are not supported.

    Args:
        module: the model; moved to the first device. The optimizer is over its parameters.
        devices: devices, their names or their numbers; when None, all accelerators or, without one,
            the CPU once.
        output_device: the device of outputs and losses; the first device when None.
        dim: the dimension of the samples in tensors.
        device_ids: another name of `devices`.
        loss: (output, target) → the mean over the samples, or one loss for each sample, or (sum,
            count).

    Raises:
        ConfigError: for devices that do not exist, or for both `devices` and `device_ids`.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Iterable[Device] | None = None,
        output_device: Device | None = None,
        dim: int = 0,
        *,
        device_ids: Iterable[Device] | None = None,
        loss: LossFn | None = None,
    ) -> None:
        super().__init__()
        arguments.instance("module", module, nn.Module, "a torch.nn.Module")
        if devices is not None and device_ids is not None:
            raise ConfigError("device_ids", "either devices or device_ids", list(device_ids))
        chosen = devices if devices is not None else device_ids
        self.devices = all_devices() if chosen is None else as_devices(chosen)
        self.module = module.to(self.devices[0])
        self.dim = dim
        self._engine = Engine(_Forward(module, loss, dim), self.devices, dim, output_device)
        self.output_device = self._engine.output_device
        self.device_ids = [
            device if device.index is None else device.index for device in self.devices
        ]
        self.register_load_state_dict_pre_hook(_accept_plain_names)  # type: ignore[no-untyped-call]

    def forward(self, *inputs: Any, target: Any = None, **kwargs: Any) -> Any:
        """Return the outputs of all replicas as one, or with `target` the loss, a 0-dim tensor.

        Args:
            inputs: arguments of the model; their tensors are split (see
                `lockstep.parallel.replicas.scatter`).
            target: the target of the loss; without a `loss`, an argument of the model.
            kwargs: keyword arguments of the model.

        Raises:
            ConfigError: for a batch that cannot be split, or a loss that is not a mean over
                samples, see `lockstep.training.losses.mean_check`.
            ReplicaError: if a replica fails, with its device and the shapes of its inputs.
        """
        step: Any = self._engine.module
        step.model = self.module
        if target is not None and step.loss is None:
            kwargs = {**kwargs, "target": target}
            target = None
        batch = (inputs, kwargs, target)
        has_loss = target is not None
        if has_loss:
            step.losses.expect()
        if len(self.devices) > 1:
            result = self._engine.run(batch, {}, has_loss)
        else:
            result = map_tensors(
                lambda t: t.to(self.output_device), step(*scatter(batch, self.devices, self.dim)[0])
            )
        if has_loss:
            step.losses.check()
        return result[0] / result[1] if has_loss else result

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state dict of the module, on the CPU, or with ``keep_vars=True`` its own
        tensors.

        Args:
            args: as of `torch.nn.Module.state_dict`.
            kwargs: as of `torch.nn.Module.state_dict`.
        """
        names = ("destination", "prefix", "keep_vars")
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        prefix = arguments.get("prefix", "")
        state = self.module.state_dict(**arguments)
        if not arguments.get("keep_vars", False):
            for name, value in state.items():
                if name.startswith(prefix) and isinstance(value, torch.Tensor):
                    state[name] = value.cpu()
        return state


def _accept_plain_names(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Give names that are the inner module's the prefix under which torch looks for them."""
    inner: Any = module.module
    prefixed_names = {f"{prefix}{name}" for name in inner.state_dict(keep_vars=True)}
    renamed = {
        name: f"{prefix}module.{name[len(prefix) :]}" for name in state if name in prefixed_names
    }
    for name, new in renamed.items():
        state[new] = state.pop(name)


class _Losses:
    """The losses of all replicas; copies of a module share one object."""

    def __init__(self) -> None:
        self._batches = 0
        self._of_replicas = weakref.WeakSet[Loss]()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Losses:
        return self

    def __reduce__(self) -> tuple[type[_Losses], tuple[()]]:
        return _Losses, ()

    def add(self, loss: Loss) -> None:
        """Add the loss of a replica, at its first batch."""
        loss.expect(self._batches)
        self._of_replicas.add(loss)

    def expect(self) -> None:
        """Begin a batch."""
        for loss in self._of_replicas:
            loss.expect(self._batches)

    def check(self) -> None:
        """Check that the losses are means over samples, with the arguments that they have been
        called with.

        Raises:
            ConfigError: for the first that is not.
        """
        self._batches += 1
        for loss in list(self._of_replicas):
            if (problem := loss.check(nullcontext, compares_model=False)) is not None:
                raise problem.error()


class _Forward(nn.Module):
    """The forward pass of a replica: the model and, with a target, the loss.

    Args:
        model: the user's model.
        loss: see `DataParallel`.
        dim: the dimension of the samples.
    """

    def __init__(self, model: nn.Module, loss: LossFn | None, dim: int) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.dim = dim
        # created by each replica at its first pass, on its device
        self._loss_sum: Loss | None = None
        self.losses = _Losses()

    def forward(self, inputs: tuple[Any, ...], kwargs: Mapping[str, Any], target: Any) -> Any:
        """Return the outputs, or with a target (sum of the loss, what it is a sum over)."""
        output = self.model(*inputs, **kwargs)
        if target is None or self.loss is None:
            return output
        tensors = [tensor for _, tensor in leaves((inputs, kwargs, target)) if tensor.dim()]
        if self._loss_sum is None:
            self._loss_sum = Loss(self.loss, tensors[0].device)
            self.losses.add(self._loss_sum)
        total, count = self._loss_sum(output, target, tensors[0].shape[self.dim])
        return total, number_on(total.device, count, torch.float32)
