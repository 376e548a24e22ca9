"""The variables of every scheduler give a node its place in the job, and what is wrong in them is named."""

from __future__ import annotations

import pytest

from lockstep.environment.schedulers import NodePlace, find_node
from lockstep.errors import ConfigError
from lockstep.launcher.run_config import RunConfig
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
KUBERNETES = {"JOB_COMPLETION_INDEX": "1", "LOCKSTEP_NODES": "2", "KUBERNETES_SERVICE_HOST": "10.96.0.1"}
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
        (KUBERNETES, NodePlace("a Kubernetes indexed Job", 1, 2, "train-0.train.default.svc.cluster.local")),
        (
            KUBERNETES | {"LOCKSTEP_NODES": "1", "JOB_COMPLETION_INDEX": "0"},
            NodePlace("a Kubernetes indexed Job", 0, 1, POD),
        ),
        (SAGEMAKER, NodePlace("SageMaker", 1, 2, "algo-1")),
        ({"HOME": "/root", "SKYPILOT_USER": "me"}, None),
    ],
)
def test_every_scheduler(variables: Variables, found: NodePlace | None) -> None:
    assert find_node(variables, POD) == found


@pytest.mark.parametrize(
    ("variables", "named", "said"),
    [
        (SKYPILOT | {"SKYPILOT_NODE_RANK": "2"}, "SKYPILOT_NODE_RANK", "a whole number from 0 to 1, got 2"),
        (SKYPILOT | {"SKYPILOT_NODE_IPS": "\n"}, "SKYPILOT_NODE_IPS", "an address for each node"),
        ({"DSTACK_NODE_RANK": "0"}, "DSTACK_NODES_NUM", "a whole number from 1 or more, got nothing"),
        (KUBEFLOW | {"PET_NNODES": "1:4"}, "PET_NNODES", "the number of nodes; give the limits .* --elastic, got 1:4"),
        (KUBEFLOW | {"PET_MASTER_PORT": "70000"}, "PET_MASTER_PORT", "a whole number from 1 to 65535, got 70000"),
        ({"JOB_COMPLETION_INDEX": "1"}, "LOCKSTEP_NODES", "the number of pods, as `completions` of the Job"),
        (KUBERNETES | {"JOB_COMPLETION_INDEX": "0"}, "JOB_COMPLETION_INDEX", "the end of the .* got 0 on train-1"),
        (SAGEMAKER | {"SM_HOSTS": "algo-1"}, "SM_HOSTS", "a list"),
        (SAGEMAKER | {"SM_HOSTS": "[]"}, "SM_HOSTS", "a list"),
        (SAGEMAKER | {"SM_CURRENT_HOST": "algo-3"}, "SM_CURRENT_HOST", "one of algo-1, algo-2, got algo-3"),
    ],
)
def test_what_is_wrong_is_named(variables: Variables, named: str, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"^environment variable {named} \(.*\): expected {said}"):
        find_node(variables, POD)


def test_the_place_becomes_the_launchers() -> None:
    config = RunConfig.parse({"nnodes": "auto", "workers": "4", "program": ("train.py",)})
    found = config_for_node(config, SKYPILOT, POD)
    assert (found.nnodes, found.node_rank, found.master_addr, found.master_port) == (2, 1, "10.0.0.4", 29500)
    assert config_for_node(config, KUBEFLOW, POD).master_port == 29400
    with pytest.raises(ConfigError, match=r"nnodes: expected a node of SkyPilot.*, got no variables of any.*srun"):
        config_for_node(config, {"SLURM_JOB_ID": "7"}, POD)
