"""This rank's part in one process group: its collectives are recorded, and compared before any data moves."""

from __future__ import annotations

import struct
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..recorder import Raw, Recording
from ..recorder.layout import State
from .judge import differences
from .places import digest
from .swaps import Passed, crosses, is_next_of_a_loop, steps_to

if TYPE_CHECKING:
    from types import FrameType

    from .agreement import Agreement
    from .view import Session

__all__ = ["Member", "Other", "Started"]

_LONG_S = 1.0  # a process that has been stopped for so long may have been given up
_FIRST = struct.Struct("<QQQ")  # of a record: its number, group and sequence number
_REFUSAL_S = 5.0  # a call that has not been refused by then is not going to be
_AT = State()
_AGAIN_S = 2e-3  # what is seen to differ is read once more after so long: it may have been read while it was written


@dataclass
class Other:
    """Another rank of the group, on this machine. Attributes: lane, of the group in its recording; -1: not known."""

    rank: int
    recording: Recording
    lane: int = -1

    def at(self, key: int) -> int:
        """Where its recording has the group `key`; -1 where it has not made it (yet)."""
        if self.lane < 0 or not self.recording.has_lane(self.lane, key):
            self.lane = self.recording.lane(key)
        return self.lane


@dataclass(eq=False, slots=True)
class Started:
    """A collective that may still be under way.

    Attributes:
        work: what tells whether it has ended: c10d's, or an event's; None for one that the program waits in.
    """

    number: int
    sequence: int
    entered: float
    work: Any = None


class _Event:
    """An event of a stream, asked as c10d's works are."""

    def __init__(self, event: torch.Event) -> None:
        self._event = event

    def is_completed(self) -> bool:
        return bool(self._event.query())


def passed_by(device: torch.device) -> _Event | None:
    """What tells when the device's current stream has come to this point; None where it has no streams.

    c10d's work would tell as well, and keep the tensors of the operation for as long as it is kept.
    """
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != device.type:
        return None
    return _Event(torch.accelerator.current_stream(device).record_event())


class Member:
    """See the module.

    Args:
        session: of this process.
        name: of the group in c10d.
        title: of the group for the user, "" for that of all ranks.
        ranks: of its members in the job.
        uses: how many groups of that name and those ranks this rank has made before.
        limit_s: seconds that the user lets its collectives take; 0 where he has not said.
    """

    def __init__(
        self, session: Session, name: str, title: str, ranks: Sequence[int], uses: int, limit_s: float = 0.0
    ) -> None:
        self.session, self.title, self.ranks = session, title, tuple(ranks)
        self.key = digest(f"{name} {self.ranks} {uses}")
        self.sequence = self.refused = 0
        self.started: deque[Started] = deque()
        self.messages: deque[Started] = deque()  # receives for which a stream waits, and no longer the program
        self.inside: set[int] = set()  # threads that are in a call
        self.batches: dict[int, list[Started]] = {}  # thread → what it has started that is to begin as one
        self.passed: Passed | None = None  # the last collective, if ranks were on other lines there
        self.agreement: Agreement | None = None  # where ranks are on several machines
        self.ends_by_future = False  # whether a future's end is that of the operation, and not of its being queued
        recorder = session.recorder
        self.limit_s = limit_s
        self.lane = recorder.open_lane(self.key, limit_s)
        self.title_number = recorder.texts.number(title)
        own = self.ranks.index(recorder.rank)
        around = (*self.ranks[own + 1 :], *self.ranks[:own])
        self.others = [Other(rank, session.peers[rank]) for rank in around if rank in session.peers]
        self.far = tuple(rank for rank in around if rank not in session.peers)

    def enter(self, operation: str, key: tuple[Any, ...], peer: int = -1) -> Started:
        """Record that this rank calls a collective, and compare it with what others have called.

        Raises:
            DesyncError: they have called something else.
        """
        session = self.session
        if session.error is not None:
            session.check()
        recorder, name = session.recorder, session.current.thread.name
        call, place = session.signs.of(operation, key, name), session.places.of(sys._getframe(1))
        if self.passed is not None and peer < 0:
            self._look_back(self.passed, place.line, sys._getframe(1))
        name_number = recorder.texts.number(name) if name else 0
        now = time.monotonic()
        with session.lock:
            sequence = 0
            if peer < 0:
                sequence = self.sequence = self.sequence + 1
            texts = place.text, self.title_number, name_number
            number = recorder.enter(self.key, self.lane, sequence, call, place.line, *texts, peer, self.refused, now)
            started = Started(number, sequence, now)
            if sequence:
                if self.started and self.ends_by_future:  # else the watcher does: a step asks no device
                    self.reap()
                self.started.append(started)
        if now - session.looked > _LONG_S and session.look():
            session.check()
        if sequence:
            self._compare(number, sequence)
        return started

    def send_or_receive(self, operation: str, tensors: Sequence[torch.Tensor], peer: int) -> Started:
        """Record a message to or from rank `peer` of the job; -1 for one from anybody."""
        word = "to" if operation == "send" else "from"
        key = tuple((tensor.shape, tensor.dtype) for tensor in tensors), (word, peer if peer >= 0 else "any rank")
        started = self.enter("recv" if word == "from" else "send", key, peer if peer >= 0 else self.session.rank)
        if peer >= 0:
            self.session.recorder.count_message(peer, sent=word == "to")
        return started

    def allow(self, seconds: float) -> None:
        """A wait of this group is given a limit of its own; a longer one than the others counts from here on."""
        if seconds > self.limit_s:
            self.limit_s = seconds
            self.session.recorder.allow(self.lane, seconds)

    def leave(self, started: Started, now: float) -> None:
        """Record that a collective has ended."""
        self.session.recorder.leave(started.number, now)
        if started.sequence:
            self.drop(started)

    def waited(self, started: Started, work: Any, device: torch.device | None) -> None:
        """The program's wait for a call has returned, which on a device only means that its stream waits for it.

        The call stays in the record until the device has come so far: what waits for that stream waits for the call.

        Args:
            started: the call.
            work: c10d's.
            device: of its tensors; None without any.
        """
        if device is None or device.type == "cpu" or self.session.captures.are_open:
            self.leave(started, time.monotonic())
            return
        started.work = passed_by(device) or work
        with self.session.lock:
            if not started.sequence and started not in self.messages:
                self.messages.append(started)

    def drop(self, started: Started) -> None:
        """This rank is in that collective no more."""
        with self.session.lock:
            if self.started and self.started[0] is started:
                self.started.popleft()
            elif started in self.started:
                self.started.remove(started)

    def take_back(self, started: Started) -> None:
        """The call was refused before anything was sent."""
        with self.session.lock:
            if started.sequence and started.sequence == self.sequence:
                self.sequence -= 1
                self.refused += 1
                self.session.recorder.take_back(self.lane, started.sequence)

    def reap(self) -> None:
        """Record the end of those that have ended by themselves."""
        for calls in (self.started, self.messages):
            while (first := self._first_of(calls)) is not None and self._has_ended(first):
                self.session.recorder.leave(first.number, time.monotonic())
                with self.session.lock:
                    if first in calls:  # no other thread has come first
                        calls.remove(first)

    def _first_of(self, calls: deque[Started]) -> Started | None:
        with self.session.lock:
            return calls[0] if calls else None

    def _has_ended(self, started: Started) -> bool:
        work = started.work
        if work is None or self.ends_by_future:
            return work is not None and bool(work.is_completed())
        try:
            return self.session.captures.ask(work.is_completed)
        except RuntimeError:  # the device has failed; whoever waits for it will be told
            return True

    def _compare(self, number: int, sequence: int) -> None:
        # one that has come is enough: those that have come before it were compared with each other
        mine, key = self.session.recorder.told(number), self.key
        for other in self.others:
            lane, recording = other.at(key), other.recording
            theirs = recording.row(lane, sequence) if lane >= 0 else 0
            if not theirs:
                continue
            told = recording.told(theirs)
            if told[8:] == mine:
                return
            if _FIRST.unpack_from(told) == (theirs, key, sequence):
                own, raw = self.session.own.raw(number), recording.raw(theirs)
                if own is not None:
                    if raw is not None:
                        self.pass_by(own, {raw.line})
                    self.judge(own, other)
                return

    def pass_by(self, own: Raw, lines: set[int]) -> None:
        """Remember in which call this thread is, if others are on other `lines` there: they may have changed places."""
        theirs = frozenset(lines - {own.line})
        if theirs:
            self.passed = Passed(own.sequence, own.line, theirs, own.batch, own.loop, steps_to(sys._getframe(1)))

    def _look_back(self, passed: Passed, line: int, frame: FrameType) -> None:
        """Let others know if a loop of this rank's has gone on to what one of them has called in place of the last."""
        self.passed, recorder, sequence = None, self.session.recorder, self.sequence + 1
        same_batch = (passed.batch, passed.loop) == (recorder.batch, recorder.loop)
        may_swap = passed.sequence + 1 == sequence and line in passed.theirs and same_batch
        if may_swap and is_next_of_a_loop(passed.stack, frame):
            recorder.note(_AT.swap_group, self.key)
            recorder.note(_AT.swap, sequence)

    def goes_over(self, recording: Recording, sequence: int) -> bool:
        """Whether the rank of that recording has let others know so of that collective."""
        return recording.word(_AT.swap_group) == self.key and recording.word(_AT.swap) == sequence

    def _is_swap(self, own: Raw, other: Other, theirs: Raw) -> bool:
        if not self.goes_over(self.session.own, own.sequence) and not self.goes_over(other.recording, own.sequence):
            return False
        before = self.session.own.raw(self.session.own.row(self.lane, own.sequence - 1))
        their_last = self.record_of(other, own.sequence - 1)
        if before is None or their_last is None or (before.key, before.sequence) != (self.key, own.sequence - 1):
            return False
        return crosses((before, their_last), (own, theirs))

    def _difference(self, own: Raw, other: Other, theirs: Raw) -> str:
        """The gravest difference, without what is no error and has been said before; "" for none."""
        if self._is_swap(own, other, theirs):
            return "swap"
        kinds = differences(own, theirs, bool(self.session.uneven))
        return next((kind for kind in kinds if not self.session.has_told(kind, own, theirs)), "")

    def judge(self, own: Raw, other: Other, raises: bool = True) -> None:
        """Look closely at two records of one collective that are not the same in every respect."""
        session = self.session
        raw = self.record_of(other, own.sequence)
        if raw is None or not self._difference(own, other, raw):
            return
        if own.refused != raw.refused and time.monotonic() - own.entered < _REFUSAL_S:
            return  # what one of them calls may be refused there as well, and is then no part in that collective
        time.sleep(_AGAIN_S)
        raw = self.record_of(other, own.sequence)
        kind = self._difference(own, other, raw) if raw is not None else ""
        if raw is not None and kind:
            session.compare(self, own, other, raw, kind, raises)

    def record_of(self, other: Other, sequence: int) -> Raw | None:
        """The record of another rank's collective of that number, while it is kept; None where it has not come."""
        lane = other.at(self.key)
        theirs = other.recording.row(lane, sequence) if lane >= 0 else 0
        raw = other.recording.raw(theirs) if theirs else None
        return raw if raw is not None and raw.key == self.key and raw.sequence == sequence else None

    def missing(self, sequence: int) -> list[int]:
        """The other ranks of this machine that have not come to that collective."""
        late = []
        for other in self.others:
            lane = other.at(self.key)
            if lane < 0 or other.recording.head(lane) < sequence:
                late.append(other.rank)
        return late

    def first(self) -> Started | None:
        """This rank's first collective that has not ended."""
        self.reap()  # without the lock: a device may be slow to answer
        return self._first_of(self.started)

    def close(self) -> None:
        """The group has been left."""
        self.session.recorder.close_lane(self.lane)
        self.started.clear()
        self.messages.clear()
