"""All-gathers, broadcasts and all-to-alls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lockstep.errors import ConfigError

from ..common.process_sets import ProcessSet, checked_set, global_process_set
from ..engine.request import Average, Request
from . import handles
from .differentiable import Differentiable, wants_gradient
from .reducing import allreduce, grouped_allreduce

__all__ = [
    "allgather",
    "allgather_async",
    "alltoall",
    "alltoall_async",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
]

Tensors = Sequence[torch.Tensor]


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """The tensors of all ranks behind each other, along the first dimension.

    Gradients go through it: those of a rank's rows are the average of what the ranks have for these.

    Args:
        tensor: of one dtype everywhere, and of one shape but for the first dimension.
        name: by which ranks find each other's; by the number of such calls when None.
        process_set: the ranks.

    Raises:
        ConfigError: a ValueError, for a tensor without dimensions.
        HorovodInternalError: when ranks do not agree on dtype or shape.
    """
    return grouped_allgather([tensor], name, process_set)[0]


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """`allgather` for several tensors under one name."""

    def gather(values: Tensors) -> list[torch.Tensor]:
        found: list[torch.Tensor] = handles.run(process_set, _gathering(values, name))
        return found

    if not wants_gradient(handles.checked_list(tensors) and tensors):
        return gather(tensors)
    return Differentiable.of(gather, lambda grads: _own_rows(grads, tensors, process_set), tensors)


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Begin an `allgather`; a handle."""
    return handles.start(process_set, _gathering([tensor], name), handles.first)


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin a `grouped_allgather`; a handle, whose `synchronize` gives a tuple."""
    return handles.start(process_set, _gathering(tensors, name), tuple)


def _gathering(tensors: Tensors, name: str | None) -> Request:
    plain = handles.checked_list(tensors)
    _check_dimensions(plain)
    return Request("allgather", name or "", plain, form=handles.form_of(plain, skip=1))


def _own_rows(grads: Tensors, tensors: Tensors, process_set: ProcessSet) -> list[torch.Tensor]:
    counts = allgather(torch.tensor([[len(tensor) for tensor in tensors]]), process_set=process_set)
    means = grouped_allreduce(list(grads), op=Average, process_set=process_set)
    starts = counts[: process_set.rank()].sum(0).tolist()
    return [mean.narrow(0, start, len(tensor)) for mean, start, tensor in zip(means, starts, tensors, strict=True)]


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """A copy of the tensor of rank `root_rank`.

    Gradients go through it: the root's is the average of those of all ranks, the others' are zeros.

    Args:
        tensor: of the same shape and dtype on all ranks; stays as it is.
        root_rank: a global rank, also for a process set.
        name: by which ranks find each other's; by the number of such calls when None.
        process_set: the ranks.

    Raises:
        ConfigError: a ValueError, for a root that is no rank of the process set.
        HorovodInternalError: when ranks do not agree on shape, dtype or root.
    """

    def send(values: Tensors) -> list[torch.Tensor]:
        plain = [handles.checked(value) for value in values]
        request = _broadcasting(plain[0], torch.empty_like(plain[0]), root_rank, name, process_set)
        found: list[torch.Tensor] = handles.run(process_set, request)
        return found

    def back(grads: Tensors) -> list[torch.Tensor]:
        mean = allreduce(grads[0], op=Average, process_set=process_set)
        at_root = process_set.rank() == process_set.root_of(root_rank)
        # zeros that are still made of the mean: gradients of gradients need the other ranks too
        return [mean if at_root else mean.masked_fill(torch.ones_like(mean, dtype=torch.bool), 0.0)]

    handles.checked(tensor)
    return (Differentiable.of(send, back, [tensor]) if wants_gradient([tensor]) else send([tensor]))[0]


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """`broadcast` in place; returns `tensor`."""
    plain = handles.checked(tensor)
    handles.run(process_set, _broadcasting(plain, plain, root_rank, name, process_set))
    return tensor


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin a `broadcast`; a handle."""
    plain = handles.checked(tensor)
    request = _broadcasting(plain, torch.empty_like(plain), root_rank, name, process_set)
    return handles.start(process_set, request, handles.first)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin a `broadcast_`; a handle."""
    plain = handles.checked(tensor)
    request = _broadcasting(plain, plain, root_rank, name, process_set)
    return handles.start(process_set, request, lambda _: tensor)


def _broadcasting(
    plain: torch.Tensor, output: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet
) -> Request:
    root = checked_set(process_set).root_of(root_rank)
    form = (("root rank", root_rank), *handles.form_of([plain]))
    return Request("broadcast", name or "", [plain], [output], {"root": root}, form)


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """What every rank has for this one, behind each other in rank order. Gradients go through it.

    Args:
        tensor: its rows are for the ranks, in order; of one dtype, and one shape but for the first dimension.
        splits: how many rows are for each rank; as many for each when None.
        name: by which ranks find each other's; by the number of such calls when None.
        process_set: the ranks.

    Returns:
        A tensor; given `splits`, also how many rows have come from each rank, as `splits` are.

    Raises:
        ConfigError: a ValueError, for rows that cannot be dealt out so.
        HorovodInternalError: when ranks do not agree on dtype or shape.
    """
    received: list[torch.Tensor] = []

    def exchange(values: Tensors) -> list[torch.Tensor]:
        request = _exchanging(values[0], splits, name, process_set)
        output, counts = handles.run(process_set, request)
        received.append(_as_splits(counts, splits))
        return [output]

    def back(grads: Tensors) -> list[torch.Tensor]:
        return [alltoall(grads[0], received[0], process_set=process_set)[0]]

    handles.checked(tensor)
    output = (Differentiable.of(exchange, back, [tensor]) if wants_gradient([tensor]) else exchange([tensor]))[0]
    return output if splits is None else (output, received[0])


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin an `alltoall`; a handle, whose `synchronize` always gives the tensor and the received splits."""
    request = _exchanging(tensor, splits, name, process_set)
    return handles.start(process_set, request, lambda found: (found[0], _as_splits(found[1], splits)))


def _exchanging(
    tensor: torch.Tensor, splits: torch.Tensor | Sequence[int] | None, name: str | None, process_set: ProcessSet
) -> Request:
    plain = handles.checked(tensor)
    _check_dimensions([plain])
    counts = _counts(len(plain), splits, checked_set(process_set).size())
    return Request("alltoall", name or "", [plain], (), {"splits": counts}, handles.form_of([plain], skip=1))


def _counts(rows: int, splits: torch.Tensor | Sequence[int] | None, size: int) -> list[int]:
    if splits is None:
        if rows % size:
            hint = "Or say how many rows are for each rank, with splits."
            raise ConfigError("tensor", f"rows that can be dealt out evenly to {size} ranks", rows, hint)
        return [rows // size] * size
    if isinstance(splits, torch.Tensor) and (splits.is_floating_point() or splits.dim() != 1):
        raise ConfigError("splits", "a vector of whole numbers", found=f"{splits.dtype} of shape {tuple(splits.shape)}")
    counts = [int(count) for count in splits]
    if len(counts) != size or min(counts) < 0 or sum(counts) != rows:
        raise ConfigError("splits", f"{size} numbers, one for each rank, that make {rows} rows together", counts)
    return counts


def _as_splits(counts: list[int], like: torch.Tensor | Sequence[int] | None) -> torch.Tensor:
    if isinstance(like, torch.Tensor):
        return torch.tensor(counts, dtype=like.dtype, device=like.device)
    return torch.tensor(counts, dtype=torch.int32)


def _check_dimensions(tensors: Tensors) -> None:
    for tensor in tensors:
        if not tensor.dim():
            raise ConfigError("tensor", "at least one dimension", found="none", hint="Use tensor.reshape(1).")
