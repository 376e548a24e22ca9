"""`DistributedOptimizer`: an optimizer whose gradients are reduced over all ranks before each
step.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from lockstep import Communicator, arguments
from lockstep.errors import ConfigError
from lockstep.parallel.gradient_buckets import Bucket, GradientExchange
from lockstep.parallel.optimizer_parts import check_whole
from lockstep.parallel.reducer import Reducer
from lockstep.topology import World

from ..common.process_sets import ProcessSet, checked_process_set, global_process_set
from ..common.util import split_list
from ..engine.request import Adasum, Average
from .allreduce import grouped_allreduce_, reduction_options
from .compression import Compression
from .gradient_exchange import EngineExchange, NoExchange, Reduction

__all__ = [
    "AdasumMixin",
    "AllreduceMixin",
    "DistributedOptimizer",
    "gradient_groups",
    "parameter_names",
]


Parameter = torch.Tensor


def parameter_names(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[Any] | None
) -> dict[Parameter, str]:
    """Return the name of each parameter of `optimizer`.

    Args:
        optimizer: the optimizer.
        named_parameters: (name, parameter) pairs; None for names made from the indices in the
            parameter groups.

    Raises:
        ConfigError: names are missing or not unique.
    """
    indexed = [
        (f"allreduce.noname.{group_index}.{index}", p)
        for group_index, group in enumerate(optimizer.param_groups)
        for index, p in enumerate(group["params"])
    ]
    pairs: list[Any] = indexed if named_parameters is None else list(named_parameters)
    if any(
        not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str)
        for pair in pairs
    ):
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
        raise ConfigError(
            "named_parameters", "a name for each parameter of the optimizer", found=found
        )
    return name_of


def gradient_groups(
    parameters: Sequence[Parameter], groups: int | Sequence[Sequence[Parameter]] | None
) -> list[list[Parameter]]:
    """Return `parameters` in lists of those whose gradients are reduced together, in the order of
    their first ones.

    Args:
        parameters: the parameters that require gradients, in order.
        groups: the number of groups of consecutive parameters; or the groups, where a parameter in
            none of them is reduced by itself; None or 0 for no groups.

    Raises:
        ConfigError: for other values, or for a parameter in two groups.
    """
    expected = "a whole number of at least 0, or a list of lists of parameters"
    if isinstance(groups, int):
        groups = arguments.whole("groups", groups, least=0, expected=expected)
        return split_list(parameters, groups) if groups else [[p] for p in parameters]
    if groups is None:
        return [[p] for p in parameters]
    if not isinstance(groups, (list, tuple)) or not all(map(_is_list_of_tensors, groups)):
        raise ConfigError("groups", expected, groups)
    trained = set(parameters)
    group_of = dict[Parameter, list[Parameter]]()
    for group in groups:
        members = [p for p in group if p in trained]
        for p in members:
            if p in group_of:
                found = f"one of shape {tuple(p.shape)} in two"
                raise ConfigError("groups", "each parameter in one group", found=found)
            group_of[p] = members
    in_order = [group_of.get(p, [p]) for p in parameters]
    return list({id(members): members for members in in_order}.values())


def _is_list_of_tensors(group: Any) -> bool:
    return isinstance(group, (list, tuple)) and all(isinstance(p, torch.Tensor) for p in group)


class _DistributedMixin:
    """Counts backward passes; `DistributedOptimizer` derives a class from a subclass and the
    optimizer's own class.

    The constructor of the class is not called: the instance shares the attributes of an existing
    optimizer.
    """

    state: Any
    param_groups: list[dict[str, Any]]

    def _set_up(
        self,
        reduction: Reduction,
        passes: int,
        groups: int | Sequence[Sequence[Parameter]] | None,
        exchange: Callable[[Bucket], GradientExchange],
    ) -> None:
        self._reduction = reduction
        self._parameter_names = reduction.names  # under the name by which programs read it
        self._trained = self._parameters_beside([])
        self._groups = gradient_groups(self._trained, groups)
        # The gradients of this rank are the only shard that the reducer adds up. Other ranks are
        # the exchange's affair.
        alone = Communicator.at(World(), torch.device("cpu"))
        self._reducer = Reducer(alone, 1, one_pass=False, exchange=exchange)
        # Hooks must neither keep the optimizer alive nor outlive it.
        weakref.finalize(self, self._reducer.abandon)
        self.set_backward_passes_per_step(passes)

    def _parameters_beside(self, known: Sequence[Parameter]) -> list[Parameter]:
        """Return the parameters to train that are not among `known`."""
        others = set(known)
        return [
            p
            for group in self.param_groups
            for p in group["params"]
            if p.requires_grad and p not in others
        ]

    def _train(self, new: Sequence[Parameter]) -> None:
        """Reduce the gradients of `new` too: parameters that were unfrozen or added, at the same
        step on all ranks.
        """
        for p, name in parameter_names(self, None).items():  # type: ignore[arg-type]
            self._parameter_names.setdefault(p, name)
        self._trained = [*self._trained, *new]
        self._groups = [*self._groups, *([p] for p in new)]

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes before each step, from the next step on."""
        self.backward_passes_per_step = arguments.whole("backward_passes_per_step", passes, least=1)
        self._begin_step()

    def _begin_step(self) -> None:
        self._synchronized = False  # whether its gradients are reduced already
        self._begin(self._trained, self._groups)

    def _begin(self, trained: Any, groups: Any) -> None:
        self._reduction.left_out = False
        self._reducer.begin(trained, groups)
        self._reducer.open(0, self.backward_passes_per_step, self._reduction.refuse_further_pass)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Zero the gradients; raise an AssertionError between the last backward pass of a step and
        the step.
        """
        if self._reducer.is_sending and not self._reduction.is_alone():
            raise AssertionError(
                "zero_grad() was called after backward() and before step() or synchronize(), "
                "while gradients are being reduced. Call it before backward()."
            )
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load a state into the objects that this optimizer shares with the wrapped one, and reset
        the pass counts.
        """
        self._begin_step()
        state = self.state
        groups = self.param_groups
        super().load_state_dict(*args, **kwargs)  # type: ignore[misc]
        for group, loaded in zip(groups, self.param_groups, strict=True):
            group.clear()
            group.update(loaded)
        loaded_state = dict(self.state)
        state.clear()
        state.update(loaded_state)
        self.state = state
        self.param_groups = groups


class AdasumMixin(_DistributedMixin):
    """Combines the changes that the ranks' own steps make to the parameters."""

    def set_up(self, reduction: Reduction, passes: int) -> None:
        """Initialise the attributes; takes the place of a constructor.

        Args:
            reduction: how changes are compressed, their names and the ranks.
            passes: backward passes per step.
        """
        self._set_up(reduction, passes, None, NoExchange)

    def synchronize(self) -> None:
        """Do nothing: gradients are not reduced."""

    def skip_synchronize(self) -> None:
        """Raise an AssertionError: Adasum does not support it."""
        raise AssertionError(
            "skip_synchronize() cannot be used with op=hvd.Adasum: step() itself combines the ranks"
        )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take the step of this rank, and combine its changes with those of the other ranks."""
        if new := self._parameters_beside(self._trained):
            self._train(new)
        reduction = self._reduction
        before = [p.detach().clone() for p in self._trained]
        loss = super().step(closure)  # type: ignore[misc]
        with torch.no_grad():
            changes = [p - old for p, old in zip(self._trained, before, strict=True)]
            compressed, ctxs = zip(
                *(reduction.compression.compress(change) for change in changes), strict=True
            )
            name = "adasum." + self._parameter_names[self._trained[0]]
            grouped_allreduce_(compressed, name=name, op=Adasum, process_set=reduction.process_set)
            for p, old, tensor, ctx in zip(self._trained, before, compressed, ctxs, strict=True):
                p.copy_(old + reduction.compression.decompress(tensor, ctx))
        self._begin_step()
        return loss


class AllreduceMixin(_DistributedMixin):
    """Reduces gradients over all ranks, while the backward pass runs."""

    def set_up(
        self,
        reduction: Reduction,
        passes: int,
        groups: int | Sequence[Sequence[Parameter]] | None = None,
    ) -> None:
        """Initialise the attributes; takes the place of a constructor.

        Args:
            reduction: how gradients are reduced.
            passes: backward passes per step.
            groups: as for `gradient_groups`.
        """
        self._should_synchronize = True
        self._set_up(reduction, passes, groups, partial(EngineExchange, reduction=reduction))

    def synchronize(self) -> None:
        """Wait until all gradients are reduced; start the reductions that have not been started.

        Raises:
            HorovodInternalError: a reduction has failed.
        """
        if not self._reduction.is_alone():
            if self._reduction.left_out:  # other ranks have joined after the backward pass
                self._begin_step()
            self._reducer.close()
            self._reducer.finish()
            if new := self._parameters_beside(self._trained):
                self._train(new)
                self._begin(new, [[p] for p in new])
                self._reducer.close()
                self._reducer.finish()
        self._begin_step()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Return a context in which `step` does not reduce gradients, for use after
        `synchronize`.
        """
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce the gradients and take the step; the gradients of each call of `closure` are
        reduced.
        """
        if self._should_synchronize and closure is None:
            if self._synchronized:
                text = (
                    "optimizer.step() called without optimizer.skip_synchronize() after "
                    "optimizer.synchronize(): the gradients are reduced a second time, which "
                    "costs time and changes nothing."
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
    """Return an optimizer like `optimizer`, of a class with the same name, whose steps use the
    gradients of all ranks.

    The reduction of gradients overlaps with the backward pass. A gradient that is missing on a rank
    counts as zeros. The state and the parameter groups are shared with `optimizer`.

    Args:
        optimizer: any optimizer of torch.
        named_parameters: (name, parameter) pairs, as from ``model.named_parameters()``; None for
            names made from indices.
        compression: compresses gradients for the reduction: a class with `compress` and
            `decompress`.
        backward_passes_per_step: number of backward passes before each step; their gradients are
            summed.
        op: Average, Sum, or Adasum, which combines the changes that the ranks' own steps make.
        gradient_predivide_factor: f: for Average, gradients are divided by f before the sum, and by
            size / f after.
        num_groups: the former name of `groups`.
        groups: gradients to reduce together: a number of groups, or lists of parameters.
        sparse_as_dense: reduce sparse gradients as dense ones.
        process_set: the ranks. Ranks that are not in it train independently.

    Raises:
        ConfigError: a ValueError, for names that are missing or not unique, for other invalid
            arguments, and for an optimizer that has a part of its state only, after a training with
            ``shard_optimizer=True``.
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
    # The groups and the state are shared, so that schedulers of the optimizer keep working. A
    # `step` with which a scheduler has replaced the optimizer's own is not: it would take a step of
    # the optimizer alone.
    wrapped.__dict__.update(
        {name: value for name, value in optimizer.__dict__.items() if name != "step"}
    )
    # A scheduler that was created before checks on the optimizer itself whether steps have been
    # taken.
    optimizer.__dict__["_opt_called"] = True
    names = parameter_names(optimizer, named_parameters)
    reduction = Reduction(
        names, compression, process_set, op, gradient_predivide_factor, sparse_as_dense
    )
    if use_adasum:
        wrapped.set_up(reduction, backward_passes_per_step)
    else:
        wrapped.set_up(reduction, backward_passes_per_step, groups)
    return wrapped


def _check_arguments(optimizer: Any, compression: Any, op: int, predivide: float) -> None:
    expected = "one of torch.optim, or of a class derived from its Optimizer"
    arguments.instance("optimizer", optimizer, torch.optim.Optimizer, expected)
    check_whole(optimizer)
    if not (hasattr(compression, "compress") and hasattr(compression, "decompress")):
        raise ConfigError("compression", "hvd.Compression.fp16 or a class like it", compression)
    reduction_options(op, None, 1.0, 1.0)
    expected = "a finite number above 0, and 1 if op is not hvd.Average"
    arguments.number(
        "gradient_predivide_factor", predivide, above=0, finite=True, expected=expected
    )
    if predivide != 1 and op != Average:
        raise ConfigError("gradient_predivide_factor", expected, predivide)
