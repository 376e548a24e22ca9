"""What follows from a prediction, in words: how many workers pay, what limits them, and what it
assumes.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from ..errors import counted
from .prediction import (
    DDP_LIMIT,
    ORDERED_LIMIT,
    Forecast,
    Job,
    balance,
    best_bucket,
    critical_batch_size,
    measured_slowdown,
)

_PAYS = 0.25  # what a further worker must add, as a share of the speed of the first one
_NOTICEABLE = 1.05  # a speed-up that is worth a sentence; predictions are not better than that
_BUCKETS = tuple(mib << 20 for mib in (1, 2, 4, 8, 16, 25, 50, 100))
_BUCKET_GAIN = 0.02
_REMEDIES = {
    "bandwidth": "a larger global batch, gradient accumulation or a faster network shortens the "
    "share of "
    "communication",
    "latency": "larger buckets or a larger global batch send fewer messages for the same work",
    "loader": "more loader processes (num_workers=) or faster storage are what helps",
    "stragglers": "look for what makes steps differ: other programs, samples of different "
    "lengths, logging",
    "compute": "a faster device, lower precision or more workers are what helps",
}


def recommended(forecasts: Sequence[Forecast]) -> Forecast:
    """Return the most workers that pay: each more than before adds at least a quarter of the speed
    of the first one.

    Numbers between may pay less, such as those that do not divide the virtual workers evenly.
    """
    chosen = forecasts[0]
    for after in forecasts[1:]:
        if after.speedup - chosen.speedup >= _PAYS * (after.workers - chosen.workers):
            chosen = after
    return chosen


def advise(job: Job, forecasts: Sequence[Forecast]) -> list[str]:
    """Return sentences for a user, the most important one first."""
    best = recommended(forecasts)
    lines = [*_number_of_workers(best, forecasts), *_limits(best, forecasts)]
    if best.workers > 1:
        lines += _bucket_size(job, best.workers)
    elif len(forecasts) > 1:
        lines += _bucket_size(job, forecasts[1].workers)
    return [*lines, *_virtual_workers(job, best.workers), *_batch_size(job)]


def _number_of_workers(best: Forecast, forecasts: Sequence[Forecast]) -> Iterable[str]:
    after = next((forecast for forecast in forecasts if forecast.workers > best.workers), None)
    fastest = max(forecasts, key=lambda forecast: forecast.samples_per_s)
    if best.workers == 1 and after is not None:
        if fastest.workers > 1 and fastest.speedup >= _NOTICEABLE:
            # The fastest may still save time, though its workers do little: no word that they do
            # not pay at all.
            yield (
                f"The fastest are {fastest.workers} workers, {fastest.speedup:.2f} times as fast "
                f"as one; each more than the first adds less than {_PAYS:.0%} of its speed."
            )
            return
        slower = after.speedup < 1
        what = (
            f"{1 / after.speedup:.2f} times as long for the same samples"
            if slower
            else "hardly less time"
        )
        yield f"More workers do not pay: {after.workers} workers take {what}."
        return
    if best.workers > 1 and best.speedup < 1:
        yield (
            f"One worker is faster: {best.workers} workers take {1 / best.speedup:.2f} times as "
            "long for its samples."
        )
        return
    if best.workers > 1:
        yield (
            f"Use {best.workers} workers: {best.speedup:.2f} times as fast as one, "
            f"{best.efficiency:.0%} efficiency."
        )
    if after is not None and best.workers > 1:
        name = _ordinal(after.workers)
        gain = after.samples_per_s / best.samples_per_s - 1
        more = after.workers - best.workers
        who = (
            f"The {name} worker"
            if more == 1
            else f"From {best.workers} to {after.workers} workers, the {more} more"
        )
        one = "s" * (more == 1)
        yield (
            f"{who} gain{one} {gain:.0%}."
            if gain >= 0
            else f"{who} make{one} it {-gain:.0%} slower."
        )
    if fastest.workers not in (best.workers, 1):
        yield (
            f"The fastest of all are {fastest.workers} workers, {fastest.speedup:.2f} times as "
            "fast as one."
        )
    if best.workers > 1 and best.high_s > 1.3 * best.low_s:
        yield (
            f"The interval is wide ({_ms(best.low_s)} to {_ms(best.high_s)} for a step): measure "
            "on idle hosts, and the network with `lockstep bench`."
        )


def _ordinal(number: int) -> str:
    if number % 100 in (11, 12, 13):
        return f"{number}th"
    return f"{number}{({1: 'st', 2: 'nd', 3: 'rd'}).get(number % 10, 'th')}"


def _ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _limits(best: Forecast, forecasts: Sequence[Forecast]) -> Iterable[str]:
    about = best if best.workers > 1 or len(forecasts) == 1 else forecasts[1]
    share = about.shares[about.limit] / about.step_s
    who = f"{about.workers} worker{'s'[: about.workers != 1]}"
    what = {"loader": "the loader"}.get(about.limit, about.limit)
    remedy = _REMEDIES[about.limit]
    if about.limit == "compute" and best is not forecasts[-1]:  # of which more do not pay
        remedy = "a faster device or lower precision is what helps"
    yield f"What limits {who} is {what}, {share:.0%} of a step: {remedy}."


def _bucket_size(job: Job, workers: int) -> Iterable[str]:
    if not job.first.gradients:
        return
    limit, gain = best_bucket(job, workers, _BUCKETS)
    default = job.first.bucket_limit or (ORDERED_LIMIT if job.first.virtual_workers else DDP_LIMIT)
    if gain > _BUCKET_GAIN:
        yield (
            f"Buckets of {limit >> 20} MiB instead of {default >> 20} MiB would make a step of "
            f"{workers} workers {gain:.0%} shorter."
        )
    else:
        yield f"The size of buckets, {default >> 20} MiB, is within {_BUCKET_GAIN:.0%} of the best."


def _virtual_workers(job: Job, workers: int) -> Iterable[str]:
    virtual = job.first.virtual_workers
    if virtual:
        share = balance(virtual, workers)
        if share > 0.99:
            yield f"virtual_workers={virtual} divides evenly among {workers} workers."
            return
        better = max(workers, round(virtual / workers) * workers)
        yield (
            f"With virtual_workers={virtual}, {workers} workers are idle {1 - share:.0%} of the "
            f"time, because some have a shard more; virtual_workers={better} divides evenly, and "
            "gives other bits."
        )
    elif job.batch_is_global and workers > 1 and job.global_batch >= workers:
        curve = job.curves[max(job.curves)]
        whole = curve.times(job.global_batch)
        part = curve.times(-(-job.global_batch // workers))
        cost = workers * (part.before_s + part.backward_s) / (whole.before_s + whole.backward_s) - 1
        yield (
            f"For the same bits at 1 to {workers} workers, virtual_workers={workers} costs one "
            f"worker about {max(0.0, cost):.0%} for its smaller passes, and {workers} workers "
            "little."
        )


def _batch_size(job: Job) -> Iterable[str]:
    critical = critical_batch_size(job)
    if critical is None:
        return
    batch = job.global_batch
    shown = f"{critical:.2g}" if critical < 10 else f"{round(critical, -1):.0f}"
    verdict = "a larger batch wastes samples" if batch >= critical else "a larger batch still pays"
    yield (
        f"The critical batch size is about {shown} samples at the weights of these steps, and the "
        f"batch has {batch}: {verdict}. It grows in a training; lockstep.callbacks.GradientNoise "
        "follows it."
    )


def assumptions(job: Job) -> list[str]:
    """Return what a prediction takes for granted."""
    first = job.first
    fabric = job.fabric
    lines = [
        "Every worker has the same device as this host, and its own cores.",
        "The loader keeps up as here: its time falls with a worker's samples, and storage is not "
        "shared.",
        "Validation, checkpoints and the start are not part of a step.",
    ]
    if job.batch_is_global:
        lines.append(
            f"The global batch of {counted(job.global_batch, 'sample')} is divided among the "
            "workers."
        )
    else:
        lines.append(
            f"Each worker has a batch of {counted(first.batch, 'sample')}, so that the global "
            "batch grows."
        )
    measured = {step.samples for ranks in job.profiles.values() for step in ranks[0].steps}
    if job.batch_is_global and not first.virtual_workers and len(measured) == 1:
        lines.append(
            "Batches could not be cut: computing is assumed to be proportional to the samples."
        )
    if fabric.is_one_host:
        lines.append(
            "All workers share one host's memory"
            + ("." if fabric.inside else ", which was not measured.")
        )
    elif fabric.measured:
        lines.append(
            "The network is the measured one; among more workers its times grow as those of a "
            "ring do."
        )
    else:
        hosts = "a worker" if fabric.per_host == 1 else f"{fabric.per_host} workers"
        inside = (
            ""
            if fabric.per_host == 1 or fabric.inside
            else "; memory inside of a host was not measured"
        )
        lines.append(
            f"Each host has {hosts} and a link of {fabric.link} to a switch that never "
            f"blocks{inside}."
        )
        lines.append(
            f"An all-reduce between hosts is a {fabric.algorithm}; nothing else uses the network."
        )
    if fabric.checks_calls:
        lines.append(
            "Beside each collective hosts compare what they call: the watchdog's pre-flight check."
        )
    if max(job.profiles) == 1:
        lines.append(
            f"Computing is {job.slowdown:.0%} slower while collectives run: only one worker was "
            "measured."
        )
    slower = measured_slowdown(job)
    if slower is not None:
        text = (
            f"Two workers here computed {abs(slower):.0%} {'slower' if slower >= 0 else 'faster'} "
            "than one"
        )
        lines.append(f"{text} with as many samples, while they communicated; so do more.")
    ratios = [ratio for curve in job.curves.values() for ratio in curve.ratios]
    if ratios:
        spread = statistics.pstdev(ratios)
        lines.append(
            f"Steps of different workers scatter independently, by {spread:.0%} as measured."
        )
    return lines
