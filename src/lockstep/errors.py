"""Every exception that a user of Lockstep can meet."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from functools import partial
from typing import Any

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DesyncError",
    "DivergedError",
    "InterruptedRunError",
    "LockstepError",
    "MismatchError",
    "RankLostError",
    "StallError",
    "TransportError",
    "WorkerError",
    "unknown_name",
]


class LockstepError(Exception):
    """Base of all errors that Lockstep raises on purpose.

    Attributes:
        exit_code: what the ``lockstep`` command returns to the shell for this error.
        report_json: the report on all ranks that the watch over them has made, "" without one.
        report_path: where that has been written to, "" where it has not.
        report_text: the same in words, for errors whose message is another.
    """

    exit_code: int = 1
    report_json: str = ""
    report_path: str = ""
    report_text: str = ""


class ConfigError(LockstepError, ValueError):
    """An option or argument has a value that cannot be used.

    Args:
        argument: the argument as the library spells it, e.g. ``"global_batch"``; the command line shows it as
            ``--global-batch``.
        expected: what would have been right, e.g. ``"a whole number of at least 1"``.
        got: the value that came; the message shows its `repr`.
        hint: what to do about it, a full sentence.
        found: what came, in words, where that is no single value: ``"both"``, ``"a folder without one"``. The message
            shows it as it is, in place of `got`.
    """

    exit_code = 2

    def __init__(self, argument: str, expected: str, got: object = None, hint: str = "", *, found: str = "") -> None:
        self.argument, self.expected, self.got, self.hint, self.found = argument, expected, got, hint, found
        super().__init__(argument, expected, got, hint)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), found=self.found), self.args

    def __str__(self) -> str:
        return self.render(self.argument)

    def render(self, argument: str) -> str:
        """The message with `argument` spelt the way its reader knows it."""
        text = f"{argument}: expected {self.expected}, got {self.found or repr(self.got)}"
        return f"{text}. {self.hint}" if self.hint else text


class DataError(LockstepError):
    """A data file or data set is missing, damaged or not what it says it is."""

    exit_code = 2


class CheckpointError(LockstepError):
    """A checkpoint cannot be written, or must not be read."""

    exit_code = 2


class MismatchError(LockstepError):
    """Ranks hold different things where they must hold the same."""


class DivergedError(LockstepError, ArithmeticError):
    """The loss is no longer a finite number."""


class InterruptedRunError(LockstepError):
    """The run was stopped by a signal, after the step it was in had ended.

    Attributes:
        checkpoint: path of what was saved, or None where the run keeps no checkpoints.
    """

    def __init__(self, message: str, signal_number: int, checkpoint: str | None = None) -> None:
        super().__init__(message, signal_number, checkpoint)
        self.message, self.signal_number, self.checkpoint = message, signal_number, checkpoint
        self.exit_code = 128 + signal_number

    def __str__(self) -> str:
        return self.message


class TransportError(LockstepError, RuntimeError):
    """Ranks cannot exchange data, or can no longer."""


class DesyncError(TransportError):
    """Ranks have parted: they are in different collectives, on different batches, or one has failed.

    It is raised on every rank, with the same report.

    Attributes:
        report_json: the whole report, see `lockstep explain`; "" without one.
    """

    def __init__(self, message: str, report_json: str = "") -> None:
        super().__init__(message, report_json)
        self.message, self.report_json = message, report_json

    def __str__(self) -> str:
        return self.message


class RankLostError(TransportError):
    """A rank has ended or left while others waited for it.

    Attributes:
        rank: the rank that is gone, as the group numbers it.
        report_json: as in `DesyncError`.
    """

    def __init__(self, rank: int, message: str, report_json: str = "") -> None:
        super().__init__(rank, message, report_json)
        self.rank, self.message, self.report_json = rank, message, report_json

    def __str__(self) -> str:
        return self.message


class StallError(TransportError):
    """Ranks did not arrive within the time limit.

    Attributes:
        ranks: those that did not arrive, as the group numbers them.
        report_json: as in `DesyncError`.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = (), report_json: str = "") -> None:
        super().__init__(message, ranks, report_json)
        self.message, self.ranks, self.report_json = message, ranks, report_json

    def __str__(self) -> str:
        return self.message


class WorkerError(LockstepError):
    """A worker process raised an exception or ended without an answer.

    Attributes:
        rank: the rank that failed first.
        kind: the class name of what it raised, or "exit" where it died.
        reason: the message of what it raised, in one line or more.
        worker_traceback: its traceback as text, "" where it left none.
        host: the machine that it ran on, "" where there is one only.
        others: what became of the others, "" where there is nothing to say.
        time: when, in nanoseconds since the epoch on the clock of its machine; 0 where that is not known.
        in_collective: whether it was raised while the worker talked to others, as it is where one of them has left.
    """

    host = others = ""
    time = 0
    in_collective = False

    def __init__(self, rank: int, kind: str, reason: str, worker_traceback: str = "", exit_code: int = 1) -> None:
        super().__init__(rank, kind, reason, worker_traceback, exit_code)
        self.rank, self.kind, self.reason, self.worker_traceback = rank, kind, reason, worker_traceback
        self.exit_code = exit_code

    def __str__(self) -> str:
        head = f"rank {self.rank}{f' on {self.host}' if self.host else ''}: {self.kind}: {self.reason}"
        head += f"\n({self.others})" if self.others else ""
        more = self.worker_traceback.rstrip() or self.report_text
        return f"{head}\n\n{more}" if more else head


def unknown_name(argument: str, name: object, known: Iterable[str], also: str = "", expected: str = "") -> ConfigError:
    """The error for a name that is not among `known`, with the near ones offered.

    Args:
        argument: the argument that holds the name.
        name: what came.
        known: every name that would have been right.
        also: another form that is accepted, e.g. ``"package.module:factory"``.
        expected: said in place of the list of all names, where that would be long.
    """
    names = sorted(known)
    expected = expected or "one of " + ", ".join(names) + (f", or {also}" if also else "")
    near = difflib.get_close_matches(str(name), names, n=2, cutoff=0.6)
    return ConfigError(argument, expected, name, f"Did you mean {' or '.join(near)}?" if near else "")
