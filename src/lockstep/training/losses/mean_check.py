"""The repeated comparison by halves: when losses and metrics are compared, with which samples, and
what is said.
"""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from ... import devices
from ...communicator import Communicator
from ...errors import ConfigError
from ...parallel.nested import tensors_of
from ..check_schedule import WITH_GRADIENTS, block_at, is_due
from ..errors_on_all import raise_on_all
from .halves import (
    MAX_FLOAT64_VALUES,
    Difference,
    Halves,
    LossLike,
    Passes,
    Samples,
    compare_or_skip,
    depends_on_unsliced,
)
from .outer_values import OuterValues
from .seen_values import SeenValues
from .sum_and_count import as_sum, is_known_nan

__all__ = [
    "MeanCheck",
    "NotAMean",
    "Problem",
    "describe_function",
    "describe_shapes",
    "raise_problem",
    "without_traces",
]


_MAX_SAMPLES = 64  # of a batch, that are compared


# Samples with values unlike those before are compared beside the steps that are due: at most these,
# and one more for each of so many steps.
_MOST_EXTRA = 8
_STEPS_PER_EXTRA = 64


class Problem(Protocol):
    """Why the value of a loss or metric depends on how a batch is divided, as one rank has
    found.
    """

    def error(self, rank: int = 0) -> ConfigError:
        """Return the error to raise; `rank` is the one that has found it."""
        ...


def raise_problem(problem: Problem | None, comm: Communicator) -> None:
    """Raise an error on every rank if any rank has found a function that is not a mean; called by
    all ranks.

    Raises:
        ConfigError: the error of the lowest rank that has found one.
    """
    raise_on_all(comm, None if problem is None else problem.error(comm.rank))


@dataclass(frozen=True)
class NotAMean:
    """A function whose values for the two halves of some samples do not add up to its value for the
    samples.

    Attributes:
        argument: the argument that the function was passed as.
        name: the name of the function.
        samples: number of samples.
        difference: what the comparison has found.
        shapes: what is odd about the shapes of the output and the target; "" if nothing is.
        is_model: whether the model computes the loss, or uses numbers that it has computed for the
            whole batch.
    """

    argument: str
    name: str
    samples: int
    difference: Difference
    shapes: str = ""
    is_model: bool = False

    def error(self, rank: int = 0) -> ConfigError:
        """Return the error to raise; `rank` is the one that has found it."""
        expected = "a mean over samples, one value for each sample, or (sum, count)"
        if self.difference.is_pair and not self.is_model:
            expected += " whose sums and counts add up over the parts of a batch"
        description = f"{self.name}, which gives {self._describe_values(rank)}"
        return ConfigError(self.argument, expected, found=description, hint=self._hint())

    def _describe_values(self, rank: int) -> str:
        difference = self.difference
        samples = f"{self.samples} samples of rank {rank}"
        if difference.is_other_form:
            return (
                f"one value for each of {samples}, but another number of values for fewer of them"
            )
        if math.isnan(difference.whole[0]):
            return (
                f"nan for {samples}, whose outputs are finite, as if there were nothing in them "
                "that it counts"
            )
        differ = (
            f" (their gradients differ by {100 * difference.gradients:.2g} %)"
            if difference.gradients
            else ""
        )
        if difference.is_pair and not self.is_model:
            of_samples, of_halves = (
                f"{_number(total)} and the count {_number(count)}"
                for total, count in (difference.whole, difference.halves)
            )
            return (
                f"the sum {of_samples} for {samples}, and the sum {of_halves} for their two halves "
                f"together{differ}"
            )
        mean, halves = self.means()
        return (
            f"{mean} for {samples} and {halves} as the mean of their two halves, weighted by "
            f"samples{differ}"
        )

    def means(self) -> tuple[str, str]:
        """Return the mean over the samples, and that of their halves."""
        total, count = self.difference.whole
        halves_total, halves_count = self.difference.halves
        return _number(total / (count or 1.0)), _number(halves_total / (halves_count or 1.0))

    def _hint(self) -> str:
        hint = "Its value depends on how a batch is split, and so on the number of workers. "
        if self.is_model:
            hint += (
                "A term of the whole batch, such as one that balances experts or decorrelates "
                "outputs, is no mean over samples. Compute it for each sample, or leave it out."
            )
        elif self.difference.is_pair:
            hint += (
                "Sums and counts are added up over all workers: return the sum over the samples, "
                "tokens or weights, and their number. A loss and a part of it are no such pair: "
                "return the loss alone."
            )
        else:
            hint += (
                "Return (sum, count), where the mean is sum / count, e.g. over tokens or class "
                "weights; sums and counts are added up over all workers."
            )
        if self.argument != "loss_fn":
            hint += (
                f" Where no sum over samples gives it (F1, AUC): lockstep.whole_set({self.name})."
            )
        return f"{self.shapes} {hint}".lstrip()


def _number(value: float) -> str:
    return f"{value:.10g}"


class MeanCheck:
    """A loss or metric (output, target) as (output, target, size) → (sum, count), which is compared
    by halves.

    Where that is due, and where a call has values unlike those that were compared before, see
    `SeenValues`, it keeps some of the samples of a call for `check`. On the CPU, samples whose mean
    is no number are kept as well.

    Args:
        argument: the argument that errors name, such as "loss_fn".
        fn: the function; see `as_sum` for its return value.
        name: the name of the function in errors.
        compares: False for a function that is known to be right.

    Attributes:
        opaque: whether the check has found that the function uses numbers that cannot be split by
            samples.
    """

    def __init__(self, argument: str, fn: LossLike, name: str = "", compares: bool = True) -> None:
        self.fn = fn
        self.opaque = False
        self._argument = argument
        self.name = name or describe_function(fn)
        self._number = 0
        self._due = True
        self._compares = compares
        self._kept: Samples | None = None
        self._seen = SeenValues()
        self._extra = 0
        self._outer = OuterValues(fn)

    @property
    def changes_outside(self) -> list[str]:
        """The names of lists, numbers and tensors outside of the function that its calls change, as
        far as seen.
        """
        return self._outer.changed

    def expect(self, number: int, due: bool | None = None) -> None:
        """Begin a step, or a batch of an evaluation.

        Args:
            number: its number.
            due: whether it is to be checked; see `is_due` when None.
        """
        self._number = number
        self._due = is_due(number) if due is None else due
        self._kept = None

    def __call__(self, output: Any, target: Any, size: int) -> tuple[Any, Any]:
        """Return (sum, count) of `size` samples.

        Raises:
            ConfigError: see `as_sum`.
        """
        wanted = self._compares and (self._kept is None or self._kept.size < 2)
        sample = self._unlike_sample(output, target, size) if wanted else None
        if wanted and (self._due or sample is not None):
            before = _versions(output, target)
            self._outer.before_call()
            value = self.fn(output, target)
            self._outer.after_call()
            # else it cannot be called with its arguments again
            wanted = before == _versions(output, target)
        else:
            value = self.fn(output, target)
            wanted = wanted and is_known_nan(value)
        if wanted:
            self._kept = Samples.few_of(
                output, target, size, block_at(self._number), _MAX_SAMPLES, sample
            )
        return as_sum(value, size, self._argument)

    def _unlike_sample(self, output: Any, target: Any, size: int) -> int | None:
        """Return a sample whose values are unlike those that were compared before, if there is one
        and it is to be compared.
        """
        if not self._due and self._extra >= _MOST_EXTRA + self._number // _STEPS_PER_EXTRA:
            return None
        return self._seen.unlike_sample(output, target, size)

    def check(self, passes: Passes = nullcontext, gradients: bool = True) -> NotAMean | None:
        """Check that the function is a mean over samples, with the first part of at least two
        samples.

        It calls the function a few more times, restores the random generators, and waits for the
        device.

        Args:
            passes: the context manager that the function was called in, such as autocast.
            gradients: whether to compare gradients with respect to the output as well.

        Returns:
            The difference; None if there is none, or if the function cannot be checked.
        """
        samples = self._kept
        self._kept = None
        due = self._due
        self._due = False
        if samples is None:
            return None
        self._extra += not due
        self._seen.add(samples.output, samples.target)
        gradients = gradients and self._number in WITH_GRADIENTS
        samples = samples.by_target()
        with self._outer.restored():
            problem = compare_or_skip(
                partial(self._compare, samples, passes, gradients), samples.device
            )
        if problem is None:
            return None
        output = samples.output
        target = samples.target
        shapes = describe_shapes(output, target) if _are_broadcast(output, target) else ""
        return NotAMean(self._argument, self.name, samples.size, problem, shapes)

    def _compare(self, samples: Samples, passes: Passes, gradients: bool) -> Difference | None:
        fn = without_traces(self.fn)
        self.opaque = depends_on_unsliced(fn, samples, passes)
        if self.opaque or samples.rows is None:
            return None
        if samples.values() <= MAX_FLOAT64_VALUES and devices.has_float64(samples.device):
            halves = Halves(fn, samples.in_float64())
            try:
                return self._difference(halves, gradients)
            except (RuntimeError, TypeError):  # the function contains tensors of another dtype
                pass
        with passes():
            return self._difference(Halves(fn, samples), gradients)

    def _difference(self, halves: Halves, gradients: bool) -> Difference | None:
        difference = halves.difference(gradients)
        if halves.is_unsteady:
            self._compares = False
        return difference


def without_traces(fn: LossLike) -> LossLike:
    """Return a copy of a module with the same parameters, whose calls change nothing in the module;
    else `fn`.
    """
    if not isinstance(fn, nn.Module):
        return fn
    return copy.deepcopy(fn, {id(parameter): parameter for parameter in fn.parameters()})


def _versions(*trees: Any) -> list[int]:
    return [tensor._version for tensor in tensors_of(trees) if not tensor.is_inference()]


def _are_broadcast(output: Any, target: Any) -> bool:
    """Return whether `output` of shape (n, 1) and `target` of shape (n,), or the like, are
    broadcast to (n, n).
    """
    if not (isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor)):
        return False
    if {output.dim(), target.dim()} != {1, 2} or output.shape[0] != target.shape[0]:
        return False
    column = output if output.dim() == 2 else target
    return column.shape[1] == 1


def describe_shapes(output: torch.Tensor, target: torch.Tensor) -> str:
    """Return what is wrong with the shapes of an output and a target that are broadcast to all
    pairs of samples.
    """
    together = list(torch.broadcast_shapes(output.shape, target.shape))  # type: ignore[no-untyped-call]
    shapes = f"{list(output.shape)} and a target of shape {list(target.shape)}"
    return f"An output of shape {shapes} are broadcast to {together}: give both the same shape."


def describe_function(fn: Any) -> str:
    """Return the name of a function or module for messages."""
    if isinstance(fn, partial):
        keywords = "".join(
            f", {name}={value!r}" for name, value in fn.keywords.items() if _is_short(value)
        )
        return f"partial({describe_function(fn.func)}{keywords})"
    if isinstance(fn, nn.Module):
        return type(fn).__name__
    name = str(getattr(fn, "__qualname__", "") or type(fn).__name__).rpartition("<locals>.")[2]
    code = getattr(fn, "__code__", None)
    return (
        f"{name} ({Path(code.co_filename).name}:{code.co_firstlineno})"
        if code and name == "<lambda>"
        else name
    )


def _is_short(value: Any) -> bool:
    return value is None or isinstance(value, (str, bool, int, float))
