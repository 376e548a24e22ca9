"""Losses of a loop of one's own, read off their graphs: which are no means over samples, and what
divides sums.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import torch

from ...errors import ConfigError
from ..losses.mean_check import NotAMean
from .model_calls import ModelCalls

Node = Any  # torch.autograd.graph.Node, whose saved values differ from class to class

# How many nodes of a graph are looked at: a language model of 48 layers has some 3,000.
_MOST_NODES = 50_000


class Refusal(NamedTuple):
    """Why the gradients of a loss cannot be summed over the parts of a batch.

    Attributes:
        error: the error of a step that would use them.
        parameters: the ids of the parameters that have them.
        unless_counted: whether it is none in a step with a count.
        ignored: labels that the loss has ignored, a 0-dim tensor on an accelerator, which is not
            waited for: where it is 0 there is nothing wrong. None if it is known that something is.
    """

    error: ConfigError
    parameters: set[int]
    unless_counted: bool
    ignored: torch.Tensor | None = None


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
        if calls is not None and (sum_found := _undivided_sum(root, calls)) is not None:
            return Refusal(_sum_error(sum_found), _parameters_reached(root), False)
        if same_on_all:
            return None
        if calls is not None and (shapes := _broadcast_shapes(root, calls)) is not None:
            return Refusal(_broadcast_error(*shapes), _parameters_reached(root), False)
        if calls is not None and _compares_samples(root, calls):
            return Refusal(_comparison_error(calls.samples), _parameters_reached(root), False)
        mean = _uncounted_mean(root)
        if mean is not None and mean.ignored is None:
            return Refusal(_count_error(mean.over), _parameters_reached(root), True)
        if calls is not None and (number := calls.number_that_is_no_mean(root, look)) is not None:
            return Refusal(_number_error(number), _parameters_reached(root), True)
        if mean is not None:
            return Refusal(_count_error(mean.over), _parameters_reached(root), True, mean.ignored)
    except RuntimeError:  # a part of the graph has been freed
        pass
    return None


def _next(node: Node) -> list[Node]:
    return [following for following, _ in node.next_functions if following is not None]


def _walk(roots: Iterable[Node], stop: Callable[[Node], bool] = lambda _: False) -> Iterator[Node]:
    """Yield each node below `roots` once; not what is below a node at which `stop` is true."""
    seen = set[Node]()
    waiting = list(roots)
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        if not stop(node):
            waiting += _next(node)


def _kind(node: Node) -> str:
    """Return the class of a node without its number: "MulBackward" for "MulBackward0"."""
    return _without_number(node.name())


@cache  # there are as many names as kinds of nodes
def _without_number(name: str) -> str:
    return name.rstrip("0123456789")


def _parameters_reached(root: torch.Tensor) -> set[int]:
    """Return the ids of the leaf tensors that a backward pass from `root` reaches."""
    leaves = (getattr(node, "variable", None) for node in _walk([root.grad_fn]))
    return {id(leaf) for leaf in leaves if leaf is not None}


# A loss that is a sum of several has these between its root and each of them.
_TERMS = {
    *(
        "AddBackward",
        "SubBackward",
        "NegBackward",
        "RsubBackward",
        "CloneBackward",
        "AliasBackward",
        "ToCopyBackward",
    ),
    *(
        "SqueezeBackward",
        "UnsqueezeBackward",
        "ViewBackward",
        "ReshapeAliasBackward",
        "SelectBackward",
    ),
    *("StackBackward", "CatBackward", "UnbindBackward"),
}
# One number for each number: what is below is as large as what is above.
_ELEMENTWISE = {
    *_TERMS,
    *(
        "PowBackward",
        "AbsBackward",
        "ExpBackward",
        "LogBackward",
        "Log1PBackward",
        "SqrtBackward",
        "SigmoidBackward",
    ),
    *(
        "LogSigmoidBackward",
        "SoftplusBackward",
        "ReluBackward",
        "ClampBackward",
        "ClampMinBackward",
        "TanhBackward",
    ),
    *(
        "WhereBackward",
        "MaskedFillBackward",
        "IndexBackward",
        "MaskedSelectBackward",
        "GatherBackward",
        "SliceBackward",
    ),
    *(
        "SumBackward",
        "PermuteBackward",
        "TransposeBackward",
        "UnsafeViewBackward",
        "XlogyBackward",
        "SquareBackward",
    ),
}
# Numbers that may be divided by the number of samples already, or are statistics of the batch.
_SCALED = (
    *("Mul", "Div", "Mean", "Var", "Std", "Norm", "Median", "Logsumexp", "Amax", "Amin", "Aminmax"),
    *("MaxBackward", "MinBackward", "Topk", "Sort", "Kthvalue", "Cumsum"),
)
# Layers that a batch enters as a constant. Terms of the weights alone have none.
_ENTRANCES = {
    "AddmmBackward": "_saved_mat1",
    "MmBackward": "_saved_self",
    "BmmBackward": "_saved_self",
    "ConvolutionBackward": "_saved_input",
    "EmbeddingBackward": "_saved_indices",
}
# The input of each of these, as an argument of the node: 0 but for addmm(bias, input, weight).
_INPUTS = {"AddmmBackward": 1}


def _undivided_sum(root: torch.Tensor, calls: ModelCalls) -> str | None:
    """Return what makes `root` a sum over samples that nothing divides; None if it is not certain
    that it is one.

    It must be called before the backward pass, which frees what the graph has saved. Certain are
    the losses of torch with ``reduction="sum"``, and ``.sum()`` over numbers of which none has been
    scaled. A sum of products may be a mean by its weights, and so may one that is multiplied by a
    constant; a term of the weights alone may be any sum, and so may one of constants, such as the
    points of a boundary: it is the same on each worker.

    Args:
        root: a loss.
        calls: the calls of models in the body.
    """
    samples = calls.samples
    for node in _terms(root.grad_fn):
        kind = _kind(node)
        if getattr(node, "_saved_reduction", None) == 2:
            weighted = (
                kind.startswith("Binary") and getattr(node, "_saved_weight", None) is not None
            )
            rows = getattr(node, "_saved_self", None)
            several = rows is not None and rows.dim() > 0 and rows.shape[0] > 1
            if (
                several
                and not weighted
                and not _of_weights(node)
                and not _of_constants(node, calls)
            ):
                return f'reduction="sum" ({node.name()})'
        elif kind == "SumBackward" and samples > 1 and _sums_samples(node, samples):
            of_data = _has_data(node, samples) and not _of_constants(node, calls)
            if of_data and _is_unscaled(node, samples):
                return f"sum() over a tensor of shape {list(node._saved_self_sym_sizes)}"
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
    for node in _terms(root.grad_fn):
        if not _kind(node).startswith("NllLoss") or node._saved_reduction != 1:
            continue
        target = node._saved_target
        if node._saved_weight is not None:
            return _UncountedMean("the weights of its labels' classes: count=weight[targets].sum()")
        if not target.is_cpu:
            return _UncountedMean(_NOT_IGNORED, target.numel() - node._saved_total_weight)
        if node._saved_total_weight.item() != target.numel():
            return _UncountedMean(_NOT_IGNORED)
    return None


def divisor(root: torch.Tensor) -> torch.Tensor | None:
    """Return the number that a loss divides sums by in all of its terms, as ``sum /
    count.clamp(min=1)``.

    None if there is no such number, or if a term is divided in another way, as a mean is.

    Args:
        root: a loss, before its backward pass.
    """
    divisors: list[torch.Tensor] = []
    for node in _terms(root.grad_fn, multiples=True):
        number = getattr(node, "_saved_other", None)
        if (
            _kind(node) != "DivBackward"
            or not isinstance(number, torch.Tensor)
            or number.numel() != 1
        ):
            return None
        numerators = _terms(node.next_functions[0][0], multiples=True)
        if not all(
            _kind(numerator) == "SumBackward" or getattr(numerator, "_saved_reduction", None) == 2
            for numerator in numerators
        ):
            return None
        divisors.append(number.detach())
    return common_number(divisors)


def common_number(numbers: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Return the number that all of `numbers` are, a 0-dim tensor; None if they are not known to be
    one.

    Numbers on an accelerator are the same only if they are one tensor: reading them would wait for
    it.
    """

    def are_same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
        if ours.device != theirs.device:
            return False
        return ours.data_ptr() == theirs.data_ptr() or (
            ours.device.type == "cpu" and bool(ours == theirs)
        )

    known = [number for number in numbers if number is not None]
    if (
        not known
        or len(known) < len(numbers)
        or not all(are_same(known[0], number) for number in known[1:])
    ):
        return None
    return known[0].reshape(())


def _terms(root: Node | None, multiples: bool = False) -> list[Node]:
    """Return the nodes of the single terms of a loss that no constant multiplies; `multiples`: of
    those as well.
    """
    if root is None:
        return []
    if _kind(root) not in _TERMS and _kind(root) not in ("SumBackward", "MulBackward"):
        return [root]  # as most losses are
    terms: list[Node] = []
    seen = set[Node]()
    waiting = [root]
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        kind = _kind(node)
        if kind in _TERMS or (multiples and kind == "MulBackward" and len(_next(node)) == 1):
            waiting += _next(node)
            continue
        terms.append(node)
        if kind == "SumBackward" and any(
            _kind(below) in ("StackBackward", "SumBackward") for below in _next(node)
        ):
            waiting += _next(node)  # a sum of terms, or of a sum over another dimension
    return terms


def _sums_samples(node: Node, samples: int) -> bool:
    """Return whether a sum is over the dimension of the samples."""
    sizes = node._saved_self_sym_sizes
    dims = getattr(node, "_saved_dim", None)
    leading = bool(sizes) and sizes[0] > 0 and sizes[0] % samples == 0
    if dims is None:
        return leading or samples in sizes
    # negative ones are shown as unsigned
    numbers = [dim if dim < 1 << 63 else dim - (1 << 64) for dim in dims]
    return any(not dim % len(sizes) if leading else sizes[dim] == samples for dim in numbers)


def _of_weights(node: Node) -> bool:
    """Return whether a term is of parameters alone: elementwise operations lead to leaves only."""
    below = list(_walk(_next(node), stop=lambda each: _kind(each) not in _ELEMENTWISE))
    return all(_kind(each) in _ELEMENTWISE or hasattr(each, "variable") for each in below)


def _is_unscaled(node: Node, samples: int) -> bool:
    """Return whether the numbers of a sum have been scaled by nothing that could divide them by
    their number.
    """

    def ends(node_below: Node) -> bool:
        return _kind(node_below) not in _ELEMENTWISE and not _is_mask(node_below, samples)

    return not any(_may_scale(each, samples) for each in _walk(_next(node), stop=ends))


def _may_scale(node: Node, samples: int) -> bool:
    kind = _kind(node)
    if "SoftmaxBackward" in kind:
        result = node._saved_result
        return bool(node._saved_dim % (1 << 64) in (0, (1 << 64) - result.dim()))
    return any(part in kind for part in _SCALED) and not _is_mask(node, samples)


def _is_mask(node: Node, samples: int) -> bool:
    """Return whether a product has a factor of zeros and ones, or of distributions: one that
    divides by nothing.
    """
    if _kind(node) != "MulBackward" or len(_next(node)) != 1:
        return False
    factors = [getattr(node, name, None) for name in ("_saved_self", "_saved_other")]
    factor = next(
        (
            tensor
            for tensor in factors
            if isinstance(tensor, torch.Tensor) and not tensor.requires_grad
        ),
        None,
    )
    if factor is None:
        return False
    values = factor.detach().double()
    if values.numel() == 1:
        return bool(values.abs() == 1)
    total = float(values.sum())
    is_mask = bool(((values == 0) | (values == 1)).all()) and total > 1
    return is_mask or abs(total - samples) <= 1e-4 * samples


def _has_data(node: Node, samples: int) -> bool:
    """Return whether data may enter a layer below `node`: as many numbers for each sample."""
    return any(values.numel() % samples == 0 for values in _entered(node))


def _of_constants(node: Node, calls: ModelCalls) -> bool:
    """Return whether all that enters layers below `node` is known to be constant, or not known to
    be data yet.
    """
    entered = list(_entered(node))
    calls.inputs += entered
    return bool(entered) and not any(calls.are_data(values) for values in entered)


def _entered(node: Node) -> Iterator[torch.Tensor]:
    """Yield what enters layers below `node`: no parameters."""
    for node_below in _walk([node]):
        kind = _kind(node_below)
        variable = getattr(node_below, "variable", None)
        if variable is not None and not isinstance(variable, torch.nn.Parameter):
            yield variable.detach()  # such as points at which a solution is differentiated
        if kind not in _ENTRANCES:
            continue
        entered = (
            kind == "EmbeddingBackward"
            or node_below.next_functions[_INPUTS.get(kind, 0)][0] is None
        )
        values = getattr(node_below, _ENTRANCES[kind], None)
        if entered and values is not None and values.numel():
            yield values.detach()


# torch's losses that broadcast their two arguments, with a warning; `l1_loss` is the absolute value
# of a difference.
_BROADCAST_LOSSES = {"MseLossBackward", "SmoothL1LossBackward", "HuberLossBackward", "AbsBackward"}


def _broadcast_shapes(root: torch.Tensor, calls: ModelCalls) -> tuple[list[int], list[int]] | None:
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
    for node in _walk([root.grad_fn], stop=lambda node: node in outputs):
        if _kind(node) not in _BROADCAST_LOSSES:
            continue
        if list(node._saved_self.shape) != [samples, samples]:
            continue
        difference = [below for below in _next(node) if _kind(below) == "SubBackward"]
        for below in _next(difference[0] if difference else node):
            if _kind(below) == "ExpandBackward":
                output = list(below._saved_self_sym_sizes)
                if output in (column, [samples]):
                    return output, [samples] if output == column else column
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
    above = list(_walk([root.grad_fn], stop=lambda node: node in outputs))
    tensors = [outputs[node] for node in above if node in outputs]
    if not tensors or not all(_can_be_derived(node) for node in above if node not in outputs):
        return False
    if any(node in outputs for tensor in tensors for node in _walk(_next(tensor.grad_fn))):
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
    if _kind(node) != "CdistBackward":
        return False
    sizes = [node._saved_x1.shape, node._saved_x2.shape]
    both = [
        below
        for below in _next(node)
        if any(n in outputs for n in _walk([below], lambda each: each in outputs))
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
            (torch.where(half, each, 0).abs().max(), torch.where(half, 0, each).abs().max())
            for each, half in zip(second, halves, strict=True)
            if each is not None
        ]
        own = max((float(same) for same, _ in largest), default=0.0)
        other = max((float(across) for _, across in largest), default=0.0)
        if not other > _TOLERANCE * own:  # also if one is no number
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


def _sum_error(description: str) -> ConfigError:
    """Return the error for a loss that is a sum over samples."""
    return ConfigError(
        "loss",
        "a mean over the samples of the body's part of the batch, or over what "
        "optimizer.step(count=...) counts",
        found=f"a sum: {description}. Gradients of parts are weighted by their samples, so that a "
        "sum would be weighted twice",
        hint='Use reduction="mean", or divide the sum by the number of samples in this part, '
        "len(inputs). Divided by "
        "something else, such as its tokens, give that: optimizer.step(count=tokens).",
    )


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


def _broadcast_error(output: list[int], targets: list[int]) -> ConfigError:
    """Return the error for an output and targets that are broadcast."""
    return ConfigError(
        "loss",
        "an output and targets of one shape",
        found=f"{output} and {targets}, which torch broadcasts: each sample's output is compared "
        "with the targets of all samples of this part of the batch",
        hint="Give both the same shape: output.squeeze(1), or targets.unsqueeze(1).",
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
