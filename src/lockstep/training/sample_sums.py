"""Losses and metrics as sums over samples, and the check that the parts of a batch add up to the whole batch."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from ..communicator import Communicator
from ..errors import ConfigError
from ..parallel.nested import tensors_of
from .errors_on_all import raise_on_all
from .mean_check import (
    MAX_FLOAT64_VALUES,
    WITH_GRADIENTS,
    Call,
    Difference,
    Halves,
    LossLike,
    Passes,
    Unsteady,
    by_target,
    compare_or_skip,
    depends_on_unsliced,
    device_of,
    is_due,
    keep_call,
    pairs_all_samples,
    to_float64,
)
from .outer_values import OuterValues
from .own_loss import NotCounted, OwnLoss
from .seen_values import SeenValues
from .sum_and_count import as_sum, is_known_nan

__all__ = [
    "NotAMean",
    "SampleSum",
    "as_sum",
    "describe_function",
    "describe_shapes",
    "raise_not_a_mean",
    "without_traces",
]


# Samples with values unlike those before are compared beside the steps that are due: at most these, and one more for
# each of so many steps.
_MOST_EXTRA, _STEPS_PER_EXTRA = 8, 64


@dataclass(frozen=True)
class NotAMean:
    """A function whose values for the two halves of some samples do not add up to its value for the samples.

    Attributes:
        argument: the argument that the function was passed as.
        name: the name of the function.
        samples: number of samples.
        difference: what the comparison has found.
        rank: the rank that has found it.
        shapes: what is odd about the shapes of the output and the target; "" if nothing is.
        is_model: whether the model computes the loss, or uses numbers that it has computed for the whole batch.
    """

    argument: str
    name: str
    samples: int
    difference: Difference
    rank: int = 0
    shapes: str = ""
    is_model: bool = False

    def error(self) -> ConfigError:
        """Return the error to raise."""
        expected = "a mean over samples, one value for each sample, or (sum, count)"
        if self.difference.is_pair and not self.is_model:
            expected += " whose sums and counts add up over the parts of a batch"
        return ConfigError(
            self.argument, expected, found=f"{self.name}, which gives {self._found()}", hint=self._hint()
        )

    def _found(self) -> str:
        found, samples = self.difference, f"{self.samples} samples of rank {self.rank}"
        if found.is_other_form:
            return f"one value for each of {samples}, but another number of values for fewer of them"
        if math.isnan(found.whole[0]):
            return f"nan for {samples}, whose outputs are finite, as if there were nothing in them that it counts"
        differ = f" (their gradients differ by {100 * found.gradients:.2g} %)" if found.gradients else ""
        if found.is_pair and not self.is_model:
            own, theirs = (f"{_number(a)} and the count {_number(b)}" for a, b in (found.whole, found.halves))
            return f"the sum {own} for {samples}, and the sum {theirs} for their two halves together{differ}"
        mean, halves = self.means()
        return f"{mean} for {samples} and {halves} as the mean of their two halves, weighted by samples{differ}"

    def means(self) -> tuple[str, str]:
        """Return the mean over the samples, and that of their halves."""
        (total, count), (halves_total, halves_count) = self.difference.whole, self.difference.halves
        return _number(total / (count or 1.0)), _number(halves_total / (halves_count or 1.0))

    def _hint(self) -> str:
        hint = "Its value depends on how a batch is split, and so on the number of workers. "
        if self.is_model:
            hint += (
                "A term of the whole batch, such as one that balances experts or decorrelates outputs, is no mean over "
                "samples. Compute it for each sample, or leave it out."
            )
        elif self.difference.is_pair:
            hint += (
                "Sums and counts are added up over all workers: return the sum over the samples, tokens or weights, "
                "and their number. A loss and a part of it are no such pair: return the loss alone."
            )
        else:
            hint += (
                "Return (sum, count), where the mean is sum / count, e.g. over tokens or class weights; sums and "
                "counts are added up over all workers."
            )
        if self.argument != "loss_fn":
            hint += f" Where no sum over samples gives it (F1, AUC): lockstep.whole_set({self.name})."
        return f"{self.shapes} {hint}".lstrip()


def _number(value: float) -> str:
    return f"{value:.10g}"


def raise_not_a_mean(found: NotAMean | NotCounted | None, comm: Communicator) -> None:
    """Raise an error on every rank if any rank has found a function that is not a mean; called by all ranks.

    Raises:
        ConfigError: the error of the lowest rank that has found one.
    """
    raise_on_all(comm, None if found is None else replace(found, rank=comm.rank).error())


class SampleSum:
    """A loss or metric (output, target) as (output, target, size) → (sum, what it is a sum over).

    Where it is due, and where a call has values unlike those that were compared before, see `SeenValues`, it keeps the
    arguments of a call for `check`. On the CPU, calls that give no number are kept as well.

    Args:
        argument: the argument that errors name, such as "loss_fn".
        fn: the function; see `as_sum` for its return value.
        name: the name of the function in errors.

    Attributes:
        counts_samples: whether the last call returned a mean over samples, or one value for each.
        opaque: whether the check has found that the function uses numbers that cannot be split by samples.
    """

    def __init__(self, argument: str, fn: LossLike, name: str = "") -> None:
        self._argument, self.fn, self._name = argument, fn, name or describe_function(fn)
        self.opaque, self.counts_samples = False, False
        self._closed, self._call, self._number, self._due = False, cast(Call | None, None), 0, True
        self._seen, self._extra, self._outer = SeenValues(), 0, OuterValues(fn)

    @property
    def changes_outside(self) -> list[str]:
        """The names of lists, numbers and tensors outside of the function that its calls change, as far as seen."""
        return self._outer.changed

    def expect(self, number: int, due: bool = False) -> None:
        """Begin a step, or a batch of an evaluation, with this number; `due` if it is to be checked in any case."""
        self._number, self._call, self._due = number, None, due or is_due(number)

    def __call__(self, output: Any, target: Any, size: int) -> tuple[Any, Any]:
        """Return (sum, count) of `size` samples.

        Raises:
            ConfigError: see `as_sum`.
        """
        if self._closed or (self._call is not None and self._call.size > 1):
            return self._sum(self.fn(output, target), size)
        sample = self._unlike_sample(output, target, size)
        if not self._due and sample is None:
            value = self.fn(output, target)
            keeps = is_known_nan(value)
        else:
            before = _versions(output, target)
            self._outer.before_call()
            value = self.fn(output, target)
            self._outer.after_call()
            keeps = before == _versions(output, target)  # a function that changes them cannot be called with them again
        if keeps:
            self._call = keep_call(output, target, size, self._number, sample=sample)
        return self._sum(value, size)

    def _unlike_sample(self, output: Any, target: Any, size: int) -> int | None:
        """Return a sample whose values are unlike those that were compared before, if there is one and it is to be
        compared."""
        if not self._due and self._extra >= _MOST_EXTRA + self._number // _STEPS_PER_EXTRA:
            return None
        return self._seen.unlike_sample(output, target, size)

    def _sum(self, value: Any, size: int) -> tuple[Any, Any]:
        self.counts_samples = not isinstance(value, (tuple, list))
        return as_sum(value, size, self._argument)

    def close(self) -> None:
        """Check no more calls, and free the kept arguments."""
        self._closed, self._call = True, None

    def check(self, passes: Passes = nullcontext, gradients: bool = True) -> NotAMean | None:
        """Check that the function is a mean over samples, with the first part of at least two samples.

        It calls the function a few more times, restores the random generators, and waits for the device.

        Args:
            passes: the context manager that the function was called in, such as autocast.
            gradients: whether to compare gradients with respect to the output as well.

        Returns:
            The difference; None if there is none, or if the function cannot be checked.
        """
        call, due, self._call, self._due = self._call, self._due, None, False
        if call is None or self._closed:
            return None
        self._extra += not due
        self._seen.add(call.output, call.target)
        gradients = gradients and self._number in WITH_GRADIENTS
        call = by_target(call)
        try:
            with self._outer.restored():
                found = compare_or_skip(partial(self._compare, call, passes, gradients), device_of(call))
        except Unsteady:
            self.close()
            return None
        if found is None:
            return None
        shapes = describe_shapes(call.output, call.target) if pairs_all_samples(call.output, call.target) else ""
        return NotAMean(self._argument, self._name, call.size, found, shapes=shapes)

    def _compare(self, call: Call, passes: Passes, gradients: bool) -> Difference | None:
        fn = without_traces(self.fn)
        self.opaque = depends_on_unsliced(fn, call, passes)
        if self.opaque or call.rows is None:
            return None
        if _numel(call) <= MAX_FLOAT64_VALUES and device_of(call).type != "mps":
            try:
                return Halves(fn, to_float64(call)).difference(gradients)
            except (RuntimeError, TypeError):  # the function contains tensors of another dtype
                pass
        with passes():
            return Halves(fn, call).difference(gradients)


def without_traces(fn: LossLike) -> LossLike:
    """Return a copy of a module with the same parameters, whose calls change nothing in the module; else `fn`."""
    if not isinstance(fn, nn.Module):
        return fn
    return copy.deepcopy(fn, {id(parameter): parameter for parameter in fn.parameters()})


def _versions(*trees: Any) -> list[int]:
    return [tensor._version for tensor in tensors_of(trees) if not tensor.is_inference()]


def _numel(call: Call) -> int:
    return sum(tensor.numel() for tensor in tensors_of((call.output, call.target)) if tensor.is_floating_point())


def describe_shapes(output: torch.Tensor, target: torch.Tensor) -> str:
    """Return what is wrong with the shapes of an output and a target that are broadcast to all pairs of samples."""
    together = list(torch.broadcast_shapes(output.shape, target.shape))  # type: ignore[no-untyped-call]
    shapes = f"{list(output.shape)} and a target of shape {list(target.shape)}"
    return f"An output of shape {shapes} are broadcast to {together}: give both the same shape."


def describe_function(fn: Any) -> str:
    """Return the name of a function or module for messages."""
    if isinstance(fn, partial):
        keywords = "".join(f", {name}={value!r}" for name, value in fn.keywords.items() if _is_short(value))
        return f"partial({describe_function(fn.func)}{keywords})"
    if isinstance(fn, nn.Module):
        return type(fn).__name__
    if isinstance(fn, OwnLoss):
        return fn.__name__
    name = str(getattr(fn, "__qualname__", "") or type(fn).__name__).rpartition("<locals>.")[2]
    code = getattr(fn, "__code__", None)
    return f"{name} ({Path(code.co_filename).name}:{code.co_firstlineno})" if code and name == "<lambda>" else name


def _is_short(value: Any) -> bool:
    return value is None or isinstance(value, (str, bool, int, float))
