"""`DistributedOptimizer`: an optimizer whose gradients are reduced over all ranks before each step."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from lockstep import arguments
from lockstep.errors import ConfigError

from ..common.process_sets import ProcessSet, checked_process_set, global_process_set
from ..common.util import split_list
from ..engine.request import Adasum, Average
from .allreduce import grouped_allreduce_, reduction_options, start_gradient_allreduce
from .compression import Compression
from .handles import synchronize
from .mpi_ops import sparse_allreduce_async

__all__ = ["AdasumMixin", "AllreduceMixin", "DistributedOptimizer", "gradient_groups", "parameter_names"]


# --- Names and groups of gradients ------------------------------------------------------------------------------------

Parameter = torch.Tensor


def parameter_names(optimizer: torch.optim.Optimizer, named_parameters: Iterable[Any] | None) -> dict[Parameter, str]:
    """Return the name of each parameter of `optimizer`.

    Args:
        optimizer: the optimizer.
        named_parameters: (name, parameter) pairs; None for names made from the indices in the parameter groups.

    Raises:
        ConfigError: names are missing or not unique.
    """
    indexed = [
        (f"allreduce.noname.{group_index}.{index}", p)
        for group_index, group in enumerate(optimizer.param_groups)
        for index, p in enumerate(group["params"])
    ]
    pairs: list[Any] = indexed if named_parameters is None else list(named_parameters)
    if any(not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str) for pair in pairs):
        expected = "(name, parameter) pairs, as from model.named_parameters()"
        raise ConfigError("named_parameters", expected, found="something else")
    names = [name for name, _ in pairs]
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        found = f"{', '.join(duplicates)} twice"
        raise ConfigError("named_parameters", "a different name for each parameter", found=found)
    name_of = {p: name for name, p in pairs}
    unnamed = sum(p not in name_of for _, p in indexed)
    if unnamed:
        found = f"none for {unnamed} of {len(indexed)}"
        raise ConfigError("named_parameters", "a name for each parameter of the optimizer", found=found)
    return name_of


def gradient_groups(
    parameters: Sequence[Parameter], groups: int | Sequence[Sequence[Parameter]] | None
) -> dict[Parameter, tuple[Parameter, ...]]:
    """Return the group of each parameter whose gradient is reduced together with others.

    Args:
        parameters: the parameters that require gradients, in order.
        groups: the number of groups of consecutive parameters; or the groups, where a parameter in none of them is
            reduced by itself; None or 0 for no groups.

    Raises:
        ConfigError: for other values, or for a parameter in two groups.
    """
    if groups is None or (isinstance(groups, int) and groups == 0):
        return {}
    if isinstance(groups, int) and groups > 0:
        lists = split_list(parameters, groups)
    elif isinstance(groups, (list, tuple)) and all(map(_is_list_of_tensors, groups)):
        lists = [[p for p in group if any(p is q for q in parameters)] for group in groups]
    else:
        raise ConfigError("groups", "a number of at least 0, or a list of lists of parameters", groups)
    group_of: dict[Parameter, tuple[Parameter, ...]] = {}
    for members in map(tuple, lists):
        for p in members:
            if p in group_of:
                found = f"one of shape {tuple(p.shape)} in two"
                raise ConfigError("groups", "each parameter in one group", found=found)
            group_of[p] = members
    return group_of


def _is_list_of_tensors(group: Any) -> bool:
    return isinstance(group, (list, tuple)) and all(isinstance(p, torch.Tensor) for p in group)


# --- What all distributed optimizers share ----------------------------------------------------------------------------


class _DistributedMixin:
    """Counts backward passes; `DistributedOptimizer` derives a class from a subclass and the optimizer's own class.

    The constructor of the class is not called: the instance shares the attributes of an existing optimizer.
    """

    state: Any
    param_groups: list[dict[str, Any]]

    def _set_up(self, names: dict[Parameter, str], compression: Any, process_set: ProcessSet) -> None:
        self._parameter_names, self._compression, self._process_set = names, compression, process_set
        self._trained: list[Parameter] = []
        self._add_new_parameters()

    def _add_new_parameters(self) -> None:
        """Register a hook for parameters that have been unfrozen or added; all ranks do so at the same step."""
        known = set(self._trained)
        new = [p for group in self.param_groups for p in group["params"] if p.requires_grad and p not in known]
        if not new:
            return
        self._parameter_names = {**parameter_names(self, None), **self._parameter_names}  # type: ignore[arg-type]
        self._trained += new
        reference = weakref.ref(self)  # the hook must not keep the optimizer alive

        def hook(p: Parameter) -> None:
            optimizer = reference()
            if optimizer is not None:
                optimizer._on_gradient(p)

        for p in new:
            p.register_post_accumulate_grad_hook(hook)

    def _on_gradient(self, p: Parameter) -> None:
        """Handle the gradient that a backward pass has accumulated in `p`."""
        raise NotImplementedError

    def _count_pass(self, p: Parameter, deadline: str) -> None:
        if self._passes_left[p] <= 0:
            raise AssertionError(
                f"gradients were computed more than backward_passes_per_step times before {deadline}. Increase "
                "backward_passes_per_step to accumulate gradients over several passes."
            )
        self._passes_left[p] -= 1

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes before each step, from the next step on."""
        self.backward_passes_per_step = arguments.whole("backward_passes_per_step", passes, least=1)
        self._reset()

    def _reset(self) -> None:
        self._passes_left = dict.fromkeys(self._parameter_names, self.backward_passes_per_step)

    def _has_pending_gradients(self) -> bool:
        """Return whether gradients are complete and the step has not been taken."""
        raise NotImplementedError

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Zero the gradients; raise an AssertionError between the last backward pass of a step and the step."""
        if self._has_pending_gradients():
            raise AssertionError(
                "zero_grad() was called after backward() and before step() or synchronize(), while gradients are being "
                "reduced. Call it before backward()."
            )
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load a state into the objects that this optimizer shares with the wrapped one, and reset the pass counts."""
        self._reset()
        state, groups = self.state, self.param_groups
        super().load_state_dict(*args, **kwargs)  # type: ignore[misc]
        for group, loaded in zip(groups, self.param_groups, strict=True):
            group.clear()
            group.update(loaded)
        loaded_state = dict(self.state)
        state.clear()
        state.update(loaded_state)
        self.state, self.param_groups = state, groups


# --- Adasum: each rank takes its own step, and the changes of the parameters are combined -----------------------------


class AdasumMixin(_DistributedMixin):
    """Combines the changes that the ranks' own steps make to the parameters."""

    def set_up(self, names: dict[Parameter, str], compression: Any, passes: int, process_set: ProcessSet) -> None:
        """Initialise the attributes; takes the place of a constructor."""
        self._set_up(names, compression, process_set)
        self.set_backward_passes_per_step(passes)

    def _on_gradient(self, p: Parameter) -> None:
        self._count_pass(p, "step()")

    def _has_pending_gradients(self) -> bool:
        return 0 in self._passes_left.values()

    def synchronize(self) -> None:
        """Do nothing: gradients are not reduced."""

    def skip_synchronize(self) -> None:
        """Raise an AssertionError: Adasum does not support it."""
        raise AssertionError("skip_synchronize() cannot be used with op=hvd.Adasum: step() itself combines the ranks")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take the step of this rank, and combine its changes with those of the other ranks."""
        self._add_new_parameters()
        before = [p.detach().clone() for p in self._trained]
        loss = super().step(closure)  # type: ignore[misc]
        with torch.no_grad():
            changes = [p - old for p, old in zip(self._trained, before, strict=True)]
            compressed, ctxs = zip(*(self._compression.compress(change) for change in changes), strict=True)
            name = "adasum." + self._parameter_names[self._trained[0]]
            grouped_allreduce_(compressed, name=name, op=Adasum, process_set=self._process_set)
            for p, old, tensor, ctx in zip(self._trained, before, compressed, ctxs, strict=True):
                p.copy_(old + self._compression.decompress(tensor, ctx))
        self._reset()
        return loss


# --- All-reduce: gradients are reduced, and all ranks take the same step ----------------------------------------------


class AllreduceMixin(_DistributedMixin):
    """Reduces gradients over all ranks, while the backward pass runs."""

    def set_up(
        self,
        names: dict[Parameter, str],
        compression: Any,
        passes: int,
        settings: tuple[int, float, bool],
        groups: Any,
        process_set: ProcessSet,
    ) -> None:
        """Initialise the attributes; takes the place of a constructor.

        Args:
            names: the name of each parameter.
            compression: a class with `compress` and `decompress`.
            passes: backward passes per step.
            settings: op, gradient_predivide_factor and sparse_as_dense.
            groups: as for `gradient_groups`.
            process_set: the ranks.
        """
        self._set_up(names, compression, process_set)
        self._op, self._predivide, self._sparse_as_dense = settings
        self._group_of = gradient_groups(self._trained, groups)
        self._sparse_dims: dict[Parameter, int] = {}  # of the parameters that have had a sparse gradient
        self._should_synchronize = True
        self.set_backward_passes_per_step(passes)

    def _reset(self) -> None:
        super()._reset()
        self._pending: dict[tuple[Parameter, ...], Callable[[], None]] = {}
        self._synchronized = False

    def _has_pending_gradients(self) -> bool:
        return bool(self._pending)

    def _is_single_rank(self) -> bool:
        return not self._process_set.included() or self._process_set.size() == 1

    def _on_gradient(self, p: Parameter) -> None:
        """Start the reduction of a group after the last backward pass of the step."""
        if self._is_single_rank():
            return
        self._count_pass(p, "step() or synchronize()")
        group = self._group_of.get(p, (p,))
        if not any(self._passes_left[member] for member in group):
            self._start_reduction(group)

    def _start_reduction(self, group: tuple[Parameter, ...]) -> None:
        gradients = [self._gradient_of(p) for p in group]
        if not any(gradient.is_sparse for gradient in gradients):
            self._pending[group] = self._start_dense(group, gradients)
            return
        for p, gradient in zip(group, gradients, strict=True):
            is_sparse = gradient.is_sparse
            self._pending[(p,)] = self._start_sparse(p, gradient) if is_sparse else self._start_dense((p,), [gradient])

    def _gradient_of(self, p: Parameter) -> torch.Tensor:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
            if p in self._sparse_dims:
                p.grad = p.grad.to_sparse(self._sparse_dims[p])
        if p.grad.is_sparse:
            self._sparse_dims[p] = p.grad.sparse_dim()
            return p.grad.to_dense() if self._sparse_as_dense else p.grad
        return p.grad.detach()

    def _start_dense(self, group: tuple[Parameter, ...], gradients: list[torch.Tensor]) -> Callable[[], None]:
        compressed, ctxs = zip(*(self._compression.compress(gradient) for gradient in gradients), strict=True)
        name = self._parameter_names[group[0]]
        handle = start_gradient_allreduce(compressed, name, self._op, self._predivide, self._process_set)

        def finish() -> None:
            for p, tensor, ctx in zip(group, synchronize(handle), ctxs, strict=True):
                _set_gradient(p, self._compression.decompress(tensor, ctx))

        return finish

    def _start_sparse(self, p: Parameter, gradient: torch.Tensor) -> Callable[[], None]:
        wait = sparse_allreduce_async(gradient, self._parameter_names[p], self._op, self._process_set)

        def finish() -> None:
            p.grad = wait().coalesce()

        return finish

    def synchronize(self) -> None:
        """Wait until all gradients are reduced; start the reductions that have not been started.

        Raises:
            HorovodInternalError: a reduction has failed.
        """
        if not self._is_single_rank():
            self._add_new_parameters()
            started = {p for group in self._pending for p in group}
            for p in self._trained:
                if p not in started:
                    group = self._group_of.get(p, (p,))
                    self._start_reduction(group)
                    started.update(group)
            for finish in self._pending.values():
                finish()
        self._reset()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Return a context in which `step` does not reduce gradients, for use after `synchronize`."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce the gradients and take the step; the gradients of each call of `closure` are reduced."""
        if self._should_synchronize and closure is None:
            if self._synchronized:
                text = (
                    "optimizer.step() called without optimizer.skip_synchronize() after optimizer.synchronize(): the "
                    "gradients are reduced a second time, which costs time and changes nothing."
                )
                warnings.warn(text, stacklevel=2)
            self.synchronize()
        self._synchronized = False
        if closure is not None and self._should_synchronize:
            closure = self._with_reduction(closure)
        return super().step(closure)  # type: ignore[misc]

    def _with_reduction(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def evaluate() -> Any:
            with torch.enable_grad():
                loss = closure()
            self.synchronize()
            self._synchronized = False
            return loss

        return evaluate


def _set_gradient(p: Parameter, reduced: torch.Tensor) -> None:
    """Set the gradient of `p` to `reduced`, in place and in its layout."""
    assert p.grad is not None
    if p.grad.is_sparse:
        p.grad = reduced.to_sparse(p.grad.sparse_dim())
    elif p.grad.data_ptr() != reduced.data_ptr():
        p.grad.detach().copy_(reduced)


# --- DistributedOptimizer ---------------------------------------------------------------------------------------------


def DistributedOptimizer(  # noqa: N802 - Horovod's name
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
    """Return an optimizer like `optimizer`, of a class with the same name, whose steps use the gradients of all ranks.

    The reduction of gradients overlaps with the backward pass. A gradient that is missing on a rank counts as zeros.
    The state and the parameter groups are shared with `optimizer`.

    Args:
        optimizer: any optimizer of torch.
        named_parameters: (name, parameter) pairs, as from ``model.named_parameters()``; None for names made from
            indices.
        compression: compresses gradients for the reduction: a class with `compress` and `decompress`.
        backward_passes_per_step: number of backward passes before each step; their gradients are summed.
        op: Average, Sum, or Adasum, which combines the changes that the ranks' own steps make.
        gradient_predivide_factor: f: for Average, gradients are divided by f before the sum, and by size / f after.
        num_groups: the former name of `groups`.
        groups: gradients to reduce together: a number of groups, or lists of parameters.
        sparse_as_dense: reduce sparse gradients as dense ones.
        process_set: the ranks. Ranks that are not in it train independently.

    Raises:
        ConfigError: a ValueError, for names that are missing or not unique, and other invalid arguments.
    """
    _check_arguments(optimizer, compression, op, gradient_predivide_factor)
    included = checked_process_set(process_set).included()
    if num_groups:
        warnings.warn("num_groups is now called groups", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    use_adasum = op == Adasum and included and process_set.size() > 1
    base = type(optimizer)
    mixin = AdasumMixin if use_adasum else AllreduceMixin
    derived: Any = type(base.__name__, (mixin, base), {"__module__": base.__module__})
    wrapped = derived.__new__(derived)
    # The groups and the state are shared, so that schedulers of the optimizer keep working. A `step` with which a
    # scheduler has replaced the optimizer's own is not: it would take a step of the optimizer alone.
    wrapped.__dict__.update({name: value for name, value in optimizer.__dict__.items() if name != "step"})
    # A scheduler that was created before checks on the optimizer itself whether steps have been taken.
    optimizer.__dict__["_opt_called"] = True
    names = parameter_names(optimizer, named_parameters)
    if use_adasum:
        wrapped.set_up(names, compression, backward_passes_per_step, process_set)
    else:
        settings = (op, gradient_predivide_factor, sparse_as_dense)
        wrapped.set_up(names, compression, backward_passes_per_step, settings, groups, process_set)
    return wrapped


def _check_arguments(optimizer: Any, compression: Any, op: int, predivide: float) -> None:
    expected = "one of torch.optim, or of a class derived from its Optimizer"
    arguments.instance("optimizer", optimizer, torch.optim.Optimizer, expected)
    if not (hasattr(compression, "compress") and hasattr(compression, "decompress")):
        raise ConfigError("compression", "hvd.Compression.fp16 or a class like it", compression)
    reduction_options(op, None, 1.0, 1.0)
    if predivide <= 0 or (predivide != 1.0 and op != Average):
        expected = "a number above 0, and 1 if op is not hvd.Average"
        raise ConfigError("gradient_predivide_factor", expected, predivide)
