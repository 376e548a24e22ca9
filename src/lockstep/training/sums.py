"""Losses and metrics as sums over samples, by one rule, and the check that the parts of a batch add up to the whole."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
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
from ..randomness import generators_kept

__all__ = [
    "Call",
    "Difference",
    "Halves",
    "NotAMean",
    "Passes",
    "SampleSum",
    "as_sum",
    "described",
    "device_of",
    "guarded",
    "raise_together",
    "rows_of",
]

_log = logging.getLogger(__name__)

LossLike = Callable[[Any, Any], Any]
Passes = Callable[[], AbstractContextManager[object]]
Difference = tuple[float, float, float]
"""(value, mean of its halves' values, relative difference of their gradients)."""

# Values up to this number are compared in float64, where what is left of a difference is no rounding: 32 MiB.
_FEW = 1 << 22
# Relative differences that count: in float64, and in the coarsest format that took part, at least the second.
_IN_FLOAT64 = 1e-5
_OTHERWISE = 1e-3


def as_sum(value: Any, size: int, argument: str = "loss_fn") -> tuple[Any, Any]:
    """What a loss or a metric has returned for `size` samples, as (sum, count).

    Args:
        value: the mean over the samples (a 0-dim floating tensor or a float), one value for each sample (a tensor of
            `size` elements), or (sum, count): two 0-dim tensors or numbers.
        size: the number of samples.
        argument: what an error names.

    Raises:
        ConfigError: when it is none of these forms, or a whole number, which is no mean.
    """
    if isinstance(value, (tuple, list)) and len(value) == 2 and all(map(_is_scalar, value)):
        return _as_scalar(value[0]), _as_scalar(value[1])
    found = torch.tensor(value) if isinstance(value, Real) else value
    if isinstance(found, torch.Tensor) and found.dim() == 0:
        if not found.is_floating_point():
            hint = "Return (sum, count): this number, and what it is a number of."
            raise ConfigError(
                argument, _expected(size), found=f"a whole number ({found.dtype}), which is no mean", hint=hint
            )
        return value * size, size
    if isinstance(found, torch.Tensor) and found.numel() == size:
        return found.sum(), size
    got = f"{list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
    hint = "Where the mean is over tokens or pixels, return their sum and their count."
    raise ConfigError(argument, _expected(size), found=got, hint=hint)


def _expected(size: int) -> str:
    return f"a scalar mean, {size} values (one for each sample), or (sum, count)"


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Real) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _as_scalar(value: Any) -> Any:
    return value.reshape(()) if isinstance(value, torch.Tensor) and value.dim() else value


@dataclass(frozen=True)
class NotAMean:
    """What a function gave for a part of a batch, and for the two halves of that part.

    Attributes:
        argument: the argument that the function came as.
        name: of the function.
        samples: in the part.
        whole: the value of the part.
        halves: the mean of its halves' values, weighted by their samples.
        gradients: the relative difference between the gradients of the two with respect to the outputs.
        rank: whose part it is.
    """

    argument: str
    name: str
    samples: int
    whole: float
    halves: float
    gradients: float = 0.0
    rank: int = 0

    def error(self) -> ConfigError:
        """The error that says so."""
        got = (
            f"{self.name}, which gives {self.whole:.8g} for {self.samples} samples of rank {self.rank} and "
            f"{self.halves:.8g} as the mean of their two halves, weighted by samples"
        )
        if self.gradients:
            got += f" (their gradients differ by {100 * self.gradients:.2g} %)"
        hint = (
            "What it gives depends on how a batch is cut, and so on the number of workers. Return (sum, count): the "
            "sum over what the mean is over, such as tokens or class weights, and how much of it there is; sums and "
            "counts are added up over all workers."
        )
        return ConfigError(
            self.argument, "a mean over samples, one value for each sample, or (sum, count)", found=got, hint=hint
        )


def raise_together(found: NotAMean | None, comm: Communicator) -> None:
    """Raise on every rank what any rank has found; called by all of them.

    Raises:
        ConfigError: that of the lowest rank.
    """
    own = found and replace(found, rank=comm.rank)
    first = next((each for each in comm.allgather_object(own) if each is not None), None)
    if first is not None:
        raise first.error()


@dataclass(frozen=True)
class Call:
    """What a function was called with.

    Attributes:
        output: detached.
        target: likewise.
        size: samples.
    """

    output: Any
    target: Any
    size: int


class SampleSum:
    """A loss or metric (output, target) as (output, target, size) → (sum, what it is a sum over).

    While it is open it keeps what it was called with, for `check` to look at. It is closed by a check, and where the
    function returns (sum, count), which says by itself what it is a sum over.

    Args:
        argument: what an error names, such as "loss_fn".
        fn: the function, see `as_sum` for what it returns.
        name: of the function in errors.

    Attributes:
        open: see above.
        counts_samples: whether the last call gave a mean over samples, or one value for each.
        opaque: whether the check has found that the function looks at numbers which cannot be cut by samples.
    """

    def __init__(self, argument: str, fn: Callable[[Any, Any], Any], name: str = "") -> None:
        self._argument, self.fn, self._name = argument, fn, name or described(fn)
        self.open, self.opaque, self.counts_samples = True, False, False
        self._kept: Call | None = None

    def __call__(self, output: Any, target: Any, size: int) -> tuple[Any, Any]:
        """The sum over `size` samples.

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
        # One that changes its arguments cannot be called again with them.
        elif before == _versions(output, target) and (self._kept is None or self._kept.size < 2):
            seen = map_tensors(torch.Tensor.detach, {"output": output, "target": target})
            self._kept = Call(**seen, size=size)
        return as_sum(value, size, self._argument)

    def close(self) -> None:
        """Keep nothing any more."""
        self.open, self._kept = False, None

    def check(self, passes: Passes = nullcontext, gradients: bool = True) -> NotAMean | None:
        """What is wrong with the function, by the first part of two samples or more that it was called with.

        It is called a few times more, with generators left as they were; waits for the device.

        Args:
            passes: what the function was called inside of, such as autocast.
            gradients: compare those with respect to the output as well.

        Returns:
            None where nothing is wrong, or where that cannot be told.
        """
        call, self._kept = self._kept, None
        if call is None:
            return None
        self.open = False
        # A copy of a module, so that what it keeps from call to call stays as it is.
        found = guarded(lambda: self._compare(_copied(self.fn), call, passes, gradients), device_of(call))
        return None if found is None else NotAMean(self._argument, self._name, call.size, *found)

    def _compare(self, fn: LossLike, call: Call, passes: Passes, gradients: bool) -> Difference | None:
        rows = rows_of(call)
        self.opaque = _looks_at_numbers(fn, call, rows, passes)
        if self.opaque or rows is None:
            return None
        if _numel(call) <= _FEW and device_of(call).type != "mps":
            try:
                return Halves(fn, map_tensors(_wide, call), rows, wide=True).differing(gradients)
            except (RuntimeError, TypeError):  # it has tensors of its own in another format
                pass
        with passes():
            return Halves(fn, call, rows).differing(gradients)


class Halves:
    """The value and the gradients of a function for a part of a batch and for the halves of that.

    Args:
        fn: (output, target) → see `as_sum`.
        call: with what; with one sample there are no halves, and `fn` is called as often as with more, as it may wait
            for what other ranks call.
        rows: that tensors to be cut have in their first dimension: the samples, or a multiple of them.
        parameters: that `fn` computes with; gradients are with respect to them, and not to the output.
        wide: whether the call is in float64.
    """

    def __init__(
        self, fn: LossLike, call: Call, rows: int, parameters: Sequence[torch.Tensor] = (), wide: bool = False
    ) -> None:
        self._fn, self._call, self._rows = fn, call, rows
        self._parameters, self._wide = list(parameters), wide
        self._dtypes: set[torch.dtype] = set()

    def differing(self, gradients: bool) -> Difference | None:
        """How the two differ, if by more than rounding.

        Gradients tell more than values: at the beginning of a training the losses of all tokens are nearly the same,
        and so is every weighted mean of them.
        """
        size = self._call.size
        half = max(1, size // 2)
        cuts = [(0, half), (half, size)] if size > 1 else [(0, 1), (0, 1)]
        shares = [(stop - start) / size for start, stop in cuts]
        once, _ = self._at(0, size, False)
        whole, ours = self._at(0, size, gradients)
        parts = [self._at(start, stop, gradients) for start, stop in cuts]
        halves = sum(share * value for share, (value, _) in zip(shares, parts, strict=True))
        allowed, scale = self._allowed(), max(abs(whole), *(abs(value) for value, _ in parts))
        if size < 2 or not math.isfinite(scale) or abs(once - whole) > allowed * scale:
            return None  # one that draws random numbers or counts its calls cannot be compared
        apart = _distance(ours, self._joined([found for _, found in parts], shares))
        if abs(whole - halves) <= allowed * scale and apart <= allowed:
            return None
        return whole, halves, apart if apart > allowed else 0.0

    def _allowed(self) -> float:
        if self._wide and self._dtypes == {torch.float64}:
            return _IN_FLOAT64
        formats = [*self._dtypes, *(tensor.dtype for tensor in _floats(self._call))]
        device = device_of(self._call).type
        if torch.is_autocast_enabled(device):
            formats.append(torch.get_autocast_dtype(device))
        return max(_OTHERWISE, *(4 * torch.finfo(dtype).eps for dtype in formats))

    def _at(self, start: int, stop: int, gradients: bool) -> tuple[float, list[torch.Tensor | None]]:
        """The value for these samples, and its gradients."""
        each, leaves = self._rows // self._call.size, list(self._parameters)

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[start * each : stop * each] if _is_cut(tensor, self._rows) else tensor

        def followed(tensor: torch.Tensor) -> torch.Tensor:
            part = cut(tensor).detach()
            if gradients and not self._parameters and part.is_floating_point() and _is_cut(tensor, self._rows):
                leaves.append(part.requires_grad_())
            return part

        output, target = map_tensors(followed, self._call.output), map_tensors(cut, self._call.target)
        total, count = as_sum(self._fn(output, target), stop - start)
        exact = not isinstance(total, torch.Tensor) or not total.is_floating_point()
        mean = torch.as_tensor(total, dtype=torch.float64 if exact else None) / count
        self._dtypes.add(mean.dtype)
        found: Sequence[torch.Tensor | None] = [None] * len(leaves)
        if gradients and leaves and mean.requires_grad:
            found = torch.autograd.grad(mean, leaves, allow_unused=True)
        return float(mean.detach()), list(found)

    def _joined(self, parts: list[list[torch.Tensor | None]], shares: list[float]) -> list[torch.Tensor | None]:
        """The gradients of the halves as those of the whole."""
        joined: list[torch.Tensor | None] = []
        for pair in zip(*parts, strict=True):
            scaled = [share * gradient for share, gradient in zip(shares, pair, strict=True) if gradient is not None]
            if len(scaled) < len(pair):
                joined.append(None)
            else:
                joined.append(scaled[0] + scaled[1] if self._parameters else torch.cat(scaled))
        return joined


def _distance(ours: list[torch.Tensor | None], theirs: list[torch.Tensor | None]) -> float:
    """The 2-norm of the difference over that of the larger; 0 where there is nothing to compare."""
    pairs = [
        (a, b) for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None and a.shape == b.shape
    ]
    norms = [[_norm(tensor) for tensor in (a - b, a, b)] for a, b in pairs]
    apart, one, other = (math.hypot(*(norm[number] for norm in norms)) for number in range(3))
    distance = apart / max(one, other) if max(one, other) else 0.0
    return distance if math.isfinite(distance) else 0.0


def _norm(tensor: torch.Tensor) -> float:
    wide = torch.promote_types(tensor.dtype, torch.float32)
    return float(torch.linalg.vector_norm(tensor, dtype=wide))


def guarded(compare: Callable[[], Difference | None], device: torch.device) -> Difference | None:
    """What `compare` finds; nothing where the function cannot be called with a part of its samples."""
    try:
        with generators_kept(device), torch.enable_grad():
            return compare()
    except TransportError:
        raise
    except Exception as error:
        _log.debug("the halves of a batch are not compared: %s: %s", type(error).__name__, error)
        return None


def rows_of(call: Call) -> int | None:
    """The first dimension of what can be cut by samples: their number, or a multiple of it that all tensors have."""
    outputs, targets = ({t.shape[0] for t in tensors_of(tree) if t.dim()} for tree in (call.output, call.target))
    if len(outputs | targets) == 1 and call.size and not min(outputs | targets) % call.size:
        return min(outputs | targets) or None  # such as all tokens of all samples, one below the other
    return call.size if call.size in outputs and targets <= {call.size} else None


def _looks_at_numbers(fn: LossLike, call: Call, rows: int | None, passes: Passes) -> bool:
    """Whether the function looks at numbers of the output that belong to no single sample, such as a model's own loss.

    With NaN in their places it returns NaN.
    """
    if all(_is_cut(tensor, rows) for tensor in _floats(call.output)):
        return False

    def poisoned(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() or _is_cut(tensor, rows):
            return tensor
        return torch.full((), math.nan, dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)

    with passes(), torch.no_grad():
        value = as_sum(fn(map_tensors(poisoned, call.output), call.target), call.size)[0]
    return bool(torch.as_tensor(value).isnan())


def _is_cut(tensor: torch.Tensor, rows: int | None) -> bool:
    return tensor.dim() > 0 and tensor.shape[0] == rows


def _copied(fn: LossLike) -> LossLike:
    return copy.deepcopy(fn) if isinstance(fn, nn.Module) else fn


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _floats(tree: Any) -> list[torch.Tensor]:
    return [tensor for tensor in tensors_of(tree) if tensor.is_floating_point()]


def _versions(*trees: Any) -> list[int]:
    return [tensor._version for tensor in tensors_of(trees) if not tensor.is_inference()]


def _numel(tree: Any) -> int:
    return sum(tensor.numel() for tensor in _floats(tree))


def device_of(tree: Any) -> torch.device:
    """Where the first tensor of `tree` is; the CPU where there is none."""
    return next((tensor.device for tensor in tensors_of(tree)), torch.device("cpu"))


def described(fn: Any) -> str:
    """What a reader knows `fn` by."""
    if isinstance(fn, partial):
        keywords = "".join(f", {name}={value!r}" for name, value in fn.keywords.items() if _is_short(value))
        return f"partial({described(fn.func)}{keywords})"
    if isinstance(fn, nn.Module):
        return type(fn).__name__
    name = str(getattr(fn, "__qualname__", "") or type(fn).__name__).rpartition("<locals>.")[2]
    code = getattr(fn, "__code__", None)
    return f"{name} ({Path(code.co_filename).name}:{code.co_firstlineno})" if code and name == "<lambda>" else name


def _is_short(value: Any) -> bool:
    return value is None or isinstance(value, (str, bool, int, float))
