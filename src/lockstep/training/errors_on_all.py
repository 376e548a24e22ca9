"""Errors on all ranks: an error on one rank is raised on every rank, so that no rank continues
alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from ..communicator import Communicator
from ..errors import LockstepError, WorkerError

T = TypeVar("T")


def raise_on_all(comm: Communicator, error: BaseException | None, own_first: bool = False) -> None:
    """Raise on every rank if any rank has an error; called by all ranks.

    Args:
        comm: communicator over the ranks.
        error: the error of this rank, if any. A `LockstepError` is raised unchanged on other ranks,
            another exception as a `WorkerError`.
        own_first: whether a rank with an error raises that one; otherwise all ranks raise the
            lowest rank's error.
    """
    if comm.is_joining:  # an elastic job, in which the others have done this before
        if error is not None:
            raise error
        return
    known = error is None or isinstance(error, LockstepError)
    sent = error if known else WorkerError(comm.rank, type(error).__name__, str(error))
    errors = [received for received in comm.allgather_object(sent) if received is not None]
    if errors:
        raise error if own_first and error is not None else errors[0]


def call_on_all(comm: Communicator, fn: Callable[[], T]) -> T:
    """Return `fn()` if it succeeds on every rank, and raise on every rank if it fails on any;
    called by all ranks.
    """
    value = None
    error = cast(BaseException | None, None)
    try:
        value = fn()
    except BaseException as raised:
        error = raised
    raise_on_all(comm, error, own_first=True)
    return cast(T, value)
