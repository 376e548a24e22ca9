"""Predicts the duration of a step, its spread and its cost at any number of workers, from a profile
of a few.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from ..errors import ConfigError
from ..parallel.shards import sizes
from .collective_costs import Cost, Fabric
from .step_profile import ComputeCurve, ComputeTimes, Profile, merge
from .step_simulation import (
    FIRST_BUCKET,
    Gradient,
    Message,
    StepPlan,
    ddp_buckets,
    equal_buckets,
    simulate,
)

DDP_LIMIT = 25 << 20
"""Bytes of a bucket of DistributedDataParallel, unless the script sets others."""

ORDERED_LIMIT = 4 << 20
"""Bytes of a bucket of `OrderedReducer`."""

ASSUMED_SLOWDOWN = 0.1
"""By how much longer computing takes while collectives run, where nothing was measured."""

STANDS_STILL = 1e6
"""The same on a host all of whose cores compute: what moves data takes its time from computing."""

# of computing, between which step times are linear
_SCALES = (
    0.5,
    0.8,
    0.9,
    1.0,
    1.1,
    1.25,
    1.5,
    2.0,
    4.0,
)
_DRAWS = 400
_TOTALS = 64.0  # bytes of loss, sample count and stop flag, which each step of a trainer sums


@dataclass(frozen=True)
class Uncertainty:
    """How far a prediction may be from the truth for reasons that no profile shows, as relative
    standard deviations.

    With the defaults, 85 to 95 % of the steps that `benchmarks/plan.py` has measured on a shared
    host lie in their 90 % intervals.

    Attributes:
        compute: of the time of computing: turbo clocks, caches, and what differs between two runs
            of a script.
        network: of the time of communication: the residuals of the measured network.
    """

    compute: float = 0.07
    network: float = 0.03


@dataclass(frozen=True)
class Job:
    """A script as it would run on any number of workers.

    Attributes:
        profiles: of one worker, and of two where there are any, by the number of workers; each of
            all of its ranks.
        fabric: what connects the workers.
        batch_is_global: whether the number of workers divides the batch; if not, each worker has
            the profiled one.
        bucket_limit: bytes; None as in the script.
        slowdown: by how much longer computing takes while collectives run, where only one worker
            was profiled.
        copy_bandwidth: bytes per second at which gradients are copied into buckets, where only one
            worker was profiled; None to leave that out.
        uncertainty: see there.
        price_per_hour: of one worker; None if it is not known.
        seed: of the draws.
    """

    profiles: Mapping[int, Sequence[Profile]]
    fabric: Fabric
    batch_is_global: bool = True
    bucket_limit: int | None = None
    slowdown: float = ASSUMED_SLOWDOWN
    copy_bandwidth: float | None = None
    uncertainty: Uncertainty = Uncertainty()
    price_per_hour: float | None = None
    seed: int = 0

    @property
    def first(self) -> Profile:
        """The profile of rank 0 on the fewest workers."""
        return self.profiles[min(self.profiles)][0]

    @cached_property
    def global_batch(self) -> int:
        """Samples of a step over all workers; on one worker, where the batch is that of each
        worker.
        """
        first = self.first
        return first.global_batch or first.batch * (first.workers if self.batch_is_global else 1)

    @cached_property
    def curves(self) -> dict[int, ComputeCurve]:
        """The times of computing, by the number of workers that were profiled."""
        # the first ranks have the remainder of the shards: with virtual workers, rank 0 is never
        # the one that waits
        chosen = {
            count: ranks[:1] if ranks[0].virtual_workers else ranks
            for count, ranks in self.profiles.items()
        }
        return {count: ComputeCurve(merge(ranks)) for count, ranks in chosen.items()}

    def loads(self, workers: int) -> dict[int, int]:
        """Return how many of the workers have how many samples, or passes with virtual workers; the
        most come first.
        """
        virtual = self.first.virtual_workers
        if not virtual and not self.batch_is_global:
            return {self.first.batch: workers}
        return dict(Counter(sizes(virtual or self.global_batch, workers)))

    def check(self, workers: int) -> None:
        """Check that a step can be divided among `workers`.

        Raises:
            ConfigError: if it cannot.
        """
        virtual = self.first.virtual_workers
        if virtual and workers > virtual:
            hint = "Use fewer workers, or more virtual workers in the script."
            raise ConfigError(
                "workers", f"at most {virtual}, the virtual workers of the script", workers, hint
            )
        if self.batch_is_global and workers > self.global_batch:
            expected = f"at most {self.global_batch}, the samples of a global batch"
            raise ConfigError(
                "workers", expected, workers, "Use fewer workers, or a larger global batch."
            )


@dataclass(frozen=True)
class Forecast:
    """What is predicted for a number of workers; times in seconds.

    Attributes:
        workers: their number.
        step_s: the median duration of a step.
        low_s, high_s: the interval in which the median of a run lies with a probability of 90 %.
        slow_step_s: 95 of 100 steps take no longer.
        samples_per_s: over all workers.
        speedup: samples per second, relative to one worker.
        efficiency: the speed-up for each worker.
        limit: what a step spends most time on beside computing, if that is more than a tenth of the
            step and of computing: "bandwidth", "latency", "loader" or "stragglers"; else "compute".
        shares: the seconds that each of these adds to a step, and those of computing.
        exposed_s: how long a worker waits for collectives.
        memory: bytes of a worker at the peak of a step; None if it was not measured.
        cost_per_hour: of all workers; None without a price.
        cost_per_million: of a million samples; None without a price.
    """

    workers: int
    step_s: float
    low_s: float
    high_s: float
    slow_step_s: float
    samples_per_s: float
    speedup: float
    efficiency: float
    limit: str
    shares: Mapping[str, float]
    exposed_s: float
    memory: int | None = None
    cost_per_hour: float | None = None
    cost_per_million: float | None = None


def measured_slowdown(job: Job) -> float | None:
    """Return by how much longer computing took on two workers than on one with as many samples;
    None if unknown.
    """
    if not {1, 2} <= job.profiles.keys() or job.first.virtual_workers:
        return None
    samples = job.profiles[2][0].batch
    return job.curves[2].times(samples).seconds / job.curves[1].times(samples).seconds - 1


def computing(job: Job, workers: int, load: int | None = None) -> ComputeTimes:
    """Return the times of computing of a worker among `workers`.

    Args:
        job: of the workers.
        workers: their number.
        load: the samples or passes of the worker, a key of `job.loads`; None for the most.
    """
    known = max(count for count in job.profiles if count <= max(workers, min(job.profiles)))
    profile = job.profiles[known][0]
    curve = job.curves[known]
    load = max(job.loads(workers)) if load is None else load
    if profile.virtual_workers:
        return curve.times_of_passes(load, profile.batch, sizes(profile.virtual_workers, known)[0])
    return curve.times(load)


def _slowest(job: Job, workers: int, ratios: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return draws of how long the slowest worker computes, relative to the median of one with the
    most samples.

    Each worker's computing is drawn from the measured steps. The largest of n draws is one draw at
    the quantile u^(1/n), for u uniform. Workers with fewer samples are seldom the slowest.
    """
    most_s = computing(job, workers).seconds
    draws = [
        np.quantile(ratios, rng.random(_DRAWS) ** (1 / count))
        * computing(job, workers, load).seconds
        / most_s
        for load, count in job.loads(workers).items()
    ]
    slowest: np.ndarray = np.max(draws, axis=0)
    return slowest


def buckets_of(job: Job, gradients: Sequence[Gradient]) -> list[Gradient]:
    """Return the buckets of gradients, as the script makes them or with the limit of `job`."""
    profile = job.first
    if profile.virtual_workers:
        return equal_buckets(gradients, job.bucket_limit or ORDERED_LIMIT)
    return ddp_buckets(gradients, job.bucket_limit or profile.bucket_limit or DDP_LIMIT)


@dataclass(frozen=True)
class _Network:
    """A fabric whose latency, and time for bytes, are multiplied."""

    fabric: Fabric
    latency: float = 1.0
    bandwidth: float = 1.0

    def cost(self, collective: str, size: float, workers: int) -> Cost:
        return self.fabric.cost(collective, size, workers).scaled(self.latency, self.bandwidth)


def plan_step(
    job: Job, times: ComputeTimes, workers: int, network: _Network, scale: float
) -> StepPlan:
    """Return a step among `workers`, with all computing multiplied by `scale`."""
    start = (times.loader_s + times.other_s + times.before_s) * scale
    # a profile of several workers contains both
    has_one_worker = max(job.profiles) == 1
    slowdown = job.slowdown if workers > 1 and has_one_worker else 0.0
    copies = job.copy_bandwidth if job.copy_bandwidth and has_one_worker else math.inf
    compute = start + times.backward_s * scale
    update = times.update_s * scale
    if workers == 1:
        return StepPlan(compute, update)
    messages = []
    copied = 0.0
    if not job.first.ddp and not _is_one_message(job, times.gradients):
        messages.append(Message(start, network.cost("all_reduce", _TOTALS, workers)))
    rows = _subtrees(job.first.virtual_workers, workers)
    # one all-reduce does where it adds in the order of the tree: between two workers, and in shared
    # memory
    exchange = rows > 1 or (rows == 1 and workers > 2 and not job.fabric.is_one_host)
    for bucket in buckets_of(job, times.gradients):
        copied += bucket.size / copies
        ready = start + bucket.ready_s * scale + copied
        if exchange:  # slices of each worker's sums of its shards, and then the sums of the slices
            sent = network.cost("all_to_all", bucket.size * rows, workers)
            messages.append(Message(ready, sent, network.cost("all_gather", bucket.size, workers)))
        else:
            messages.append(Message(ready, network.cost("all_reduce", bucket.size, workers)))
    return StepPlan(compute + copied, update, messages, slowdown, job.fabric.in_flight)


def _is_one_message(job: Job, gradients: Sequence[Gradient]) -> bool:
    """Return whether the gradients are so few that a step of Lockstep sends its totals with
    them.
    """
    return (
        not job.first.virtual_workers
        and sum(gradient.size for gradient in gradients) <= FIRST_BUCKET
    )


def _subtrees(virtual_workers: int, workers: int) -> int:
    """Return about how many partial sums a worker sends: one, where its shards are a subtree; 0
    without shards.
    """
    if not virtual_workers:
        return 0
    shards = virtual_workers // workers
    whole = virtual_workers % workers == 0 and shards & (shards - 1) == 0
    return 1 if whole else max(1, math.ceil(math.log2(shards + 1)))


def predict(job: Job, counts: Sequence[int]) -> list[Forecast]:
    """Return what is predicted for each number of workers in `counts`; a step ends with its slowest
    worker.

    Raises:
        ConfigError: for more workers than samples of a global batch, or than virtual workers.
    """
    for count in counts:
        job.check(count)
    base = _forecast(job, 1, None)
    alone = base.samples_per_s
    return [base if count == 1 else _forecast(job, count, alone) for count in counts]


def _forecast(job: Job, workers: int, alone: float | None) -> Forecast:
    times = computing(job, workers)
    rng = np.random.default_rng([job.seed, workers])
    known = max(count for count in job.curves if count <= max(workers, min(job.curves)))
    curve = job.curves[known]
    ratios = np.sort(np.asarray(curve.ratios or [1.0]))
    step = _StepTimes(job, times, workers, _Network(job.fabric))
    slowest = _slowest(job, workers, ratios, rng)
    durations = step.at(slowest)
    median = float(np.median(durations))
    low, high = _interval(job, times, workers, ratios, curve.steps_per_size, rng)
    middle = float(np.median(slowest))
    shares = _shares(job, times, workers, middle)
    samples = job.global_batch if job.batch_is_global else job.first.batch * workers
    speed = samples / median
    speedup = 1.0 if alone is None else speed / alone
    price = None if job.price_per_hour is None else job.price_per_hour * workers
    return Forecast(
        workers,
        median,
        min(low, median),
        max(high, median),
        float(np.quantile(durations, 0.95)),
        speed,
        speedup,
        speedup / workers,
        _limit(shares, median),
        shares,
        step.exposed(middle),
        memory_per_worker(job, workers),
        price,
        None if price is None else price / 3600 / speed * 1e6,
    )


class _StepTimes:
    """The duration of a step by the factor of its computing, linear between the factors that were
    simulated.
    """

    def __init__(self, job: Job, times: ComputeTimes, workers: int, network: _Network) -> None:
        self._plan = partial(plan_step, job, times, workers, network)
        self._durations = [simulate(self._plan(scale)).step_s for scale in _SCALES]

    def at(self, scale: np.ndarray) -> np.ndarray:
        """Return the durations at the factors `scale`, an array of the same shape."""
        inside = np.interp(scale, _SCALES, self._durations)
        return np.where(scale > _SCALES[-1], self._durations[-1] * scale / _SCALES[-1], inside)

    def exposed(self, scale: float) -> float:
        return simulate(self._plan(scale)).exposed_s


def _interval(
    job: Job,
    times: ComputeTimes,
    workers: int,
    ratios: np.ndarray,
    steps: int,
    rng: np.random.Generator,
) -> tuple[float, float]:
    """Return the 90 % interval of the median: few measured steps, and what no profile shows."""
    resampled = np.median(rng.choice(ratios, (_DRAWS, max(1, steps))), axis=1)
    middle = np.median(_slowest(job, workers, ratios, rng))
    factors = middle * resampled * np.exp(rng.normal(0.0, job.uncertainty.compute, _DRAWS))
    spread = job.uncertainty.network
    medians = [
        _StepTimes(job, times, workers, _Network(job.fabric, factor, factor)).at(factors)
        for factor in (math.exp(-spread), 1.0, math.exp(spread))
    ]
    # linear in the logarithm of the network's factor, which is drawn as well
    draws = np.clip(rng.normal(0.0, 1.0, _DRAWS), -3, 3)
    slow = medians[2]
    middle_s = medians[1]
    fast = medians[0]
    values = middle_s + np.where(draws > 0, draws * (slow - middle_s), draws * (middle_s - fast))
    low, high = np.quantile(values, (0.05, 0.95))
    return float(low), float(high)


def _shares(job: Job, times: ComputeTimes, workers: int, slowest: float) -> dict[str, float]:
    """Return how many seconds a step would be shorter without each of what limits it; the rest is
    computing.
    """
    no_loader = ComputeTimes(
        0.0, times.before_s, times.backward_s, times.update_s, times.other_s, times.gradients
    )
    full = _Network(job.fabric)
    variants = {
        "bandwidth": (times, _Network(job.fabric, bandwidth=0.0), slowest),
        "latency": (times, _Network(job.fabric, latency=0.0), slowest),
        "loader": (no_loader, full, slowest),
        "stragglers": (times, full, 1.0),
    }
    whole = simulate(plan_step(job, times, workers, full, slowest)).step_s
    shares = {}
    for name, (compute, network, scale) in variants.items():
        without = simulate(plan_step(job, compute, workers, network, scale)).step_s
        shares[name] = max(0.0, whole - without)
    shares["compute"] = max(0.0, whole - sum(shares.values()))
    return shares


def _limit(shares: Mapping[str, float], step: float) -> str:
    others = {name: seconds for name, seconds in shares.items() if name != "compute"}
    name = max(others, key=lambda other: others[other])
    return (
        name if others[name] > 0.1 * step and others[name] > 0.1 * shares["compute"] else "compute"
    )


def memory_per_worker(job: Job, workers: int) -> int | None:
    """Return the bytes of a worker at the peak of a step: a constant part, and one that grows with
    its samples.
    """
    profile = job.first
    points = sorted(profile.memory)
    if not points:
        return None
    buckets = (
        sum(profile.gradients) if workers > 1 and (profile.ddp or profile.virtual_workers) else 0
    )
    if profile.virtual_workers or len(points) == 1 or points[0][0] == points[-1][0]:
        return points[-1][1] + buckets
    (few, low) = points[0]
    (many, high) = points[-1]
    slope = max(0.0, (high - low) / (many - few))
    return round(high + slope * (max(job.loads(workers)) - many)) + buckets


def critical_batch_size(job: Job) -> float | None:
    """Return the gradient noise scale in samples, from the norms of gradients over batches of two
    sizes.

    Returns None where there are not two sizes, or they are too few to tell the gradient from its
    noise.

    Source: McCandlish, Kaplan, Amodei et al., "An empirical model of large-batch training", 2018,
    appendix A.1.
    """
    by_size: dict[int, list[float]] = {}
    for size, square in job.first.noise:
        by_size.setdefault(size, []).append(square)
    if len(by_size) < 2:
        return None
    small = min(by_size)
    large = max(by_size)
    of_small = statistics.mean(by_size[small])
    of_large = statistics.mean(by_size[large])
    noise = (of_small - of_large) / (1 / small - 1 / large)
    gradient = (large * of_large - small * of_small) / (large - small)
    return noise / gradient if noise > 0 and gradient > 0 else None


def best_bucket(job: Job, workers: int, limits: Sequence[int]) -> tuple[int, float]:
    """Return the limit of buckets with the shortest step, and by what share it is shorter than the
    script's.
    """
    times = computing(job, workers)

    def duration(limit: int | None) -> float:
        changed = replace(job, bucket_limit=limit)
        return simulate(plan_step(changed, times, workers, _Network(job.fabric), 1.0)).step_s

    best = min(limits, key=duration)
    return best, 1 - duration(best) / duration(None)


def balance(virtual_workers: int, workers: int) -> float:
    """Return the share of its time that the average worker computes while the one with most shards
    does.
    """
    return virtual_workers / workers / sizes(virtual_workers, workers)[0]
