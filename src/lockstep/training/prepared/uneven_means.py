"""Means in the losses of a loop of one's own that the means of parts do not add up to, read off
their graphs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch

from ...errors import ConfigError
from .graph_nodes import Node, kind_of, next_nodes, walk
from .loss_sums import TERMS, sums_samples
from .model_calls import ModelCalls

# What chooses some of the rows, or of the numbers, of what is below.
_SELECTIONS = {"IndexBackward", "IndexSelectBackward", "MaskedSelectBackward", "TakeBackward"}
# Functions of straight pieces: a loss that applies one of them to a mean has no second derivative
# with respect to the outputs of two samples, as a mean over samples has none.
_OF_PIECES = {
    *("AbsBackward", "ReluBackward", "LeakyReluBackward", "ThresholdBackward", "HardtanhBackward"),
    *("ClampBackward", "ClampMinBackward", "ClampMaxBackward"),
    *("MaximumBackward", "MinimumBackward", "MaxBackward", "MinBackward", "AmaxBackward"),
}


class _Selected(NamedTuple):
    """A mean over chosen rows: how many there are, and of how many samples."""

    rows: int
    samples: int


def mean_over_selected(root: torch.Tensor, calls: ModelCalls) -> _Selected | None:
    """Return over how many chosen rows a term of a loss is a mean, as ``loss[mask].mean()`` is;
    None if there is no such term.

    Another part of the batch may have another number of them, or none, so that parts weighted by
    their samples do not add up to the whole. A multiple of the samples is none: as many for each.

    Args:
        root: a loss, before its backward pass.
        calls: the calls of models that it was computed from.
    """
    outputs = {tensor.grad_fn for tensor in calls.outputs()}
    if not outputs:
        return None
    for mean in _single_terms(root):
        rows = _rows_of_mean(mean)
        if rows is None or (rows and rows % calls.samples == 0):
            continue
        for node in _between([mean], outputs):
            is_selection = kind_of(node) in _SELECTIONS and _rows_made_by(node) == rows
            if is_selection and _is_of_samples(node, outputs):
                return _Selected(rows, calls.samples)
    return None


def _single_terms(root: torch.Tensor) -> Iterator[Node]:
    """Yield the single terms of a loss, constant factors left out."""

    def is_factor(node: Node) -> bool:
        return kind_of(node) in ("MulBackward", "DivBackward") and len(next_nodes(node)) == 1

    def is_inner(node: Node) -> bool:
        of_terms = kind_of(node) == "SumBackward" and not node._saved_self_sym_sizes
        return kind_of(node) in TERMS or is_factor(node) or of_terms

    for node in walk([root.grad_fn], stop=lambda node: not is_inner(node)):
        if not is_inner(node):
            yield node


def _rows_of_mean(node: Node) -> int | None:
    """Return the size of the first dimension of what a node is a mean of; None if it is none."""
    if kind_of(node) == "MeanBackward":
        sizes = node._saved_self_sym_sizes
    else:
        sizes = _sizes_of_loss(node, reductions=(1,))
    return int(sizes[0]) if sizes else None


def _sizes_of_loss(node: Node, reductions: Collection[int]) -> torch.Size | None:
    """Return the shape of what a loss of torch is a mean (reduction 1) or a sum (2) of; None of
    other nodes, such as those of its derivative.
    """
    is_derivative = "BackwardBackward" in kind_of(node)
    if is_derivative or getattr(node, "_saved_reduction", None) not in reductions:
        return None
    values = getattr(node, "_saved_self", None)
    return values.shape if isinstance(values, torch.Tensor) else None


def _rows_made_by(node: Node) -> int | None:
    shape = node._input_metadata[0].shape
    return int(shape[0]) if len(shape) else None


def _between(nodes: Sequence[Node], outputs: Collection[Node]) -> Iterator[Node]:
    """Yield the nodes below `nodes`, down to the outputs of models, and these; not what is of a
    single sample, as ``output[3]`` is.
    """

    def is_end(node: Node) -> bool:
        is_one_of_several = kind_of(node) in ("SelectBackward", "UnbindBackward")
        return node in outputs or (is_one_of_several and not node._saved_dim)

    return walk(nodes, stop=is_end)


def _is_of_samples(node: Node, outputs: Collection[Node]) -> bool:
    """Return whether a node is computed from the outputs for all samples of the part."""
    return any(below in outputs for below in _between([node], outputs))


def function_of_mean(root: torch.Tensor, calls: ModelCalls) -> str | None:
    """Return the name of a function of straight pieces that a loss applies to a mean or a sum over
    samples, as ``(loss - 0.1).abs()`` does; None if there is none.

    Args:
        root: a loss, before its backward pass.
        calls: the calls of models that it was computed from.
    """
    outputs = {tensor.grad_fn for tensor in calls.outputs()}
    if not outputs:
        return None
    above = [
        node
        for node in walk([root.grad_fn], stop=lambda node: node in outputs)
        if node not in outputs
    ]
    means = {
        node
        for node in above
        if _is_over_samples(node, calls.samples) and _is_of_samples(node, outputs)
    }
    if not means:
        return None
    for node in above:
        if kind_of(node) in _OF_PIECES and any(
            below in means for below in _between(next_nodes(node), outputs)
        ):
            return kind_of(node).removesuffix("Backward")
    return None


def _is_over_samples(node: Node, samples: int) -> bool:
    """Return whether a node is a mean or a sum over the dimension of the samples."""
    if kind_of(node) in ("MeanBackward", "SumBackward"):
        return sums_samples(node, samples)
    sizes = _sizes_of_loss(node, reductions=(1, 2))
    return sizes is not None and len(sizes) > 0 and sizes[0] > 0 and sizes[0] % samples == 0


def selected_error(selected: _Selected) -> ConfigError:
    """Return the error for a mean over chosen rows, in a step without a count."""
    return ConfigError(
        "loss",
        "a mean over the samples of the body's part of the batch, or over what "
        "optimizer.step(count=...) counts",
        found=f"a mean over {selected.rows} rows that a mask or indices have chosen, in a part of "
        f"{selected.samples} samples. Another part may have another number of them, or none",
        hint="If this is the only term of the loss, give the number: "
        "optimizer.step(count=mask.sum()). Else compute the loss from the whole batch, "
        "lockstep.whole_batch(output) and lockstep.whole_batch(mask).",
    )


def function_error(name: str) -> ConfigError:
    """Return the error for a function of a mean.

    Args:
        name: of the function, as its node in the graph has it.
    """
    return ConfigError(
        "loss",
        "a mean over samples, each of which counts for itself",
        found=f"a function of a mean or a sum over the samples of a part of the batch ({name}); "
        "that of the whole batch is no mean of those of parts",
        hint="Compute it from the outputs of the whole batch, lockstep.whole_batch(output): the "
        "page on training has an example. Or use virtual_workers=: their shards are the same "
        "on any number of workers.",
    )
