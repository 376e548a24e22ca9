"""Makes multiprocessing's fork server ready to be the parent of workers; imported there and nowhere else.

The server loads this module once, and every worker is a fork of it: what is imported here costs later launches
nothing.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress

import torch.distributed.elastic.multiprocessing.api  # noqa: F401

from ..watch import hooks  # noqa: F401
from . import worker  # noqa: F401

__all__: list[str] = []


def _detach() -> None:
    # A signal to the terminal's process group is for the launcher, which passes it on to its workers once.
    # Without the fork server nobody could tell how they ended.
    with suppress(PermissionError):  # leader of its own session already
        os.setpgid(0, 0)
    # The launcher blocks SIGINT while it starts the server; one that came meanwhile is dropped, not handled.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGINT, handler)


if any("multiprocessing.forkserver" in word for word in sys.orig_argv):
    _detach()
