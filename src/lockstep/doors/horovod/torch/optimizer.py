"""`DistributedOptimizer`: an optimizer whose gradients are reduced over all ranks before each step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from lockstep.errors import ConfigError

from ..common.process_sets import ProcessSet, checked_set, global_process_set
from ..engine.request import Adasum, Average
from .compression import Compression
from .delta import DeltaMixin
from .gradients import grouped, named
from .handles import synchronize
from .hooks import check_idle, keeping, put, take_in
from .reducing import start_gradients
from .requests import how_to
from .sparse import sparse_allreduce_async

__all__ = ["DistributedOptimizer"]

Parameter = torch.Tensor


def DistributedOptimizer(  # noqa: N802, as Horovod calls it
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[Any] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Parameter]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """An optimizer like `optimizer`, and of a class with its name, whose steps use the gradients of all ranks.

    Reducing begins while the backward pass still runs. A gradient that is missing on a rank counts as zeros there. The
    state and the parameter groups are those of `optimizer`.

    Args:
        optimizer: any of torch's.
        named_parameters: (name, parameter) pairs, as ``model.named_parameters()`` gives them; by place when None.
        compression: what is done to gradients while they travel: a class with `compress` and `decompress`.
        backward_passes_per_step: so many backward passes come before each step; their gradients are summed.
        op: Average, Sum, or Adasum, which combines what the ranks' own steps change.
        gradient_predivide_factor: f: for Average, gradients are divided by f before they are summed, and by size / f
            after.
        num_groups: the name of `groups` before.
        groups: gradients that are reduced together: a number of groups, or lists of parameters.
        sparse_as_dense: reduce sparse gradients as dense ones.
        process_set: the ranks. Others train by themselves.

    Raises:
        ConfigError: a ValueError, for names that are missing or come twice, and other wrong arguments.
    """
    _check(optimizer, compression, op, gradient_predivide_factor)
    is_in = checked_set(process_set).included()
    if num_groups:
        warnings.warn("num_groups is now called groups", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    delta = op == Adasum and is_in and process_set.size() > 1
    kind = type(optimizer)
    made: Any = type(kind.__name__, (DeltaMixin if delta else GradientMixin, kind), {"__module__": kind.__module__})
    wrapped = made.__new__(made)
    # the same groups and state, so that what was made for the optimizer goes on working; but for a step that a
    # scheduler has put in its place, which would be that of the optimizer alone
    wrapped.__dict__.update({name: value for name, value in optimizer.__dict__.items() if name != "step"})
    # a scheduler that was made before asks the optimizer itself whether it takes steps
    optimizer.__dict__["_opt_called"] = True
    names = named(optimizer, named_parameters)
    if delta:
        wrapped.begin(names, compression, backward_passes_per_step, process_set)
    else:
        settings = (op, gradient_predivide_factor, sparse_as_dense)
        wrapped.begin(names, compression, backward_passes_per_step, settings, groups, process_set)
    return wrapped


def _check(optimizer: Any, compression: Any, op: int, predivide: float) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError("optimizer", "one of torch.optim, or of a class derived from its Optimizer", optimizer)
    if not (hasattr(compression, "compress") and hasattr(compression, "decompress")):
        raise ConfigError("compression", "hvd.Compression.fp16 or a class like it", compression)
    how_to(op, None, 1.0, 1.0)
    if predivide <= 0 or (predivide != 1.0 and op != Average):
        expected = "a number above 0, and 1 where op is not hvd.Average"
        raise ConfigError("gradient_predivide_factor", expected, predivide)


class GradientMixin:
    """Reduces gradients; the class of the optimizer itself comes behind it."""

    param_groups: list[dict[str, Any]]

    def begin(
        self,
        names: dict[Parameter, str],
        compression: Any,
        passes: int,
        settings: tuple[int, float, bool],
        groups: Any,
        process_set: ProcessSet,
    ) -> None:
        """What a constructor would do."""
        self._parameter_names, self._compression, self._set = names, compression, process_set
        self._op, self._predivide, self._sparse_as_dense = settings
        self._trained: list[Parameter] = []
        take_in(self)
        self._group_of = grouped(self._trained, groups)
        self._sparse_dims: dict[Parameter, int] = {}  # of those whose gradients have been sparse
        self._should_synchronize = True
        self.set_backward_passes_per_step(passes)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """From the next step on, so many backward passes come before each."""
        if not isinstance(passes, int) or passes < 1:
            raise ConfigError("backward_passes_per_step", "a whole number of at least 1", passes)
        self.backward_passes_per_step = passes
        self._reset()

    def _reset(self) -> None:
        self._left = dict.fromkeys(self._parameter_names, self.backward_passes_per_step)
        self._under_way: dict[tuple[Parameter, ...], Callable[[], None]] = {}
        self._begun: set[Parameter] = set()
        self._synchronized = False

    @property
    def _alone(self) -> bool:
        return not self._set.included() or self._set.size() == 1

    def arrived(self, p: Parameter) -> None:
        """A backward pass has come to `p`; its gradient is sent when that was the last of the step's passes."""
        if self._alone:
            return
        if self._left[p] <= 0:
            raise AssertionError(
                "gradients were computed more than backward_passes_per_step times before step() or synchronize(). "
                "Make backward_passes_per_step larger to add up the gradients of several passes."
            )
        self._left[p] -= 1
        self._begun.add(p)
        group = self._group_of.get(p, (p,))
        if not any(self._left[member] for member in group):
            self._send(group)

    def _send(self, group: tuple[Parameter, ...]) -> None:
        gradients = [self._gradient_of(p) for p in group]
        if any(gradient.is_sparse for gradient in gradients):
            for p, gradient in zip(group, gradients, strict=True):
                self._under_way[(p,)] = (
                    self._send_dense((p,), [gradient]) if not gradient.is_sparse else (self._send_sparse(p, gradient))
                )
        else:
            self._under_way[group] = self._send_dense(group, gradients)

    def _gradient_of(self, p: Parameter) -> torch.Tensor:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
            if p in self._sparse_dims:
                p.grad = p.grad.to_sparse(self._sparse_dims[p])
        if p.grad.is_sparse:
            self._sparse_dims[p] = p.grad.sparse_dim()
            return p.grad.to_dense() if self._sparse_as_dense else p.grad
        return p.grad.detach()

    def _send_dense(self, group: tuple[Parameter, ...], gradients: list[torch.Tensor]) -> Callable[[], None]:
        packed, ctxs = zip(*(self._compression.compress(gradient) for gradient in gradients), strict=True)
        handle = start_gradients(packed, self._parameter_names[group[0]], self._op, self._predivide, self._set)

        def finish() -> None:
            for p, tensor, ctx in zip(group, synchronize(handle), ctxs, strict=True):
                put(p, self._compression.decompress(tensor, ctx))

        return finish

    def _send_sparse(self, p: Parameter, gradient: torch.Tensor) -> Callable[[], None]:
        finish = sparse_allreduce_async(gradient, self._parameter_names[p], self._op, self._set)

        def put_sparse() -> None:
            p.grad = finish().coalesce()

        return put_sparse

    def synchronize(self) -> None:
        """Wait until all gradients are reduced; those that have not been sent are sent now.

        Raises:
            HorovodInternalError: when they could not be.
        """
        if not self._alone:
            take_in(self)
            sent = {p for group in self._under_way for p in group}
            for p in self._trained:
                if p not in sent:
                    group = self._group_of.get(p, (p,))
                    self._send(group)
                    sent.update(group)
            for finish in self._under_way.values():
                finish()
        self._reset()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within it, `step` takes the gradients as they are: for after `synchronize`, with changes in between."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce the gradients, and take the step; gradients that `closure` computes are reduced each time."""
        if self._should_synchronize and closure is None:
            if self._synchronized:
                text = (
                    "optimizer.step() called without optimizer.skip_synchronize() after optimizer.synchronize(): it "
                    "synchronizes again, which takes its time and adds nothing."
                )
                warnings.warn(text, stacklevel=2)
            self.synchronize()
        self._synchronized = False
        inner = self._reduced(closure) if closure is not None and self._should_synchronize else closure
        return super().step(inner)  # type: ignore[misc]

    def _reduced(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def evaluate() -> Any:
            with torch.enable_grad():
                loss = closure()
            self.synchronize()
            self._synchronized = False
            return loss

        return evaluate

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """As of the optimizer; not while gradients are on their way."""
        check_idle(self._under_way)
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """As of the optimizer; passes are counted anew."""
        self._reset()
        with keeping(self):
            super().load_state_dict(*args, **kwargs)  # type: ignore[misc]
