"""How a program over MPI ends: in good order where it can, otherwise with its whole job."""

from __future__ import annotations

import atexit
import sys
import time
from contextlib import suppress
from types import TracebackType
from typing import Any, Protocol
from weakref import WeakSet

from .library import load

__all__ = ["Ending", "ending"]

_PATIENCE_S = 1.0  # for what was given up: it has been waited for before, or the other ranks have given it up too
_NAP_S = 1e-3


class Leaving(Protocol):
    """Something that has operations under way."""

    def close(self) -> None:
        """Let them end, or give them up."""


class Ending:
    """What has to be done before MPI_Finalize, which mpi4py calls when the interpreter has ended.

    MPI cannot finalize while an operation is under way, and a rank that ends by an exception would wait there for
    the others, which wait for it. Then MPI_Abort ends the job instead, on every machine.
    """

    def __init__(self) -> None:
        self._left: list[tuple[Any, object]] = []
        self._links: WeakSet[Leaving] = WeakSet()
        self._guarding = False
        self.aborting = False  # whether MPI will abort the job when the interpreter has ended

    def keep(self, request: Any, held: object) -> None:
        """Keep what a request that nobody waits for any more still reads or writes."""
        self._left = [pair for pair in self._left if _is_pending(pair[0])]
        self._left.append((request, held))

    def guard(self) -> None:
        """From now on an exception that ends this program ends the job."""
        if self._guarding:
            return
        self._guarding = True
        atexit.register(self.finish)
        if not hasattr(sys, "ps1"):  # at a prompt an exception ends nothing
            self._hook()

    def watch(self, link: Leaving) -> None:
        """Let `link` end before the program does."""
        self._links.add(link)
        self.guard()

    def finish(self) -> None:
        """Let what is under way end; if it does not, tell so, and let MPI abort the job."""
        for link in list(self._links):
            link.close()
        deadline = time.monotonic() + _PATIENCE_S
        while not self.aborting and any(_is_pending(request) for request, _ in self._left):
            if time.monotonic() >= deadline:
                self._abort(1)
                print("mpi4py: an operation was given up and has not ended: MPI aborts the job", file=sys.stderr)
            time.sleep(_NAP_S)

    def _hook(self) -> None:
        before = sys.excepthook

        def report_and_abort(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            self._abort(error)
            before(kind, error, trace)

        sys.excepthook = report_and_abort

    def _abort(self, status: BaseException | int) -> None:
        """Abort once the interpreter has ended; what is printed until then is still seen."""
        from mpi4py.run import set_abort_status

        self.aborting = True
        set_abort_status(status)


def _is_pending(request: Any) -> bool:
    with suppress(load().Exception):
        return not request.Test()
    return False


ending = Ending()
