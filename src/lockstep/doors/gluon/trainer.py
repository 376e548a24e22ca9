"""Updates the copies of a model on all devices with the sum of their gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

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
_NAMES = {"learning_rate": "lr", "wd": "weight_decay", "epsilon": "eps", "gamma1": "alpha", "rho": "rho"}


class Trainer:
    """Sums gradients over the devices, and takes the same step on each.

    Args:
        params: of `collect_params()`.
        optimizer: one of adadelta, adagrad, adam, adamw, nag, rmsprop and sgd.
        optimizer_params: with Gluon's names or torch's, e.g. ``{'learning_rate': 0.1, 'wd': 1e-4}``.
        kvstore: accepted, and does nothing: gradients go from device to device.

    Raises:
        ConfigError: for an unknown optimizer, or options that it does not have.
    """

    def __init__(
        self,
        params: ParameterDict | list[Parameter],
        optimizer: str,
        optimizer_params: Mapping[str, Any] | None = None,
        kvstore: Any = None,
    ) -> None:
        if optimizer not in _OPTIMIZERS:
            raise ConfigError("optimizer", f"one of {', '.join(sorted(_OPTIMIZERS))}", optimizer)
        self._kind = _OPTIMIZERS[optimizer]
        self._options = _translated(dict(optimizer_params or {}), nesterov=optimizer == "nag")
        try:
            self._kind([torch.zeros(1, requires_grad=True)], **self._options)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                "optimizer_params", f"options of {optimizer}", found=str(self._options), hint=f"{error}."
            ) from None
        self._parameters = list(params.values()) if isinstance(params, Mapping) else list(params)
        self._optimizers: dict[Context, torch.optim.Optimizer] = {}

    @property
    def learning_rate(self) -> float:
        """That of the next step."""
        return float(self._options["lr"])

    def set_learning_rate(self, lr: float) -> None:
        """Change it."""
        self._options["lr"] = lr
        for optimizer in self._optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = lr

    def step(self, batch_size: int, ignore_stale_grad: bool = False) -> None:
        """Sum the gradients over all devices, divide them by `batch_size`, and update every copy.

        Args:
            batch_size: samples of the whole batch, on all devices together.
            ignore_stale_grad: leave out parameters that have no gradient since the last step, and count a missing one
                as zero where other devices have one.

        Raises:
            ConfigError: naming the parameter and the devices on which its gradient is missing or that of an earlier
                step, or for a batch of no samples; no copy is changed then.
        """
        if batch_size < 1:
            raise ConfigError("batch_size", "at least one sample", batch_size)
        trained = [parameter for parameter in self._parameters if parameter.grad_req != "null"]
        stale = [parameter for parameter in trained if _without(parameter)]
        if stale and not ignore_stale_grad:
            raise _stale(stale)
        with torch.no_grad():
            for parameter in trained:
                _reduce(list(parameter.trained().values()), batch_size)
            for optimizer in self._made(trained).values():
                optimizer.step()
            for parameter in trained:
                for value in parameter.trained().values():
                    _retire(value)

    def _made(self, trained: list[Parameter]) -> dict[Context, torch.optim.Optimizer]:
        """An optimizer for each device, made anew when the model has been initialised anew."""
        by_context: dict[Context, list[torch.Tensor]] = {}
        for parameter in trained:
            for context, value in parameter.trained().items():
                by_context.setdefault(context, []).append(value)
        have = {
            id(value) for own in self._optimizers.values() for group in own.param_groups for value in group["params"]
        }
        if have != {id(value) for values in by_context.values() for value in values}:
            self._optimizers = {context: self._kind(values, **self._options) for context, values in by_context.items()}
        return self._optimizers


def _reduce(values: list[torch.nn.Parameter], batch_size: int) -> None:
    """Leave the sum over the devices, divided, in the gradient of each; nothing where none has one."""
    if all(value.grad is None for value in values):
        return
    gradients = [torch.zeros_like(value) if value.grad is None else value.grad for value in values]
    allreduce_(gradients)
    for value, gradient in zip(values, gradients, strict=True):
        value.grad = gradient.div_(batch_size)


def _retire(value: torch.nn.Parameter) -> None:
    """Keep the gradient to be looked at, but not to be taken for a new one."""
    if value.grad is not None:
        value._lockstep_last_grad = value.grad  # type: ignore[attr-defined]
        value.grad = None


def _without(parameter: Parameter) -> list[str]:
    """Where it has no gradient since the last step."""
    return [str(context) for context, value in parameter.trained().items() if value.grad is None]


def _stale(parameters: list[Parameter]) -> ConfigError:
    first = parameters[0]
    others = f", and {len(parameters) - 1} more parameters" if len(parameters) > 1 else ""
    return ConfigError(
        "step",
        "a new gradient of every parameter on every device since the last step",
        found=f"none of {first.name} on {', '.join(_without(first))}{others}",
        hint="Call backward() for the loss of every device, or pass ignore_stale_grad=True if some take no part.",
    )


def _translated(options: dict[str, Any], nesterov: bool) -> dict[str, Any]:
    found = {_NAMES.get(name, name): value for name, value in options.items()}
    if "beta1" in found or "beta2" in found:
        found["betas"] = (found.pop("beta1", 0.9), found.pop("beta2", 0.999))
    if nesterov:
        found = {"momentum": 0.9, **found, "nesterov": True}
    found.setdefault("lr", 0.01)
    return found
