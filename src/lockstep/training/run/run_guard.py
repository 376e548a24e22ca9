"""A guard of a whole run: what a `Trainer` asks beside its steps when it trains, or is only to
replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

from ... import environment
from ...data.loader import Loader
from ...extension_points import EXTENSION_POINTS
from ..callbacks.base import Callback
from ..step.guards import Guard

__all__ = ["RunGuard", "run_guard"]


class RunGuard(Guard):
    """A guard that takes part in the calls of `fit` as well; this one changes nothing.

    Attributes:
        run_dir: the run directory of the trainer.
    """

    run_dir: Path | None

    def callbacks(self, callbacks: Sequence[Callback] | None) -> Sequence[Callback] | None:
        """Return the callbacks of the trainer, of those that it was given."""
        return callbacks

    def trains(self) -> bool:
        """Return whether a call of `fit`, which begins here, trains."""
        return True

    def resumes(self, checkpoint: str | Path | None) -> str | Path | None:
        """Return what this call of `fit` resumes from, as its argument `resume`."""
        return checkpoint

    def fit(self, trainer: Any, loader: Loader) -> AbstractContextManager[object]:
        """Return a context manager for the steps of a call of `fit`.

        Args:
            trainer: the `Trainer`, in the state from which it trains.
            loader: of the training data, before an epoch begins.
        """
        return nullcontext()


class _Count:
    """The number of trainers of this process that keep a ledger, or would if they were not
    replayed: by it a replay knows the trainer that it is to repeat.
    """

    trainers: ClassVar[int] = 0


def run_guard(run_dir: Path | None, has_ledger: bool, fingerprint_every: int) -> RunGuard | None:
    """Return the guard of a run: that of its ledger, or in a program that is replayed that of the
    replay.

    Args:
        run_dir: the run directory that the trainer was given.
        has_ledger: whether the run keeps a ledger, if it has a directory.
        fingerprint_every: steps between two fingerprints in the ledger.
    """
    keeps = run_dir is not None and has_ledger
    number = _Count.trainers
    _Count.trainers += keeps
    request = environment.replay_request()
    if request is not None:
        replay: RunGuard = EXTENSION_POINTS.load("replay of a run")(
            request, number if keeps else None
        )
        return replay
    if not keeps:
        return None
    ledger: RunGuard = EXTENSION_POINTS.load("ledger of a run")(run_dir, number, fingerprint_every)
    return ledger
