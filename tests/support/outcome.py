"""How a run ended on each of its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Outcome", "RanksFailedError"]

Ending = Literal["returned", "raised", "died", "hung"]


@dataclass
class Outcome:
    """One rank's end.

    Attributes:
        rank: which.
        ending: "returned", "raised" (an exception), "died" (its process ended) or "hung" (past the
            deadline).
        value: what it returned.
        kind: class name of what it raised; "" unless it raised.
        message: the text of what it raised, how it died, or how long it hung.
        trace: its traceback; for one that hung, the stacks of its threads.
        exception: the exception itself where it could be pickled.
        exit_code: of one that died; negative for a signal.
        at: when it ended, in seconds on the host's monotonic clock.
        left: what it left open although it returned.
        output: what it wrote to standard output and standard error.
    """

    rank: int
    ending: Ending
    at: float
    value: Any = None
    kind: str = ""
    message: str = ""
    trace: str = ""
    exception: BaseException | None = None
    exit_code: int | None = None
    left: Sequence[str] = ()
    output: str = ""

    @property
    def failed(self) -> bool:
        """Whether it did anything but return and tidy up."""
        return self.ending != "returned" or bool(self.left)

    @property
    def began(self) -> float:
        """A time to order failures by: a death is noticed a little after the neighbours' reactions
        to it.
        """
        return self.at - (1.0 if self.ending == "died" else 0.0)

    def line(self) -> str:
        """The ending in one line."""
        if self.ending == "raised":
            return f"raised {self.kind}: {self.message}"
        if self.ending == "returned":
            return "returned" + (f" but left behind: {'; '.join(self.left)}" if self.left else "")
        return f"{self.ending}: {self.message}"


class RanksFailedError(Exception):
    """At least one rank of a run failed.

    Attributes:
        outcomes: of every rank, in rank order.
        first: the outcome of the rank that failed first.
    """

    def __init__(self, what: str, outcomes: Sequence[Outcome]) -> None:
        super().__init__(what, outcomes)
        self.what, self.outcomes = what, list(outcomes)
        self.failures = sorted((o for o in outcomes if o.failed), key=lambda o: o.began)
        self.first = self.failures[0]

    def __str__(self) -> str:
        count = f"{len(self.failures)} of {len(self.outcomes)} ranks failed"
        parts = [f"{self.what}: {count}, rank {self.first.rank} first"]
        for outcome in self.failures:
            first = " (first)" if outcome is self.first else ""
            parts.append(
                f"--- rank {outcome.rank}{first}: {outcome.line()}\n{outcome.trace}".rstrip()
            )
        parts += [f"--- rank {o.rank}: {o.line()}" for o in self.outcomes if not o.failed]
        return "\n".join(parts)
