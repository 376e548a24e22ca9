"""What was recorded of a few steps of a user's script, and how long computing takes by the samples
of a worker.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec

from .step_simulation import Gradient

Seconds = Annotated[float, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=0)]


class Pass(msgspec.Struct, frozen=True):
    """A forward and a backward pass; the latter until its last gradient is complete."""

    forward_s: Seconds
    backward_s: Seconds


class StepRecord(msgspec.Struct, frozen=True):
    """One step of one worker.

    Attributes:
        samples: of this worker.
        loader_s: waiting for the batch.
        passes: in their order; several with virtual workers or gradient accumulation.
        wait_s: waiting for the sums of the gradients after the last of them was complete.
        update_s: from then until the optimizer's step has ended.
        other_s: from there until the next batch is asked for: callbacks, logs.
        ready_s: when the gradient of each parameter was complete in the last backward pass, from
            its beginning; -1 for one without; empty where this was not recorded.
    """

    samples: Count
    loader_s: Seconds
    passes: tuple[Pass, ...]
    wait_s: Seconds
    update_s: Seconds
    other_s: Seconds
    ready_s: tuple[float, ...] = ()

    @property
    def compute_s(self) -> float:
        """The duration without waiting for other workers."""
        passes = sum(one_pass.forward_s + one_pass.backward_s for one_pass in self.passes)
        return self.loader_s + passes + self.update_s + self.other_s

    @property
    def seconds(self) -> float:
        """The duration of the step."""
        return self.compute_s + self.wait_s


class Profile(msgspec.Struct, frozen=True):
    """What one rank has recorded.

    Attributes:
        lockstep_profile: the version of this format.
        rank: its number.
        workers: number of ranks.
        batch: samples of this worker in a step of the script.
        global_batch: samples of a step over all workers, where the script says so; else 0.
        virtual_workers: their number; 0 without.
        ddp: whether the script wraps its model in DistributedDataParallel itself.
        bucket_limit: bytes of its buckets; 0 if the script has none.
        gradients: bytes of the gradient of each parameter.
        steps: the measured steps.
        memory: (samples, bytes in use at the peak of a step).
        noise: (samples, squared norm of a gradient over them).
        device: "cpu" or that of the model.
        backend: of the default process group: "shm", "gloo", …; "" without one.
    """

    lockstep_profile: Annotated[int, msgspec.Meta(ge=1, le=1)]
    rank: Count
    workers: Annotated[int, msgspec.Meta(ge=1)]
    batch: Count
    global_batch: Count
    virtual_workers: Count
    ddp: bool
    bucket_limit: Count
    gradients: tuple[Count, ...]
    steps: tuple[StepRecord, ...]
    memory: tuple[tuple[Count, Count], ...] = ()
    noise: tuple[tuple[Count, Seconds], ...] = ()
    device: str = "cpu"
    backend: str = ""

    @property
    def median_s(self) -> float:
        """The median duration of the steps with the whole batch."""
        whole = [step.seconds for step in self.steps if step.samples == self.batch]
        return statistics.median(whole or [step.seconds for step in self.steps])


def merge(profiles: Sequence[Profile]) -> Profile:
    """Return the profiles of all ranks of a job as one, with the steps of all."""
    first = profiles[0]
    steps = tuple(step for profile in profiles for step in profile.steps)
    largest = max(profile.batch for profile in profiles)
    return msgspec.structs.replace(first, steps=steps, batch=largest)


class ComputeTimes(msgspec.Struct, frozen=True):
    """How long the parts of a step take on one worker, in seconds, without waiting for others.

    Attributes:
        loader_s, update_s, other_s: as of `StepRecord`.
        before_s: all passes before the last backward pass.
        backward_s: the last backward pass.
        gradients: of the parameters, in the last backward pass.
    """

    loader_s: float
    before_s: float
    backward_s: float
    update_s: float
    other_s: float
    gradients: tuple[Gradient, ...]

    @property
    def seconds(self) -> float:
        """All of them."""
        return self.loader_s + self.before_s + self.backward_s + self.update_s + self.other_s


_FEWEST = 0.1  # the share of the steps that a size needs to count


class ComputeCurve:
    """The times of computing by the samples of a worker, linear between the sizes that were
    measured.

    Below the smallest size, and above the largest, the line through the nearest two goes on; a time
    never falls below the share of its size.

    Args:
        profile: of one rank or of several, see `merge`.

    Attributes:
        ratios: the durations of passes and updates, each divided by the median of its size: how
            much steps scatter.
    """

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._by_size: dict[int, list[StepRecord]] = defaultdict(list)
        for step in profile.steps:
            self._by_size[step.samples].append(step)
        for size in [
            size
            for size, steps in self._by_size.items()
            if len(steps) < _FEWEST * len(profile.steps)
        ]:
            if len(self._by_size) > 1:  # the last batch of an epoch
                del self._by_size[size]
        self._sizes = sorted(self._by_size)
        self._parts = {size: _median_parts(steps) for size, steps in self._by_size.items()}
        self._ready = {
            size: ready for size, steps in self._by_size.items() if (ready := _median_ready(steps))
        }
        self.ratios = [ratio for steps in self._by_size.values() for ratio in _ratios(steps)]

    @property
    def steps_per_size(self) -> int:
        """The fewest steps of a size."""
        return min(len(steps) for steps in self._by_size.values())

    def times(self, samples: int) -> ComputeTimes:
        """Return the times of a step with one pass over `samples` samples, or several as in the
        script.
        """
        loader, before, backward, update, other = self._at(samples)
        return ComputeTimes(
            loader, before, backward, update, other, self._gradients(samples, backward)
        )

    def times_of_passes(self, passes: int, samples: int, of: int) -> ComputeTimes:
        """Return the times of a step with `passes` passes, where one with `of` passes was measured.

        The loader's time grows with the number of passes; all passes have equally many samples.
        """
        loader, before, backward, update, other = self._at(samples)
        one = (before + backward) / of
        before = one * passes - backward
        gradients = self._gradients(samples, backward)
        return ComputeTimes(
            loader * passes / of, max(0.0, before), backward, update, other, gradients
        )

    def _at(self, samples: int) -> list[float]:
        sizes = self._sizes
        if len(sizes) == 1:
            share = samples / sizes[0]
            parts = self._parts[sizes[0]]
            return [value * share for value in parts[:3]] + parts[3:]
        right = next((i for i, size in enumerate(sizes) if size >= samples), len(sizes) - 1)
        right = max(1, right)
        low = sizes[right - 1]
        high = sizes[right]
        share = (samples - low) / (high - low)
        pairs = zip(self._parts[low], self._parts[high], strict=True)
        at_least = [value * min(1.0, samples / sizes[0]) for value in self._parts[sizes[0]]]
        line = [left + share * (right_value - left) for left, right_value in pairs]
        return [max(value, least) for value, least in zip(line, at_least, strict=True)]

    def _gradients(self, samples: int, backward: float) -> tuple[Gradient, ...]:
        """Return when gradients are complete: as at the nearest size, in proportion to the backward
        pass.
        """
        if not self._ready:
            return tuple(Gradient(size, backward) for size in self._profile.gradients)
        nearest = min(self._ready, key=lambda size: abs(size - samples))
        shares = self._ready[nearest]
        pairs = zip(self._profile.gradients, shares, strict=True)
        return tuple(Gradient(size, share * backward) for size, share in pairs if share >= 0)


def _median_parts(steps: Iterable[StepRecord]) -> list[float]:
    rows = []
    for step in steps:
        passes = sum(one_pass.forward_s + one_pass.backward_s for one_pass in step.passes)
        backward = step.passes[-1].backward_s
        rows.append((step.loader_s, passes - backward, backward, step.update_s, step.other_s))
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def _median_ready(steps: Iterable[StepRecord]) -> list[float]:
    """Return for each gradient the share of the backward pass after which it is complete; -1 for
    one without.
    """
    rows = []
    for step in steps:
        last = max(step.ready_s, default=0.0)
        if last > 0:
            rows.append([ready / last if ready >= 0 else -1.0 for ready in step.ready_s])
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def _ratios(steps: Sequence[StepRecord]) -> list[float]:
    """Return the durations of passes and updates, each divided by their median.

    What happens between epochs, such as a validation, happens to all workers at the same step, and
    is left out.
    """
    durations = [step.compute_s - step.loader_s - step.other_s for step in steps]
    middle = statistics.median(durations)
    return [duration / middle for duration in durations] if middle > 0 else []
