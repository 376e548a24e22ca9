"""What a process says when an error in C code ends it."""

from __future__ import annotations

import faulthandler
from contextlib import suppress


def print_stack_of_crashes() -> None:
    """Let this process write the Python stack of each thread to its standard error when a signal
    such as SIGSEGV ends it.

    Such an error, of a library that reads images for example, raises no exception, and the exit
    code alone does not say where it was. A program that has enabled `faulthandler` itself keeps its
    settings; without a standard error that is a file, nothing is written.
    """
    if not faulthandler.is_enabled():
        with suppress(AttributeError, OSError, RuntimeError, ValueError):
            faulthandler.enable()
