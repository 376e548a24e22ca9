"""Observers: what an extension sees, and may change, of batches and reductions in any training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

_NOTHING = nullcontext()


class Observer:
    """Does nothing; an extension overrides what it needs.

    The methods are called on every worker, in the thread of the program.
    """

    def run_directory(self, path: Path) -> Path:
        """Return the run directory that a `Trainer` uses instead of `path`."""
        return path

    def batches(self, batches: Iterator[Any], workers: int, rank: int) -> Iterator[Any]:
        """Return what the loop over an epoch of a `Loader` gets.

        Args:
            batches: the loader's own, each a `Batch`; they are loaded as they are asked for.
            workers: among how many workers each global batch is divided.
            rank: this worker.
        """
        return batches

    def begin_ordered_step(self, virtual_workers: int) -> None:
        """Note that a loop over an `OrderedReducer` begins its shards of a step."""

    def note_part(self, samples: int, size: int) -> None:
        """Note that such a loop uses `size` of the samples of a global batch for its next shard."""

    def reducing(self, workers: int) -> AbstractContextManager[None]:
        """Return a context in which the program waits until gradients are summed over `workers`.

        Gradients that `DistributedDataParallel` sums within the backward pass are not among them.
        """
        return _NOTHING


_active = Observer()


def active() -> Observer:
    """Return the observer that is installed; one that does nothing without any."""
    return _active


def install(observer: Observer) -> Callable[[], None]:
    """Let `observer` see every training of this process from now on.

    Returns:
        A function that puts the observer before in its place again.
    """
    global _active
    before = _active
    _active = observer

    def uninstall() -> None:
        global _active
        _active = before

    return uninstall
