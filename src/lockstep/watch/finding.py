"""What is found to be wrong, before it has become a report."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Finding"]


@dataclass(frozen=True, slots=True)
class Finding:
    """See `report.Report` for what the fields mean.

    Attributes:
        key, sequence: of the collective in which the ranks part; 0 where that is not in a collective.
        waiting: ranks that wait for others, with what they wait in.
    """

    kind: str
    sentence: str
    culprits: tuple[int, ...] = ()
    cause: str = ""
    advice: str = ""
    key: int = 0
    sequence: int = 0
