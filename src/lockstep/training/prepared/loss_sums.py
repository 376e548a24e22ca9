"""Sums over samples in the losses of a loop of one's own, read off their graphs, and what divides
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ...errors import ConfigError
from .graph_nodes import MOST_NODES, Node, kind_of, next_nodes, walk
from .model_calls import ModelCalls

# A loss that is a sum of several has these between its root and each of them.
TERMS = {
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
    *TERMS,
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


def undivided_sum(root: torch.Tensor, calls: ModelCalls) -> str | None:
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
    for node in terms_of(root.grad_fn):
        if (reason := _sum_over_samples(node, calls)) is not None:
            return reason
    return None


def _sum_over_samples(node: Node, calls: ModelCalls) -> str | None:
    """Return what makes a term a sum over samples; None if it is not certain that it is one."""
    samples = calls.samples
    kind = kind_of(node)
    if getattr(node, "_saved_reduction", None) == 2:
        weighted = kind.startswith("Binary") and getattr(node, "_saved_weight", None) is not None
        rows = getattr(node, "_saved_self", None)
        several = rows is not None and rows.dim() > 0 and rows.shape[0] > 1
        if several and not weighted and not _of_weights(node) and not _of_constants(node, calls):
            return f'reduction="sum" ({node.name()})'
    elif kind == "SumBackward" and samples > 1 and sums_samples(node, samples):
        of_data = _has_data(node, samples) and not _of_constants(node, calls)
        if of_data and _is_unscaled(node, samples):
            return f"sum() over a tensor of shape {list(node._saved_self_sym_sizes)}"
    return None


def divided_by_whole_batch(root: torch.Tensor, calls: ModelCalls, number: int) -> str | None:
    """Return what makes a term of `root` a sum over the samples of this part that is divided by
    `number`, which is not the number of these samples; None if there is none.

    A number by which it is multiplied divides it by its inverse. If one of several numbers is that
    of the samples, or of these times other sizes of what is summed, the term is a mean, and the
    others are factors of a mean.

    Args:
        root: a loss.
        calls: the calls of models in the body.
        number: the samples of a whole batch.
    """
    for term, divisors in _divided_terms(root.grad_fn):
        if not any(_are_close(constant, number) for constant in divisors):
            continue
        if any(_is_mean_by(constant, term, calls.samples) for constant in divisors):
            continue
        if (reason := _sum_over_samples(term, calls)) is not None:
            return reason
    return None


def _divided_terms(root: Node | None) -> list[tuple[Node, tuple[float, ...]]]:
    """Return the single terms of a loss that constants divide, each with these constants."""
    terms: list[tuple[Node, tuple[float, ...]]] = []
    seen = set[Node]()
    waiting: list[tuple[Node, tuple[float, ...]]] = [] if root is None else [(root, ())]
    while waiting and len(seen) < MOST_NODES:
        node, divisors = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        kind = kind_of(node)
        constant = _constant_of(node)
        if kind in TERMS:
            waiting += [(below, divisors) for below in next_nodes(node)]
        elif constant:
            divisor_of_node = constant if kind == "DivBackward" else 1 / constant
            waiting += [(below, (*divisors, divisor_of_node)) for below in next_nodes(node)]
        else:
            terms += [(node, divisors)] if divisors else []
            if _is_sum_of_sums(node):
                waiting += [(below, divisors) for below in next_nodes(node)]
    return terms


def _constant_of(node: Node) -> float:
    """Return the number by which a node multiplies or divides all that is below it; 0 if there is
    none, or if a device has it.
    """
    if kind_of(node) not in ("MulBackward", "DivBackward") or len(next_nodes(node)) != 1:
        return 0.0
    names = ("_saved_other",) if kind_of(node) == "DivBackward" else ("_saved_self", "_saved_other")
    for number in (getattr(node, name, None) for name in names):
        if isinstance(number, torch.Tensor) and number.numel() == 1 and number.device.type == "cpu":
            return float(number)
    return 0.0


def _are_close(number: float, other: float) -> bool:
    return abs(number - other) <= 1e-5 * abs(other)


def _is_mean_by(number: float, term: Node, samples: int) -> bool:
    """Return whether a sum that is divided by `number` is a mean over the samples, and perhaps over
    other dimensions of what is summed.
    """
    sizes = set[int]()
    for node in walk([term], stop=lambda node_below: kind_of(node_below) not in _ELEMENTWISE):
        kind = kind_of(node)
        if kind == "SumBackward":
            sizes |= set(node._saved_self_sym_sizes)
        elif getattr(node, "_saved_reduction", None) == 2:
            # of scores one for each label is summed
            summed = node._saved_target if kind.startswith("NllLoss") else node._saved_self
            sizes |= set(summed.shape)
    products = {1}
    for size in sizes:
        products |= {size * product for product in products}
    return any(_are_close(number, samples * product) for product in products)


def divisor(root: torch.Tensor) -> torch.Tensor | None:
    """Return the number that a loss divides sums by in all of its terms, as ``sum /
    count.clamp(min=1)``.

    None if there is no such number, or if a term is divided in another way, as a mean is.

    Args:
        root: a loss, before its backward pass.
    """
    divisors: list[torch.Tensor] = []
    for node in terms_of(root.grad_fn, multiples=True):
        number = getattr(node, "_saved_other", None)
        if (
            kind_of(node) != "DivBackward"
            or not isinstance(number, torch.Tensor)
            or number.numel() != 1
        ):
            return None
        numerators = terms_of(node.next_functions[0][0], multiples=True)
        if not all(
            kind_of(numerator) == "SumBackward" or getattr(numerator, "_saved_reduction", None) == 2
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


def terms_of(root: Node | None, multiples: bool = False) -> list[Node]:
    """Return the nodes of the single terms of a loss that no constant multiplies; `multiples`: of
    those as well.
    """
    if root is None:
        return []
    if kind_of(root) not in TERMS and kind_of(root) not in ("SumBackward", "MulBackward"):
        return [root]  # as most losses are
    terms: list[Node] = []
    seen = set[Node]()
    waiting = [root]
    while waiting and len(seen) < MOST_NODES:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        kind = kind_of(node)
        if kind in TERMS or (multiples and kind == "MulBackward" and len(next_nodes(node)) == 1):
            waiting += next_nodes(node)
            continue
        terms.append(node)
        if _is_sum_of_sums(node):
            waiting += next_nodes(node)
    return terms


def _is_sum_of_sums(node: Node) -> bool:
    """Return whether a node sums terms, or sums over another dimension."""
    return kind_of(node) == "SumBackward" and any(
        kind_of(below) in ("StackBackward", "SumBackward") for below in next_nodes(node)
    )


def sums_samples(node: Node, samples: int) -> bool:
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
    below = list(
        walk(next_nodes(node), stop=lambda node_below: kind_of(node_below) not in _ELEMENTWISE)
    )
    return all(
        kind_of(node_below) in _ELEMENTWISE or hasattr(node_below, "variable")
        for node_below in below
    )


def _is_unscaled(node: Node, samples: int) -> bool:
    """Return whether the numbers of a sum have been scaled by nothing that could divide them by
    their number.
    """

    def ends(node_below: Node) -> bool:
        return kind_of(node_below) not in _ELEMENTWISE and not _is_mask(node_below, samples)

    return not any(
        _may_scale(node_below, samples) for node_below in walk(next_nodes(node), stop=ends)
    )


def _may_scale(node: Node, samples: int) -> bool:
    kind = kind_of(node)
    if "SoftmaxBackward" in kind:
        result = node._saved_result
        return bool(node._saved_dim % (1 << 64) in (0, (1 << 64) - result.dim()))
    return any(part in kind for part in _SCALED) and not _is_mask(node, samples)


def _is_mask(node: Node, samples: int) -> bool:
    """Return whether a product has a factor of zeros and ones, or of distributions: one that
    divides by nothing.
    """
    if kind_of(node) != "MulBackward" or len(next_nodes(node)) != 1:
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
    for node_below in walk([node]):
        kind = kind_of(node_below)
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


def sum_error(description: str) -> ConfigError:
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


def fixed_divisor_error(description: str, number: int, samples: int) -> ConfigError:
    """Return the error for a sum that is divided by a fixed number.

    Args:
        description: what makes it a sum.
        number: what it is divided by.
        samples: of the part of the batch.
    """
    return ConfigError(
        "loss",
        "a mean over the samples of the body's part of the batch, or over what "
        "optimizer.step(count=...) counts",
        found=f"a sum: {description}, divided by {number} in a part of {samples} samples. "
        "Gradients of parts are weighted by their samples, so that several workers would divide "
        "the sum once more",
        hint="Divide by the number of samples in this part, len(inputs), in place of a fixed batch "
        "size.",
    )


def fixed_divisor_doubt(description: str, number: int, samples: int, workers: int) -> str:
    """Return what is said of a sum that is divided by the samples of the whole batch, where that
    may be a multiple of those of the part by chance.

    Args:
        description: what makes it a sum.
        number: what it is divided by.
        samples: of the part of the batch.
        workers: among which the batch is divided.
    """
    return (
        f"lockstep.prepare(): the loss is a sum ({description}) divided by {number}, the samples "
        f"of the whole batch; this worker's part has {samples}. If {number} is a fixed batch "
        f"size, gradients are 1/{workers} of those on one worker: divide by len(inputs). If it is "
        f"{number // samples} * len(inputs), they are right."
    )
