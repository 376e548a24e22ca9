"""`Trainer`: updates the copies of a model on all devices with the sum of their gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lockstep import arguments
from lockstep.errors import ConfigError
from lockstep.replicas import allreduce_

from .context import Context
from .parameter import Parameter, ParameterDict

__all__ = ["Trainer"]

_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adadelta": torch.optim.Adadelta,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "nag": torch.optim.SGD,
    "rmsprop": torch.optim.RMSprop,
    "sgd": torch.optim.SGD,
}
_TORCH_NAMES = {
    "learning_rate": "lr",
    "wd": "weight_decay",
    "epsilon": "eps",
    "gamma1": "alpha",
    "rho": "rho",
}


class Trainer:
    """Sums gradients over the devices, and takes the same step on each of them.

    Args:
        params: the parameters, from `collect_params()`.
        optimizer: adadelta, adagrad, adam, adamw, nag, rmsprop or sgd.
        optimizer_params: its options, with the names of Gluon or torch, e.g. ``{'learning_rate':
            0.1, 'wd': 1e-4}``.
        kvstore: accepted and ignored: gradients are copied directly between devices.

    Raises:
        ConfigError: for an unknown optimizer, or an invalid option.
    """

    def __init__(
        self,
        params: ParameterDict | list[Parameter],
        optimizer: str,
        optimizer_params: Mapping[str, Any] | None = None,
        kvstore: Any = None,
    ) -> None:
        self._optimizer_class = _OPTIMIZERS[arguments.choice("optimizer", optimizer, _OPTIMIZERS)]
        self._options = _torch_options(dict(optimizer_params or {}), nesterov=optimizer == "nag")
        try:
            self._optimizer_class([torch.zeros(1, requires_grad=True)], **self._options)
        except (TypeError, ValueError) as error:
            expected = f"options of {optimizer}"
            hint = f"{error}."
            raise ConfigError(
                "optimizer_params", expected, found=str(self._options), hint=hint
            ) from None
        self._parameters = list(params.values()) if isinstance(params, Mapping) else list(params)
        self._optimizers: dict[Context, torch.optim.Optimizer] = {}

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        return float(self._options["lr"])

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate."""
        self._options["lr"] = lr
        for optimizer in self._optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = lr

    def step(self, batch_size: int, ignore_stale_grad: bool = False) -> None:
        """Sum the gradients over all devices, divide them by `batch_size`, and update every copy.

        Args:
            batch_size: the number of samples of the batch, on all devices together.
            ignore_stale_grad: skip parameters that have no new gradient on any device, and count a
                gradient that is missing on some devices as zero there.

        Raises:
            ConfigError: a parameter has no new gradient on a device (the message names both), or
                `batch_size` is less than 1. No copy is changed then.
        """
        if batch_size < 1:
            raise ConfigError("batch_size", "at least one sample", batch_size)
        trained = [parameter for parameter in self._parameters if parameter.grad_req != "null"]
        stale = [parameter for parameter in trained if _contexts_without_gradient(parameter)]
        if stale and not ignore_stale_grad:
            raise _stale_gradient_error(stale)
        with torch.no_grad():
            for parameter in trained:
                _reduce_gradients(list(parameter.copies().values()), batch_size)
            for optimizer in self._optimizers_for(trained).values():
                optimizer.step()
            for parameter in trained:
                for copy in parameter.copies().values():
                    if copy.grad is not None:
                        # where `Parameter.grad` finds it, and the next step does not take it for a
                        # new one
                        copy._lockstep_last_grad = copy.grad  # type: ignore[attr-defined]
                        copy.grad = None

    def _optimizers_for(self, trained: list[Parameter]) -> dict[Context, torch.optim.Optimizer]:
        """Return the optimizer of each device; new ones if the model has been initialised again."""
        by_context: dict[Context, list[torch.Tensor]] = {}
        for parameter in trained:
            for context, copy in parameter.copies().items():
                by_context.setdefault(context, []).append(copy)
        groups = [
            group for optimizer in self._optimizers.values() for group in optimizer.param_groups
        ]
        optimized = {id(copy) for group in groups for copy in group["params"]}
        if optimized != {id(copy) for copies in by_context.values() for copy in copies}:
            self._optimizers = {
                context: self._optimizer_class(copies, **self._options)
                for context, copies in by_context.items()
            }
        return self._optimizers


def _reduce_gradients(copies: list[torch.nn.Parameter], batch_size: int) -> None:
    """Set the gradient of each copy to the sum over all copies, divided by `batch_size`; do nothing
    without any.
    """
    if all(copy.grad is None for copy in copies):
        return
    gradients = [torch.zeros_like(copy) if copy.grad is None else copy.grad for copy in copies]
    allreduce_(gradients)
    for copy, gradient in zip(copies, gradients, strict=True):
        copy.grad = gradient.div_(batch_size)


def _contexts_without_gradient(parameter: Parameter) -> list[str]:
    """Return the contexts in which `parameter` has no gradient since the last step."""
    return [str(context) for context, copy in parameter.copies().items() if copy.grad is None]


def _stale_gradient_error(parameters: list[Parameter]) -> ConfigError:
    first = parameters[0]
    others = f", and {len(parameters) - 1} more parameters" if len(parameters) > 1 else ""
    return ConfigError(
        "step",
        "a new gradient of every parameter on every device since the last step",
        found=f"none of {first.name} on {', '.join(_contexts_without_gradient(first))}{others}",
        hint="Call backward() for the loss of every device, or pass ignore_stale_grad=True if some "
        "are not used.",
    )


def _torch_options(options: dict[str, Any], nesterov: bool) -> dict[str, Any]:
    """Return `options` with the names of torch and Gluon's default learning rate."""
    renamed = {_TORCH_NAMES.get(name, name): value for name, value in options.items()}
    if "beta1" in renamed or "beta2" in renamed:
        renamed["betas"] = (renamed.pop("beta1", 0.9), renamed.pop("beta2", 0.999))
    if nesterov:
        renamed = {"momentum": 0.9, **renamed, "nesterov": True}
    renamed.setdefault("lr", 0.01)
    return renamed
