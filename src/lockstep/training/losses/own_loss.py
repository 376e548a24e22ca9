"""Models that compute their loss themselves, as those of Hugging Face do: what their loss is a mean
over.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import nn

from ...errors import ConfigError
from ...parallel.nested import map_tensors, tensors_of
from ...parallel.randomness import preserve_generators
from ..modes import evaluating
from ..pass_effects import preserving_buffers
from .sum_and_count import as_sum

_Forward = Callable[[nn.Module, Any], tuple[Any, Any]]

IGNORED = -100
"""The label that losses of torch, and so the models of Hugging Face, do not count."""

_LABELS = "labels"
_EXPECTED = "a model whose loss is a mean over its samples, or over the labels that are not -100"


class Counting(Enum):
    """What a model's loss is a mean over."""

    # of causal language models, which predict the next token
    NEXT_LABELS = "labels after the first one of each sample"
    LABELS = "labels"
    SAMPLES = "samples"


def loss_in(output: Any) -> torch.Tensor:
    """Return the loss that a model has returned: its output, the `loss` in it, or the only 0-dim
    tensor of a tuple.

    Raises:
        ConfigError: there is none.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(output, torch.Tensor):
        loss = output
    elif loss is None and isinstance(output, (tuple, list)):
        scalars = [value for value in output if isinstance(value, torch.Tensor) and not value.dim()]
        loss = scalars[0] if len(scalars) == 1 else None
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        expected = (
            "a model that returns its loss, as there is no loss_fn: a 0-dim tensor, alone or as "
            "`loss`"
        )
        hint = (
            "Models of Hugging Face compute it if the batch has 'labels'. Otherwise give the "
            "Trainer a loss_fn."
        )
        raise ConfigError("model", expected, found=_describe_output(output), hint=hint)
    return loss.reshape(())


def _describe_output(output: Any) -> str:
    if isinstance(output, torch.Tensor):
        return f"a tensor of shape {list(output.shape)}"
    keys = f" with {', '.join(map(str, output))}" if isinstance(output, Mapping) else ""
    return f"{type(output).__name__}{keys}"


def returning_pair(forward: _Forward) -> _Forward:
    """Return the user's function `forward`, with an error where it returns no pair."""
    return partial(_output_and_target, forward)


def _output_and_target(forward: _Forward, model: nn.Module, data: Any) -> tuple[Any, Any]:
    returned = forward(model, data)
    if not isinstance(returned, (tuple, list)) or len(returned) != 2:
        description = _describe_output(returned)
        if isinstance(returned, (tuple, list)):
            description = f"{description} of {len(returned)}"
        raise ConfigError("forward", "a function that returns (output, target)", found=description)
    output, target = returned
    return output, target


class OwnLoss:
    """The loss that a model computes itself, as (sum, count), so that parts of a batch add up to
    the whole batch.

    What the mean is over is found out with a few samples of the first batch: labels of known
    numbers are left in them, and the loss of all is compared with those of the single samples. So
    no list of models is needed.

    It is the `loss_fn` and the `forward` of a training: ``forward`` calls the model with the batch,
    with names where it is a mapping, and the call gives the loss in its output. A training and its
    evaluations share one.

    Args:
        forward: the function (model, data) → (output, labels) of the user; the model itself is
            called when None.

    Attributes:
        counting: what the mean is over; None until the first batch.
        problem: why that is not known, in words, if it has been tried.
    """

    __name__ = "the model's own loss"

    def __init__(self, forward: _Forward | None = None) -> None:
        self._forward = None if forward is None else returning_pair(forward)
        self.counting: Counting | None = None
        self.problem: str | None = None
        self._model = ""  # the class of the model that has the problem
        self._lock = threading.Lock()  # replicas run in threads

    def forward(self, model: nn.Module, data: Any) -> tuple[Any, Any]:
        """Return the model's output for a batch, and its labels; see `loss.Forward`."""
        if self.counting is None:
            with self._lock:
                if self.counting is None:
                    self._find_counting(model, data)
        if self._forward is not None:
            return self._forward(model, data)
        labels = _labels_of(data)
        if labels is not None and self.counting is not Counting.SAMPLES:
            data = _with_labels(data, self._never_none(labels))
        return _call(model, data), labels

    def sum(self, output: Any, labels: Any, size: int) -> tuple[Any, Any]:
        """Return (sum of the loss, count) of a part of a batch, of `size` samples."""
        return as_sum(self(output, labels), size)

    def __call__(self, output: Any, labels: Any) -> Any:
        """Return (sum of the loss, count) of a part of a batch; the mean where it is one over
        samples.
        """
        loss = loss_in(output)
        if loss.dtype in (torch.float16, torch.bfloat16):
            loss = loss.float()
        if self.counting in (None, Counting.SAMPLES) or not isinstance(labels, torch.Tensor):
            return loss
        count = self._counted(labels).sum()
        return loss * count, count

    def _counted(self, labels: torch.Tensor) -> torch.Tensor:
        return (labels[..., 1:] if self.counting is Counting.NEXT_LABELS else labels) != IGNORED

    def _never_none(self, labels: torch.Tensor) -> torch.Tensor:
        """Return `labels`, with one that counts if none does, as the mean over none is not a
        number.

        The loss is multiplied by the count of the real labels, 0. Nothing waits for the device.
        """
        counted = self._counted(labels)
        if not counted.numel():
            return labels
        is_counted = torch.zeros_like(labels, dtype=torch.bool)
        is_counted.view(-1)[labels.shape[-1] - counted.shape[-1] if labels.dim() > 1 else 0] = True
        return torch.where(is_counted & ~counted.any(), 0, labels)

    def _find_counting(self, model: nn.Module, data: Any) -> None:
        device = next((tensor.device for tensor in tensors_of(data)), torch.device("cpu"))
        # in full precision, and eager: a compiled model would be compiled for these few samples
        with (
            preserve_generators(device),
            evaluating(model),
            preserving_buffers(model),
            torch.autocast(device.type, enabled=False),
            torch.compiler.set_stance("force_eager"),
        ):
            counting = self._try(model, data)
        if isinstance(counting, Counting):
            self.counting = counting
        else:
            self.counting = Counting.SAMPLES
            self._model = type(model).__name__
            self.problem = counting

    def error(self, rank: int = 0) -> ConfigError:
        """Return the error to raise where it is not known what the loss counts; `rank` is the one
        that has found it.
        """
        hint = (
            "Its value would depend on how a batch is split, and so on the number of workers. "
            "Give forward=, a function (model, data) -> (output, target), and a loss_fn of both "
            "that returns (sum, count)."
        )
        description = f"{self._model} on rank {rank}, {self.problem}"
        return ConfigError("model", _EXPECTED, found=description, hint=hint)

    def _try(self, model: nn.Module, data: Any) -> Counting | str:
        """Return what the loss counts, or why that is not known."""
        rows = {tensor.shape[0] for tensor in tensors_of(data) if tensor.dim()}
        if len(rows) != 1:
            return f"for a batch whose tensors have {sorted(rows)} rows"
        samples = map_tensors(lambda tensor: _first_rows(tensor, 3), data)
        labels = _labels_of(samples)
        if labels is not None and not labels.is_floating_point():
            masked = _few_labels(labels)
            ways = {Counting.LABELS: _counts(masked)}
            if labels.dim() > 1:
                ways[Counting.NEXT_LABELS] = _counts(masked[..., 1:])
            # it does not know labels that are not counted
            with suppress(IndexError, RuntimeError, ValueError):
                counting = self._matching(model, _with_labels(samples, masked), ways)
                if isinstance(counting, Counting):
                    return counting
        return self._matching(model, samples, {Counting.SAMPLES: (1, 1, 1)})

    def _matching(
        self, model: nn.Module, samples: Any, ways: Mapping[Counting, Sequence[int]]
    ) -> Counting | str:
        """Return the way of counting by which the losses of single samples give that of all of
        them.

        Where all ways give the same, as at the beginning of a training with equal outputs,
        gradients tell.
        """
        for measure in (self._loss, self._gradient):
            whole = measure(model, samples)
            single = [
                measure(model, map_tensors(partial(_row, number=n), samples)) for n in range(3)
            ]
            means = {way: _mean(single, counts) for way, counts in ways.items() if sum(counts)}
            scale = max(float(value.norm()) for value in (whole, *means.values()))
            errors = {
                way: float((mean - whole).norm()) / (scale or 1.0) for way, mean in means.items()
            }
            nearest = min(errors, key=lambda way: errors[way])
            if not errors[nearest] <= _tolerance(model):
                values = ", ".join(
                    f"{float(mean.norm()):.7g} by {way.value}" for way, mean in means.items()
                )
                return (
                    f"whose loss for 3 samples is {float(whole.norm()):.7g}; from single samples "
                    f"it is {values}"
                )
            others = [error for way, error in errors.items() if way is not nearest]
            if all(error > _CLEARLY * errors[nearest] + _ROUNDING for error in others):
                return nearest
        return (
            f"whose loss does not tell whether it counts {' or '.join(way.value for way in ways)}"
        )

    def _loss(self, model: nn.Module, samples: Any) -> torch.Tensor:
        with torch.no_grad():
            return loss_in(self._output(model, samples)).double().reshape(1)

    def _gradient(self, model: nn.Module, samples: Any) -> torch.Tensor:
        """Return the gradient with respect to the last parameter, which costs the least."""
        last = [parameter for parameter in model.parameters() if parameter.requires_grad][-1:]
        with torch.enable_grad():
            loss = loss_in(self._output(model, samples))
            (gradient,) = (
                torch.autograd.grad(loss, last, allow_unused=True)
                if last and loss.requires_grad
                else (None,)
            )
        return (
            loss.detach().double().reshape(1) if gradient is None else gradient.double().flatten()
        )

    def _output(self, model: nn.Module, samples: Any) -> Any:
        return _call(model, samples) if self._forward is None else self._forward(model, samples)[0]


_TOLERANCE = 1e-3  # relative; with TF32, matrix products of other sizes differ by that much
# One way of counting is chosen only if the error of every other is so many times as large, beyond
# rounding: else the samples do not tell them apart.
_CLEARLY = 4.0
_ROUNDING = 1e-6


def _tolerance(model: nn.Module) -> float:
    formats = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    return max([_TOLERANCE, *(4 * torch.finfo(dtype).eps for dtype in formats)])


def _mean(values: Sequence[torch.Tensor], counts: Sequence[int]) -> torch.Tensor:
    """Return the mean of values with these counts; one without a count is not looked at, as it may
    be no number.
    """
    counted = [value * count for value, count in zip(values, counts, strict=True) if count]
    return torch.stack(counted).sum(0) / sum(counts)


def _call(model: nn.Module, data: Any) -> Any:
    try:
        if isinstance(data, Mapping):
            return model(**_without_cache(model, data))
        return model(*data) if isinstance(data, (tuple, list)) else model(data)
    except TypeError as error:
        _check_takes(model, data, error)
        raise


def _check_takes(model: nn.Module, data: Any, error: TypeError) -> None:
    """Check, after an error, that the model takes the elements of a batch.

    Raises:
        ConfigError: if it does not, as a model that leaves the loss to a loss_fn.
    """
    forward = signature(model.forward, follow_wrapped=False)
    try:
        if isinstance(data, Mapping):
            forward.bind(**data)
        else:
            forward.bind(*(data if isinstance(data, (tuple, list)) else (data,)))
    except TypeError:
        expected = (
            "a function (output, target) -> loss, or a model that computes its loss from the batch"
        )
        description = f"no loss_fn, and a model that does not take the batch: {error}"
        raise ConfigError("loss_fn", expected, found=description) from None


def _without_cache(model: nn.Module, data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a batch that keeps sequences apart that are packed into one row.

    Models of Transformers see by "position_ids" where a sequence begins, but not while they keep
    keys and values for later tokens, as most do by default: then each sequence attends to those
    before it, and nothing says so.
    """
    if "position_ids" not in data or "attention_mask" in data or "use_cache" in data:
        return data
    inner: Any = getattr(model, "_orig_mod", model)  # of torch.compile
    inner = inner.get_base_model() if hasattr(inner, "get_base_model") else inner  # of PEFT
    return (
        {**data, "use_cache": False} if "use_cache" in signature(inner.forward).parameters else data
    )


def _labels_of(data: Any) -> torch.Tensor | None:
    """Return the labels in a batch: those of that name, or the last element of a tuple."""
    if isinstance(data, Mapping):
        labels = data.get(_LABELS)
    else:
        labels = data[-1] if isinstance(data, (tuple, list)) and len(data) > 1 else None
    return labels if isinstance(labels, torch.Tensor) and labels.dim() else None


def _with_labels(data: Any, labels: torch.Tensor) -> Any:
    if isinstance(data, Mapping):
        return {**data, _LABELS: labels}
    return type(data)((*data[:-1], labels))


def _first_rows(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """Return the first samples of a tensor, again and again if there are fewer."""
    return (
        tensor[torch.arange(count, device=tensor.device) % tensor.shape[0]]
        if tensor.dim()
        else tensor
    )


def _row(tensor: torch.Tensor, number: int) -> torch.Tensor:
    return tensor[number : number + 1] if tensor.dim() else tensor


def _few_labels(labels: torch.Tensor) -> torch.Tensor:
    """Return labels of three samples, of which three, one and none count: each way of counting
    gives another mean.

    They are few, because the means of many labels hardly differ at the beginning of a training.
    """
    valid = labels[labels != IGNORED]
    few = torch.full_like(labels, IGNORED)
    by_sample = few.view(3, -1)
    # two labels, as the gradients of one are all alike where the outputs are
    by_sample[0, :3] = valid.min() if valid.numel() else 0
    by_sample[1, min(1, by_sample.shape[1] - 1)] = valid.max() if valid.numel() else 0
    return few


def _counts(labels: torch.Tensor) -> tuple[int, ...]:
    return tuple((labels != IGNORED).reshape(len(labels), -1).sum(1).tolist())
