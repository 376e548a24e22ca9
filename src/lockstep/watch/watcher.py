"""The thread that looks, ten times a second, whether the ranks still go together."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from ..recorder import Log, Raw
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
_T = TypeVar("_T")
_PASSING = 50  # failures of a part, one after the other, of which nothing is said: five seconds
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
        self._failures: dict[str, int] = {}  # of each part, one after the other
        self._said: set[str] = set()  # parts of which it has been said that they fail
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
        while not self._stop.wait(_TICK_S) and os.getpid() == session.recorder.pid:
            self._try(session.health.look)
            self._try(session.recorder.beat)
            if not self._try(session.look):
                session.looked = time.monotonic()
                self._look()
            elif self._try(self._deliver):
                return

    def _try(self, part: Callable[..., _T], *args: Any) -> _T | None:
        """What `part` returns; None where it fails, which is said once and ends neither this thread nor other parts."""
        name = getattr(part, "__qualname__", str(part))
        try:
            found = part(*args)
        except Exception as error:
            # that memory of a rank is gone which is ending at this moment is nothing to speak of, unless it goes on
            self._failures[name] = self._failures.get(name, 0) + 1
            passing = isinstance(error, OSError | ValueError | KeyError) and self._failures[name] < _PASSING
            if not passing and name not in self._said and not self._stop.is_set():
                self._said.add(name)
                with suppress(Exception):
                    rank, words = self._session.rank, f"{type(error).__name__}: {error}"
                    self._session.say(f"rank {rank}: {name} of the watchdog fails, and is tried again: {words}")
            return None
        self._failures.pop(name, None)
        return found

    def _deliver(self) -> bool:
        deliver(self._session, self._stop)
        return True

    def _look(self) -> None:
        session = self._session
        self._try(self._reap)
        self._try(self._write_log)
        self._try(session.look_who_is_alone)
        self._try(session.far.look, self._patience.look())
        finding = self._try(self._raised)
        if finding is None and self._try(self._is_in_the_program):
            found = (self._try(self._collective, member) for member in list(session.members))
            finding = next((each for each in found if each is not None), None) or self._try(self._messages)
            if finding is None and not session.limits.debugging:
                finding = self._try(self._cycle.look)
        if finding is not None:
            self._try(session.fail, finding)

    def _reap(self) -> None:
        for member in list(self._session.members):
            member.reap()

    def _raised(self) -> Finding | None:
        return has_raised(self._session, self._waits())

    def _is_in_the_program(self) -> bool:
        return self._session.recorder.phase not in ("raised", "ended", "left")

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

    def _collective(self, member: Member) -> Finding | None:
        """What is to be said of this rank's first collective of a group that has not ended."""
        first = member.first()
        if first is None:
            return None
        self._compare(member, first)
        late = member.missing(first.sequence)
        if not late:
            return None
        finding = why_late(self._session, member, first, late, self._patience)
        return finding or self._slow(first, late, member.ranks, member.key)

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
        if raw is None or raw.peer < 0:
            raw = self._pending()
        if raw is None or raw.peer == session.rank:
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

    def _pending(self) -> Raw | None:
        """The first message that a stream of this rank's waits for, if any."""
        pending = (each for member in list(self._session.members) for each in list(member.messages)[:1])
        return next((self._session.own.raw(each.number) for each in pending), None)

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
