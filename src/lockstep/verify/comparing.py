"""Where two records part (pure)."""

from __future__ import annotations

from dataclasses import dataclass

from .recording import Record

__all__ = ["Parting", "first_parting"]


@dataclass(frozen=True)
class Parting:
    """The first difference between two records.

    Attributes:
        step: its number, from 0.
        loss_differs: whether that step's loss does, which was computed before the update.
        tensors: the names of those that do, in the model's order; the first is the one to look at.
        of: how many there are.
    """

    step: int
    loss_differs: bool
    tensors: tuple[str, ...]
    of: int


def first_parting(one: Record, other: Record) -> Parting | None:
    """The first step after which the two are not the same bit for bit; None where all are."""
    for number, (left, right) in enumerate(zip(one.steps, other.steps, strict=True)):
        names = tuple(name for name in left.tensors if left.tensors[name] != right.tensors.get(name))
        if names or left.loss != right.loss or left.fingerprint != right.fingerprint:
            return Parting(number, left.loss != right.loss, names, len(left.tensors))
    return None
