"""Whether trained weights are finite: those that training has made NaN or infinite are never saved
as good.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ...communicator import Communicator
from ...errors import DivergedError, counted
from ..errors_on_all import raise_on_all

__all__ = ["FiniteWeights"]

_ADVICE = (
    "The loss was finite and its gradient was not, as that of a norm or a square root at 0 is; or "
    "the update was too large: lower the learning rate, warm it up, or clip the gradients."
)


class FiniteWeights:
    """Compares the trained parameters of a model with those before the first step.

    A model may have values that are infinite from the beginning and stay so, such as the bias of
    outputs that are never to be chosen. Only what training has added counts. Buffers and frozen
    parameters, such as masks, do not.

    Args:
        model: the prepared model.
        comm: communicator over the workers.
    """

    def __init__(self, model: nn.Module, comm: Communicator) -> None:
        self._model = model
        self._comm = comm
        self._before: dict[str, torch.Tensor] | None = None

    def forget(self) -> None:
        """Forget what the weights were: they are given anew."""
        self._before = None

    def note(self) -> None:
        """Count what is not finite before a step; only the first time, and without waiting for the
        device.
        """
        if self._before is None:
            self._before = {
                name: _count(tensor) for name, tensor in _parameters(self._model, trained=False)
            }

    def check(self, steps_done: int) -> None:
        """Check the trained parameters; called by all workers, waits for the device.

        Raises:
            DivergedError: on every worker, if on any of them a parameter has more values that are
                not finite than it had before the first step.
        """
        raise_on_all(self._comm, self.error(steps_done))

    def error(self, steps_done: int) -> DivergedError | None:
        """Return the error of this worker, if its parameters have such values; waits for the
        device.
        """
        problem = self.problem()
        if not problem:
            return None
        return DivergedError(
            f"the trained weights are not finite after step {steps_done}: {problem}. {_ADVICE}"
        )

    def problem(self) -> str:
        """Return which values of this worker's parameters have become not finite, in words; "" if
        none has. Waits for the device.
        """
        worse = [] if self._before is None else self._worse(self._before)
        if not worse:
            return ""
        (name, count, size), *others = worse
        more = f" and values of {counted(len(others), 'more parameter')}" if others else ""
        return f"{count:,} of {size:,} values of {name}{more}"

    def _worse(self, before: dict[str, torch.Tensor]) -> list[tuple[str, int, int]]:
        """Return (name, values that are not finite, values) of the parameters that have more of
        them than before.
        """
        trained = list(_parameters(self._model, trained=True))
        if _all_finite(tensor for _, tensor in trained):
            return []
        counts = [(name, int(_count(tensor)), tensor.numel()) for name, tensor in trained]
        return [
            (name, count, size) for name, count, size in counts if count > int(before.get(name, 0))
        ]


def _parameters(model: nn.Module, trained: bool) -> Iterable[tuple[str, torch.Tensor]]:
    """Return the names and values of the parameters; of a DTensor, those that this worker has."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or not trained:
            tensor = parameter.detach()
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if local.numel() and (local.is_floating_point() or local.is_complex()):
                yield name, local


def _count(tensor: torch.Tensor) -> torch.Tensor:
    values = tensor.float() if tensor.element_size() == 1 else tensor  # float8 has few operations
    return (~torch.isfinite(values)).sum()


def _all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether all values are finite; it waits once for each device, and needs no memory for
    masks.
    """
    extremes: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        values = tensor.float() if tensor.element_size() == 1 else tensor
        real = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
        extremes.setdefault(tensor.device, []).extend(
            torch.isfinite(value) for value in torch.aminmax(real)
        )
    return all(bool(torch.stack(finite).all()) for finite in extremes.values())
