"""The process group of every transport: c10d's method table, checks of arguments, and `Work`, over
a few operations.
"""

# torch's stubs lack some of the names of torch.distributed, and give its methods other signatures
# than their calls
# mypy: disable-error-code="attr-defined,override,misc,assignment,call-arg,arg-type"

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ..errors import ConfigError
from .runtime.backoff import Steps, chain
from .runtime.c10d import Store, timeout_of
from .runtime.tensor_arguments import (
    NotOnCPUError,
    Tensors,
    check_same_dtype,
    contiguous_for,
    copy_back,
    dense,
    split_per_rank,
)
from .runtime.work import CPUWork


class TransportContext(Protocol):
    """One rank's connection to the others: where operations are queued, and messages are sent."""

    timeout: float

    def run(
        self,
        operation: str,
        steps: Steps,
        asynchronous: bool,
        timeout: float | None,
        result: list[torch.Tensor],
    ) -> CPUWork:
        """Run a collective, synchronously or in the background."""

    def send(self, tensor: torch.Tensor, target: int, tag: int) -> CPUWork:
        """Send `tensor` to `target`."""

    def receive(self, tensor: torch.Tensor, source: int | None, tag: int) -> CPUWork:
        """Receive from `source`, or from any rank, into `tensor`."""

    def fail(self, reason: str) -> None:
        """Give up the group."""

    def close(self) -> None:
        """Leave the group."""


class TransportGroup(dist.ProcessGroup):
    """A process group for tensors on the CPU.

    The public methods are those that `torch.distributed` calls, with its own arguments. All raise
    ConfigError for arguments that cannot be right, before anything is sent, and RankLostError,
    StallError or TransportError when an operation fails.

    A transport is a subclass that defines the operations: `_reduction` prepares a reduce operation
    for a dtype, and `_all_reduce_steps` and its kin return one collective of one tensor as steps. A
    transport with a faster path for synchronous collectives of plain tensors sets `_is_native` and
    defines `_try_native`.

    Args:
        rank: this rank.
        size: the number of ranks.
        context: runs the operations.
        store: of the group's rendezvous.
    """

    backend = "shm"
    # whether collectives without reduction work for every dtype of plain numbers
    carries_any_dtype = False
    supports_splitting = supports_coalescing = supports_time_estimate = supports_shrinking = False
    is_on_one_host = False  # whether all ranks are known to be on this host
    # the user's options for the backend of another device, see `dispatch_by_device`
    device_options: Any = None
    _is_native = False
    _name = _description = ""
    _batch: list[CPUWork] | None = None

    def __init__(self, rank: int, size: int, context: TransportContext, store: Store) -> None:
        super().__init__(rank, size)
        self._rank = rank
        self._size = size
        self._context = context
        self.store = store

    def _reduction(self, op: Any, dtype: torch.dtype) -> Any:
        """Return `op` (c10d's ReduceOp) for `dtype` in the form that the steps below take, or raise
        ConfigError.
        """
        raise NotImplementedError

    def _all_reduce_steps(self, tensor: torch.Tensor, reduction: Any) -> Steps:
        """Reduce `tensor` over all ranks, in place."""
        raise NotImplementedError

    def _sparse_all_reduce_steps(self, tensor: torch.Tensor, op: Any) -> Steps:
        """Sum a sparse COO tensor over all ranks, in place."""
        raise NotImplementedError

    def _reduce_steps(self, tensor: torch.Tensor, root: int, reduction: Any) -> Steps:
        """Reduce `tensor` over all ranks into the root's."""
        raise NotImplementedError

    def _reduce_scatter_steps(self, output: torch.Tensor, inputs: Tensors, reduction: Any) -> Steps:
        """Reduce `inputs[i]` over all ranks into rank i's `output`."""
        raise NotImplementedError

    def _broadcast_steps(self, tensor: torch.Tensor, root: int) -> Steps:
        """Copy the root's `tensor` to every rank."""
        raise NotImplementedError

    def _all_gather_steps(self, outputs: Tensors, tensor: torch.Tensor) -> Steps:
        """Copy rank i's `tensor` to every rank's `outputs[i]`."""
        raise NotImplementedError

    def _gather_steps(self, outputs: Tensors, tensor: torch.Tensor, root: int) -> Steps:
        """Copy rank i's `tensor` to the root's `outputs[i]`."""
        raise NotImplementedError

    def _scatter_steps(self, tensor: torch.Tensor, inputs: Tensors, root: int) -> Steps:
        """Copy the root's `inputs[i]` to rank i's `tensor`."""
        raise NotImplementedError

    def _all_to_all_steps(self, outputs: Tensors, inputs: Tensors) -> Steps:
        """Copy rank i's `inputs[j]` to rank j's `outputs[i]`."""
        raise NotImplementedError

    def _barrier_steps(self) -> Steps:
        """Wait until all ranks have arrived."""
        raise NotImplementedError

    def _try_native(
        self, kind: str, opts: Any, inputs: Tensors, outputs: Tensors, root: int = 0, op: Any = None
    ) -> CPUWork | None:
        """Run a synchronous collective at once; None where that is not possible. Called only with
        `_is_native`.

        Args:
            kind: the collective, such as "all_reduce".
            opts: c10d's options of the call.
            inputs: this rank's; one tensor may stand for the equal parts that it consists of.
            outputs: the same of its outputs.
            root: its root, or any rank.
            op: its reduce operation, if it has one.
        """
        raise NotImplementedError

    def allreduce(self, tensors: Tensors, opts: Any = None) -> CPUWork | dist.Work:
        """Reduce each tensor over all ranks, in place; also sparse ones, and half types in
        float32.
        """
        opts = opts or dist.AllreduceOptions()
        op = opts.reduceOp
        first = tensors[0]
        if self._is_native and len(tensors) == 1:
            done = self._try_native("all_reduce", opts, tensors, tensors, op=op)
            if done is not None:
                return done
        if not first.is_cpu:
            raise NotOnCPUError(first.device)
        if first.layout is not torch.strided:
            return self._sparse_allreduce(tensors, opts)
        reductions = [self._reduction(op, tensor.dtype) for tensor in tensors]
        steps = [
            self._all_reduce_steps(*pair) for pair in zip(dense(tensors), reductions, strict=True)
        ]
        return self._run("all_reduce", steps, opts, tensors)

    allreduce_coalesced = allreduce

    def allreduce_unwatched(self, tensors: Tensors, opts: Any) -> CPUWork:
        """Do the same as `allreduce` of tensors on the CPU, for a call that is not the program's
        own.
        """
        reductions = [self._reduction(opts.reduceOp, tensor.dtype) for tensor in tensors]
        steps = chain(
            self._all_reduce_steps(*pair) for pair in zip(tensors, reductions, strict=True)
        )
        return self._context.run("all_reduce", steps, opts.asyncOp, None, list(tensors))

    def allreduce_beside(
        self, tensor: torch.Tensor, opts: Any, on_completion: Callable[[], object]
    ) -> Callable[[Any], Any]:
        """Start an all-reduce before the call that comes next, see
        `GroupProxy.allreduce_beside`.
        """
        work = self.allreduce_unwatched([tensor], opts)
        return lambda _: work

    def _sparse_allreduce(self, tensors: Tensors, opts: Any) -> CPUWork | dist.Work:
        if tensors[0].layout is not torch.sparse_coo:
            dense(tensors)  # raises
        steps = [self._sparse_all_reduce_steps(tensor, opts.reduceOp) for tensor in tensors]
        return self._run("all_reduce", steps, opts, tensors)

    def reduce(self, tensors: Tensors, opts: Any) -> CPUWork:
        """Reduce each tensor over all ranks into the root's."""
        root = self._root(opts)
        op = opts.reduceOp
        if self._is_native and len(tensors) == 1:
            done = self._try_native("reduce", opts, tensors, tensors, root, op)
            if done is not None:
                return done
        reductions = [self._reduction(op, tensor.dtype) for tensor in tensors]
        steps = [
            self._reduce_steps(t, root, r) for t, r in zip(dense(tensors), reductions, strict=True)
        ]
        return self._run("reduce", steps, opts, tensors)

    def reduce_scatter(
        self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None
    ) -> CPUWork:
        """Reduce `inputs[t][i]` over all ranks into `outputs[t]` of rank i."""
        opts = opts or dist.ReduceScatterOptions()
        op = opts.reduceOp
        for output, parts in zip(outputs, inputs, strict=True):
            self._check_parts("inputs", parts, "output", output)
        if self._is_native and len(outputs) == 1:
            done = self._try_native("reduce_scatter", opts, inputs[0], outputs, op=op)
            if done is not None:
                return done
        steps = []
        for output, parts in zip(dense(outputs), inputs, strict=True):
            reduction = self._reduction(op, output.dtype)
            steps.append(self._reduce_scatter_steps(output, dense(parts), reduction))
        return self._run("reduce_scatter", steps, opts, outputs)

    def reduce_scatter_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> CPUWork:
        """Reduce `tensor` over all ranks; each gets its part of it in `output`."""
        if self._is_native and opts is not None and self._consists_of(tensor, output):
            done = self._try_native("reduce_scatter", opts, (tensor,), (output,), op=opts.reduceOp)
            if done is not None:
                return done
        return self.reduce_scatter([output], [split_per_rank(tensor, self._size, "input")], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> CPUWork:
        """Do `reduce_scatter_single` for several tensors."""
        return self.reduce_scatter(
            outputs, [split_per_rank(tensor, self._size, "input") for tensor in inputs], opts
        )

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def broadcast(self, tensors: Tensors, opts: Any) -> CPUWork:
        """Copy the root's tensors to every rank."""
        root = self._root(opts)
        if self._is_native and len(tensors) == 1:
            done = self._try_native("broadcast", opts, tensors, tensors, root)
            if done is not None:
                return done
        steps = [self._broadcast_steps(tensor, root) for tensor in dense(tensors)]
        return self._run("broadcast", steps, opts, tensors)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> CPUWork:
        """Copy rank i's `inputs[t]` to every rank's `outputs[t][i]`; sizes may differ between
        ranks.
        """
        for parts, tensor in zip(outputs, inputs, strict=True):
            self._check_parts("outputs", parts, "input", tensor)
        if self._is_native and len(inputs) == 1:
            done = self._try_native("all_gather", opts, inputs, outputs[0])
            if done is not None:
                return done
        pairs = zip(outputs, dense(inputs), strict=True)
        steps = [self._all_gather_steps(dense(parts), tensor) for parts, tensor in pairs]
        return self._run("all_gather", steps, opts, [part for parts in outputs for part in parts])

    def allgather_coalesced(
        self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None
    ) -> CPUWork:
        """Copy rank i's `inputs[t]` to every rank's `outputs[i][t]`."""
        self._check_count("outputs", outputs)
        return self.allgather(list(zip(*outputs, strict=True)), dense(inputs), opts)

    def all_gather_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> CPUWork:
        """Copy every rank's `tensor` into its part of `output`."""
        if self._is_native and self._consists_of(output, tensor):
            done = self._try_native("all_gather", opts, (tensor,), (output,))
            if done is not None:
                return done
        return self.all_gather_single_coalesced(dense([output]), dense([tensor]), opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> CPUWork:
        """Do `all_gather_single` for several tensors."""
        steps = []
        for output, tensor in zip(dense(outputs), dense(inputs), strict=True):
            whole = contiguous_for(output)
            parts = split_per_rank(whole, self._size, "output")
            self._check_parts("outputs", parts, "input", tensor)
            steps.append(_then_copy_back(self._all_gather_steps(parts, tensor), whole, output))
        return self._run("all_gather", steps, opts, outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> CPUWork:
        """Copy rank i's tensor to `outputs[0][i]` of the root."""
        root = self._root(opts)
        parts = []
        if self._rank == root:
            parts = list(outputs[0])
            self._check_parts("outputs", parts, "input", inputs[0], all_equal=True)
        if self._is_native:
            done = self._try_native("gather", opts, inputs, parts, root)
            if done is not None:
                return done
        return self._run(
            "gather", [self._gather_steps(dense(parts), dense(inputs)[0], root)], opts, parts
        )

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> CPUWork:
        """Copy `inputs[0][i]` of the root to rank i's tensor."""
        root = self._root(opts)
        parts = []
        if self._rank == root:
            parts = list(inputs[0])
            self._check_parts("inputs", parts, "output", outputs[0], all_equal=True)
        if self._is_native:
            done = self._try_native("scatter", opts, parts, outputs, root)
            if done is not None:
                return done
        return self._run(
            "scatter", [self._scatter_steps(dense(outputs)[0], dense(parts), root)], opts, outputs
        )

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> CPUWork:
        """Copy rank i's `inputs[j]` to rank j's `outputs[i]`; sizes may differ everywhere."""
        self._check_count("outputs", outputs)
        self._check_parts("inputs", inputs, "output", outputs[self._rank])
        check_same_dtype([*outputs, *inputs])
        if self._is_native:
            done = self._try_native("all_to_all", opts, inputs, outputs)
            if done is not None:
                return done
        return self._run(
            "all_to_all", [self._all_to_all_steps(dense(outputs), dense(inputs))], opts, outputs
        )

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> CPUWork:
        """Do `alltoall` with the parts of two tensors, split along the first dimension, evenly
        without splits.
        """
        count = output.numel()
        if (
            self._is_native
            and not output_splits
            and not input_splits
            and count == tensor.numel()
            and count % self._size == 0
            and output.dtype is tensor.dtype
        ):
            done = self._try_native("all_to_all", opts, (tensor,), (output,))
            if done is not None:
                return done
        whole = contiguous_for(dense([output])[0])
        outputs = split_per_rank(whole, self._size, "output", output_splits)
        inputs = split_per_rank(tensor, self._size, "input", input_splits)
        self._check_parts("inputs", inputs, "output", outputs[self._rank])
        if self._is_native and whole is output:
            done = self._try_native("all_to_all", opts, inputs, outputs)
            if done is not None:
                return done
        steps = _then_copy_back(self._all_to_all_steps(outputs, inputs), whole, output)
        return self._run("all_to_all", [steps], opts, [output])

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> CPUWork:
        """Return when every rank has arrived."""
        if self._is_native:
            done = self._try_native("barrier", opts, (), ())
            if done is not None:
                return done
        return self._run("barrier", [self._barrier_steps()], opts, [])

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> CPUWork | dist.Work:
        """Send a tensor to `dst`; completed when the tensor may be written to again, received or
        not.
        """
        return self._coalesce(
            self._context.send(dense(tensors)[0], self._check_peer("dst", dst), tag)
        )

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> CPUWork | dist.Work:
        """Receive the next message from `src` with `tag`."""
        return self._coalesce(
            self._context.receive(dense(tensors)[0], self._check_peer("src", src), tag)
        )

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> CPUWork | dist.Work:
        """Receive the next message with `tag` from any rank."""
        return self._coalesce(self._context.receive(dense(tensors)[0], None, tag))

    def getBackendName(self) -> str:  # noqa: N802 - c10d's name
        """Return the name that `init_process_group` knows."""
        return self.backend

    def getGroupName(self) -> str:  # noqa: N802 - c10d's name
        """Return the name under which torch finds the group again."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802 - c10d's name
        """Set the name under which torch finds the group again; called when the group is made."""
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802 - c10d's name
        """Return the description that the group was made with."""
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802 - c10d's name
        """Set the description of the group; called when it is made."""
        self._description = description

    def get_group_store(self) -> Store:
        """Return the store of the group's rendezvous."""
        return self.store

    def sums_in_rank_order(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Return whether sums over all ranks are ((x0 + x1) + x2) + …, each addition rounded to
        `dtype`: no.

        Only a group that does the additions itself returns True; code that needs one order of
        additions relies on it.
        """
        return False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return False: tensors cannot be made in memory of the backend's own."""
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time limit of operations that are given none of their own."""
        self._context.timeout = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        """The time limit of an operation."""
        return timedelta(seconds=self._context.timeout)

    def shutdown(self) -> None:
        """Leave the group; operations that wait for this rank end with an error where the transport
        can see it.
        """
        self._context.close()

    def abort(self) -> None:
        """Give up the group: waits end with an error, on the other ranks too where the transport
        can signal it.
        """
        self._context.fail("the group has been aborted")

    @property
    def _device_types(self) -> list[torch.device]:
        try:
            config = dist.BackendConfig(dist.Backend(dist.get_backend_config(self)))
        except (RuntimeError, ValueError, TypeError):
            # Not among c10d's groups, or no longer. Since 2.15 torch attaches its flight recorder
            # to a group that it makes if that has devices, and looks for their backends, which c10d
            # keeps only for its own class.
            return []
        return [
            torch.device(kind)
            for kind in config.get_device_backend_map()
            if kind == "cpu" or getattr(torch, kind).is_available()
        ]

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        self._batch = []

    def _end_coalescing(self, device: torch.device | None = None) -> CPUWork:
        works = self._batch or []
        self._batch = None
        return CPUWork.all_of(works)

    def _coalesce(self, work: CPUWork) -> CPUWork:
        """Add `work` to the batch, if coalescing has started; return it."""
        if self._batch is not None:
            self._batch.append(work)
        return work

    def replace_in_batch(self, inner: CPUWork | None, work: CPUWork) -> None:
        """Put `work` into the batch, if coalescing has started, in the place of `inner`, which it
        waits for.
        """
        if self._batch is not None:
            self._batch = [queued for queued in self._batch if queued is not inner] + [work]

    def _run(self, operation: str, steps: Iterable[Steps], opts: Any, result: Tensors) -> CPUWork:
        asynchronous = True if opts is None else opts.asyncOp
        whole = chain(self._all_steps(steps))
        return self._coalesce(
            self._context.run(operation, whole, asynchronous, timeout_of(opts), list(result))
        )

    def _all_steps(self, steps: Iterable[Steps]) -> Iterable[Steps]:
        """Return the steps of an operation, with those of what goes on beside it, if there is
        anything.
        """
        return steps

    def _consists_of(self, whole: torch.Tensor, part: torch.Tensor) -> bool:
        """Return whether `whole` consists of a part like `part` for each rank."""
        return whole.numel() == part.numel() * self._size and whole.dtype is part.dtype

    def _root(self, opts: Any) -> int:
        root: int = opts.rootRank
        if not 0 <= root < self._size:
            raise ConfigError("root", f"a rank from 0 to {self._size - 1}", root)
        return root

    def _check_peer(self, argument: str, rank: int) -> int:
        if not 0 <= rank < self._size or rank == self._rank:
            expected = f"a rank other than this one ({self._rank}) from 0 to {self._size - 1}"
            raise ConfigError(argument, expected, rank)
        return rank

    def _check_count(self, argument: str, parts: Sequence[object]) -> None:
        if len(parts) != self._size:
            raise ConfigError(argument, f"{self._size} tensors, one for each rank", len(parts))

    def _check_parts(
        self,
        argument: str,
        parts: Tensors,
        other: str,
        tensor: torch.Tensor,
        all_equal: bool = False,
    ) -> None:
        """Raise ConfigError unless there is a part for each rank, and this rank's (or `all_equal`)
        is like `tensor`.
        """
        self._check_count(argument, parts)
        check_same_dtype([tensor, *parts])
        for part in parts if all_equal else [parts[self._rank]]:
            if part.numel() != tensor.numel():
                raise ConfigError(
                    argument, f"{tensor.numel()} elements, as in this rank's {other}", part.numel()
                )


def _then_copy_back(steps: Steps, whole: torch.Tensor, output: torch.Tensor) -> Steps:
    yield from steps
    copy_back(whole, output.detach())
