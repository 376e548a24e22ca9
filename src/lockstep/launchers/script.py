"""A program of the user's, run in a worker as Python itself would run it."""

from __future__ import annotations

import atexit
import multiprocessing
import runpy
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from .. import watch
from ..errors import ConfigError
from ..registry import import_object

__all__ = ["Script"]


@dataclass(frozen=True)
class Script:
    """What ``python NAME ARGUMENTS`` or ``python -m NAME ARGUMENTS`` would run.

    Attributes:
        name: path of a file (or of a folder or archive with a `__main__.py`), or a module's name.
        arguments: what the program finds in `sys.argv` after its own name.
        is_module: whether `name` is a module's.
        before: `module:function` of what is called first, or "".
    """

    name: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    before: str = ""

    def check(self) -> None:
        """Raise ConfigError where there is no such file; a module is looked for by the workers."""
        if not self.is_module and not Path(self.name).exists():
            near = sorted(path.name for path in Path().glob("*.py"))[:5]
            hint = f"Here lie {', '.join(near)}." if near else "Name it as seen from the current folder."
            raise ConfigError("script", f"a Python file that is there (current folder: {Path.cwd()})", self.name, hint)

    def run(self) -> None:
        """Run it in this process, with its threads and its `atexit` functions to their end."""
        # the program chooses its own way to start processes, as it could in a process of its own
        multiprocessing.set_start_method(None, force=True)
        sys.argv = [self.name, *self.arguments]
        sys.path[0] = str(Path.cwd()) if self.is_module else str(Path(self.name).resolve().parent)
        try:
            if self.before:
                import_object("before", self.before)()
            if self.is_module:
                runpy.run_module(self.name, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(self.name, run_name="__main__")
        except BaseException as error:
            watch.raised(error)  # its threads may never end, and the other ranks need not wait for that
            raise
        finally:
            _finish()


def _finish() -> None:
    """What the interpreter does at the end of a program, and multiprocessing leaves out at the end of a process."""
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    if sys.exc_info()[1] is not None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is ending already, and its failure is still to be reported
    atexit._run_exitfuncs()
