"""Finds the subcommand, runs it, and turns what goes wrong into one line and an exit code."""

from __future__ import annotations

import argparse
import shlex
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from .. import __version__
from ..environment import debugging
from ..errors import ConfigError, InterruptedRunError, LockstepError, WorkerError, unknown_name
from . import train

__all__ = ["main"]

_COMMANDS = {"train": train}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, 2 for bad input, 128 + n for signal n, 1 for the rest."""
    parser = _parser()
    options, unknown = parser.parse_known_args(arguments)
    who = f"lockstep {options.command}"
    try:
        if unknown:
            raise unknown_name("option", unknown[0], options.known, expected=f"one that `{who} --help` lists")
        result: int = options.run(options)
        return result
    except LockstepError as error:
        return _fail(error, who, options.debug or debugging())
    except KeyboardInterrupt:
        print(f"{who}: stopped", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lockstep",
        description="Train a PyTorch model on one device or many, with the same script and the same answer.",
        epilog="`lockstep COMMAND --help` explains a command.",
    )
    parser.add_argument("--version", action="version", version=f"lockstep {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, module in _COMMANDS.items():
        module.add_to(commands, name)
    return parser


def _fail(error: LockstepError, who: str, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    if isinstance(error, InterruptedRunError):
        message = error.message
        if error.checkpoint is not None:
            run = str(Path(error.checkpoint).parent.parent)  # RUN/checkpoints/step-…
            message += f". Go on with: {who} --resume {shlex.quote(run)}"
    elif isinstance(error, ConfigError):
        message = f"error: {error.render(train.as_flag(error.argument))}"
    elif isinstance(error, WorkerError):
        message = f"error: {_worker_message(error)}"
    else:
        message = f"error: {error}"
    print(f"{who}: {message}", file=sys.stderr)
    return error.exit_code


def _worker_message(error: WorkerError) -> str:
    """A worker's known error in one line; an unknown one with its traceback, which its author needs."""
    if error.kind in _known_kinds():
        argument, colon, rest = error.reason.partition(":")
        return f"{train.as_flag(argument)}{colon}{rest} [rank {error.rank}]"
    return str(error)


def _known_kinds() -> set[str]:
    kinds: list[type[LockstepError]] = [LockstepError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return {kind.__name__ for kind in kinds}
