"""The terminal in the hands of one worker, so that its debugger can be talked to."""

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

from ..environment import find_world
from ..errors import ConfigError
from .streams import Streams

__all__ = ["TerminalStreams", "lent_terminal"]

_TERMINAL = "/dev/tty"
_PATIENCE = timedelta(days=7)


@dataclass(frozen=True)
class TerminalStreams:
    """The terminal for one rank, and for the others what they would have without that.

    Attributes:
        rank: who has it.
        others: where the others write.
    """

    rank: int
    others: Streams

    def enter(self, local_rank: int) -> None:
        """Let this process's standard streams lead there, and no collective of torch.distributed time out."""
        _wait_however_long()
        if find_world().rank != self.rank:
            self.others.enter(local_rank)
            return
        terminal = os.open(_TERMINAL, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(terminal, descriptor)
        os.close(terminal)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - multiprocessing has put an empty one in its place
        os.tcsetpgrp(0, os.getpgrp())


@contextmanager
def lent_terminal(rank: int, others: Streams) -> Iterator[TerminalStreams]:
    """Let `rank` have the terminal during the body; afterwards it is this process's again.

    Raises:
        ConfigError: when this process has none.
    """
    try:
        terminal = os.open(_TERMINAL, os.O_RDWR)
    except OSError:
        raise ConfigError("debug_rank", "a terminal to give to that rank", found="a program without one") from None
    before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # taking it back is done from the background
    try:
        yield TerminalStreams(rank, others)
    finally:
        with suppress(OSError):
            os.tcsetpgrp(terminal, os.getpgrp())
        os.close(terminal)
        signal.signal(signal.SIGTTOU, before)


def _wait_however_long() -> None:
    """Give groups that are made from now on all the time that somebody at a debugger may need."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    for name in ("init_process_group", "new_group"):
        patient = _patiently(getattr(c10d, name))
        setattr(c10d, name, patient)
        setattr(dist, name, patient)


def _patiently(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def call(*args: Any, **kwargs: Any) -> Any:
        return make(*args, **{**kwargs, "timeout": _PATIENCE})

    return call
