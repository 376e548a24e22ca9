"""Parses the command line, runs the subcommand, and turns errors into one line and an exit code."""

from __future__ import annotations

import argparse
import atexit
import functools
import gc
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence

from ..environment import debugging
from ..errors import (
    ConfigError,
    DataError,
    InterruptedRunError,
    LockstepError,
    WorkerError,
    unknown_name,
)
from ..interruption import resume_hint
from . import (
    bench,
    blame,
    diff,
    doctor,
    explain,
    horovodrun,
    join,
    ledger,
    plan,
    replay,
    resize,
    run,
    submit,
    timeline,
    top,
    train,
    verify,
)
from .explain import failure_text
from .parser import Parser, UsageError
from .resolved_options import as_typed

_COMMANDS = {
    "train": train,
    "run": run,
    "submit": submit,
    "verify": verify,
    "doctor": doctor,
    "bench": bench,
    "plan": plan,
    "ledger": ledger,
    "replay": replay,
    "blame": blame,
    "diff": diff,
    "top": top,
    "resize": resize,
    "join": join,
    "explain": explain,
    "timeline": timeline,
    "horovodrun": horovodrun,
}
_FLAGS = ("-h", "--help", "--version")

_EXAMPLES = """
examples:
  lockstep train                  train a small network on handwritten digits
  lockstep train --workers 2      the same with two workers
  lockstep train --help           all options, with examples
  lockstep run -np 2 train.py     run your program with two workers
  lockstep doctor                 check this host, and list what to fix
  lockstep plan train.py          predict whether more workers will pay
  lockstep top                    show what the ranks of running jobs do
  lockstep explain                show again why the last run failed
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code: 0, 2 for bad input, 128 + n for signal n, 1
    for other errors.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    command = f"lockstep {words[0]}" if words and words[0] in _COMMANDS else "lockstep"
    options = argparse.Namespace()
    if arguments is None:
        # the end of Python spends 0.4 s on garbage among PyTorch's modules, where none is
        atexit.register(gc.freeze)
    try:
        _parse(words, command, options)
        result: int = options.run(options)
        return result
    except Exception as raised:
        debug = "--debug" in words or debugging()
        error = raised if isinstance(raised, LockstepError) else _unexpected_error(raised)
        option_name = functools.partial(as_typed, parsed=options)
        # how many words are the program of `lockstep run` and its arguments
        program_words = 1 + len(options.arguments) if hasattr(options, "script") else 0
        hint = functools.partial(_resume_hint, words=words, program_words=program_words)
        full_tracebacks = getattr(options, "full_tracebacks", False)
        return _print_error(error, command, option_name, debug, full_tracebacks, hint)
    except KeyboardInterrupt:
        print(f"{command}: stopped", file=sys.stderr)
        return 130


def run_as_horovodrun() -> int:
    """Run ``lockstep horovodrun``: the console script ``horovodrun`` of the package
    ``packaging/horovodrun``.
    """
    return main(["horovodrun", *sys.argv[1:]])


def _parse(words: list[str], command: str, options: argparse.Namespace) -> None:
    """Parse the command line into `options`; --help and --version exit."""
    parser = _parser()
    if not words:
        parser.parse_args(["--help"])
    if words[0] not in (*_COMMANDS, *_FLAGS):
        raise unknown_name("command", words[0], (*_COMMANDS, "--help", "--version"))
    _, unknown = parser.parse_known_args(words, options)
    if unknown:
        flag = unknown[0].partition("=")[0]
        name = flag.lstrip("-")
        instead = options.elsewhere.get(flag.removesuffix(name) + name.replace("_", "-"))
        if instead is not None:
            raise UsageError(
                f"{flag}: `{command}` has no such option: {instead}. `{command} --help` explains "
                "it."
            )
        raise unknown_name(
            "option", flag, options.known, expected=f"one that `{command} --help` lists"
        )


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
    """Prints the version. It is read only here, as that takes longer than importing the command."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from .. import __version__

        print(f"lockstep {__version__}")
        parser.exit()


def _unexpected_error(raised: Exception) -> LockstepError:
    """Return the error for an exception that is not one of Lockstep's."""
    message = type(raised).__name__ + (f": {raised}" if str(raised) else "")
    error = LockstepError(f"{message}. --debug shows the traceback.")
    error.__cause__ = raised
    return error


def _resume_hint(error: LockstepError, words: list[str], program_words: int) -> str:
    """Return ". " and the sentence with the command that resumes a run; "" if nothing was saved.

    Args:
        error: of the run.
        words: of the command line that started it.
        program_words: how many of them, the last ones, are the program of `lockstep run` and its
            arguments.
    """
    if error.run_dir is None:
        return ""
    if words[0] == "train":
        return f". Resume with: {shlex.join(['lockstep', 'train', '--resume', error.run_dir])}"
    if words[0] != "run":
        return resume_hint(error, shlex.join(["lockstep", *words]))
    from ..launcher.remote_hosts.remote_command import redact_variables  # imports torch

    command_words = words[1 : len(words) - program_words]
    program = words[len(words) - program_words :]
    # the value of a variable belongs into no log
    if redact_variables(command_words) != command_words:
        return resume_hint(error)
    if "--resume" in command_words:
        place = command_words.index("--resume")
        del command_words[place : place + 2]
    command_words = [word for word in command_words if not word.startswith("--resume=")]
    return (
        ". Resume with: "
        f"{shlex.join(['lockstep', 'run', '--resume', error.run_dir, *command_words, *program])}"
    )


def _print_error(
    error: LockstepError,
    command: str,
    option_name: Callable[[str], str],
    debug: bool,
    full_tracebacks: bool,
    hint: Callable[[LockstepError], str],
) -> int:
    """Print the error to stderr, and return the exit code."""
    if debug:
        # with the exceptions that it was raised for, such as one of a data set
        cause: BaseException | None = error
        while cause is not None:
            cause.__suppress_context__ = False
            cause = cause.__context__
        traceback.print_exception(error)
    if isinstance(error, InterruptedRunError):
        message = error.message + hint(error)
    elif isinstance(error, ConfigError):
        # one that a program has raised names arguments as the program spells them, and where it was
        name = error.argument if error.call_site else option_name(error.argument)
        place = f"{error.call_site}: " if error.call_site else ""
        message = f"error: {place}{_in_one_line(error.render(name))}"
    elif isinstance(error, WorkerError) and _names_its_line(error) and not debug:
        message = f"error: {_worker_message(error, option_name)}"
    elif error.report_json:
        lead = len(f"{command}: error: ")
        message = f"error: {failure_text(sys.stderr, error, lead)}"
    elif isinstance(error, WorkerError):
        message = f"error: {str(error) if full_tracebacks else _worker_message(error, option_name)}"
    else:
        message = f"error: {_in_one_line(str(error))}"
    # a worker has died or raised an exception
    if error.report_json or isinstance(error, WorkerError):
        sentence = hint(error).removeprefix(". ")
        message = f"{message.rstrip()}\n\n{sentence}" if sentence else message
    print(f"{command}: {message}", file=sys.stderr)
    return error.exit_code


def _worker_message(error: WorkerError, option_name: Callable[[str], str]) -> str:
    """Return a worker's error, in one line if it is one of Lockstep's, else with its traceback."""
    if error.kind in _error_names():
        argument, colon, rest = error.reason.partition(":")
        return _in_one_line(f"{option_name(argument)}{colon}{rest} [rank {error.rank}]")
    return str(error)


def _names_its_line(error: WorkerError) -> bool:
    """Return whether this is an exception of a data set, which names sample and line of the program
    by itself.

    The traceback would show frames of Lockstep, and the state of the other ranks says nothing about
    it.
    """
    return (
        error.kind == DataError.__name__
        and re.search(r", at [^ ]+:\d+ in ", error.reason) is not None
    )


def _in_one_line(text: str) -> str:
    return " ".join(text.splitlines())


def _error_names() -> set[str]:
    classes: list[type[LockstepError]] = [LockstepError]
    for cls in classes:
        classes += cls.__subclasses__()
    return {cls.__name__ for cls in classes}
