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
from . import moving, reducing
from .arguments import NotOnCPUError, dense, pieces, same_dtype
from .core import Core, limit_of
from .fold import fold_for
from .sparse import all_reduce_sparse
from .state import compiled_code
from .waiting import Steps
from .work import ShmWork

__all__ = ["ShmGroup"]

Tensors = Sequence[torch.Tensor]


@by_device
class ShmGroup(dist.ProcessGroup):
    """A process group whose ranks all run on one machine.

    The methods are those that `torch.distributed` calls, with its own arguments. A synchronous call runs in the
    calling thread. All raise ConfigError for arguments that cannot be right, before anything is sent, and
    RankLostError, StallError or TransportError when the others cannot be reached.
    """

    def __init__(self, core: Core, store: Store) -> None:
        super().__init__(core.rank, core.size)
        self._core, self._arena, self.store = core, core.arena, store
        self._batch: list[ShmWork] | None = None

    def getBackendName(self) -> str:  # noqa: N802 - c10d's name
        """The name that `init_process_group` knows."""
        return "shm"

    # Collectives that reduce

    def allreduce(self, tensors: Tensors, opts: Any = None) -> ShmWork:
        """Reduce each tensor over all ranks, in place; also sparse ones, and half types in float32."""
        opts = opts or dist.AllreduceOptions()
        op, first = opts.reduceOp, tensors[0]
        codes = [compiled_code(op, tensor.dtype) for tensor in tensors]
        if len(codes) == 1 and codes[0] >= 0 and not opts.asyncOp and _is_plain(first):
            return self._note(self._core.run_sum(first, codes[0], opts))
        if not first.is_cpu:
            raise NotOnCPUError(first.device)
        if first.layout is torch.sparse_coo:
            steps = _chain(all_reduce_sparse(self._arena, tensor, op) for tensor in tensors)
            return self._run("all_reduce", steps, opts, tensors)
        folds = [fold_for(op, tensor.dtype) for tensor in tensors]
        plain = dense(tensors)
        steps = _chain(reducing.all_reduce(self._arena, *each) for each in zip(plain, folds, codes, strict=True))
        return self._run("all_reduce", steps, opts, tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any) -> ShmWork:
        """Reduce each tensor over all ranks into the root's."""
        folds = [fold_for(opts.reduceOp, tensor.dtype) for tensor in tensors]
        root, plain = self._root(opts), dense(tensors)
        steps = _chain(reducing.reduce(self._arena, t, root, fold) for t, fold in zip(plain, folds, strict=True))
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
            steps.append(reducing.reduce_scatter(self._arena, output, dense(parts), fold))
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
        return self._run("broadcast", _chain(moving.broadcast(self._arena, t, root) for t in plain), opts, tensors)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> ShmWork:
        """Copy rank i's `inputs[t]` to every rank's `outputs[t][i]`; sizes may differ between ranks."""
        steps = []
        for parts, tensor in zip(outputs, dense(inputs), strict=True):
            self._count("outputs", parts)
            same_dtype([tensor, *parts])
            if parts[self._core.rank].numel() != tensor.numel():
                raise ConfigError("output", f"{tensor.numel()} elements for this rank", parts[self._core.rank].numel())
            steps.append(moving.all_gather(self._arena, dense(parts), tensor))
        return self._run("all_gather", _chain(steps), opts, [part for parts in outputs for part in parts])

    allgather_coalesced = allgather

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> ShmWork:
        """Copy every rank's `tensor` into its part of `output`."""
        return self.all_gather_single_coalesced([output], [tensor], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> ShmWork:
        """`all_gather_single` for several tensors."""
        parts = [pieces(output, self._core.size, "output") for output in outputs]
        return self.allgather(parts, inputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> ShmWork:
        """Copy rank i's tensor to `outputs[0][i]` of the root."""
        root, tensor = self._root(opts), dense(inputs)[0]
        parts = dense(outputs[0]) if self._core.rank == root else []
        if self._core.rank == root:
            self._count("outputs", parts)
            _same_sizes("outputs", parts, tensor)
        return self._run("gather", moving.gather(self._arena, parts, tensor, root), opts, parts)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> ShmWork:
        """Copy `inputs[0][i]` of the root to rank i's tensor."""
        root, tensor = self._root(opts), dense(outputs)[0]
        parts = dense(inputs[0]) if self._core.rank == root else []
        if self._core.rank == root:
            self._count("inputs", parts)
            _same_sizes("inputs", parts, tensor)
        return self._run("scatter", moving.scatter(self._arena, tensor, parts, root), opts, outputs)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> ShmWork:
        """Copy rank i's `inputs[j]` to rank j's `outputs[i]`; sizes may differ everywhere."""
        self._count("outputs", outputs)
        self._count("inputs", inputs)
        same_dtype([*outputs, *inputs])
        steps = moving.all_to_all(self._arena, dense(outputs), dense(inputs))
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
        outputs = pieces(output, self._core.size, "output", output_splits)
        inputs = pieces(tensor, self._core.size, "input", input_splits)
        same_dtype([output, tensor])
        steps = moving.all_to_all(self._arena, outputs, inputs)
        return self._run("all_to_all", steps, opts, [output])

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> ShmWork:
        """Return when every rank has come here."""
        return self._run("barrier", moving.barrier(self._arena), opts, [])

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier; its StallError names all ranks that did not arrive, whatever `wait_all_ranks` says."""
        self._core.run("barrier", moving.barrier(self._arena), False, timeout.total_seconds() if timeout else None, [])

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

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        self._batch = []

    def _end_coalescing(self, device: torch.device | None = None) -> ShmWork:
        works, self._batch = self._batch or [], None
        return ShmWork.all_of(works)

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

    def _note(self, work: ShmWork) -> ShmWork:
        if self._batch is not None:
            self._batch.append(work)
        return work

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


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the bytes of `tensor` are its elements in order, and there are any."""
    return tensor.is_cpu and tensor.layout is torch.strided and tensor.is_contiguous() and tensor.numel() > 0


def _chain(parts: Iterable[Steps]) -> Steps:
    for part in parts:
        yield from part
