"""Loads what is asked of a data set: its samples, and batches made of them, in this process or in
loader processes.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import signal
import sysconfig
import threading
import traceback
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate, get_worker_info
from typing_extensions import override

from .. import environment
from ..errors import ConfigError, DataError, LockstepError
from ..parallel.nested import map_tensors
from ..parallel.randomness import preserve_generators
from ..system.crashes import print_stack_of_crashes
from ..system.processes import signal_name
from .batch_memory import BatchMemory, OpenPieces, Place
from .between_processes import PackedSamples, PickledByValue
from .device_copies import pinned
from .sample_draws import seed_collate, seed_draws

_REAP_S = 0.1  # in which the exit code of a process that has ended is known

Collate = Callable[[list[Any]], Any]


class Request(Protocol):
    """Something that is asked of a data set; it is sent to the process that loads, and what that
    loads is sent back.

    Attributes:
        gives_samples: whether that is a list of samples, or of what holds some; their many tensors
            travel as one.
    """

    gives_samples: ClassVar[bool]

    @property
    def place(self) -> Place | None:
        """Where a loader process is to write the numbers of samples."""
        return None

    def load(self, samples: Samples) -> Any:
        """Return what is asked for.

        Raises:
            DataError: the data set raises an exception.
        """
        ...


class Samples(Dataset[Any]):
    """The samples of a data set, as the `Dataset` of torch's loader processes: its keys are
    requests.

    Args:
        dataset: has ``__getitem__(index)``, or ``collated_batch(indices)`` for a whole batch; or
            ``reader()``, which returns what reads a data set in blocks, or an iterable one.
        collate: makes one batch of a list of samples; `torch.utils.data.default_collate` if None.

    Attributes:
        dataset: the data set.
        collate: the function.
        in_tensors: whether a batch is read from the tensors of a data set at once.
        by_batch: whether the data set itself makes batches.
        by_sample: whether it is read sample by sample, and its random draws are seeded for each.
        takes_tensors: whether the indices of a batch may be a tensor.
    """

    def __init__(self, dataset: Any, collate: Collate | None) -> None:
        self.dataset = dataset
        self.collate = collate or default_collate
        self._reader: Any = None
        self._pieces = OpenPieces()
        is_plain = collate is None
        # Only this class itself: a subclass may transform samples.
        self.in_tensors = is_plain and type(dataset) is TensorDataset
        self.by_batch = is_plain and hasattr(dataset, "collated_batch")
        self.by_sample = not (self.in_tensors or self.by_batch)
        # Others may expect a list. It is said of the method, which a subclass may replace.
        says_so = self.by_batch and getattr(dataset.collated_batch, "takes_tensors", False)
        self.takes_tensors = self.in_tensors or says_so

    def __getstate__(self) -> dict[str, Any]:
        by_value = {
            "dataset": PickledByValue(self.dataset),
            "collate": PickledByValue(self.collate),
        }
        return {**self.__dict__, **by_value, "_reader": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, dataset=state["dataset"].value, collate=state["collate"].value)

    def __getitem__(self, request: Request) -> Any:
        try:
            loaded = request.load(self)
            is_sent = request.gives_samples and get_worker_info() is not None
            return self._packed(loaded, request.place) if is_sent else loaded
        except LockstepError as error:
            process = get_worker_info()
            if process is None:
                raise
            # Returned, because torch would put the traceback of the loader process into the
            # message.
            return _Failure(f"{error} (in loader process {process.id})")

    def _packed(self, samples: list[Any], place: Place | None) -> PackedSamples:
        memory = None if place is None else self._pieces.of(place)
        try:
            return PackedSamples.of(samples, place, memory)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            problem = (
                f"samples of {type(self.dataset).__name__} cannot leave a loader process: "
                f"{describe_exception(error)}"
            )
            hint = "Return tensors, arrays and plain values, or use one loader process"
            raise DataError(f"{problem}. {hint}") from error if environment.debugging() else None

    def reader(self) -> Any:
        """Return what reads a data set in blocks, or an iterable one; in this process always the
        same one.
        """
        if self._reader is None:
            self._reader = self.dataset.reader()
        return self._reader

    def sample(self, source: Any, key: int, index: int) -> Any:
        """Return a sample.

        Args:
            source: the data set, or what reads it.
            key: of the epoch's random draws.
            index: of the sample.

        Raises:
            DataError: the data set raises an exception.
        """
        seed_draws(key, index)
        try:
            return source[index]
        except LockstepError:
            raise
        except Exception as error:
            problem = (
                f"sample {index} of {type(self.dataset).__name__}: {describe_exception(error)}"
            )
            raise DataError(problem) from error if environment.debugging() else None

    def in_any_form(self, source: Any, index: int) -> Any:
        """Return a sample, as a batch of one where only batches are made."""
        if hasattr(source, "__getitem__") or not self.by_batch:
            with suppress(NotImplementedError):  # of torch's Dataset
                return source[index]
        return source.collated_batch([index])

    def batch(self, key: int, indices: list[int] | torch.Tensor) -> Any:
        """Return samples as a batch.

        Args:
            key: of the epoch's random draws.
            indices: of the samples; a tensor only if the data set takes them.

        Raises:
            DataError: the data set or the collate function raises an exception.
        """
        if self.in_tensors:
            return [tensor[indices] for tensor in self.dataset.tensors]
        if self.by_batch:
            return self.dataset.collated_batch(indices)
        assert isinstance(indices, list)
        return self.collated([self.sample(self.dataset, key, index) for index in indices], indices)

    def collated(
        self, samples: list[Any], indices: list[int], in_place: Collate | None = None
    ) -> Any:
        """Return samples that have been read as a batch.

        Args:
            samples: the samples.
            indices: their numbers, for messages.
            in_place: does the same as `default_collate`, without copies.

        Raises:
            DataError: the collate function raises an exception.
        """
        collate = self.collate
        if collate is default_collate and in_place is not None:
            collate = in_place
        try:
            return collate(samples)
        except LockstepError:
            raise
        except Exception as error:
            shown = ", ".join(map(str, indices[:5])) + (
                f" and {len(indices) - 5} more" if len(indices) > 5 else ""
            )
            problem = (
                f"a batch of samples {shown} of {type(self.dataset).__name__}: "
                f"{describe_exception(error)}"
            )
            if self.collate is default_collate:
                problem += (
                    ". Samples of different sizes need a collate_fn that pads them, of a Loader "
                    "or a DataLoader"
                )
            elif any(sample is None for sample in samples):
                problem += (
                    ". A collate_fn that leaves samples out is to return None for a part of which "
                    "none are left"
                )
            raise DataError(problem) from error if environment.debugging() else None


@dataclass(slots=True)
class BatchRequest(Request):
    """Asks for a batch.

    Attributes:
        key: of the epoch's random draws.
        indices: of its samples; a tensor only if the data set takes them. With a tuple of lists,
            what is loaded is a list with a batch for each of them, None for an empty one.
    """

    key: int
    indices: list[int] | torch.Tensor | tuple[list[int], ...]

    gives_samples: ClassVar[bool] = False

    @override
    def load(self, samples: Samples) -> Any:
        if isinstance(self.indices, tuple):
            return [samples.batch(self.key, shard) if shard else None for shard in self.indices]
        return samples.batch(self.key, self.indices)


@dataclass(frozen=True, slots=True)
class _Failure:
    """What a loader process returns in place of what it cannot load."""

    message: str


def describe_exception(error: Exception) -> str:
    """Return an exception of a data set in one line, with the line of the program that raised
    it.
    """
    text = " ".join(str(error).split())
    frames = traceback.extract_tb(error.__traceback__)[1:]  # without the frame here
    program_frames = [frame for frame in frames if not _is_of_a_library(frame.filename)] or frames
    place = ""
    if program_frames:
        frame = program_frames[-1]
        place = f", at {Path(frame.filename).name}:{frame.lineno} in {frame.name}"
    kind = type(error).__name__
    return f"{kind}: {text}{place}" if text else f"{kind}{place}"


_STANDARD = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib"))
_OWN = f"{Path(__file__).parents[1]}{os.sep}"


def _is_of_a_library(file: str) -> bool:
    """Return whether a file belongs to an installed package, to Python or to Lockstep, and not to
    the program.
    """
    return f"{os.sep}site-packages{os.sep}" in file or file.startswith(
        (*_STANDARD, _OWN, "<frozen ")
    )


class _RequestSampler:
    """The requests of the current epoch; replaced for each epoch, so that the loader processes can
    be kept.
    """

    def __init__(self) -> None:
        self.requests: Iterable[Request] = ()

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)


class Fetcher:
    """Loads what is asked for, in the order of the requests.

    Random draws of the data set are keyed by sample: they are the same in any process, and do not
    change the caller's generators.

    Args:
        dataset: see `Samples`.
        collate: makes one batch of a list of samples; `torch.utils.data.default_collate` if None.
        processes: number of loader processes; 0 loads in this process. They start with the first
            epoch and run until `close`. Requests go to them in turn.
        prefetch: maximum number of batches that loader processes load ahead; at least one for each.
        pin: put batches in page-locked memory, from which copies to a GPU overlap its computation.
        in_parts: whether a batch takes a request to each loader process, and this process makes it
            of the samples.

    Attributes:
        samples: the data set, as this process sees it.
        parts: number of parts of a batch that may be loaded beside each other.
        batch_memory: where loader processes write the parts of batches.
        takes_tensors: whether requests may have their indices as tensors, which takes less than
            lists.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Collate | None,
        processes: int,
        prefetch: int,
        pin: bool,
        in_parts: bool = False,
    ) -> None:
        self.samples = Samples(dataset, collate)
        self.parts = max(1, processes)
        self.batch_memory = BatchMemory()
        # lists are sent to processes sooner
        self.takes_tensors = not processes and self.samples.takes_tensors
        self._processes = processes
        self._prefetch = prefetch
        self._pin = pin
        self._in_parts = in_parts
        self._sampler = _RequestSampler()
        self._loader: DataLoader[Any] | None = None
        self._running: Generator[Any, None, None] | None = None
        self._queues: weakref.finalize[[Any], Fetcher] | None = None

    def fetch(
        self, requests: Iterable[Request], are_batches: bool = True, unpack: bool = True
    ) -> Iterator[Any]:
        """Return an iterator over what is loaded; with loader processes, it ends an earlier
        iterator.

        Args:
            requests: what to load.
            are_batches: whether that are whole batches, which are pinned.
            unpack: whether samples of loader processes are unpacked.
        """
        if not self._processes:
            return self._fetch_in_process(requests, are_batches and self._pin)
        self._end_running()
        self._running = self._fetch_from_processes(requests, unpack)
        return self._running

    def load(self, request: Request) -> Any:
        """Return what is loaded for one request, where `fetch` loads: in the first loader process,
        if there is any.

        This process does not read then: files that a data set opens when it is first read would be
        shared with all loader processes, and so would the positions in them.
        """
        (loaded,) = self.fetch([request], are_batches=False)
        return loaded

    def collated(self, key: int, samples: list[Any], indices: list[int]) -> Any:
        """Return samples as a batch, with the random draws of the collate function keyed by its
        first sample.

        Args:
            key: of the epoch's random draws.
            samples: at least one.
            indices: their numbers.
        """
        with preserve_generators():
            seed_collate(key, indices[0])
            data = self.samples.collated(samples, indices)
        return self.pinned(data)

    def pinned(self, data: Any) -> Any:
        """Return a batch in page-locked memory, if batches are to be there."""
        return map_tensors(pinned, data) if self._pin else data

    def _fetch_in_process(self, requests: Iterable[Request], pin: bool) -> Iterator[Any]:
        # Whole batches are not seeded. Restoring the generators costs 80 µs, most of it for
        # NumPy's.
        samples = self.samples
        is_seeded = samples.by_sample or self._in_parts
        for request in requests:
            if is_seeded:
                with preserve_generators():
                    data = samples[request]
            else:
                data = samples[request]
            yield map_tensors(pinned, data) if pin else data

    def _fetch_from_processes(
        self, requests: Iterable[Request], unpack: bool
    ) -> Generator[Any, None, None]:
        self._sampler.requests = requests
        if self._loader is None:
            self._loader = self._start()
            _with_processes.add(self)
        arriving = iter(self._loader)
        if self._queues is None:
            queues = getattr(arriving, "_index_queues", ())
            self._queues = weakref.finalize(self, _let_go, queues)
            self._queues.atexit = False  # type: ignore[misc]  # a property
        while True:
            try:
                loaded = next(arriving)
            except StopIteration:
                return
            # of torch, or of a pipe, when a process has ended
            except (RuntimeError, OSError, EOFError) as error:
                message = _describe_dead_process(self._loader)
                if message is None:
                    raise
                raise DataError(message) from error if environment.debugging() else None
            if isinstance(loaded, _Failure):
                raise DataError(loaded.message)
            yield loaded.samples() if unpack and isinstance(loaded, PackedSamples) else loaded

    def _start(self) -> DataLoader[Any]:
        return DataLoader(
            self.samples,
            batch_size=None,
            # What a collate function returns stays as it is: by default, arrays would become
            # tensors.
            collate_fn=_unchanged if self._in_parts else None,
            sampler=self._sampler,
            num_workers=self._processes,
            # A batch in parts is one request for each process. DataLoader gives requests to its
            # processes in turn.
            prefetch_factor=self._prefetch if self._in_parts else self._prefetch // self._processes,
            persistent_workers=True,
            pin_memory=self._pin and not (self._in_parts and self.parts > 1),
            worker_init_fn=partial(
                _prepare_process, new_group=multiprocessing.parent_process() is None
            ),
            # A separate generator: otherwise each epoch draws a seed from the global one.
            generator=torch.Generator(),
        )

    def _end_running(self) -> None:
        if self._running is not None:
            self._running.close()
            self._running = None

    def close(self) -> None:
        """End the loader processes; a later `fetch` starts new ones."""
        self._end_running()
        self.batch_memory.forget()
        loader = self._loader
        self._loader = None
        iterator = getattr(loader, "_iterator", None)
        if iterator is not None:
            # Dropping the reference would do the same, unless a traceback still holds one of its
            # frames.
            iterator._shutdown_workers()
        if self._queues is not None:
            self._queues.detach()
            self._queues = None


def _let_go(queues: Any) -> None:
    """Let go of the queues of a fetcher's loader processes, which is called when it is collected.

    Where they are garbage together, as parts of one cycle, Python would end the queues before
    torch's iterator can tell the processes through them to end, and it would wait for them for 5 s
    each. Held until here, they are ended after it.
    """
    del queues


# Those whose loader processes may run. Where an exception ends the program within an epoch, nobody
# closes them; the processes pass over the first SIGTERM, with which multiprocessing ends them, and
# it would wait for them for ever.
_with_processes: weakref.WeakSet[Fetcher] = weakref.WeakSet()


@atexit.register  # after that of multiprocessing, so it is called before
def _close_all() -> None:
    for fetcher in list(_with_processes):
        fetcher.close()


def _describe_dead_process(loader: DataLoader[Any]) -> str | None:
    """Return which loader process has died, and how; None if all are alive."""
    for number, process in enumerate(getattr(getattr(loader, "_iterator", None), "_workers", ())):
        # from torch's handler of SIGCHLD, which raises wherever this process is
        with suppress(RuntimeError):
            process.join(_REAP_S)
        code = process.exitcode
        if code is None:
            continue
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        which = f"loader process {number} of {loader.num_workers} (PID {process.pid})"
        memory = (
            " If that was for want of memory, use fewer loader processes or a smaller prefetch."
        )
        return f"{which} {how} while it loaded samples.{memory if code == -signal.SIGKILL else ''}"
    return None


def superseded_error(epoch: int) -> ConfigError:
    """Return the error of an iterator whose loader processes serve another epoch, or have ended."""
    return ConfigError(
        "loader",
        "one epoch at a time with loader processes",
        found=f"another one, or close(), before the last batch of epoch {epoch}",
        hint="Create a separate Loader for each, e.g. for evaluation.",
    )


def _unchanged(data: Any) -> Any:
    return data


def _prepare_process(_: int, new_group: bool) -> None:
    """Let a loader process ignore signals that are meant for its parent, end with it, and say where
    it crashes.
    """
    print_stack_of_crashes()
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid != os.getppid():
        # Its parent in the system is a fork server (the default since Python 3.14), which lives as
        # long as it does; torch looks only for that.
        threading.Thread(
            target=_end_with, args=(parent,), name="lockstep loader parent", daemon=True
        ).start()
    # Ctrl-C reaches every process of the terminal, and SIGTERM of Slurm every process of a step.
    # The parent completes its step first, and needs this process's batches for it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _pass_over_once)
    # not under a launcher: it signals only the worker, and at the end kills the worker's process
    # group
    if new_group:
        os.setpgid(0, 0)
        # In a background process group, writing to the terminal must not stop the process ("stty
        # tostop").
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)


def _end_with(parent: Any) -> None:
    parent.join()
    # In this thread `sys.exit` would end the thread alone; the main thread waits for requests that
    # nobody sends any more.
    os._exit(1)


def _pass_over_once(number: int, _frame: FrameType | None) -> None:
    # The next one ends this process: that of multiprocessing, when the parent exits and this
    # process hangs.
    signal.signal(number, signal.SIG_DFL)
