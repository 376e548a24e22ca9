"""What the workers agree upon before the first step with fp16: the loss's count, and what is
computed in float16.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from ...flight_recorder import named
from ...parallel.randomness import preserve_generators
from ...parallel.strategy import Strategy, accumulation_dtype
from ..losses.loss import Computation, LossModule
from ..pass_effects import preserving_buffers
from .precision import Precision


def agree_on_loss_scale(
    precision: Precision,
    loss: LossModule,
    strategy: Strategy,
    parts: Iterable[tuple[Any, int]],
    samples: int,
) -> None:
    """Set `Precision.cast` and the count per sample from the first global batch; called by all
    workers.

    The forward passes of the step are run once more for that: the first backward pass needs the
    count of all parts. Buffers and random generators are restored.

    Args:
        precision: fp16.
        loss: the model with its loss.
        strategy: the strategy, which has prepared the model.
        parts: (data, samples) of this worker's passes.
        samples: samples in the global batch.
    """
    comm = strategy.comm
    parameters = list(loss.model.parameters())
    known = strategy.cast_parameters(loss.model, precision.name)
    watched = _WatchedLoss(loss, finds=known is None)
    module = strategy.wrap_evaluation(watched)
    # the count, then whether autocast converts each parameter
    numbers = torch.zeros(
        1 + len(parameters), dtype=accumulation_dtype(comm.device), device=comm.device
    )
    # Without a graph where backward passes are sure to follow forward passes, as those of FSDP.
    everything = strategy.with_loss(loss.model)
    with (
        preserve_generators(comm.device),
        preserving_buffers(everything),
        torch.set_grad_enabled(known is None),
    ):
        for data, size in parts:
            if size or data is not None:
                with precision.autocast():
                    _, count = module(data, size)
                numbers[0] += count
    numbers[[1 + number for number in (watched.converted if known is None else known)]] = 1.0
    with named("loss and sample count"):
        sums = comm.allreduce(numbers)
    precision.set_count(sums[0], samples)
    precision.cast = frozenset(torch.nonzero(sums[1:]).flatten().tolist())


class _WatchedLoss(Computation):
    """A loss that notes which parameters autocast converts to float16.

    Args:
        loss: the model with its loss.
        finds: whether it looks for them.

    Attributes:
        converted: the numbers in the model of those that it has found.
    """

    def __init__(self, loss: LossModule, finds: bool) -> None:
        super().__init__(loss.model)
        self._on = loss.on
        self._finds = finds
        self.converted: set[int] = set()

    @override
    def on(self, model: nn.Module, data: Any, size: int) -> Any:
        total, count = self._on(model, data, size)
        if self._finds:
            self.converted |= _cast_parameters(total, list(model.parameters()))
        return total, count


def _cast_parameters(total: torch.Tensor, parameters: Sequence[nn.Parameter]) -> set[int]:
    """Return the numbers of the parameters that the graph of `total` converts to float16 before it
    uses them.
    """
    numbers = {id(p): number for number, p in enumerate(parameters)}
    stack = [total.grad_fn]
    seen = set()
    cast_numbers = set[int]()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        to_half = (
            node.name() == "ToCopyBackward0" and node._input_metadata[0].dtype is torch.float16
        )
        for child, _ in node.next_functions:
            number = numbers.get(id(getattr(child, "variable", None)))
            if number is None:
                stack.append(child)
            elif to_half:
                cast_numbers.add(number)
    return cast_numbers
