"""Losses of a loop of one's own, read off their graphs: which are no means over the samples of a
part of a batch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import NamedTuple

import torch

from ...errors import ConfigError
from ..losses.mean_check import NotAMean
from .broadcast_targets import broadcast_error, broadcast_shapes
from .graph_nodes import Node, kind_of, next_nodes, parameters_reached, walk
from .loss_sums import sum_error, terms_of, undivided_sum
from .model_calls import ModelCalls
from .uneven_means import function_error, function_of_mean, mean_over_selected, selected_error


class Refusal(NamedTuple):
    """Why the gradients of a loss cannot be summed over the parts of a batch.

    Attributes:
        error: the error of a step that would use them.
        parameters: the ids of the parameters that have them.
        unless_counted: whether it is none in a step with a count.
        ignored: labels that the loss has ignored, a 0-dim tensor on an accelerator, which is not
            waited for: where it is 0 there is nothing wrong. None if it is known that something is.
        doubt: what is said in place of the error, where the graph does not show whether anything is
            wrong.
    """

    error: ConfigError
    parameters: set[int]
    unless_counted: bool
    ignored: torch.Tensor | None = None
    doubt: str = ""


def refusal_of(
    root: torch.Tensor, calls: ModelCalls | None, look: int, same_on_all: bool
) -> Refusal | None:
    """Return what is wrong with a loss; None if nothing is known to be wrong.

    Args:
        root: a loss, before its backward pass, which frees what its graph has saved.
        calls: the calls of models in the body; None in a body whose losses are not looked at. Only
            means over labels are looked at there: labels may be ignored in few batches only, such
            as the last one.
        look: how many bodies have been looked at before this one.
        same_on_all: whether the loss is the same on any number of workers, because it is one of the
            whole batch, or of a shard of virtual workers.
    """
    if root.numel() != 1 or root.grad_fn is None:
        return None
    try:
        if calls is not None and (sum_found := undivided_sum(root, calls)) is not None:
            return Refusal(sum_error(sum_found), parameters_reached(root), False)
        if same_on_all:
            return None
        if calls is not None and (shapes := broadcast_shapes(root, calls)) is not None:
            return Refusal(broadcast_error(*shapes), parameters_reached(root), False)
        if calls is not None and _compares_samples(root, calls):
            return Refusal(_comparison_error(calls.samples), parameters_reached(root), False)
        if calls is not None and (name := function_of_mean(root, calls)) is not None:
            return Refusal(function_error(name), parameters_reached(root), False)
        mean = _uncounted_mean(root)
        if mean is not None and mean.ignored is None:
            return Refusal(_count_error(mean.over), parameters_reached(root), True)
        if calls is not None and (selected := mean_over_selected(root, calls)) is not None:
            return Refusal(selected_error(selected), parameters_reached(root), True)
        if calls is not None and (number := calls.number_that_is_no_mean(root, look)) is not None:
            return Refusal(_number_error(number), parameters_reached(root), True)
        if mean is not None:
            return Refusal(_count_error(mean.over), parameters_reached(root), True, mean.ignored)
    except RuntimeError:  # a part of the graph has been freed
        pass
    return None


_NOT_IGNORED = "the labels that are not ignored: count=(targets != ignore_index).sum()"


class _UncountedMean(NamedTuple):
    """A mean over labels that may be no mean over their number.

    Attributes:
        over: what it is a mean over.
        ignored: the number of labels that are ignored, where it is not known yet; see `Refusal`.
    """

    over: str
    ignored: torch.Tensor | None = None


def _uncounted_mean(root: torch.Tensor) -> _UncountedMean | None:
    """Return what a mean over labels is a mean over, if not over their number; None for other
    losses.

    It is read off torch's cross entropy with ``reduction="mean"``: a mean over weights, or one that
    ignores labels of this part. Parts of a batch that are weighted by their samples do not add up
    to it.

    Args:
        root: a loss, before its backward pass.
    """
    for node in terms_of(root.grad_fn):
        if not kind_of(node).startswith("NllLoss") or node._saved_reduction != 1:
            continue
        target = node._saved_target
        if node._saved_weight is not None:
            return _UncountedMean("the weights of its labels' classes: count=weight[targets].sum()")
        if not target.is_cpu:
            return _UncountedMean(_NOT_IGNORED, target.numel() - node._saved_total_weight)
        if node._saved_total_weight.item() != target.numel():
            return _UncountedMean(_NOT_IGNORED)
    return None


# Elements of outputs beyond which they are not compared: it needs their memory three times.
_MOST_ELEMENTS = 1 << 23
# Of the second derivatives within one sample. Without a comparison they are zero exactly.
_TOLERANCE = 1e-5


def _compares_samples(root: torch.Tensor, calls: ModelCalls) -> bool:
    """Return whether a loss depends on several samples together, as one with in-batch negatives
    does.

    A mean over samples has no second derivative with respect to the outputs of two samples: the
    gradient for one half of them does not change with the other half. False if that cannot be found
    out: without outputs, with a loss that has no second derivatives, or batch norm or a function of
    one's own between outputs and loss.

    Args:
        root: a loss, before its backward pass.
        calls: the calls of models that it was computed from.
    """
    samples = calls.samples
    outputs = {tensor.grad_fn: tensor for tensor in calls.outputs()}
    if not outputs or sum(tensor.numel() for tensor in outputs.values()) > _MOST_ELEMENTS:
        return False
    above = list(walk([root.grad_fn], stop=lambda node: node in outputs))
    tensors = [outputs[node] for node in above if node in outputs]
    if not tensors or not all(_can_be_derived(node) for node in above if node not in outputs):
        return False
    if any(node in outputs for tensor in tensors for node in walk(next_nodes(tensor.grad_fn))):
        return False  # an output is computed from another one, and may be compared within the model
    if any(_is_distance_of_samples(node, outputs, samples) for node in above):
        return True
    with suppress(RuntimeError, NotImplementedError):
        return _depend_on_each_other(root, tensors, samples)
    return False


def _is_distance_of_samples(node: Node, outputs: Collection[Node], samples: int) -> bool:
    """Return whether a node is torch.cdist of the samples with each other: it has no second
    derivative.
    """
    if kind_of(node) != "CdistBackward":
        return False
    sizes = [node._saved_x1.shape, node._saved_x2.shape]
    both = [
        below
        for below in next_nodes(node)
        if any(n in outputs for n in walk([below], lambda node_below: node_below in outputs))
    ]
    return len(both) == 2 and all(len(size) == 2 and size[0] % samples == 0 for size in sizes)


def _can_be_derived(node: Node) -> bool:
    is_of_program = isinstance(node, torch.autograd.function.BackwardCFunction)
    return not is_of_program and "BatchNorm" not in node.name() and "CppNode" not in node.name()


def _depend_on_each_other(root: torch.Tensor, tensors: list[torch.Tensor], samples: int) -> bool:
    """Return whether the gradient of one half of the samples depends on the other half, however
    rows are counted.
    """
    with torch.enable_grad():
        gradients = torch.autograd.grad(root, tensors, create_graph=True, allow_unused=True)
    for halves in _ways_to_halve(tensors, samples):
        terms = [
            torch.where(half, gradient, 0).mul(_directions(gradient)).sum()
            for gradient, half in zip(gradients, halves, strict=True)
            if gradient is not None and gradient.requires_grad
        ]
        if not terms:
            return False  # a loss that is linear in its outputs
        second = torch.autograd.grad(
            torch.stack(terms).sum(), tensors, retain_graph=True, allow_unused=True
        )
        largest = [
            (
                torch.where(half, derivative, 0).abs().max(),
                torch.where(half, 0, derivative).abs().max(),
            )
            for derivative, half in zip(second, halves, strict=True)
            if derivative is not None
        ]
        of_same_half = max((float(same) for same, _ in largest), default=0.0)
        of_other_half = max((float(across) for _, across in largest), default=0.0)
        if not of_other_half > _TOLERANCE * of_same_half:  # also if one is no number
            return False
    return True


def _ways_to_halve(tensors: list[torch.Tensor], samples: int) -> Iterator[list[torch.Tensor]]:
    """Yield masks of what belongs to the first half of the samples in each tensor, for each
    possible order of rows.
    """
    half = samples // 2

    def mask(tensor: torch.Tensor, dim: int, neighbours: bool = False) -> torch.Tensor:
        size = tensor.shape[dim]
        numbers = torch.arange(size, device=tensor.device)
        numbers = numbers * samples // size if neighbours else numbers % samples
        return (numbers < half).view([-1 if d == dim else 1 for d in range(tensor.dim())])

    # a row each, or all of them once more in a second view
    yield [mask(tensor, 0) for tensor in tensors]
    if any(tensor.shape[0] > samples for tensor in tensors):
        yield [mask(tensor, 0, neighbours=True) for tensor in tensors]
    if any(_may_be_second(tensor, samples) for tensor in tensors):
        yield [mask(tensor, int(_may_be_second(tensor, samples))) for tensor in tensors]


def _may_be_second(tensor: torch.Tensor, samples: int) -> bool:
    """Return whether the second dimension may be that of the samples, as in sequences of (time,
    sample, …).
    """
    return tensor.dim() > 1 and tensor.shape[1] == samples


def _directions(like: torch.Tensor) -> torch.Tensor:
    """Return numbers between 0.5 and 1.5 that follow no pattern, without a random draw."""
    places = torch.arange(like.numel(), device=like.device, dtype=torch.float32)
    return ((places * 0.6180339887) % 1 + 0.5).to(like.dtype).view(like.shape)


def ignored_labels_error() -> ConfigError:
    """Return the error for a mean over the labels that are not ignored, in a step without a
    count.
    """
    return _count_error(_NOT_IGNORED)


def _count_error(description: str) -> ConfigError:
    """Return the error for a mean over something that differs from part to part, in a step without
    a count.
    """
    over, _, count = description.partition(": ")
    return ConfigError(
        "count",
        "the denominator of the loss of this part of the batch",
        found=f"none, with a loss that is a mean over {over}",
        hint=f"Parts of a batch are weighted by their samples otherwise: optimizer.step({count}).",
    )


def _number_error(problem: NotAMean) -> ConfigError:
    """Return the error for a number of a model that is no mean over samples, and a part of a
    loss.
    """
    whole, halves = problem.means()
    return ConfigError(
        "loss",
        "a mean over the samples of the body's part of the batch, in each number that a model "
        "adds to it",
        found=f"a number of the model that is {whole} for {problem.samples} samples, and {halves} "
        "as the mean of their two halves: it depends on how a batch is divided",
        hint="A term of the whole batch, such as one that balances experts, is no mean over "
        "samples. Return from the model what it is computed from, one row for each sample, "
        "and compute it from lockstep.whole_batch(rows). Or use virtual_workers=, whose "
        "shards are the same on any number of workers. If the number is a mean over something "
        "else, such as tokens: optimizer.step(count=tokens).",
    )


def _comparison_error(samples: int) -> ConfigError:
    """Return the error for a loss that compares samples."""
    return ConfigError(
        "loss",
        "a mean over samples, each of which counts for itself",
        found=f"one in which the {samples} samples of a part of the batch depend on each other, "
        "such as in-batch negatives; on several workers each would see those of its own part "
        "only",
        hint="Compute it from the outputs of the whole batch, lockstep.whole_batch(output): the "
        "page on training has an example. Or use virtual_workers=: their shards are the same "
        "on any number of workers.",
    )
