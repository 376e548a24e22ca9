"""Predictions from profiles whose truth is known: more workers, limits, intervals, memory, noise
scale and advice.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from lockstep.errors import ConfigError
from lockstep.messages import decode, encode
from lockstep.network import Link
from lockstep.planning.advice import advise, assumptions, recommended
from lockstep.planning.collective_costs import ALGORITHMS, Fabric
from lockstep.planning.prediction import (
    Forecast,
    Job,
    Uncertainty,
    best_bucket,
    critical_batch_size,
    predict,
)
from lockstep.planning.step_profile import ComputeCurve, Pass, Profile, StepRecord, merge

FAST, SLOW, FAR = Link(1e15, 0.0), Link(1e6, 0.0), Link(1e15, 0.01)
EXACT = Uncertainty(0.0, 0.0)


def record(samples: int, noise: float = 1.0, passes: int = 1, loader: float = 0.0) -> StepRecord:
    """A step of 1 ms and 10 µs for each sample, a third forward and two thirds backward."""
    each = noise * (1e-3 + 1e-5 * samples / passes) / 3
    ready = (2 * each, each) if noise == 1.0 else ()
    return StepRecord(samples, loader, (Pass(each, 2 * each),) * passes, 0.0, 5e-4, 0.0, ready)


def profile(**changes: Any) -> Profile:
    steps = tuple(record(size) for size in (256, 128, 64, 32) for _ in range(4))
    made = Profile(1, 0, 1, 256, 256, 0, False, 25 << 20, (40_000, 4_000_000), steps)
    return msgspec.structs.replace(made, **changes)


def job(link: Link = FAST, **changes: Any) -> Job:
    options = {"slowdown": 0.0, "uncertainty": EXACT, **changes}
    made = options.pop("profile", profile())
    return Job({1: [made]}, Fabric(link), **options)


def step_s(samples: int) -> float:
    return 1e-3 + 1e-5 * samples + 5e-4


# --- Computing
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [256, 200, 128, 64, 33, 32, 16, 4])
def test_computing_is_linear_between_and_beyond_the_measured_sizes(samples: int) -> None:
    assert ComputeCurve(profile()).times(samples).seconds == pytest.approx(
        step_s(samples), rel=1e-9
    )


def test_a_single_size_is_scaled_except_the_update() -> None:
    curve = ComputeCurve(profile(steps=(record(256),) * 5))
    assert curve.times(64).seconds == pytest.approx((step_s(256) - 5e-4) / 4 + 5e-4)


def test_a_short_last_batch_does_not_count() -> None:
    steps = (*[record(256)] * 20, record(7, noise=100.0))
    assert ComputeCurve(profile(steps=steps)).times(256).seconds == pytest.approx(step_s(256))


def test_gradients_are_ready_in_the_measured_shares_of_the_backward_pass() -> None:
    times = ComputeCurve(profile()).times(256)
    assert [each.ready_s / times.backward_s for each in times.gradients] == pytest.approx(
        [1.0, 0.5]
    )


def test_ranks_are_merged() -> None:
    merged = merge([profile(), profile(rank=1)])
    assert len(merged.steps) == 32 and merged.batch == 256


def test_a_profile_survives_its_file_and_a_damaged_one_is_refused() -> None:
    text = encode(profile())
    assert decode(text, Profile) == profile()
    for damaged in (
        text.replace('"lockstep_profile": 1', '"lockstep_profile": 2'),
        text[:50],
        "{}",
        "[]",
    ):
        with pytest.raises(ValueError):
            decode(damaged, Profile)


# --- More workers
# --------------------------------------------------------------------------------------------------


def test_without_a_network_to_wait_for_only_computing_counts() -> None:
    for each in predict(job(), [1, 2, 4, 8]):
        assert each.step_s == pytest.approx(step_s(256 // each.workers))
        assert each.low_s == each.high_s == pytest.approx(each.step_s)
        assert each.speedup == pytest.approx(step_s(256) / each.step_s)
        assert each.efficiency == pytest.approx(each.speedup / each.workers)
        assert each.limit == "compute"


def test_a_slow_network_adds_what_backward_does_not_hide() -> None:
    (two,) = predict(job(SLOW), [2])
    backward = 2 / 3 * (1e-3 + 1e-5 * 128)
    first, second = (ALGORITHMS["ring"](size, 2, SLOW).seconds for size in (4_000_000, 40_000))
    # the first bucket is ready after half of the backward pass, the second at its end; 64 bytes of
    # totals before them
    totals = ALGORITHMS["ring"](64, 2, SLOW).seconds
    assert totals < backward / 2
    assert two.step_s == pytest.approx(step_s(128) - backward / 2 + first + second)
    assert two.limit == "bandwidth" and two.speedup < 1


def test_latency_limits_where_it_is_long() -> None:
    (eight,) = predict(job(FAR), [8])
    assert eight.limit == "latency"
    # three collectives of 14 messages each, one after the other
    assert eight.step_s == pytest.approx((1e-3 + 1e-5 * 32) / 3 + 5e-4 + 3 * 14 * 0.01, rel=1e-3)


def test_the_totals_of_a_small_model_are_sent_with_its_gradients() -> None:
    small = profile(gradients=(4_000, 40_000))
    for ddp in (False, True):  # a script that wraps its model itself has no totals
        (eight,) = predict(job(FAR, profile=msgspec.structs.replace(small, ddp=ddp)), [8])
        assert eight.step_s == pytest.approx(step_s(32) + 14 * 0.01, rel=1e-3)


def test_the_loader_limits_where_it_is_slow() -> None:
    steps = tuple(record(size, loader=0.01) for size in (256, 128) for _ in range(4))
    assert predict(job(profile=profile(steps=steps)), [2])[0].limit == "loader"


def test_the_slowest_of_many_workers_is_the_largest_of_as_many_draws() -> None:
    steps = tuple(record(256, noise=1.0 + 0.001 * i) for i in range(200))
    forecasts = predict(job(profile=profile(steps=steps), batch_is_global=False), [1, 2, 8, 64])
    scatter = np.asarray([1.0 + 0.001 * i for i in range(200)])
    compute, update = 1e-3 + 2.56e-3, 5e-4
    for each in forecasts:  # the median of the largest of n draws is the quantile 0.5^(1/n)
        expected = compute * np.quantile(scatter, 0.5 ** (1 / each.workers)) + update
        assert each.step_s == pytest.approx(expected, rel=0.01)
        assert each.slow_step_s >= each.step_s


def test_workers_with_fewer_passes_are_seldom_the_slowest() -> None:
    """Of 9 passes, one of eight workers has two; the largest of eight draws is not its own."""
    steps = tuple(record(256, noise=1.0 + 0.002 * i, passes=9) for i in range(200))
    (eight,) = predict(job(profile=profile(steps=steps, virtual_workers=9)), [8])
    one_pass = (1e-3 + 1e-5 * 256 / 9) * 1.2  # at the median of the draws
    assert eight.step_s == pytest.approx(2 * one_pass + 5e-4, rel=0.02)


def test_each_worker_may_have_a_batch_of_its_own() -> None:
    (four,) = predict(job(batch_is_global=False), [4])
    assert four.step_s == pytest.approx(step_s(256)) and four.speedup == pytest.approx(4.0)


def test_virtual_workers_are_passes() -> None:
    steps = (record(256, passes=8),) * 6
    made = job(profile=profile(steps=steps, virtual_workers=8))
    one_pass = 1e-3 + 1e-5 * 32
    for each in predict(made, [1, 2, 3, 4, 8]):
        passes = -(-8 // each.workers)
        assert each.step_s == pytest.approx(passes * one_pass + 5e-4, rel=1e-4)
    with pytest.raises(
        ConfigError, match="workers: expected at most 8, the virtual workers of the script, got 9"
    ):
        predict(made, [9])


def test_more_workers_than_samples_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="workers: expected at most 256, the samples of a global batch, got 257"
    ):
        predict(job(), [1, 257])
    predict(job(batch_is_global=False), [257])


def test_copies_of_gradients_into_buckets_take_time_from_computing() -> None:
    alone = replace(job(), copy_bandwidth=None)
    copying = replace(job(), copy_bandwidth=1e6)
    size = sum(gradient.size for gradient in alone.curves[1].times(max(alone.loads(2))).gradients)
    (without,), (with_copies,) = predict(alone, [2]), predict(copying, [2])
    assert with_copies.step_s > without.step_s
    assert with_copies.step_s <= without.step_s + size / 1e6 + 1e-9
    assert predict(copying, [1])[0].step_s == predict(alone, [1])[0].step_s
    two = replace(copying, profiles={1: [profile()], 2: [profile()]})
    assert predict(two, [2])[0].step_s == pytest.approx(
        predict(replace(two, copy_bandwidth=None), [2])[0].step_s
    )


def test_two_profiled_workers_replace_the_assumed_slowdown() -> None:
    slower = tuple(msgspec.structs.replace(record(128, noise=1.25), samples=128) for _ in range(8))
    two = profile(workers=2, batch=128, steps=slower)
    both = replace(job(), profiles={1: [profile()], 2: [two]}, slowdown=9.0)
    assert any("computed 21% slower than one" in line for line in assumptions(both))
    assert predict(both, [2])[0].step_s == pytest.approx(1.25 * (1e-3 + 1.28e-3) + 5e-4, rel=1e-4)


def test_intervals_are_wider_for_what_is_less_certain() -> None:
    def width(**uncertain: float) -> float:
        (two,) = predict(job(Link(1e8, 0.0), uncertainty=Uncertainty(**uncertain)), [2])
        assert two.low_s <= two.step_s <= two.high_s
        return two.high_s - two.low_s

    assert (
        width(compute=0.0, network=0.0)
        < width(compute=0.02, network=0.0)
        < width(compute=0.02, network=0.1)
    )


def test_a_price_gives_costs() -> None:
    (four,) = predict(job(price_per_hour=3.0), [4])
    assert four.cost_per_hour == 12.0
    assert four.cost_per_million == pytest.approx(12.0 / 3600 * four.step_s / 256 * 1e6)
    assert predict(job(), [4])[0].cost_per_million is None


def test_predictions_are_the_same_twice_also_of_many_workers() -> None:
    made = job(Link(3e9, 5e-5), batch_is_global=False)
    forecasts = predict(made, range(1020, 1025))
    assert forecasts[-1].workers == 1024
    assert predict(made, [1024]) == [forecasts[-1]]


# --- Memory, noise, buckets, advice
# -----------------------------------------------------------------------------------


def test_memory_has_a_constant_part_and_one_that_grows_with_samples() -> None:
    made = job(profile=profile(memory=((32, 1_320_000), (256, 3_560_000))))
    assert [each.memory for each in predict(made, [1, 2, 8])] == [3_560_000, 2_280_000, 1_320_000]
    assert predict(job(), [2])[0].memory is None


def test_the_critical_batch_size_is_that_of_a_known_gradient() -> None:
    # squared norms of a gradient of norm² 2, with noise of trace 600: 2 + 600 / batch
    noise = ((32, 2 + 600 / 32), (256, 2 + 600 / 256))
    assert critical_batch_size(job(profile=profile(noise=noise))) == pytest.approx(300)
    assert critical_batch_size(job(profile=profile(noise=noise[:1]))) is None
    assert critical_batch_size(job(profile=profile(noise=((32, 1.0), (256, 2.0))))) is None


def test_the_best_bucket_hides_communication() -> None:
    gradients = (4 << 20,) * 8
    ready = tuple(2e-3 * (i + 1) / 8 for i in range(8))
    steps = (StepRecord(256, 0.0, (Pass(1e-3, 2e-3),), 0.0, 1e-4, 0.0, ready),) * 5
    made = profile(gradients=gradients, steps=steps, bucket_limit=1 << 30)
    limit, gain = best_bucket(job(Link(1e11, 0.0), profile=made), 2, [4 << 20, 1 << 30])
    assert limit == 4 << 20 and gain > 0
    limit, gain = best_bucket(job(Link(1e11, 1e-2), profile=made), 2, [4 << 20, 1 << 30])
    assert limit == 1 << 30


def test_advice_names_the_worker_that_no_longer_pays() -> None:
    made = job(Link(1e10, 1e-5))
    forecasts = predict(made, range(1, 17))
    best = recommended(forecasts)
    assert 1 < best.workers < 16
    text = " ".join(advise(made, forecasts))
    assert f"Use {best.workers} workers" in text and "worker gains" in text
    assert "virtual_workers=" in text and "What limits" in text and "buckets" in text


def test_advice_says_that_more_workers_do_not_pay() -> None:
    made = job(SLOW)
    text = advise(made, predict(made, [1, 2, 4]))[0]
    assert text.startswith("More workers do not pay: 2 workers take ") and "times as long" in text
    assert "SLOW" not in text and len(advise(made, predict(made, [1]))) >= 1


def test_advice_on_shards_that_do_not_divide() -> None:
    steps = (record(256, passes=8),) * 6
    made = job(profile=profile(steps=steps, virtual_workers=8))
    text = " ".join(advise(made, predict(made, [1, 2, 3])))
    assert (
        "With virtual_workers=8, 3 workers are idle 11% of the time" in text
        and "virtual_workers=9" in text
    )
    assert "virtual_workers=8 divides evenly among 2 workers" in " ".join(
        advise(made, predict(made, [1, 2]))
    )


def test_assumptions_say_where_the_figures_come_from() -> None:
    assert any("Computing is 10% slower" in line for line in assumptions(job(slowdown=0.1)))
    assert any("8Mbit,0us" in line for line in assumptions(job(SLOW)))
    single = job(profile=profile(steps=(record(256),) * 5))
    assert any("could not be cut" in line for line in assumptions(single))
    assert any("global batch grows" in line for line in assumptions(job(batch_is_global=False)))


def speeds(*each: tuple[int, float], limit: str = "latency") -> list[Forecast]:
    """Forecasts for numbers of workers and their speed-ups."""
    return [
        Forecast(
            workers,
            1.0,
            0.9,
            1.1,
            1.0,
            speedup,
            speedup,
            speedup / workers,
            limit,
            {limit: 0.5},
            0.1,
        )
        for workers, speedup in each
    ]


def test_numbers_of_workers_between_may_pay_less() -> None:
    uneven = speeds((1, 1.0), (2, 2.0), (3, 2.0), (4, 4.0))  # four virtual workers
    assert recommended(uneven).workers == 4


@pytest.mark.parametrize(
    ("forecasts", "first"),
    [
        (
            speeds((1, 1.0), (2, 1.2), (8, 1.5)),
            "The fastest are 8 workers, 1.50 times as fast as one; each more than",
        ),
        (
            speeds((8, 0.2)),
            "One worker is faster: 8 workers take 5.00 times as long for its samples.",
        ),
        (speeds((1, 1.0), (2, 0.5)), "More workers do not pay: 2 workers take 2.00 times as long"),
        (speeds((1, 1.0), (2, 1.01)), "More workers do not pay: 2 workers take hardly less time."),
    ],
)
def test_advice_does_not_contradict_itself(forecasts: list[Forecast], first: str) -> None:
    lines = advise(job(), forecasts)
    assert lines[0].startswith(first)
    text = " ".join(lines)
    assert text.count("fastest") + text.count("do not pay") + text.count("is faster") == 1
    assert "Use " not in text


def test_more_workers_are_no_remedy_where_they_do_not_pay() -> None:
    text = " ".join(advise(job(), speeds((1, 1.0), (2, 0.9), limit="compute")))
    assert "a faster device or lower precision is what helps" in text
    assert "more workers" in " ".join(advise(job(), speeds((1, 1.0), (2, 1.9), limit="compute")))
