"""`lockstep doctor` on the nodes of a scheduler: the address of the first one, its port, and the
versions of all.
"""

from __future__ import annotations

import socket
import threading

import pytest

from lockstep.doctor import cluster
from lockstep.doctor.cluster import _Node, _Place, compare_nodes, examine_cluster
from lockstep.doctor.findings import Section

STEP = {
    "SLURM_JOB_ID": "70",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NODELIST": "nowhere.invalid,n2",
}


def facts(section: Section) -> dict[str, str]:
    return {fact.name: fact.text for fact in section.facts}


def problems(section: Section) -> str:
    return "\n".join(f"{problem.what} -> {problem.fix}" for problem in section.problems)


def given(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> Section:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return examine_cluster(0.2)


def test_without_a_scheduler_there_is_nothing_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    section = given(monkeypatch, {})
    assert section.facts == []
    assert section.problems == []


def test_a_first_node_without_an_address_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    section = given(monkeypatch, STEP)
    assert facts(section)["scheduler"] == "Slurm: rank 1 of 2, which meet at nowhere.invalid:16790"
    assert "the first node, nowhere.invalid, has no address here -> Set MASTER_ADDR" in problems(
        section
    )


def test_incomplete_variables_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    section = given(monkeypatch, {"SKYPILOT_NODE_RANK": "0"})
    assert "SKYPILOT_NUM_NODES (SkyPilot): expected a whole number" in problems(section)
    section = given(
        monkeypatch,
        {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_IPS": "10.0.0.1"},
    )
    assert facts(section)["scheduler"] == "SkyPilot: node 0 of 1"
    assert section.problems == []


# --- The other nodes
# --------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def meet(count: int, places: list[int], limit: float) -> list[Section]:
    """What the nodes `places` of `count` find, each in a thread."""
    port, sections = free_port(), [Section("cluster") for _ in places]

    def examine(section: Section, number: int) -> None:
        cluster._add_nodes(section, _Place("X", number, count, "node", "127.0.0.1", port), limit)

    threads = [
        threading.Thread(target=examine, args=each) for each in zip(sections, places, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sections


def test_nodes_that_reach_each_other_have_nothing_to_fix() -> None:
    first, second, third = meet(3, [0, 1, 2], 20.0)
    assert [section.problems for section in (first, second, third)] == [[], [], []]
    assert facts(first)["port"].endswith("all others have come")
    assert facts(second)["port"].endswith("reached from here")
    assert facts(first)["versions"].endswith(" on 3 nodes")


def test_a_node_that_does_not_come_is_named() -> None:
    (section,) = meet(3, [0], 0.2)
    assert "node 1, 2 of 3 did not come to 127.0.0.1:" in problems(section)
    assert "Run `lockstep doctor` on all nodes at the same time" in problems(section)


def test_a_first_node_that_is_not_reached_is_a_problem() -> None:
    (section,) = meet(2, [1], 0.5)
    assert "on the first node, is not reached from here" in problems(section)


def test_a_port_that_is_in_use_is_a_problem() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        section = Section("cluster")
        place = _Place("X", 0, 2, "node", "127.0.0.1", other.getsockname()[1])
        cluster._add_nodes(section, place, 1.0)
    assert "cannot be listened at" in problems(section)
    assert "set --master-port on all nodes" in problems(section)


def test_versions_that_differ_are_named() -> None:
    first = _Node(0, "a", {"torch": "2.13.0", "python": "3.11.9"})
    text, found = compare_nodes(
        {0: first, 1: _Node(1, "b", {"torch": "2.12.1", "python": "3.11.9"})}, "rank"
    )
    assert text == "differ between ranks"
    assert [problem.what for problem in found] == ["rank 1 (b) has torch 2.12.1, rank 0 (a) 2.13.0"]
    text, found = compare_nodes({0: first, 1: _Node(1, "b", {"torch": "2.13.0"})}, "node")
    assert [problem.what for problem in found] == [
        "node 1 (b) has python missing, node 0 (a) 3.11.9"
    ]
    assert compare_nodes({1: first}, "node") == ("unknown", [])
