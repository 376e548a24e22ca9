"""`horovod.torch.mpi_ops`: all operations on tensors; all-reduces are in `allreduce`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lockstep import arguments
from lockstep.errors import ConfigError

from ..common import basics as _basics  # noqa: F401 - some programs use its further names
from ..common.basics import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
)
from ..common.exceptions import HorovodInternalError
from ..common.process_sets import (
    ProcessSet,
    add_process_set,
    checked_process_set,
    global_process_set,
    remove_process_set,
)
from ..common.timeline import start_timeline, stop_timeline
from ..engine.request import Adasum, Average, Max, Min, Product, Request, Sum
from . import handles
from .allreduce import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    op_text,
    reducescatter_request,
)
from .compression import Compression
from .differentiable import differentiable
from .handles import poll, run, synchronize

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]


Tensors = Sequence[torch.Tensor]


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return the tensors of all ranks, concatenated along the first dimension.

    Gradients flow through it: the gradient of a rank's rows is the average of the gradients that
    the ranks have for these rows.

    Args:
        tensor: a tensor of the same dtype and, but for the first dimension, the same shape on all
            ranks.
        name: the name of the operation, the same on all ranks; None for one from the number of such
            calls.
        process_set: the ranks.

    Raises:
        ConfigError: a ValueError, for a tensor without dimensions.
        HorovodInternalError: the ranks do not agree on dtype or shape.
    """
    return grouped_allgather([tensor], name, process_set)[0]


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Gather several tensors, in one operation under one name; see `allgather`."""

    def forward(inputs: Tensors) -> list[torch.Tensor]:
        outputs: list[torch.Tensor] = handles.run(process_set, _allgather_request(inputs, name))
        return outputs

    def backward(gradients: Tensors) -> list[torch.Tensor]:
        counts = allgather(
            torch.tensor([[len(tensor) for tensor in tensors]]), process_set=process_set
        )
        means = grouped_allreduce(list(gradients), op=Average, process_set=process_set)
        starts = counts[: process_set.rank()].sum(0).tolist()
        return [
            mean.narrow(0, start, len(tensor))
            for mean, start, tensor in zip(means, starts, tensors, strict=True)
        ]

    handles.checked_group(tensors)
    return differentiable(forward, backward, tensors)


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start an `allgather`, and return its handle."""
    return handles.submit(process_set, _allgather_request([tensor], name), handles.single_result)


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start a `grouped_allgather`, and return its handle, for which `synchronize` returns a
    tuple.
    """
    return handles.submit(process_set, _allgather_request(tensors, name), tuple)


def _allgather_request(tensors: Tensors, name: str | None) -> Request:
    detached = handles.checked_group(tensors)
    for tensor in detached:
        handles.check_dimensions(tensor)
    return Request(
        "allgather", name or "", detached, signature=handles.tensor_signature(detached, skip_dims=1)
    )


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return a copy of the tensor of rank `root_rank`.

    Gradients flow through it: the gradient of the root's tensor is the average of the gradients of
    all ranks; those of the other tensors are zeros.

    Args:
        tensor: a tensor of the same shape and dtype on all ranks; it is not modified.
        root_rank: a global rank, also for a process set.
        name: the name of the operation, the same on all ranks; None for one from the number of such
            calls.
        process_set: the ranks.

    Raises:
        ConfigError: a ValueError, for a root that is not in the process set.
        HorovodInternalError: the ranks do not agree on shape, dtype or root.
    """

    def forward(inputs: Tensors) -> list[torch.Tensor]:
        detached = handles.checked_tensor(inputs[0])
        request = _broadcast_request(
            detached, torch.empty_like(detached), root_rank, name, process_set
        )
        outputs: list[torch.Tensor] = handles.run(process_set, request)
        return outputs

    def backward(gradients: Tensors) -> list[torch.Tensor]:
        mean = allreduce(gradients[0], op=Average, process_set=process_set)
        if process_set.rank() == process_set.root_of(root_rank):
            return [mean]
        # computed from the mean, because the gradients of these zeros need the other ranks too
        return [mean.masked_fill(torch.ones_like(mean, dtype=torch.bool), 0.0)]

    handles.checked_tensor(tensor)
    return differentiable(forward, backward, [tensor])[0]


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Broadcast `tensor` in place, and return it; see `broadcast`."""
    detached = handles.checked_tensor(tensor)
    handles.run(process_set, _broadcast_request(detached, detached, root_rank, name, process_set))
    return tensor


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start a `broadcast`, and return its handle."""
    detached = handles.checked_tensor(tensor)
    request = _broadcast_request(detached, torch.empty_like(detached), root_rank, name, process_set)
    return handles.submit(process_set, request, handles.single_result)


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start a `broadcast_`, and return its handle."""
    detached = handles.checked_tensor(tensor)
    request = _broadcast_request(detached, detached, root_rank, name, process_set)
    return handles.submit(process_set, request, lambda _: tensor)


def _broadcast_request(
    tensor: torch.Tensor,
    output: torch.Tensor,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
) -> Request:
    root = checked_process_set(process_set).root_of(root_rank)
    signature = (("root rank", root_rank), *handles.tensor_signature([tensor]))
    return Request("broadcast", name or "", [tensor], [output], {"root": root}, signature)


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the rows that all ranks send to this one, concatenated in rank order. Gradients flow
    through it.

    Args:
        tensor: the rows to send, in the order of the receiving ranks; the dtype and, but for the
            first dimension, the shape are the same on all ranks.
        splits: how many rows to send to each rank; None for the same number to each.
        name: the name of the operation, the same on all ranks; None for one from the number of such
            calls.
        process_set: the ranks.

    Returns:
        A tensor; if `splits` is given, a tuple of the tensor and the number of rows received from
        each rank.

    Raises:
        ConfigError: a ValueError, for rows that cannot be split this way.
        HorovodInternalError: the ranks do not agree on dtype or shape.
    """
    received_splits: list[torch.Tensor] = []

    def forward(inputs: Tensors) -> list[torch.Tensor]:
        output, counts = handles.run(
            process_set, _alltoall_request(inputs[0], splits, name, process_set)
        )
        received_splits.append(_counts_as_tensor(counts, splits))
        return [output]

    def backward(gradients: Tensors) -> list[torch.Tensor]:
        return [alltoall(gradients[0], received_splits[0], process_set=process_set)[0]]

    handles.checked_tensor(tensor)
    (output,) = differentiable(forward, backward, [tensor])
    return output if splits is None else (output, received_splits[0])


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an `alltoall`, and return its handle, for which `synchronize` returns tensor and
    received splits.
    """
    request = _alltoall_request(tensor, splits, name, process_set)
    return handles.submit(
        process_set, request, lambda result: (result[0], _counts_as_tensor(result[1], splits))
    )


def _alltoall_request(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None,
    name: str | None,
    process_set: ProcessSet,
) -> Request:
    detached = handles.checked_tensor(tensor)
    handles.check_dimensions(detached)
    counts = _split_counts(len(detached), splits, checked_process_set(process_set).size())
    signature = handles.tensor_signature([detached], skip_dims=1)
    return Request("alltoall", name or "", [detached], (), {"splits": counts}, signature)


def _split_counts(rows: int, splits: torch.Tensor | Sequence[int] | None, size: int) -> list[int]:
    if splits is None:
        if rows % size:
            hint = "Or pass the number of rows for each rank as splits."
            raise ConfigError(
                "tensor", f"a number of rows that is divisible by {size} ranks", rows, hint
            )
        return [rows // size] * size
    if isinstance(splits, torch.Tensor) and (splits.is_floating_point() or splits.dim() != 1):
        raise ConfigError(
            "splits", "a vector of integers", found=f"{splits.dtype} of shape {tuple(splits.shape)}"
        )
    expected = f"{size} whole numbers, one for each rank, with the sum {rows}"
    sizes = splits.tolist() if isinstance(splits, torch.Tensor) else splits
    counts = [arguments.whole("splits", count, least=0, expected=expected) for count in sizes]
    if len(counts) != size or sum(counts) != rows:
        raise ConfigError("splits", expected, counts)
    return counts


def _counts_as_tensor(
    counts: list[int], splits: torch.Tensor | Sequence[int] | None
) -> torch.Tensor:
    """Return `counts` as a tensor with the dtype and device of `splits`, if that is a tensor."""
    if isinstance(splits, torch.Tensor):
        return torch.tensor(counts, dtype=splits.dtype, device=splits.device)
    return torch.tensor(counts, dtype=torch.int32)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return this rank's rows of the reduction of `tensor`; the first ranks get the remaining rows.

    Gradients flow through it. Arguments and errors are those of `allreduce`; `op` is Average or
    Sum.
    """
    handles.checked_tensor(tensor)
    compressed, ctx = compression.compress(tensor)
    (reduced,) = _reducescatter_group(
        [compressed], name, op, process_set, prescale_factor, postscale_factor
    )
    out: torch.Tensor = compression.decompress(reduced, ctx)
    return out


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Reduce and scatter several tensors, in one operation under one name; see `reducescatter`."""
    handles.checked_group(tensors)
    compressed, ctxs = zip(*(compression.compress(tensor) for tensor in tensors), strict=True)
    reduced = _reducescatter_group(
        compressed, name, op, process_set, prescale_factor, postscale_factor
    )
    return [compression.decompress(tensor, ctx) for tensor, ctx in zip(reduced, ctxs, strict=True)]


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start a `reducescatter`, and return its handle."""
    request = reducescatter_request(
        [handles.checked_tensor(tensor)], name, op, prescale_factor, postscale_factor
    )
    return handles.submit(process_set, request, handles.single_result)


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start a `grouped_reducescatter`, and return its handle, for which `synchronize` returns a
    tuple.
    """
    request = reducescatter_request(
        handles.checked_group(tensors), name, op, prescale_factor, postscale_factor
    )
    return handles.submit(process_set, request, tuple)


def _reducescatter_group(
    tensors: Tensors,
    name: str | None,
    op: int,
    process_set: ProcessSet,
    prescale: float,
    postscale: float,
) -> list[torch.Tensor]:
    def forward(inputs: Tensors) -> list[torch.Tensor]:
        request = reducescatter_request(
            handles.checked_group(inputs), name, op, prescale, postscale
        )
        outputs: list[torch.Tensor] = handles.run(process_set, request)
        return outputs

    def backward(gradients: Tensors) -> list[torch.Tensor]:
        # Horovod's convention, to which the learning rates of programs are tuned: averages are not
        # divided
        factor = prescale * postscale * (process_set.size() if op == Sum else 1)
        return grouped_allgather(
            [gradient * factor for gradient in gradients], process_set=process_set
        )

    return differentiable(forward, backward, tensors)


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Start the sum or average of sparse tensors.

    Args:
        tensor: a sparse COO tensor, of the same shape and dtype on all ranks; the indices may
            differ.
        name: as for `allreduce`.
        op: Sum or Average.
        process_set: the ranks.

    Returns:
        A function that waits for the result and returns it. The result is not coalesced.

    Raises:
        ConfigError: a ValueError, for a dense tensor or another `op`.
    """
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.sparse_coo:
        raise ConfigError(
            "tensor", "a sparse COO tensor", found=getattr(tensor, "layout", type(tensor).__name__)
        )
    if op not in (Average, Sum):
        raise ConfigError("op", "Average or Sum of a sparse tensor", found=op_text(op))
    name = name or checked_process_set(process_set).engine.name_for("sparse_allreduce")
    return start_sparse_allreduce(tensor, name, op, process_set, urgent=True)


def start_sparse_allreduce(
    tensor: torch.Tensor, name: str, op: int, process_set: ProcessSet, urgent: bool
) -> Callable[[], torch.Tensor]:
    """Start a `sparse_allreduce_async`, whose arguments are valid.

    Args:
        tensor, name, op, process_set: see there.
        urgent: whether it is negotiated at once; gradients wait until they are negotiated together.
    """
    indices_request = _allgather_request([tensor._indices().t()], f"{name}.indices")
    values_request = _allgather_request([tensor._values()], f"{name}.values")
    indices_request.urgent = values_request.urgent = urgent
    indices_handle = handles.submit(process_set, indices_request, handles.single_result)
    values_handle = handles.submit(process_set, values_request, handles.single_result)

    def finish() -> torch.Tensor:
        values = synchronize(values_handle)
        indices = synchronize(indices_handle)
        if op == Average:
            values = values / process_set.size()
        return torch.sparse_coo_tensor(indices.t(), values, tensor.shape, check_invariants=True)

    return finish


def join(device: int = -1) -> int:
    """Wait until all ranks have called `join`; for a rank that has no more data.

    Until then this rank takes part in the all-reduces of the other ranks with neutral values;
    averages are still divided by the number of all ranks. Other operations of the other ranks fail.

    Args:
        device: accepted and ignored: the neutral values are on the device of the other ranks'
            tensors.

    Returns:
        The last rank that has joined, the same on every rank.

    Raises:
        HorovodInternalError: the other ranks cannot be reached.
    """
    last: int = run(global_process_set, Request("join", "join"))
    return last


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks have called `barrier`.

    Raises:
        HorovodInternalError: the other ranks cannot be reached.
    """
    run(process_set, Request("barrier", ""))
