"""The update of an optimizer whose state is divided among the workers: each makes its own part, and
gives the new values to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from ..parallel.optimizer_shards import OptimizerShards
from .recovery import Recovery

__all__ = ["update_by_owners"]


def update_by_owners(
    shards: OptimizerShards,
    recovery: Recovery,
    parameters: Sequence[nn.Parameter],
    max_grad_norm: float | None,
    take_step: Callable[[torch.Tensor | None], object],
) -> torch.Tensor | None:
    """Update the parameters that this worker owns, and give all their new values to all; called by
    all workers, each with the reduced gradients of its own parameters.

    In an elastic job the norms of the gradients are exchanged in any case: whoever contributes has
    all gradients that its update needs, see `Recovery.update`.

    Args:
        shards: who updates which parameter.
        recovery: of the job.
        parameters: all parameters of the optimizer.
        max_grad_norm: the maximum 2-norm of the whole gradient; None if it is not limited.
        take_step: takes the optimizer's step with the gradients in ``.grad``; its argument is the
            norm that is returned here.

    Returns:
        The norm of the whole gradient before it was limited, 0-dim; None if it is not limited.
    """
    limited: list[torch.Tensor] = []

    def meet() -> torch.Tensor | None:
        if max_grad_norm is None and recovery.has_fixed_workers:
            return None
        return shards.gradient_norms(parameters)

    def update(norms: torch.Tensor | None) -> None:
        if max_grad_norm is not None:
            assert norms is not None
            limited.append(shards.clip(parameters, norms, max_grad_norm))
        take_step(limited[0] if limited else None)

    recovery.update(meet, update, shards.give_out)
    return limited[0] if limited else None
