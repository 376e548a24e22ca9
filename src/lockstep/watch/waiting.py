"""What ranks of this machine wait in, and whether they wait for each other in a circle."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..recorder import Raw, Recording
from ..recorder.layout import State
from .circles import CIRCLE
from .finding import Finding

if TYPE_CHECKING:
    from .view import Session

__all__ = ["Cycle", "is_on_its_way", "is_recv", "needed", "waits_in"]

_STABLE_S = 0.4  # so long ranks must have waited for each other
_AT = State()


def needed(own: Recording, raw: Raw) -> int:
    """How many messages its peer must have sent for the receive `raw` of the rank `own`; tags are not looked at."""
    later = (own.raw(number) for number in range(raw.number + 1, own.word(_AT.records) + 1))
    behind = sum(each is not None and each.peer == raw.peer and is_recv(own, each) for each in later)
    return own.messages(raw.peer, sent=False) - behind


def is_on_its_way(own: Recording, sender: Recording, raw: Raw) -> bool:
    """Whether the message of the receive `raw`, of the rank `own`, has been sent."""
    return sender.messages(own.rank, sent=True) >= needed(own, raw)


def is_recv(own: Recording, raw: Raw) -> bool:
    """Whether that record of the rank `own` is of a message to be received."""
    return own.text(raw.what).startswith("recv")


class Cycle:
    """Finds ranks of this machine that wait for each other in a circle."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._seen: tuple[tuple[int, int], ...] = ()
        self._since = 0.0

    def look(self) -> Finding | None:
        """The circle that this rank is in, once it has been seen for a while."""
        now, found = time.monotonic(), self._through_me()
        if found != self._seen:
            self._seen, self._since = found, now
        if not found or now - self._since < _STABLE_S:
            return None
        told = []
        for index, (rank, number) in enumerate(found):
            recording = self._session.recordings[rank]
            raw = recording.raw(number)
            if raw is None:
                return None
            record = recording.record(raw)
            told.append(f"rank {rank} waits in {record.what} at {record.place} for rank {found[index - 1][0]}")
        sentence = "; ".join(told)
        return Finding(
            "desync",
            f"{sentence[0].upper()}{sentence[1:]}.",
            (),
            *CIRCLE,
        )

    def _through_me(self) -> tuple[tuple[int, int], ...]:
        """(rank, number of the record that it waits in), each waited for by the next one and waiting for the last."""
        session = self._session
        waiting = {rank: raw for rank, each in session.recordings.items() if (raw := waits_in(each)) is not None}
        paths = [[session.rank]] if session.rank in waiting else []
        for path in paths:
            for rank in _waited_for(session, path[-1], waiting):
                if rank == session.rank:
                    circle = path[::-1]
                    return tuple((each, waiting[each].number) for each in circle)
                if rank not in path:
                    paths.append([*path, rank])
        return ()


def waits_in(recording: Recording) -> Raw | None:
    """The record that a rank waits in; None where it does not, or is not alone in communicating."""
    if recording.phase != "waits" or recording.word(_AT.threads) != 1:
        return None  # another thread may do what is waited for
    return recording.raw(recording.word(_AT.since_record))


def _waited_for(session: Session, rank: int, waiting: dict[int, Raw]) -> Iterator[int]:
    """Those of the waiting ranks that `rank` waits for."""
    raw, own = waiting[rank], session.recordings[rank]
    for other in waiting:
        recording = session.recordings[other]
        if other == rank:
            continue
        if raw.peer >= 0:
            if raw.peer == other and is_recv(own, raw) and not is_on_its_way(own, recording, raw):
                yield other
        else:
            lane = recording.lane(raw.key)
            if lane >= 0 and recording.head(lane) < raw.sequence:
                yield other
