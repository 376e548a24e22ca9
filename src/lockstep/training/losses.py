"""Losses as sums over samples, which add up over the parts of a batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..errors import ConfigError
from ..parallel.nested import map_tensors
from ..parallel.sync_batchnorm import SyncBatchNorm, placeholder_batch
from ..parallel.unused_parameters import connect_parameters
from .mean_check import Passes, is_due
from .model_check import compare_model
from .own_loss import NotCounted, OwnLoss, returning_pair
from .sample_sums import NotAMean, SampleSum, describe_function, describe_shapes

__all__ = ["Computation", "Forward", "LossFn", "LossModule", "LossSum", "default_forward"]

LossFn = Callable[[Any, Any], Any] | None
"""(output, target) → the mean over the samples (a scalar), or the samples' losses (shape (n,)), or (sum, count) if the
mean is over something else, e.g. tokens. None for a model that computes its loss itself, see
`lockstep.training.own_loss`. `nn.CrossEntropyLoss` and `nn.NLLLoss` are recognised, and so are their
functions with keywords bound by `functools.partial`: ignored labels do not count, and class weights count as in torch.
Element-wise losses of torch, such as `nn.MSELoss`, are known by the shapes of output and target. Other losses are
compared by halves again and again, see `lockstep.training.mean_check`. The buffers of a loss that is a module belong to
the training's state, see `lockstep.training.loss_state`."""

Forward = Callable[[nn.Module, Any], tuple[Any, Any]]
"""(model, data) → (output, target)."""


def default_forward(model: nn.Module, data: Any) -> tuple[Any, Any]:
    """Run `model` on the inputs of the pair (inputs, targets); returns (output, targets).

    Raises:
        ConfigError: if the data is not a pair.
    """
    if not isinstance(data, (tuple, list)) or len(data) != 2:
        raise ConfigError(
            "forward",
            "a function (model, data) -> (output, target) for data that is no pair (inputs, targets)",
            found=type(data).__name__,
        )
    return model(data[0]), data[1]


class LossSum:
    """A loss function as (output, target, size) → (sum of the loss, what it is a sum over).

    Args:
        loss_fn: see `LossFn`; a module is moved to `device`.
        device: the device of the outputs.

    Attributes:
        counts_samples: whether the last loss is known to be a sum over samples, without reading its count.
        parts: the loss function as a `SampleSum`; a recognised loss is never checked.

    Raises:
        ConfigError: if `loss_fn` is not callable, or has reduction="sum".
    """

    def __init__(self, loss_fn: LossFn, device: torch.device) -> None:
        if isinstance(loss_fn, type):
            name = loss_fn.__name__
            found, hint = f"the class {name}", f"Make an instance: {name}()."
            raise ConfigError("loss_fn", "a function (output, target) -> loss, or a module", found=found, hint=hint)
        if not callable(loss_fn):
            raise ConfigError("loss_fn", "a function (output, target) -> loss, or a module", loss_fn)
        _refuse_bare_sum(loss_fn)
        self._classification = classification_loss(loss_fn)
        loss_fn = self._classification or loss_fn
        if isinstance(loss_fn, nn.Module):
            loss_fn.to(device)
        self._summing = _with_sum_reduction(self._classification)
        self._is_elementwise = _is_elementwise(loss_fn)
        self.parts = SampleSum("loss_fn", loss_fn)
        if self.is_recognised or isinstance(loss_fn, OwnLoss):  # `compare_model` compares the model's own loss
            self.parts.close()
        self._checked = False
        self.counts_samples = False

    @property
    def is_recognised(self) -> bool:
        """Whether it is known what the loss is a mean over, so that nothing is to be compared."""
        return self._summing is not None or self._is_elementwise

    @property
    def uses_whole_batch(self) -> bool:
        """Whether the loss is, or uses, a number that the model has computed for a whole batch."""
        return isinstance(self.parts.fn, OwnLoss) or self.parts.opaque

    @property
    def problem(self) -> NotCounted | None:
        """Why it is not known what the loss counts that the model computes itself; None if it is known."""
        return self.parts.fn.problem if isinstance(self.parts.fn, OwnLoss) else None

    def __call__(self, output: Any, target: Any, size: int) -> tuple[torch.Tensor, torch.Tensor | int]:
        """Return the loss of `size` samples.

        Raises:
            ConfigError: if output and target do not fit, or the loss function returns none of the forms of `LossFn`.
        """
        if not self._checked and self._classification is not None:
            check_fit(self._classification, output, target)
        self._checked = True
        try:
            return self._sum(output, target, size)
        except (IndexError, RuntimeError):
            # Checking the labels of every batch in advance would cost time and stall a device. After an error on a
            # device, its tensors cannot be read.
            if self._classification is not None and isinstance(output, torch.Tensor) and output.device.type == "cpu":
                check_fit(self._classification, output, target)
            raise

    def _sum(self, output: Any, target: Any, size: int) -> tuple[torch.Tensor, torch.Tensor | int]:
        if self._is_elementwise:
            _check_elementwise(self.parts.fn, output, target, size)
        if self._summing is None:
            summed = self.parts(output, target, size)
            self.counts_samples = self.parts.counts_samples
            return summed
        return self._summing(output, target), _label_count(self._summing, output, target)


def classification_loss(loss_fn: LossFn) -> nn.CrossEntropyLoss | nn.NLLLoss | None:
    """Return `loss_fn` as a loss module of torch for classification; None for other losses."""
    if isinstance(loss_fn, (nn.CrossEntropyLoss, nn.NLLLoss)):
        return loss_fn
    fn, keywords = loss_fn, {}
    if isinstance(loss_fn, partial) and not loss_fn.args:
        fn, keywords = loss_fn.func, loss_fn.keywords
    module = nn.CrossEntropyLoss if fn is F.cross_entropy else nn.NLLLoss if fn is F.nll_loss else None
    # With a bound output or target it is another function.
    return None if module is None or keywords.keys() & {"input", "target"} else module(**keywords)


def _refuse_bare_sum(loss_fn: LossFn) -> None:
    """Check that a loss module, or a function of torch with bound keywords, does not have reduction="sum".

    Raises:
        ConfigError: if it has.
    """
    fn, reduction = loss_fn, getattr(loss_fn, "reduction", None) if isinstance(loss_fn, nn.Module) else None
    while isinstance(fn, partial):
        reduction, fn = reduction or fn.keywords.get("reduction"), fn.func
    of_torch = isinstance(fn, nn.Module) or getattr(fn, "__module__", None) == F.__name__
    if reduction == "sum" and of_torch:
        got = describe_function(loss_fn) + (" with reduction='sum'" if isinstance(loss_fn, nn.Module) else "")
        hint = "A sum without a count cannot be turned into a mean."
        raise ConfigError("loss_fn", "a mean over samples, or (sum, count)", found=got, hint=hint)


_ELEMENTWISE = {
    nn.MSELoss: F.mse_loss,
    nn.L1Loss: F.l1_loss,
    nn.SmoothL1Loss: F.smooth_l1_loss,
    nn.HuberLoss: F.huber_loss,
    nn.BCELoss: F.binary_cross_entropy,
    nn.BCEWithLogitsLoss: F.binary_cross_entropy_with_logits,
    nn.SoftMarginLoss: F.soft_margin_loss,
    nn.PoissonNLLLoss: F.poisson_nll_loss,
    nn.KLDivLoss: F.kl_div,
}


def _is_elementwise(loss_fn: LossFn) -> bool:
    """Return whether `loss_fn` is a loss of torch that is a mean over the elements of the output, or their losses."""
    fn, keywords = loss_fn, {}
    if isinstance(loss_fn, partial) and not loss_fn.args:
        fn, keywords = loss_fn.func, loss_fn.keywords
    return type(fn) in _ELEMENTWISE or (fn in _ELEMENTWISE.values() and not keywords.keys() & {"input", "target"})


def _check_elementwise(loss_fn: LossFn, output: Any, target: Any, size: int) -> None:
    """Check by the shapes alone that an element-wise loss compares each sample with its own target.

    Raises:
        ConfigError: if it compares all pairs of samples, or if the samples have different numbers of elements.
    """
    if not (isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor) and output.dim() and size):
        return
    name = describe_function(loss_fn)
    if size > 1 and target.dim() and output.dim() != target.dim() and output.shape[0] == target.shape[0] == size:
        hint = describe_shapes(output, target)
        raise ConfigError("loss_fn", "an output and a target of the same shape", found=f"{name} of others", hint=hint)
    if output.numel() % size:
        hint = "Return (sum, count): the sum over the elements, and their number."
        found = f"{name} of an output of shape {list(output.shape)} for {size} samples"
        raise ConfigError("loss_fn", "as many elements of the output for each sample", found=found, hint=hint)


def _with_sum_reduction(loss_fn: nn.CrossEntropyLoss | nn.NLLLoss | None) -> nn.CrossEntropyLoss | nn.NLLLoss | None:
    """Return a copy with reduction="sum" of a loss with reduction="mean", whose mean is over labels, not samples.

    The mean times the number of labels would be 0 / 0 where all labels are ignored.
    """
    if loss_fn is None or loss_fn.reduction != "mean":
        return None
    if type(loss_fn).forward not in (nn.CrossEntropyLoss.forward, nn.NLLLoss.forward):
        _refuse_weighted_mean(loss_fn)
        return None  # a subclass with its own forward pass, whose mean may be over something else
    summing = copy.copy(loss_fn)
    summing.reduction = "sum"
    return summing


def _refuse_weighted_mean(loss_fn: nn.CrossEntropyLoss | nn.NLLLoss) -> None:
    if loss_fn.weight is not None:
        raise ConfigError(
            "loss_fn",
            "a loss whose mean is over samples",
            found=f"{type(loss_fn).__name__}, with its own forward, class weights and reduction='mean'",
            hint="Its mean is over weights, which differ from part to part. "
            "Return (sum, count): the sum of the losses, and weight[target].sum().",
        )


def _label_count(loss_fn: nn.CrossEntropyLoss | nn.NLLLoss, output: torch.Tensor, target: torch.Tensor) -> Any:
    """Return the denominator of torch's mean: the number, or the sum of weights, of labels that are not ignored."""
    if target.is_floating_point():
        return target.numel() // target.shape[1]  # probabilities, one set for each label
    kept = target != loss_fn.ignore_index
    if loss_fn.weight is None:
        return kept.sum()
    # An ignored label is not a valid index, so class 0 is used; selecting the kept labels would stall a GPU.
    return (loss_fn.weight[target.where(kept, 0).long()] * kept).sum()


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
        """Return the sums computed with `model`, a copy on the device of the data; copies may run in parallel."""
        raise NotImplementedError


class LossModule(Computation):
    """A model and its loss as one module: (data, n) → (sum of the loss, what it is a sum over).

    The module contains the loss so that everything a step computes runs inside the strategy's forward pass. The
    parameters of a loss that is a module are not parameters of this module.

    Args:
        model: the user's model, on its device.
        loss: its loss.
        forward: see `Forward`.
        collective_forward: whether the model must run on every worker, even on one without samples.
    """

    def __init__(
        self, model: nn.Module, loss: LossSum, forward: Forward | None = None, *, collective_forward: bool = False
    ) -> None:
        super().__init__(model)
        self._loss = loss
        self._forward = default_forward if forward is None else returning_pair(forward)
        self._step = 0
        self._first: tuple[nn.Module, Any, int] | None = None  # the arguments of `on`, for `check`
        self._found: NotAMean | NotCounted | None = None
        # Layers that communicate must run on every worker, even on one without samples.
        self._communicates = collective_forward or any(
            isinstance(layer, (SyncBatchNorm, nn.SyncBatchNorm)) for layer in model.modules()
        )

    @property
    def counts_samples(self) -> bool:
        """See `LossSum`."""
        return self._loss.counts_samples

    def on(self, model: nn.Module, data: Any, size: int) -> tuple[torch.Tensor, torch.Tensor | int]:
        """Return (sum of the loss, count) of `size` samples; without samples, a zero connected to every parameter."""
        try:
            if size == 0:
                return self._empty_loss(model, data), 0
            if is_due(self._step) and not self._loss.is_recognised and (self._first is None or self._first[2] < 2):
                self._first = model, data, size
            output, target = self._forward(model, data)
        except ValueError as error:
            if "more than 1 value per channel" in str(error):
                raise _too_few(error, size) from None
            raise
        total, count = self._loss(output, target, size)
        if _is_zero(count) and not _is_finite(total):
            return _zero_of(output, total), count
        if torch.is_grad_enabled() and not getattr(total, "requires_grad", False):
            raise _no_gradient(model, total)
        return total, count

    def expect(self, step: int) -> bool:
        """Begin a step; returns whether its loss is to be checked, by `check`: the same on every worker."""
        self._loss.parts.expect(step)
        self._step, self._first = step, None
        return is_due(step) and not self._loss.is_recognised

    def check(self, passes: Passes) -> NotAMean | NotCounted | None:
        """Check after a step's passes that the loss is a mean over samples, see `SampleSum.check`.

        If the model computes the loss itself, the check calls the model on halves of a few samples, in evaluation mode.
        A worker may have samples to compare at a step at which others have none, see `SeenValues`. What it finds then
        is returned again until all workers ask.
        """
        self._found = self._found or self._check(passes)
        return self._found

    @property
    def found(self) -> NotAMean | NotCounted | None:
        """What the checks of this worker have found."""
        return self._found

    def _check(self, passes: Passes) -> NotAMean | NotCounted | None:
        first, self._first = self._first, None
        if self._loss.problem is not None:
            return self._loss.problem
        not_a_mean = self._loss.parts.check(passes)
        if not_a_mean is None and first is not None and self._loss.uses_whole_batch and not self._communicates:
            return compare_model(self._loss.parts.fn, self._forward, *first, self._step, passes)
        return not_a_mean

    def _empty_loss(self, model: nn.Module, data: Any) -> torch.Tensor:
        """Return the loss of a worker without samples: zero, connected to every parameter."""
        parameters = [p for p in model.parameters() if p.requires_grad]
        zero = torch.zeros((), device=parameters[0].device if parameters else None)
        if not self._communicates:
            return connect_parameters(zero, parameters)
        # Run the model, so that the backward pass reaches the same layers in the same order as on other workers.
        with placeholder_batch(model, data) as placeholder:
            output, _ = self._forward(model, placeholder)
        return connect_parameters(_zero_of(output, zero), parameters)


def _is_zero(count: Any) -> bool:
    """Return whether a count is known to be 0, without waiting for a device."""
    return not (isinstance(count, torch.Tensor) and count.device.type != "cpu") and not count


def _is_finite(total: Any) -> bool:
    """Return whether a sum is a number: where nothing counts there may still be one, as of boxes without an object."""
    return not isinstance(total, torch.Tensor) or bool(torch.isfinite(total.detach()).all())


def _zero_of(output: Any, total: Any) -> Any:
    """Return zero in place of `total`, the sum over nothing, whose graph reaches `output` and gives it zero gradients.

    The sum itself may be no number: the mean over nothing, times nothing.
    """
    if not isinstance(total, torch.Tensor):
        return total
    parts = [torch.zeros((), device=total.device)]
    map_tensors(lambda tensor: parts.append(tensor.reshape(-1)[:0].sum().float().to(total.device)), output)
    zero = torch.stack(parts).sum()
    return zero if zero.requires_grad or not total.requires_grad else total


def _no_gradient(model: nn.Module, loss: Any) -> ConfigError:
    """Return the error of a loss from which no gradient reaches the model."""
    parameters = list(model.parameters())
    if parameters and not any(p.requires_grad for p in parameters):
        found = f"none of {len(parameters)}: all are frozen (requires_grad=False)"
        return ConfigError("model", "at least one parameter that is trained", found=found)
    expected = "a loss that torch has computed from the model's output, with its gradient"
    found = "one without a gradient" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
    hint = "A loss loses its gradient by .item(), .detach(), torch.no_grad(), NumPy, or argmax."
    return ConfigError("loss_fn", expected, found=found, hint=hint)


def _too_few(error: ValueError, size: int) -> ConfigError:
    """Return the error of a batch norm in training with a single value per channel."""
    return ConfigError(
        "global_batch_size",
        "at least two values for each channel of every batch norm, in each worker's part of each batch",
        found=f"a part of {size} (torch: {error})",
        hint="Use another global batch size, drop_last=True of Loader, sync_batchnorm, or fewer workers, "
        "gradient accumulation steps or virtual workers.",
    )


def check_fit(loss_fn: LossFn, output: Any, target: Any) -> None:
    """Check the shapes of output and target of a classification loss, and that the labels are classes of the output.

    Raises:
        ConfigError: naming both shapes, the label that is too large, or a wrong type.
    """
    if not isinstance(loss_fn, (nn.CrossEntropyLoss, nn.NLLLoss)):
        return
    _check_types(output, target)
    if target.is_floating_point():
        _check_probabilities(loss_fn, output, target)
        return
    shapes = f"output {list(output.shape)} and labels {list(target.shape)}"
    if output.dim() < 2 or target.shape != (output.shape[0], *output.shape[2:]):
        raise ConfigError("model", "an output of shape (samples, classes, …) for labels (samples, …)", found=shapes)
    labels = target[target != getattr(loss_fn, "ignore_index", -100)]
    if labels.numel() and int(labels.min()) < 0:
        expected = f"class labels from 0 to {output.shape[1] - 1}, for {output.shape[1]} outputs"
        raise ConfigError("data", expected, found=f"labels from {int(labels.min())} to {int(labels.max())}")
    if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < output.shape[1]:
        raise ConfigError(
            "model",
            f"at least as many outputs as the labels need ({int(labels.max()) + 1})",
            found=f"{output.shape[1]} outputs, and labels from {int(labels.min())} to {int(labels.max())}",
        )


def _check_probabilities(loss_fn: nn.Module, output: torch.Tensor, target: torch.Tensor) -> None:
    if isinstance(loss_fn, nn.CrossEntropyLoss) and target.shape == output.shape:
        return
    also = f", or probabilities of the output's shape {list(output.shape)}"
    expected = "class labels of dtype torch.int64" + (also if isinstance(loss_fn, nn.CrossEntropyLoss) else "")
    found = f"{target.dtype} of shape {list(target.shape)}"
    raise ConfigError("data", expected, found=found, hint="Convert labels with labels.long().")


def _check_types(output: Any, target: Any) -> None:
    if not isinstance(output, torch.Tensor):
        hint = "Select the class scores with forward=lambda model, data: (output, target)."
        raise ConfigError("model", "a tensor of class scores as its output", found=type(output).__name__, hint=hint)
    if not isinstance(target, torch.Tensor):
        raise ConfigError("data", "a tensor of class labels as the target", found=type(target).__name__)
    if not target.is_floating_point() and target.dtype not in (torch.int64, torch.uint8):
        hint = "Convert them with labels.long()."
        raise ConfigError("data", "class labels of dtype torch.int64", target.dtype, hint)
