"""Notes the batch that a program is on: each step of a loop over a `DataLoader` counts."""

from __future__ import annotations

import dis
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from .places import digest, is_internal
from .replacing import Replaced

if TYPE_CHECKING:
    from .view import Session

__all__ = ["Loops", "replacements"]


@dataclass(slots=True)
class _Loop:
    """Attributes: of, the iterator; key, 64 bits made of the line that asks for batches."""

    of: weakref.ref[Any]
    key: int


class Loops:
    """The loops over batches that this rank is in, the innermost last."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._open: list[_Loop] = []

    def note(self, iterator: Any, number: int) -> None:
        """`iterator` has given its batch `number`, from 0."""
        if not _is_a_loop():
            return
        at = next((i for i, loop in enumerate(self._open) if loop.of() is iterator), -1)
        if at >= 0:
            del self._open[at + 1 :]  # a loop inside this one is over, or it would have gone on
        else:
            self._drop()
            self._open.append(_Loop(weakref.ref(iterator, self._gone), _key()))
        self._session.recorder.note_batch(number, self._open[-1].key)

    def end(self, iterator: Any, count: int) -> None:
        """`iterator` has no more batches; it has given `count`."""
        if not _is_a_loop():
            return
        loop = next((loop for loop in self._open if loop.of() is iterator), None)
        key = loop.key if loop is not None else _key()
        self._open = [each for each in self._open if each is not loop]
        self._session.recorder.note_batch(-2 - count, key)

    def _gone(self, _: object) -> None:
        """A loop has been left before its end; the one around it has its own batch again with its next one."""
        if self._open and self._open[-1].of() is None:
            self._session.recorder.note_batch(-1, 0)
        self._drop()

    def _drop(self) -> None:
        self._open = [loop for loop in self._open if loop.of() is not None]


def _is_a_loop() -> bool:
    """Whether a loop of the main thread's asks for the batch.

    A thread that fetches ahead is on another batch than the program, and on each rank by another number; and who calls
    `next` himself may take as many samples as he needs, which may be another number on each rank, too.
    """
    if threading.get_ident() != threading.main_thread().ident:
        return False
    frame = _asking()
    return not dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith(("CALL", "PRECALL"))


def _asking() -> FrameType:
    frame = sys._getframe(2)
    while frame.f_back is not None and is_internal(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _key() -> int:
    frame = _asking()
    return digest(f"{frame.f_code.co_filename}:{frame.f_lineno}")


def replacements(session: Session) -> list[Replaced]:
    """What has to be replaced in torch for that, while the session lasts."""
    from torch.distributed.algorithms.join import Join
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    loops = Loops(session)

    def counting(original: Callable[..., Any]) -> Callable[..., Any]:
        def step(self: Any) -> Any:
            try:
                data = original(self)
            except StopIteration:
                loops.end(self, self._num_yielded)
                raise
            loops.note(self, self._num_yielded - 1)
            return data

        return step

    def from_here_on(original: Callable[..., Any]) -> Callable[..., Any]:
        def enter(self: Any) -> Any:
            session.uneven += 1
            return original(self)

        return enter

    def until_here(original: Callable[..., Any]) -> Callable[..., Any]:
        def leave(self: Any, *args: Any) -> Any:
            try:
                return original(self, *args)
            finally:
                session.uneven -= 1

        return leave

    return [
        Replaced(_BaseDataLoaderIter, "__next__", counting),
        Replaced(Join, "__enter__", from_here_on),
        Replaced(Join, "__exit__", until_here),
    ]
