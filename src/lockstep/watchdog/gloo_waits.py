"""Waits over Gloo that can be ended: an elastic job goes on after the loss of a rank, of which a
wait over Gloo may never hear.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

_SLICE = timedelta(milliseconds=50)


class EndableWaits:
    """The waits of this rank in one group over Gloo, which end when the membership of the job
    changes.

    Args:
        check: raises what ends the waits, if there is something.

    Attributes:
        abandoned: works for which the program waited when it was interrupted, and which have not
            ended.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        self._messages: list[Any] = []  # works of those for which the program waits
        self.abandoned: list[Any] = []

    def wait(self, work: Any) -> bool:
        """Wait for a collective, and look again and again whether the wait is to end."""
        while True:
            try:
                return bool(work.wait(_SLICE))
            except RuntimeError:
                if work.is_completed():  # with an error of its own, or in this moment
                    return bool(work.wait())
                try:
                    self._check()
                except BaseException:
                    self.abandoned.append(work)
                    raise

    def wait_for_message(self, work: Any) -> bool:
        """Wait for a message until `abort_messages`, without a limit: Gloo closes all connections
        of a group when one is over.
        """
        self._messages.append(work)
        try:
            self._check()
            answer = bool(work.wait())
            self._check()  # the wait may have been aborted
            return answer
        finally:
            self._messages.remove(work)

    def abort_messages(self) -> None:
        """End the program's waits for messages."""
        for work in list(self._messages):
            work.abort()

    def abandon(self, work: Any) -> None:
        """Note that nobody waits any more for a collective that has started."""
        if work is not None and not work.is_completed():
            self.abandoned.append(work)
