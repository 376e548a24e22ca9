"""Starts multiprocessing's fork server, the parent of workers; does not load PyTorch here, only there."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker

__all__ = ["start_fork_server", "unseen_main"]

# One at a time may hide the main module and show it again.
_starting = threading.Lock()


def start_fork_server(preload: Sequence[str] = ()) -> None:
    """Start multiprocessing's fork server, with PyTorch and the modules of `preload` loaded, if there is none yet."""
    multiprocessing.set_forkserver_preload([f"{__package__}.preload", *preload])
    with unseen_main():
        resource_tracker.ensure_running()  # before the mask: starting it would unblock SIGINT
        # The mask is inherited. Without it Ctrl-C would end the server while it is loading, with a traceback.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def unseen_main() -> Iterator[None]:
    """Let multiprocessing take this program's `__main__` for one that a child need not (and must not) run again.

    Work travels by value, so that workers have no use for the main module, and a script without an
    ``if __name__ == "__main__"`` guard would launch itself once more. Starting a process also settles
    multiprocessing's default start method, which is left open again.
    """
    main = sys.modules["__main__"]
    with _starting:
        seen = {name: vars(main)[name] for name in ("__file__", "__spec__") if name in vars(main)}
        method = multiprocessing.get_start_method(allow_none=True)
        main.__spec__ = None
        vars(main).pop("__file__", None)
        try:
            yield
        finally:
            vars(main).update(seen)
            if method is None:
                multiprocessing.set_start_method(None, force=True)
