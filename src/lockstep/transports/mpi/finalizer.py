"""How a program over MPI ends: it completes its operations and finalizes MPI, or aborts its whole
job.
"""

from __future__ import annotations

import atexit
import sys
import time
from contextlib import suppress
from types import TracebackType
from typing import Any, Protocol
from weakref import WeakSet

from .library import load_mpi

# for abandoned operations: they have been waited for before, or the other ranks have abandoned them
# too
_GRACE_S = 1.0
_POLL_S = 1e-3


class Closable(Protocol):
    """An object that has pending operations."""

    def close(self) -> None:
        """Complete them, or abandon them."""


class Finalizer:
    """What has to be done before MPI_Finalize, which mpi4py calls when the interpreter exits.

    MPI cannot finalize while an operation is pending, and a rank that ends by an exception would
    wait there for the others, which wait for it. Then MPI_Abort ends the job instead, on every
    host.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[Any, object]] = []
        self._contexts: WeakSet[Closable] = WeakSet()
        self._installed = False
        self.aborting = False  # whether MPI will abort the job when the interpreter exits

    def keep_alive(self, request: Any, memory: object) -> None:
        """Keep the memory of an abandoned request, which MPI still reads or writes."""
        self._kept = [pair for pair in self._kept if _is_pending(pair[0])]
        self._kept.append((request, memory))

    def abort_on_exception(self) -> None:
        """Make any exception that ends this program from now on end the job."""
        if self._installed:
            return
        self._installed = True
        atexit.register(self.finish)
        if not hasattr(sys, "ps1"):  # at a prompt an exception ends nothing
            self._install_excepthook()

    def add(self, context: Closable) -> None:
        """Close `context` before the program ends."""
        self._contexts.add(context)
        self.abort_on_exception()

    def finish(self) -> None:
        """Complete pending operations; if they do not complete, print so, and let MPI abort the
        job.
        """
        for context in list(self._contexts):
            context.close()
        deadline = time.monotonic() + _GRACE_S
        while not self.aborting and any(_is_pending(request) for request, _ in self._kept):
            if time.monotonic() >= deadline:
                self._abort(1)
                print(
                    "mpi4py: an operation was given up and has not ended: MPI aborts the job",
                    file=sys.stderr,
                )
            time.sleep(_POLL_S)

    def _install_excepthook(self) -> None:
        before = sys.excepthook

        def report_and_abort(
            kind: type[BaseException], error: BaseException, trace: TracebackType | None
        ) -> None:
            self._abort(error)
            before(kind, error, trace)

        sys.excepthook = report_and_abort

    def _abort(self, status: BaseException | int) -> None:
        """Abort once the interpreter has exited; what is printed until then is still seen."""
        from mpi4py.run import set_abort_status

        self.aborting = True
        set_abort_status(status)


def _is_pending(request: Any) -> bool:
    with suppress(load_mpi().Exception):
        return not request.Test()
    return False


finalizer = Finalizer()
