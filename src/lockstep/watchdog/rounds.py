"""Rounds: collectives in which the ranks of a group negotiate what to do next.

A rank comes to the next round when it has something to negotiate, so that it may come late without
a fault: rounds have time limits of their own. They are short and many. Each is counted, and only
one that takes long is recorded, by the monitor thread: from then on it is a collective like any
other, and whoever is missing from it is diagnosed, warned about and reported as ever.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import TransportError
from ..flight_recorder import CallSignature
from .call_sites import digest, main_frame
from .report import Finding
from .shared_state import PendingCall

if TYPE_CHECKING:
    from .monitor import GroupMonitor

__all__ = ["Rounds"]

_FINGERPRINT = digest("a round of negotiation")  # of all rounds: ranks need not want the same
# A round that has taken so many seconds is recorded, or half of the first limit if that is less.
_LONG_S = 1.0
# The time limit of rounds that have none, in seconds, where other hosts read it: JSON has no inf.
_NEVER_S = 1e9


class Rounds:
    """The rounds of one group, as this rank takes part in them.

    Between `begin` and `end` the rank takes part in one round. Every rank of the group takes part
    in the same rounds.

    Args:
        monitor: of the group.
        purpose: returns for what this rank waits, such as "allreduce 'x'", for reports; the monitor
            thread calls it.
        warning_s: seconds after which ranks that are missing from a round are warned about; inf for
            never.
        stall_s: seconds after which they are an error; inf for never.
        setting: the name of the option that sets `stall_s`, for reports.
    """

    def __init__(
        self,
        monitor: GroupMonitor,
        purpose: Callable[[], str],
        warning_s: float,
        stall_s: float,
        setting: str,
    ) -> None:
        self._monitor = monitor
        self._state = monitor.state
        self._purpose = purpose
        self._long_s = min(_LONG_S, warning_s / 2, stall_s / 2)
        self._number = monitor.sequence
        self._began = 0.0  # 0 between two rounds
        self._thread = 0
        self._recorded: PendingCall | None = None
        self._waiting_thread = 0  # in the round that is recorded
        self._is_open = True
        monitor.limits = replace(
            self._state.limits, warning_s=warning_s, stall_s=stall_s, setting=setting
        )
        self._state.recorder.set_limit(monitor.slot, min(stall_s, _NEVER_S))

    def begin(self) -> None:
        """Count a round that this rank begins; other ranks see at once that it is not missing."""
        self._number += 1
        if self._is_open:
            self._state.recorder.set_sequence(self._monitor.slot, self._number)
        self._thread = threading.get_ident()
        self._began = time.monotonic()

    def end(self) -> None:
        """Note that the round is over, or has failed."""
        self._began = 0.0

    def close(self) -> None:
        """Record no round any more: the group is about to be destroyed."""
        self._is_open = False

    def record_long(self) -> None:
        """Record the round of this rank if it takes long, and the end of one that was recorded; the
        monitor thread calls this.
        """
        number = self._number
        began = self._began
        recorded = self._recorded
        if recorded is not None and (not began or recorded.sequence != number):
            self._recorded = None
            self._state.waiting_threads.discard(self._waiting_thread)
            self._monitor.finish(recorded, time.monotonic())
        if began and self._recorded is None and time.monotonic() - began >= self._long_s:
            self._waiting_thread = self._thread
            self._state.waiting_threads.add(self._waiting_thread)
            self._recorded = self._record(number, began)

    def _record(self, number: int, began: float) -> PendingCall:
        state = self._state
        monitor = self._monitor
        recorder = state.recorder
        purpose = self._purpose()
        call = CallSignature(_FINGERPRINT, purpose, recorder.texts.intern(purpose))
        site = state.call_sites.lookup(main_frame())
        with state.lock:
            monitor.sequence = number
            # ranks may be on other lines, and in other batches: neither is recorded
            record = recorder.enter(
                monitor.key,
                monitor.slot,
                number,
                call,
                0,
                site.text,
                monitor.title_number,
                0,
                -1,
                now=began,
                loop=0,
            )
            pending = PendingCall(record, number, began)
            monitor.pending.append(pending)
        return pending

    def warn(self, text: str) -> None:
        """Show a warning to the user, through the launcher if there is one."""
        self._state.write_message(text)

    def report_stall(
        self, sentence: str, ranks: Sequence[int], waited_s: float, advice: str
    ) -> None:
        """Report that ranks take part in the rounds, and yet never do that for which others wait.

        Args:
            sentence: what they do not do, and who waits for it.
            ranks: these ranks.
            waited_s: for how many seconds others have waited.
            advice: what to do about it.

        Raises:
            StallError: unless all has to wait: rank 0 works for the others, or a debugger is
                attached.
        """
        state = self._state
        limits = self._monitor.limits
        if limits.debugging or state.seconds_since_solo(waited_s) < limits.stall_s:
            return
        who = "It" if len(ranks) == 1 else "They"
        cause = f"{who} may call other operations, or the same ones under other names."
        advice = f"{advice} {limits.setting} sets the limit of {limits.stall_s:g} s."
        state.fail(Finding("stall", sentence, tuple(ranks), cause, advice))
        state.check()

    def root_cause(self, error: BaseException) -> BaseException:
        """Return what a failed round is to raise: the watchdog's report if `error` is only a
        symptom of it, for which this waits a few seconds; else `error`.
        """
        try:
            self._state.raise_root_cause(error, self._monitor.ranks)
        except TransportError as cause:
            return cause
        return error

    def note_raised(self) -> None:
        """Note that the calling thread raises an error that was caused by the watchdog's, if there
        is one, so that it need not be interrupted.
        """
        if self._state.error is not None:
            self._state.program.note_error()


def shown_limit(limit_s: float) -> float:
    """Return the limit that a warning shows, 0 for one that is never reached."""
    return 0.0 if math.isinf(limit_s) else limit_s
