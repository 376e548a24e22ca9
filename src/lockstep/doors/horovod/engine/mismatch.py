"""Says in what the requests of several ranks for one operation differ (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["difference", "missing", "names_of"]

Said = tuple[str, str, Sequence[tuple[str, Any]]]


def difference(told: Mapping[int, Said]) -> str:
    """A sentence with the first thing in which ranks differ, and what each of them has.

    Args:
        told: rank → (kind, name, form), of which not all forms are equal.
    """
    (kind, name, _), *_ = told.values()
    labels = dict.fromkeys(label for _, _, form in told.values() for label, _ in form)
    for label in labels:
        ranks: dict[str, list[int]] = {}
        for rank, (_, _, form) in told.items():
            ranks.setdefault(_text(dict(form).get(label)), []).append(rank)
        if len(ranks) > 1:
            values = ", ".join(f"{value} on {names_of(members)}" for value, members in ranks.items())
            return f"{kind} {name!r}: the ranks do not agree on {label}: {values}"
    return f"{kind} {name!r}: the ranks do not agree"


def missing(kind: str, name: str, absent: Sequence[int]) -> str:
    """A sentence for an operation that needs all ranks."""
    verb = "has" if len(absent) == 1 else "have"
    return f"{kind} {name!r} needs all ranks, but {names_of(absent)} {verb} joined. Only all-reduces go on without them"


def names_of(ranks: Sequence[int]) -> str:
    """ "rank 1", or "ranks 0, 2 and 3"."""
    names = [str(rank) for rank in ranks]
    return f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(names[:-1])} and {names[-1]}"


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        inner = ", ".join(_text(each) for each in value)
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    return str(value).removeprefix("torch.")
