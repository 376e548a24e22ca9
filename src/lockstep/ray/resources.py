"""What a Ray cluster has, and what a job needs of it: checks before anything waits, and the wait
itself.
"""

from __future__ import annotations

import json
import logging
import math
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from .. import arguments
from ..activity import Activity
from ..errors import ConfigError, InterruptedRunError, LockstepError

MOST_ON_A_NODE = 120
"""As `lockstep.launch` on a host."""


@dataclass(frozen=True)
class Node:
    """A living node of the cluster.

    Attributes:
        key: Ray's ID of the node.
        name: of its host.
        total: resources.
        free: the part of them that nobody has reserved.
    """

    key: str
    name: str
    total: Mapping[str, float]
    free: Mapping[str, float]


@dataclass(frozen=True)
class Placement:
    """What each worker gets.

    Attributes:
        resources: of Ray, such as CPU and GPU.
        threads: intra-op threads of PyTorch; None for one for each CPU.
        grace: seconds after a signal until workers that are still running are killed.
    """

    resources: Mapping[str, float]
    threads: int | None
    grace: float

    @property
    def worker_threads(self) -> int:
        """The intra-op threads of a worker."""
        return self.threads or max(1, int(self.resources.get("CPU", 1)))

    def options(self, workers: int = 1) -> dict[str, Any]:
        """Return the resources of so many workers as options of an actor."""
        needs = needs_of(workers, self.resources)
        cpus, gpus = (needs.pop(name, 0) for name in ("CPU", "GPU"))
        return {"num_cpus": cpus, "num_gpus": gpus, "resources": needs, "max_restarts": 0}


def needs_of(workers: int, resources: Mapping[str, float]) -> dict[str, float]:
    """Return the resources of so many workers of one node.

    Those that share GPUs get whole ones together, if they need more than one: Ray gives away
    nothing in between.
    """
    needs = {name: workers * amount for name, amount in resources.items()}
    part = resources.get("GPU", 1.0)
    if part < 1 and needs["GPU"] > 1:
        needs["GPU"] = float(math.ceil(workers / _count_in(1.0, part)))
    return needs


def _count_in(has: float, amount: float) -> int:
    """Return how many times an amount is in another one; Ray counts in units of 1/10000."""
    return round(has * 10_000) // max(1, round(amount * 10_000))


def check_resources(resources: object) -> dict[str, float] | None:
    """Return the resources of a worker as the user gives them; None if that is what is given.

    Raises:
        ConfigError: they are none, or an amount is no number above 0.
    """
    if resources is None:
        return None
    expected = 'a dict of amounts above 0 for each worker, such as {"CPU": 2, "GPU": 1}'
    if not isinstance(resources, Mapping) or not resources:
        raise ConfigError("resources", expected, resources)
    for name, amount in resources.items():
        arguments.text("resources", name, expected)
        arguments.number(f"resources[{name!r}]", amount, above=0, finite=True)
    gpus = resources.get("GPU", 1)
    if gpus > 1 and gpus != int(gpus):
        raise ConfigError(
            "resources['GPU']", "a whole number, or a part of one GPU, as Ray has it", gpus
        )
    return dict(resources)


def capacity(has: Mapping[str, float], needs: Mapping[str, float]) -> int:
    """Return how many workers that each need so much a node can hold that has so much."""
    counts = {name: _count_in(has.get(name, 0.0), amount) for name, amount in needs.items()}
    part = needs.get("GPU", 1.0)
    gpus = int(has.get("GPU", 0.0))
    if part < 1 and gpus:  # as `needs_of`: whole ones
        counts["GPU"] = gpus * _count_in(1.0, part)
    return max(0, min([MOST_ON_A_NODE, *counts.values()]))


def describe(needs: Mapping[str, float]) -> str:
    """Return ``1 CPU and 0.5 GPU``."""
    *most, last = (f"{amount:g} {name}" for name, amount in needs.items())
    return f"{', '.join(most)} and {last}" if most else last


def check_capacity(nodes: Sequence[Node], workers: int, needs: Mapping[str, float]) -> None:
    """Check that the cluster can hold the workers once nobody else uses it: Ray would wait for
    ever.

    Raises:
        ConfigError: it cannot.
    """
    most = sum(capacity(node.total, needs) for node in nodes)
    if workers <= most:
        return
    total = {name: sum(node.total.get(name, 0) for node in nodes) for name in needs}
    there = f"the cluster has {describe(total)} on {len(nodes)} node{'s'[: len(nodes) != 1]}"
    needs_each = f"each needs {describe(needs)}"
    missing = {
        name: workers * amount - total[name]
        for name, amount in needs.items()
        if workers * amount > total[name]
    }
    lacks = f"{describe(missing)} missing" if missing else "no node has enough of all at once"
    hint = (
        "Start fewer workers, reserve less for each with resources=, or add nodes to the cluster."
    )
    raise ConfigError(
        "workers",
        f"at most {most}: {needs_each}, and {there}",
        found=f"{workers} ({lacks})",
        hint=hint,
    )


def spread(free: Mapping[str, int], most: int) -> dict[str, int]:
    """Divide at most so many slots among nodes, as evenly as their free room allows; nodes without
    any are left out.

    Args:
        free: how many workers each node has room for.
        most: all slots together.
    """
    slots = dict.fromkeys(free, 0)
    for _ in range(most):
        open_nodes = [key for key in slots if slots[key] < free[key]]
        if not open_nodes:
            break
        slots[min(open_nodes, key=lambda key: slots[key])] += 1
    return {key: count for key, count in slots.items() if count}


def knows_node_types(status: bytes | None) -> bool:
    """Return whether an autoscaler is configured, from the status in JSON that Ray's monitor leaves
    in any cluster.

    Without a configuration each node is of a type of its own, called ``node_`` and its ID.
    """
    try:
        types = json.loads(status or b"{}")["autoscaler_report"]["node_type_mapping"]
        return any(name != f"node_{key}" for key, name in types.items())
    except (ValueError, KeyError, TypeError, AttributeError):
        return False


_WAIT_S = 0.5
_TAKEN_S = 5.0  # after which others have taken the room that was given back


def connect() -> None:
    """Connect this process to a cluster, unless it is connected.

    Raises:
        LockstepError: there is none at the address that RAY_ADDRESS gives.
    """
    import ray

    if ray.is_initialized():
        return
    with Activity("lockstep: starting Ray, or connecting to it"):
        try:
            ray.init(logging_level=logging.WARNING)
        except Exception as error:
            raise LockstepError(
                f"no connection to a Ray cluster: {type(error).__name__}: {error}"
            ) from error


def default_resources() -> dict[str, float]:
    """Return what each worker gets if the user does not say: a CPU, and a GPU where the cluster has
    any.
    """
    import ray

    return {"CPU": 1.0, "GPU": 1.0} if ray.cluster_resources().get("GPU", 0) else {"CPU": 1.0}


def find_nodes() -> list[Node]:
    """Return the living nodes of the cluster."""
    import ray

    free: dict[str, dict[str, float]] = {}
    with suppress(Exception):  # not part of Ray's stable interface; without it nodes count as free
        free = ray._private.state.available_resources_per_node()
    return [
        Node(
            node["NodeID"],
            node["NodeManagerHostname"],
            node["Resources"],
            free.get(node["NodeID"], node["Resources"]),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def has_autoscaler() -> bool:
    """Return whether nodes may be added to the cluster when somebody waits for resources."""
    # none of this is part of Ray's stable interface; Ray has no other way to tell
    with suppress(Exception):
        from ray.autoscaler.v2.utils import is_autoscaler_v2
        from ray.experimental.internal_kv import _internal_kv_get

        if is_autoscaler_v2(fetch_from_server=True):  # which has to be switched on
            return True
        return knows_node_types(_internal_kv_get("__autoscaling_status"))
    return False


def reserve(
    workers: int, needs: Mapping[str, float], signals: Sequence[int]
) -> tuple[Any, list[int]]:
    """Return a placement group with a bundle for each node of the job, and how many workers each
    bundle holds, as soon as the cluster has the resources free.

    Ray decides which nodes these are, for a group with a bundle for each worker. An agent holds the
    resources of all workers of its node, and an actor has to fit into one bundle: so that group is
    given back for one with a bundle for each node. If others take the room meanwhile, this begins
    again.

    Args:
        workers: their number.
        needs: the resources of each.
        signals: that this process receives; the first ends the wait.

    Raises:
        ConfigError: the cluster can never hold them, and nothing adds nodes to it.
        KeyboardInterrupt, InterruptedRunError: after a signal.
    """
    from ray.util.placement_group import placement_group_table, remove_placement_group

    if not has_autoscaler():
        check_capacity(find_nodes(), workers, needs)
    with Activity(_waiting_text(workers, needs)):
        while True:
            group = _make_group([dict(needs)] * workers, "PACK", math.inf, signals)
            nodes = placement_group_table(group)["bundles_to_node_id"].values()
            counts = sorted(Counter(nodes).values(), reverse=True)
            if counts[0] == 1:
                return group, counts
            remove_placement_group(group)
            bundles = [needs_of(count, needs) for count in counts]
            group = _make_group(bundles, "STRICT_SPREAD", _TAKEN_S, signals)
            if group is not None:
                return group, counts


def _make_group(
    bundles: list[dict[str, float]], strategy: str, seconds: float, signals: Sequence[int]
) -> Any:
    """Return a placement group once it has its resources; None if it has not after so long."""
    from ray.util.placement_group import placement_group, remove_placement_group

    deadline = time.monotonic() + seconds
    group = placement_group(bundles, strategy=strategy)
    try:
        while not group.wait(_WAIT_S):
            raise_signal(signals, "while the job waited for resources of the cluster")
            if time.monotonic() > deadline:
                remove_placement_group(group)
                return None
    except BaseException:
        remove_placement_group(group)
        raise
    return group


def wait_for_slots(
    least: int, most: int, needs: Mapping[str, float], signals: Sequence[int]
) -> dict[str, int]:
    """Return how many workers an elastic job has on each node at its start, once there is room for
    the least.

    Raises:
        as `reserve`.
    """
    if not has_autoscaler():
        check_capacity(find_nodes(), least, needs)
    with Activity(_waiting_text(least, needs)), ExitStack() as stack:
        while True:
            slots = spread({node.key: capacity(node.free, needs) for node in find_nodes()}, most)
            if sum(slots.values()) >= least:
                return slots
            raise_signal(signals, "while the job waited for resources of the cluster")
            _ask_autoscaler(least, needs, stack)
            time.sleep(_WAIT_S)


def _ask_autoscaler(workers: int, needs: Mapping[str, float], until: ExitStack) -> None:
    """Let the autoscaler add nodes, if there is one: nothing else asks for them before the nodes
    are known.
    """
    from ray.autoscaler.sdk import request_resources

    if has_autoscaler():
        request_resources(bundles=[dict(needs)] * workers)
        until.callback(request_resources, bundles=[])


def raise_signal(signals: Sequence[int], when: str) -> None:
    """Raise what ends a job that this process was asked to end by a signal, if it was."""
    if signals:
        number = signal.Signals(signals[0])
        if number is signal.SIGINT:
            raise KeyboardInterrupt(f"stopped {when}")
        raise InterruptedRunError(f"stopped by {number.name} {when}", number)


def _waiting_text(workers: int, needs: Mapping[str, float]) -> str:
    more = ", or for the autoscaler to add nodes" if has_autoscaler() else ""
    missing = f"{describe(needs)} for each of {workers} worker{'s'[: workers != 1]}"
    return f"lockstep: waiting for Ray to have {missing} free{more}"
