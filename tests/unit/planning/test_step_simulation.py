"""The simulation of a step, and the costs of collectives, against closed forms."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from lockstep.errors import ConfigError
from lockstep.network import Link
from lockstep.planning.collective_costs import (
    ALGORITHMS,
    DIGEST_BYTES,
    Cost,
    Fabric,
    MeasuredCollective,
)
from lockstep.planning.measurement import (
    CollectiveCurve,
    Curve,
    NetworkMeasurement,
    TransportMeasurement,
)
from lockstep.planning.step_simulation import (
    Gradient,
    Message,
    StepPlan,
    ddp_buckets,
    equal_buckets,
    simulate,
)
from lockstep.watchdog.preflight import encode
from lockstep.watchdog.states import RecordRow

LINK = Link(1e9, 1e-5)


@pytest.mark.parametrize("workers", [2, 3, 8, 1024])
@pytest.mark.parametrize("size", [0.0, 4e6])
def test_algorithms_are_their_closed_forms(workers: int, size: float) -> None:
    n, p, alpha, beta = size, workers, LINK.latency, 1 / LINK.bandwidth
    forms = {
        "ring": 2 * (p - 1) * alpha + 2 * (p - 1) / p * n * beta,
        "tree": 2 * math.ceil(math.log2(p)) * (alpha + n * beta),
        "flat": 2 * alpha + 2 * (p - 1) / p * n * beta,
        "all_to_all": alpha + (p - 1) / p * n * beta,
        "all_gather": (p - 1) * alpha + (p - 1) / p * n * beta,
        "broadcasts": p * math.ceil(math.log2(p)) * (alpha + n / p * beta),
    }
    assert {
        name: each(size, workers, LINK).seconds for name, each in ALGORITHMS.items()
    } == pytest.approx(forms)


def test_one_worker_communicates_nothing() -> None:
    assert Fabric(LINK).cost("all_reduce", 1e9, 1).seconds == 0


def test_hierarchical_crosses_the_link_once_for_each_host() -> None:
    inside = {"all_reduce": MeasuredCollective(Curve((0.0, 1e6), (0.0, 0.001)), 4)}
    fabric = Fabric(LINK, per_host=4, inside=inside)
    between = ALGORITHMS["ring"](1e6, 2, LINK).seconds
    assert fabric.cost("all_reduce", 1e6, 8).seconds == pytest.approx(between + 0.001)
    assert fabric.cost("all_reduce", 1e6, 4).seconds == pytest.approx(0.001)
    flat = Fabric(LINK, per_host=4, inside=inside, hierarchical=False)
    assert flat.cost("all_reduce", 1e6, 8).send_s == pytest.approx(
        4 * 4 / 7 * ALGORITHMS["ring"](1e6, 8, LINK).send_s
    )


def test_the_check_beside_a_collective_is_a_small_all_reduce_between_hosts() -> None:
    plain, checked = Fabric(LINK, per_host=2), Fabric(LINK, per_host=2, checks_calls=True)
    check_s = plain.cost("all_reduce", DIGEST_BYTES, 4).seconds
    assert check_s > 0
    for name in ("all_reduce", "all_to_all", "all_gather"):
        assert checked.cost(name, 1e6, 4) == plain.cost(name, 1e6, 4), (
            "it is over before the collective"
        )
    assert plain.cost("all_to_all", 8.0, 4).seconds < check_s
    assert checked.cost("all_to_all", 8.0, 4).seconds == pytest.approx(check_s)
    assert checked.cost("all_reduce", 1e6, 2) == plain.cost("all_reduce", 1e6, 2)  # on one host


def test_the_digest_has_as_many_bytes_as_the_watchdog_sends() -> None:
    call = RecordRow(*range(len(RecordRow.__struct_fields__)))
    assert 8 * len(encode(call)) == DIGEST_BYTES


def measurement(hosts: tuple[tuple[int, ...], ...]) -> NetworkMeasurement:
    points = Curve((64.0, 1e6, 1e7), (2e-5, 1e-3, 1e-2))
    collectives = {name: CollectiveCurve(points, 0.0) for name in ("all_reduce", "all_gather")}
    transports = {"shm": TransportMeasurement(collectives)}
    return NetworkMeasurement("lockstep network 1", 2, hosts, 2, transports, 1e10)


@pytest.mark.parametrize("hosts", [((0, 1),), ((0,), (1,))])
def test_measured_curves_are_used_and_extended_as_their_algorithm_grows(
    hosts: tuple[tuple[int, ...], ...],
) -> None:
    fabric = Fabric.of_measurement(measurement(hosts), "shm")
    assert fabric.is_one_host == (len(hosts) == 1) and fabric.checks_calls == (len(hosts) > 1)
    fabric = replace(fabric, checks_calls=False)
    assert fabric.cost("all_reduce", 1e6, 2).seconds == pytest.approx(1e-3)
    extended = fabric.cost("all_reduce", 1e6, 4)
    assert extended.latency_s == pytest.approx(3 * 2e-5)
    assert extended.send_s == pytest.approx((1e-3 - 2e-5) * 1.5)
    assert fabric.cost("all_gather", 2e6, 2).seconds == pytest.approx(
        1e-3
    )  # each worker's input is half of the result
    assert fabric.cost("all_to_all", 1e6, 2).seconds > 0  # not measured
    with pytest.raises(ConfigError, match=r"transport: expected shm, got 'gloo'"):
        Fabric.of_measurement(measurement(hosts), "gloo")


# --- Buckets
# --------------------------------------------------------------------------------------------------


def test_buckets_are_those_of_ddp() -> None:
    import torch
    import torch.distributed as dist

    sizes = [10, 300_000, 2_000_000, 5_000_000, 7_000_000, 40, 100]
    tensors = [torch.empty(size) for size in sizes]
    groups, _ = dist._compute_bucket_assignment_by_size(tensors, [1 << 20, 25 << 20])  # type: ignore[attr-defined]
    expected = [sum(4 * sizes[i] for i in group) for group in groups]
    gradients = [Gradient(4 * size, float(at)) for at, size in enumerate(sizes)]
    buckets = ddp_buckets(gradients, 25 << 20)
    assert [bucket.size for bucket in buckets] == expected
    assert [bucket.ready_s for bucket in buckets] == [
        max(float(i) for i in group) for group in groups
    ]


def test_buckets_go_by_arrival_not_by_order() -> None:
    gradients = [Gradient(8, 3.0), Gradient(8, 1.0), Gradient(8, 2.0)]
    assert equal_buckets(gradients, 16) == [Gradient(16, 2.0), Gradient(8, 3.0)]
    assert equal_buckets([], 16) == []


# --- Steps
# --------------------------------------------------------------------------------------------------


def messages(ready: list[float], seconds: float) -> list[Message]:
    return [Message(at, Cost(0.0, seconds, seconds)) for at in ready]


def test_no_overlap_adds_up() -> None:
    line = simulate(StepPlan(10.0, 1.0, messages([10.0, 10.0, 10.0], 2.0)))
    assert (line.step_s, line.computed_s, line.exposed_s) == (17.0, 10.0, 6.0)
    assert line.spans == ((10.0, 12.0), (12.0, 14.0), (14.0, 16.0))


def test_perfect_overlap_costs_the_last_bucket_only() -> None:
    line = simulate(StepPlan(10.0, 1.0, messages([2.0, 4.0, 6.0, 8.0, 10.0], 2.0)))
    assert (line.step_s, line.exposed_s) == (13.0, 2.0)


def test_a_slow_network_is_the_sum_of_its_messages() -> None:
    line = simulate(StepPlan(10.0, 0.0, messages([2.0, 4.0, 6.0], 20.0)))
    assert line.step_s == 2.0 + 3 * 20.0


def test_latencies_overlap_with_the_bytes_of_others_if_several_collectives_may_run() -> None:
    both = [Message(0.0, Cost(5.0, 1.0, 1.0)), Message(0.0, Cost(5.0, 1.0, 1.0))]
    assert simulate(StepPlan(0.0, 0.0, both, in_flight=1)).step_s == 12.0
    assert simulate(StepPlan(0.0, 0.0, both, in_flight=2)).step_s == 7.0


def test_directions_have_lanes_of_their_own() -> None:
    cost = Cost(0.0, 1.0, 4.0)
    assert simulate(StepPlan(0.0, 0.0, [Message(0.0, cost)] * 2, in_flight=2)).step_s == 8.0


@pytest.mark.parametrize(("slowdown", "expected"), [(0.0, 10.0), (0.5, 12.0), (1.0, 14.0)])
def test_computing_slows_down_while_a_collective_runs(slowdown: float, expected: float) -> None:
    # 4 seconds of work are done while the collective runs, if nothing is slower; it lasts long
    # enough for each case
    line = simulate(StepPlan(10.0, 0.0, [Message(6.0, Cost(0.0, 8.0, 8.0))], slowdown))
    assert line.computed_s == pytest.approx(expected)


def test_computing_is_slow_only_while_it_runs() -> None:
    line = simulate(StepPlan(10.0, 0.0, [Message(2.0, Cost(0.0, 3.0, 3.0))], 0.5))
    assert line.computed_s == pytest.approx(
        2 + 3 + 6
    )  # 2 seconds of work are done in the 3 of the collective


def test_a_follow_up_waits_for_all_computing() -> None:
    first = Message(1.0, Cost(0.0, 1.0, 1.0), Cost(0.0, 2.0, 2.0))
    line = simulate(StepPlan(10.0, 0.0, [first, first]))
    assert line.step_s == 10.0 + 2 * 2.0
