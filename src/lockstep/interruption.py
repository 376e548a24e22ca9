"""Collects the signals that end a program, and ends one whose interrupted run is not handled with
one line.

How a training ends after the step in progress is in `lockstep.training.stop_signals`.
"""

from __future__ import annotations

import errno
import math
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType

from . import environment
from .error_lines import write_error_line
from .errors import InterruptedRunError, LockstepError

__all__ = [
    "LAUNCHER_SIGNALS",
    "Requests",
    "collect_signals",
    "deferred_signals",
    "install",
    "leave_closed_terminal",
    "resume_hint",
]

LAUNCHER_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""The signals by which users, terminals and schedulers end a launcher. The last two stand for
SIGTERM: a terminal that is closed, and Ctrl-\\."""

# more than srun takes, and less than people wait before they send another one
_SAME_REQUEST_S = 5.0

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def install() -> None:
    """Replace `sys.excepthook` by one that prints a line for an `InterruptedRunError`, and exits
    with its code.
    """
    if not isinstance(sys.excepthook, _ExceptHook):
        sys.excepthook = _ExceptHook(sys.excepthook)


class _ExceptHook:
    """Handles `InterruptedRunError`; other exceptions go to the previous hook.

    Args:
        previous: that hook.
    """

    def __init__(self, previous: Hook) -> None:
        self._previous = previous

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, InterruptedRunError) or environment.debugging():
            self._previous(kind, error, trace)
            return
        if environment.find_world().is_first:
            program = Path(sys.argv[0])
            is_script = program.is_file()  # not so with python -c
            command = (
                shlex.join(sys.orig_argv) if is_script and not environment.is_launched() else ""
            )
            name = program.name if is_script else "python"
            write_error_line(f"{name}: {error.message}{resume_hint(error, command)}")
        raise SystemExit(error.exit_code)


def resume_hint(error: LockstepError, command: str = "") -> str:
    """Return ". " and the sentence that says how to resume; "" if nothing was saved.

    Args:
        error: that ended the run.
        command: the command line that started the program; "" if it is not known.
    """
    if error.run_dir is None:
        return ""
    run = shlex.quote(error.run_dir)
    if not command:
        return f". To resume, start it again with the environment variable LOCKSTEP_RESUME={run}"
    return f". Resume with: LOCKSTEP_RESUME={run} {command}"


class Requests:
    """Tells a signal that asks for something new from one that repeats a request to end.

    Slurm sends SIGTERM to every process of a step, and srun to its tasks as well: they get it
    twice, at one request. Of a closed terminal a program may hear from the kernel, and from its
    shell.
    """

    def __init__(self) -> None:
        self._terminated_at = -math.inf

    def is_new(self, number: int) -> bool:
        """Return whether a signal that has come now is more than a repetition."""
        if number == signal.SIGINT:
            return True
        now = time.monotonic()
        if now - self._terminated_at < _SAME_REQUEST_S:
            return False
        self._terminated_at = now
        return True


def leave_closed_terminal() -> None:
    """Let standard streams lead nowhere if their terminal was closed, after SIGHUP.

    Every write to it would fail, and so end the program before it has saved.
    """
    for descriptor in (0, 1, 2):
        try:
            os.tcgetpgrp(descriptor)
        except OSError as error:
            if error.errno == errno.EIO:  # other errors: it is open, or never was a terminal
                nowhere = os.open(os.devnull, os.O_RDWR)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)


@contextmanager
def collect_signals(received: list[int]) -> Iterator[None]:
    """Append SIGINT and SIGTERM to `received` during the body; the previous handlers are restored
    after it.

    SIGHUP and SIGQUIT are appended as SIGTERM. A repeated one counts once, see `Requests`. Ignored
    signals stay ignored (SIGHUP under nohup). Outside the main thread, where Python handles no
    signals, the list stays empty.
    """
    requests = Requests()

    def collect(number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            leave_closed_terminal()
        if requests.is_new(number):
            received.append(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)

    before = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in LAUNCHER_SIGNALS:
                if signal.getsignal(number) not in (None, signal.SIG_IGN):
                    before[number] = signal.signal(number, collect)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Hold back the signals of `collect_signals` until the end of the body, which imports large
    packages.

    Some of their modules catch every exception while they are imported: a KeyboardInterrupt would
    be lost there.
    """
    received: list[int] = []
    with collect_signals(received):
        yield
    if received:
        signal.raise_signal(received[0])
