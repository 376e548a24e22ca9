"""The user's program, run as Python itself would run it."""

from __future__ import annotations

import atexit
import multiprocessing
import runpy
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from ... import watchdog
from ...errors import ConfigError
from ...registry import import_object
from . import late_failures

__all__ = ["HOROVOD_SETUP", "Script"]

HOROVOD_SETUP = "lockstep.compat.horovod.as_horovod:enter"
"""What prepares a worker for a Horovod program; in a higher layer, and so imported by the worker on
demand.
"""


@dataclass(frozen=True)
class Script:
    """A program as ``python NAME ARGUMENTS`` or ``python -m NAME ARGUMENTS`` would run it.

    Attributes:
        name: the path of a file (or of a folder or archive with a `__main__.py`), or the name of a
            module.
        arguments: `sys.argv[1:]` of the program.
        is_module: whether `name` is the name of a module.
        setup: `module:function` to call before the program, or "".
    """

    name: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    setup: str = ""

    def check(self) -> None:
        """Raise ConfigError if the file does not exist; a module is looked up by the workers."""
        path = Path(self.name)
        if not self.is_module and path.is_dir() and not (path / "__main__.py").exists():
            near = sorted(file.name for file in path.glob("*.py"))[:5]
            hint = f"It has {', '.join(near)}." if near else ""
            raise ConfigError(
                "script", "a Python file, or a folder with a __main__.py", self.name, hint
            )
        if not self.is_module and not path.exists():
            near = sorted(path.name for path in Path().glob("*.py"))[:5]
            hint = (
                f"This folder has {', '.join(near)}."
                if near
                else "Give its path relative to the current folder."
            )
            raise ConfigError(
                "script", f"an existing Python file (current folder: {Path.cwd()})", self.name, hint
            )

    def run(self) -> None:
        """Run it in this process, until its threads and `atexit` functions have ended."""
        # the program chooses its own start method for processes, as it could in a process of its
        # own
        multiprocessing.set_start_method(None, force=True)
        sys.argv = [self.name, *self.arguments]
        sys.path[0] = str(Path.cwd()) if self.is_module else str(Path(self.name).resolve().parent)
        try:
            if self.setup:
                import_object("setup", self.setup)()
            if self.is_module:
                runpy.run_module(self.name, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(self.name, run_name="__main__")
        except BaseException as error:
            watchdog.report_exception(
                error
                # before its threads end, which they may never do: the other ranks need not wait for
                # that
            )
            with late_failures.reporting(error):
                _finish()
            raise
        else:
            _finish()


def _finish() -> None:
    """Join threads and run `atexit` functions, as the interpreter does and multiprocessing does
    not.
    """
    for call in reversed(getattr(threading, "_threading_atexits", [])):
        # ends the threads of executors that nobody has shut down; without it they are joined for
        # ever
        call()
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    if sys.exc_info()[1] is not None:
        # the program is ending, and its failure must still be reported
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    atexit._run_exitfuncs()
