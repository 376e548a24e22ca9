"""`mpi4py` as torch.distributed knows a backend: c10d's names for what `Link` does."""

# torch's stubs give each of these methods another signature than the one it is called with
# mypy: disable-error-code="override,assignment,attr-defined,call-arg,arg-type,no-any-return"

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ...errors import ConfigError
from ..c10d import Store
from ..devices import by_device
from ..named import NamedGroup
from ..shm.arguments import NotOnCPUError, contiguous_for, dense, pieces, same_dtype
from ..shm.core import limit_of
from ..shm.moving import put_back
from ..shm.waiting import Steps
from ..shm.work import ShmWork
from . import moving, reducing
from .link import Link
from .reducing import reduction_for
from .sparse import all_reduce_sparse

__all__ = ["MpiGroup"]

Tensors = Sequence[torch.Tensor]


@by_device
class MpiGroup(NamedGroup):
    """A process group whose ranks are processes of one MPI job.

    The methods are those that `torch.distributed` calls, with its own arguments. All raise ConfigError for arguments
    that cannot be right, before anything is sent, StallError when the others do not come in time, and TransportError
    when MPI fails.
    """

    backend = "mpi4py"

    def __init__(self, link: Link, store: Store) -> None:
        super().__init__(link.rank, link.size)
        self._link, self.store = link, store

    # Collectives that reduce

    def allreduce(self, tensors: Tensors, opts: Any = None) -> ShmWork:
        """Reduce each tensor over all ranks, in place; also sparse ones, and half types in float32."""
        opts = opts or dist.AllreduceOptions()
        comm, op = self._link.comm, opts.reduceOp
        if not tensors[0].is_cpu:
            raise NotOnCPUError(tensors[0].device)
        if tensors[0].layout is torch.sparse_coo:
            return self._run("all_reduce", [all_reduce_sparse(comm, tensor, op) for tensor in tensors], opts, tensors)
        reductions = [reduction_for(op, tensor.dtype) for tensor in tensors]
        pairs = zip(dense(tensors), reductions, strict=True)
        return self._run("all_reduce", [reducing.all_reduce(comm, *pair) for pair in pairs], opts, tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any) -> ShmWork:
        """Reduce each tensor over all ranks into the root's."""
        comm, root = self._link.comm, self._root(opts)
        reductions = [reduction_for(opts.reduceOp, tensor.dtype) for tensor in tensors]
        pairs = zip(dense(tensors), reductions, strict=True)
        return self._run("reduce", [reducing.reduce(comm, t, root, r) for t, r in pairs], opts, tensors)

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> ShmWork:
        """Reduce `inputs[t][i]` over all ranks into `outputs[t]` of rank i."""
        opts = opts or dist.ReduceScatterOptions()
        steps = []
        for output, parts in zip(dense(outputs), inputs, strict=True):
            self._count("inputs", parts)
            same_dtype([output, *parts])
            if parts[self._link.rank].numel() != output.numel():
                raise ConfigError("output", f"{parts[self._link.rank].numel()} elements", output.numel())
            reduction = reduction_for(opts.reduceOp, output.dtype)
            steps.append(reducing.reduce_scatter(self._link.comm, output, dense(parts), reduction))
        return self._run("reduce_scatter", steps, opts, outputs)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> ShmWork:
        """Reduce `tensor` over all ranks; each gets its part of it in `output`."""
        return self.reduce_scatter([output], [pieces(tensor, self._link.size, "input")], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> ShmWork:
        """`reduce_scatter_single` for several tensors."""
        return self.reduce_scatter(outputs, [pieces(tensor, self._link.size, "input") for tensor in inputs], opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # Collectives that only move

    def broadcast(self, tensors: Tensors, opts: Any) -> ShmWork:
        """Copy the root's tensors to every rank."""
        comm, root = self._link.comm, self._root(opts)
        return self._run("broadcast", [moving.broadcast(comm, t, root) for t in dense(tensors)], opts, tensors)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> ShmWork:
        """Copy rank i's `inputs[t]` to every rank's `outputs[t][i]`; sizes may differ between ranks."""
        steps = [self._all_gather(parts, tensor) for parts, tensor in zip(outputs, inputs, strict=True)]
        return self._run("all_gather", steps, opts, [part for parts in outputs for part in parts])

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> ShmWork:
        """Copy rank i's `inputs[t]` to every rank's `outputs[i][t]`."""
        self._count("outputs", outputs)
        return self.allgather(list(zip(*outputs, strict=True)), dense(inputs), opts)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> ShmWork:
        """Copy every rank's `tensor` into its part of `output`."""
        return self.all_gather_single_coalesced(dense([output]), dense([tensor]), opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> ShmWork:
        """`all_gather_single` for several tensors."""
        steps = []
        for output, tensor in zip(dense(outputs), inputs, strict=True):
            whole = contiguous_for(output)
            each = self._all_gather(pieces(whole, self._link.size, "output"), tensor)
            steps.append(_then_copy(each, whole, output))
        return self._run("all_gather", steps, opts, outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _all_gather(self, parts: Tensors, tensor: torch.Tensor) -> Steps:
        self._count("outputs", parts)
        same_dtype([tensor, *parts])
        if parts[self._link.rank].numel() != tensor.numel():
            raise ConfigError("output", f"{tensor.numel()} elements for this rank", parts[self._link.rank].numel())
        return moving.all_gather(self._link.comm, dense(parts), dense([tensor])[0])

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> ShmWork:
        """Copy rank i's tensor to `outputs[0][i]` of the root."""
        comm, root, tensor = self._link.comm, self._root(opts), dense(inputs)[0]
        parts = self._parts("outputs", outputs, tensor) if self._link.rank == root else []
        return self._run("gather", [moving.gather(comm, parts, tensor, root)], opts, parts)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> ShmWork:
        """Copy `inputs[0][i]` of the root to rank i's tensor."""
        comm, root, tensor = self._link.comm, self._root(opts), dense(outputs)[0]
        parts = self._parts("inputs", inputs, tensor) if self._link.rank == root else []
        return self._run("scatter", [moving.scatter(comm, tensor, parts, root)], opts, outputs)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> ShmWork:
        """Copy rank i's `inputs[j]` to rank j's `outputs[i]`; sizes may differ everywhere."""
        self._count("outputs", outputs)
        self._count("inputs", inputs)
        return self._run("all_to_all", [self._all_to_all(outputs, inputs)], opts, outputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> ShmWork:
        """`alltoall` of the parts of two tensors, divided along the first dimension, evenly without splits."""
        whole = contiguous_for(dense([output])[0])
        outputs = pieces(whole, self._link.size, "output", output_splits)
        inputs = pieces(tensor, self._link.size, "input", input_splits)
        steps = _then_copy(self._all_to_all(outputs, inputs), whole, output)
        return self._run("all_to_all", [steps], opts, [output])

    alltoall_base = all_to_all_single

    def _all_to_all(self, outputs: Tensors, inputs: Tensors) -> Steps:
        same_dtype([*outputs, *inputs])
        own, wanted = inputs[self._link.rank].numel(), outputs[self._link.rank].numel()
        if own != wanted:
            raise ConfigError("output", f"{own} elements from this rank itself", wanted)
        return moving.all_to_all(self._link.comm, dense(outputs), dense(inputs))

    def barrier(self, opts: Any = None) -> ShmWork:
        """Return when every rank has come here."""
        return self._run("barrier", [moving.barrier(self._link.comm)], opts, [])

    # Messages

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> ShmWork:
        """Send a tensor to `dst`; it is done when the tensor may be written to again."""
        return self._note(self._link.send(dense(tensors)[0], self._peer("dst", dst), tag))

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> ShmWork:
        """Receive the next message from `src` with `tag`."""
        return self._note(self._link.receive(dense(tensors)[0], self._peer("src", src), tag))

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> ShmWork:
        """Receive the next message with `tag`, whoever sent it."""
        return self._note(self._link.receive(dense(tensors)[0], None, tag))

    # The group itself

    def set_timeout(self, timeout: timedelta) -> None:
        """Let operations take this long, unless they are given a limit of their own."""
        self._link.timeout = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        """How long an operation may take."""
        return timedelta(seconds=self._link.timeout)

    def shutdown(self) -> None:
        """Leave the group; what is under way here ends with an error."""
        self._link.close()

    def abort(self) -> None:
        """Give up the group on this rank."""
        self._link.fail("the group has been aborted")

    def _run(self, what: str, steps: Iterable[Steps], opts: Any, result: Tensors) -> ShmWork:
        asynchronous = True if opts is None else opts.asyncOp
        return self._note(self._link.run(what, _chain(steps), asynchronous, limit_of(opts), list(result)))

    def _root(self, opts: Any) -> int:
        return self._peer("root", opts.rootRank, self_too=True)

    def _peer(self, argument: str, rank: int, self_too: bool = False) -> int:
        if not 0 <= rank < self._link.size or (rank == self._link.rank and not self_too):
            other = "" if self_too else f" other than this one ({self._link.rank})"
            raise ConfigError(argument, f"a rank{other} from 0 to {self._link.size - 1}", rank)
        return rank

    def _count(self, argument: str, parts: Sequence[object]) -> None:
        if len(parts) != self._link.size:
            raise ConfigError(argument, f"{self._link.size} tensors, one for each rank", len(parts))

    def _parts(self, argument: str, lists: Sequence[Tensors], tensor: torch.Tensor) -> list[torch.Tensor]:
        parts = dense(lists[0])
        self._count(argument, parts)
        same_dtype([tensor, *parts])
        for part in parts:
            if part.numel() != tensor.numel():
                wanted = f"{tensor.numel()} elements in each, as in this rank's tensor"
                raise ConfigError(argument, wanted, part.numel())
        return parts


def _then_copy(steps: Steps, whole: torch.Tensor, output: torch.Tensor) -> Steps:
    yield from steps
    put_back(whole, output.detach())


def _chain(parts: Iterable[Steps]) -> Steps:
    for part in parts:
        yield from part
