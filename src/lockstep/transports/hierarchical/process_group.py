"""`HierarchicalGroup`: shm for ranks on several hosts, with shared memory inside a host and Gloo
between leaders.
"""

# torch's stubs lack some names of torch.distributed, and give its methods other signatures than the
# ones called
# mypy: disable-error-code="attr-defined,override"

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ...errors import ConfigError
from ..device_groups import dispatch_by_device
from ..process_group import TransportGroup
from ..runtime.backoff import Steps, chain
from ..runtime.c10d import Store
from ..runtime.reduce_ops import ReduceFn, premul_factor, reduce_fn_for
from ..runtime.tensor_arguments import NotOnCPUError, Tensors, copy_back, flatten
from ..shm import collectives
from ..shm.context import ShmContext
from .connections import GlooConnection, LazyPairs

_GLOO_SUMS = (torch.float32, torch.float64, torch.int32, torch.int64, torch.int8, torch.uint8)


class Leaders:
    """One rank of each host, connected by Gloo. All tensors are contiguous, of shape (numel,).

    Args:
        connection: between them; its ranks are the hosts.
    """

    def __init__(self, connection: GlooConnection) -> None:
        self.connection = connection

    def all_reduce(self, flat: torch.Tensor, op: Any, reduce_fn: ReduceFn) -> Steps:
        """Reduce `flat` over the hosts, in place; the same bits on each.

        Gloo does the dtypes that it has; for the others every leader gathers all values and reduces
        them in order.
        """
        if flat.dtype in _GLOO_SUMS:
            options = dist.AllreduceOptions()
            options.reduceOp = op
            yield from self.connection.wait_steps(self.connection.group.allreduce([flat], options))
            return
        parts = [torch.empty_like(flat) for _ in range(self.connection.size)]
        parts[self.connection.rank].copy_(flat)
        yield from self.all_gather(parts)
        reduce_fn(parts, flat)

    def start_beside(
        self, flat: torch.Tensor, op: Any, on_completion: Callable[[], object]
    ) -> None:
        """Start to reduce `flat` over the hosts beside the next operation; see
        `GlooConnection.start_beside`.
        """
        options = dist.AllreduceOptions()
        options.reduceOp = op
        self.connection.start_beside(
            self.connection.group.allreduce([flat], options), on_completion
        )

    def broadcast(self, flat: torch.Tensor, host: int) -> Steps:
        """Copy `flat` of the leader of `host` to the other leaders', in place."""
        if not flat.numel():
            return
        options = dist.BroadcastOptions()
        options.rootRank = host
        options.rootTensor = 0
        yield from self.connection.wait_steps(
            self.connection.group.broadcast([flat.view(torch.uint8)], options)
        )

    def all_gather(self, parts: Sequence[torch.Tensor]) -> Steps:
        """Copy `parts[i]` of host i's leader to the other leaders', in place; sizes may differ
        between hosts.
        """
        for host, part in enumerate(parts):
            yield from self.broadcast(part, host)

    def barrier(self) -> Steps:
        """Wait until all leaders have arrived."""
        yield from self.connection.wait_steps(self.connection.group.barrier(dist.BarrierOptions()))


class _Beside:
    """A small all-reduce that goes on beside another operation: between hosts both are under way at
    the same time.

    Inside a host they take turns, in one order on all ranks: this one's values are reduced into the
    leader's first, and copied to the others last.

    Args:
        context, leaders: of the group.
        tensor: this rank's values, of a dtype that Gloo reduces.
        op: of the reduction.
        on_completion: called on leaders, as in `GlooConnection.start_beside`.
    """

    def __init__(
        self,
        context: ShmContext,
        leaders: Leaders | None,
        tensor: torch.Tensor,
        op: Any,
        on_completion: Callable[[], object],
    ) -> None:
        self._context = context
        self._leaders = leaders
        self._tensor = tensor
        self._op = op
        self._on_completion = on_completion

    def begin(self) -> Steps:
        """Start it."""
        reduce_fn = reduce_fn_for(self._op, self._tensor.dtype)
        yield from collectives.reduce(self._context.buffers, self._tensor, 0, reduce_fn)
        if self._leaders is not None:
            self._leaders.start_beside(self._tensor, self._op, self._on_completion)

    def end(self) -> Steps:
        """Wait until it is over."""
        if self._leaders is not None:
            yield from self._leaders.connection.wait_beside()
        yield from collectives.broadcast(self._context.buffers, self._tensor, 0)


_WIDENED = (torch.float16, torch.bfloat16)
_MESSAGES = ("send", "recv", "recv_anysource")
# What Gloo does between all ranks, without messages, and c10d's names of it
_BETWEEN_ALL = (
    *("reduce", "gather", "scatter"),
    *("reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single"),
)
_OVER_GLOO = (
    *("reduce", "gather", "scatter", *_MESSAGES),
    *("reduce_scatter", "reduce_scatter_single", "_reduce_scatter_base"),
    *("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
    *("alltoall", "all_to_all_single", "alltoall_base"),
)


class HierarchicalGroup(TransportGroup):
    """A process group that spans several hosts; see `TransportGroup`.

    All-reduce, broadcast, all-gather of equal parts and barrier go through shared memory to the
    first rank of each host, its leader, over Gloo between the leaders, and back. All other
    operations are Gloo's, between all ranks. Where `everyone` is lazy, ranks are connected in
    pairs: by the collectives that need it, and by their first message.

    Args:
        context: of the ranks of this host.
        store: of the rendezvous of all ranks.
        leaders: the connection between the hosts, on the first rank of each; None on the others.
        everyone: all ranks, connected by Gloo.
        hosts: the ranks of each host.
    """

    _context: ShmContext

    def __init__(
        self,
        context: ShmContext,
        store: Store,
        leaders: Leaders | None,
        everyone: GlooConnection,
        hosts: list[list[int]],
    ) -> None:
        super().__init__(everyone.rank, everyone.size, context, store)
        self._leaders = leaders
        self._everyone = everyone
        self._hosts = hosts
        self._next_beside: _Beside | None = None  # which the next operation takes along
        self._host = next(i for i, ranks in enumerate(hosts) if everyone.rank in ranks)
        limit = timedelta(seconds=context.timeout)
        self._pairs = LazyPairs(context, store, everyone.rank, limit) if everyone.is_lazy else None
        between_hosts = leaders.connection if leaders is not None else None
        connections = [
            connection
            for connection in (between_hosts, everyone, self._pairs)
            if connection is not None
        ]
        context.on_end = functools.partial(_close_all, connections)

    @property
    def hosts(self) -> list[list[int]]:
        """The ranks of each host, of which the first is its leader."""
        return self._hosts

    @property
    def never_ended(self) -> tuple[str, ...]:
        """The operations whose waits end by themselves only: those of ranks that Gloo connects on
        demand.
        """
        return _BETWEEN_ALL if self._everyone.is_lazy else ()

    def allreduce_beside(
        self, tensor: torch.Tensor, opts: Any, on_completion: Callable[[], object]
    ) -> Callable[[Any], Any]:
        """Start an all-reduce beside the call that comes next, see `GroupProxy.allreduce_beside`.

        The two are one operation where that is one of shared memory; its work is then that of the
        call.
        """
        beside = _Beside(self._context, self._leaders, tensor, opts.reduceOp, on_completion)
        self._next_beside = beside

        def end(work: Any) -> Any:
            if self._next_beside is not beside:
                return work
            self._next_beside = None
            return self._context.run(
                "all_reduce", chain([beside.begin(), beside.end()]), True, None, [tensor]
            )

        return end

    def _all_steps(self, steps: Iterable[Steps]) -> Iterable[Steps]:
        beside = self._next_beside
        self._next_beside = None
        return steps if beside is None else [beside.begin(), *steps, beside.end()]

    def _reduction(self, op: Any, dtype: torch.dtype) -> Any:
        reduce_fn_for(op, dtype)  # raises where it is not defined
        return op

    def _sparse_allreduce(self, tensors: Tensors, opts: Any) -> dist.Work:
        return self._everyone.group.allreduce(list(tensors), opts)

    def _all_reduce_steps(self, tensor: torch.Tensor, reduction: Any) -> Steps:
        """Do the same as shm's, except that the hosts' sums are added in Gloo's order."""
        flat = flatten(tensor)
        wide = flat.float() if flat.dtype in _WIDENED else flat
        inside, between, average = _split(reduction, wide.dtype)
        if between is None:  # PREMUL_SUM: the factor applies to each rank's own values
            wide = wide * premul_factor(reduction)
        yield from collectives.reduce(self._context.buffers, wide, 0, inside)
        if self._leaders is not None and wide.numel():
            yield from self._leaders.all_reduce(wide, between or dist.ReduceOp.SUM, inside)
            if average:
                wide.div_(self._size)
        yield from collectives.broadcast(self._context.buffers, wide, 0)
        if wide is not flat:
            flat.copy_(wide)
        copy_back(flat, tensor)

    def _broadcast_steps(self, tensor: torch.Tensor, root: int) -> Steps:
        host = next(i for i, ranks in enumerate(self._hosts) if root in ranks)
        flat = flatten(tensor)
        if host == self._host:
            yield from collectives.broadcast(
                self._context.buffers, flat, self._hosts[host].index(root)
            )
        if self._leaders is not None:
            yield from self._leaders.broadcast(flat, host)
        if host != self._host:
            yield from collectives.broadcast(self._context.buffers, flat, 0)
        if self._rank != root:
            copy_back(flat, tensor)

    def _all_gather_steps(self, outputs: Tensors, tensor: torch.Tensor) -> Steps:
        flat = flatten(tensor)
        sizes = [[outputs[rank].numel() for rank in ranks] for ranks in self._hosts]
        blocks = [flat.new_empty(sum(lengths)) for lengths in sizes]
        parts = [torch.split(block, lengths) for block, lengths in zip(blocks, sizes, strict=True)]
        yield from collectives.all_gather(self._context.buffers, parts[self._host], flat)
        if self._leaders is not None:
            yield from self._leaders.all_gather(blocks)
        for host, ranks in enumerate(self._hosts):
            if host != self._host:
                yield from collectives.broadcast(self._context.buffers, blocks[host], 0)
            for rank, part in zip(ranks, parts[host], strict=True):
                outputs[rank].copy_(part.view(outputs[rank].shape))

    def _barrier_steps(self) -> Steps:
        yield from collectives.barrier(self._context.buffers)
        if self._leaders is not None:
            yield from self._leaders.barrier()
        yield from collectives.barrier(self._context.buffers)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Run Gloo's barrier between all ranks; its error names those that did not arrive."""
        self._everyone.group.monitored_barrier(timeout or self.timeout, wait_all_ranks)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time limit of operations that are given none of their own."""
        super().set_timeout(timeout)
        self._everyone.group.set_timeout(timeout)
        if self._leaders is not None:
            self._leaders.connection.group.set_timeout(timeout)

    def _send_or_receive(self, pairs: LazyPairs, name: str, args: tuple[Any, ...]) -> dist.Work:
        if name == "recv_anysource":
            expected = f"a rank to receive from, in a group of {self._size} ranks on several hosts"
            hint = "Ranks of so large a group are connected when two have a message for each other."
            raise ConfigError("src", expected, found="any rank", hint=hint)
        tensors, peer, tag = args
        return (pairs.send if name == "send" else pairs.recv)(list(tensors), peer, tag)


def _over_gloo(name: str) -> Callable[..., Any]:
    def call(self: HierarchicalGroup, *args: Any, **kwargs: Any) -> Any:
        for tensor in _tensors_in([*args, *kwargs.values()]):
            if not tensor.is_cpu:
                raise NotOnCPUError(tensor.device)
        if self._pairs is not None and name in _MESSAGES:
            return self._send_or_receive(self._pairs, name, args)
        return getattr(self._everyone.group, name)(*args, **kwargs)

    call.__name__ = name
    return call


def _tensors_in(arguments: Iterable[object]) -> Iterator[torch.Tensor]:
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from _tensors_in(argument)


def _close_all(connections: Sequence[GlooConnection | LazyPairs]) -> None:
    for connection in connections:
        connection.close()


for _name in _OVER_GLOO:
    setattr(HierarchicalGroup, _name, _over_gloo(_name))
dispatch_by_device(HierarchicalGroup)


def _split(op: Any, dtype: torch.dtype) -> tuple[ReduceFn, Any, bool]:
    """Return the reduction inside a host, c10d's between hosts, and whether to divide by the number
    of ranks.
    """
    code = hash(op)
    if code == int(dist.ReduceOp.RedOpType.AVG):
        return reduce_fn_for(dist.ReduceOp.SUM, dtype), dist.ReduceOp.SUM, True
    if code == int(dist.ReduceOp.RedOpType.PREMUL_SUM):
        return reduce_fn_for(dist.ReduceOp.SUM, dtype), None, False
    return reduce_fn_for(op, dtype), op, False
