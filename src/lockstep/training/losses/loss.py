"""The loss of a training in one form, (output, target, size) → (sum, count), which adds up over
parts of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from ... import arguments
from ...errors import ConfigError
from ...parallel.module_sync import move_module
from ...parallel.nested import map_tensors
from ...parallel.sync_batchnorm import SyncBatchNorm, placeholder_batch
from ...parallel.unused_parameters import connect_parameters
from ..check_schedule import is_due
from .halves import Passes
from .loss_state import LossState
from .mean_check import MeanCheck, Problem
from .model_check import compare_model
from .own_loss import Counting, OwnLoss, returning_pair
from .torch_losses import (
    LabelSum,
    check_fit,
    classification_loss,
    is_elementwise,
    refuse_bare_sum,
    sum_of_elementwise,
)

__all__ = ["Computation", "Forward", "Loss", "LossFn", "LossModule", "default_forward"]

LossFn = Callable[[Any, Any], Any] | None
"""A loss: (output, target) → the mean over the samples (a scalar), or the samples' losses (shape
(n,)), or (sum, count) if the mean is over something else, e.g. tokens. None for a model that
computes its loss itself, see `lockstep.training.losses.own_loss`. `nn.CrossEntropyLoss` and
`nn.NLLLoss` are recognised, and so are their functions with keywords bound by `functools.partial`:
ignored labels do not count, and class weights count as in torch. Element-wise losses of torch, such
as `nn.MSELoss`, are known by the shapes of output and target. Other losses are compared by halves
again and again, see `lockstep.training.losses.mean_check`. The buffers of a loss that is a module
belong to the training's state, see `lockstep.training.losses.loss_state`.
"""

Forward = Callable[[nn.Module, Any], tuple[Any, Any]]
"""A forward pass: (model, data) → (output, target)."""


def default_forward(model: nn.Module, data: Any) -> tuple[Any, Any]:
    """Run `model` on the inputs of the pair (inputs, targets); returns (output, targets).

    Raises:
        ConfigError: if the data is not a pair.
    """
    if not isinstance(data, (tuple, list)) or len(data) != 2:
        raise ConfigError(
            "forward",
            "a function (model, data) -> (output, target) for data that is no pair (inputs, "
            "targets)",
            found=type(data).__name__,
        )
    return model(data[0]), data[1]


class Loss:
    """A loss as (output, target, size) → (sum, count), whatever `LossFn` is given.

    Its kind is found once: a loss of torch, whose mean is known (`LabelSum`, `sum_of_elementwise`),
    that of the model (`OwnLoss`), or any other function, which is compared by halves again and
    again (`MeanCheck`).

    Args:
        loss_fn: see `LossFn`. The modules that it is, or calls, are moved to `device`.
        device: the device of the outputs.
        forward: see `Forward`; an `OwnLoss` has its own.
        model: the model, whose parts are not the loss's; None if the loss's modules belong to
            another module.

    Attributes:
        modules: the modules that the loss is, or calls: their buffers are treated as the model's.
        counts_samples: whether the last count is known to be the number of samples, without reading
            it.
        found: what the comparisons of this worker have found.

    Raises:
        ConfigError: if `loss_fn` is not callable, or has reduction="sum".
    """

    def __init__(
        self,
        loss_fn: LossFn,
        device: torch.device,
        forward: Forward | None = None,
        model: nn.Module | None = None,
    ) -> None:
        if loss_fn is None:
            loss_fn = OwnLoss(forward)
        self._arguments = loss_fn, device, forward, model
        expected = "a function (output, target) -> loss, or a module"
        arguments.function("loss_fn", loss_fn, expected, of_class=False)
        refuse_bare_sum(loss_fn)
        self.modules = LossState(loss_fn, model, device)
        self._classification = classification_loss(loss_fn)
        fn = loss_fn if self._classification is None else self._classification
        if isinstance(fn, nn.Module):
            move_module(fn, device)
        self._own_loss = fn if isinstance(fn, OwnLoss) else None
        self._check: MeanCheck | None = None
        self._forward: Forward = default_forward if forward is None else returning_pair(forward)
        self._sum: Callable[[Any, Any, int], tuple[Any, Any]]
        if self._own_loss is not None:
            self._sum = self._own_loss.sum
            self._forward = self._own_loss.forward
        elif (labels := LabelSum.of(self._classification)) is not None:
            self._sum = labels
        elif is_elementwise(fn):
            self._sum = partial(sum_of_elementwise, fn)
        else:
            self._sum = self._check = MeanCheck("loss_fn", fn)
        self.counts_samples = False
        self._fits = self._classification is None  # whether output and labels are known to fit
        self._number = 0
        self._is_due = self.is_compared
        # the arguments of `forward`, for `check`
        self._first: tuple[nn.Module, Any, int] | None = None
        self.problem: Problem | None = None

    @property
    def is_compared(self) -> bool:
        """Whether the loss is compared by halves: not if it is known what it is a mean over."""
        return self._own_loss is not None or self._check is not None

    @property
    def is_of_model(self) -> bool:
        """Whether the model computes its loss itself."""
        return self._own_loss is not None

    def without_comparison(self) -> Loss:
        """Return the same loss, with the same modules, for calls beside the training: it compares
        nothing.
        """
        return Loss(*self._arguments)

    def forward(self, model: nn.Module, data: Any, size: int = 0) -> tuple[Any, Any]:
        """Return the output of `model` and the target for `data`, of `size` samples; 0 if they are
        not to be compared.

        Raises:
            ConfigError: for data, or a function `forward`, that give no pair.
        """
        if size and self._is_due and (self._first is None or self._first[2] < 2):
            self._first = model, data, size
        return self._forward(model, data)

    def __call__(
        self, output: Any, target: Any, size: int
    ) -> tuple[torch.Tensor, torch.Tensor | float]:
        """Return (sum, count) of `size` samples.

        Raises:
            ConfigError: if output and target do not fit, or the loss function returns none of the
                forms of `LossFn`.
        """
        if not self._fits:
            check_fit(self._classification, output, target)
            self._fits = True
        try:
            total, count = self._sum(output, target, size)
        except (IndexError, RuntimeError):
            # Checking the labels of every batch in advance would cost time and stall a device.
            # After an error on a device, its tensors cannot be read.
            if (
                self._classification is not None
                and isinstance(output, torch.Tensor)
                and output.device.type == "cpu"
            ):
                check_fit(self._classification, output, target)
            raise
        self.counts_samples = type(count) is int  # see `as_sum`
        return total, count

    def expect(self, number: int, due: bool | None = None) -> bool:
        """Begin a step, or a batch of an evaluation.

        Args:
            number: its number.
            due: whether comparisons are due; see `is_due` when None.

        Returns:
            Whether the loss is due to be compared, by `check`: the same on every worker.
        """
        self._number = number
        self._first = None
        self._is_due = self.is_compared and (is_due(number) if due is None else due)
        if self._check is not None:
            self._check.expect(number, self._is_due)
        return self._is_due

    def check(self, passes: Passes, compares_model: bool = True) -> Problem | None:
        """Check after a step's passes that the loss is a mean over samples, or adds up; returns
        what is wrong.

        If the loss is, or uses, a number that the model has computed for a whole batch, the model
        is called with halves of a few samples, see `compare_model`. A worker may have samples to
        compare at a step at which others have none, see `SeenValues`. What it finds then is
        returned again until all workers ask.

        Args:
            passes: the context manager that model and loss were called in, such as autocast.
            compares_model: whether the model may be called: not if its forward pass communicates.
        """
        first = self._first
        self._first = None
        if self.problem is not None:
            return self.problem
        if self._own_loss is not None:
            self.problem = self._own_loss if self._own_loss.problem is not None else None
        elif self._check is not None:
            self.problem = self._check.check(passes)
        if self.problem is None and first is not None and compares_model:
            if self._own_loss is not None:
                self.problem = compare_model(
                    self._own_loss,
                    self._forward,
                    *first,
                    self._number,
                    passes,
                    self._own_loss.__name__,
                )
            elif self._check is not None and self._check.opaque:
                fn = self._check.fn
                name = self._check.name
                self.problem = compare_model(fn, self._forward, *first, self._number, passes, name)
        return self.problem

    def state_dict(self) -> dict[str, Any]:
        """Return the buffers and parameters of a loss that is a module, and what that of a model
        counts, if known.
        """
        state: dict[str, Any] = {}
        if of_modules := self.modules.saved():
            state["loss"] = of_modules
        if self._own_loss is not None and self._own_loss.counting is not None:
            state["loss_counts"] = self._own_loss.counting.name
        return state

    def load_state_dict(self, state: Mapping[str, Any], speaks: bool) -> None:
        """Load what `state_dict` returned.

        Args:
            state: the state; other entries are left alone.
            speaks: whether this worker logs what cannot be loaded.

        Raises:
            CheckpointError: for tensors of other shapes.
        """
        self.modules.load(state.get("loss"), speaks)
        if self._own_loss is not None and "loss_counts" in state:
            self._own_loss.counting = Counting[state["loss_counts"]]


class Computation(nn.Module):
    """A computation with a model on a part of a batch: (data, n) → sums over n samples.

    Args:
        model: the user's model.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, data: Any, size: int) -> Any:
        """Return the sums over `size` samples."""
        return self.on(self.model, data, size)

    def on(self, model: nn.Module, data: Any, size: int) -> Any:
        """Return the sums computed with `model`, a copy on the device of the data; copies may run
        in parallel.
        """
        raise NotImplementedError


class LossModule(Computation):
    """A model and its loss as one module: (data, n) → (sum of the loss, what it is a sum over).

    The module contains the loss so that everything a step computes runs inside the strategy's
    forward pass. The parameters of a loss that is a module are not parameters of this module.

    Args:
        model: the user's model, on its device.
        loss: its loss.
        collective_forward: whether the model must run on every worker, even on one without samples.
    """

    def __init__(self, model: nn.Module, loss: Loss, *, collective_forward: bool = False) -> None:
        super().__init__(model)
        self.loss = loss
        # Layers that communicate must run on every worker, even on one without samples.
        self._communicates = collective_forward or any(
            isinstance(layer, (SyncBatchNorm, nn.SyncBatchNorm)) for layer in model.modules()
        )

    def on(
        self, model: nn.Module, data: Any, size: int
    ) -> tuple[torch.Tensor, torch.Tensor | float]:
        """Return (sum of the loss, count) of `size` samples; without samples, a zero connected to
        every parameter.
        """
        try:
            if size == 0:
                return self._empty_loss(model, data), 0
            output, target = self.loss.forward(model, data, size)
        except ValueError as error:
            if "more than 1 value per channel" in str(error):
                raise _too_few(error, size) from None
            raise
        total, count = self.loss(output, target, size)
        if _is_zero(count) and not _is_finite(total):
            return _zero_of(output, total), count
        if self.loss.is_compared and isinstance(count, torch.Tensor) and not count.is_cpu:
            total = _zero_where_nothing_counts(total, count)
        if torch.is_grad_enabled() and not getattr(total, "requires_grad", False):
            raise _no_gradient(model, total)
        return total, count

    def check(self, passes: Passes) -> Problem | None:
        """Check the loss after a step's passes, see `Loss.check`; the model is not called if it
        communicates.
        """
        return self.loss.check(passes, compares_model=not self._communicates)

    def _empty_loss(self, model: nn.Module, data: Any) -> torch.Tensor:
        """Return the loss of a worker without samples: zero, connected to every parameter."""
        parameters = [p for p in model.parameters() if p.requires_grad]
        zero = torch.zeros((), device=parameters[0].device if parameters else None)
        if not self._communicates:
            return connect_parameters(zero, parameters)
        # Run the model, so that the backward pass reaches the same layers in the same order as on
        # other workers.
        with placeholder_batch(model, data) as placeholder:
            output, _ = self.loss.forward(model, placeholder)
        return connect_parameters(_zero_of(output, zero), parameters)


def _is_zero(count: Any) -> bool:
    """Return whether a count is known to be 0, without waiting for a device."""
    if isinstance(count, torch.Tensor):
        return count.is_cpu and not count.item()
    return not count


def _is_finite(total: Any) -> bool:
    """Return whether a sum is a number: where nothing counts there may still be one, as of boxes
    without an object.
    """
    return not isinstance(total, torch.Tensor) or bool(torch.isfinite(total.detach()).all())


def _zero_where_nothing_counts(total: Any, count: torch.Tensor) -> Any:
    """Return zero in place of a sum that is no number where nothing counts, without waiting for the
    device.

    Unlike with `_zero_of` the backward pass goes through the graph of the sum, with a gradient of
    zero. That is right where it selects what counts, as ``output[kept]``, and gives NaN where it
    divides by the count itself.
    """
    if not isinstance(total, torch.Tensor) or total.device != count.device:
        return total
    return torch.where((count == 0) & ~torch.isfinite(total.detach()), 0.0, total)


def _zero_of(output: Any, total: Any) -> Any:
    """Return zero in place of `total`, the sum over nothing, whose graph reaches `output` and gives
    it zero gradients.

    The sum itself may be no number: the mean over nothing, times nothing.
    """
    if not isinstance(total, torch.Tensor):
        return total
    parts = [torch.zeros((), device=total.device)]
    map_tensors(
        lambda tensor: parts.append(tensor.reshape(-1)[:0].sum().float().to(total.device)), output
    )
    zero = torch.stack(parts).sum()
    return zero if zero.requires_grad or not total.requires_grad else total


def _no_gradient(model: nn.Module, loss: Any) -> ConfigError:
    """Return the error of a loss from which no gradient reaches the model."""
    parameters = list(model.parameters())
    if parameters and not any(p.requires_grad for p in parameters):
        description = f"none of {len(parameters)}: all are frozen (requires_grad=False)"
        return ConfigError("model", "at least one parameter that is trained", found=description)
    expected = "a loss that torch has computed from the model's output, with its gradient"
    description = (
        "one without a gradient" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
    )
    hint = "A loss loses its gradient by .item(), .detach(), torch.no_grad(), NumPy, or argmax."
    return ConfigError("loss_fn", expected, found=description, hint=hint)


def _too_few(error: ValueError, size: int) -> ConfigError:
    """Return the error of a batch norm in training with a single value per channel."""
    return ConfigError(
        "global_batch_size",
        "at least two values for each channel of every batch norm, in each worker's part of each "
        "batch",
        found=f"a part of {size} (torch: {error})",
        hint="Use another global batch size, drop_last=True of Loader, sync_batchnorm, or fewer "
        "workers, gradient accumulation steps or virtual workers.",
    )
