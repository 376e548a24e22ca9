"""The order of passes in a stage: those of torch.distributed.pipelining, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..communicator import Communicator

__all__ = ["SCHEDULES", "make_schedule"]

SCHEDULES = {"1f1b": "Schedule1F1B", "gpipe": "ScheduleGPipe"}

Values = tuple[torch.Tensor, ...]


def make_schedule(
    name: str,
    module: nn.Module,
    comm: Communicator,
    microbatches: int,
    loss_fn: Callable[[Any, Any], torch.Tensor],
    passed: tuple[Values, Values],
) -> Any:
    """A schedule of `torch.distributed.pipelining`.

    Args:
        name: of `SCHEDULES`.
        module: this worker's stage.
        comm: the workers.
        microbatches: in a batch.
        loss_fn: (output, target) of one of them → what is differentiated; the sum of all is.
        passed: what a micro-batch brings into the stage, and what leaves it. Given, torch need not find it out with a
            pass of its own, which would change running statistics.
    """
    from torch.distributed import pipelining

    stage = pipelining.PipelineStage(
        module, comm.rank, comm.size, comm.device, input_args=passed[0], output_args=passed[1], group=comm.group
    )
    # With fewer micro-batches than stages both orders are the same, but torch's 1F1B refuses them.
    order = name if microbatches >= comm.size else "gpipe"
    return getattr(pipelining, SCHEDULES[order])(stage, microbatches, loss_fn=loss_fn, scale_grads=False)
