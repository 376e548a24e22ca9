"""The ranks' counters and states in shared memory: who has come how far, who has left, who has failed and why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...errors import RankLostError, StallError, TransportError
from .fence import fence
from .layout import BLOCK, Layout
from .peers import Peers
from .segment import Segment
from .state import make_state
from .waiting import Steps

__all__ = ["Board"]

_TICK, _STATE, _PID, _LENGTH = 0, 1, 2, 3  # words of a control block
_WORDS = BLOCK // 8
_TEXT = 128  # bytes into a control block; what follows holds a failed rank's last words
_ACTIVE, _LEFT, _FAILED = 1, 2, 3


class Board:
    """One rank's view of the control blocks.

    Every collective takes the same number of ticks on every rank. A rank's counter is the number of the last tick
    that it has posted; what posting means (data written, data read) is the collective's own affair. As ticks only
    grow, "all have reached tick t" stays true once it is.

    Args:
        segment: the group's memory.
        layout: its division.
        rank: this rank, 0 ≤ rank < layout.ranks.
        names: what each of them is called in errors: its rank in a group that spans machines.
    """

    def __init__(self, segment: Segment, layout: Layout, rank: int, names: Sequence[int]) -> None:
        self.rank, self.size, self._names = rank, layout.ranks, names
        self._segment, self._words = segment, segment.words
        self._mine = rank * _WORDS
        self._others = tuple((i, i * _WORDS) for i in range(self.size) if i != rank)
        self._peers: Peers | None = None
        self.state = make_state(segment, layout, rank)

    def open(self, pid: int) -> None:
        """Announce this rank; to be called before any rank calls `meet`."""
        self._words[self._mine + _PID] = pid
        self._words[self._mine + _STATE] = _ACTIVE

    def meet(self) -> None:
        """Begin to watch the others, all of whom have called `open`."""
        self._peers = Peers({rank: self._words[block + _PID] for rank, block in self._others})

    def post(self) -> int:
        """Announce this rank's next tick, and return its number."""
        tick: int = self.state.tick + 1
        self.state.tick = tick
        fence()
        self._words[self._mine] = tick
        return tick

    def all_reached(self, tick: int) -> bool:
        """Whether every rank has posted `tick`."""
        state = self.state
        if state.low >= tick:
            return True
        words = self._words
        for _, block in self._others:
            if words[block] < tick:
                return False
        state.low = min(tick, state.tick)
        fence()
        return True

    def reached(self, rank: int, tick: int) -> bool:
        """Whether `rank` has posted `tick`."""
        if self._words[rank * _WORDS] < tick:
            return False
        fence()
        return True

    def until_all(self, tick: int) -> Steps:
        """Wait until all have posted `tick`."""
        if self.all_reached(tick):
            return
        yield None
        while not self.all_reached(tick):
            yield lambda: [rank for rank, block in self._others if self._words[block] < tick]

    def until(self, rank: int, tick: int) -> Steps:
        """Wait until `rank` has posted `tick`."""
        if self.reached(rank, tick):
            return
        yield None
        while not self.reached(rank, tick):
            yield lambda: [rank]

    def word(self, offset: int) -> int:
        """The counter at `offset` bytes into the memory."""
        return self._words[offset >> 3]

    def check(self, what: str, awaited: Iterable[int], waited: float, timeout: float) -> None:
        """Raise when one of the `awaited` ranks will never come to operation `what`, or the time is up.

        Raises:
            RankLostError: it has ended, or has left the group.
            TransportError: a rank has given up; its words are in the message.
            StallError: more than `timeout` seconds have been `waited`.
        """
        for rank, block in self._others:
            if self._words[block + _STATE] == _FAILED:
                raise TransportError(f"shm: rank {self._names[rank]} gave up: {self._last_words(rank)}")
        gone = self._peers.gone() if self._peers is not None else set()
        for rank in awaited:
            name = self._names[rank]
            pid, state = self._words[rank * _WORDS + _PID], self._words[rank * _WORDS + _STATE]
            if state == _LEFT:
                raise RankLostError(name, f"shm: {what}: rank {name} has left the group that others wait in")
            if rank in gone:
                raise RankLostError(name, f"shm: {what}: the process of rank {name} ({pid}) has ended")
        if waited > timeout:
            late = [self._names[rank] for rank in awaited]
            who = f"rank{'s'[: len(late) != 1]} {', '.join(map(str, late))}" if late else "ranks on other machines"
            raise StallError(f"shm: {what}: {who} did not arrive within {waited:.1f} s", tuple(late))

    def fail(self, reason: str) -> None:
        """Tell the others that this rank has given up; each of their waits ends with `reason`."""
        text = reason.encode()[: BLOCK - _TEXT]
        start = self.rank * BLOCK + _TEXT
        self._segment.raw[start : start + len(text)] = text
        self._words[self._mine + _LENGTH] = len(text)
        fence()
        self._words[self._mine + _STATE] = _FAILED

    def close(self) -> None:
        """Leave: whoever still waits for this rank gets an error."""
        if self._words[self._mine + _STATE] == _ACTIVE:
            self._words[self._mine + _STATE] = _LEFT
        if self._peers is not None:
            self._peers.close()

    def _last_words(self, rank: int) -> str:
        fence()
        start = rank * BLOCK + _TEXT
        length = min(self._words[rank * _WORDS + _LENGTH], BLOCK - _TEXT)
        return bytes(self._segment.raw[start : start + length]).decode(errors="replace")
