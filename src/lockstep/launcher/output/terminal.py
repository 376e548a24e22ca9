"""Lends the terminal to one worker for its debugger (`lockstep run --debug-rank`)."""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ...environment import find_world
from ...errors import ConfigError
from .worker_output import OutputTarget

_TERMINAL = "/dev/tty"
_DEBUG_TIMEOUT = timedelta(days=7)


@dataclass(frozen=True)
class TerminalOutput:
    """The terminal for one rank, and the usual target for the others.

    Attributes:
        rank: the rank that gets the terminal.
        others: the target of all other ranks.
    """

    rank: int
    others: OutputTarget

    def redirect(self, local_rank: int) -> None:
        """Redirect this process's standard streams, and remove the timeout of collectives of
        torch.distributed.
        """
        _extend_timeouts()
        if find_world().rank != self.rank:
            self.others.redirect(local_rank)
            return
        terminal = os.open(_TERMINAL, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(terminal, descriptor)
        os.close(terminal)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - multiprocessing has replaced it by an empty one
        os.tcsetpgrp(0, os.getpgrp())


@contextmanager
def lend_terminal(rank: int, others: OutputTarget) -> Iterator[TerminalOutput]:
    """Give the terminal to `rank` during the body; afterwards this process takes it back.

    Raises:
        ConfigError: this process has no terminal.
    """
    try:
        terminal = os.open(_TERMINAL, os.O_RDWR)
    except OSError:
        raise ConfigError(
            "debug_rank", "a terminal for that rank", found="a process without one"
        ) from None
    # a background process takes the terminal back
    before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    try:
        yield TerminalOutput(rank, others)
    finally:
        with suppress(OSError):
            os.tcsetpgrp(terminal, os.getpgrp())
        os.close(terminal)
        signal.signal(signal.SIGTTOU, before)


def _extend_timeouts() -> None:
    """Give process groups created from now on a timeout that is long enough for debugging."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    for name in ("init_process_group", "new_group"):
        extended = _with_debug_timeout(getattr(c10d, name))
        setattr(c10d, name, extended)
        setattr(dist, name, extended)


def _with_debug_timeout(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def call(*args: Any, **kwargs: Any) -> Any:
        return make(*args, **{**kwargs, "timeout": _DEBUG_TIMEOUT})

    return call
