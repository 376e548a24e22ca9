"""The batch that the program is on: each step of a loop over a `DataLoader` is recorded."""

from __future__ import annotations

import dis
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

from ..flight_recorder import FlightRecorder
from ..system.patching import Replaced
from .call_sites import digest, is_internal
from .shared_state import WatchdogState


@dataclass(slots=True)
class _Loop:
    """A loop over batches.

    Attributes:
        iterator: of the batches.
        key: 64-bit digest of the line of the loop.
    """

    iterator: weakref.ref[Any]
    key: int


class BatchLoops:
    """The loops over batches that this rank is in, the innermost last."""

    def __init__(self, recorder: FlightRecorder) -> None:
        self._recorder = recorder
        self._open: list[_Loop] = []

    def note(self, iterator: Any, number: int) -> None:
        """Record that `iterator` has yielded its batch `number`, from 0."""
        if not _is_program_loop():
            return
        depth = next((i for i, loop in enumerate(self._open) if loop.iterator() is iterator), -1)
        if depth >= 0:
            del self._open[depth + 1 :]  # a loop inside this one is over
        else:
            self._remove_dropped()
            # a method of this object would keep it, and the flight recorder, in a cycle
            method = weakref.WeakMethod(self._dropped)

            def note_dropped(_: object) -> None:
                dropped = method()
                if dropped is not None:
                    dropped()

            self._open.append(_Loop(weakref.ref(iterator, note_dropped), _loop_key()))
        self._recorder.note_batch(number, self._open[-1].key)

    def end(self, iterator: Any, count: int) -> None:
        """Record that `iterator` has ended after `count` batches."""
        if not _is_program_loop():
            return
        loop = next((loop for loop in self._open if loop.iterator() is iterator), None)
        key = loop.key if loop is not None else _loop_key()
        self._open = [other for other in self._open if other is not loop]
        self._recorder.note_batch(-2 - count, key)

    def _dropped(self) -> None:
        """Record that a loop was left before its end; the loop around it records its batch with its
        next one.
        """
        if self._open and self._open[-1].iterator() is None:
            self._recorder.note_batch(-1, 0)
        self._remove_dropped()

    def _remove_dropped(self) -> None:
        """Forget the loops whose iterators are gone."""
        self._open = [loop for loop in self._open if loop.iterator() is not None]


def _is_program_loop() -> bool:
    """Return whether a for loop of the main thread takes the batch.

    A thread that prefetches is ahead of the program by a number of batches that differs between
    ranks; and a program that calls `next` itself may take a different number of batches on each
    rank.
    """
    if threading.get_ident() != threading.main_thread().ident:
        return False
    frame = _calling_frame()
    return not dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith(("CALL", "PRECALL"))


def _calling_frame() -> FrameType:
    """Return the program's frame that takes the batch."""
    frame = sys._getframe(2)
    while frame.f_back is not None and is_internal(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _loop_key() -> int:
    """Return the digest of the line of the loop that takes the batch."""
    frame = _calling_frame()
    return digest(f"{frame.f_code.co_filename}:{frame.f_lineno}")


def batch_replacements(state: WatchdogState) -> list[Replaced]:
    """Return the patches that count the batches of torch's loaders, and note contexts of
    `torch.distributed.algorithms.join.Join`, in which ranks have different numbers of batches.

    Args:
        state: of the watchdog; the patches hold while its session lasts.
    """
    from torch.distributed.algorithms.join import Join
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    loops = BatchLoops(state.recorder)

    def counting_next(original: Callable[..., Any]) -> Callable[..., Any]:
        def take_batch(self: Any) -> Any:
            try:
                data = original(self)
            except StopIteration:
                loops.end(self, self._num_yielded)
                raise
            loops.note(self, self._num_yielded - 1)
            return data

        return take_batch

    def enter_join(original: Callable[..., Any]) -> Callable[..., Any]:
        def enter(self: Any) -> Any:
            state.uneven_batches += bool(self._enable)
            return original(self)

        return enter

    def leave_join(original: Callable[..., Any]) -> Callable[..., Any]:
        def leave(self: Any, *args: Any) -> Any:
            try:
                return original(self, *args)
            finally:
                state.uneven_batches -= bool(self._enable)

        return leave

    return [
        Replaced(_BaseDataLoaderIter, "__next__", counting_next),
        Replaced(Join, "__enter__", enter_join),
        Replaced(Join, "__exit__", leave_join),
    ]
