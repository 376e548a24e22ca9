"""Makes of any loss function a sum over samples, which parts of a batch can be added up from."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..data.nested import map_tensors
from ..errors import ConfigError
from ..strategies.reaching import reach
from ..strategies.sync_batchnorm import SyncBatchNorm, taking_part_without_samples
from .modes import evaluating
from .sums import Call, Difference, Halves, NotAMean, Passes, SampleSum, described, device_of, guarded, rows_of

__all__ = ["Computation", "Forward", "LossFn", "LossModule", "LossSum", "default_forward"]

LossFn = Callable[[Any, Any], Any]
"""(output, target) → the mean over the samples (a scalar), or the samples' losses (shape (n,)), or (sum, count) where
the mean is over something else, e.g. tokens. `nn.CrossEntropyLoss` and `nn.NLLLoss` are known, and so are their
functions with keywords bound by `functools.partial`: labels that they ignore do not count, and class weights do as they
do in torch. Of others the first batch shows whether they are what they seem, see `lockstep.training.sums`."""

Forward = Callable[[nn.Module, Any], tuple[Any, Any]]
"""(model, data) → (output, target)."""


def default_forward(model: nn.Module, data: Any) -> tuple[Any, Any]:
    """Run `model` on the first of the pair (inputs, targets).

    Raises:
        ConfigError: when the data is no pair.
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
        device: where the outputs are.

    Attributes:
        counts_samples: whether the last loss is known, without a look at the device, to be a sum over samples.
        parts: the loss function where it is none that is known; it is open until it has been checked.

    Raises:
        ConfigError: when `loss_fn` cannot be called, or returns a bare sum by its own saying.
    """

    def __init__(self, loss_fn: LossFn, device: torch.device) -> None:
        if not callable(loss_fn):
            raise ConfigError("loss_fn", "a function (output, target) -> loss, or a module", loss_fn)
        _refuse_bare_sum(loss_fn)
        self._of_classes = classification(loss_fn)
        loss_fn = self._of_classes or loss_fn
        if isinstance(loss_fn, nn.Module):
            loss_fn.to(device)
        self._summing = _summing(self._of_classes)
        self.parts = SampleSum("loss_fn", loss_fn)
        if self._summing is not None:
            self.parts.close()
        self._checked = False
        self.counts_samples = False

    def __call__(self, output: Any, target: Any, size: int) -> tuple[torch.Tensor, torch.Tensor | int]:
        """The loss of `size` samples.

        Raises:
            ConfigError: when output and target do not fit, or the loss function returns none of the forms of `LossFn`.
        """
        if not self._checked and self._of_classes is not None:
            check_fit(self._of_classes, output, target)
        self._checked = True
        try:
            return self._sum(output, target, size)
        except (IndexError, RuntimeError):
            # To look at every batch's labels beforehand would cost, and stall a device; after its failure nothing can
            # be asked there.
            if self._of_classes is not None and isinstance(output, torch.Tensor) and output.device.type == "cpu":
                check_fit(self._of_classes, output, target)
            raise

    def _sum(self, output: Any, target: Any, size: int) -> tuple[torch.Tensor, torch.Tensor | int]:
        if self._summing is None:
            summed = self.parts(output, target, size)
            self.counts_samples = self.parts.counts_samples
            return summed
        return self._summing(output, target), _counted(self._summing, output, target)


def classification(loss_fn: LossFn) -> nn.CrossEntropyLoss | nn.NLLLoss | None:
    """The loss of classification that `loss_fn` is, or None where it is another or one of the user's own."""
    if isinstance(loss_fn, (nn.CrossEntropyLoss, nn.NLLLoss)):
        return loss_fn
    fn, keywords = loss_fn, {}
    if isinstance(loss_fn, partial) and not loss_fn.args:
        fn, keywords = loss_fn.func, loss_fn.keywords
    module = nn.CrossEntropyLoss if fn is F.cross_entropy else nn.NLLLoss if fn is F.nll_loss else None
    # With output or target bound it is no loss of these two.
    return None if module is None or keywords.keys() & {"input", "target"} else module(**keywords)


def _refuse_bare_sum(loss_fn: LossFn) -> None:
    """Refuse what says itself that it is a sum: a loss of torch, or a function of torch with that keyword bound."""
    fn, reduction = loss_fn, getattr(loss_fn, "reduction", None) if isinstance(loss_fn, nn.Module) else None
    while isinstance(fn, partial):
        reduction, fn = reduction or fn.keywords.get("reduction"), fn.func
    torchs = isinstance(fn, nn.Module) or getattr(fn, "__module__", None) == F.__name__
    if reduction == "sum" and torchs:
        got = described(loss_fn) + (" with reduction='sum'" if isinstance(loss_fn, nn.Module) else "")
        hint = "A sum alone does not say what it is a sum over."
        raise ConfigError("loss_fn", "a mean over samples, or (sum, count)", found=got, hint=hint)


def _summing(loss_fn: nn.CrossEntropyLoss | nn.NLLLoss | None) -> nn.CrossEntropyLoss | nn.NLLLoss | None:
    """A copy that gives sums of one that gives means, as torch's mean is over labels, not samples.

    The mean times a number of labels would not do: where all are ignored it is 0 / 0.
    """
    if loss_fn is None or loss_fn.reduction != "mean":
        return None
    if type(loss_fn).forward not in (nn.CrossEntropyLoss.forward, nn.NLLLoss.forward):
        _refuse_weighted_mean(loss_fn)
        return None  # the user's own computation, of which nothing is known but that it is a mean
    summing = copy.copy(loss_fn)
    summing.reduction = "sum"
    return summing


def _refuse_weighted_mean(loss_fn: nn.CrossEntropyLoss | nn.NLLLoss) -> None:
    if loss_fn.weight is not None:
        raise ConfigError(
            "loss_fn",
            "a loss whose mean is over samples",
            found=f"{type(loss_fn).__name__}, with a forward of its own, class weights and reduction='mean'",
            hint="Its mean is over weights, which differ from part to part. "
            "Return (sum, count): the sum of the losses, and weight[target].sum().",
        )


def _counted(loss_fn: nn.CrossEntropyLoss | nn.NLLLoss, output: torch.Tensor, target: torch.Tensor) -> Any:
    """What the mean of torch's loss is over: labels that are not ignored, by their weights where classes have some."""
    if target.is_floating_point():
        return target.numel() // target.shape[1]  # probabilities, one set for each label
    kept = target != loss_fn.ignore_index
    if loss_fn.weight is None:
        return kept.sum()
    # An ignored label is no class, so it is looked up as one that is; picking out the kept ones would stall a GPU.
    return (loss_fn.weight[target.where(kept, 0).long()] * kept).sum()


class Computation(nn.Module):
    """Something that is computed with a model on samples: (data, n) → what is summed over the samples.

    Args:
        model: the user's.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, data: Any, size: int) -> Any:
        """The sums over `size` samples."""
        return self.on(self.model, data, size)

    def on(self, model: nn.Module, data: Any, size: int) -> Any:
        """The same with a copy of the model, which is where the data is; copies may be at work at the same time."""
        raise NotImplementedError


class LossModule(Computation):
    """A model and its loss as one module: (data, n) → (sum of the loss, what it is a sum over).

    The loss belongs to the module so that everything a step computes runs inside the strategy's forward pass. Names and
    parameters of a loss that is a module are not the model's, and none of this module's.

    Args:
        model: the user's model, on its device.
        loss: its loss.
        forward: see `Forward`.
        in_step: whether the model must run on every worker, also on one without samples.
    """

    def __init__(
        self, model: nn.Module, loss: LossSum, forward: Forward | None = None, *, in_step: bool = False
    ) -> None:
        super().__init__(model)
        self._loss = loss
        self._forward = forward or default_forward
        self._first: tuple[nn.Module, Any, int] | None = None  # what was computed while the loss was open
        # Layers that talk to other workers in their passes must run on every worker, also on one without samples.
        self._talks = in_step or any(isinstance(layer, (SyncBatchNorm, nn.SyncBatchNorm)) for layer in model.modules())

    @property
    def counts_samples(self) -> bool:
        """See `LossSum`."""
        return self._loss.counts_samples

    def on(self, model: nn.Module, data: Any, size: int) -> tuple[torch.Tensor, torch.Tensor | int]:
        """The loss of `size` samples; of none, a zero that still reaches every parameter."""
        try:
            if size == 0:
                return self._nothing(model, data), 0
            if self._loss.parts.open and (self._first is None or self._first[2] < 2):
                self._first = model, data, size
            output, target = self._forward(model, data)
        except ValueError as error:
            if "more than 1 value per channel" in str(error):
                raise _too_few(error, size) from None
            raise
        return self._loss(output, target, size)

    def check(self, passes: Passes) -> NotAMean | None:
        """After the first step's passes: what is wrong with the loss, see `SampleSum.check`; None for nothing.

        Where the model has computed the loss itself, the model is what is called with halves, in evaluation mode.
        """
        first, self._first = self._first, None
        found = self._loss.parts.check(passes)
        if found is None and first is not None and self._loss.parts.opaque and not self._talks:
            found = self._check_model(*first, passes)
        return found

    def _check_model(self, model: nn.Module, data: Any, size: int, passes: Passes) -> NotAMean | None:
        trained = [p for p in model.parameters() if p.requires_grad]

        def computed(data: Any, _: Any) -> Any:
            return self._loss.parts.fn(*self._forward(model, data))

        def compare() -> Difference | None:
            call = Call(data, data, size)
            if (rows := rows_of(call)) is None:
                return None
            # A compiled program would be compiled anew for halves. The last parameter's gradient needs the least work.
            with evaluating(model), _buffers_kept(model), torch.compiler.set_stance("force_eager"), passes():
                return Halves(computed, call, rows, trained[-1:]).differing(bool(trained))

        found = guarded(compare, device_of(data))
        return found and NotAMean("loss_fn", described(self._loss.parts.fn), size, *found)

    def _nothing(self, model: nn.Module, data: Any) -> torch.Tensor:
        """Zero, with a way to every parameter: what a worker without samples has to add."""
        parameters = [p for p in model.parameters() if p.requires_grad]
        zero = torch.zeros((), device=parameters[0].device if parameters else None)
        if not self._talks:
            return reach(zero, parameters)
        # Through the model, so that the backward pass comes by the same layers in the same order as elsewhere.
        parts = [zero]
        with taking_part_without_samples(model, data) as stand_in:
            output, _ = self._forward(model, stand_in)
        map_tensors(lambda tensor: parts.append(tensor.reshape(-1)[:0].sum().float()), output)
        return reach(torch.stack(parts).sum(), parameters)


@contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    """Leave the model's buffers as they are now, whatever passes inside change."""
    kept = [
        (m, name, b, b._version, b.clone()) for m in model.modules() for name, b in m._buffers.items() if b is not None
    ]
    try:
        yield
    finally:
        for module, name, buffer, version, values in kept:
            module._buffers[name] = buffer
            if buffer._version != version:
                with torch.no_grad():
                    buffer.copy_(values)


def _too_few(error: ValueError, size: int) -> ConfigError:
    """What to do about a batch norm in training that has a single value to take a variance of."""
    return ConfigError(
        "global_batch",
        "at least two values for each channel of every batch norm, in each worker's part of each batch",
        found=f"a part of {size} (torch: {error})",
        hint="Use a global batch that leaves no such rest, drop_last=True of Loader, fewer workers, passes "
        "or shards, or sync_batchnorm.",
    )


def check_fit(loss_fn: LossFn, output: Any, target: Any) -> None:
    """See that class labels lie within the model's outputs; other kinds of loss check their arguments themselves.

    Raises:
        ConfigError: naming both shapes, the label that is too large, or the type of what is no tensor of labels.
    """
    if not isinstance(loss_fn, (nn.CrossEntropyLoss, nn.NLLLoss)):
        return
    _check_types(output, target)
    if target.is_floating_point():
        return
    shapes = f"output {list(output.shape)} and labels {list(target.shape)}"
    if output.dim() < 2 or target.shape != (output.shape[0], *output.shape[2:]):
        raise ConfigError("model", "an output of shape (samples, classes, …) for labels (samples, …)", found=shapes)
    labels = target[target != getattr(loss_fn, "ignore_index", -100)]
    if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < output.shape[1]:
        raise ConfigError(
            "model",
            f"at least as many outputs as the labels need ({int(labels.max()) + 1})",
            found=f"{output.shape[1]} outputs, and labels from {int(labels.min())} to {int(labels.max())}",
        )


def _check_types(output: Any, target: Any) -> None:
    if not isinstance(output, torch.Tensor):
        hint = "Choose the class scores among them with forward=lambda model, data: (output, target)."
        raise ConfigError("model", "a tensor of class scores as its output", found=type(output).__name__, hint=hint)
    if not isinstance(target, torch.Tensor):
        raise ConfigError("data", "a tensor of class labels as the target", found=type(target).__name__)
    if not target.is_floating_point() and target.dtype not in (torch.int64, torch.uint8):
        hint = "Convert them with labels.long()."
        raise ConfigError("data", "class labels of dtype torch.int64", target.dtype, hint)
