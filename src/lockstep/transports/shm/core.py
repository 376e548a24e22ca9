"""One rank's part of a group on one machine: its memory and what runs in it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakSet, ref

import torch

from ...environment import usable_cores
from ...errors import TransportError
from ...store_exchange import exchange, nothing
from ..c10d import Store
from .arena import Arena
from .arguments import is_plain
from .board import Board
from .compiled import begin
from .engine import Lane
from .layout import Layout
from .mailbox import Mailbox, Receive
from .progress import progress
from .segment import share
from .signs import KINDS
from .waiting import COMPILED_LOOKS, Steps
from .work import ShmWork

__all__ = ["Core", "limit_of"]


@dataclass(eq=False)
class _Parts:
    """What holds the group's memory."""

    board: Board
    arena: Arena
    mailbox: Mailbox
    collectives: Lane
    sends: list[Lane]
    receives: WeakSet[Lane] = field(default_factory=WeakSet)


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
        self._names = names or range(layout.ranks)
        segment = share(store, rank, layout.ranks, layout.total)
        board = Board(segment, layout, rank, self._names)
        board.open(os.getpid())
        exchange(store, "open", rank, "", self._names, nothing)
        board.meet()
        self._crowded, self._broken = layout.ranks > usable_cores(), ""
        arena = Arena(segment, layout, board, 0 if self._crowded else COMPILED_LOOKS)
        self._parts: _Parts | None = _Parts(
            board,
            arena,
            Mailbox(segment, layout, board),
            Lane(board.check, _breaking(self), self._crowded),
            [Lane(board.check, None, self._crowded) for _ in range(layout.ranks)],
        )
        self.on_end: Callable[[], None] = _nothing  # called when the group has failed here, or is left
        progress.join(self)

    @property
    def arena(self) -> Arena:
        """Where collectives exchange their data.

        Raises:
            TransportError: when the group has failed here, or has been left.
        """
        return self._whole().arena

    def run(
        self, what: str, steps: Steps, asynchronous: bool, timeout: float | None, result: list[torch.Tensor]
    ) -> ShmWork:
        """Carry out a collective, at once or beside the caller.

        Raises:
            TransportError: when an earlier one has failed here, or this one does.
        """
        lane = self._whole().collectives
        if asynchronous:
            return lane.start(what, steps, timeout or self.timeout, result)
        return lane.run(what, lambda: steps, lambda: timeout or self.timeout)

    def run_compiled(
        self,
        kind: int,
        opts: Any,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        kept: object,
        root: int,
        code: int,
    ) -> ShmWork:
        """Carry out a collective at once, with the compiled part; see `begin`."""
        parts = self._whole()
        arena = parts.arena
        return parts.collectives.run(
            KINDS[kind],
            lambda: begin(arena, kind, root, code, inputs, outputs, arena.looks, kept),
            lambda: limit_of(opts) or self.timeout,
            has_spun=True,
        )

    def send(self, tensor: torch.Tensor, target: int, tag: int) -> ShmWork:
        """Send `tensor` to `target`, at once if there is room for it, otherwise beside the caller."""
        parts = self._whole()
        mailbox, lane = parts.mailbox, parts.sends[target]
        if is_plain(tensor) and lane.attempt(lambda: mailbox.send_now(tensor, target, tag)):
            return ShmWork([tensor])
        steps = mailbox.send(tensor, target, tag)
        return lane.start(f"send to rank {self._names[target]}", steps, None, [tensor], self.timeout)

    def receive(self, tensor: torch.Tensor, source: int | None, tag: int) -> ShmWork:
        """Receive a message from `source`, or from any rank, into `tensor` beside the caller."""
        parts = self._whole()
        receive = parts.mailbox.post(Receive(tensor, source, tag))
        if receive.caught:
            work = ShmWork([tensor])
        else:
            work = self._await(parts, receive)
        work.sender = receive.sender
        return work

    def check(self, what: str) -> None:
        """Raise when the group has failed, here or on another rank of this machine, so that `what` is in vain."""
        self._whole().board.check(what, (), 0.0, math.inf)

    def _await(self, parts: _Parts, receive: Receive) -> ShmWork:
        mailbox, source = parts.mailbox, receive.source
        what = "recv from any rank" if source is None else f"recv from rank {self._names[source]}"
        linger = partial(mailbox.linger, receive, parts.arena.looks) if parts.arena.compiled else None
        lane = Lane(parts.board.check, None, self._crowded, linger)
        parts.receives.add(lane)
        work = lane.start(what, mailbox.receive(receive), None, [receive.tensor], self.timeout)

        def give_up(error: BaseException) -> None:
            lane.stop(error)
            mailbox.withdraw(receive)

        # it must not take a message after its caller has stopped waiting
        work.give_up = None if work.is_completed() else give_up
        return work

    def fail(self, reason: str, error: BaseException | None = None) -> None:
        """Give up the group: every wait of the others ends with `reason`, and an error of the kind of `error`.

        So do the waits of this rank, in whatever thread.
        """
        self._broken = self._broken or reason
        if self._parts is not None:
            self._parts.board.given_up = self._broken
            self._parts.board.fail(reason, error)
            self.on_end()

    def close(self) -> None:
        """Leave the group, and let go of the memory, whoever may still have a reference to the group."""
        parts, self._parts = self._parts, None
        self._broken = self._broken or "the group has been destroyed"
        if parts is None:
            return
        parts.board.close()
        self.on_end()
        for lane in (parts.collectives, *parts.sends, *parts.receives):
            lane.stop(TransportError(f"shm: {self._broken}"))
        progress.leave(self)

    def _whole(self) -> _Parts:
        if self._broken or self._parts is None:
            raise TransportError(f"shm: this group cannot be used since an earlier error: {self._broken}")
        return self._parts

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
