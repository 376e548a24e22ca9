"""The argument parser of the command, with Lockstep's errors, numbers in options, and pictures that may be missing."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from .. import arguments
from ..errors import LockstepError, MissingPackageError

__all__ = ["Help", "Parser", "UsageError", "can_draw"]


class Help(argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of description and examples."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26)


class UsageError(LockstepError):
    """The command line cannot be parsed."""

    exit_code = 2


class Parser(argparse.ArgumentParser):
    """A parser that raises UsageError with a message of one line, where argparse would print and exit."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError for argparse's `message`."""
        message = message.removeprefix("argument ")
        flag, _, problem = message.partition(": ")
        required = "the following arguments are required: "
        if message.startswith(required):
            missing = message.removeprefix(required).split(", ")
            given = ", ".join(missing[:1] if missing[0] == "script" else missing)
            what = "a Python file or, with -m, a module" if given == "script" else "a value"
            message = f"{given}: expected {what}, got none"
        if problem == "expected one argument":
            first, *_, last = flag.split("/") * 2
            message = f"{first}: expected a value, got none (one that begins with a dash is written {last}=VALUE)"
        raise UsageError(f"{message}. `{self.prog} --help` explains it.")

    def set_command(
        self, run: Callable[[argparse.Namespace], int], elsewhere: Mapping[str, str] | None = None, **defaults: Any
    ) -> None:
        """Set the function that runs this subcommand, and further values of the namespace.

        Args:
            run: the function.
            elsewhere: options of other commands → what they are here, a clause; names have dashes, no underscores.
            defaults: the further values.
        """
        known = [flag for action in self._actions for flag in action.option_strings]  # suggested for unknown options
        self.set_defaults(run=run, known=known, elsewhere=elsewhere or {}, **defaults)

    def first_flags(self) -> dict[str, str]:
        """Return the first flag of each option, by the option's name in the namespace."""
        return {action.dest: action.option_strings[0] for action in self._actions if action.option_strings}


def can_draw(command: str) -> bool:
    """Return whether the picture that `command` draws unasked can be drawn; if not, a line says what is missing."""
    try:
        arguments.require_package("matplotlib", "the picture", "plots")
    except MissingPackageError as error:
        print(f"{command}: without a picture: {error}", file=sys.stderr)
        return False
    return True
