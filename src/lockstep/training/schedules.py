"""Learning-rate schedules as functions of the step, and linear scaling of the learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from .. import arguments
from ..errors import ConfigError, counted

Schedule = Callable[[int], float]
"""Number of steps done → factor of the optimizer's learning rate. A step is one update by all
workers together, so the factor does not depend on their number."""

SCHEDULES = ("constant", "cosine", "step")


def make_schedule(
    name: str, total_steps: int, warmup_steps: int = 0, warmup_start: float = 0.0
) -> Schedule:
    """Return a learning-rate schedule with an optional linear warm-up.

    - constant: 1.
    - cosine: from 1 to 0 along half a cosine (Loshchilov, Hutter, "SGDR", ICLR 2017).
    - step: 1, multiplied by 0.1 after 1/3, 2/3 and 8/9 of the steps (Goyal et al., "Accurate, large
      minibatch SGD", 2017: epochs 30, 60 and 80 of 90).

    Args:
        name: one of the above.
        total_steps: steps of the whole run; the factor is constant after them.
        warmup_steps: steps over which the factor grows linearly from `warmup_start` to 1 (Goyal et
            al. 2017, §2.2).
        warmup_start: the factor at which the warm-up starts, 0 to 1.

    Raises:
        ConfigError: for an unknown name, or a warm-up as long as the run.

    Examples:
        >>> import lockstep
        >>> schedule = lockstep.make_schedule("cosine", total_steps=100, warmup_steps=3)
        >>> [round(schedule(step), 2) for step in (0, 1, 2, 3, 99)]
        [0.25, 0.5, 0.75, 1.0, 0.0]
    """
    arguments.choice("schedule", name, SCHEDULES)
    arguments.number("total_steps", total_steps, expected="a number of steps")
    arguments.number("warmup_steps", warmup_steps, expected="a number of steps")
    expected = "a factor of the learning rate, 0 or more"
    arguments.number("warmup_start", warmup_start, least=0, expected=expected)
    if not 0 <= warmup_steps < max(total_steps, 1):
        expected = f"a warm-up shorter than the run of {counted(total_steps, 'step')}"
        raise ConfigError("warmup_epochs", expected, found=f"{warmup_steps}")

    def factor(step: int) -> float:
        if step < warmup_steps:
            return warmup_start + (1 - warmup_start) * (step + 1) / (warmup_steps + 1)
        progress = min((step - warmup_steps) / max(total_steps - warmup_steps, 1), 1.0)
        if name == "cosine":
            return 0.5 * (1 + math.cos(math.pi * progress))
        if name == "step":
            return 0.1 ** sum(progress >= point for point in (1 / 3, 2 / 3, 8 / 9))
        return 1.0

    return factor


def scaled_lr(lr: float, global_batch_size: int, base_batch_size: int | None) -> float:
    """Scale `lr`, chosen for `base_batch_size` samples a step, linearly to the global batch size.

    Source: Goyal et al., "Accurate, large minibatch SGD: training ImageNet in 1 hour", 2017, §2.1.
    """
    return lr if base_batch_size is None else lr * global_batch_size / base_batch_size


def learning_rate_factor(schedule: Schedule, step: int) -> float:
    """Return the learning-rate factor of `schedule` for `step`.

    Raises:
        ConfigError: if it is not a number.
    """
    factor: Any = schedule(step)
    try:
        return float(factor)
    except (TypeError, ValueError):
        raise ConfigError("schedule", f"a number as the factor of step {step}", factor) from None
