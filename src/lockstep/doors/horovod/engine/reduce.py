"""Carries out the all-reduces of a round, small ones together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lockstep import Communicator
from lockstep.reductions.adasum import adasum_

from .calls import SUMMED, Calls
from .request import Adasum, Average, Max, Min, Product, Request, Sum

__all__ = ["allreduce", "neutral", "reducescatter"]

# Tensors of up to so many bytes are copied into one and back; larger ones are cheaper to reduce where they are.
_SMALL = 128 << 10

_VERBS: dict[int, Any] = {Average: "sum", Sum: "sum", Min: "min", Max: "max", Product: "product"}

Pair = tuple[torch.Tensor, torch.Tensor]


def allreduce(comm: Communicator, calls: Calls, requests: Sequence[Request]) -> None:
    """Reduce the inputs of `requests` into their outputs; all ranks pass the same ones in the same order."""
    if len(requests) == 1 and len(requests[0].inputs) == 1 and requests[0].options["op"] != Adasum:
        _reduce_alone(comm, calls, requests[0].inputs[0], requests[0].outputs[0], *requests[0].options.values())
        return
    batches: dict[Any, list[Pair]] = {}
    for request in requests:
        how = tuple(request.options[name] for name in ("op", "prescale_factor", "postscale_factor"))
        for pair in zip(request.inputs, request.outputs, strict=True):
            small = how[0] == Adasum or pair[0].numel() * pair[0].element_size() <= _SMALL
            alone = () if small else (len(batches),)
            batches.setdefault((pair[0].dtype, pair[0].device, how, *alone), []).append(pair)
    for (_, _, how, *_), pairs in batches.items():
        if how[0] == Adasum:
            _combine(comm, pairs, *how[1:])
        elif len(pairs) == 1:
            _reduce_alone(comm, calls, *pairs[0], *how)
        else:
            _reduce_together(comm, calls, pairs, *how)


def _reduce_alone(
    comm: Communicator, calls: Calls, source: torch.Tensor, output: torch.Tensor, op: int, before: float, after: float
) -> None:
    if output is not source:
        output.copy_(source)
    _reduce(comm, calls, output, op, before, after)


def _reduce_together(
    comm: Communicator, calls: Calls, pairs: Sequence[Pair], op: int, before: float, after: float
) -> None:
    flat = torch.cat([source.reshape(-1) for source, _ in pairs])
    _reduce(comm, calls, flat, op, before, after)
    parts = torch.split(flat, [output.numel() for _, output in pairs])
    outputs = [output for _, output in pairs]
    torch._foreach_copy_(outputs, [part.view(output.shape) for part, output in zip(parts, outputs, strict=True)])


def _combine(comm: Communicator, pairs: Sequence[Pair], before: float, after: float) -> None:
    for source, output in pairs:
        if output is not source:
            output.copy_(source)
        scale_(output, before)
    adasum_([output for _, output in pairs], comm)
    for _, output in pairs:
        scale_(output, after)


def _reduce(comm: Communicator, calls: Calls, tensor: torch.Tensor, op: int, before: float, after: float) -> None:
    scale_(tensor, before)
    if not tensor.numel():
        pass
    elif op in (Sum, Average) and tensor.is_cpu and tensor.dtype in SUMMED:
        _sum(calls, tensor)
        if op == Average:
            tensor.div_(comm.size, rounding_mode=None if tensor.is_floating_point() else "trunc")
    elif op == Average and (tensor.is_floating_point() or tensor.is_complex()):
        comm.allreduce(tensor, "mean")
    else:
        comm.allreduce(tensor, _VERBS[op])
        if op == Average:
            tensor.copy_(torch.div(tensor, comm.size, rounding_mode="trunc"))
    scale_(tensor, after)


def _sum(calls: Calls, tensor: torch.Tensor) -> None:
    plain = tensor.resolve_neg().contiguous()
    calls.sum(plain)
    if plain.data_ptr() != tensor.data_ptr():
        tensor.copy_(plain)


def scale_(tensor: torch.Tensor, factor: float) -> None:
    """Multiply by `factor`, in place; whole numbers lose what comes behind the point."""
    if factor == 1.0:
        return
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.mul_(factor)
    else:
        tensor.copy_(tensor.double() * factor)


def reducescatter(comm: Communicator, request: Request) -> list[torch.Tensor]:
    """This rank's rows of each of the inputs, reduced; the first ranks get one row more where they are not even."""
    op, before, after = (request.options[name] for name in ("op", "prescale_factor", "postscale_factor"))
    found = []
    for source in request.inputs:
        scaled = source.clone() if before != 1.0 else source
        scale_(scaled, before)
        mean = op == Average and (source.is_floating_point() or source.is_complex())
        part = comm.reduce_scatter(scaled, "mean" if mean else "sum")
        if op == Average and not mean:
            part = torch.div(part, comm.size, rounding_mode="trunc")
        scale_(part, after)
        found.append(part)
    return found


def neutral(shape: Sequence[int], dtype: torch.dtype, device: str, op: int) -> torch.Tensor:
    """What changes nothing when it is reduced with other tensors: zeros, for most operations."""
    value: float = 1 if op == Product else 0
    if op in (Min, Max):
        info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
        value = info.max if op == Min else info.min
        if dtype.is_floating_point:
            value = float("inf") if op == Min else -float("inf")
    return torch.full(tuple(shape), value, dtype=dtype, device=device)
