"""Executes the operations that all ranks have submitted: small all-reduces fused, mismatched
requests refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from lockstep import Communicator
from lockstep.communicator.adasum import adasum_
from lockstep.errors import ConfigError
from lockstep.gloo import abort_gloo

from ..common.exceptions import HorovodInternalError
from .negotiation import SUMMABLE_DTYPES, RawCollectives, mismatch_message, missing_ranks_message
from .request import OP_NAMES, Adasum, Average, Max, Min, Product, Request, Response, Signature, Sum


def abort_waits(comm: Communicator) -> None:
    """End every wait in the group of `comm` with an error: in all threads, and on the other
    ranks.
    """
    group: Any = comm.group
    if group is None:
        return
    with suppress(Exception):  # not every backend supports it
        group.abort()
    abort_gloo(group)


def destroy_group(comm: Communicator) -> None:
    """Destroy the process group of `comm` without waiting for the other ranks."""
    group = comm.group
    comm.group = None
    if group is not None and dist.is_initialized():
        with suppress(ValueError):  # the program has destroyed it, or all groups
            dist.destroy_process_group(group)


# Tensors up to this size are fused. Reducing a larger one in place is cheaper than copying it
# twice.
_MAX_FUSED_BYTES = 128 << 10

_REDUCE_OPS: dict[int, Any] = {
    Average: "sum",
    Sum: "sum",
    Min: "min",
    Max: "max",
    Product: "product",
}

InputOutput = tuple[torch.Tensor, torch.Tensor]


def allreduce(comm: Communicator, collectives: RawCollectives, requests: Sequence[Request]) -> None:
    """Reduce the inputs of `requests` into their outputs; all ranks pass the same requests in the
    same order.
    """
    if len(requests) == 1 and len(requests[0].inputs) == 1 and requests[0].options["op"] != Adasum:
        (request,) = requests
        _reduce_single(
            comm, collectives, request.inputs[0], request.outputs[0], *request.options.values()
        )
        return
    fused: dict[Any, list[InputOutput]] = {}
    for request in requests:
        options = tuple(
            request.options[name] for name in ("op", "prescale_factor", "postscale_factor")
        )
        for pair in zip(request.inputs, request.outputs, strict=True):
            is_fusible = (
                options[0] == Adasum or pair[0].numel() * pair[0].element_size() <= _MAX_FUSED_BYTES
            )
            unique = () if is_fusible else (len(fused),)
            fused.setdefault((pair[0].dtype, pair[0].device, options, *unique), []).append(pair)
    for (_, _, options, *_), pairs in fused.items():
        if options[0] == Adasum:
            _reduce_adasum(comm, pairs, *options[1:])
        elif len(pairs) == 1:
            _reduce_single(comm, collectives, *pairs[0], *options)
        else:
            _reduce_fused(comm, collectives, pairs, *options)


def _reduce_single(
    comm: Communicator,
    collectives: RawCollectives,
    source: torch.Tensor,
    output: torch.Tensor,
    op: int,
    prescale: float,
    postscale: float,
) -> None:
    if output is not source:
        output.copy_(source)
    _reduce_in_place(comm, collectives, output, op, prescale, postscale)


def _reduce_fused(
    comm: Communicator,
    collectives: RawCollectives,
    pairs: Sequence[InputOutput],
    op: int,
    prescale: float,
    postscale: float,
) -> None:
    buffer = torch.cat([source.reshape(-1) for source, _ in pairs])
    _reduce_in_place(comm, collectives, buffer, op, prescale, postscale)
    outputs = [output for _, output in pairs]
    parts = torch.split(buffer, [output.numel() for output in outputs])
    torch._foreach_copy_(
        outputs, [part.view(output.shape) for part, output in zip(parts, outputs, strict=True)]
    )


def _reduce_adasum(
    comm: Communicator, pairs: Sequence[InputOutput], prescale: float, postscale: float
) -> None:
    for source, output in pairs:
        if output is not source:
            output.copy_(source)
        _scale(output, prescale)
    adasum_([output for _, output in pairs], comm)
    for _, output in pairs:
        _scale(output, postscale)


def _reduce_in_place(
    comm: Communicator,
    collectives: RawCollectives,
    tensor: torch.Tensor,
    op: int,
    prescale: float,
    postscale: float,
) -> None:
    _scale(tensor, prescale)
    if not tensor.numel():
        pass
    elif op in (Sum, Average) and tensor.is_cpu and tensor.dtype in SUMMABLE_DTYPES:
        _sum_in_place(collectives, tensor)
        if op == Average:
            tensor.div_(comm.size, rounding_mode=None if tensor.is_floating_point() else "trunc")
    elif op == Average and (tensor.is_floating_point() or tensor.is_complex()):
        comm.allreduce(tensor, "mean")
    else:
        comm.allreduce(tensor, _REDUCE_OPS[op])
        if op == Average:
            tensor.copy_(torch.div(tensor, comm.size, rounding_mode="trunc"))
    _scale(tensor, postscale)


def _sum_in_place(collectives: RawCollectives, tensor: torch.Tensor) -> None:
    contiguous = tensor.resolve_neg().contiguous()
    collectives.sum(contiguous)
    if contiguous.data_ptr() != tensor.data_ptr():
        tensor.copy_(contiguous)


def _scale(tensor: torch.Tensor, factor: float) -> None:
    """Multiply `tensor` by `factor`, in place; integers are truncated."""
    if factor == 1.0:
        return
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.mul_(factor)
    else:
        tensor.copy_(tensor.double() * factor)


def reducescatter(comm: Communicator, request: Request) -> list[torch.Tensor]:
    """Reduce each input of `request`, and return this rank's rows; the first ranks get the
    remaining rows.
    """
    op, prescale, postscale = (
        request.options[name] for name in ("op", "prescale_factor", "postscale_factor")
    )
    outputs = []
    for source in request.inputs:
        scaled = source.clone() if prescale != 1.0 else source
        _scale(scaled, prescale)
        is_mean = op == Average and (source.is_floating_point() or source.is_complex())
        output = comm.reduce_scatter(scaled, "mean" if is_mean else "sum")
        if op == Average and not is_mean:
            output = torch.div(output, comm.size, rounding_mode="trunc")
        _scale(output, postscale)
        outputs.append(output)
    return outputs


def neutral_tensor(shape: Sequence[int], dtype: torch.dtype, device: str, op: int) -> torch.Tensor:
    """Return a tensor of the neutral element of `op`: reduced with other tensors it does not change
    the result.
    """
    value: float = 1 if op == Product else 0
    if op in (Min, Max):
        info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
        value = info.max if op == Min else info.min
        if dtype.is_floating_point:
            value = float("inf") if op == Min else -float("inf")
    return torch.full(tuple(shape), value, dtype=dtype, device=device)


JOINABLE_OPS = ("allreduce", "barrier")
"""The operations that run without the ranks that have joined."""


def execute(comm: Communicator, collectives: RawCollectives, requests: Sequence[Request]) -> None:
    """Execute `requests` and set their results; all ranks pass the same requests in the same order.

    A ConfigError, which all ranks get alike, becomes the error of its request. All other errors are
    raised.
    """
    reductions = [request for request in requests if request.kind == "allreduce"]
    try:
        if reductions:
            allreduce(comm, collectives, reductions)
    except ConfigError as error:
        for request in reductions:
            request.error = error
    for request in requests:
        try:
            request.result = _OPERATIONS[request.kind](comm, request)
        except ConfigError as error:
            request.error = error


def _allgather(comm: Communicator, request: Request) -> list[torch.Tensor]:
    return [torch.cat(comm.allgather(tensor)) for tensor in request.inputs]


def _broadcast(comm: Communicator, request: Request) -> list[torch.Tensor]:
    root = request.options["root"]
    for source, output in zip(request.inputs, request.outputs, strict=True):
        if output is not source and comm.rank == root:
            output.copy_(source)
        comm.broadcast(output, root)
    return list(request.outputs)


def _alltoall(comm: Communicator, request: Request) -> tuple[torch.Tensor, list[int]]:
    (tensor,) = request.inputs
    parts = comm.alltoall(list(torch.split(tensor, request.options["splits"])))
    return torch.cat(parts), [len(part) for part in parts]


def _allreduce_outputs(comm: Communicator, request: Request) -> list[torch.Tensor]:
    # `execute` has reduced them, together with those of the other requests
    return list(request.outputs)


def _split(comm: Communicator, request: Request) -> Communicator | None:
    ranks = request.options["ranks"]
    return comm.split(0 if comm.rank in ranks else None, comm.rank)


def _no_op(comm: Communicator, request: Request) -> None:
    """Do nothing: the negotiation has synchronised the ranks."""


_OPERATIONS: dict[str, Callable[[Communicator, Request], Any]] = {
    "allreduce": _allreduce_outputs,
    "allgather": _allgather,
    "alltoall": _alltoall,
    "barrier": _no_op,
    "broadcast": _broadcast,
    "reducescatter": reducescatter,
    "add_process_set": _split,
    "remove_process_set": _no_op,
}


def neutral_request(kind: str, name: str, signature: Signature) -> Request:
    """Return the request with which a rank that has joined takes part in an operation of the other
    ranks.
    """
    if kind != "allreduce":
        return Request(kind, name)
    values = dict(signature)
    op = OP_NAMES.index(values["op"])
    is_group = not isinstance(values["dtype"], torch.dtype)
    pairs = (
        zip(values["dtype"], values["shape"], strict=True)
        if is_group
        else [(values["dtype"], values["shape"])]
    )
    tensors = [neutral_tensor(shape, dtype, values["device"], op) for dtype, shape in pairs]
    factors = {label: values[label] for label in ("prescale_factor", "postscale_factor")}
    return Request(kind, name, tensors, tensors, {"op": op, **factors})


def matching_requests(
    comm: Communicator, responses: Sequence[Response], requests: Mapping[bytes, Request]
) -> list[Request]:
    """Return the requests to execute, in the order of `responses`; the other ones get an error.

    Args:
        comm: the ranks, each of which passes the same `responses`.
        responses: the operations that all ranks have submitted.
        requests: the requests of this rank, by key. A neutral request stands in for one that this
            rank, having joined, has not submitted.
    """
    irregular = [response.key for response in responses if response.has_mismatch or response.joined]
    if not irregular:
        return [requests[response.key] for response in responses]
    of_this_rank = [requests.get(key) for key in irregular]
    descriptions = comm.allgather_object(
        [None if r is None else (r.kind, r.name, r.signature) for r in of_this_rank]
    )
    matching = []
    for response in responses:
        if response.key not in irregular:
            matching.append(requests[response.key])
            continue
        index = irregular.index(response.key)
        request = requests.get(response.key)
        by_rank: dict[int, Any] = {
            rank: descriptions[rank][index] for rank in sorted(response.signatures)
        }
        kind, name, signature = next(iter(by_rank.values()))
        problem = ""
        if response.has_mismatch:
            problem = mismatch_message(
                kind, name, {rank: described[2] for rank, described in by_rank.items()}
            )
        elif kind not in JOINABLE_OPS:
            problem = missing_ranks_message(kind, name, response.joined)
        if not problem:
            matching.append(request or neutral_request(kind, name, signature))
        elif request is not None:
            request.error = HorovodInternalError(problem)
    return matching
