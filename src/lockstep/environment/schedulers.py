"""Which of a job's nodes this is, from the variables of the scheduler that has given them
(pure).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..errors import ConfigError
from .launchers import expand_nodes
from .variable_table import NODE_RANK, NODES

__all__ = ["SCHEDULERS", "NodePlace", "find_node"]


@dataclass(frozen=True, slots=True)
class NodePlace:
    """A node's place in a job.

    Attributes:
        scheduler: who has given the nodes.
        node: the number of this node, from 0.
        nodes: their number.
        address: name or address of node 0, as the others reach it.
        port: that is free there; None if the scheduler has chosen none.
    """

    scheduler: str
    node: int
    nodes: int
    address: str
    port: int | None = None


@dataclass(frozen=True, slots=True)
class Scheduler:
    """The variables by which a scheduler tells a process its node.

    Attributes:
        title: its name in messages.
        marker: a variable that it alone sets.
        read: the place, from all variables and the fully qualified name of this host.
    """

    title: str
    marker: str
    read: Callable[[_Variables, str], tuple[int, int, str, int | None]]


class _Variables:
    """The variables of one scheduler; what is missing or invalid is an error that names it."""

    def __init__(self, env: Mapping[str, str], title: str) -> None:
        self._env = env
        self._title = title

    def has(self, name: str) -> bool:
        return bool(self._env.get(name, "").strip())

    def text(self, name: str, expected: str) -> str:
        value = self._env.get(name, "").strip()
        if not value:
            raise self.error(name, expected, "nothing")
        return value

    def number(self, name: str, least: int, most: int | None = None, expected: str = "") -> int:
        upper = f" to {most}" if most is not None else " or more"
        expected = expected or f"a whole number from {least}{upper}"
        text = self.text(name, expected)
        if (
            not re.fullmatch(r"\d{1,9}", text)
            or int(text) < least
            or (most is not None and int(text) > most)
        ):
            raise self.error(name, expected, text)
        return int(text)

    def error(self, name: str, expected: str, found: str) -> ConfigError:
        hint = "Or leave --nodes auto out, and give --nnodes, --node-rank and --master-addr."
        return ConfigError(
            f"environment variable {name} ({self._title})", expected, found=found, hint=hint
        )


def _skypilot(env: _Variables, host: str) -> tuple[int, int, str, int | None]:
    nodes = env.number("SKYPILOT_NUM_NODES", 1)
    addresses = env.text(
        "SKYPILOT_NODE_IPS", "an address for each node, on a line of its own"
    ).split()
    return env.number("SKYPILOT_NODE_RANK", 0, nodes - 1), nodes, addresses[0], None


def _dstack(env: _Variables, host: str) -> tuple[int, int, str, int | None]:
    nodes = env.number("DSTACK_NODES_NUM", 1)
    address = env.text("DSTACK_MASTER_NODE_IP", "the address of the first node")
    return env.number("DSTACK_NODE_RANK", 0, nodes - 1), nodes, address, None


def _kubeflow(env: _Variables, host: str) -> tuple[int, int, str, int | None]:
    nodes = env.number(
        "PET_NNODES",
        1,
        expected="the number of nodes; give the limits of an elastic job by --elastic",
    )
    address = env.text("PET_MASTER_ADDR", "the name or address of the first node")
    node = env.number("PET_NODE_RANK", 0, nodes - 1)
    return node, nodes, address, env.number("PET_MASTER_PORT", 1, 65535)


def _sagemaker(env: _Variables, host: str) -> tuple[int, int, str, int | None]:
    text = env.text("SM_HOSTS", 'a list such as ["algo-1", "algo-2"]')
    try:
        hosts = json.loads(text)
    except ValueError:
        hosts = None
    if not isinstance(hosts, list) or not hosts or not all(isinstance(name, str) for name in hosts):
        raise env.error("SM_HOSTS", 'a list such as ["algo-1", "algo-2"]', text)
    this_host = env.text("SM_CURRENT_HOST", "one of SM_HOSTS")
    if this_host not in hosts:
        raise env.error("SM_CURRENT_HOST", f"one of {', '.join(hosts)}", this_host)
    return hosts.index(this_host), len(hosts), hosts[0], None


def _kubernetes(env: _Variables, host: str) -> tuple[int, int, str, int | None]:
    # Nothing tells a pod the number of pods. JobSet may run each node as a Job of its own, whose
    # pods all have index 0: then the manifest takes the node's number and the coordinator's address
    # from JobSet's labels.
    nodes = env.number(NODES.name, 1, expected="the number of pods, as `completions` of the Job")
    index = NODE_RANK.name if env.has(NODE_RANK.name) else "JOB_COMPLETION_INDEX"
    node = env.number(index, 0, nodes - 1)
    port = env.number("MASTER_PORT", 1, 65535) if env.has("MASTER_PORT") else None
    if env.has("MASTER_ADDR"):
        return node, nodes, env.text("MASTER_ADDR", "the name or address of the first pod"), port
    # a pod of an indexed Job is called JOB-INDEX, with the domain of the headless service
    name, dot, domain = host.partition(".")
    if nodes > 1 and not name.endswith(f"-{node}"):
        raise env.error(
            index, "the end of the pod's host name, such as 3 for train-3", f"{node} on {name}"
        )
    if nodes <= 1:
        return node, nodes, host, port
    job = name.removesuffix(f"-{node}")
    return node, nodes, f"{job}-0{dot}{domain}", port


def _slurm(env: _Variables, host: str) -> tuple[int, int, str, int | None]:
    # a step of several tasks is a job of that many launchers, see `launchers`; here are those of
    # one task, and scripts
    nodes = env.number("SLURM_JOB_NUM_NODES", 1)
    if nodes > 1 and not env.has("SLURM_STEP_ID"):
        hint = "Start a launcher on each node: srun --ntasks-per-node=1 lockstep run ..."
        found = f"{nodes} in a process that srun has not started"
        raise ConfigError(
            "environment variable SLURM_JOB_NUM_NODES (Slurm)", "1 node", found=found, hint=hint
        )
    name = "SLURM_STEP_NODELIST" if env.has("SLURM_STEP_ID") else "SLURM_JOB_NODELIST"
    text = env.text(name, "a list of nodes such as node[01-03],gpu4")
    try:
        return 0, 1, expand_nodes(text)[0], None
    except ValueError:
        raise env.error(name, "a list of nodes such as node[01-03],gpu4", text) from None


SCHEDULERS = (
    Scheduler("SkyPilot", "SKYPILOT_NODE_RANK", _skypilot),
    Scheduler("dstack", "DSTACK_NODE_RANK", _dstack),
    Scheduler("Kubeflow Trainer", "PET_NODE_RANK", _kubeflow),
    Scheduler("SageMaker", "SM_CURRENT_HOST", _sagemaker),
    Scheduler("a Kubernetes indexed Job", "JOB_COMPLETION_INDEX", _kubernetes),
    Scheduler("Slurm", "SLURM_JOB_ID", _slurm),
)
"""In order of precedence: the others run pods of indexed Jobs, or may; SkyPilot also has nodes of
Slurm.
"""


def find_node(env: Mapping[str, str], host: str) -> NodePlace | None:
    """Return the place that a scheduler has given this node; None if none has.

    Args:
        env: the variables.
        host: the fully qualified name of this host.

    Raises:
        ConfigError: a variable is missing or invalid.
    """
    for scheduler in SCHEDULERS:
        if scheduler.marker in env:
            return NodePlace(
                scheduler.title, *scheduler.read(_Variables(env, scheduler.title), host)
            )
    return None
