"""Records the steps of a user's script in a worker, by the core's observer and torch's hooks."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .. import devices, observers
from ..data.loader import Batch
from ..errors import ConfigError
from ..messages import encode
from ..parallel.nested import narrow, sample_count
from ..parallel.shards import bounds
from ..system import atomic_files
from ..system.patching import Replaced
from .step_profile import Pass, Profile, StepRecord

WARM_UP = 4
"""Steps before the measured ones: allocators fill, DistributedDataParallel rebuilds its buckets,
caches get warm.
"""

_WARM_UP_OF_DURATIONS = 2
_PROBES = 8  # steps after the measured ones, for the noise of gradients and for memory
# steps of one size; the first is not recorded, as memory that was kept for another size is given
# back
_BLOCK = 4
_MOST_IGNORED = 20  # steps that a script may run on after its end was requested


def profile_file(folder: Path, rank: int) -> Path:
    """Return where a rank's profile is written."""
    return folder / f"rank-{rank}.json"


def progress_file(folder: Path) -> Path:
    """Return where rank 0 writes how many steps it has done."""
    return folder / "progress"


class ProfileRecorded(SystemExit):
    """Ends a script after its last recorded step: its `finally` blocks run, and no handler of
    Exception stops it.
    """


@dataclass(frozen=True)
class ObserverSettings:
    """What is recorded, and where.

    Attributes:
        folder: of the profiles; run directories of trainers lie in it as well, instead of the
            user's.
        steps: how many steps are measured.
        smallest_share: the smallest share of a worker's batch that is measured, 0 to 1.
        durations_only: leave memory and noise out, and half of the steps to warm up.
    """

    folder: str
    steps: int = 30
    smallest_share: float = 1.0
    durations_only: bool = False

    @property
    def warm_up(self) -> int:
        """Steps before the measured ones."""
        return _WARM_UP_OF_DURATIONS if self.durations_only else WARM_UP

    @property
    def probes(self) -> int:
        """Steps after the measured ones."""
        return 0 if self.durations_only else _PROBES

    @property
    def steps_run(self) -> int:
        """Steps between those to warm up and the probes: the measured ones, and those that follow
        other sizes.
        """
        return self.steps if self.smallest_share >= 1 else -(-self.steps // (_BLOCK - 1)) * _BLOCK

    def shares(self) -> list[float]:
        """Return the shares of the batch of which blocks of steps are run in turn: 1, 1/2, 1/4, …
        or wider apart.
        """
        if self.smallest_share >= 1:
            return [1.0]
        halvings = next(n for n in range(1, 64) if 0.5**n <= self.smallest_share * 1.01)
        count = min(halvings, 4)
        return [self.smallest_share ** (number / count) for number in range(count + 1)]


@dataclass
class _Step:
    """The times of a step in progress, from its beginning; None for what has not happened."""

    began: float
    since: float  # when the last batch arrived, or the last pass ended
    asked: float | None = None  # for the first batch
    loaded_s: float = 0.0
    loaded_samples: int = 0
    squares: float = 0.0  # of all gradients in all passes, in a probe
    counts_parts: bool = False  # of an `OrderedReducer`, without a loader
    samples: int = 0
    passes: list[Pass] = field(default_factory=list)
    ended: float = 0.0  # the last backward pass
    complete: float = 0.0  # its last gradient
    ready: dict[int, float] = field(default_factory=dict)
    reduce_wait_s: float = 0.0
    updating: float | None = None


class StepObserver(observers.Observer):
    """Observes the steps of a script; one for a process.

    A step lasts from the end of an optimizer's step to the end of its next one; of several
    optimizers, the first one counts. Batches are cut to the sizes that a worker among more would
    have. So that small batches do not spoil the weights, these are then set back after each step;
    the optimizer takes it as it would otherwise, with its own learning rate.

    Args:
        settings: see there.
    """

    def __init__(self, settings: ObserverSettings) -> None:
        self._settings = settings
        self._folder = Path(settings.folder)
        self._shares = settings.shares()
        self._undo: list[Callable[[], Any]] = []
        self._hooks: list[Any] = []
        self._optimizer: Optimizer | None = None
        self._parameters: list[nn.Parameter] = []
        self._last_parameter = -1
        self._step = _Step(time.perf_counter(), time.perf_counter())
        self._done = 0
        self._depth = 0
        self._ignored = 0
        self._in_backward = False
        self._weights: dict[nn.Parameter, torch.Tensor] = {}  # as they were, on the host
        self._virtual_workers = self._global_batch = self._batch = self._bucket_limit = 0
        self._ddp = self._reducing = False
        self._records: list[StepRecord] = []
        self._noise: list[tuple[int, float]] = []
        self._memory: list[tuple[int, int]] = []
        self._tracker: Any = None
        self._tracked = -1
        self._tracked_samples = 0
        self._passes = 0
        self._device = torch.device("cpu")
        self._cuts = True  # whether batches can be cut
        # of the last step: the script may have destroyed it when the profile is written
        self._group = _Group()

    def install(self) -> None:
        """Observe this process, until `finish`."""
        from torch.utils.data.dataloader import _BaseDataLoaderIter

        # torch has no hooks for these two
        backward = Replaced(torch.autograd, "_engine_run_backward", self._backward)
        loading = Replaced(_BaseDataLoaderIter, "__next__", self._next_of_torch)
        self._undo = [
            observers.install(self),
            register_optimizer_step_pre_hook(self._before_update).remove,
            register_optimizer_step_post_hook(self._after_update).remove,
            register_module_module_registration_hook(self._note_submodule).remove,
            loading.undo,
            backward.undo,
        ]

    def finish(self) -> None:
        """Remove the patches, and write what was recorded."""
        for undo in self._undo:
            undo()
        self._undo = []
        self._remove_hooks()
        if self._tracker is not None:
            self._stop_tracker()
        if self._records:
            self._write()

    def run_directory(self, path: Path) -> Path:
        """Return another one: the user's stays as it is."""
        return self._folder / "runs" / path.name

    def _note_submodule(self, module: nn.Module, _: str, submodule: nn.Module | None) -> None:
        if isinstance(module, DistributedDataParallel):
            of_lockstep = type(submodule).__module__.startswith("lockstep.")
            self._ddp = self._ddp or not of_lockstep
            hook = module.register_forward_pre_hook(self._before_forward_of_ddp, with_kwargs=True)
            self._undo.append(hook.remove)

    @property
    def _share(self) -> float:
        """The share of the batch that the step in progress has."""
        number = self._done - self._settings.warm_up
        if number < 0 or not self._cuts_batches:
            return 1.0
        # probes: whole batches and the smallest ones in turn
        if number >= self._settings.steps_run:
            return self._shares[0 if number % 2 else -1]
        return self._shares[number // _BLOCK % len(self._shares)]

    @property
    def _cuts_batches(self) -> bool:
        return bool(self._cuts) and not self._virtual_workers and len(self._shares) > 1

    def _next_of_torch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def load(iterator: Any) -> Any:
            if self._depth:  # inside a Loader
                return original(iterator)
            with self._loading():
                data = original(iterator)
            return self._cut(data)

        return load

    def batches(self, batches: Iterator[Any], workers: int, rank: int) -> Iterator[Any]:
        """Return the batches, cut to this step's size; the wait for each is timed."""
        try:
            while True:
                try:
                    with self._loading():
                        batch = next(batches)
                except StopIteration:
                    return
                yield self._cut_batch(batch, workers, rank)
        finally:
            batches.close()  # type: ignore[attr-defined]

    def begin_ordered_step(self, virtual_workers: int) -> None:
        """Note the number of virtual workers."""
        self._virtual_workers = virtual_workers

    def note_part(self, samples: int, size: int) -> None:
        """Count the samples of this worker's shards, where no loader has told them."""
        if self._done < self._settings.warm_up:
            self._global_batch = max(self._global_batch, samples)
        if not self._step.loaded_samples or self._step.counts_parts:
            self._step.counts_parts = True
            self._note_samples(size, size)

    def _before_forward_of_ddp(self, wrapper: Any, inputs: Any, named: Any) -> None:
        self._bucket_limit = int(getattr(wrapper, "bucket_bytes_cap", 0))
        if not self._step.loaded_samples and torch.is_grad_enabled():
            with suppress(ConfigError):  # the script slices its batches itself
                samples = sample_count((inputs, named))
                self._note_samples(samples, samples)

    def _loading(self) -> _Loading:
        return _Loading(self)

    def _cut_batch(self, batch: Batch, workers: int, rank: int) -> Batch:
        """Return the samples of a `Loader`'s batch that this step has."""
        if not torch.is_grad_enabled():
            return batch
        if self._done < self._settings.warm_up:
            self._virtual_workers = batch.virtual_workers or self._virtual_workers
            self._global_batch = max(self._global_batch, batch.global_size)
        total = max(workers, round(batch.global_size * self._share))
        if batch.virtual_workers or total >= batch.global_size:
            self._note_samples(batch.size, batch.size)
            return batch
        start, stop = bounds(total, workers, rank)
        size = min(stop - start, batch.size)
        self._note_samples(batch.size, size)
        data = narrow(batch.data, 0, size, batch.size)
        indices = batch.indices[:size]
        return dataclasses.replace(
            batch, data=data, indices=indices, size=size, global_size=total, collated=None
        )

    def _cut(self, data: Any) -> Any:
        """Return the samples of a `DataLoader`'s batch that this step has."""
        if not torch.is_grad_enabled():
            return data
        try:
            samples = sample_count(data)
        except ConfigError:
            self._cuts = False
            return data
        size = max(1, round(samples * self._share))
        self._note_samples(samples, size)
        return data if size >= samples else narrow(data, 0, size, samples)

    def _note_samples(self, loaded: int, samples: int) -> None:
        self._track_memory()
        self._step.loaded_samples += loaded
        self._step.samples += samples
        if self._done < self._settings.warm_up:
            self._batch = max(self._batch, self._step.samples)

    def now(self) -> float:
        """Return the time in seconds, after the work that is queued on the device."""
        devices.synchronize(self._device)
        return time.perf_counter()

    def _backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._in_backward:  # a checkpoint's
                return original(*args, **kwargs)
            self._in_backward = True
            self._step.ready = {}
            began = self.now()
            try:
                return original(*args, **kwargs)
            finally:
                ended = self.now()
                self._in_backward = False
                step = self._step
                step.complete = max(step.ready.values(), default=ended)
                step.ready = {number: at - began for number, at in step.ready.items()}
                step.passes.append(
                    Pass(max(0.0, began - step.since), max(0.0, step.complete - began))
                )
                step.ended = step.since = ended
                if isinstance(self._tracker, _PeakOfPasses):
                    self._tracker.end_pass()

        return run

    @contextmanager
    def reducing(self, workers: int) -> Iterator[None]:
        """Time the wait for gradients."""
        began = self.now()
        yield
        if workers > 1:
            self._step.reduce_wait_s += self.now() - began

    def _watch_gradients(self) -> None:
        """Register hooks for the step that begins: on all parameters, or on the one whose gradient
        comes last.
        """
        self._remove_hooks()
        number = self._done - self._settings.warm_up
        # each hook costs a microsecond or two of the backward pass
        all_of_them = number < 0 or self._is_probing or number % _BLOCK == 1
        numbers = range(len(self._parameters)) if all_of_them else [self._last_parameter]
        for index in numbers:
            if index >= 0 and self._parameters[index].requires_grad:
                hook = partial(self._on_gradient, index)
                self._hooks.append(self._parameters[index].register_hook(hook))  # type: ignore[no-untyped-call]

    def _on_gradient(self, index: int, gradient: torch.Tensor) -> None:
        self._step.ready[index] = self.now()
        if self._is_probing:
            self._step.squares += float(_square(gradient))

    @property
    def _is_probing(self) -> bool:
        return self._done >= self._settings.warm_up + self._settings.steps_run

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _before_update(self, optimizer: Optimizer, *_: Any) -> None:
        if self._optimizer is None:
            self._optimizer = optimizer
            self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
            self._device = next(
                (p.device for p in self._parameters if p.device.type != "cpu"), self._device
            )
        if optimizer is self._optimizer:
            self._step.updating = self.now()
        if self._is_probing and optimizer is self._optimizer:
            self._note_noise()
        if self._cuts_batches:
            self._keep_weights(optimizer)

    def _keep_weights(self, optimizer: Optimizer) -> None:
        """Copy the weights that have not been copied yet; to the host, as they are no part of the
        memory that the script needs on a device.
        """
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter not in self._weights:
                    self._weights[parameter] = _local(parameter).to("cpu", copy=True)

    def _note_noise(self) -> None:
        """Note the squared norms of gradients over batches of two sizes."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if not gradients:
            return
        whole = float(torch.stack([_square(gradient) for gradient in gradients]).sum())
        samples = self._step.samples
        shards = self._virtual_workers
        if shards < 2:
            self._add_noise(samples * _Group.current().size, whole)
        elif _Group.current().size == 1 and len(self._step.passes) == shards <= samples:
            # a pass gives the sum of its samples' gradients, divided by the samples of the global
            # batch
            self._add_noise(samples // shards, shards * self._step.squares)
            self._add_noise(samples, whole)

    def _add_noise(self, samples: int, square: float) -> None:
        if math.isfinite(square):
            self._noise.append((samples, square))

    def _after_update(self, optimizer: Optimizer, *_: Any) -> None:
        if optimizer is not self._optimizer:
            return
        record = self._record(self.now())
        for parameter, before in self._weights.items():
            _local(parameter).copy_(before)
        number = self._done - self._settings.warm_up
        follows_other_size = number > 0 and number % _BLOCK == 0 and self._cuts_batches
        if record is not None and 0 <= number < self._settings.steps_run and not follows_other_size:
            self._records.append(record)
        if self._done == self._settings.warm_up - 1 and self._step.ready:
            self._last_parameter = max(self._step.ready, key=lambda index: self._step.ready[index])
        self._measure_memory_on_device()
        self._tracked_samples = self._step.samples
        self._passes = len(self._step.passes)
        self._done += 1
        if _Group.current().rank == 0 and self._done <= self.total:
            with suppress(OSError):  # nobody may be reading it
                progress_file(self._folder).write_text(f"step {self._done} of {self.total}")
        self._end_if_recorded()
        self._watch_gradients()
        now = self.now()
        self._step = _Step(now, now)

    def _record(self, now: float) -> StepRecord | None:
        """Return the record of the step that has ended; None for one without a backward pass."""
        step = self._step
        if not step.passes or step.updating is None:
            return None
        self._group = _Group.current()
        waits = self._group.size > 1
        wait = max(0.0, step.ended - step.complete) * waits + step.reduce_wait_s
        update = max(0.0, now - step.complete - wait)
        # the loader has fetched the whole batch, of which this step has a part
        share = step.samples / step.loaded_samples if step.loaded_samples else 1.0
        other = 0.0 if step.asked is None else max(0.0, step.asked - step.began)
        complete_set = len(step.ready) > 1 or len(self._parameters) == 1
        ready = (
            [step.ready.get(index, -1.0) for index in range(len(self._parameters))]
            if complete_set
            else []
        )
        return StepRecord(
            step.samples or self._batch,
            step.loaded_s * share,
            tuple(step.passes),
            wait,
            update,
            other,
            tuple(ready),
        )

    def _measure_memory_on_device(self) -> None:
        """Note the most memory that the step which has ended had in use on a GPU."""
        most = devices.peak_memory(self._device)
        if most is not None:
            if self._done >= self._settings.warm_up + self._settings.steps_run:
                self._memory.append((self._step.samples, most))
            devices.reset_peak_memory(self._device)

    def _track_memory(self) -> None:
        """Track the memory of two of the last steps on the CPU with torch's tracker; called with a
        step's batch.

        It registers hooks of optimizers itself, and so cannot begin or end inside of one.
        """
        number = self._done - self._settings.warm_up - self._settings.steps_run
        if self._device.type != "cpu" or number == self._tracked:
            return
        if self._tracker is not None:
            self._stop_tracker()
        self._tracked = number
        if number in (_PROBES - 3, _PROBES - 2) and not self._settings.durations_only:
            if number == _PROBES - 3:
                self._write()  # the tracker sees every operation, and might fail at one
            self._start_tracker()

    def _start_tracker(self) -> None:
        assert self._optimizer is not None
        # torch's tracker refuses a second pass
        kind = _PeakOfStep if self._passes == 1 else _PeakOfPasses
        with suppress(Exception):
            self._tracker = kind(self._optimizer, self._parameters)

    def _stop_tracker(self) -> None:
        tracker = self._tracker
        self._tracker = None
        with suppress(Exception):
            self._memory.append((self._tracked_samples, tracker.end()))

    @property
    def total(self) -> int:
        """How many steps the script runs."""
        return self._settings.warm_up + self._settings.steps_run + self._settings.probes

    def _end_if_recorded(self) -> None:
        if self._done < self.total:
            return
        self._write()
        self._remove_hooks()
        self._ignored += 1
        if self._ignored > _MOST_IGNORED:  # the script catches every exception
            raise RuntimeError("lockstep plan: the profile is complete, but the script goes on")
        raise ProfileRecorded(0)

    def _write(self) -> None:
        profile = Profile(
            1,
            self._group.rank,
            self._group.size,
            self._batch,
            self._global_batch,
            self._virtual_workers,
            self._ddp,
            self._bucket_limit,
            tuple(p.numel() * p.element_size() if p.requires_grad else 0 for p in self._parameters),
            tuple(self._records),
            tuple(self._memory),
            tuple(self._noise),
            self._device.type,
            self._group.backend,
        )
        atomic_files.write_text(profile_file(self._folder, self._group.rank), encode(profile))


@dataclass(frozen=True)
class _Group:
    """The default process group, or a worker alone."""

    rank: int = 0
    size: int = 1
    backend: str = ""

    @classmethod
    def current(cls) -> _Group:
        if not dist.is_available() or not dist.is_initialized():
            return cls()
        return cls(dist.get_rank(), dist.get_world_size(), dist.get_backend())


class _PeakOfStep:
    """Torch's tracker of memory around a step on the CPU with one pass.

    Args:
        optimizer, parameters: whose tensors exist already.
    """

    def __init__(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        from torch.distributed._tools.mem_tracker import MemTracker

        self._tracker = MemTracker()
        self._tracker.track_external(optimizer, *parameters)
        self._tracker.__enter__()

    def end(self) -> int:
        """End it, and return the bytes of the tensors that existed at the peak of the step."""
        self._tracker.__exit__(None, None, None)
        peak = self._tracker.get_tracker_snapshot("peak")
        return sum(int(of_device["Total"]) for of_device in peak.values())


class _PeakOfPasses:
    """The memory of a step of several passes: what exists between steps, and what autograd saves
    for one pass.

    Args:
        optimizer, parameters: whose tensors exist between steps, besides a set of gradients and a
            set of their sums.
    """

    def __init__(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        states = [value for state in optimizer.state.values() for value in state.values()]
        tensors = [
            *parameters,
            *parameters,
            *parameters,
            *(state for state in states if isinstance(state, torch.Tensor)),
        ]
        self._constant = sum(tensor.nbytes for tensor in tensors)
        self._known = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        self._saved: dict[int, int] = {}
        self._most = 0
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self._hooks.__enter__()

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._known:
            self._saved[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()

    def end_pass(self) -> None:
        """Note that a pass has ended, and has freed what it had saved."""
        self._most = max(self._most, sum(self._saved.values()))
        self._saved = {}

    def end(self) -> int:
        """End it, and return the bytes."""
        self._hooks.__exit__()
        self.end_pass()
        return self._constant + self._most


def _local(parameter: torch.Tensor) -> torch.Tensor:
    """Return this worker's part of a parameter, in the same memory."""
    values = parameter.detach()
    return values.to_local() if isinstance(values, DTensor) else values


def _square(gradient: torch.Tensor) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(gradient.detach().float())
    return norm.square()


class _Loading:
    """Times the wait for a batch; only the outermost loader of several counts."""

    def __init__(self, observer: StepObserver) -> None:
        self._observer = observer

    def __enter__(self) -> None:
        self._observer._depth += 1
        self._began = self._observer.now()

    def __exit__(self, *_: object) -> None:
        observer = self._observer
        observer._depth -= 1
        step = observer._step
        now = self._observer.now()
        if torch.is_grad_enabled():
            step.asked = self._began if step.asked is None else step.asked
            step.since = now
            step.loaded_s += now - self._began
