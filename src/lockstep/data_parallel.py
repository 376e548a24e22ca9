"""`DataParallel`: one model on several devices of one process, with the manners of torch's class of that name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from .data.nested import map_tensors
from .errors import ConfigError
from .replicas.devices import Device, all_devices, as_devices
from .replicas.engine import Engine
from .replicas.spread import leaves, scatter
from .training.losses import LossFn, LossSum

__all__ = ["DataParallel"]


class DataParallel(nn.Module):
    """`module` on several devices of one process, each with its part of every batch.

    It takes the place of `torch.nn.DataParallel`, and takes its arguments. What differs:

    - Devices may be CPUs, and come several times: ``["cpu", "cpu"]`` trains on two cores.
    - Replicas stay from step to step, and each has a thread. Forward and backward run on all at the same time.
    - With `loss`, it is computed where the outputs are, ``model(inputs, target=labels)`` is the loss, and no device has
      more to do than the others. It is the mean over the whole batch, by samples (or by what the loss counts, such as
      labels that are not ignored), however the batch is cut; so are the gradients.
    - Running statistics are the average over the replicas by samples; other buffers are those of the first replica.
    - Dropout and other random functions of torch draw other numbers on every replica, and the same ones again after the
      same ``torch.manual_seed``.
    - ``state_dict()`` has the names of `module`, without a prefix, and is on the CPU. ``load_state_dict`` takes names
      with and without "module.".

    A batch that has fewer samples than there are devices uses as many devices as it has samples. Second derivatives
    cannot be taken through it, nor can random layers be under `torch.utils.checkpoint`.

    Args:
        module: the model; moved to the first device. The optimizer is over its parameters.
        devices: each a device, its name or its number; all accelerators when None, or the CPU once where there is none.
        output_device: where outputs and losses come together; the first device when None.
        dim: in which tensors have their samples.
        device_ids: another name of `devices`.
        loss: (output, target) → the mean over the samples, or one loss for each, or (sum, count).

    Raises:
        ConfigError: for devices that are not there, or said twice.
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
        if devices is not None and device_ids is not None:
            raise ConfigError("device_ids", "no other name of devices beside it", list(device_ids))
        chosen = devices if devices is not None else device_ids
        self.devices = all_devices() if chosen is None else as_devices(chosen)
        self.module, self.dim = module.to(self.devices[0]), dim
        self._engine = Engine(_Forward(module, loss, dim), self.devices, dim, output_device)
        self.output_device = self._engine.output_device
        self.device_ids = [device if device.index is None else device.index for device in self.devices]
        self.register_load_state_dict_pre_hook(_accept_plain_names)  # type: ignore[no-untyped-call]

    def forward(self, *inputs: Any, target: Any = None, **kwargs: Any) -> Any:
        """The outputs of all replicas as one, or with `target` the loss, a 0-dim tensor.

        Args:
            inputs: of the model; their tensors are cut into parts (see `lockstep.replicas.scatter`).
            target: what the loss compares the outputs with; without a `loss`, an argument of the model like others.
            kwargs: of the model.

        Raises:
            ConfigError: for a batch that cannot be cut into parts; at the first one also for a loss that is no mean
                over samples.
            ReplicaError: when a replica fails, with its device and the shapes it was given.
        """
        step: Any = self._engine.module
        step.model = self.module
        if target is not None and step.loss is None:
            kwargs, target = {**kwargs, "target": target}, None
        batch = (inputs, kwargs, target)
        summed = target is not None
        if len(self.devices) > 1:
            found = self._engine.run(batch, {}, summed)
        else:
            found = map_tensors(lambda t: t.to(self.output_device), step(*scatter(batch, self.devices, self.dim)[0]))
        if summed:
            step.made.check()
        return found[0] / found[1] if summed else found

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """That of the module, on the CPU (with ``keep_vars=True`` where it is)."""
        names = ("destination", "prefix", "keep_vars")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        prefix = given.get("prefix", "")
        found = self.module.state_dict(**given)
        if not given.get("keep_vars", False):
            for name, value in found.items():
                if name.startswith(prefix) and isinstance(value, torch.Tensor):
                    found[name] = value.cpu()
        return found


def _accept_plain_names(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Give names that are the inner module's the prefix under which torch looks for them."""
    inner: Any = module.module
    own = {f"{prefix}{name}" for name in inner.state_dict(keep_vars=True)}
    renamed = {name: f"{prefix}module.{name[len(prefix) :]}" for name in state if name in own}
    for name, new in renamed.items():
        state[new] = state.pop(name)


class _Unchecked(list[LossSum]):
    """The losses of all replicas that have not been checked yet; one list for all copies of a module."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Unchecked:
        return self

    def check(self) -> None:
        """See that they are means over samples, by what they have been called with.

        Raises:
            ConfigError: for the first that is not.
        """
        while self:
            if (wrong := self.pop().parts.check()) is not None:
                raise wrong.error()


class _Forward(nn.Module):
    """What a replica does with its part of a batch.

    Args:
        model: the user's.
        loss: see `DataParallel`.
        dim: that of the samples.
    """

    def __init__(self, model: nn.Module, loss: LossFn | None, dim: int) -> None:
        super().__init__()
        self.model, self.loss, self.dim = model, loss, dim
        self._of_device: list[LossSum] = []  # made at the first pass, by each replica for its device
        self.made = _Unchecked()

    def forward(self, inputs: tuple[Any, ...], kwargs: Mapping[str, Any], target: Any) -> Any:
        """The outputs, or with a target (sum of the loss, what it is a sum over)."""
        output = self.model(*inputs, **kwargs)
        if target is None or self.loss is None:
            return output
        tensors = [tensor for _, tensor in leaves((inputs, kwargs, target)) if tensor.dim()]
        if not self._of_device:
            self._of_device.append(LossSum(self.loss, tensors[0].device))
            self.made.append(self._of_device[0])
        total, count = self._of_device[0](output, target, tensors[0].shape[self.dim])
        return total, torch.as_tensor(count, dtype=torch.float32, device=total.device)
