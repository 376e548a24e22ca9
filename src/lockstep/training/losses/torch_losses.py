"""Losses of torch: what their means are over is known by their type and by shapes, without a
comparison.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ...errors import ConfigError
from .mean_check import describe_function, describe_shapes
from .sum_and_count import as_sum


def refuse_bare_sum(loss_fn: Any) -> None:
    """Check that a loss module, or a function of torch with bound keywords, does not have
    reduction="sum".

    Raises:
        ConfigError: if it has.
    """
    fn = loss_fn
    reduction = getattr(loss_fn, "reduction", None) if isinstance(loss_fn, nn.Module) else None
    while isinstance(fn, partial):
        reduction = reduction or fn.keywords.get("reduction")
        fn = fn.func
    of_torch = isinstance(fn, nn.Module) or getattr(fn, "__module__", None) == F.__name__
    if reduction == "sum" and of_torch:
        got = describe_function(loss_fn) + (
            " with reduction='sum'" if isinstance(loss_fn, nn.Module) else ""
        )
        hint = "A sum without a count cannot be turned into a mean."
        raise ConfigError("loss_fn", "a mean over samples, or (sum, count)", found=got, hint=hint)


def classification_loss(loss_fn: Any) -> nn.CrossEntropyLoss | nn.NLLLoss | None:
    """Return `loss_fn` as a loss module of torch for classification; None for other losses."""
    if isinstance(loss_fn, (nn.CrossEntropyLoss, nn.NLLLoss)):
        return loss_fn
    fn = loss_fn
    keywords = {}
    if isinstance(loss_fn, partial) and not loss_fn.args:
        fn = loss_fn.func
        keywords = loss_fn.keywords
    # With a bound output or target it is another function.
    if keywords.keys() & {"input", "target"}:
        return None
    if fn is F.cross_entropy:
        return nn.CrossEntropyLoss(**keywords)
    return nn.NLLLoss(**keywords) if fn is F.nll_loss else None


class LabelSum:
    """A loss of classification with reduction="mean" as (output, target, size) → (sum over labels,
    what counts).

    What counts is the denominator of torch's mean: the number, or the sum of weights, of the labels
    that are not ignored. The mean times that would be 0 / 0 where all labels are ignored.

    Args:
        loss_fn: the loss, with torch's own forward pass.
    """

    def __init__(self, loss_fn: nn.CrossEntropyLoss | nn.NLLLoss) -> None:
        self._summing = copy.copy(loss_fn)
        self._summing.reduction = "sum"
        self._is_counted_by_kernel = (
            type(loss_fn) in (nn.CrossEntropyLoss, nn.NLLLoss)
            and loss_fn.weight is None
            and not getattr(loss_fn, "label_smoothing", 0.0)
        )

    @classmethod
    def of(cls, loss_fn: nn.CrossEntropyLoss | nn.NLLLoss | None) -> LabelSum | None:
        """Return the sum of a loss; None if its mean is over samples, or over something that is not
        known.

        Raises:
            ConfigError: for class weights in a forward pass that is not torch's.
        """
        if loss_fn is None or loss_fn.reduction != "mean":
            return None
        if type(loss_fn).forward not in (nn.CrossEntropyLoss.forward, nn.NLLLoss.forward):
            _refuse_weighted_mean(loss_fn)
            return None
        return cls(loss_fn)

    def __call__(
        self, output: Any, target: Any, size: int
    ) -> tuple[torch.Tensor, torch.Tensor | float]:
        """Return (sum, count) of `size` samples."""
        if (
            self._is_counted_by_kernel
            and _fits_kernel(output, target)
            and not _has_hooks(self._summing)
        ):
            return self._with_count_of_kernel(output, target)
        return self._summing(output, target), self._count(target)

    def _with_count_of_kernel(
        self, output: torch.Tensor, target: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the same two numbers by one operation less: torch's kernel counts, but its
        functions drop the count.

        The sum has the same bits, as torch's loss ends in the same kernel.
        """
        scores = (
            torch.log_softmax(output, 1)
            if isinstance(self._summing, nn.CrossEntropyLoss)
            else output
        )
        total, count = _nll_loss(scores, target, None, _SUM_REDUCTION, self._summing.ignore_index)
        return total, count

    def _count(self, target: torch.Tensor) -> torch.Tensor | float:
        if target.is_floating_point():
            return float(target.numel() // target.shape[1])  # probabilities, one set for each label
        kept = target != self._summing.ignore_index
        weight = self._summing.weight
        if weight is None:
            return kept.sum()
        # An ignored label is not a valid index, so class 0 is used; selecting the kept labels would
        # stall a GPU.
        return (weight[target.where(kept, 0).long()] * kept).sum()


_nll_loss = torch.ops.aten.nll_loss_forward.default
_SUM_REDUCTION = 2  # the number of reduction="sum" in torch's kernels
_MOST_COUNTED = 1 << 24  # the kernel counts in float32, which has every whole number up to this


def _fits_kernel(output: Any, target: Any) -> bool:
    """Return whether torch's kernel takes output and labels as they are, and counts the labels
    exactly.
    """
    if (
        type(output) is not torch.Tensor
        or output.dtype is not torch.float32
        or not (output.is_cpu or output.is_cuda)
    ):
        return False
    if type(target) is not torch.Tensor or target.dtype is not torch.int64:
        return False
    shape = output.shape
    return len(shape) == 2 and target.shape == shape[:1] and shape[0] < _MOST_COUNTED


def _has_hooks(module: nn.Module) -> bool:
    """Return whether a call of a module calls anything but its forward pass."""
    if (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    ):
        return True
    return _any_hook_of_all_modules is None or bool(_any_hook_of_all_modules())


_any_hook_of_all_modules = getattr(nn.modules.module, "_has_any_global_hook", None)


def _refuse_weighted_mean(loss_fn: nn.CrossEntropyLoss | nn.NLLLoss) -> None:
    if loss_fn.weight is not None:
        raise ConfigError(
            "loss_fn",
            "a loss whose mean is over samples",
            found=f"{type(loss_fn).__name__}, with its own forward, class weights and "
            "reduction='mean'",
            hint="Its mean is over weights, which differ from part to part. "
            "Return (sum, count): the sum of the losses, and weight[target].sum().",
        )


def check_fit(loss_fn: Any, output: Any, target: Any) -> None:
    """Check the shapes of output and target of a classification loss, and that the labels are
    classes of the output.

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
        raise ConfigError(
            "model",
            "an output of shape (samples, classes, …) for labels (samples, …)",
            found=shapes,
        )
    labels = target[target != getattr(loss_fn, "ignore_index", -100)]
    if labels.numel() and int(labels.min()) < 0:
        expected = f"class labels from 0 to {output.shape[1] - 1}, for {output.shape[1]} outputs"
        raise ConfigError(
            "data", expected, found=f"labels from {int(labels.min())} to {int(labels.max())}"
        )
    if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < output.shape[1]:
        raise ConfigError(
            "model",
            f"at least as many outputs as the labels need ({int(labels.max()) + 1})",
            found=f"{output.shape[1]} outputs, and labels from {int(labels.min())} to "
            f"{int(labels.max())}",
        )


def _check_probabilities(loss_fn: nn.Module, output: torch.Tensor, target: torch.Tensor) -> None:
    if isinstance(loss_fn, nn.CrossEntropyLoss) and target.shape == output.shape:
        return
    also = f", or probabilities of the output's shape {list(output.shape)}"
    expected = "class labels of dtype torch.int64" + (
        also if isinstance(loss_fn, nn.CrossEntropyLoss) else ""
    )
    description = f"{target.dtype} of shape {list(target.shape)}"
    raise ConfigError(
        "data", expected, found=description, hint="Convert labels with labels.long()."
    )


def _check_types(output: Any, target: Any) -> None:
    if not isinstance(output, torch.Tensor):
        hint = "Select the class scores with forward=lambda model, data: (output, target)."
        raise ConfigError(
            "model",
            "a tensor of class scores as its output",
            found=type(output).__name__,
            hint=hint,
        )
    if not isinstance(target, torch.Tensor):
        raise ConfigError(
            "data", "a tensor of class labels as the target", found=type(target).__name__
        )
    if not target.is_floating_point() and target.dtype not in (torch.int64, torch.uint8):
        hint = "Convert them with labels.long()."
        raise ConfigError("data", "class labels of dtype torch.int64", target.dtype, hint)


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


def is_elementwise(loss_fn: Any) -> bool:
    """Return whether `loss_fn` is a loss of torch that is a mean over the elements of the output,
    or their losses.
    """
    fn = loss_fn
    keywords = {}
    if isinstance(loss_fn, partial) and not loss_fn.args:
        fn = loss_fn.func
        keywords = loss_fn.keywords
    return type(fn) in _ELEMENTWISE or (
        fn in _ELEMENTWISE.values() and not keywords.keys() & {"input", "target"}
    )


def sum_of_elementwise(fn: Any, output: Any, target: Any, size: int) -> tuple[Any, Any]:
    """Return (sum, samples) of an element-wise loss, of which shapes alone tell whether it is a
    mean over samples.

    Raises:
        ConfigError: if output and target do not fit.
    """
    _check_elementwise(fn, output, target, size)
    return as_sum(fn(output, target), size)


def _check_elementwise(loss_fn: Any, output: Any, target: Any, size: int) -> None:
    """Check by the shapes alone that an element-wise loss compares each sample with its own target.

    Raises:
        ConfigError: if it compares all pairs of samples, or if the samples have different numbers
            of elements.
    """
    if not (
        isinstance(output, torch.Tensor)
        and isinstance(target, torch.Tensor)
        and output.dim()
        and size
    ):
        return
    name = describe_function(loss_fn)
    if (
        size > 1
        and target.dim()
        and output.dim() != target.dim()
        and output.shape[0] == target.shape[0] == size
    ):
        hint = describe_shapes(output, target)
        raise ConfigError(
            "loss_fn",
            "an output and a target of the same shape",
            found=f"{name} of others",
            hint=hint,
        )
    if output.numel() % size:
        hint = "Return (sum, count): the sum over the elements, and their number."
        description = f"{name} of an output of shape {list(output.shape)} for {size} samples"
        raise ConfigError(
            "loss_fn",
            "as many elements of the output for each sample",
            found=description,
            hint=hint,
        )
