"""A worker's side of the membership: what it has been told, and the store in which a generation's
members meet.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any

from msgspec import structs

from ..errors import LockstepError, MembershipChangedError
from ..job.client import JobClient
from .keys import Answer
from .membership import (
    Commit,
    Down,
    Finish,
    Keep,
    Lease,
    Regroup,
    Up,
    View,
    WorkerState,
)


class WorkerLeft(SystemExit):
    """This worker has left the job in good order; its program ends with exit code 0."""

    def __init__(self) -> None:
        super().__init__(0)


class MembershipClient:
    """What this worker knows of the membership; the coordinator's messages come in the thread of
    the connection.

    Args:
        job: the connection to the launcher, which passes messages on to the coordinator.
        on_change: called from the thread when this worker has to leave its group at once.

    Attributes:
        number: of this worker.
        generation: the one that this worker is in; 0 before the first.
        leaving: whether this worker wants to leave.
        hands_over: whether it does so only where it can hand over its part of the state.
        published: the values that rank 0 sent to all before this worker joined.
    """

    def __init__(self, job: JobClient, on_change: Callable[[], None] = lambda: None) -> None:
        self.number = job.number
        self.generation = 0
        self.leaving = False
        self.hands_over = False
        self.published: list[bytes] = []
        self._last_result = -1  # the number of the training whose result has come last
        self.on_change = on_change
        self._changed = threading.Condition()
        self._due = self._next = (
            0  # the newest generation to enter at once, and the newest that is open
        )
        self._to_agree_on = 0  # the generation for which to ask the other members
        self._signal = 0
        self._leased_until = math.inf  # in a job on one host there are no leases
        self._view: View | None = None
        self._completed = -1  # the last training that is complete everywhere
        self._has_left = self._is_lost = False
        self._state = WorkerState()
        self._requests = count()
        self._answers: dict[int, Answer] = {}
        self._job = job
        job.subscribe(self._receive, self._lose)

    def send(self, message: Up) -> None:
        """Send a message to the coordinator."""
        self._job.send(message)

    def _receive(self, message: Down) -> None:
        with self._changed:
            self._take(message)
            self._changed.notify_all()
        if isinstance(message, Regroup) and message.when == "at once":
            with suppress(OSError):  # of the group's sockets, which say nothing of the connection
                self.on_change()

    def _lose(self) -> None:
        """The launcher is gone, which ends this process."""
        with self._changed:
            self._is_lost = True
            self._changed.notify_all()

    def _take(self, message: Down) -> None:
        match message:
            case Regroup(generation, "agreed"):
                self._to_agree_on = generation
            case Regroup(generation, when):
                self._next = max(self._next, generation)
                if when == "at once":
                    self._due = self._next
            case View():
                self._view = message
                self._next = max(self._next, message.generation)
                if message.fit >= 0:
                    self._state = structs.replace(self._state, fit=message.fit)
            case Lease():
                self._leased_until = message.until
            case Answer():
                self._answers[message.request] = message
            case Keep():
                # the next rank 0 sends a result again, if it does not know that it was sent
                if not 0 <= message.training <= self._last_result and message.value is not None:
                    self.published.append(message.value)
                    self._last_result = max(self._last_result, message.training)
            case Finish(how="stop"):
                self._signal = message.number
            case Finish(how="leave"):
                self._has_left = True
            case Finish(how="complete"):
                self._completed = max(self._completed, message.number)

    @property
    def is_over(self) -> bool:
        """Whether this worker's generation is over, so that it has to leave its group at once."""
        return self._due > self.generation or self._is_lost

    @property
    def wants_to_regroup(self) -> bool:
        """Whether this worker asks the others to regroup after the step in progress."""
        return self.leaving or self._to_agree_on == self.generation + 1

    @property
    def stop_signal(self) -> int:
        """The signal after which the whole job saves and ends; 0 as long as there is none."""
        return self._signal

    @property
    def members(self) -> tuple[int, ...]:
        """The numbers of the workers of the newest view."""
        return () if self._view is None else tuple(self._view.members)

    def check(self) -> None:
        """Raise MembershipChangedError if this worker's generation is over."""
        if self.is_over:
            raise MembershipChangedError(self.generation)

    def wait_for_lease(self) -> None:
        """Wait until this worker may complete a step, or its generation is over."""
        if time.monotonic() < self._leased_until:
            return
        with self._changed:
            self._changed.wait_for(lambda: time.monotonic() < self._leased_until or self.is_over)

    def _tell(self, **changes: Any) -> None:
        """Tell the coordinator what has changed in this worker's state."""
        with self._changed:
            self._state = structs.replace(
                self._state, leaving=self.leaving, hands_over=self.hands_over, **changes
            )
        self.send(self._state)

    def enter(self, fit: int, most: int, folder: str = "") -> None:
        """Say that the training number `fit` of the program begins, with at most so many workers
        and this folder.

        With -1 the program is outside of a training from here on, where the loss of a worker is not
        survived.
        """
        self._tell(fit=fit, most=most, folder=folder)

    def leave(self, is_faulty: bool = False) -> None:
        """Say that this worker wants to leave after the step in progress.

        Args:
            is_faulty: whether it computes wrong numbers: no other worker is started on its device.
        """
        self.leaving = True
        self._tell(faulty=is_faulty)

    def publish(self, value: bytes, training: int = -1) -> None:
        """Keep a value that rank 0 sends to all, for workers that join later; waits until all hosts
        have it.

        Args:
            value: pickled.
            training: the number of the training whose result it is; -1 for another value.

        Raises:
            MembershipChangedError: the generation is over; the value may have been kept.
        """
        self.request(self.generation, lambda number: Keep(value, number, training))

    def published_value(self, number: int) -> bytes:
        """Return the value that rank 0 sent as number `number`, from 0; waits for it."""
        with self._changed:
            self._changed.wait_for(lambda: len(self.published) > number or self._has_ended)
            if len(self.published) <= number:
                self._end_if_told()
            return self.published[number]

    def note_events(self, commit: Commit, states: bytes | None) -> None:
        """Say that rank 0's callbacks have seen all up to this commit, and their states if these
        have changed.

        Waits until all hosts have the states.

        Raises:
            MembershipChangedError: this worker's generation is over.
        """
        if states is None:
            self.send(Keep(None, commit=commit))
        else:
            self.request(self.generation, lambda number: Keep(states, number, commit=commit))

    def join(self) -> View:
        """Ask to become a member, and wait for the first view.

        Raises:
            WorkerLeft: the job ends before.
        """
        self._tell(phase="ready")
        with self._changed:
            self._changed.wait_for(lambda: self._view is not None or self._has_ended)
            self._end_if_told()
            assert self._view is not None
            self.generation = self._view.generation
            return self._take_part(self._view)

    def joins_before(self, number: int) -> bool:
        """Ask to become a member; returns whether there is a view before rank 0 has sent its value
        `number`, from 0.

        Raises:
            WorkerLeft: the job ends before.
        """
        self._tell(phase="ready")
        with self._changed:
            self._changed.wait_for(
                lambda: len(self.published) > number or self._view is not None or self._has_ended
            )
            if len(self.published) > number:
                return False
            self._end_if_told()
            return True

    def regroup(self, commit: Commit, reason: str = "", at_boundary: bool = False) -> View:
        """Wait for the view of the next generation; this worker has left its group.

        Args:
            commit: the position of its last complete step.
            reason: why its group has failed, if it does not know of a change.
            at_boundary: whether all members have agreed to regroup here.

        Raises:
            WorkerLeft: it leaves with this view, or the job ends.
        """
        while True:
            if self._next <= self.generation:
                self._tell(phase="left", commit=commit, failed=None if at_boundary else reason)
            with self._changed:
                self._changed.wait_for(
                    lambda: (self._next > self.generation or self._has_ended or self._has_completed)
                )
                generation = self.generation = self._next
            self._end_if_told()
            self._tell(phase="arrived", generation=generation, commit=commit, failed=None)
            with self._changed:
                self._changed.wait_for(
                    lambda: self._is_viewed or self._has_ended or self._has_completed
                )
                self._end_if_told()
                if self._next == generation and self._view is not None:
                    return self._take_part(self._view)

    def _take_part(self, view: View) -> View:
        """This worker is a member now, which the coordinator knows."""
        self._state = structs.replace(self._state, phase="member", generation=view.generation)
        return view

    @property
    def _is_viewed(self) -> bool:
        """Whether the view of this worker's generation has come, or the next one is open
        already.
        """
        view = self._view
        return self._next > self.generation or (
            view is not None and view.generation == self.generation
        )

    @property
    def _has_ended(self) -> bool:
        """Whether this worker takes part no more."""
        return self._has_left or self._is_lost

    @property
    def _has_completed(self) -> bool:
        """Whether this worker's training is complete everywhere."""
        return 0 <= self._state.fit <= self._completed

    def _end_if_told(self) -> None:
        if self._is_lost:
            raise LockstepError("the launcher of this elastic job is gone")
        if self._has_left or self._has_completed:
            raise WorkerLeft

    def complete(self) -> bool:
        """Wait until the training that this worker is in, if any, is complete on all members; False
        if they have to regroup before.
        """
        if self._state.fit < 0:
            return True
        self._tell(phase="done")
        with self._changed:
            self._changed.wait_for(
                lambda: self._has_completed or self._has_ended or self._next > self.generation
            )
            if self._has_ended:
                self._end_if_told()
            if not self._has_completed:
                return False
            self._state = structs.replace(self._state, phase="member", fit=-1)
            return True

    def request(self, generation: int, make: Callable[[int], Up], waits: bool = False) -> Answer:
        """Return the coordinator's answer about keys of `generation`.

        Args:
            generation: whose keys they are.
            make: makes the message of the request's number.
            waits: whether the answer may take as long as another worker needs.

        Raises:
            MembershipChangedError: the generation is over.
        """
        number = next(self._requests)
        self.send(make(number))
        with self._changed:
            while number not in self._answers:
                if self._is_lost or self._due > generation or (waits and self._next > generation):
                    raise MembershipChangedError(generation)
                self._changed.wait()
            return self._answers.pop(number)

    def forget_answers(self) -> None:
        """Drop the answers to requests of earlier generations, which nobody waits for."""
        with self._changed:
            self._answers.clear()
