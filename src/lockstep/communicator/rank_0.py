"""What rank 0 does for all, or before the others."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

from .. import recorder, watch
from ..errors import WorkerError
from .objects import Objects

__all__ = ["Rank0"]

T = TypeVar("T")


class Rank0(Objects):
    """`on_rank0` and `first`.

    Rank 0 may take as long as it needs: the others wait for as long as it lives, whatever time limits the group and
    the watch have.
    """

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
                with recorder.alone():
                    sent = pickle.dumps((True, fn()))
            except BaseException as error:
                raised, sent = error, _error_to_send(error)
        self._await_rank0("on_rank0")
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
        self._await_rank0("first")
        error = self.broadcast_object(b"")
        if error:
            raise pickle.loads(error)[1]
        yield

    def _lead(self) -> Iterator[None]:
        if self.size == 1:
            yield
            return
        try:
            with recorder.alone():
                yield
        except BaseException as error:
            self._await_rank0("first")
            self.broadcast_object(_error_to_send(error))
            raise
        self._await_rank0("first")
        self.broadcast_object(b"")

    def _await_rank0(self, verb: str) -> None:
        """Return when rank 0 calls this; a collective would end at the time limit of the group."""
        group = self._connected()
        with watch.blocking(group, verb) as check:
            if group not in _gates:
                _gates[group] = _Gate(group)
            _gates[group].pass_through(self.rank == 0, check)


class _Gate:
    """Where the ranks of a group wait for its rank 0: a number in the job's store, of the times that it has come.

    Args:
        group: of which this process is a rank.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._store: Any = dist.distributed_c10d._get_default_store()
        # the longer the line, the more seldom each asks: some thousand questions a second are no burden to the store
        self._longest_s = max(0.1, dist.get_world_size(group) / 4000)
        name = f"lockstep/rank 0/{dist.get_global_rank(group, 0)}/{getattr(group, 'group_name', '')}"
        # a group of the same name may have been destroyed: every rank has made as many of them
        self._use = self._store.add(f"{name}/{dist.get_rank(group)}", 1)
        self._key = f"{name}/uses/{self._use}"
        self._times = 0

    def pass_through(self, opens: bool, check: Callable[[], None]) -> None:
        """Open it, or wait until it has been opened as often as this rank has come.

        Args:
            opens: whether this is rank 0.
            check: called while this waits; raises what makes waiting vain.
        """
        self._times += 1
        if opens:
            self._store.add(self._key, 1)
            return
        pause_s = 1e-3
        while self._use and self._store.add(self._key, 0) < self._times:  # a store that only pretends has no uses
            check()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, self._longest_s)


# c10d, too, keeps what it knows of its groups by group
_gates: WeakKeyDictionary[dist.ProcessGroup, _Gate] = WeakKeyDictionary()


def _error_to_send(error: BaseException) -> bytes:
    """`error` as others can read it: many exceptions come back with another text, or not at all."""
    with suppress(Exception):
        sent = pickle.dumps((False, error))
        again = pickle.loads(sent)[1]
        # SystemExit and KeyboardInterrupt speak to the program that they are raised in.
        if isinstance(error, Exception) and type(again) is type(error) and str(again) == str(error):
            return sent
    return pickle.dumps((False, WorkerError(0, type(error).__name__, str(error))))
