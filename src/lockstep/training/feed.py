"""This worker's parts of a loader's global batches, as a loop takes them; again after a loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..data.loader import Batch, Loader
from ..errors import counted
from .recovery import Recovery
from .step.out_of_memory import explained, is_out_of_memory

_ADVICE = (
    "Try a smaller global batch, or more workers: several passes over a batch need all of it on "
    "the device."
)


def copied(loader: Loader, batches: Iterator[Batch]) -> Iterator[Batch]:
    """Yield the batches of a loader, which are copied to the device meanwhile.

    Raises:
        OutOfMemoryError: the memory of the device is full; says after which step, and what to try.
    """
    last: Batch | None = None
    while True:
        try:
            batch = next(batches, None)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            before = (
                "before the first step"
                if last is None
                else f"after step {last.step} of epoch {last.epoch}"
            )
            samples = counted(loader.global_batch_size, "sample")
            purpose = f"the copy of a batch {before}, with global batches of {samples}"
            raise explained(error, loader.comm, purpose, _ADVICE) from error
        if batch is None:
            return
        last = batch
        yield batch


class Feed:
    """This worker's parts of the global batches of a loader.

    Args:
        loader: of the batches.
        seek: moves the loader to the position of the training, and returns whether it is before a
            batch of this epoch.
        recovery: of the training; loading may communicate.
    """

    def __init__(self, loader: Loader, seek: Callable[[int], bool], recovery: Recovery) -> None:
        self.loader = loader
        self._seek = seek
        self._recovery = recovery
        self._epoch = 0
        self._stream: Iterator[Batch] | None = None
        self._batch: Batch | None = None
        self._is_lost = False  # whether the loader may be at another position than the training

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """Yield the batches of an epoch, from the position of the training on."""
        self._epoch = epoch
        try:
            while (batch := self._recovery.read(self._next)) is not None:
                yield batch
        finally:
            self._stream = self._batch = None

    def current(self) -> Batch:
        """Return this worker's part of the current batch."""
        batch = self._batch
        if batch is None:  # the workers have changed since
            batch = self._next()
        assert batch is not None
        return batch

    def regroup(self) -> None:
        """Adapt to the workers that there are now; what is needed next is loaded again when it is
        needed.
        """
        self._stream = self._batch = None
        self._is_lost = True

    def _next(self) -> Batch | None:
        """Load the next batch; None at the end of the epoch."""
        if self._stream is None:
            if self._is_lost and not self._seek(self._epoch):
                return None
            self._is_lost = False
            self._stream = copied(self.loader, self.loader.epoch(self._epoch))
        self._batch = next(self._stream, None)
        return self._batch
