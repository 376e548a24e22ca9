"""What rank 0 does for all, or before the others."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from ..errors import WorkerError
from .objects import Objects

__all__ = ["Rank0"]

T = TypeVar("T")


class Rank0(Objects):
    """`on_rank0` and `first`."""

    def on_rank0(self, fn: Callable[[], T]) -> T:
        """Run `fn` on rank 0 alone and return its result, which must be picklable, on every worker.

        An exception on rank 0 is raised on every worker, so that none waits for a result that never comes: itself on
        rank 0, and a copy on the others or, where it cannot be sent or would end a program without a word, a
        WorkerError with its name and text.
        """
        if self.size == 1:
            return fn()
        sent: bytes | None = None
        raised: BaseException | None = None
        if self.rank == 0:
            try:
                sent = pickle.dumps((True, fn()))
            except BaseException as error:
                raised, sent = error, _error_to_send(error)
        good, value = pickle.loads(self.broadcast_object(sent))
        if raised is not None:
            raise raised
        if not good:
            raise value
        result: T = value
        return result

    @contextmanager
    def first(self) -> Iterator[None]:
        """Run the body on rank 0, and when it has ended there, on the others (to make a folder, to download).

        When the body raises on rank 0, the others raise the same, as from `on_rank0`, in place of running theirs. The
        body must not communicate.
        """
        if self.rank == 0:
            yield from self._lead()
            return
        error = self.broadcast_object(b"")
        if error:
            raise pickle.loads(error)[1]
        yield

    def _lead(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.broadcast_object(_error_to_send(error))
            raise
        self.broadcast_object(b"")


def _error_to_send(error: BaseException) -> bytes:
    """`error` as others can read it: many exceptions come back with another text, or not at all."""
    with suppress(Exception):
        sent = pickle.dumps((False, error))
        again = pickle.loads(sent)[1]
        # SystemExit and KeyboardInterrupt speak to the program that they are raised in.
        if isinstance(error, Exception) and type(again) is type(error) and str(again) == str(error):
            return sent
    return pickle.dumps((False, WorkerError(0, type(error).__name__, str(error))))
