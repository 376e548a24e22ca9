"""One rank's part of a group on one machine: its memory and what runs in it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet, ref

import torch

from ...environment import usable_cores
from ...errors import TransportError
from ..c10d import Store
from .arena import Arena
from .arguments import is_plain
from .board import Board
from .engine import Lane
from .layout import Layout
from .mailbox import Mailbox, Receive
from .meeting import tell_all
from .reducing import begin_compiled
from .segment import share
from .waiting import COMPILED_SPINS, Steps
from .work import ShmWork

__all__ = ["Core", "limit_of"]


class Core:
    """Runs collectives and messages in memory that all ranks of the group have mapped.

    Args:
        store: where the ranks meet; used here and not again.
        rank: this rank.
        layout: division of the memory, the same on all ranks.
        timeout: seconds that an operation may take when it is given no limit of its own.
        names: what the ranks are called in errors; their own numbers when None.
    """

    def __init__(
        self, store: Store, rank: int, layout: Layout, timeout: float, names: Sequence[int] | None = None
    ) -> None:
        self.rank, self.size, self.timeout = rank, layout.ranks, timeout
        segment = share(store, rank, layout.ranks, layout.total)
        self._names = names or range(layout.ranks)
        self._board = Board(segment, layout, rank, self._names)
        self._board.open(os.getpid())
        tell_all(store, "open", rank, "", self._names)
        self._board.meet()
        self.arena = Arena(segment, layout, self._board)
        self._mailbox = Mailbox(segment, layout, self._board)
        crowded = layout.ranks > usable_cores()
        self._crowded, self._broken = crowded, ""
        self._spins = 0 if crowded else COMPILED_SPINS
        self._collectives = Lane(self._board.check, _breaking(self), crowded)
        self._sends = [Lane(self._board.check, None, crowded) for _ in range(layout.ranks)]
        self._receives: WeakSet[Lane] = WeakSet()
        self.on_end: Callable[[], None] = _nothing  # called when the group has failed here, or is left

    def run(
        self, what: str, steps: Steps, asynchronous: bool, timeout: float | None, result: list[torch.Tensor]
    ) -> ShmWork:
        """Carry out a collective, at once or beside the caller.

        Raises:
            TransportError: when an earlier one has failed here, or this one does.
        """
        self._require_whole()
        if asynchronous:
            return self._collectives.start(what, steps, timeout or self.timeout, result)
        return self._collectives.run(what, lambda: steps, lambda: timeout or self.timeout)

    def run_sum(self, tensor: torch.Tensor, code: int, opts: Any) -> ShmWork:
        """Sum a contiguous, not empty `tensor` over all ranks in place, at once, with the compiled part."""
        self._require_whole()
        return self._collectives.run(
            "all_reduce",
            lambda: begin_compiled(self.arena, tensor, code, self._spins),
            lambda: limit_of(opts) or self.timeout,
        )

    def send(self, tensor: torch.Tensor, target: int, tag: int) -> ShmWork:
        """Send `tensor` to `target`, at once if there is room for it, otherwise beside the caller."""
        self._require_whole()
        lane = self._sends[target]
        if is_plain(tensor) and lane.attempt(lambda: self._mailbox.send_now(tensor, target, tag)):
            return ShmWork([tensor])
        steps = self._mailbox.send(tensor, target, tag)
        return lane.start(f"send to rank {self._names[target]}", steps, None, [tensor], self.timeout)

    def receive(self, tensor: torch.Tensor, source: int | None, tag: int) -> ShmWork:
        """Receive a message from `source`, or from any rank, into `tensor` beside the caller."""
        self._require_whole()
        receive = self._mailbox.post(Receive(tensor, source, tag))
        what = "recv from any rank" if source is None else f"recv from rank {self._names[source]}"
        lane = Lane(self._board.check, None, self._crowded)
        self._receives.add(lane)
        work = lane.start(what, self._mailbox.receive(receive), None, [tensor], self.timeout)
        # it must not take a message after its caller has stopped waiting
        work.give_up = None if work.is_completed() else lane.stop
        work.when_ended(receive.tell_source)
        return work

    def fail(self, reason: str, error: BaseException | None = None) -> None:
        """Give up the group: every wait of the others ends with `reason`, and an error of the kind of `error`."""
        self._broken = self._broken or reason
        self._board.fail(reason, error)
        self.on_end()

    def close(self) -> None:
        """Leave the group."""
        self._broken = self._broken or "the group has been destroyed"
        self._board.close()
        self.on_end()
        for lane in (self._collectives, *self._sends, *self._receives):
            lane.stop(TransportError(f"shm: {self._broken}"))

    def _require_whole(self) -> None:
        if self._broken:
            raise TransportError(f"shm: this group cannot be used since an earlier error: {self._broken}")

    def _break(self, error: BaseException) -> None:
        if not self._broken:
            self.fail(f"{type(error).__name__}: {error}", error)


def _breaking(core: Core) -> Callable[[BaseException], None]:
    """`core._break`, without keeping `core`: the memory of a group goes with its last reference, not with a cycle."""
    weak = ref(core)

    def fail(error: BaseException) -> None:
        there = weak()
        if there is not None:
            there._break(error)

    return fail


def _nothing() -> None:
    return


def limit_of(opts: Any) -> float | None:
    """The seconds that c10d's options of a call allow it, if they say so."""
    seconds: float = opts.timeout.total_seconds() if opts is not None else 0.0
    return seconds if seconds > 0 else None
