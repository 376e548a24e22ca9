"""The command line's grammar: argparse, with its errors as Lockstep's."""

from __future__ import annotations

import argparse
from typing import NoReturn

from ..errors import LockstepError

__all__ = ["Help", "Parser", "UsageError"]


class Help(argparse.RawDescriptionHelpFormatter):
    """Leaves description and examples as they are written."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26)


class UsageError(LockstepError):
    """The command line cannot be taken apart."""

    exit_code = 2


class Parser(argparse.ArgumentParser):
    """A parser that raises UsageError, in one line, where argparse would print and leave."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError for argparse's `message`."""
        message = message.removeprefix("argument ")
        flag, _, problem = message.partition(": ")
        if problem == "expected one argument":
            message = f"{flag}: expected a value, got none (one that begins with a dash is written {flag}=VALUE)"
        raise UsageError(f"{message}. `{self.prog} --help` explains it.")
