"""`shm` as torch.distributed knows a backend: c10d's names for what `Core` does."""

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
from . import moving, reducing
from .arguments import NotOnCPUError, contiguous_for, dense, is_plain, pieces, same_dtype
from .core import Core, limit_of
from .fold import fold_for
from .sparse import all_reduce_sparse
from .state import compiled_code
from .waiting import Steps
from .work import ShmWork

__all__ = ["ShmGroup"]

Tensors = Sequence[torch.Tensor]


@by_device
class ShmGroup(NamedGroup):
    """A process group whose ranks all run on one machine.

    The methods are those that `torch.distributed` calls, with its own arguments. A synchronous call runs in the
    calling thread. All raise ConfigError for arguments that cannot be right, before anything is sent, and
    RankLostError, StallError or TransportError when the others cannot be reached.
    """

    def __init__(self, core: Core, store: Store) -> None:
        super().__init__(core.rank, core.size)
        self._core, self.store = core, store

    # Collectives that reduce

    def allreduce(self, tensors: Tensors, opts: Any = None) -> ShmWork:
        """Reduce each tensor over all ranks, in place; also sparse ones, and half types in float32."""
        opts = opts or dist.AllreduceOptions()
        op, first, state = opts.reduceOp, tensors[0], self._core.arena.state
        if len(tensors) == 1 and not opts.asyncOp:
            code = compiled_code(state, op, first.dtype)
            if code >= 0 and is_plain(first):
                return self._note(self._core.run_sum(first, code, opts))
        if not first.is_cpu:
            raise NotOnCPUError(first.device)
        if first.layout is torch.sparse_coo:
            steps = _chain([all_reduce_sparse(self._core.arena, tensor, op) for tensor in tensors])
            return self._run("all_reduce", steps, opts, tensors)
        folds = [fold_for(op, tensor.dtype) for tensor in tensors]
        plain, codes = dense(tensors), [compiled_code(state, op, tensor.dtype) for tensor in tensors]
        steps = _chain(reducing.all_reduce(self._core.arena, *each) for each in zip(plain, folds, codes, strict=True))
        return self._run("all_reduce", steps, opts, tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any) -> ShmWork:
        """Reduce each tensor over all ranks into the root's."""
        folds = [fold_for(opts.reduceOp, tensor.dtype) for tensor in tensors]
        root, plain = self._root(opts), dense(tensors)
        steps = _chain(reducing.reduce(self._core.arena, t, root, fold) for t, fold in zip(plain, folds, strict=True))
        return self._run("reduce", steps, opts, tensors)

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> ShmWork:
        """Reduce `inputs[t][i]` over all ranks into `outputs[t]` of rank i."""
        opts = opts or dist.ReduceScatterOptions()
        steps = []
        for output, parts in zip(dense(outputs), inputs, strict=True):
            self._count("inputs", parts)
            same_dtype([output, *parts])
            if parts[self._core.rank].numel() != output.numel():
                raise ConfigError("output", f"{parts[self._core.rank].numel()} elements", output.numel())
            fold = fold_for(opts.reduceOp, output.dtype)
            steps.append(reducing.reduce_scatter(self._core.arena, output, dense(parts), fold))
        return self._run("reduce_scatter", _chain(steps), opts, outputs)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> ShmWork:
        """Reduce `tensor` over all ranks; each gets its part of it in `output`."""
        return self.reduce_scatter([output], [pieces(tensor, self._core.size, "input")], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> ShmWork:
        """`reduce_scatter_single` for several tensors."""
        return self.reduce_scatter(outputs, [pieces(tensor, self._core.size, "input") for tensor in inputs], opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # Collectives that only move

    def broadcast(self, tensors: Tensors, opts: Any) -> ShmWork:
        """Copy the root's tensors to every rank."""
        root, plain = self._root(opts), dense(tensors)
        return self._run("broadcast", _chain(moving.broadcast(self._core.arena, t, root) for t in plain), opts, tensors)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> ShmWork:
        """Copy rank i's `inputs[t]` to every rank's `outputs[t][i]`; sizes may differ between ranks."""
        steps = [self._all_gather(parts, tensor) for parts, tensor in zip(outputs, inputs, strict=True)]
        return self._run("all_gather", _chain(steps), opts, [part for parts in outputs for part in parts])

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
            each = self._all_gather(pieces(whole, self._core.size, "output"), tensor)
            steps.append(_then_copy(each, whole, output))
        return self._run("all_gather", _chain(steps), opts, outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _all_gather(self, parts: Tensors, tensor: torch.Tensor) -> Steps:
        self._count("outputs", parts)
        same_dtype([tensor, *parts])
        if parts[self._core.rank].numel() != tensor.numel():
            raise ConfigError("output", f"{tensor.numel()} elements for this rank", parts[self._core.rank].numel())
        return moving.all_gather(self._core.arena, dense(parts), dense([tensor])[0])

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> ShmWork:
        """Copy rank i's tensor to `outputs[0][i]` of the root."""
        root, tensor = self._root(opts), dense(inputs)[0]
        parts = dense(outputs[0]) if self._core.rank == root else []
        if self._core.rank == root:
            self._count("outputs", parts)
            _same_sizes("outputs", parts, tensor)
        return self._run("gather", moving.gather(self._core.arena, parts, tensor, root), opts, parts)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> ShmWork:
        """Copy `inputs[0][i]` of the root to rank i's tensor."""
        root, tensor = self._root(opts), dense(outputs)[0]
        parts = dense(inputs[0]) if self._core.rank == root else []
        if self._core.rank == root:
            self._count("inputs", parts)
            _same_sizes("inputs", parts, tensor)
        return self._run("scatter", moving.scatter(self._core.arena, tensor, parts, root), opts, outputs)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> ShmWork:
        """Copy rank i's `inputs[j]` to rank j's `outputs[i]`; sizes may differ everywhere."""
        self._count("outputs", outputs)
        self._count("inputs", inputs)
        steps = self._all_to_all(outputs, inputs)
        return self._run("all_to_all", steps, opts, outputs)

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
        outputs = pieces(whole, self._core.size, "output", output_splits)
        inputs = pieces(tensor, self._core.size, "input", input_splits)
        steps = _then_copy(self._all_to_all(outputs, inputs), whole, output)
        return self._run("all_to_all", steps, opts, [output])

    alltoall_base = all_to_all_single

    def _all_to_all(self, outputs: Tensors, inputs: Tensors) -> Steps:
        same_dtype([*outputs, *inputs])
        own, wanted = inputs[self._core.rank].numel(), outputs[self._core.rank].numel()
        if own != wanted:
            raise ConfigError("output", f"{own} elements from this rank itself", wanted)
        return moving.all_to_all(self._core.arena, dense(outputs), dense(inputs))

    def barrier(self, opts: Any = None) -> ShmWork:
        """Return when every rank has come here."""
        return self._run("barrier", moving.barrier(self._core.arena), opts, [])

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier; its StallError names all ranks that did not arrive, whatever `wait_all_ranks` says."""
        self._core.run(
            "barrier", moving.barrier(self._core.arena), False, timeout.total_seconds() if timeout else None, []
        )

    # Messages

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> ShmWork:
        """Send a tensor to `dst`; it is done when the message is in shared memory, received or not."""
        return self._note(self._core.send(dense(tensors)[0], self._peer("dst", dst), tag))

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> ShmWork:
        """Receive the next message from `src` with `tag`."""
        return self._note(self._core.receive(dense(tensors)[0], self._peer("src", src), tag))

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> ShmWork:
        """Receive the next message with `tag`, whoever sent it."""
        return self._note(self._core.receive(dense(tensors)[0], None, tag))

    # The group itself

    def set_timeout(self, timeout: timedelta) -> None:
        """Let operations take this long, unless they are given a limit of their own."""
        self._core.timeout = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        """How long an operation may take."""
        return timedelta(seconds=self._core.timeout)

    def shutdown(self) -> None:
        """Leave the group; what waits for this rank ends with an error."""
        self._core.close()

    def abort(self) -> None:
        """Give up: every wait of the other ranks ends with an error."""
        self._core.fail("the group has been aborted")

    def _run(self, what: str, steps: Steps, opts: Any, result: Tensors) -> ShmWork:
        asynchronous = True if opts is None else opts.asyncOp
        return self._note(self._core.run(what, steps, asynchronous, limit_of(opts), list(result)))

    def _root(self, opts: Any) -> int:
        return self._peer("root", opts.rootRank, self_too=True)

    def _peer(self, argument: str, rank: int, self_too: bool = False) -> int:
        if not 0 <= rank < self._core.size or (rank == self._core.rank and not self_too):
            other = "" if self_too else f" other than this one ({self._core.rank})"
            raise ConfigError(argument, f"a rank{other} from 0 to {self._core.size - 1}", rank)
        return rank

    def _count(self, argument: str, parts: Tensors) -> None:
        if len(parts) != self._core.size:
            raise ConfigError(argument, f"{self._core.size} tensors, one for each rank", len(parts))


def _same_sizes(argument: str, parts: Tensors, tensor: torch.Tensor) -> None:
    same_dtype([tensor, *parts])
    for part in parts:
        if part.numel() != tensor.numel():
            raise ConfigError(argument, f"{tensor.numel()} elements in each, as in this rank's tensor", part.numel())


def _then_copy(steps: Steps, whole: torch.Tensor, output: torch.Tensor) -> Steps:
    yield from steps
    if whole.data_ptr() != output.data_ptr():
        output.detach().copy_(whole)


def _chain(parts: Iterable[Steps]) -> Steps:
    for part in parts:
        yield from part
