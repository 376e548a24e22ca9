"""`shm` as torch.distributed knows a backend: c10d's names for what `Core` does."""

# torch's stubs give each of these methods another signature than the one it is called with
# mypy: disable-error-code="override,assignment,attr-defined,call-arg,arg-type,no-any-return"

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..c10d import Store
from ..devices import by_device
from . import moving, reducing, signs
from .arguments import NotOnCPUError, contiguous_for, dense, pieces, same_dtype
from .checked import CheckedGroup
from .core import Core
from .fold import fold_for
from .sparse import all_reduce_sparse
from .waiting import Steps
from .work import ShmWork

__all__ = ["ShmGroup"]

Tensors = Sequence[torch.Tensor]


@by_device
class ShmGroup(CheckedGroup):
    """A process group whose ranks all run on one machine.

    The methods are those that `torch.distributed` calls, with its own arguments. A synchronous call runs in the
    calling thread. All raise ConfigError for arguments that cannot be right, before anything is sent, and
    RankLostError, StallError or TransportError when the others cannot be reached.
    """

    moves_any_dtype = True

    def __init__(self, core: Core, store: Store) -> None:
        super().__init__(core)
        self.store = store

    # Collectives that reduce

    def allreduce(self, tensors: Tensors, opts: Any = None) -> ShmWork:
        """Reduce each tensor over all ranks, in place; also sparse ones, and half types in float32."""
        opts = opts or dist.AllreduceOptions()
        op, first = opts.reduceOp, tensors[0]
        if len(tensors) == 1:
            done = self._at_once(signs.ALL_REDUCE, opts, tensors, tensors, code=self._code(op, first))
            if done is not None:
                return done
        if not first.is_cpu:
            raise NotOnCPUError(first.device)
        arena = self._core.arena
        if first.layout is torch.sparse_coo:
            steps = _chain([all_reduce_sparse(arena, tensor, op) for tensor in tensors])
            return self._run("all_reduce", steps, opts, tensors)
        folds = [fold_for(op, tensor.dtype) for tensor in tensors]
        plain, codes = dense(tensors), [self._code(op, tensor) for tensor in tensors]
        steps = _chain(reducing.all_reduce(arena, *each) for each in zip(plain, folds, codes, strict=True))
        return self._run("all_reduce", steps, opts, tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any) -> ShmWork:
        """Reduce each tensor over all ranks into the root's."""
        root, op = self._root(opts), opts.reduceOp
        if len(tensors) == 1:
            done = self._at_once(signs.REDUCE, opts, tensors, tensors, root, self._code(op, tensors[0]))
            if done is not None:
                return done
        folds = [(fold_for(op, tensor.dtype), self._code(op, tensor)) for tensor in tensors]
        steps = [
            reducing.reduce(self._core.arena, tensor, root, *fold)
            for tensor, fold in zip(dense(tensors), folds, strict=True)
        ]
        return self._run("reduce", _chain(steps), opts, tensors)

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> ShmWork:
        """Reduce `inputs[t][i]` over all ranks into `outputs[t]` of rank i."""
        opts = opts or dist.ReduceScatterOptions()
        op = opts.reduceOp
        for output, parts in zip(outputs, inputs, strict=True):
            self._fit("inputs", parts, "output", output)
        if len(outputs) == 1:
            code = self._code(op, outputs[0])
            done = self._at_once(signs.REDUCE_SCATTER, opts, inputs[0], outputs, code=code)
            if done is not None:
                return done
        steps = []
        for output, parts in zip(dense(outputs), inputs, strict=True):
            fold = fold_for(op, output.dtype), self._code(op, output)
            steps.append(reducing.reduce_scatter(self._core.arena, output, dense(parts), *fold))
        return self._run("reduce_scatter", _chain(steps), opts, outputs)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> ShmWork:
        """Reduce `tensor` over all ranks; each gets its part of it in `output`."""
        if self._divides(tensor, output) and opts is not None:
            code = self._code(opts.reduceOp, output)
            done = self._at_once(signs.REDUCE_SCATTER, opts, (tensor,), (output,), code=code)
            if done is not None:
                return done
        return self.reduce_scatter([output], [pieces(tensor, self._core.size, "input")], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> ShmWork:
        """`reduce_scatter_single` for several tensors."""
        return self.reduce_scatter(outputs, [pieces(tensor, self._core.size, "input") for tensor in inputs], opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # Collectives that only move

    def broadcast(self, tensors: Tensors, opts: Any) -> ShmWork:
        """Copy the root's tensors to every rank."""
        root = self._root(opts)
        if len(tensors) == 1:
            done = self._at_once(signs.BROADCAST, opts, tensors, tensors, root)
            if done is not None:
                return done
        steps = _chain(moving.broadcast(self._core.arena, tensor, root) for tensor in dense(tensors))
        return self._run("broadcast", steps, opts, tensors)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> ShmWork:
        """Copy rank i's `inputs[t]` to every rank's `outputs[t][i]`; sizes may differ between ranks."""
        for parts, tensor in zip(outputs, inputs, strict=True):
            self._fit("outputs", parts, "input", tensor)
        if len(inputs) == 1:
            done = self._at_once(signs.ALL_GATHER, opts, inputs, outputs[0])
            if done is not None:
                return done
        steps = [
            moving.all_gather(self._core.arena, dense(parts), tensor)
            for parts, tensor in zip(outputs, dense(inputs), strict=True)
        ]
        return self._run("all_gather", _chain(steps), opts, [part for parts in outputs for part in parts])

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> ShmWork:
        """Copy rank i's `inputs[t]` to every rank's `outputs[i][t]`."""
        self._count("outputs", outputs)
        return self.allgather(list(zip(*outputs, strict=True)), dense(inputs), opts)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> ShmWork:
        """Copy every rank's `tensor` into its part of `output`."""
        if self._divides(output, tensor):
            done = self._at_once(signs.ALL_GATHER, opts, (tensor,), (output,))
            if done is not None:
                return done
        return self.all_gather_single_coalesced(dense([output]), dense([tensor]), opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> ShmWork:
        """`all_gather_single` for several tensors."""
        steps = []
        for output, tensor in zip(dense(outputs), dense(inputs), strict=True):
            whole = contiguous_for(output)
            parts = pieces(whole, self._core.size, "output")
            self._fit("outputs", parts, "input", tensor)
            steps.append(_then_copy(moving.all_gather(self._core.arena, parts, tensor), whole, output))
        return self._run("all_gather", _chain(steps), opts, outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> ShmWork:
        """Copy rank i's tensor to `outputs[0][i]` of the root."""
        root, parts = self._root(opts), []
        if self._core.rank == root:
            parts = list(outputs[0])
            self._fit("outputs", parts, "input", inputs[0], all_equal=True)
        done = self._at_once(signs.GATHER, opts, inputs, parts, root)
        if done is not None:
            return done
        steps = moving.gather(self._core.arena, dense(parts), dense(inputs)[0], root)
        return self._run("gather", steps, opts, parts)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> ShmWork:
        """Copy `inputs[0][i]` of the root to rank i's tensor."""
        root, parts = self._root(opts), []
        if self._core.rank == root:
            parts = list(inputs[0])
            self._fit("inputs", parts, "output", outputs[0], all_equal=True)
        done = self._at_once(signs.SCATTER, opts, parts, outputs, root)
        if done is not None:
            return done
        steps = moving.scatter(self._core.arena, dense(outputs)[0], dense(parts), root)
        return self._run("scatter", steps, opts, outputs)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> ShmWork:
        """Copy rank i's `inputs[j]` to rank j's `outputs[i]`; sizes may differ everywhere."""
        self._count("outputs", outputs)
        self._fit("inputs", inputs, "output", outputs[self._core.rank])
        same_dtype([*outputs, *inputs])
        done = self._at_once(signs.ALL_TO_ALL, opts, inputs, outputs)
        if done is not None:
            return done
        steps = moving.all_to_all(self._core.arena, dense(outputs), dense(inputs))
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
        if not output_splits and not input_splits and self._divides(output, tensor, equal=True):
            done = self._at_once(signs.ALL_TO_ALL, opts, (tensor,), (output,))
            if done is not None:
                return done
        whole = contiguous_for(dense([output])[0])
        outputs = pieces(whole, self._core.size, "output", output_splits)
        inputs = pieces(tensor, self._core.size, "input", input_splits)
        self._fit("inputs", inputs, "output", outputs[self._core.rank])
        done = self._at_once(signs.ALL_TO_ALL, opts, inputs, outputs) if whole is output else None
        if done is not None:
            return done
        steps = _then_copy(moving.all_to_all(self._core.arena, outputs, inputs), whole, output)
        return self._run("all_to_all", steps, opts, [output])

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> ShmWork:
        """Return when every rank has come here."""
        done = self._at_once(signs.BARRIER, opts, (), ())
        return done if done is not None else self._run("barrier", moving.barrier(self._core.arena), opts, [])

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

    def sums_in_rank_order(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether a sum over all ranks is ((x0 + x1) + x2) + …: half types are added in float32, and rounded once."""
        return device.type == "cpu" and dtype in (torch.float32, torch.float64)

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


def _then_copy(steps: Steps, whole: torch.Tensor, output: torch.Tensor) -> Steps:
    yield from steps
    if whole.data_ptr() != output.data_ptr():
        output.detach().copy_(whole)


def _chain(parts: Iterable[Steps]) -> Steps:
    for part in parts:
        yield from part
