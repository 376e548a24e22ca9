"""Schedulers of `torch.optim.lr_scheduler`, stepped with the steps or the epochs of all workers
together.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from .. import arguments
from ..checkpoint.serialization import pack
from ..errors import ConfigError


def rates_of(optimizer: Optimizer) -> list[float | torch.Tensor]:
    """Return the learning rates of the groups, without waiting for a device that has them."""
    rates = [group["lr"] for group in optimizer.param_groups]
    return [rate.detach().clone() if isinstance(rate, torch.Tensor) else rate for rate in rates]


class SchedulerOfTorch:
    """Steps a scheduler of `torch.optim.lr_scheduler`: once after each step of all workers
    together, or each epoch.

    Args:
        scheduler: the scheduler, of `optimizer`.
        optimizer: the optimizer that is trained with.
        interval: "step" or "epoch"; when None, "epoch" for `ReduceLROnPlateau`, and "step" for all
            others.
        metric: for `ReduceLROnPlateau`: the column of the history that it gets; when None,
            "val_loss", or "train_loss" without validation data.

    Attributes:
        interval: "step" or "epoch".
        last_rates: the learning rates of the groups in the last step.

    Raises:
        ConfigError: for invalid arguments.
    """

    def __init__(
        self,
        scheduler: Any,
        optimizer: Optimizer,
        interval: str | None = None,
        metric: str | None = None,
    ):
        hint = "A function from the step to a factor of the learning rate is given as schedule=."
        arguments.instance(
            "scheduler", scheduler, LRScheduler, "a scheduler of torch.optim.lr_scheduler", hint
        )
        if scheduler.optimizer is not optimizer:
            theirs = type(scheduler.optimizer).__name__
            expected = "a scheduler of the optimizer that is given"
            raise ConfigError(
                "scheduler", expected, found=f"{_name(scheduler)} of another one ({theirs})"
            )
        self._by_metric = isinstance(scheduler, ReduceLROnPlateau)
        interval = interval or ("epoch" if self._by_metric else "step")
        arguments.choice("scheduler_interval", interval, ("step", "epoch"))
        if self._by_metric and interval == "step":
            expected = '"epoch" with ReduceLROnPlateau, as a row of the history has its metric'
            raise ConfigError("scheduler_interval", expected, interval)
        if metric is not None and not self._by_metric:
            raise ConfigError(
                "scheduler_metric", f"none with {_name(scheduler)}, which gets no metric", metric
            )
        self._scheduler = scheduler
        self._optimizer = optimizer
        self._metric = metric
        self.interval = interval
        self.last_rates = rates_of(optimizer)
        self.state_dict()

    def check_columns(self, columns: Collection[str]) -> None:
        """Check that the rows of the history will have the metric.

        Raises:
            ConfigError: if they will not.
        """
        if self._metric is not None:
            arguments.choice(
                "scheduler_metric", self._metric, columns, expected=f"one of {', '.join(columns)}"
            )

    def end_step(self) -> None:
        """Adapt the learning rate after a step."""
        self.last_rates = rates_of(self._optimizer)
        if self.interval == "step":
            self._scheduler.step()

    def end_epoch(self, row: Mapping[str, float]) -> None:
        """Adapt the learning rate after an epoch with this row of the history."""
        if self._by_metric:
            metric = self._metric or ("val_loss" if "val_loss" in row else "train_loss")
            self._scheduler.step(row[metric])
        elif self.interval == "epoch":
            self._scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state.

        Raises:
            ConfigError: a checkpoint cannot hold it.
        """
        state = self._scheduler.state_dict()
        try:
            pack(state)
        except ConfigError as error:
            expected = (
                f"a scheduler whose state_dict() has plain values only (here {error.argument})"
            )
            raise ConfigError("scheduler", expected, found=_name(self._scheduler)) from None
        return copy.deepcopy(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned, after the optimizer's state.

        Where the optimizer was constructed with another learning rate than then, the new one is
        kept, and the scheduler's factor of it.
        """
        rates = [float(group["initial_lr"]) for group in self._optimizer.param_groups]
        before = _base_rates(state)
        last = state.get("_last_lr")
        kinds = {
            name: type(value)
            for name, value in vars(self._scheduler).items()
            if isinstance(value, Counter)
        }
        restored = {
            name: kinds[name](value) if name in kinds else value for name, value in state.items()
        }
        self._scheduler.load_state_dict(copy.deepcopy(restored))
        if before is None or last is None or before == rates:
            return
        _set_base(self._scheduler, rates)
        for group, rate, base, current in zip(
            self._optimizer.param_groups, rates, before, last, strict=True
        ):
            group["lr"] = rate if not base else rate * current / base
        self._scheduler._last_lr = [group["lr"] for group in self._optimizer.param_groups]


def _base_rates(state: Mapping[str, Any]) -> list[float] | None:
    """Return the learning rates that a saved scheduler, or the first of those that it is made of,
    began with.
    """
    parts = [_base_rates(part) for part in state.get("_schedulers", ())]
    rates: list[float] | None = state.get("base_lrs") or next(filter(None, parts), None)
    return rates


def _set_base(scheduler: LRScheduler, rates: list[float]) -> None:
    scheduler.base_lrs = list(rates)
    for part in getattr(scheduler, "_schedulers", ()):
        _set_base(part, rates)


def _name(scheduler: LRScheduler) -> str:
    return type(scheduler).__name__
