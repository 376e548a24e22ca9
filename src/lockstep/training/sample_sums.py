"""Losses and metrics as sums over samples, and the check that the parts of a batch add up to the whole batch."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..communicator import Communicator
from ..data.nested import map_tensors, tensors_of
from ..errors import ConfigError, TransportError
from ..invariance.randomness import preserve_generators
from .errors_on_all import raise_on_all
from .own_loss import NotCounted

__all__ = [
    "Call",
    "Difference",
    "Halves",
    "NotAMean",
    "Passes",
    "SampleSum",
    "as_sum",
    "compare_or_skip",
    "describe_function",
    "device_of",
    "raise_not_a_mean",
    "sample_rows",
]

_log = logging.getLogger(__name__)

LossLike = Callable[[Any, Any], Any]
Passes = Callable[[], AbstractContextManager[object]]
Difference = tuple[float, float, float]
"""(value, mean of its halves' values, relative difference of their gradients)."""

# Up to this number of values (32 MiB in float64), the comparison runs in float64, where rounding is negligible.
_MAX_FLOAT64_VALUES = 1 << 22
# Tolerated relative differences: in float64, and at least in other formats.
_FLOAT64_TOLERANCE = 1e-5
_MIN_TOLERANCE = 1e-3
# A sum of many samples in these formats would overflow (float16: above 65,504) or be rounded to 3 digits (bfloat16).
_HALF = (torch.float16, torch.bfloat16)


def as_sum(value: Any, size: int, argument: str = "loss_fn") -> tuple[Any, Any]:
    """Convert the return value of a loss or a metric for `size` samples to (sum, count).

    Args:
        value: the mean over the samples (a 0-dim floating tensor or a float), one value for each sample (a tensor of
            `size` elements), or (sum, count): two 0-dim tensors or numbers.
        size: the number of samples.
        argument: the argument that errors name.

    Raises:
        ConfigError: if it has none of these forms, or is a whole number, which is not a mean.
    """
    if isinstance(value, (tuple, list)) and len(value) == 2 and all(map(_is_scalar, value)):
        return _as_scalar(value[0]), _as_scalar(value[1])
    tensor = torch.tensor(value) if isinstance(value, Real) else value
    if isinstance(tensor, torch.Tensor) and tensor.dim() == 0:
        if not tensor.is_floating_point():
            hint = "Return (sum, count), where the mean is sum / count."
            kind = "complex" if tensor.is_complex() else "whole"
            name = tensor.dtype if isinstance(value, torch.Tensor) else type(value).__name__
            raise ConfigError(argument, _expected(size), found=f"a {kind} number ({name}), which is no mean", hint=hint)
        return (tensor.float() if tensor.dtype in _HALF else value) * size, size
    if isinstance(tensor, torch.Tensor) and tensor.numel() == size:
        return (tensor.float() if tensor.dtype in _HALF else tensor).sum(), size
    got = f"{list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
    hint = "For a mean over tokens or pixels, return the sum over them and their number."
    raise ConfigError(argument, _expected(size), found=got, hint=hint)


def _expected(size: int) -> str:
    return f"a scalar mean, {size} values (one for each sample), or (sum, count)"


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Real) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _as_scalar(value: Any) -> Any:
    return value.reshape(()) if isinstance(value, torch.Tensor) and value.dim() else value


@dataclass(frozen=True)
class NotAMean:
    """A function whose value for a part of a batch differs from the mean of its values for the two halves of the part.

    Attributes:
        argument: the argument that the function was passed as.
        name: the name of the function.
        samples: number of samples in the part.
        whole: the value for the part.
        halves: the mean of the halves' values, weighted by samples.
        gradients: the relative difference between the gradients of the two with respect to the outputs.
        rank: the rank that computed the part.
        shapes: what is odd about the shapes of the output and the target; "" if nothing is.
    """

    argument: str
    name: str
    samples: int
    whole: float
    halves: float
    gradients: float = 0.0
    rank: int = 0
    shapes: str = ""

    def error(self) -> ConfigError:
        """Return the error to raise."""
        got = (
            f"{self.name}, which gives {self.whole:.8g} for {self.samples} samples of rank {self.rank} and "
            f"{self.halves:.8g} as the mean of their two halves, weighted by samples"
        )
        if self.gradients:
            got += f" (their gradients differ by {100 * self.gradients:.2g} %)"
        hint = (
            "Its value depends on how a batch is split, and so on the number of workers. Return (sum, count), where "
            "the mean is sum / count, e.g. over tokens or class weights; sums and counts are added up over all workers."
        )
        if self.argument != "loss_fn":
            hint += f" Where no sum over samples gives it (F1, AUC): lockstep.whole_set({self.name})."
        return ConfigError(
            self.argument,
            "a mean over samples, one value for each sample, or (sum, count)",
            found=got,
            hint=f"{self.shapes} {hint}".lstrip(),
        )


def _odd_shapes(output: Any, target: Any) -> str:
    """Return a sentence if `output` and `target` are broadcast to a larger shape, which is rarely meant."""
    if not (isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor) and target.is_floating_point()):
        return ""
    with suppress(RuntimeError):  # they cannot be broadcast
        together = torch.broadcast_shapes(output.shape, target.shape)  # type: ignore[no-untyped-call]
        if together not in (output.shape, target.shape):
            shapes = f"{list(output.shape)} and a target of shape {list(target.shape)}"
            return f"An output of shape {shapes} are broadcast to {list(together)}: give both the same shape."
    return ""


def raise_not_a_mean(found: NotAMean | NotCounted | None, comm: Communicator) -> None:
    """Raise an error on every rank if any rank has found a function that is not a mean; called by all ranks.

    Raises:
        ConfigError: the error of the lowest rank that has found one.
    """
    raise_on_all(comm, None if found is None else replace(found, rank=comm.rank).error())


@dataclass(frozen=True)
class Call:
    """The arguments of a call of a loss or metric.

    Attributes:
        output: the output, detached.
        target: the target, detached.
        size: number of samples.
    """

    output: Any
    target: Any
    size: int


class SampleSum:
    """A loss or metric (output, target) as (output, target, size) → (sum, what it is a sum over).

    While it is open, it keeps the arguments of a call for `check`. `check` closes it, and so does a return value
    (sum, count), which needs no check.

    Args:
        argument: the argument that errors name, such as "loss_fn".
        fn: the function; see `as_sum` for its return value.
        name: the name of the function in errors.

    Attributes:
        open: whether the function is still to be checked.
        counts_samples: whether the last call returned a mean over samples, or one value for each.
        opaque: whether the check has found that the function uses numbers that cannot be split by samples.
    """

    def __init__(self, argument: str, fn: Callable[[Any, Any], Any], name: str = "") -> None:
        self._argument, self.fn, self._name = argument, fn, name or describe_function(fn)
        self.open, self.opaque, self.counts_samples = True, False, False
        self._call: Call | None = None

    def __call__(self, output: Any, target: Any, size: int) -> tuple[Any, Any]:
        """Return (sum, count) of `size` samples.

        Raises:
            ConfigError: see `as_sum`.
        """
        before = _versions(output, target) if self.open else None
        value = self.fn(output, target)
        self.counts_samples = not isinstance(value, (tuple, list))
        if not self.open:
            return as_sum(value, size, self._argument)
        if not self.counts_samples:
            self.open = False
        # A function that changes its arguments cannot be called again with them.
        elif before == _versions(output, target) and (self._call is None or self._call.size < 2):
            arguments = map_tensors(torch.Tensor.detach, {"output": output, "target": target})
            self._call = Call(**arguments, size=size)
        return as_sum(value, size, self._argument)

    def close(self) -> None:
        """Skip the check, and free the kept arguments."""
        self.open, self._call = False, None

    def check(self, passes: Passes = nullcontext, gradients: bool = True) -> NotAMean | None:
        """Check that the function is a mean over samples, with the first part of at least two samples.

        It calls the function a few more times, restores the random generators, and waits for the device.

        Args:
            passes: the context manager that the function was called in, such as autocast.
            gradients: whether to compare gradients with respect to the output as well.

        Returns:
            The difference; None if there is none, or if the function cannot be checked.
        """
        call, self._call = self._call, None
        if call is None:
            return None
        self.open = False

        def compare() -> Difference | None:
            # On a copy of a module, so that its state does not change.
            fn = copy.deepcopy(self.fn) if isinstance(self.fn, nn.Module) else self.fn
            return self._compare(fn, call, passes, gradients)

        difference = compare_or_skip(compare, device_of(call))
        if difference is None:
            return None
        return NotAMean(
            self._argument, self._name, call.size, *difference, shapes=_odd_shapes(call.output, call.target)
        )

    def _compare(self, fn: LossLike, call: Call, passes: Passes, gradients: bool) -> Difference | None:
        rows = sample_rows(call)
        self.opaque = _depends_on_unsliced(fn, call, rows, passes)
        if self.opaque or rows is None:
            return None
        if _numel(call) <= _MAX_FLOAT64_VALUES and device_of(call).type != "mps":
            try:
                return Halves(fn, map_tensors(_to_float64, call), rows, float64=True).difference(gradients)
            except (RuntimeError, TypeError):  # the function contains tensors of another dtype
                pass
        with passes():
            return Halves(fn, call, rows).difference(gradients)


class Halves:
    """The comparison of a function's value and gradients for a part of a batch with those for the halves of the part.

    Args:
        fn: (output, target) → see `as_sum`.
        call: its arguments. For a single sample there are no halves, but `fn` is called equally often, because it may
            communicate with other ranks.
        rows: the size of the first dimension of tensors that are split by samples: the samples, or a multiple of them.
        parameters: parameters of `fn`; gradients are with respect to them instead of the output.
        float64: whether the arguments are in float64.
    """

    def __init__(
        self, fn: LossLike, call: Call, rows: int, parameters: Sequence[torch.Tensor] = (), float64: bool = False
    ) -> None:
        self._fn, self._call, self._rows = fn, call, rows
        self._parameters, self._float64 = list(parameters), float64
        self._dtypes: set[torch.dtype] = set()

    def difference(self, gradients: bool) -> Difference | None:
        """Return the difference between the part and its halves; None if it is no more than rounding.

        Gradients are more sensitive than values: at the beginning of a training the losses of all tokens are nearly
        equal, and so is every weighted mean of them.
        """
        size = self._call.size
        half = max(1, size // 2)
        ranges = [(0, half), (half, size)] if size > 1 else [(0, 1), (0, 1)]
        shares = [(stop - start) / size for start, stop in ranges]
        first, _ = self._evaluate(0, size, False)
        whole, whole_gradients = self._evaluate(0, size, gradients)
        parts = [self._evaluate(start, stop, gradients) for start, stop in ranges]
        halves = sum(share * value for share, (value, _) in zip(shares, parts, strict=True))
        tolerance, scale = self._tolerance(), max(abs(whole), *(abs(value) for value, _ in parts))
        if size < 2 or not math.isfinite(scale) or abs(first - whole) > tolerance * scale:
            return None  # a function that draws random numbers or counts its calls cannot be compared
        distance = _distance(whole_gradients, self._join([of_part for _, of_part in parts], shares))
        if abs(whole - halves) <= tolerance * scale and distance <= tolerance:
            return None
        return whole, halves, distance if distance > tolerance else 0.0

    def _tolerance(self) -> float:
        if self._float64 and self._dtypes == {torch.float64}:
            return _FLOAT64_TOLERANCE
        formats = [*self._dtypes, *(tensor.dtype for tensor in _floats(self._call))]
        device = device_of(self._call).type
        if torch.is_autocast_enabled(device):
            formats.append(torch.get_autocast_dtype(device))
        return max(_MIN_TOLERANCE, *(4 * torch.finfo(dtype).eps for dtype in formats))

    def _evaluate(self, start: int, stop: int, gradients: bool) -> tuple[float, list[torch.Tensor | None]]:
        """Return the function's value for the samples [start, stop), and its gradients."""
        rows_per_sample, leaves = self._rows // self._call.size, list(self._parameters)

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            if not _is_sliced(tensor, self._rows):
                return tensor
            return tensor[start * rows_per_sample : stop * rows_per_sample]

        def as_leaf(tensor: torch.Tensor) -> torch.Tensor:
            part = cut(tensor).detach()
            if gradients and not self._parameters and part.is_floating_point() and _is_sliced(tensor, self._rows):
                leaves.append(part.requires_grad_())
            return part

        output, target = map_tensors(as_leaf, self._call.output), map_tensors(cut, self._call.target)
        value = self._fn(output, target)
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            self._dtypes.add(value.dtype)
        total, count = as_sum(value, stop - start)
        exact = not isinstance(total, torch.Tensor) or not total.is_floating_point()
        mean = torch.as_tensor(total, dtype=torch.float64 if exact else None) / count
        self._dtypes.add(mean.dtype)
        of_leaves: Sequence[torch.Tensor | None] = [None] * len(leaves)
        if gradients and leaves and mean.requires_grad:
            of_leaves = torch.autograd.grad(mean, leaves, allow_unused=True)
        return float(mean.detach()), list(of_leaves)

    def _join(self, parts: list[list[torch.Tensor | None]], shares: list[float]) -> list[torch.Tensor | None]:
        """Join the gradients of the halves into those of the whole part."""
        joined: list[torch.Tensor | None] = []
        for pair in zip(*parts, strict=True):
            scaled = [share * gradient for share, gradient in zip(shares, pair, strict=True) if gradient is not None]
            if len(scaled) < len(pair):
                joined.append(None)
            else:
                joined.append(scaled[0] + scaled[1] if self._parameters else torch.cat(scaled))
        return joined


def _distance(ours: list[torch.Tensor | None], theirs: list[torch.Tensor | None]) -> float:
    """Return the 2-norm of the difference, relative to the larger of the two; 0 without comparable tensors."""
    pairs = [
        (a, b) for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None and a.shape == b.shape
    ]
    norms = [[_norm(tensor) for tensor in (a - b, a, b)] for a, b in pairs]
    difference, one, other = (math.hypot(*(norm[number] for norm in norms)) for number in range(3))
    distance = difference / max(one, other) if max(one, other) else 0.0
    return distance if math.isfinite(distance) else 0.0


def _norm(tensor: torch.Tensor) -> float:
    wide = torch.promote_types(tensor.dtype, torch.float32)
    return float(torch.linalg.vector_norm(tensor, dtype=wide))


def compare_or_skip(compare: Callable[[], Difference | None], device: torch.device) -> Difference | None:
    """Return the result of `compare`; None if it fails, because the function cannot be called with half of its samples.

    The random generators are restored. An error of the transport is raised.
    """
    try:
        with preserve_generators(device), torch.enable_grad():
            return compare()
    except TransportError:
        raise
    except Exception as error:
        _log.debug("the halves of a batch are not compared: %s: %s", type(error).__name__, error)
        return None


def sample_rows(call: Call) -> int | None:
    """Return the size of the first dimension of tensors that can be split by samples; None if there is none.

    It is the number of samples, or a multiple of it that all tensors have.
    """
    outputs, targets = ({t.shape[0] for t in tensors_of(tree) if t.dim()} for tree in (call.output, call.target))
    if len(outputs | targets) == 1 and call.size and not min(outputs | targets) % call.size:
        return min(outputs | targets) or None  # such as all tokens of all samples in one dimension
    return call.size if call.size in outputs and targets <= {call.size} else None


def _depends_on_unsliced(fn: LossLike, call: Call, rows: int | None, passes: Passes) -> bool:
    """Return whether the function uses outputs that cannot be split by samples, such as a loss computed by the model.

    If so, it returns NaN when these outputs are NaN.
    """
    if all(_is_sliced(tensor, rows) for tensor in _floats(call.output)):
        return False

    def with_nan(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() or _is_sliced(tensor, rows):
            return tensor
        return torch.full((), math.nan, dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)

    with passes(), torch.no_grad():
        value = as_sum(fn(map_tensors(with_nan, call.output), call.target), call.size)[0]
    return bool(torch.as_tensor(value).isnan())


def _is_sliced(tensor: torch.Tensor, rows: int | None) -> bool:
    return tensor.dim() > 0 and tensor.shape[0] == rows


def _to_float64(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _floats(tree: Any) -> list[torch.Tensor]:
    return [tensor for tensor in tensors_of(tree) if tensor.is_floating_point()]


def _versions(*trees: Any) -> list[int]:
    return [tensor._version for tensor in tensors_of(trees) if not tensor.is_inference()]


def _numel(tree: Any) -> int:
    return sum(tensor.numel() for tensor in _floats(tree))


def device_of(tree: Any) -> torch.device:
    """Return the device of the first tensor of `tree`; the CPU without one."""
    return next((tensor.device for tensor in tensors_of(tree)), torch.device("cpu"))


def describe_function(fn: Any) -> str:
    """Return the name of a function or module for messages."""
    if isinstance(fn, partial):
        keywords = "".join(f", {name}={value!r}" for name, value in fn.keywords.items() if _is_short(value))
        return f"partial({describe_function(fn.func)}{keywords})"
    if isinstance(fn, nn.Module):
        return type(fn).__name__
    name = str(getattr(fn, "__qualname__", "") or type(fn).__name__).rpartition("<locals>.")[2]
    code = getattr(fn, "__code__", None)
    return f"{name} ({Path(code.co_filename).name}:{code.co_firstlineno})" if code and name == "<lambda>" else name


def _is_short(value: Any) -> bool:
    return value is None or isinstance(value, (str, bool, int, float))
