"""What this process records of itself, if it does: the batch that it is on, and names that the user gives."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from .layout import State
from .writer import Recorder

__all__ = ["alone", "current", "named", "note_batch", "note_samples"]


class _Thread(threading.local):
    name = ""


class _Current:
    """Attributes: recorder, of this process, if it records; thread, with the name of its collectives, "" for none."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self.thread = _Thread()


current = _Current()

_OWN_LOOP = 1  # no hash of a source line


def note_batch(number: int, finished: bool = False, loop: int = _OWN_LOOP) -> None:
    """Say which batch this rank is on, so that a rank which has skipped one is named.

    All ranks must be on the same batch when they take part in the same collective.

    Args:
        number: of the batch; where the loop has ended, of the batches that there were. -1 for no batch.
        finished: whether the loop has ended.
        loop: which loop over batches it is, above 0 and below 2**64; batches of different ones are not compared.
    """
    if current.recorder is not None:
        current.recorder.note_batch(-2 - number if finished else number, loop if number >= 0 else 0)


def note_samples(number: int) -> None:
    """Say that this rank has seen `number` more samples."""
    if current.recorder is not None:
        current.recorder.note_samples(number)


@contextmanager
def alone() -> Iterator[None]:
    """Around what this rank does while the others are meant to wait for it, however long that takes."""
    recorder, word = current.recorder, State().alone
    if recorder is not None:
        recorder.note(word, recorder.words[word] + 1)
    try:
        yield
    finally:
        if recorder is not None:
            recorder.note(word, recorder.words[word] - 1)


@contextmanager
def named(name: str) -> Iterator[None]:
    """Give the collectives that this thread calls a name; other names on other ranks are an error."""
    thread = current.thread
    before, thread.name = thread.name, name
    try:
        yield
    finally:
        thread.name = before
