"""Finds the subcommand, runs it, and turns what goes wrong into one line and an exit code."""

from __future__ import annotations

import argparse
import functools
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from ..environment import debugging
from ..errors import ConfigError, InterruptedRunError, LockstepError, WorkerError, unknown_name
from . import doctor, explain, horovodrun, run, timeline, top, train, verify
from .gather import as_typed
from .parser import Parser
from .report_text import failure_text

__all__ = ["main"]

_COMMANDS = {
    "train": train,
    "run": run,
    "verify": verify,
    "doctor": doctor,
    "top": top,
    "explain": explain,
    "timeline": timeline,
    "horovodrun": horovodrun,
}
_FLAGS = ("-h", "--help", "--version")

_EXAMPLES = """
examples:
  lockstep train                  train a small network on handwritten digits
  lockstep train --workers 2      the same, with two worker processes
  lockstep train --help           all options, with examples
  lockstep run -np 2 train.py     a program of yours, as two worker processes
  lockstep doctor                 what is here, and what to fix
  lockstep top                    what running jobs are doing
  lockstep explain                why the last run failed, once more
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, 2 for bad input, 128 + n for signal n, 1 for the rest."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    who = f"lockstep {given[0]}" if given and given[0] in _COMMANDS else "lockstep"
    options = argparse.Namespace()
    try:
        _parse(given, who, options)
        result: int = options.run(options)
        return result
    except Exception as raised:
        debug = "--debug" in given or debugging()
        error = raised if isinstance(raised, LockstepError) else _unknown(raised)
        spell = functools.partial(as_typed, arguments=options)
        return _fail(error, who, spell, debug, getattr(options, "whole_tracebacks", False))
    except KeyboardInterrupt:
        print(f"{who}: stopped", file=sys.stderr)
        return 130


def _parse(given: list[str], who: str, options: argparse.Namespace) -> None:
    """Take the command line apart, into `options`; ends the program after help and version."""
    parser = _parser()
    if not given:
        parser.parse_args(["--help"])
    if given[0] not in (*_COMMANDS, *_FLAGS):
        raise unknown_name("command", given[0], (*_COMMANDS, "--help", "--version"))
    _, unknown = parser.parse_known_args(given, options)
    if unknown:
        flag = unknown[0].partition("=")[0]
        raise unknown_name("option", flag, options.known, expected=f"one that `{who} --help` lists")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="lockstep",
        usage="%(prog)s COMMAND [options]",
        description="Train a PyTorch model on one device or many, with the same script.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", prog="lockstep")
    for name, module in _COMMANDS.items():
        module.add_to(commands, name)
    return parser


class _Version(argparse.Action):
    """Looks the version up when it is asked for, which takes longer than all else that the command loads."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from .. import __version__

        print(f"lockstep {__version__}")
        parser.exit()


def _unknown(raised: Exception) -> LockstepError:
    """An error of the model's or the data's own code, or of this program's."""
    what = type(raised).__name__ + (f": {raised}" if str(raised) else "")
    error = LockstepError(f"{what}. --debug shows where.")
    error.__cause__ = raised
    return error


def _fail(error: LockstepError, who: str, spell: Callable[[str], str], debug: bool, whole: bool) -> int:
    if debug:
        traceback.print_exception(error)
    if isinstance(error, InterruptedRunError):
        message = error.message
        if error.checkpoint is not None:
            run = str(Path(error.checkpoint).parent.parent)  # RUN/checkpoints/step-…
            message += f". Go on with: {who} --resume {shlex.quote(run)}"
    elif isinstance(error, ConfigError):
        message = f"error: {_in_one_line(error.render(spell(error.argument)))}"
    elif error.report_json:
        message = f"error: {failure_text(sys.stderr, error, len(f'{who}: error: '))}"
    elif isinstance(error, WorkerError):
        message = f"error: {str(error) if whole else _worker_message(error, spell)}"
    else:
        message = f"error: {_in_one_line(str(error))}"
    print(f"{who}: {message}", file=sys.stderr)
    return error.exit_code


def _worker_message(error: WorkerError, spell: Callable[[str], str]) -> str:
    """A worker's known error in one line; an unknown one with its traceback, which its author needs."""
    if error.kind in _known_kinds():
        argument, colon, rest = error.reason.partition(":")
        return _in_one_line(f"{spell(argument)}{colon}{rest} [rank {error.rank}]")
    return str(error)


def _in_one_line(text: str) -> str:
    return " ".join(text.splitlines())


def _known_kinds() -> set[str]:
    kinds: list[type[LockstepError]] = [LockstepError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return {kind.__name__ for kind in kinds}
