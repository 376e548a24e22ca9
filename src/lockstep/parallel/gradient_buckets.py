"""Gradient buckets: groups of parameters whose gradients are reduced together, during the backward
pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from ..errors import ConfigError
from .tree_sum import Node, TreeSum
from .weight_gradients import Sum, Value, formed

__all__ = [
    "ALONE",
    "BUCKET",
    "Bucket",
    "GradientExchange",
    "GradientHooks",
    "Gradients",
    "flat_memory",
    "group_parameters",
    "in_own_memory",
    "refuse_further_pass",
    "separate_gradients",
    "view_like",
]


Gradients = list[torch.Tensor | None]
"""One gradient for each parameter of a bucket; None for an unused parameter, which adds nothing."""

Values = list[Value | None]
"""The same, where some are not computed yet."""


class GradientExchange(Protocol):
    """Sums the gradients of one bucket over the workers."""

    def start(self, partial_sums: list[tuple[Node, Gradients]]) -> None:
        """Start to send the sums over this worker's subtrees."""

    def add_up(self) -> None:
        """Do what is left to do before the sums can be waited for."""

    def wait(self) -> Gradients:
        """Wait for the sums, and return one for each parameter of the bucket."""


BUCKET = 4 << 20
"""Bytes of a bucket that is sent: large enough to amortise the latency of a message, small enough
that the first one is sent early.
"""

ALONE = 1 << 20
"""From so many bytes on a tensor is sent by itself, from where it is."""

# Elements: the offset of a parameter in a flat tensor is a multiple of 64 bytes of float32, as
# torch's allocations are, so that kernels see the same alignment in a bucket as in a separate
# tensor.
_ALIGN = 16


class Bucket:
    """Parameters of one dtype on one device, and the tree sum of their gradients over this worker's
    shards.

    Args:
        parameters: dense parameters.
        virtual_workers: number of shards of a global batch, the leaves of the tree.

    Attributes:
        tree: the partial sums of the current step.
        numel: elements of a flat tensor that holds all gradients.
        pending: number of parameters whose gradient of the last shard has not arrived yet.
        exchange: sums the gradients over the workers; None where there are no others.
        is_sent: whether the exchange has started in the current step.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], virtual_workers: int) -> None:
        self.parameters = list(parameters)
        self._unused: list[Values] = []
        # with a method of the bucket, both would stay until Python looks for cycles
        self.tree: TreeSum[Values] = TreeSum(virtual_workers, partial(_add, self._unused))
        self.pending = len(self.parameters)
        self.exchange: GradientExchange | None = None
        self.is_sent = False
        self._offsets, self.numel = _offsets(self.parameters)

    def release(self) -> None:
        """Free the memory of one set of gradients that has been added to another; called before a
        new set is made.

        If all were freed at once, the memory would return to the operating system, which clears it
        before it hands it out again: a tenth of the time of a step for a model of 10 M parameters.
        """
        if self._unused:
            self._unused.pop()

    def retire(self) -> None:
        """Clear the tree after its sums have been copied, and keep their memory for `release`."""
        self._unused += [gradients for _, gradients in self.tree.partial_sums]
        self.tree.clear()

    def clear(self) -> None:
        """Free all memory of the bucket, which is used no longer."""
        self.tree.clear()
        self._unused.clear()

    def collect(self, node: Node, products: dict[nn.Parameter, Value]) -> None:
        """Move the parameters' gradients into the tree as the sum of `node`, the next subtree; sets
        them to None.

        Args:
            node: the subtree.
            products: the gradients of weights that the passes have not computed, see
                `weight_gradients`; those of this bucket are removed.

        Raises:
            ConfigError: if a gradient is sparse.
        """
        gradients = [p.grad for p in self.parameters]
        _check_dense(gradients)
        for p in self.parameters:
            p.grad = None
        values: Values = [
            None if gradient is None else in_own_memory(gradient) for gradient in gradients
        ]
        if products:
            for number, p in enumerate(self.parameters):
                value = values[number]
                product = products.pop(p, None)
                if product is not None:
                    # of a pair of shards one may have been computed; of two the order is no matter
                    values[number] = product if value is None else Sum(value, product)
        self.tree.push(node, values)

    def partial_sums(self) -> list[tuple[Node, Gradients]]:
        """Return the complete subtrees of the tree with their sums, all of them computed."""
        return [(node, self._formed_in_place(values)) for node, values in self.tree.partial_sums]

    def total(self) -> Gradients:
        """Return the sums over all shards, all of them computed."""
        return self._formed_in_place(self.tree.total())

    def _formed_in_place(self, values: Any) -> Gradients:
        for number, value in enumerate(values):
            if value is not None and not isinstance(value, torch.Tensor):
                values[number] = formed(value, self.parameters[number])
        gradients: Gradients = values
        return gradients

    def memory_of(self, gradients: Gradients) -> torch.Tensor | None:
        """Return the memory of the gradient of the bucket's only parameter, flat, if it has the
        strides that its view of a flat tensor has; None otherwise.
        """
        parameter = self.parameters[0]
        only = gradients[0]
        if len(gradients) > 1 or only is None:
            return None
        expected = parameter if _is_dense(parameter) else torch.empty_like(parameter, device="meta")
        return flat_memory(only) if only.stride() == expected.stride() else None

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return one view of `flat` for each parameter; `flat` is a 1-d tensor of at least `numel`
        elements.
        """
        return [
            view_like(p, flat, offset)
            for p, offset in zip(self.parameters, self._offsets, strict=True)
        ]


def _add(unused: list[Values], left: Values, right: Values) -> Values:
    """Add two sets of gradients in place of `left`, and keep the memory of the other one."""
    unused.append(right)
    return add_gradients(left, right)


def add_gradients(left: Values, right: Values) -> Values:
    """Add two sets of gradients in place of `left`, and return the sums; that of one that is not
    computed is not computed either.
    """
    sums: Values = []
    present: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    for a, b in zip(left, right, strict=True):
        if a is None or b is None:
            sums.append(b if a is None else a)
        elif isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            sums.append(a)
            present[0].append(a)
            present[1].append(b)
        else:
            sums.append(Sum(a, b))
    if present[0]:
        torch._foreach_add_(*present)
    return sums


def _owners_of_memory(tensor: torch.Tensor) -> int:
    """Return how many own the memory of a tensor: all tensors in it, and Python's object of it."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


_SINGLE = torch.empty(1)
_OWNERS_OF_UNSHARED = _owners_of_memory(_SINGLE)


def in_own_memory(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient that may be added to in place: a copy if something else has its memory.

    Autograd leaves two parameters that are added through views, such as ``a.view(-1) +
    b.view(-1)``, gradients in the same memory.
    """
    if gradient.layout is not torch.strided:
        return gradient
    if _owners_of_memory(gradient) <= _OWNERS_OF_UNSHARED:
        return gradient
    return gradient.clone()


def separate_gradients(
    parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor | None, ...]:
    """Return gradients of `torch.autograd.grad` as a backward pass leaves them: each in memory of
    its own.

    Autograd gives the same tensor for two parameters that are added, and one of a single element
    for a sum. What is added to one of them in place would then be added to others.
    """
    seen = set[int]()
    separate = []
    for p, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None and gradient.layout is torch.strided:
            memory = gradient.untyped_storage().data_ptr()
            if memory in seen or gradient.stride() != p.stride():
                gradient = torch.empty_like(p, dtype=gradient.dtype, requires_grad=False).copy_(
                    gradient
                )
            seen.add(memory)
        separate.append(gradient)
    return tuple(separate)


def view_like(parameter: torch.Tensor, flat: torch.Tensor, start: int) -> torch.Tensor:
    """Return the elements of `flat` from `start` on as a view with the shape and the strides of
    `parameter`.

    The strides are those that autograd gives a gradient: a norm adds elements in the order of
    memory.
    """
    strides = (
        parameter.stride()
        if _is_dense(parameter)
        else torch.empty(parameter.shape, device="meta").stride()
    )
    return flat.as_strided(parameter.shape, strides, flat.storage_offset() + start)


def flat_memory(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the elements of a tensor as a flat view, in the order of memory; None if there are
    gaps between them.
    """
    return tensor.as_strided((tensor.numel(),), (1,)) if _is_dense(tensor) else None


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill one range of memory without gaps and without overlaps."""
    expected = 1
    for stride, size in sorted(
        (s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True


def _offsets(parameters: Sequence[nn.Parameter]) -> tuple[list[int], int]:
    """Return the offset of each parameter in a flat tensor, and the size of that tensor, in
    elements.
    """
    offsets = []
    numel = 0
    for p in parameters:
        offsets.append(-(-numel // _ALIGN) * _ALIGN)
        numel = offsets[-1] + p.numel()
    return offsets, numel


def group_parameters(
    parameters: Sequence[nn.Parameter],
    limit: int | None,
    alone: int | None,
    owner_of: Mapping[Any, object] | None = None,
) -> list[list[nn.Parameter]]:
    """Return groups of `parameters` that are sent together: each of one dtype, device and owner.

    Groups are sorted by the order in which they are complete when gradients arrive in the order of
    `parameters`.

    Args:
        parameters: the parameters.
        limit: bytes of a group, about; None for no limit.
        alone: bytes from which on a parameter has a group of its own; None if none has.
        owner_of: the rank of the owner of each, or those of its owners; None if they have none.
    """
    open_groups: dict[object, list[nn.Parameter]] = {}
    full_groups: list[list[nn.Parameter]] = []
    for p in parameters:
        if alone is not None and p.nbytes >= alone:
            full_groups.append([p])
            continue
        key = p.dtype, p.device, None if owner_of is None else owner_of[p]
        group = open_groups.setdefault(key, [])
        group.append(p)
        if limit is not None and sum(q.nbytes for q in group) >= limit:
            full_groups.append(open_groups.pop(key))
    position = {id(p): number for number, p in enumerate(parameters)}
    return sorted([*full_groups, *open_groups.values()], key=lambda group: position[id(group[-1])])


def _check_dense(gradients: Gradients) -> None:
    if any(gradient is not None and gradient.layout is not torch.strided for gradient in gradients):
        hint = "Make embeddings with sparse=False."
        raise ConfigError(
            "parameters",
            "parameters with dense gradients",
            found="one with a sparse gradient",
            hint=hint,
        )


def refuse_further_pass() -> NoReturn:
    """Raise the error of a shard that makes several backward passes where one is allowed."""
    raise ConfigError(
        "backward",
        "one backward pass for each shard",
        found="several, or one that reaches a parameter more than once",
        hint="Add up the losses and call backward() once; use torch.utils.checkpoint with "
        "use_reentrant=False.",
    )


class GradientHooks:
    """Hooks that notice when the gradients of buckets are complete, while the backward passes of a
    shard run.

    They are registered for a worker's last shard only, because each hook costs time at every
    backward pass.

    Attributes:
        order: the parameters in the order in which their gradients have been completed.
    """

    def __init__(self) -> None:
        self.order: list[nn.Parameter] = []
        self._hooks: list[Any] = []
        self._buckets: Sequence[Bucket] = ()
        self._passes_left: dict[nn.Parameter, int] = {}
        self._on_ready: Callable[[Bucket], None] = lambda _: None
        self._on_further_pass: Callable[[], None] = refuse_further_pass
        self._versions: list[int] = []

    @staticmethod
    def refuse_other_hooks(parameters: Sequence[nn.Parameter]) -> None:
        """Check that `parameters` have no hooks of ``register_post_accumulate_grad_hook``; call
        before `expect`.

        Raises:
            ConfigError: for a hook, which would see the gradient of one shard or the sum of two,
                depending on the number of workers.
        """
        if any(p._post_accumulate_grad_hooks for p in parameters):
            raise ConfigError(
                "parameters",
                "none with a hook of register_post_accumulate_grad_hook()",
                found="one, which would see the gradients of one shard or of two, depending on the "
                "number of workers",
                hint="Use register_hook(), which sees each shard's, or change gradients before the "
                "optimizer's step.",
            )

    def expect(
        self,
        buckets: Sequence[Bucket],
        on_ready: Callable[[Bucket], None],
        passes: int = 1,
        on_further_pass: Callable[[], None] = refuse_further_pass,
    ) -> None:
        """From now on call `on_ready` for each bucket when the gradients of all its parameters are
        complete.

        Args:
            buckets: the buckets, whose `pending` counts down. Hooks on the same list stay
                registered.
            on_ready: called with a bucket.
            passes: how many backward passes complete a gradient.
            on_further_pass: called when a parameter gets a gradient after that.
        """
        self.order = []
        if buckets is not self._buckets:
            self.remove()
            self._buckets = buckets
            for bucket in buckets:
                hook = partial(self._on_gradient, bucket)
                for p in bucket.parameters:
                    self._hooks.append(p.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        self._on_ready = on_ready
        self._on_further_pass = on_further_pass
        self._passes_left = {p: passes for bucket in buckets for p in bucket.parameters}

    def note(self, parameter: nn.Parameter) -> None:
        """Take a gradient that this pass does not compute as complete; before `expect` nothing is
        done.
        """
        for bucket in self._buckets:
            if any(p is parameter for p in bucket.parameters):
                self._on_gradient(bucket, parameter)
                return

    def _on_gradient(self, bucket: Bucket, parameter: nn.Parameter) -> None:
        left = self._passes_left[parameter] - 1
        if left < 0:
            self._on_further_pass()
            return
        self._passes_left[parameter] = left
        if left:
            return
        self.order.append(parameter)
        bucket.pending -= 1
        if not bucket.pending:
            self._on_ready(bucket)

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._buckets = ()
        self._on_ready = lambda _: None
        self._on_further_pass = refuse_further_pass

    def record_versions(self, parameters: Sequence[nn.Parameter]) -> None:
        """Record the versions of the gradients of `parameters` before a backward pass that adds to
        them, each in memory of its own.
        """
        for p in parameters:
            if p.grad is not None:
                gradient = in_own_memory(p.grad)
                if gradient is not p.grad:
                    p.grad = gradient
        self._versions = [-1 if p.grad is None else p.grad._version for p in parameters]

    def check_one_pass(self, parameters: Sequence[nn.Parameter]) -> None:
        """Check that each gradient was added to at most once since `record_versions`.

        Raises:
            ConfigError: otherwise; the sum of three gradients would depend on the order of the
                additions.
        """
        for p, version in zip(parameters, self._versions, strict=False):
            if p.grad is not None and version >= 0 and p.grad._version > version + 1:
                refuse_further_pass()
