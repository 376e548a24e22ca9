"""The variables of every launcher are recognised, in the documented order, and what is wrong in
them is named.
"""

from __future__ import annotations

import pytest

from lockstep.environment import find_world
from lockstep.environment.launchers import LAUNCHERS, expand_nodes, expand_tasks, find_launcher
from lockstep.errors import ConfigError
from lockstep.topology import World

Variables = dict[str, str]

TORCHRUN = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
}
HOROVOD = {
    "HOROVOD_RANK": "5",
    "HOROVOD_SIZE": "8",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "4",
    "HOROVOD_CROSS_RANK": "1",
    "HOROVOD_CROSS_SIZE": "2",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
}
MPICH = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
# what a batch script has, and a shell that salloc has started
BATCH = {
    "SLURM_JOB_ID": "70",
    "SLURM_NTASKS": "5",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_JOB_NODELIST": "node[01-02]",
    "SLURM_TASKS_PER_NODE": "3,2",
}
STEP = {
    **BATCH,
    "SLURM_PROCID": "3",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "3,2",
    "SLURM_STEP_NODELIST": "node[01-02]",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
}
SHELL = {**STEP, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}


@pytest.mark.parametrize(
    ("variables", "world"),
    [
        (HOROVOD, World(5, 8, 1, 4, 1, 2, "horovod")),
        (OPENMPI, World(5, 8, 1, 4, 1, 2, "openmpi")),
        (MPICH, World(5, 8, 1, 4, 1, 2, "mpich")),
        (STEP, World(3, 5, 0, 2, 1, 2, "slurm")),
        # dealt out to the nodes in turn
        ({**MPICH, "PMI_RANK": "3", "MPI_LOCALRANKID": "1"}, World(3, 8, 1, 4, 1, 2, "mpich")),
        (
            {**MPICH, "PMI_RANK": "8", "PMI_SIZE": "9", "MPI_LOCALRANKID": "0"},
            World(8, 9, 0, 4, 2, 3, "mpich"),
        ),
    ],
)
def test_each_launchers_variables(variables: Variables, world: World) -> None:
    assert find_world(variables) == world


@pytest.mark.parametrize(
    ("variables", "source"),
    [
        ({**STEP, **MPICH, **OPENMPI, **HOROVOD, **TORCHRUN, "LOCKSTEP_LAUNCHED": "1"}, "lockstep"),
        ({**STEP, **MPICH, **OPENMPI, **HOROVOD, **TORCHRUN}, "torchrun"),
        ({**STEP, **MPICH, **OPENMPI, **HOROVOD}, "horovod"),
        ({**STEP, **MPICH, **OPENMPI}, "openmpi"),
        ({**STEP, **MPICH}, "mpich"),
        ({"LOCKSTEP_LAUNCHED": "1", **MPICH}, "mpich"),
    ],
)
def test_the_order(variables: Variables, source: str) -> None:
    assert find_world(variables).source == source


def test_the_order_is_that_of_the_list() -> None:
    sources = ["lockstep", "torchrun", "horovod", "openmpi", "mpich", "slurm"]
    assert [launcher.source for launcher in LAUNCHERS] == sources


@pytest.mark.parametrize(
    "variables", [BATCH, SHELL, {**SHELL, "SLURM_STEP_ID": "4294967290", "SLURM_NTASKS": "5"}]
)
def test_a_shell_that_slurm_has_started_is_alone(variables: Variables) -> None:
    assert find_launcher(variables) is None
    assert find_world(variables) == World()


def test_variables_of_sruns_own_pmi_do_not_override_slurms() -> None:
    assert find_world({**STEP, "PMI_RANK": "3", "PMI_SIZE": "5", "PMI_FD": "4"}).source == "slurm"
    assert find_world({**SHELL, "PMI_RANK": "0", "PMI_SIZE": "1"}) == World()


@pytest.mark.parametrize(
    ("variables", "change", "told"),
    [
        (
            HOROVOD,
            {"HOROVOD_SIZE": None},
            "HOROVOD_SIZE: expected a whole number, got nothing: it is not set. horovod",
        ),
        (
            HOROVOD,
            {"HOROVOD_CROSS_RANK": "2"},
            "HOROVOD_CROSS_RANK: expected 0 to 1, as HOROVOD_CROSS_SIZE gives 2",
        ),
        (
            HOROVOD,
            {"HOROVOD_CROSS_RANK": None},
            "HOROVOD_CROSS_RANK: expected a whole number, got nothing",
        ),
        (
            OPENMPI,
            {"OMPI_COMM_WORLD_RANK": "8"},
            "as OMPI_COMM_WORLD_SIZE gives 8, got 8. Open MPI's mpirun sets it",
        ),
        (
            OPENMPI,
            {"OMPI_COMM_WORLD_LOCAL_SIZE": None},
            "OMPI_COMM_WORLD_LOCAL_SIZE: expected a whole number, got not",
        ),
        (MPICH, {"PMI_RANK": None}, "PMI_RANK: expected a whole number, got nothing"),
        (MPICH, {"MPI_LOCALRANKID": None}, "MPI_LOCALRANKID: expected a whole number, got nothing"),
        (
            MPICH,
            {"PMI_SIZE": "many"},
            "PMI_SIZE: expected a whole number, got 'many'. mpiexec of MPICH",
        ),
        (
            MPICH,
            {"MPI_LOCALNRANKS": "9"},
            "MPI_LOCALNRANKS: expected at most PMI_SIZE, which is 8, got 9",
        ),
        (
            STEP,
            {"SLURM_PROCID": "5"},
            "SLURM_PROCID: expected 0 to 4, as SLURM_STEP_NUM_TASKS gives 5, got 5. Slurm",
        ),
        (
            STEP,
            {"SLURM_STEP_NUM_TASKS": "x"},
            "SLURM_STEP_NUM_TASKS: expected a whole number, got 'x'",
        ),
        (
            STEP,
            {"SLURM_NODEID": "2"},
            "SLURM_NODEID: expected 0 to 1, as SLURM_STEP_NUM_NODES gives 2",
        ),
        (
            STEP,
            {"SLURM_LOCALID": "2"},
            "SLURM_LOCALID: expected 0 to 1, as SLURM_STEP_TASKS_PER_NODE gives 2",
        ),
        (
            STEP,
            {"SLURM_STEP_TASKS_PER_NODE": "3,3"},
            "SLURM_STEP_TASKS_PER_NODE: expected 5 tasks (SLURM_STEP_NUM",
        ),
        (STEP, {"SLURM_STEP_TASKS_PER_NODE": "5"}, "on 2 nodes (SLURM_STEP_NUM_NODES), got '5'"),
        (
            STEP,
            {"SLURM_STEP_TASKS_PER_NODE": "5,0"},
            "on 2 nodes (SLURM_STEP_NUM_NODES), got '5,0'",
        ),
        (
            STEP,
            {"SLURM_STEP_TASKS_PER_NODE": "five"},
            "on 2 nodes (SLURM_STEP_NUM_NODES), got 'five'",
        ),
        (
            STEP,
            {"SLURM_STEP_TASKS_PER_NODE": None},
            "SLURM_STEP_TASKS_PER_NODE: expected the number of tasks on each",
        ),
    ],
)
def test_what_does_not_fit_is_named(
    variables: Variables, change: dict[str, str | None], told: str
) -> None:
    changed = {name: value for name, value in {**variables, **change}.items() if value is not None}
    with pytest.raises(ConfigError, match=r"^environment variable") as caught:
        find_world(changed)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("node7", ["node7"]),
        ("node[01-03,7],gpu4", ["node01", "node02", "node03", "node7", "gpu4"]),
        ("a[9-11]-ib,b", ["a9-ib", "a10-ib", "a11-ib", "b"]),
        ("r[1-2]n[08-09]", ["r1n08", "r1n09", "r2n08", "r2n09"]),
        ("n[099-101]", ["n099", "n100", "n101"]),
    ],
)
def test_a_node_list_is_expanded(text: str, nodes: list[str]) -> None:
    assert expand_nodes(text) == nodes


@pytest.mark.parametrize(
    "text", ["", "a,", ",a", "a[1-2", "a1]", "a[]", "a[x]", "a[1-]", "a b", "a,,b", "a[1,,2]"]
)
def test_what_is_no_node_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a "):
        expand_nodes(text)


def test_tasks_per_node_are_expanded() -> None:
    assert expand_tasks("2(x3),1") == [2, 2, 2, 1]
    assert expand_tasks("4") == [4]


@pytest.mark.parametrize("text", ["", "2x3", "2(x3", "a", "2,,1", "-1"])
def test_what_is_no_list_of_tasks_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a list"):
        expand_tasks(text)
