"""Sees that what a training step is made of can be used, before it is."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from numbers import Real
from typing import Any

from torch import nn
from torch.optim import Optimizer
from typing_extensions import TypedDict

from ..communicator import Communicator, init
from ..errors import ConfigError
from ..replicas import Device
from ..strategies import STRATEGIES
from ..strategies.base import Strategy
from ..strategies.distributed import Distributed
from .losses import Forward
from .schedules import Schedule

__all__ = ["StepOptions", "check_step", "choose", "learning_rate_factor", "make_strategy", "parameters_of"]


class StepOptions(TypedDict, total=False):
    """What a `Trainer` hands on to its `TrainStep`; see there."""

    precision: str
    accumulate: int
    clip_norm: float | None
    schedule: Schedule | None
    forward: Forward | None
    shards: int | None
    threads: int | None
    replica_check: int


def check_step(model: Any, optimizer: Any, accumulate: Any, clip_norm: Any, schedule: Any) -> None:
    """See that the arguments of `TrainStep` are of their kinds.

    Raises:
        ConfigError: naming the first that is not.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError("model", "a torch.nn.Module", found=type(model).__name__)
    if not isinstance(optimizer, Optimizer):
        raise ConfigError("optimizer", "a torch.optim.Optimizer", found=type(optimizer).__name__)
    _refuse_closure(optimizer)
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise ConfigError("accumulate", "a whole number of at least 1", accumulate)
    if clip_norm is not None and not (_is_number(clip_norm) and clip_norm > 0):
        raise ConfigError("clip_norm", "a number above 0", clip_norm)
    if schedule is not None and not callable(schedule):
        hint = "Make one of a name with lockstep.training.schedules.make_schedule(name, total_steps)."
        raise ConfigError("schedule", "a function from the step's number to a learning-rate factor", schedule, hint)


def make_strategy(
    strategy: str | Strategy, comm: Communicator, global_batch: int, devices: Sequence[Device] | None
) -> Strategy:
    """The strategy that the arguments of `Trainer` ask for.

    Raises:
        ConfigError: for an unknown one, or `devices` with one that has no list of devices.
    """
    if isinstance(strategy, str):
        own = (devices, global_batch) if strategy == "replicas" else ()
        made: Strategy = STRATEGIES.load(strategy)(comm, *own)
    else:
        made = strategy
    if devices is not None and strategy != "replicas":
        hint = "Each worker has one device; they are chosen with lockstep.init(device)."
        raise ConfigError("devices", "none without strategy='replicas'", found=str(list(devices)), hint=hint)
    return made


def choose(strategy: Strategy | None, shards: int | None, threads: int | None, accumulate: int) -> Strategy:
    """The strategy that the arguments of `TrainStep` ask for.

    Raises:
        ConfigError: when they contradict each other.
    """
    if shards is None and threads is not None:
        hint = "torch.set_num_threads() sets them for the whole process."
        raise ConfigError("threads", "none without shards", threads, hint)
    chosen = Distributed(init()) if strategy is None else strategy
    if shards is not None:
        chosen = chosen.in_shards(shards, threads)
    if chosen.shards is not None and accumulate > 1:
        hint = "Each shard is a pass of its own; more shards need less memory."
        raise ConfigError("accumulate", "1 with shards", accumulate, hint)
    return chosen


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def learning_rate_factor(schedule: Schedule, step: int) -> float:
    """What `schedule` says for `step`.

    Raises:
        ConfigError: when it is no number.
    """
    factor: Any = schedule(step)
    try:
        return float(factor)
    except (TypeError, ValueError):
        raise ConfigError("schedule", f"a number as the factor of step {step}", factor) from None


def _refuse_closure(optimizer: Optimizer) -> None:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            "optimizer",
            "one that takes a step from gradients that are there, such as SGD or AdamW",
            found=f"{type(optimizer).__name__}, whose step needs a closure",
            hint="A closure computes the gradients again as often as the optimizer likes, "
            "and the workers' parts with them.",
        )


def parameters_of(model: nn.Module, optimizer: Optimizer) -> list[nn.Parameter]:
    """The optimizer's parameters, group by group.

    Raises:
        ConfigError: when some are not the model's.
    """
    known = {id(p) for p in model.parameters()}
    parameters: list[nn.Parameter] = [p for group in optimizer.param_groups for p in group["params"]]
    foreign = sum(id(p) not in known for p in parameters)
    if foreign:
        raise ConfigError(
            "optimizer",
            "parameters of the model that is trained",
            found=f"{foreign} of {len(parameters)} that are not among them",
            hint="Make the optimizer from model.parameters() of this very model.",
        )
    return parameters
