"""The exceptions that Lockstep raises."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

__all__ = [
    "OUTPUT_FAILED",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DesyncError",
    "DivergedError",
    "FaultyWorkerError",
    "InterruptedRunError",
    "LockstepError",
    "MembershipChangedError",
    "MismatchError",
    "MissingPackageError",
    "RankLostError",
    "StallError",
    "TransportError",
    "WorkerError",
    "counted",
    "ranks_in_words",
    "unexpected_argument",
    "unknown_name",
]

OUTPUT_FAILED = 74
"""The exit code for files that cannot be written, such as on a full disk: EX_IOERR of sysexits.h.
"""


class LockstepError(Exception):
    """Base class of all errors that Lockstep raises.

    Attributes:
        exit_code: the exit code of the ``lockstep`` command for this error.
        report_json: the watchdog's report on all ranks; "" if there is none.
        report_path: the file to which the report has been written; "" if it has not been.
        report_text: the report as text, for errors whose message is not the report.
        call_site: where the user's program was when a worker raised it, e.g. ``train.py:31 in
            main``; "" elsewhere.
        checkpoint: path of the newest checkpoint of the job that ended with it; None if it saved
            none, or in a worker.
    """

    exit_code: int = 1
    report_json: str = ""
    report_path: str = ""
    report_text: str = ""
    call_site: str = ""
    checkpoint: str | None = None

    @property
    def run_dir(self) -> str | None:
        """The run directory of the checkpoint, which is RUN/checkpoints/step-…; None without
        one.
        """
        return None if self.checkpoint is None else str(Path(self.checkpoint).parent.parent)


class ConfigError(LockstepError, ValueError):
    """An option or argument has an invalid value.

    Args:
        argument: the argument's name in Python, e.g. ``"global_batch_size"``; the command line
            shows it as ``--global-batch-size``.
        expected: the valid values, e.g. ``"a whole number of at least 1"``.
        got: the invalid value; the message shows its `repr`.
        hint: what to do about it, a full sentence.
        found: a description of the invalid value if it is not a single object: ``"both"``, ``"a
            folder without one"``. The message shows it unquoted, in place of `got`.
    """

    exit_code = 2

    def __init__(
        self, argument: str, expected: str, got: object = None, hint: str = "", *, found: str = ""
    ) -> None:
        self.argument = argument
        self.expected = expected
        self.got = got
        self.hint = hint
        self.found = found
        super().__init__(argument, expected, got, hint)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), found=self.found), self.args

    def __str__(self) -> str:
        return self.render(self.argument)

    def render(self, argument: str) -> str:
        """Return the message with `argument` as the argument's name.

        Args:
            argument: the name, such as that of a flag of the command.
        """
        text = f"{argument}: expected {self.expected}, got {self.found or repr(self.got)}"
        return f"{text}. {self.hint}" if self.hint else text


class MissingPackageError(ConfigError):
    """A package that only a part of Lockstep needs is not installed.

    Args:
        needed_by: what needs it: an argument, as for `ConfigError`, or a call such as
            ``"Curve()"``.
        package: the name of the package on an index.
        extra: the extra of Lockstep that installs it.
    """

    def __init__(self, needed_by: str, package: str, extra: str) -> None:
        self.package = package
        self.extra = extra
        hint = f"pip install 'lockstep-train[{extra}]'"
        super().__init__(
            needed_by, f"the package {package}", hint=hint, found="an environment without it"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.argument, self.package, self.extra)

    def render(self, argument: str) -> str:
        """Return the message with `argument` as the name of what needs the package."""
        return f"{argument} needs the package {self.package}: {self.hint}"


class DataError(LockstepError):
    """A data file or data set is missing, damaged or in another format."""

    exit_code = 2


class CheckpointError(LockstepError):
    """A checkpoint cannot be written, is damaged, or does not fit the run."""

    exit_code = 2


class MismatchError(LockstepError):
    """Ranks have different values, models or arguments that must be the same on all of them."""


class DivergedError(LockstepError, ArithmeticError):
    """The loss is no longer a finite number."""


class FaultyWorkerError(LockstepError):
    """A worker computes wrong numbers, again and again, or two differ and nothing says which is
    right.

    Attributes:
        ranks: the worker's rank; of two or more, where it cannot be known which.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message, ranks)
        self.message = message
        self.ranks = ranks

    def __str__(self) -> str:
        return self.message


class InterruptedRunError(LockstepError):
    """A signal stopped the run after its current step.

    Attributes:
        checkpoint: path of the saved checkpoint; None if the run saves no checkpoints.
    """

    def __init__(self, message: str, signal_number: int, checkpoint: str | None = None) -> None:
        super().__init__(message, signal_number, checkpoint)
        self.message = message
        self.signal_number = signal_number
        self.checkpoint = checkpoint
        self.exit_code = 128 + signal_number

    def __str__(self) -> str:
        return self.message


class TransportError(LockstepError, RuntimeError):
    """Ranks cannot communicate."""


class MembershipChangedError(TransportError):
    """A wait has ended because a worker was lost, in an elastic job that goes on without it.

    Args:
        generation: the group that is over.
    """

    def __init__(self, generation: int) -> None:
        super().__init__(generation)
        self.generation = generation

    def __str__(self) -> str:
        return f"the group of generation {self.generation} is over: a worker was lost, or leaves"


class DesyncError(TransportError):
    """Ranks are desynchronised: in different collectives, on different batches, or one has failed.

    It is raised on every rank, with the same report.

    Attributes:
        report_json: the full report, see `lockstep explain`; "" if there is none.
    """

    def __init__(self, message: str, report_json: str = "") -> None:
        super().__init__(message, report_json)
        self.message = message
        self.report_json = report_json

    def __str__(self) -> str:
        return self.message


class RankLostError(TransportError):
    """A rank's process ended, or left the group, while others waited for it.

    Attributes:
        rank: the rank that is lost, as its number in the group.
        report_json: as in `DesyncError`.
    """

    def __init__(self, rank: int, message: str, report_json: str = "") -> None:
        super().__init__(rank, message, report_json)
        self.rank = rank
        self.message = message
        self.report_json = report_json

    def __str__(self) -> str:
        return self.message


class StallError(TransportError):
    """Ranks did not arrive within the time limit.

    Attributes:
        ranks: the ranks that did not arrive, as their numbers in the group.
        report_json: as in `DesyncError`.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = (), report_json: str = "") -> None:
        super().__init__(message, ranks, report_json)
        self.message = message
        self.ranks = ranks
        self.report_json = report_json

    def __str__(self) -> str:
        return self.message


class WorkerError(LockstepError):
    """A worker process raised an exception, or ended without a result.

    Attributes:
        rank: the rank that failed first.
        kind: the class name of its exception; "exit" if the process ended without one.
        reason: the message of its exception, of one or more lines.
        worker_traceback: its traceback as text; "" if there is none.
        host: its host; "" if the job has only one.
        others: what happened to the other ranks; "" if that adds nothing.
        time: the time of the failure on the clock of its host, in nanoseconds since the epoch; 0 if
            unknown.
        in_collective: whether it was raised during communication, as it is if another rank has
            left.
    """

    host = others = ""
    time = 0
    in_collective = False

    def __init__(
        self, rank: int, kind: str, reason: str, worker_traceback: str = "", exit_code: int = 1
    ) -> None:
        super().__init__(rank, kind, reason, worker_traceback, exit_code)
        self.rank = rank
        self.kind = kind
        self.reason = reason
        self.worker_traceback = worker_traceback
        self.exit_code = exit_code

    def __str__(self) -> str:
        where = f" on {self.host}" if self.host else ""
        head = f"rank {self.rank}{where}: {self.kind}: {self.reason}"
        head += f"\n({self.others})" if self.others else ""
        more = self.worker_traceback.rstrip() or self.report_text
        return f"{head}\n\n{more}" if more else head


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless it is one: "1 step", "1,437 samples"."""
    return f"{number:,} {noun}{'s'[: number != 1]}"


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Return ranks, at least one, in ascending order: "rank 3", or "ranks 1, 2 and 5"."""
    *most, last = map(str, sorted(ranks))
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def unknown_name(
    argument: str,
    name: object,
    known: Iterable[str],
    also: str = "",
    expected: str = "",
    elsewhere: Mapping[str, str] = MappingProxyType({}),
) -> ConfigError:
    """Return the error for a name that is not among `known`; it suggests similar names.

    Args:
        argument: the argument with the name.
        name: the unknown name.
        known: all valid names.
        also: another accepted form, e.g. ``"package.module:factory"``.
        expected: replaces the list of all names if that is long.
        elsewhere: what has the unknown name elsewhere, such as in another library → its name here.
    """
    names = sorted(known)
    expected = expected or "one of " + ", ".join(names) + (f", or {also}" if also else "")
    near = difflib.get_close_matches(str(name), names, n=2, cutoff=0.6)
    hint = f"Did you mean {' or '.join(near)}?" if near else ""
    if str(name) in elsewhere and elsewhere[str(name)] not in near:
        hint = f"Its name here is {elsewhere[str(name)]!r}."
    return ConfigError(argument, expected, name, hint)


def unexpected_argument(
    function: str, name: str, instead: str | None, known: Iterable[str]
) -> TypeError:
    """Return the error for a keyword argument that a function does not have, in Python's words.

    Args:
        function: the name of the function.
        name: the name of the argument.
        instead: what to do instead, a clause; when None, a similar name is suggested, if there is
            one.
        known: the names of its arguments.
    """
    near = difflib.get_close_matches(name, list(known), n=2, cutoff=0.6)
    if instead:
        hint = f": {instead}"
    elif near:
        hint = f": did you mean {' or '.join(near)}?"
    else:
        hint = ""
    return TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")
