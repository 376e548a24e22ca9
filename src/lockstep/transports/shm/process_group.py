"""`ShmGroup`: the process group of ranks on one host, with native collectives for plain tensors."""

# torch's stubs give each of these methods another signature than the one it is called with
# mypy: disable-error-code="override"

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from ..device_groups import dispatch_by_device, or_device_backend
from ..process_group import TransportGroup
from ..runtime.backoff import Steps
from ..runtime.c10d import Store
from ..runtime.reduce_ops import ReduceFn, reduce_fn_for
from ..runtime.tensor_arguments import Tensors, is_plain
from ..runtime.work import CPUWork
from . import collectives
from .context import ShmContext
from .native import addresses_of, dtype_code_of
from .rank_states import NATIVE_SUMS, SUM, native_sum_code

_STRIDED = torch.strided  # each attribute of a module counts in `ShmGroup.allreduce`

Reduction = tuple[ReduceFn, int]  # the Python form, and the code of the native form, or -1


@dispatch_by_device
class ShmGroup(TransportGroup):
    """A process group whose ranks all run on one host; see `TransportGroup`.

    A synchronous call runs in the calling thread, in the native extension where that can do it.

    Attributes:
        takes_blocking_op: methods with an argument `blocking_op`, which the watchdog gives them.
    """

    carries_any_dtype = is_on_one_host = True
    dispatches = ("allreduce",)
    takes_blocking_op = ("allreduce",)
    _context: ShmContext

    def __init__(self, context: ShmContext, store: Store) -> None:
        super().__init__(context.rank, context.size, context, store)
        self._is_native = context.buffers.is_native

    def count_moved(self) -> int:
        """Return how many parts of messages this rank has written and read."""
        return self._context.count_moved()

    def allreduce(
        self, tensors: Tensors, opts: Any = None, blocking_op: int | None = None
    ) -> CPUWork | dist.Work:
        """Reduce each tensor over all ranks, in place; see `TransportGroup.allreduce`.

        A synchronous sum of one plain tensor is what most steps wait for. Here it is one function,
        as a small one takes no longer than a few calls of Python.

        Args:
            tensors: as there.
            opts: as there.
            blocking_op: of a call that is known to be synchronous, the hash of its reduce op. To
                read both from c10d's options takes a microsecond, and the watchdog has done so.
        """
        if (
            opts is not None
            and (blocking_op is not None or not opts.asyncOp)
            and len(tensors) == 1
            and self._is_native
        ):
            tensor = tensors[0]
            dtype_code = NATIVE_SUMS.get(tensor.dtype)
            if blocking_op is None:
                op = opts.reduceOp
                # the hash is a call of pybind11
                blocking_op = SUM if op is ReduceOp.SUM else hash(op)
            if (
                dtype_code is not None
                and blocking_op == SUM
                and tensor.is_cpu
                and tensor.layout is _STRIDED
                and tensor.is_contiguous()
                and not tensor.is_neg()  # real numbers are never lazily conjugated
                and (nbytes := tensor.nbytes)
            ):
                memory = (tensor.data_ptr(), nbytes)
                done = self._context.run_native(
                    "all_reduce", opts, memory, memory, tensors, 0, dtype_code
                )
                return done if self._batch is None else self._coalesce(done)
        work: CPUWork | dist.Work = self._allreduce_on_any_device(tensors, opts)
        return work

    _allreduce_on_any_device = or_device_backend("allreduce", TransportGroup.allreduce)

    def _try_native(
        self, kind: str, opts: Any, inputs: Tensors, outputs: Tensors, root: int = 0, op: Any = None
    ) -> CPUWork | None:
        if opts is None or opts.asyncOp:
            return None
        if op is None:
            dtype_code = dtype_code_of(inputs, outputs)
        elif (dtype_code := native_sum_code(op, outputs[0].dtype)) < 0:
            return None
        input_addresses = _plain_addresses(inputs)
        output_addresses = input_addresses if outputs is inputs else _plain_addresses(outputs)
        if input_addresses is None or output_addresses is None:
            return None
        keep_alive = (inputs, outputs)
        return self._coalesce(
            self._context.run_native(
                kind, opts, input_addresses, output_addresses, keep_alive, root, dtype_code
            )
        )

    def _reduction(self, op: Any, dtype: torch.dtype) -> Reduction:
        return reduce_fn_for(op, dtype), native_sum_code(op, dtype) if self._is_native else -1

    def _all_reduce_steps(self, tensor: torch.Tensor, reduction: Reduction) -> Steps:
        return collectives.all_reduce(self._context.buffers, tensor, *reduction)

    def _sparse_all_reduce_steps(self, tensor: torch.Tensor, op: Any) -> Steps:
        return collectives.all_reduce_sparse(self._context.buffers, tensor, op)

    def _reduce_steps(self, tensor: torch.Tensor, root: int, reduction: Reduction) -> Steps:
        return collectives.reduce(self._context.buffers, tensor, root, *reduction)

    def _reduce_scatter_steps(
        self, output: torch.Tensor, inputs: Tensors, reduction: Reduction
    ) -> Steps:
        return collectives.reduce_scatter(self._context.buffers, output, inputs, *reduction)

    def _broadcast_steps(self, tensor: torch.Tensor, root: int) -> Steps:
        return collectives.broadcast(self._context.buffers, tensor, root)

    def _all_gather_steps(self, outputs: Tensors, tensor: torch.Tensor) -> Steps:
        return collectives.all_gather(self._context.buffers, outputs, tensor)

    def _gather_steps(self, outputs: Tensors, tensor: torch.Tensor, root: int) -> Steps:
        return collectives.gather(self._context.buffers, outputs, tensor, root)

    def _scatter_steps(self, tensor: torch.Tensor, inputs: Tensors, root: int) -> Steps:
        return collectives.scatter(self._context.buffers, tensor, inputs, root)

    def _all_to_all_steps(self, outputs: Tensors, inputs: Tensors) -> Steps:
        return collectives.all_to_all(self._context.buffers, outputs, inputs)

    def _barrier_steps(self) -> Steps:
        return collectives.barrier(self._context.buffers)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Run a barrier; its StallError names all ranks that did not arrive, whatever
        `wait_all_ranks` is.
        """
        limit = timeout.total_seconds() if timeout else None
        self._context.run("barrier", self._barrier_steps(), False, limit, [])

    def sums_in_rank_order(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Return whether sums are ((x0 + x1) + x2) + …: half types are added in float32, and
        rounded once.
        """
        return device.type == "cpu" and dtype in (torch.float32, torch.float64)


def _plain_addresses(tensors: Tensors) -> tuple[int, ...] | None:
    """Return the address and bytes of each tensor in turn; None where the bytes of one are not its
    elements.
    """
    if len(tensors) == 1:
        tensor = tensors[0]
        return (tensor.data_ptr(), tensor.nbytes) if is_plain(tensor) else None
    return addresses_of(tensors) if all(map(is_plain, tensors)) else None
