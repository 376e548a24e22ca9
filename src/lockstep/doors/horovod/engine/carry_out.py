"""Carries out what all ranks have agreed on, verb by verb."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lockstep import Communicator
from lockstep.errors import ConfigError

from .calls import Calls
from .group import with_sockets
from .reduce import allreduce, neutral, reducescatter
from .request import OP_NAMES, Request

__all__ = ["WITHOUT_ALL", "carry_out", "stand_in"]

WITHOUT_ALL = ("allreduce", "barrier")
"""The verbs that can do without ranks that have joined."""


def carry_out(comm: Communicator, calls: Calls, requests: Sequence[Request]) -> None:
    """Do what `requests` ask for; all ranks pass the same ones in the same order.

    What is wrong with one of them in the same way on all ranks is its own error; everything else is raised.
    """
    reductions = [request for request in requests if request.kind == "allreduce"]
    try:
        if reductions:
            allreduce(comm, calls, reductions)
    except ConfigError as error:
        for request in reductions:
            request.error = error
    for request in requests:
        try:
            request.result = _VERBS[request.kind](comm, request)
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


def _reduced(comm: Communicator, request: Request) -> list[torch.Tensor]:
    return list(request.outputs)  # all at once, before the others


def _split(comm: Communicator, request: Request) -> Communicator | None:
    ranks = request.options["ranks"]
    return with_sockets(lambda: comm.split(0 if comm.rank in ranks else None, comm.rank))


def _nothing(comm: Communicator, request: Request) -> None:
    """That all have asked for it is all there is to it."""


_VERBS: dict[str, Callable[[Communicator, Request], Any]] = {
    "allreduce": _reduced,
    "allgather": _allgather,
    "alltoall": _alltoall,
    "barrier": _nothing,
    "broadcast": _broadcast,
    "reducescatter": reducescatter,
    "add_process_set": _split,
    "remove_process_set": _nothing,
}


def stand_in(kind: str, name: str, form: Sequence[tuple[str, Any]]) -> Request:
    """What a rank that has joined contributes to an operation of the others: nothing."""
    if kind != "allreduce":
        return Request(kind, name)
    said = dict(form)
    op = OP_NAMES.index(said["op"])
    several = not isinstance(said["dtype"], torch.dtype)
    forms = zip(said["dtype"], said["shape"], strict=True) if several else [(said["dtype"], said["shape"])]
    tensors = [neutral(shape, dtype, said["device"], op) for dtype, shape in forms]
    options = {name: said[name] for name in ("prescale_factor", "postscale_factor")}
    return Request(kind, name, tensors, tensors, {"op": op, **options})
