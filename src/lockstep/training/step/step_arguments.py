"""The arguments of a training step: which there are, what each must be, and the strategy that they
name.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import TypedDict

from ... import arguments, other_names
from ...communicator import Communicator, init
from ...errors import ConfigError, unknown_name
from ...parallel import STRATEGIES
from ...parallel.distributed import Distributed
from ...parallel.replicas.scatter import Device
from ...parallel.strategy import Strategy
from ..losses.loss import Forward
from ..schedules import Schedule
from ..torch_schedulers import SchedulerOfTorch


class StepOptions(TypedDict, total=False):
    """Options that a `Trainer` passes on to its `TrainStep`; see there."""

    precision: str
    gradient_accumulation_steps: int
    max_grad_norm: float | None
    schedule: Schedule | None
    scheduler: LRScheduler | None
    scheduler_interval: str | None
    scheduler_metric: str | None
    forward: Forward | None
    virtual_workers: int | None
    threads: int | None
    replica_check: int
    sync_batchnorm: bool
    shard_optimizer: bool


def check_step(
    model: Any, optimizer: Any, gradient_accumulation_steps: Any, max_grad_norm: Any, schedule: Any
) -> None:
    """Check the types and values of arguments of `TrainStep`.

    Raises:
        ConfigError: naming the first invalid argument.
    """
    arguments.instance("model", model, nn.Module, "a torch.nn.Module")
    several = "Several optimizers need a loop of your own, with lockstep.prepare."
    hint = several if isinstance(optimizer, (tuple, list)) else ""
    arguments.instance("optimizer", optimizer, Optimizer, "a torch.optim.Optimizer", hint)
    refuse_closure(optimizer)
    arguments.whole("gradient_accumulation_steps", gradient_accumulation_steps, least=1)
    if max_grad_norm is not None:
        arguments.number("max_grad_norm", max_grad_norm, above=0)
    if schedule is not None:
        hint = "lockstep.make_schedule(name, total_steps) makes one from a name."
        if isinstance(schedule, LRScheduler):
            hint = "A scheduler of torch.optim.lr_scheduler is given as scheduler=."
        expected = "a function from the step's number to a learning-rate factor"
        arguments.function("schedule", schedule, expected, takes=1, hint=hint)


def check_functions(loss_fn: Any, forward: Any) -> None:
    """Check that the functions of `TrainStep` are functions of two arguments.

    Raises:
        ConfigError: naming the first that is not.
    """
    if forward is not None:
        arguments.function(
            "forward", forward, "a function (model, data) -> (output, target)", takes=2
        )
    if loss_fn is not None and not isinstance(loss_fn, type):
        expected = "a function (output, target) -> loss, or a module"
        hint = ""
        if isinstance(loss_fn, str):
            hint = "Losses are those of torch, such as loss_fn=torch.nn.CrossEntropyLoss()."
        arguments.function("loss_fn", loss_fn, expected, takes=2, hint=hint)


def check_threads(threads: int | None, virtual_workers: int | None) -> None:
    """Check that a number of threads is given with virtual workers only.

    Raises:
        ConfigError: if it is not.
    """
    if virtual_workers is None and threads is not None:
        hint = "torch.set_num_threads() sets the number for the whole process."
        raise ConfigError("threads", "none without virtual workers", threads, hint)


def make_strategy(
    strategy: str | Strategy,
    comm: Communicator,
    global_batch_size: int,
    devices: Sequence[Device] | None,
) -> Strategy:
    """Return the strategy for the arguments of `Trainer`.

    Raises:
        ConfigError: for an unknown name, or `devices` with a strategy other than "replicas".
    """
    if devices is not None and (
        isinstance(devices, (str, int)) or not isinstance(devices, Iterable)
    ):
        hint = "The number of workers is that of the launcher: lockstep run -np N."
        raise ConfigError("devices", "a list of devices, with strategy='replicas'", devices, hint)
    if isinstance(strategy, str):
        if strategy in other_names.STRATEGIES:
            raise unknown_name(
                "strategy", strategy, STRATEGIES.names(), elsewhere=other_names.STRATEGIES
            )
        options = (devices, global_batch_size) if strategy == "replicas" else ()
        created: Strategy = STRATEGIES.load(strategy)(comm, *options)
    else:
        arguments.instance(
            "strategy", strategy, Strategy, "one of distributed, sharded or replicas, or a Strategy"
        )
        created = strategy
    if devices is not None and strategy != "replicas":
        hint = "Each worker has one device; lockstep.init(device) chooses it."
        raise ConfigError(
            "devices", "none without strategy='replicas'", found=str(list(devices)), hint=hint
        )
    return created


def resolve_strategy(
    strategy: Strategy | None,
    virtual_workers: int | None,
    threads: int | None,
    gradient_accumulation_steps: int,
) -> Strategy:
    """Return the strategy for the arguments of `TrainStep`.

    Raises:
        ConfigError: if they contradict each other.
    """
    check_threads(threads, virtual_workers)
    if strategy is not None:
        expected = "a Strategy, such as lockstep.parallel.sharded.Sharded(lockstep.init())"
        hint = "Trainer(..., strategy=) takes names." if isinstance(strategy, str) else ""
        arguments.instance("strategy", strategy, Strategy, expected, hint)
    chosen = Distributed(init()) if strategy is None else strategy
    if virtual_workers is not None:
        chosen = chosen.with_virtual_workers(virtual_workers, threads)
    if chosen.virtual_workers is not None and gradient_accumulation_steps > 1:
        hint = "Each shard has its own pass; more virtual workers need less memory."
        raise ConfigError(
            "gradient_accumulation_steps",
            "1 with virtual workers",
            gradient_accumulation_steps,
            hint,
        )
    return chosen


def make_scheduler(
    scheduler: Any, optimizer: Optimizer, schedule: Any, interval: str | None, metric: str | None
) -> SchedulerOfTorch | None:
    """Return what steps the scheduler of `TrainStep`, if there is one.

    Raises:
        ConfigError: for invalid arguments.
    """
    if scheduler is None:
        for name, value in (("scheduler_interval", interval), ("scheduler_metric", metric)):
            if value is not None:
                raise ConfigError(name, "none without scheduler=", value)
        return None
    if schedule is not None:
        raise ConfigError("scheduler", "either schedule= or scheduler=", found="both")
    return SchedulerOfTorch(scheduler, optimizer, interval, metric)


def refuse_closure(optimizer: Optimizer) -> None:
    """Check that `optimizer` takes a step from existing gradients.

    Raises:
        ConfigError: if its step needs a closure.
    """
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            "optimizer",
            "one that takes a step from existing gradients, such as SGD or AdamW",
            found=f"{type(optimizer).__name__}, whose step needs a closure",
            hint="An optimizer may call a closure any number of times, and each call would run the "
            "workers' passes.",
        )


def parameters_of(model: nn.Module, optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the optimizer's parameters, group by group.

    Raises:
        ConfigError: if some are not parameters of the model.
    """
    known = {id(p) for p in model.parameters()}
    parameters: list[nn.Parameter] = [
        p for group in optimizer.param_groups for p in group["params"]
    ]
    foreign = sum(id(p) not in known for p in parameters)
    if foreign:
        raise ConfigError(
            "optimizer",
            "parameters of the model that is trained",
            found=f"{foreign} of {len(parameters)} that are not among them",
            hint="Make the optimizer from model.parameters() of this model. A parameter outside of "
            "it, such as the temperature of a loss, belongs into a module: the model, or one "
            "that lockstep.prepare() is given as well. When a layer has been replaced, give "
            "the optimizer the parameters of the new one, in place of those of the old one.",
        )
    return parameters
