"""What `lockstep.ray` decides without Ray: what fits on a cluster, places, how an actor ended,
output on its way.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest

import lockstep
from lockstep.errors import ConfigError, LockstepError, WorkerError
from lockstep.job.messages import Failure
from lockstep.launcher.log_multiplexer import OutputLine
from lockstep.launcher.worker_status import WorkerResults, combine, first_failure
from lockstep.ray import resources as of_ray
from lockstep.ray.elastic_nodes import NodeEnd, choose_error
from lockstep.ray.rank_actors import describe_end, describe_start, places_of
from lockstep.ray.relay import RelayedLog
from lockstep.ray.resources import Node, Placement


def node(key: str, **total: float) -> Node:
    return Node(key, f"host-{key}", total, total)


# --- arguments
# --------------------------------------------------------------------------------------------------


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        LockstepError, match=r"needs the package ray: pip install 'lockstep-train\[ray\]'$"
    ):
        lockstep.ray.launch(print)


@pytest.mark.parametrize("workers", [0, -1, True, 1.5, None, (2,), (0, 2), (4, 2), (1, 2, 3), "2"])
def test_what_is_no_number_of_workers_is_refused(workers: Any) -> None:
    with pytest.raises(
        ConfigError,
        match="workers: expected a whole number of at least 1, or the least and the most",
    ):
        lockstep.ray.launch(print, workers=workers)


def test_other_settings_are_checked_as_those_of_launch() -> None:
    with pytest.raises(ConfigError, match="fn: expected a function"):
        lockstep.ray.launch(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="threads: expected"):
        lockstep.ray.launch(print, threads=0)


@pytest.mark.parametrize("resources", [{}, {3: 1}, ["CPU"], 2])
def test_what_are_no_resources_is_refused(resources: Any) -> None:
    with pytest.raises(ConfigError, match="resources: expected a dict of amounts above 0"):
        of_ray.check_resources(resources)


@pytest.mark.parametrize("amount", [0, -1, True, "1", math.inf, math.nan])
def test_what_is_no_amount_of_a_resource_is_refused_by_its_name(amount: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"^resources\['GPU'\]: expected a finite number above 0, got "
    ):
        of_ray.check_resources({"CPU": 1, "GPU": amount})


def test_resources_are_options_of_an_actor() -> None:
    placement = Placement({"CPU": 2, "GPU": 0.5, "fast": 1}, None, 1.0)
    expected = {"num_cpus": 6, "num_gpus": 1.5, "resources": {"fast": 3}, "max_restarts": 0}
    assert placement.options(3) == expected
    assert placement.worker_threads == 2
    assert Placement({"CPU": 0.5}, None, 1.0).worker_threads == 1
    assert Placement({"CPU": 2}, 5, 1.0).worker_threads == 5


# --- what fits
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("has", "needs", "count"),
    [
        ({"CPU": 4}, {"CPU": 1}, 4),
        ({"CPU": 4}, {"CPU": 3}, 1),
        ({"CPU": 4, "GPU": 1}, {"CPU": 1, "GPU": 0.5}, 2),
        ({"CPU": 0.3}, {"CPU": 0.1}, 3),  # 0.3 / 0.1 is less than 3
        ({"CPU": 4}, {"GPU": 1}, 0),
        ({"CPU": 1000}, {"CPU": 1}, of_ray.MOST_ON_A_NODE),
    ],
)
def test_how_many_workers_a_node_holds(
    has: dict[str, float], needs: dict[str, float], count: int
) -> None:
    assert of_ray.capacity(has, needs) == count


def test_what_can_never_fit_is_an_error_that_says_what_is_missing() -> None:
    nodes = [node("a", CPU=4), node("b", CPU=4)]
    of_ray.check_capacity(nodes, 8, {"CPU": 1})
    with pytest.raises(
        ConfigError, match=r"at most 8: each needs 1 CPU, .* has 8 CPU on 2 nodes, got 9 \(1"
    ):
        of_ray.check_capacity(nodes, 9, {"CPU": 1})
    with pytest.raises(
        ConfigError, match=r"at most 2: each needs 3 CPU.*\(no node has enough of all at once\)"
    ):
        of_ray.check_capacity([node("a", CPU=5), node("b", CPU=4)], 3, {"CPU": 3})


@pytest.mark.parametrize(
    ("status", "configured"),
    [
        (b'{"autoscaler_report": {"node_type_mapping": {"ff00": "ray.head.default"}}}', True),
        (b'{"autoscaler_report": {"node_type_mapping": {"ff00": "node_ff00"}}}', False),
        (b'{"autoscaler_report": {"node_type_mapping": null}}', False),
        (b'{"autoscaler_report": null}', False),
        (b"damaged", False),
        (None, False),
    ],
)
def test_an_autoscaler_is_known_by_the_types_of_nodes(
    status: bytes | None, configured: bool
) -> None:
    assert of_ray.knows_node_types(status) is configured


def test_slots_are_spread_over_the_nodes() -> None:
    assert of_ray.spread({"a": 8, "b": 8}, 8) == {"a": 4, "b": 4}
    assert of_ray.spread({"a": 1, "b": 8, "c": 0}, 8) == {"a": 1, "b": 7}
    assert of_ray.spread({"a": 1, "b": 1}, 8) == {"a": 1, "b": 1}
    assert of_ray.spread({}, 8) == {}


def test_ranks_of_a_node_are_consecutive() -> None:
    first, second = places_of({0: "x", 1: "y", 2: "x", 3: "x"}, {"x": "host-x"})
    assert (first.name, first.first_rank, first.bundles) == ("host-x", 0, (0, 2, 3))
    assert (second.name, second.first_rank, second.bundles) == ("y", 3, (1,))
    world = second.world(0)
    assert (world.rank, world.world_size, world.local_rank, world.local_world_size) == (3, 4, 0, 1)
    assert (world.node, world.nodes) == (1, 2)


# --- how it ended
# --------------------------------------------------------------------------------------------------


def test_what_ray_says_of_the_end_of_an_actor() -> None:
    assert describe_end("ActorDiedError ... Worker exits with an exit code 4.") == (4, "")
    assert (
        "ran out of memory"
        in describe_end("OutOfMemoryError Task was killed due to the node running low")[1]
    )
    assert (
        "killed by a signal"
        in describe_end("ActorDiedError ... connection error code 2. End of file")[1]
    )


def test_a_node_without_lockstep_is_an_error_that_says_what_to_do() -> None:
    assert "runtime_env" in describe_start(
        RuntimeError("x\nModuleNotFoundError: No module named 'lockstep'")
    )
    assert (
        describe_start(RuntimeError("a\n  the last line \n"))
        == "the workers could not be started on Ray: the last line"
    )


def report(rank: int, time: int, **more: Any) -> Failure:
    return Failure(rank, time, "KeyError", f"of local rank {rank}", **more)


def test_the_results_of_several_hosts_are_one() -> None:
    a = WorkerResults([report(1, 30)], workers=2, first_rank=0)
    b = WorkerResults(
        [report(0, 20, dead_peers=(1,))],
        [1],
        workers=2,
        first_rank=2,
        dead_since=10,
        ends={1: "lost"},
    )
    results = combine([a, b])
    assert [(each.rank, each.dead_peers) for each in results.reports] == [(2, (3,)), (1, ())]
    assert (results.dead_ranks, results.dead_since, results.ends) == ([3], 10, {3: "lost"})
    assert (results.workers, results.first_rank) == (4, 0)
    first = first_failure(results)
    assert first is not None
    assert first.rank == 1  # it saw no dead peer
    silent = first_failure(combine([WorkerResults(workers=2), b]))
    assert silent is not None
    assert (silent.rank, silent.kind, silent.reason) == (3, "exit", "lost")


def test_of_the_errors_of_an_elastic_jobs_nodes_the_one_with_the_worker_counts() -> None:
    worker, shared = WorkerError(1, "KeyError", "x"), ConfigError("a", "b", "c")
    plain = NodeEnd(error=LockstepError("x"), is_over=True)
    assert choose_error([NodeEnd(b"", is_over=True)]) is None
    assert choose_error([plain, NodeEnd(error=worker)]) is worker
    assert choose_error([plain, NodeEnd(error=shared, cause=worker)]) is shared
    assert shared.__cause__ is worker
    assert choose_error([NodeEnd(error=LockstepError("y")), plain]) is plain.error


# --- output
# --------------------------------------------------------------------------------------------------


def test_lines_are_kept_until_they_are_taken_and_of_a_bar_the_last_state() -> None:
    log = RelayedLog()
    line, bars = (
        OutputLine(b"x", False, True),
        [OutputLine(b"%d" % n, True, False) for n in range(3)],
    )
    log.write(0, 0, line)
    for bar in bars:
        log.write(1, 1, bar)
    log.write_message("hello")
    assert log.take(0) == [(0, 0, line), (1, 1, bars[2]), "hello"]
    assert log.take(0) == []
    log.close()
    assert log.take(1000.0) == []  # without waiting
