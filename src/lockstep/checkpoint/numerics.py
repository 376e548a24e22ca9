"""The version of the numerics: what a release of Lockstep computes differently from the same
program and seed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Change:
    """What a version of the numerics has changed; each text says how, and is empty if it did not.

    Attributes:
        release: the first release of Lockstep with this version.
        order: which samples form a step.
        draws: the random numbers of a step or a sample, such as those of dropout and augmentation.
        bits: the last bits of sums and updates; results are the same up to rounding.
    """

    release: str
    order: str = ""
    draws: str = ""
    bits: str = ""


_UNKNOWN = "not recorded before 0.2"

CHANGES: Mapping[int, Change] = {1: Change("0.2", order=_UNKNOWN, draws=_UNKNOWN, bits=_UNKNOWN)}
"""Each version of the numerics, and what it has changed. Checkpoints and positions hold its number.

A change of the code that changes a golden fingerprint (tests/data/checkpoints) has a new row here.
A change of the format of checkpoints, which changes no result, has none.
"""

NUMERICS = max(CHANGES)
"""The version of this code."""

_SAID = {
    "order": "the order of samples differs: in an epoch in progress some come twice, and others "
    "not at "
    "all",
    "draws": "random draws, such as those of dropout and augmentation, differ",
    "bits": "the last bits of results differ",
}
_UNCHANGED = {
    "order": "the order of samples",
    "draws": "random draws",
    "bits": "the bits of sums and updates",
}


def changes_since(saved: int, changes: Mapping[int, Change] = CHANGES) -> str:
    """Return one line on what differs from here on in a run that was saved under other numerics; ""
    if nothing does.

    Args:
        saved: the number in the checkpoint or position; 0 for one without, which is from before
            0.2.
        changes: the versions; the last one is that of the running code.
    """
    ours = max(changes)
    if saved == ours:
        return ""
    before = (
        "before 0.2, without a version of the numerics"
        if saved not in changes
        else _named(saved, changes)
    )
    if saved > ours:
        return (
            f"this run was saved by a newer Lockstep, with numerics {saved}, and goes on with "
            f"{_named(ours, changes)}: the order of samples, random draws and bits may differ "
            "from here on. Use the Lockstep that saved it, or read in its changelog what differs"
        )
    since = [change for number, change in sorted(changes.items()) if number > saved]
    differ = []
    same = []
    for kind, subject in _SAID.items():
        reasons = [f"{change.release}: {how}" for change in since if (how := getattr(change, kind))]
        if reasons:
            differ.append(f"{subject} ({'; '.join(reasons)})")
        else:
            same.append(_UNCHANGED[kind])
    unchanged = f". Unchanged: {', '.join(same)}" if same else ""
    return (
        f"this run was saved by Lockstep {before}, and goes on with {_named(ours, changes)}. From "
        f"here on {', '.join(differ)}{unchanged}"
    )


def _named(number: int, changes: Mapping[int, Change]) -> str:
    return f"{changes[number].release} (numerics {number})"
