"""Prepares multiprocessing's fork server as the parent of workers; imported only there.

The server loads this module once and every worker is a fork of it, so what is imported here adds
nothing to the start of a worker.
"""

from __future__ import annotations

import functools
import gc
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ...environment import with_variables
from ...interruption import LAUNCHER_SIGNALS
from ...watchdog import patches  # noqa: F401
from . import worker  # noqa: F401

__all__: list[str] = []


def _detach() -> None:
    # A signal to the terminal's process group is meant for the launcher, which forwards it once to
    # its workers. If the fork server died from it, the exit codes of the workers would be lost.
    with suppress(PermissionError):  # it is already the leader of its session
        os.setpgid(0, 0)
    # The launcher blocks these signals while it starts the server; those that arrived meanwhile are
    # dropped.
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in LAUNCHER_SIGNALS}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, LAUNCHER_SIGNALS)
    # Slurm sends SIGTERM to every process of a step, in whatever group it is. The server ends with
    # its launcher.
    signal.signal(signal.SIGINT, handlers.pop(signal.SIGINT))
    os.register_at_fork(after_in_child=functools.partial(_heed_signals, os.getpid(), handlers))


def _heed_signals(server: int, handlers: Mapping[signal.Signals, Any]) -> None:
    """Let signals have their usual effect in a process that the server has forked; processes of
    that one are its own.

    Args:
        server: the process of the server.
        handlers: as the launcher had them: SIGHUP may be ignored, under nohup.
    """
    if os.getppid() == server:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _prepare_titles() -> None:
    """Let workers change their command lines in ps: where these lie is found out before variables
    change.
    """
    # The variables in /proc/PID/environ stay, by which the launcher finds what a run has left
    # behind.
    with with_variables({"SPT_NOENV": "1"}), suppress(ImportError):
        import setproctitle

        setproctitle.getproctitle()


if any("multiprocessing.forkserver" in word for word in sys.orig_argv):
    _detach()
    _prepare_titles()
    # workers do not search for garbage in what they inherit, and so go on sharing its memory
    gc.freeze()
