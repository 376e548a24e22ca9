"""An operation of MPI as steps, with the memory that it reads and writes kept until it has ended."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from ...errors import TransportError
from ..shm.waiting import Steps
from .ending import ending
from .library import load

__all__ = ["follow"]

# A look that takes so many times the work of the quickest has moved data, and the next may follow at once. MPI says
# nothing about that, but it moves a long message in pieces, some of them as small as 16 KiB, and only during a look.
_BUSY = 3.0


def follow(begin: Callable[[], Any], held: object, status: Any = None, can_cancel: bool = False) -> Steps:
    """Go on when the request that `begin` gives has ended.

    Args:
        begin: starts a non-blocking operation.
        held: what it reads and writes; kept, if need be to the program's end, until MPI has let go of it.
        status: an `MPI.Status` that is filled at the end.
        can_cancel: whether it can be taken back when nobody waits for it any more, as a receive can.

    Raises:
        TransportError: MPI has refused or ended it with an error.
    """
    mpi, request = load(), None
    try:
        request = begin()
        if request.Test(status):
            return
        yield None
        quickest = math.inf
        while True:
            before = time.thread_time()
            if request.Test(status):
                return
            took = time.thread_time() - before
            quickest = min(quickest, took)
            yield None if took > _BUSY * quickest else _others
    except mpi.Exception as error:
        raise TransportError(f"mpi4py: {error}") from error
    finally:
        if request and not (can_cancel and _cancelled(request, mpi)):
            ending.keep(request, held)


def _cancelled(request: Any, mpi: Any) -> bool:
    with suppress(mpi.Exception):
        request.Cancel()
        return bool(request.Test())
    return True


def _others() -> Iterable[int]:
    """MPI does not say who has not come."""
    return ()
