"""What is found to be wrong, before it has become a report."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Finding"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What a report will say; see `report.Report` for `sentence`, `cause` and `advice`.

    Attributes:
        kind: one of `report.KINDS`.
        culprits: the ranks to blame; none where that cannot be said.
        key, sequence: of the group and the collective in which the ranks part; 0 where that is not in a collective.
    """

    kind: str
    sentence: str
    culprits: tuple[int, ...] = ()
    cause: str = ""
    advice: str = ""
    key: int = 0
    sequence: int = 0
