"""Sorts out operations in which ranks do not fit together, or some are missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lockstep import Communicator

from ..common.exceptions import HorovodInternalError
from .carry_out import WITHOUT_ALL, stand_in
from .mismatch import difference, missing
from .request import Request
from .table import Agreed

__all__ = ["fitting"]


def fitting(comm: Communicator, agreed: Sequence[Agreed], requests: Mapping[bytes, Request]) -> list[Request]:
    """The requests to carry out, in the agreed order; those that cannot be get their error.

    Args:
        comm: the ranks, each of which calls this with the same `agreed`.
        agreed: what all have asked for.
        requests: those of this rank, by key. It has none for operations that it has joined for; others stand in.
    """
    odd = [each.key for each in agreed if each.differs or each.absent]
    if not odd:
        return [requests[each.key] for each in agreed]
    mine = [requests.get(key) for key in odd]
    said = comm.allgather_object([None if r is None else (r.kind, r.name, r.form) for r in mine])
    ready = []
    for each in agreed:
        request = requests.get(each.key)
        if each.key in odd:
            told: dict[int, Any] = {rank: said[rank][odd.index(each.key)] for rank in sorted(each.forms)}
            problem = _problem(each, told)
            if problem and request is not None:
                request.error = HorovodInternalError(problem)
            if problem:
                continue
        ready.append(request or stand_in(*next(iter(told.values()))))
    return ready


def _problem(agreed: Agreed, told: Mapping[int, Any]) -> str:
    kind, name, _ = next(iter(told.values()))
    if agreed.differs:
        return difference(told)
    return missing(kind, name, agreed.absent) if kind not in WITHOUT_ALL else ""
