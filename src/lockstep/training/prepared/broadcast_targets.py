"""Outputs and targets of other shapes, which torch broadcasts to a table of each sample with each;
read off the graph of a loss.
"""

from __future__ import annotations

import torch

from ...errors import ConfigError
from ...parallel.nested import tensors_of
from .graph_nodes import Node, kind_of, next_nodes, walk
from .model_calls import ModelCalls

# torch's losses that broadcast their two arguments, with a warning; `l1_loss` is the absolute value
# of a difference.
_BROADCAST_LOSSES = {"MseLossBackward", "SmoothL1LossBackward", "HuberLossBackward", "AbsBackward"}
# What a program may compare outputs and targets by.
_ARITHMETIC = {"SubBackward", "RsubBackward", "MulBackward", "DivBackward", "AddBackward"}
# Fewer numbers look alike by chance; a table of more takes too much memory to be meant.
_FEWEST_SAMPLES = 4
_MOST_SAMPLES = 1 << 13
_TARGETS_TOLERANCE = 1e-4  # of vectors of length 1, computed in float32


def broadcast_shapes(root: torch.Tensor, calls: ModelCalls) -> tuple[list[int], list[int]] | None:
    """Return the shapes of an output and of the targets that torch has broadcast to a table of each
    sample with each; None if there are none.

    The loss is then linear in what it compares, or has no second derivative with respect to two
    outputs, so that `_compares_samples` does not see it. Of an output of shape (n,) and targets of
    shape (n, 1), or the reverse, torch's losses leave an ExpandBackward in the graph; a difference
    that the program writes itself leaves nothing.

    Args:
        root: a loss, before its backward pass.
        calls: the calls of models that it was computed from.
    """
    samples = calls.samples
    if samples < 2:
        return None
    outputs = {tensor.grad_fn for tensor in calls.outputs()}
    column = [samples, 1]
    for node in walk([root.grad_fn], stop=lambda node: node in outputs):
        if kind_of(node) not in _BROADCAST_LOSSES:
            continue
        if list(node._saved_self.shape) != [samples, samples]:
            continue
        difference = [below for below in next_nodes(node) if kind_of(below) == "SubBackward"]
        for below in next_nodes(difference[0] if difference else node):
            if kind_of(below) == "ExpandBackward":
                output = list(below._saved_self_sym_sizes)
                if output in (column, [samples]):
                    return output, [samples] if output == column else column
    return _shapes_in_table(root, calls)


def _shapes_in_table(root: torch.Tensor, calls: ModelCalls) -> tuple[list[int], list[int]] | None:
    """Return what `broadcast_shapes` does, of a loss that the program has written itself: a
    difference or a product of an output and targets that became a table.

    Such a table may also be one of an output with as many constants as there are samples, such as
    the centres of bins. So its rows, or a vector that it was made of, must be targets of this part
    of the batch, up to a factor and an offset.
    """
    samples = calls.samples
    table = [samples, samples]
    if samples < _FEWEST_SAMPLES or samples > _MOST_SAMPLES:
        return None
    outputs = {tensor.grad_fn for tensor in calls.outputs()}
    above = list(walk([root.grad_fn], stop=lambda node: node in outputs))
    shape = next((shape for node in above if (shape := _broadcast_in(node, samples))), None)
    if shape is None:
        return None
    vectors = []
    for node in above:
        for name in ("_saved_self", "_saved_other", "_saved_result"):
            saved = getattr(node, name, None)
            if not isinstance(saved, torch.Tensor) or saved.numel() not in (samples, samples**2):
                continue
            if list(saved.shape) == table:
                vectors += [saved[0], saved[:, 0]]
            elif not saved.requires_grad and saved.numel() == samples:
                vectors.append(saved)
    targets = [tensor for tensor in tensors_of(calls.data) if tensor.numel() == samples]
    are_targets = any(_are_alike(vector, target) for vector in vectors for target in targets)
    if not are_targets:
        return None
    column = [samples, 1]
    return shape, [samples] if shape == column else column


def _broadcast_in(node: Node, samples: int) -> list[int] | None:
    """Return the shape of an output from which a node makes a table of (samples, samples) numbers;
    None if it makes none.
    """
    if kind_of(node) not in _ARITHMETIC or not _makes(node, 0, [samples, samples]):
        return None
    below = [
        (next_node, number) for next_node, number in node.next_functions if next_node is not None
    ]
    for shape in ([samples, 1], [samples]):
        if all(_makes(next_node, number, shape) for next_node, number in below):
            return shape
    return None


def _makes(node: Node, number: int, shape: list[int]) -> bool:
    metadata = node._input_metadata
    return number < len(metadata) and list(metadata[number].shape) == shape


def _are_alike(vector: torch.Tensor, targets: torch.Tensor) -> bool:
    """Return whether numbers are targets up to a factor and an offset."""
    normalised = []
    for tensor in (vector, targets):
        values = tensor.detach().reshape(-1).double()
        values = values - values.mean()
        normalised.append(values / values.norm())  # no numbers if all are the same
    of_vector, of_targets = normalised
    same = torch.minimum((of_vector - of_targets).abs().max(), (of_vector + of_targets).abs().max())
    return bool(same < _TARGETS_TOLERANCE)


def broadcast_error(output: list[int], targets: list[int]) -> ConfigError:
    """Return the error for an output and targets that are broadcast."""
    return ConfigError(
        "loss",
        "an output and targets of one shape",
        found=f"{output} and {targets}, which torch broadcasts: each sample's output is compared "
        "with the targets of all samples of this part of the batch",
        hint="Give both the same shape: output.squeeze(1), or targets.unsqueeze(1).",
    )
