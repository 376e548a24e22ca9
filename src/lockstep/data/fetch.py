"""Fetching the samples of a step, in this process or in loader processes, and moving them to the device."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from .keyed import draws_apart, seed_draws
from .nested import map_tensors
from .sending import Sent

__all__ = ["Collate", "Fetcher", "Request", "to_device"]

Collate = Callable[[list[Any]], Any]

Request = tuple[int, list[int] | tuple[list[int], ...]]
"""(the key of the epoch's random draws, the indices of the samples that form a batch); or those of several, which then
come in one list, each collated by itself, with None for one of no samples."""


class _Batches(Dataset[Any]):
    """A data set whose items are whole batches, each asked for by a `Request`."""

    def __init__(self, dataset: Any, collate: Collate | None) -> None:
        self.dataset, self.collate = dataset, collate or default_collate
        plain = collate is None
        # Only torch's own class: another one that inherits from it may change samples on the way out.
        self.in_tensors = plain and type(dataset) is TensorDataset
        self.by_batch = plain and hasattr(dataset, "collated_batch")
        self.by_sample = not (self.in_tensors or self.by_batch)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "dataset": Sent(self.dataset), "collate": Sent(self.collate)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, dataset=state["dataset"].value, collate=state["collate"].value)

    def __getitem__(self, request: Request) -> Any:
        key, indices = request
        if isinstance(indices, tuple):
            return [self._batch(key, part) if part else None for part in indices]
        return self._batch(key, indices)

    def _batch(self, key: int, indices: list[int]) -> Any:
        if self.in_tensors:
            return [tensor[indices] for tensor in self.dataset.tensors]
        if self.by_batch:
            return self.dataset.collated_batch(indices)
        return self.collate([self._sample(key, index) for index in indices])

    def _sample(self, key: int, index: int) -> Any:
        seed_draws(key, index)
        return self.dataset[index]


class _Plan:
    """The requests that loader processes work through; set anew before each epoch, so that they can live on."""

    def __init__(self) -> None:
        self.requests: Iterable[Request] = ()

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)


class Fetcher:
    """Turns requests into batches on the host, in order.

    Random draws of the data set are keyed by sample: the same in any process, and the caller's generators stay as
    they are.

    Args:
        dataset: has ``__getitem__(index)``, or ``collated_batch(indices)`` for many at once.
        collate: makes one batch of a list of samples; `torch.utils.data.default_collate` when None.
        processes: loader processes; 0 fetches in this process. They start with the first epoch and live until `close`.
        prefetch: at most this many batches are ready or in the making in loader processes; at least one for each.
        pin: whether batches are put in page-locked memory, from which copies to a GPU overlap its work.
    """

    def __init__(self, dataset: Any, collate: Collate | None, processes: int, prefetch: int, pin: bool) -> None:
        self._batches = _Batches(dataset, collate)
        self._processes, self._prefetch, self._pin = processes, prefetch, pin
        self._plan = _Plan()
        self._loader: DataLoader[Any] | None = None
        self._running: Generator[Any, None, None] | None = None

    def fetch(self, requests: Iterable[Request]) -> Iterator[Any]:
        """One batch for each request. Loader processes serve one caller at a time: an earlier iterator ends here."""
        if not self._processes:
            return self._fetch_here(requests)
        self._end_running()
        self._running = self._fetch_there(requests)
        return self._running

    def _fetch_here(self, requests: Iterable[Request]) -> Iterator[Any]:
        # What takes whole batches is not seeded. To put the generators back costs 80 µs, most of it NumPy's.
        apart = draws_apart if self._batches.by_sample else nullcontext
        for request in requests:
            with apart():
                data = self._batches[request]
            yield map_tensors(pinned, data) if self._pin else data

    def _fetch_there(self, requests: Iterable[Request]) -> Generator[Any, None, None]:
        self._plan.requests = requests
        if self._loader is None:
            self._loader = self._start()
        yield from self._loader

    def _start(self) -> DataLoader[Any]:
        return DataLoader(
            self._batches,
            batch_size=None,
            sampler=self._plan,
            num_workers=self._processes,
            prefetch_factor=self._prefetch // self._processes,
            persistent_workers=True,
            pin_memory=self._pin,
            worker_init_fn=partial(_leave_signals_to_the_parent, apart=multiprocessing.parent_process() is None),
            # A generator of its own: else each epoch would draw a seed from the program's random state.
            generator=torch.Generator(),
        )

    def _end_running(self) -> None:
        if self._running is not None:
            self._running.close()
            self._running = None

    def close(self) -> None:
        """End the loader processes; a later `fetch` starts new ones."""
        self._end_running()
        loader, self._loader = self._loader, None
        iterator = getattr(loader, "_iterator", None)
        if iterator is not None:
            # Letting go of it would do the same, unless a traceback still holds one of its frames.
            iterator._shutdown_workers()


def _leave_signals_to_the_parent(_: int, apart: bool) -> None:
    # Ctrl-C reaches every process of the terminal, and some schedulers send SIGTERM to a whole process group. The
    # parent ends its step first, and needs this one's batches for it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if apart:  # not below a launcher, which tells the worker alone, and ends its group to leave nothing behind
        os.setpgid(0, 0)
        # Outside the terminal's foreground group, writing to it must not stop the process ("stty tostop").
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` in page-locked memory, or itself where there is no such thing: on a device, or sparse."""
    dense = tensor.device.type == "cpu" and tensor.layout == torch.strided
    return tensor.pin_memory() if dense else tensor


def to_device(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """Each of `batches` on `device`; on a GPU the copy of the next one runs beside the work on this one."""
    if device.type == "cpu":
        yield from batches
    elif device.type != "cuda":
        for data in batches:
            yield map_tensors(lambda tensor: tensor.to(device), data)
    else:
        yield from _overlapped(batches, device)


def _overlapped(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    waiting: tuple[Any, torch.cuda.Event] | None = None

    def hand_out(data: Any, copied: torch.cuda.Event) -> Any:
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
        if waiting is not None:
            yield hand_out(*waiting)
        waiting = moved, copied
    if waiting is not None:
        yield hand_out(*waiting)
