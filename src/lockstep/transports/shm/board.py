"""The ranks' counters and states in shared memory: who has come how far, who has left, who has failed and why."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from ...errors import RankLostError, StallError, TransportError
from .fence import fence
from .layout import BLOCK, SIGNS, Layout
from .peers import Peers
from .segment import Segment
from .signs import difference
from .state import make_state
from .waiting import Steps

__all__ = ["Board"]

# words of a control block: counter, state, process; of a rank that has failed, the length of its last words, what kind
# of error they are of, and how many ranks it names, which follow after the signs of two halves
_TICK, _STATE, _PID, _LENGTH, _KIND, _COUNT = range(SIGNS)
_RANKS, _MOST_RANKS = SIGNS + 2, 10
_WORDS = BLOCK // 8
_TEXT = (_RANKS + _MOST_RANKS) * 8  # bytes into a control block; what follows holds a failed rank's last words
_ACTIVE, _LEFT, _FAILED = 1, 2, 3
_OTHER, _LOST, _STALLED = 0, 1, 2


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
        self.given_up = ""  # why waits of this rank are to end, if they are
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

    def sign(self, word: int) -> None:
        """Say which collective this rank writes to the half that it has claimed; see signs.py."""
        self._words[self._mine + SIGNS + self.state.half] = word

    def agree(self, rank: int, expected: int) -> None:
        """Raise TransportError unless `rank`, which has posted, has written to this half for the same collective."""
        told = self._words[rank * _WORDS + SIGNS + self.state.half]
        if rank != self.rank and told != expected:
            raise self.difference(rank, told, expected)

    def difference(self, rank: int, told: int, expected: int) -> TransportError:
        """The error when `rank` takes part in something else."""
        return difference(self.rank, rank, told, expected, self._names)

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
            yield lambda: (rank for rank, block in self._others if self._words[block] < tick)

    def until(self, rank: int, tick: int) -> Steps:
        """Wait until `rank` has posted `tick`."""
        if self.reached(rank, tick):
            return
        yield None
        while not self.reached(rank, tick):
            yield lambda: (late for late in (rank,) if not self.reached(late, tick))

    def word(self, offset: int) -> int:
        """The counter at `offset` bytes into the memory."""
        return self._words[offset >> 3]

    def has_left(self, rank: int) -> bool:
        """Whether `rank` has left the group in good order."""
        return self._words[rank * _WORDS + _STATE] == _LEFT

    def check(self, what: str, awaited: Iterable[int], waited: float, timeout: float) -> None:
        """Raise when one of the `awaited` ranks will never come to operation `what`, or the time is up.

        Raises:
            RankLostError: it has ended, or has left the group; or another rank has given up because of that.
            StallError: more than `timeout` seconds have been `waited`, here or where a rank has given up.
            TransportError: a rank has given up for another reason; its words are in the message. Or this one has, in
                another thread.
        """
        if self.given_up:
            raise TransportError(f"shm: this rank gave up: {self.given_up}")
        for rank, block in self._others:
            if self._words[block + _STATE] == _FAILED:
                raise self._failure(rank)
        lost = self._lost()
        late = list(awaited)  # asked after who is lost: a rank may come, and then go
        for rank in late:
            if rank in lost:
                raise RankLostError(self._names[rank], f"shm: {what}: {lost[rank]}")
        if waited > timeout:
            names = tuple(self._names[rank] for rank in late)
            who = f"rank{'s'[: len(names) != 1]} {', '.join(map(str, names))}" if names else "ranks on other machines"
            raise StallError(f"shm: {what} timed out: {who} did not arrive within {waited:.1f} s", names)

    def fail(self, reason: str, error: BaseException | None = None) -> None:
        """Tell the others that this rank has given up; each of their waits ends with an error.

        Args:
            reason: what their errors say.
            error: what has happened here; theirs are of the same kind and name the same ranks.
        """
        if self._words[self._mine + _PID] != os.getpid():
            return  # a forked child; the rank is its parent
        kind = _OTHER
        ranks: tuple[int, ...] = ()
        if isinstance(error, RankLostError):
            kind, ranks = _LOST, (error.rank,)
        elif isinstance(error, StallError):
            kind, ranks = _STALLED, error.ranks[:_MOST_RANKS]
        text = reason.encode()[: BLOCK - _TEXT]
        start = self.rank * BLOCK + _TEXT
        self._segment.raw[start : start + len(text)] = text
        for word, value in enumerate((len(text), kind, len(ranks)), self._mine + _LENGTH):
            self._words[word] = value
        for word, name in enumerate(ranks, self._mine + _RANKS):
            self._words[word] = name
        fence()
        self._words[self._mine + _STATE] = _FAILED

    def close(self) -> None:
        """Leave: whoever still waits for this rank gets an error."""
        if self._words[self._mine + _PID] != os.getpid():
            return  # a forked child; the rank is its parent
        if self._words[self._mine + _STATE] == _ACTIVE:
            self._words[self._mine + _STATE] = _LEFT
        if self._peers is not None:
            self._peers.close()

    def _lost(self) -> dict[int, str]:
        """The ranks that will not come any more, and why."""
        gone = self._peers.gone() if self._peers is not None else set()
        lost = {}
        for rank, block in self._others:
            if self.has_left(rank):
                lost[rank] = f"rank {self._names[rank]} has left the group that others wait in"
            elif rank in gone:
                lost[rank] = f"the process of rank {self._names[rank]} ({self._words[block + _PID]}) has ended"
        fence()
        return lost

    def _failure(self, rank: int) -> TransportError:
        """What `rank` has given up with."""
        fence()
        block, start = rank * _WORDS, rank * BLOCK + _TEXT
        length, kind, count = self._words[block + _LENGTH : block + SIGNS]
        ranks = tuple(self._words[block + _RANKS : block + _RANKS + count])
        words = bytes(self._segment.raw[start : start + length]).decode(errors="replace")
        text = f"shm: rank {self._names[rank]} gave up: {words}"
        if kind == _LOST:
            return RankLostError(ranks[0], text)
        return StallError(text, ranks) if kind == _STALLED else TransportError(text)
