"""What the ranks of a running job do now, read from their recordings without disturbing them."""

from __future__ import annotations

import os
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..recorder import RankState, Recording, open_job
from .plain import plain

__all__ = ["Live", "RankNow"]

_WINDOW_S = 10.0  # rates are those of so many seconds; all from the start, at the first look
_DEAF_S = 3.0  # without a word from a rank's watcher, which speaks many times a second


@dataclass(frozen=True)
class RankNow:
    """One rank.

    Attributes:
        rank: its number, of `world_size`.
        state: "computes", "waits", "stopped", "no heartbeat", "raised", "ended", "left" or "gone".
        seconds: since when.
        batch: that it is on.
        what: the collective that it waits in, or its last one.
        place: where that is, with the text of the line.
        waiting: the share of its time in which it was inside a blocking collective, 0 to 1.
        samples_s: samples per second; None where nobody counts them.
        memory: bytes that its process has in memory; 0 where it is gone.
    """

    rank: int
    world_size: int
    state: str
    seconds: float
    batch: int | None
    what: str
    place: str
    waiting: float
    samples_s: float | None
    memory: int


class Live:
    """The ranks whose recordings are in `folder`; look again and again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._recordings: dict[int, Recording] = {}
        self._past: dict[int, deque[tuple[float, RankState]]] = {}

    def close(self) -> None:
        """Let go of the files."""
        for recording in self._recordings.values():
            recording.close()
        self._recordings.clear()

    def look(self) -> list[RankNow]:
        """All ranks, in order."""
        for rank, recording in open_job(self._folder).items():
            if rank in self._recordings:
                recording.close()
            else:
                self._recordings[rank] = recording
        now = time.monotonic()
        return [self._look_at(rank, self._recordings[rank].state(), now) for rank in sorted(self._recordings)]

    def _look_at(self, rank: int, state: RankState, now: float) -> RankNow:
        past = self._past.setdefault(rank, deque())
        past.append((now, state))
        while len(past) > 2 and now - past[1][0] >= _WINDOW_S:
            past.popleft()
        since, before = past[0]
        waited, samples = _waited(state, now), state.samples
        if len(past) > 1:
            waited -= _waited(before, since)
            samples = None if samples is None else samples - (before.samples or 0)
        else:
            since = state.started
        passed = max(now - since, 1e-6)
        call, place = state.call, ""
        if call is not None:
            place = plain(call.place) + (f": {plain(call.source)}" if call.source else "")
        return RankNow(
            rank,
            state.world_size,
            _state(state, now),
            max(0.0, now - state.since),
            state.batch,
            plain(call.name or call.what) if call is not None else "",
            place,
            min(1.0, max(0.0, waited / passed)),
            None if samples is None else samples / passed,
            _memory(state.pid),
        )


def _waited(state: RankState, now: float) -> float:
    return state.waited_s + (max(0.0, now - state.since) if state.phase == "waits" else 0.0)


def _state(state: RankState, now: float) -> str:
    letter = _letter(state.pid)
    if letter in ("", "Z", "X"):
        return state.phase if state.phase in ("ended", "raised") else "gone"
    if letter in ("T", "t"):
        return "stopped"
    if state.phase in ("runs", "waits") and now - state.heartbeat > _DEAF_S:
        return "no heartbeat"
    return {"runs": "computes"}.get(state.phase, state.phase)


def _letter(pid: int) -> str:
    """The state of a process as ps shows it, "" where there is none."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def _memory(pid: int) -> int:
    with suppress(OSError, IndexError, ValueError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
