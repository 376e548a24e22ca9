"""The calls of models in a body of a prepared loop: what entered them, and what they made of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ...parallel.nested import tensors_of
from ...parallel.unchanged_parameters import UnchangedParameters
from ..losses.mean_check import NotAMean
from ..losses.model_check import compare_model

# Numbers of classes, channels and views are often smaller.
_FEWEST_SAMPLES = 4


@dataclass(frozen=True)
class _Number:
    """A single number that a model has returned: the call, and the number's place among the tensors
    of the output.
    """

    model: nn.Module
    arguments: tuple[Any, Any]
    place: int
    value: torch.Tensor


class ModelCalls:
    """The calls of prepared models in a body, as their forward hooks see them.

    The outputs of interest are those with a row, or two, for each sample, and single numbers. A
    first dimension may have that size by chance, as that of an output for one sample alone. So
    inputs must have it too, it must not be small, and a model that is called for each sample is not
    looked at. Numbers are not looked at where the samples may be in the second dimension of inputs,
    as in sequences of (time, sample, …).

    What a model makes of constants, such as a prompt for each class or the points of a boundary, is
    no output for a sample. Constants are inputs that have the values that one had in the body that
    was looked at before.

    Args:
        models: the models.
        samples: samples of the body's part of a batch.
        data: the body's part of a batch.
        before: the inputs in the body that was looked at before; None if this is the first one. Of
            its inputs only those that share memory with `data` are known to be data.
        compares: whether the outputs are of interest.
        refuses_changes: whether forward passes that change parameters are an error.

    Attributes:
        samples: samples of the body's part of a batch.
        data: the body's part of a batch.
        inputs: those of this body.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        samples: int,
        data: Any,
        before: Sequence[torch.Tensor] | None,
        compares: bool,
        refuses_changes: bool,
    ) -> None:
        self.samples = samples
        self.data = data
        self.inputs: list[torch.Tensor] = []
        self._models = models
        self._before = before
        self._memory = {
            tensor.untyped_storage().data_ptr() for tensor in tensors_of(data) if tensor.numel()
        }
        self._compares = compares and samples >= _FEWEST_SAMPLES
        self._unchanged = (
            {model: UnchangedParameters(model) for model in models} if refuses_changes else {}
        )
        self._outputs: list[torch.Tensor] = []
        self._numbers: list[_Number] = []
        self._calls = 0
        self._hooks: list[Any] = []
        self._watch()

    def _watch(self) -> None:
        for model in self._models:
            if self._unchanged:
                self._hooks.append(model.register_forward_pre_hook(self._note))
            self._hooks.append(model.register_forward_hook(self._record, with_kwargs=True))

    def _unwatch(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _note(self, model: nn.Module, _inputs: Any) -> None:
        self._unchanged[model].note()

    def _record(self, model: nn.Module, inputs: Any, named: Any, output: Any) -> None:
        if self._unchanged:
            self._unchanged[model].check()
        self._calls += 1
        entered = [
            tensor.detach() for tensor in (*tensors_of(inputs), *tensors_of(named)) if tensor.dim()
        ]
        self.inputs += entered
        if not self._compares or not any(map(self.are_data, entered)):
            return
        sizes = {tensor.shape[0] for tensor in entered}
        for place, tensor in enumerate(tensors_of(output)):
            if tensor.grad_fn is not None and tensor.dim() > 1 and tensor.shape[0] in sizes:
                self._outputs.append(tensor)
            elif (
                tensor.grad_fn is not None
                and tensor.numel() == 1
                and not self._may_be_second(entered)
            ):
                self._numbers.append(_Number(model, (inputs, named), place, tensor))

    def _may_be_second(self, entered: list[torch.Tensor]) -> bool:
        return any(tensor.dim() > 1 and tensor.shape[1] == self.samples for tensor in entered)

    def are_data(self, values: torch.Tensor) -> bool:
        """Return whether values that entered a model are known to be no constants."""
        if self._before is None:
            return values.untyped_storage().data_ptr() in self._memory
        return not _is_among(values, self._before)

    def outputs(self) -> list[torch.Tensor]:
        """Return the outputs with rows for samples."""
        rows = (self.samples, 2 * self.samples)
        return (
            [tensor for tensor in self._outputs if tensor.shape[0] in rows]
            if self._calls < self.samples
            else []
        )

    def number_that_is_no_mean(self, root: torch.Tensor, look: int) -> NotAMean | None:
        """Return what is wrong with a single number that a model has returned, and that is a part
        of the loss.

        The model is called with a few of the samples and with their halves, see `compare_model`. A
        number may be a mean over samples, or a sum, which the loop may divide.

        Args:
            root: a loss, before its backward pass.
            look: how many bodies have been looked at before this one.
        """
        if self._calls >= self.samples:
            return None
        self._unwatch()  # copies of the models must have no hooks
        try:
            return next(
                filter(None, (self._compare(number, root, look) for number in self._numbers)), None
            )
        finally:
            self._watch()

    def _compare(self, number: _Number, root: torch.Tensor, look: int) -> NotAMean | None:
        (slope,) = torch.autograd.grad(root, number.value, retain_graph=True, allow_unused=True)
        if slope is None or not slope.any():
            return None
        compare = partial(
            compare_model,
            forward=_call,
            model=number.model,
            data=number.arguments,
            size=self.samples,
        )

        def mean(output: Any, _: Any) -> torch.Tensor:
            return tensors_of(output)[number.place].reshape(())

        def total(output: Any, _: Any) -> tuple[torch.Tensor, torch.Tensor]:
            value = mean(output, None)
            return value, value.detach()  # a count that adds up where the sum does

        problem = compare(mean, number=look, passes=nullcontext)
        return (
            None
            if problem is None or compare(total, number=look, passes=nullcontext) is None
            else problem
        )

    def close(self) -> None:
        """Remove the hooks, and forget the outputs."""
        self._unwatch()
        self._outputs = []
        self._numbers = []


def _call(model: nn.Module, arguments: tuple[Any, Any]) -> tuple[Any, Any]:
    inputs, named = arguments
    return model(*inputs, **named), None


def _is_among(tensor: torch.Tensor, others: Iterable[torch.Tensor]) -> bool:
    return any(
        tensor.shape == other.shape and torch.equal(tensor, other.to(tensor)) for other in others
    )
