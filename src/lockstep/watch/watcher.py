"""The thread that looks, ten times a second, whether the ranks still go together."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from ..recorder import Log
from .causes import has_raised, in_words, names, why_late
from .delivery import deliver
from .finding import Finding
from .patience import Patience
from .stacks import ask
from .waiting import Cycle, is_on_its_way

if TYPE_CHECKING:
    from .member import Member, Started
    from .view import Session

__all__ = ["Watcher"]

_TICK_S = 0.1
_AGAIN = 6.0  # a warning comes again when the wait is so many times as long


class Watcher:
    """See the module.

    Args:
        session: of this process.
        log: gets all records, where they are kept.
    """

    def __init__(self, session: Session, log: Log | None = None) -> None:
        self._session, self._log = session, log
        self._stop = threading.Event()
        self._cycle = Cycle(session)
        self._patience = Patience()
        self._warned: dict[tuple[int, int], float] = {}  # how long the wait for a collective was when it was told
        self._thread = threading.Thread(target=self._run, name="lockstep watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(2.0)  # the interpreter must not end while it is inside a call of the store's
        if self._log is not None:
            with suppress(OSError):  # the disk is full
                self._log.close()

    def _run(self) -> None:
        session = self._session
        while not self._stop.wait(_TICK_S):
            session.health.look()
            if os.getpid() != session.recorder.pid:
                return
            session.recorder.beat()
            try:
                if session.look():
                    deliver(session, self._stop)
                    return
                session.looked = time.monotonic()
                self._look()
            except (OSError, ValueError, KeyError):  # memory of a rank that is ending at this moment
                continue
            except AttributeError:  # this rank's own, which `Session.close` has let go of
                if not self._stop.is_set():
                    raise

    def _look(self) -> None:
        session = self._session
        self._write_log()
        session.look_who_is_alone()
        session.far.look(self._patience.look())
        finding = has_raised(session, self._waits())
        if finding is None and session.recorder.phase not in ("raised", "ended", "left"):
            finding = self._collectives() or self._messages()
            if finding is None and not session.limits.debugging:
                finding = self._cycle.look()
        if finding is not None:
            session.fail(finding)

    def _waits(self) -> bool:
        """Whether this rank waits for one that has not come; one that has, and then raises, keeps nobody waiting."""
        raw = self._session.waits_in()
        if raw is not None and raw.peer >= 0:
            return True
        firsts = [(member, member.first()) for member in list(self._session.members)]
        return any(first is not None and bool(member.missing(first.sequence)) for member, first in firsts)

    def _write_log(self) -> None:
        if self._log is not None:
            try:
                self._log.flush()
            except OSError as error:
                self._session.say(f"rank {self._session.rank} records its timeline no more: {error}")
                self._log = None

    def _collectives(self) -> Finding | None:
        session = self._session
        for member in list(session.members):
            first = member.first()
            if first is None:
                continue
            self._compare(member, first)
            late = member.missing(first.sequence)
            if late:
                finding = why_late(session, member, first, late, self._patience)
                finding = finding or self._slow(first, late, member.ranks, member.key)
                if finding is not None:
                    return finding
        return None

    def _compare(self, member: Member, started: Started) -> None:
        """See what both ranks have missed if they came at the same moment."""
        own = self._session.own.raw(started.number)
        for other in member.others:
            if own is not None:
                member.judge(own, other, raises=False)

    def _messages(self) -> Finding | None:
        """What is to be said of the message that this rank waits for."""
        session = self._session
        raw = session.waits_in()
        if raw is None or raw.peer < 0 or raw.peer == session.rank:
            return None
        peer, is_recv = session.peers.get(raw.peer), session.own.text(raw.what).startswith("recv")
        if is_recv and peer is not None and is_on_its_way(session.own, peer, raw):
            return None  # it is on its way, whatever has become of its sender
        started = session.started(raw)
        member = next((each for each in session.members if each.key == raw.key), None)
        if member is None:
            return None
        finding = why_late(session, member, started, [raw.peer], self._patience)
        return finding or self._slow(started, [raw.peer], (session.rank, raw.peer), raw.key)

    def _slow(self, started: Started, late: list[int], ranks: tuple[int, ...], key: int) -> Finding | None:
        session, limits = self._session, self._session.limits
        waited = self._patience.seconds((key, started.number))
        if limits.debugging or waited < limits.warning_s:
            return None
        guilty = [rank for rank in late if rank not in session.peers or session.peers[rank].phase != "waits"] or late
        where = in_words(session, started.number)
        allowed_s = max(limits.stall_s, self._given_s(key))
        if session.since_alone(waited) >= allowed_s:
            return Finding(
                "stall",
                f"{names(guilty)} did not come to {where} within {allowed_s:.0f} s.",
                tuple(guilty),
                f"{'It is' if len(guilty) == 1 else 'They are'} slow or in an endless loop, as the stack says, "
                "or only some ranks call this collective.",
                "Make the slow part quicker, or let all ranks do it, and call every collective on every rank of its "
                "group. --stall-timeout, or LOCKSTEP_STALL_TIMEOUT, is how long is waited.",
                key,
                started.sequence,
            )
        last = self._warned.get((key, started.number), 0.0)
        if session.rank == min(set(ranks) - set(late), default=session.rank) and waited > last * _AGAIN:
            self._warned = {(key, started.number): waited}
            self._warn(where, guilty, sorted(set(ranks) - set(late)), waited, allowed_s)
        return None

    def _given_s(self, key: int) -> float:
        """The seconds that the user allows the group `key`; 0 where he has not said."""
        return next((member.limit_s for member in self._session.members if member.key == key), 0.0)

    def _warn(self, where: str, late: list[int], waiting: list[int], waited: float, allowed_s: float) -> None:
        session = self._session
        asked = [session.peers[rank] for rank in late if rank in session.peers]
        stacks = ask(session.folder, asked)
        verb = "has" if len(late) == 1 else "have"
        who = f"{names(waiting).lower()} {'waits' if len(waiting) == 1 else 'wait'}"
        text = f"{names(late).lower()} {verb} not come to {where} for {waited:.1f} s; {who}."
        for rank, stack in sorted(stacks.items())[:3]:
            text += f" Rank {rank} is at {' < '.join(stack[:3])}."
        end = f" This is an error after {allowed_s:.0f} s." if session.since_alone(waited) >= _TICK_S else ""
        session.say(f"slow: {text}{end}")
