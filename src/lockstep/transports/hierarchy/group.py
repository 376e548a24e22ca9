"""`shm` for ranks on several machines: shared memory inside a machine, Gloo between them."""

# torch's stubs give each of these methods another signature than the one it is called with
# mypy: disable-error-code="override,assignment,attr-defined,call-arg,arg-type,no-any-return"

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ...errors import ConfigError
from ..c10d import Store
from ..devices import NAMES, by_device
from ..named import NamedGroup
from ..shm import moving, reducing
from ..shm.arguments import NotOnCPUError, contiguous_for, dense, pieces, same_dtype
from ..shm.core import Core
from ..shm.fold import factor_of, fold_for
from ..shm.waiting import Steps
from ..shm.work import ShmWork
from .between import Leaders
from .connection import Connection
from .pairs import Pairs

__all__ = ["HierarchicalGroup"]

Tensors = Sequence[torch.Tensor]
_MESSAGES = ("send", "recv", "recv_anysource")
_WIDENED = (torch.float16, torch.bfloat16)


class HierarchicalGroup(NamedGroup):
    """A process group of several machines.

    All-reduce, broadcast, all-gather of equal parts and barrier go through shared memory to the first rank of each
    machine, over Gloo between those, and back. Everything else is Gloo's, between all ranks. Where `everyone` is lazy,
    these are connected two by two: by the collectives that need it, and by their first message.

    Args:
        core: the ranks of this machine.
        store: where all ranks meet.
        leaders: the connection between the machines, on the first rank of each; None on the others.
        everyone: all ranks, connected by Gloo.
        hosts: the ranks of each machine.
    """

    def __init__(
        self,
        core: Core,
        store: Store,
        leaders: Leaders | None,
        everyone: Connection,
        hosts: list[list[int]],
    ) -> None:
        super().__init__(everyone.rank, everyone.size)
        self._core, self.store = core, store
        self._leaders, self._everyone, self._hosts = leaders, everyone, hosts
        self._machine = next(i for i, ranks in enumerate(hosts) if everyone.rank in ranks)
        self._pairs = Pairs(core, store, everyone.rank, timedelta(seconds=core.timeout)) if everyone.is_lazy else None
        ways = [each for each in (leaders and leaders.connection, everyone, self._pairs) if each is not None]
        core.on_end = functools.partial(_hang_up, ways)

    def allreduce(self, tensors: Tensors, opts: Any = None) -> ShmWork | dist.Work:
        """Sums as `ShmGroup.allreduce` does, except that machines are added in Gloo's order."""
        opts = opts or dist.AllreduceOptions()
        if not tensors[0].is_cpu:
            raise NotOnCPUError(tensors[0].device)
        if tensors[0].layout is not torch.strided:
            return self._everyone.group.allreduce(list(tensors), opts)
        for tensor in tensors:
            fold_for(opts.reduceOp, tensor.dtype)
        return self._run("all_reduce", (self._all_reduce(t, opts.reduceOp) for t in dense(tensors)), opts, tensors)

    def broadcast(self, tensors: Tensors, opts: Any) -> ShmWork:
        """Copy the root's tensors to every rank."""
        if not 0 <= opts.rootRank < self.size():
            raise ConfigError("root", f"a rank from 0 to {self.size() - 1}", opts.rootRank)
        steps = (self._broadcast(tensor, opts.rootRank) for tensor in dense(tensors))
        return self._run("broadcast", steps, opts, tensors)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> ShmWork | dist.Work:
        """Copy rank i's `inputs[t]` to every rank's `outputs[t][i]`; sizes may differ between ranks."""
        pairs = [(dense(parts), tensor) for parts, tensor in zip(outputs, dense(inputs), strict=True)]
        for parts, tensor in pairs:
            same_dtype([tensor, *parts])
            if len(parts) != self.size():
                raise ConfigError("outputs", f"{self.size()} tensors, one for each rank", len(parts))
            if parts[self.rank()].numel() != tensor.numel():
                raise ConfigError("output", f"{tensor.numel()} elements for this rank", parts[self.rank()].numel())
        steps = (self._all_gather(parts, tensor) for parts, tensor in pairs)
        return self._run("all_gather", steps, opts, [part for parts in outputs for part in parts])

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> ShmWork | dist.Work:
        """Copy rank i's `inputs[t]` to every rank's `outputs[i][t]`."""
        return self.allgather(list(zip(*outputs, strict=True)), dense(inputs), opts)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> ShmWork | dist.Work:
        """Copy every rank's tensor into its part of `output`."""
        return self.all_gather_single_coalesced(dense([output]), dense([tensor]), opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> ShmWork | dist.Work:
        """`all_gather_single` for several tensors."""
        steps = []
        for output, tensor in zip(dense(outputs), dense(inputs), strict=True):
            same_dtype([output, tensor])
            if output.numel() != tensor.numel() * self.size():
                raise ConfigError("output", f"{tensor.numel() * self.size()} elements", output.numel())
            steps.append(self._all_gather_single(contiguous_for(output), output, tensor))
        return self._run("all_gather", steps, opts, outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced
    allreduce_coalesced = allreduce

    def barrier(self, opts: Any = None) -> ShmWork:
        """Return when every rank of every machine has come here."""
        return self._run("barrier", (self._barrier() for _ in range(1)), opts, [])

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Gloo's, between all ranks; its error names those that did not arrive."""
        self._everyone.group.monitored_barrier(timeout or self.timeout, wait_all_ranks)

    def set_timeout(self, timeout: timedelta) -> None:
        """Let operations take this long, unless they are given a limit of their own."""
        self._core.timeout = timeout.total_seconds()
        self._everyone.group.set_timeout(timeout)
        if self._leaders is not None:
            self._leaders.connection.group.set_timeout(timeout)

    def allreduce_unwatched(self, tensors: Tensors, opts: Any) -> ShmWork:
        """As `allreduce` of a tensor on the CPU, for a call that is none of the program's."""
        steps = _chain(self._all_reduce(tensor, opts.reduceOp) for tensor in tensors)
        return self._core.run("all_reduce", steps, opts.asyncOp, None, list(tensors))

    @property
    def timeout(self) -> timedelta:
        """How long an operation may take."""
        return timedelta(seconds=self._core.timeout)

    def shutdown(self) -> None:
        """Leave the group."""
        self._core.close()

    def abort(self) -> None:
        """Give up: the waits of the other ranks of this machine end with an error."""
        self._core.fail("the group has been aborted")

    def _message(self, pairs: Pairs, name: str, args: tuple[Any, ...]) -> dist.Work:
        if name == "recv_anysource":
            expected = f"a rank to receive from, in a group of {self.size()} ranks on several machines"
            hint = "Ranks of so large a group are connected when two have a message for each other."
            raise ConfigError("src", expected, found="any rank", hint=hint)
        tensors, peer, tag = args
        return (pairs.send if name == "send" else pairs.recv)(list(tensors), peer, tag)

    def _run(self, what: str, steps: Iterable[Steps], opts: Any, result: Tensors) -> ShmWork:
        seconds = opts.timeout.total_seconds() if opts is not None else 0
        asynchronous = True if opts is None else opts.asyncOp
        work = self._core.run(what, _chain(steps), asynchronous, seconds if seconds > 0 else None, list(result))
        return self._note(work)

    def _all_reduce(self, tensor: torch.Tensor, op: Any) -> Steps:
        flat = moving.flat_of(tensor)
        wide = flat.float() if flat.dtype in _WIDENED else flat
        inside, between, then = _split(op, wide.dtype)
        if between is None:  # PREMUL_SUM: the factor is for every rank's own value
            wide = wide * factor_of(op)
        yield from reducing.reduce(self._core.arena, wide, 0, inside)
        if self._leaders is not None and wide.numel():
            yield from self._leaders.all_reduce(wide, between or dist.ReduceOp.SUM, inside)
            if then:
                wide.div_(self.size())
        yield from moving.broadcast(self._core.arena, wide, 0)
        if wide is not flat:
            flat.copy_(wide)
        moving.put_back(flat, tensor)

    def _broadcast(self, tensor: torch.Tensor, root: int) -> Steps:
        machine = next(i for i, ranks in enumerate(self._hosts) if root in ranks)
        flat = moving.flat_of(tensor)
        if machine == self._machine:
            yield from moving.broadcast(self._core.arena, flat, self._hosts[machine].index(root))
        if self._leaders is not None:
            yield from self._leaders.broadcast(flat, machine)
        if machine != self._machine:
            yield from moving.broadcast(self._core.arena, flat, 0)
        if self.rank() != root:
            moving.put_back(flat, tensor)

    def _all_gather(self, outputs: Tensors, tensor: torch.Tensor) -> Steps:
        flat = moving.flat_of(tensor)
        sizes = [[outputs[rank].numel() for rank in ranks] for ranks in self._hosts]
        blocks = [flat.new_empty(sum(lengths)) for lengths in sizes]
        parts = [torch.split(block, lengths) for block, lengths in zip(blocks, sizes, strict=True)]
        yield from moving.all_gather(self._core.arena, parts[self._machine], flat)
        if self._leaders is not None:
            yield from self._leaders.all_gather(blocks)
        for machine, ranks in enumerate(self._hosts):
            if machine != self._machine:
                yield from moving.broadcast(self._core.arena, blocks[machine], 0)
            for rank, part in zip(ranks, parts[machine], strict=True):
                outputs[rank].copy_(part.view(outputs[rank].shape))

    def _all_gather_single(self, whole: torch.Tensor, output: torch.Tensor, tensor: torch.Tensor) -> Steps:
        yield from self._all_gather(pieces(whole, self.size(), "output"), tensor)
        moving.put_back(whole.view(-1), output)

    def _barrier(self) -> Steps:
        yield from moving.barrier(self._core.arena)
        if self._leaders is not None:
            yield from self._leaders.barrier()
        yield from moving.barrier(self._core.arena)


def _over_gloo(name: str) -> Callable[..., Any]:
    def call(self: HierarchicalGroup, *args: Any, **kwargs: Any) -> Any:
        for tensor in _tensors_in([*args, *kwargs.values()]):
            if not tensor.is_cpu:
                raise NotOnCPUError(tensor.device)
        if self._pairs is not None and name in _MESSAGES:
            return self._message(self._pairs, name, args)
        return getattr(self._everyone.group, name)(*args, **kwargs)

    call.__name__ = name
    return call


def _tensors_in(arguments: Iterable[object]) -> Iterator[torch.Tensor]:
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from _tensors_in(argument)


def _hang_up(connections: Sequence[Connection | Pairs]) -> None:
    for connection in connections:
        connection.close()


for _name in NAMES:
    if _name not in vars(HierarchicalGroup):
        setattr(HierarchicalGroup, _name, _over_gloo(_name))
by_device(HierarchicalGroup)


def _split(op: Any, dtype: torch.dtype) -> tuple[Any, Any, bool]:
    """The fold inside a machine, the operation between machines, and whether to divide by the number of ranks then."""
    code = hash(op)
    if code == int(dist.ReduceOp.RedOpType.AVG):
        return fold_for(dist.ReduceOp.SUM, dtype), dist.ReduceOp.SUM, True
    if code == int(dist.ReduceOp.RedOpType.PREMUL_SUM):
        return fold_for(dist.ReduceOp.SUM, dtype), None, False
    return fold_for(op, dtype), op, False


def _chain(parts: Iterable[Steps]) -> Steps:
    for part in parts:
        yield from part
