"""The variables of every scheduler give a node its place in the job, and what is wrong in them is
named.
"""

from __future__ import annotations

import pytest

from lockstep import environment
from lockstep.environment.schedulers import NodePlace, find_node
from lockstep.errors import ConfigError
from lockstep.launcher.options import JobOptions
from lockstep.launcher.start import config_for_node

Variables = dict[str, str]

SKYPILOT = {
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_TASK_ID": "sky-2026-01-02-03-04-05-678901_train_id-1",
}
DSTACK = {
    "DSTACK_NODE_RANK": "1",
    "DSTACK_NODES_NUM": "2",
    "DSTACK_MASTER_NODE_IP": "10.128.0.47",
    "DSTACK_NODES_IPS": "10.128.0.47\n10.128.0.48",
    "DSTACK_GPUS_PER_NODE": "8",
}
KUBEFLOW = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "train-node-0-0.train",
    "PET_MASTER_PORT": "29400",
    "JOB_COMPLETION_INDEX": "1",  # it runs indexed Jobs
}
KUBERNETES = {
    "JOB_COMPLETION_INDEX": "1",
    "LOCKSTEP_NODES": "2",
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
}
# as the manifest of a JobSet with a Job for each node takes them from its labels
JOBSET = {
    "JOB_COMPLETION_INDEX": "0",
    "LOCKSTEP_NODES": "2",
    "LOCKSTEP_NODE_RANK": "1",  # jobset.sigs.k8s.io/job-global-index
    "MASTER_ADDR": "train-node-0-0.train",  # jobset.sigs.k8s.io/coordinator
}
# Kubeflow's Training Operator: RANK and WORLD_SIZE number the pods
PYTORCHJOB = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "train-master-0",
    "PET_MASTER_PORT": "23456",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "train-master-0",
    "MASTER_PORT": "23456",
}
# srun --ntasks=1, recorded with Slurm 22.05; steps of several tasks are read in test_launchers
SLURM_STEP = {
    "SLURM_JOB_ID": "2",
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_JOB_NODELIST": "node0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node0",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
}
# sbatch, recorded with Slurm 22.05
SLURM_BATCH = {
    "SLURM_JOB_ID": "3",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "node[0-1]",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "1(x2)",
}
ALONE = {"JOB_COMPLETION_INDEX": "0", "LOCKSTEP_NODES": "1"}
SAGEMAKER = {
    "SM_HOSTS": '["algo-1","algo-2"]',
    "SM_CURRENT_HOST": "algo-2",
    "SM_NETWORK_INTERFACE_NAME": "eth0",
    "SM_NUM_GPUS": "1",
}
POD = "train-1.train.default.svc.cluster.local"


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        (SKYPILOT, NodePlace("SkyPilot", 1, 2, "10.0.0.4")),
        (DSTACK, NodePlace("dstack", 1, 2, "10.128.0.47")),
        (KUBEFLOW, NodePlace("Kubeflow Trainer", 1, 2, "train-node-0-0.train", 29400)),
        (
            KUBERNETES,
            NodePlace("a Kubernetes indexed Job", 1, 2, "train-0.train.default.svc.cluster.local"),
        ),
        (
            KUBERNETES | {"LOCKSTEP_NODES": "1", "JOB_COMPLETION_INDEX": "0"},
            NodePlace("a Kubernetes indexed Job", 0, 1, POD),
        ),
        (SAGEMAKER, NodePlace("SageMaker", 1, 2, "algo-1")),
        (JOBSET, NodePlace("a Kubernetes indexed Job", 1, 2, "train-node-0-0.train")),
        (
            JOBSET | {"MASTER_PORT": "3389"},
            NodePlace("a Kubernetes indexed Job", 1, 2, "train-node-0-0.train", 3389),
        ),
        (PYTORCHJOB, NodePlace("Kubeflow Trainer", 1, 2, "train-master-0", 23456)),
        (SLURM_STEP, NodePlace("Slurm", 0, 1, "node0")),
        (SLURM_BATCH | {"SLURM_JOB_NUM_NODES": "1"}, NodePlace("Slurm", 0, 1, "node0")),
        (SLURM_STEP | SKYPILOT, NodePlace("SkyPilot", 1, 2, "10.0.0.4")),
        ({"HOME": "/root", "SKYPILOT_USER": "me"}, None),
    ],
)
def test_every_scheduler(variables: Variables, found: NodePlace | None) -> None:
    assert find_node(variables, POD) == found


@pytest.mark.parametrize(
    ("variables", "named", "said"),
    [
        (
            SKYPILOT | {"SKYPILOT_NODE_RANK": "2"},
            "SKYPILOT_NODE_RANK",
            "a whole number from 0 to 1, got 2",
        ),
        (SKYPILOT | {"SKYPILOT_NODE_IPS": "\n"}, "SKYPILOT_NODE_IPS", "an address for each node"),
        (
            {"DSTACK_NODE_RANK": "0"},
            "DSTACK_NODES_NUM",
            "a whole number from 1 or more, got nothing",
        ),
        (
            KUBEFLOW | {"PET_NNODES": "1:4"},
            "PET_NNODES",
            "the number of nodes; give the limits .* --elastic, got 1:4",
        ),
        (
            KUBEFLOW | {"PET_MASTER_PORT": "70000"},
            "PET_MASTER_PORT",
            "a whole number from 1 to 65535, got 70000",
        ),
        (
            {"JOB_COMPLETION_INDEX": "1"},
            "LOCKSTEP_NODES",
            "the number of pods, as `completions` of the Job",
        ),
        (
            KUBERNETES | {"JOB_COMPLETION_INDEX": "0"},
            "JOB_COMPLETION_INDEX",
            "the end of the .* got 0 on train-1",
        ),
        (
            JOBSET | {"LOCKSTEP_NODE_RANK": "2"},
            "LOCKSTEP_NODE_RANK",
            "a whole number from 0 to 1, got 2",
        ),
        (
            SLURM_BATCH,
            "SLURM_JOB_NUM_NODES",
            "1 node, got 2 in a process that srun has not started. Start a launcher",
        ),
        (SLURM_STEP | {"SLURM_STEP_NODELIST": "a[1"}, "SLURM_STEP_NODELIST", "a list of nodes"),
        (SAGEMAKER | {"SM_HOSTS": "algo-1"}, "SM_HOSTS", "a list"),
        (SAGEMAKER | {"SM_HOSTS": "[]"}, "SM_HOSTS", "a list"),
        (
            SAGEMAKER | {"SM_CURRENT_HOST": "algo-3"},
            "SM_CURRENT_HOST",
            "one of algo-1, algo-2, got algo-3",
        ),
    ],
)
def test_what_is_wrong_is_named(variables: Variables, named: str, said: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^environment variable {named} \(.*\): expected {said}"
    ):
        find_node(variables, POD)


def test_the_place_becomes_the_launchers() -> None:
    config = JobOptions.parse({"nnodes": "auto", "workers": "4", "program": ("train.py",)})
    found = config_for_node(config, SKYPILOT, POD)
    assert (found.nnodes, found.node_rank, found.master_addr, found.master_port) == (
        2,
        1,
        "10.0.0.4",
        29500,
    )
    assert config_for_node(config, KUBEFLOW, POD).master_port == 29400
    with pytest.raises(
        ConfigError,
        match=r"nnodes: expected a node of SkyPilot.* or Slurm, got no variables of any",
    ):
        config_for_node(config, {"HOME": "/root"}, POD)


def test_a_pods_rank_is_not_that_of_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in PYTORCHJOB.items():
        monkeypatch.setenv(name, value)
    assert environment.is_launched() and environment.gives_nodes_ranks()
    monkeypatch.setenv("LOCAL_RANK", "0")  # a worker that the pod's launcher has started
    assert not environment.gives_nodes_ranks()


def test_ray_trains_workers_know_their_ranks() -> None:
    """Ray's own names are torchrun's, but for the node."""
    variables = {
        "RANK": "2",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": "1",
    }
    world = environment.find_world(variables | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "41235"})
    assert (world.rank, world.world_size, world.local_rank, world.local_world_size) == (2, 4, 0, 2)
    assert (world.node, world.nodes) == (1, 2)
