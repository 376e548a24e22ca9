"""What `lockstep.ray` decides without Ray: what fits on a cluster, how an agent ended, output on its
way.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest

import lockstep
from lockstep.errors import ConfigError, LockstepError, WorkerError
from lockstep.launcher.output.output_lines import OutputLine
from lockstep.ray import resources as of_ray
from lockstep.ray.agent import NodeEnd, devices_of_worker
from lockstep.ray.driver import choose_error, describe_loss, describe_start
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
    expected = {"num_cpus": 6, "num_gpus": 2, "resources": {"fast": 3}, "max_restarts": 0}
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
        ({"GPU": 2}, {"GPU": 0.4}, 4),  # two on each: no worker has parts of two
        ({"GPU": 1.8}, {"GPU": 0.4}, 2),  # of several workers each GPU is a whole one
        ({"GPU": 0.8}, {"GPU": 0.4}, 2),
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


@pytest.mark.parametrize(
    ("amount", "workers", "expected"),
    [
        (1, 4, [["0"], ["1"], ["2"], ["3"]]),
        (2, 2, [["0", "1"], ["2", "3"]]),
        (0.5, 8, [["0"], ["0"], ["1"], ["1"], ["2"], ["2"], ["3"], ["3"]]),
    ],
)
def test_each_worker_has_devices_of_its_own(
    amount: float, workers: int, expected: list[list[str]]
) -> None:
    visible = ["0", "1", "2", "3"]
    devices = [devices_of_worker(visible, amount, rank, workers) for rank in range(workers)]
    assert devices == expected


def test_gpus_between_whole_numbers_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"resources\['GPU'\]: expected a whole number, or a part"
    ):
        of_ray.check_resources({"GPU": 1.5})


@pytest.mark.parametrize(
    ("message", "lost"),
    [
        (
            "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR "
            "Worker exit detail: Worker unexpectedly exits with a connection error code 2.",
            "agent on b died without a message: killed by a signal",
        ),
        (
            "The actor is dead because its worker process has died. Worker exit detail: Worker "
            "exits with an exit code 4.",
            "agent on b ended with exit code 4",
        ),
        (
            "OutOfMemoryError Task was killed due to the node running low on memory",
            "agent on b was killed by Ray, because its node ran out of memory",
        ),
        (
            "The actor died because its node has died. Node Id: 4259\n\tthe actor's node was "
            "terminated unexpectedly: health check failed due to missing too many heartbeats",
            "node b was lost",
        ),
        ("RaySystemError: x\ny\n", "agent on b was lost: y"),
    ],
)
def test_what_was_lost_is_what_ray_says(message: str, lost: str) -> None:
    assert describe_loss("b", message).startswith(lost)


def test_a_node_without_lockstep_is_an_error_that_says_what_to_do() -> None:
    assert "runtime_env" in describe_start(
        RuntimeError("x\nModuleNotFoundError: No module named 'lockstep'")
    )
    assert (
        describe_start(RuntimeError("a\n  the last line \n"))
        == "the workers could not be started on Ray: the last line"
    )


def test_of_the_errors_of_the_nodes_the_one_with_the_worker_counts() -> None:
    worker, shared = WorkerError(1, "KeyError", "x"), ConfigError("a", "b", "c")
    plain = NodeEnd(error=LockstepError("x"), is_over=True)
    assert choose_error([NodeEnd(b"", is_over=True)]) is None
    assert choose_error([plain, NodeEnd(error=worker)]) is worker
    assert choose_error([plain, NodeEnd(error=shared, cause=worker)]) is shared
    assert shared.__cause__ is worker
    assert choose_error([NodeEnd(error=LockstepError("y")), plain]) is plain.error


def test_what_the_workers_of_all_nodes_have_raised_alike_is_the_error() -> None:
    first = WorkerError(1, "ConfigError", "x")
    nodes = [
        NodeEnd(
            error=first,
            error_here=ConfigError("lr", "more", 1),
            cause_here=WorkerError(rank, "x", ""),
        )
        for rank in range(2)
    ]
    assert choose_error(nodes) is nodes[0].error_here
    assert choose_error([*nodes, NodeEnd(error=first)]) is first


def test_a_desync_is_the_error_of_all_and_not_what_follows_from_another_workers_error() -> None:
    def end(kind: str) -> NodeEnd:
        first = WorkerError(1, kind, "x", "Traceback")
        first.report_json = "{}"  # which another node has made
        own = lockstep.RankLostError(1, "rank 1 died while other ranks waited for it")
        return NodeEnd(error=first, error_here=own, cause_here=WorkerError(0, "RankLostError", "x"))

    repeats, follows = end("RankLostError"), end("KeyError")
    assert choose_error([repeats, NodeEnd(error=repeats.error)]) is repeats.error_here
    assert choose_error([follows, NodeEnd(error=follows.error)]) is follows.error


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
