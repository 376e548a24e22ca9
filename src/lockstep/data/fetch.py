"""Fetching the samples of a step, in this process or in loader processes, and moving them to the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from .nested import map_tensors

__all__ = ["Collate", "Fetcher", "to_device"]

Collate = Callable[[list[Any]], Any]


class _Batches(Dataset[Any]):
    """A data set whose items are whole batches, each asked for by its list of indices.

    A data set with a method ``batch(indices)`` is asked once for all samples; the others sample by sample.
    """

    def __init__(self, dataset: Any, collate: Collate | None) -> None:
        self.dataset, self.collate = dataset, collate or default_collate
        self.vectorised = collate is None and hasattr(dataset, "batch")

    def __getitem__(self, indices: Sequence[int]) -> Any:
        if self.vectorised:
            return self.dataset.batch(indices)
        return self.collate([self.dataset[index] for index in indices])


class _Plan:
    """The index lists that loader processes work through; set anew before each epoch, so that they can live on."""

    def __init__(self) -> None:
        self.lists: list[list[int]] = []

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.lists)

    def __len__(self) -> int:
        return len(self.lists)


class Fetcher:
    """Turns lists of indices into batches on the host, in order.

    Args:
        dataset: has ``__getitem__(index)``, or ``batch(indices)`` for many at once.
        collate: makes one batch of a list of samples; `torch.utils.data.default_collate` when None.
        num_workers: loader processes; 0 fetches in this process.
        prefetch: at most this many batches are ready or in the making beforehand.
        pin: whether batches are put in page-locked memory, from which copies to a GPU overlap its work.
    """

    def __init__(self, dataset: Any, collate: Collate | None, num_workers: int, prefetch: int, pin: bool) -> None:
        self._batches = _Batches(dataset, collate)
        self._pin = pin
        self._plan = _Plan()
        self._loader: DataLoader[Any] | None = None
        if num_workers > 0:
            self._loader = DataLoader(
                self._batches,
                batch_size=None,
                sampler=self._plan,
                num_workers=num_workers,
                prefetch_factor=max(1, prefetch // num_workers),
                persistent_workers=True,
                pin_memory=pin,
                # A generator of its own: else each epoch would draw a seed from the program's random state.
                generator=torch.Generator(),
            )

    def fetch(self, lists: Iterable[list[int]]) -> Iterator[Any]:
        """One batch for each list of indices."""
        if self._loader is not None:
            self._plan.lists = list(lists)
            yield from self._loader
            return
        for indices in lists:
            data = self._batches[indices]
            yield map_tensors(torch.Tensor.pin_memory, data) if self._pin else data

    def close(self) -> None:
        """End the loader processes."""
        self._loader = None


def to_device(batches: Iterable[Any], device: torch.device, ahead: int) -> Iterator[Any]:
    """Each of `batches` on `device`; on a GPU the copies of at most `ahead` batches run beside its computation."""
    if device.type == "cpu":
        yield from batches
    elif device.type != "cuda":
        for data in batches:
            yield map_tensors(lambda tensor: tensor.to(device), data)
    else:
        yield from _overlapped(batches, device, ahead)


def _overlapped(batches: Iterable[Any], device: torch.device, ahead: int) -> Iterator[Any]:
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    waiting: deque[tuple[Any, torch.cuda.Event]] = deque()

    def hand_out() -> Any:
        data, copied = waiting.popleft()
        consumer = torch.cuda.current_stream(device)
        consumer.wait_event(copied)
        # The allocator must not reuse this memory for the copy stream while the consumer still reads it.
        map_tensors(lambda tensor: tensor.record_stream(consumer), data)
        return data

    for data in batches:
        with torch.cuda.stream(stream):
            moved = map_tensors(lambda tensor: tensor.to(device, non_blocking=True), data)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(stream)
        waiting.append((moved, copied))
        if len(waiting) > max(ahead, 1) - 1:
            yield hand_out()
    while waiting:
        yield hand_out()
