"""A job on Ray as its driver sees it: the agents of its nodes, output, signals, and the end."""

from __future__ import annotations

import re
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from ..environment.variable_table import JOB_KEY
from ..errors import LockstepError, WorkerError
from ..interruption import collect_signals
from ..job.messages import WATCHDOG_ERROR_KINDS
from ..launcher.options import JobOptions
from ..launcher.remote_hosts.host_description import check_compatible, describe_host
from ..stores import LOOPBACK
from .agent import AgentActor, NodeEnd
from .relay import Screen, forwarded_variables
from .resources import (
    Placement,
    capacity,
    find_nodes,
    raise_signal,
    reserve,
    spread,
    wait_for_slots,
)

_POLL_S = 0.2
_OUTPUT_S = 1.0  # for which an actor waits for output before it answers
_LOOK_S = 1.0  # between two looks for nodes
_AGAIN_S = 10.0  # until a node whose actor was lost is used again, if it is still there
_START_S = 120.0  # for all nodes to take part
_LOST_S = 10.0  # for the agents of a fixed job to end after one was lost

# Ray 2.60 says after 13 s that a node is gone whose processes were killed, and after 63 s that one
# does not answer.
_UNREACHABLE_S = 90.0


def choose_error(ends: list[NodeEnd]) -> BaseException | None:
    """Return the error of the job with its cause: the one of the node that knows which worker
    failed; or what the workers of all nodes have raised alike, as they do after a desync.
    """
    failed = [end for end in ends if end.error is not None]
    alike = {(type(end.error_here), str(end.error_here)) for end in ends}
    for end in failed:
        first = end.error
        repeats = (
            isinstance(first, WorkerError)
            and bool(first.report_json)
            and first.kind in WATCHDOG_ERROR_KINDS
        )
        if end.error_here is not None and (len(alike) == 1 or repeats):
            end.error_here.__cause__ = end.cause_here
            return end.error_here
    knows = [
        end
        for end in failed
        if isinstance(end.error, WorkerError) or isinstance(end.cause, WorkerError)
    ]
    # of the nodes of a fixed job only that of the worker has its traceback
    knows.sort(key=lambda end: not getattr(end.error, "worker_traceback", "-"))
    over = [end for end in failed if end.is_over]
    for end in (*knows, *over, *failed):
        assert end.error is not None
        end.error.__cause__ = None if isinstance(end.error, WorkerError) else end.cause
        return end.error
    return None


def describe_loss(node: str, message: str) -> str:
    """Return what was lost with an agent, its node or its process alone, from Ray's message.

    Args:
        node: its name.
        message: of the error that Ray raises for a call to the agent.
    """
    if "its node has died" in message:
        return f"node {node} was lost"
    code = re.search(r"exits? with an? exit code (\d+)", message)
    if code:
        return f"agent on {node} ended with exit code {code[1]}"
    if "OutOfMemory" in message or "ran low on memory" in message or "memory pressure" in message:
        return f"agent on {node} was killed by Ray, because its node ran out of memory"
    if "worker process has died" in message:
        return (
            f"agent on {node} died without a message: killed by a signal (as the kernel does when "
            "memory runs out)"
        )
    return f"agent on {node} was lost: {_last_line(message)}"


def describe_start(error: Exception) -> str:
    """Return why an actor could not be started, from Ray's error."""
    text = str(error).strip()
    if "No module named 'lockstep'" in text:
        return (
            "Lockstep is not installed on all nodes of the Ray cluster. Install the same version "
            "on each, or let Ray do it: ray.init(runtime_env={'pip': ['lockstep-train']})"
        )
    return f"the workers could not be started on Ray: {_last_line(text) or type(error).__name__}"


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def run_job(
    call: bytes, workers: int | tuple[int, int], placement: Placement, uses_ray: bool
) -> bytes | None:
    """Run the pickled call in a job; returns the pickled value of rank 0.

    Args:
        call: pickled.
        workers: their number, or the least and the most in an elastic job.
        placement: of each.
        uses_ray: whether the call holds what can be rebuilt only with a connection to the cluster.

    Raises:
        as `lockstep.ray.launch`.
    """
    signals: list[int] = []
    with collect_signals(signals):
        job = _Job(call, workers, placement, uses_ray, signals)
        try:
            job.start()
            job.watch()
            return job.finish()
        finally:
            job.remove()


@dataclass
class _Part:
    """What the driver knows of a node: its agent, its workers or slots, where the agent listens,
    and since when Ray has not reached it.
    """

    key: str
    actor: Any
    slots: int
    name: str
    first_rank: int = 0
    address: tuple[str, int] | None = None
    unreachable_since: float | None = None


@dataclass
class _Job:
    """A job as the driver sees it.

    Args:
        call: pickled.
        workers: their number, or the least and the most in an elastic job.
        placement: of each.
        uses_ray: whether its workers connect to the cluster before they rebuild the call.
        signals: that this process receives; a handler appends.
    """

    call: bytes
    workers: int | tuple[int, int]
    placement: Placement
    uses_ray: bool
    signals: list[int]
    _screen: Screen = field(default_factory=Screen)
    _parts: list[_Part] = field(default_factory=list)  # of living actors
    _pending: dict[Any, tuple[str, _Part]] = field(default_factory=dict)
    _ends: list[NodeEnd] = field(default_factory=list)
    _again_at: dict[str, float] = field(default_factory=dict)
    _reference: Any = None
    _forwarded: int = 0
    _next_look: float = 0.0
    _is_ending: bool = False
    _group: Any = None
    _lost: list[tuple[_Part, str]] = field(default_factory=list)  # with what was lost
    _lost_at: float = 0.0

    def start(self) -> None:
        """Start the agents, and the job in them."""
        import ray

        self._variables = forwarded_variables(self.placement.worker_threads)
        self._variables[JOB_KEY.name] = secrets.token_hex(16)
        self._reference = ray.put(self.call)
        parts = self._make_parts()
        try:
            descriptions = self._get([part.actor.describe.remote() for part in parts])
            check_compatible([describe_host(0), *descriptions])
            address = LOOPBACK
            port = 0
            if isinstance(self.workers, tuple) or len(parts) > 1:
                ((address, port),) = self._get([parts[0].actor.listen.remote()])
        except ray.exceptions.RayError as error:
            raise LockstepError(describe_start(error)) from error
        config = self._config(address, port)
        for node, part in enumerate(parts):
            of_node = replace(config, nnodes=len(parts), node_rank=node)
            self._run_part(part, of_node, [(address, port)])

    def _make_parts(self) -> list[_Part]:
        """Start an agent on each node on which the job begins."""
        from ray.util.placement_group import placement_group_table
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        needs = self.placement.resources
        if isinstance(self.workers, tuple):
            slots = wait_for_slots(*self.workers, needs, self.signals)
            names = {node.key: node.name for node in find_nodes()}
            return [self._make_part(key, names.get(key, key), slots[key]) for key in slots]
        self._group, counts = reserve(self.workers, needs, self.signals)
        names = {node.key: node.name for node in find_nodes()}
        keys = placement_group_table(self._group)["bundles_to_node_id"]
        for bundle, count in enumerate(counts):
            strategy = PlacementGroupSchedulingStrategy(self._group, bundle)
            key = keys[bundle]
            part = self._make_part(key, names.get(key, key), count, strategy)
            part.first_rank = sum(counts[:bundle])
        return list(self._parts)

    def _get(self, references: list[Any]) -> list[Any]:
        """Return what the agents answer at the start, which a signal ends."""
        import ray

        waiting = list(references)
        while waiting:
            _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=_POLL_S)
            raise_signal(self.signals, "before the workers had started")
        return list(ray.get(references))

    def _config(self, address: str, port: int) -> JobOptions:
        return JobOptions(
            ("function",),
            elastic=self.workers if isinstance(self.workers, tuple) else None,
            threads=self.placement.worker_threads,
            grace=self.placement.grace,
            master_addr=address,
            master_port=port,
            quiet=True,
            start_timeout=_START_S,
        )

    def _make_part(self, key: str, name: str, slots: int, strategy: Any = None) -> _Part:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        options = self.placement.options(slots) | {"max_concurrency": 4}
        options["scheduling_strategy"] = strategy or NodeAffinitySchedulingStrategy(key, soft=False)
        gpus = self.placement.resources.get("GPU", 0.0)
        agent = ray.remote(AgentActor).options(**options)
        config = self._config(LOOPBACK, 0)
        actor = agent.remote(self._variables, config, slots, gpus, self.uses_ray)
        part = _Part(key, actor, slots, name)
        self._parts.append(part)
        return part

    def _run_part(self, part: _Part, config: JobOptions, addresses: list[tuple[str, int]]) -> None:
        run = part.actor.run.remote(self._reference, config, part.slots, addresses)
        self._pending[run] = ("run", part)
        self._pending[part.actor.poll.remote(_OUTPUT_S)] = ("poll", part)

    def watch(self) -> None:
        """Show output, forward signals, and let an elastic job use nodes that are added, until the
        job is over on all nodes.
        """
        import ray

        while self._is_running():
            ready, _ = ray.wait(list(self._pending), timeout=_POLL_S)
            for reference in ready:
                kind, part = self._pending.pop(reference)
                (self._note_end if kind == "run" else self._note_output)(reference, part)
            while self._forwarded < len(self.signals):
                for other in self._parts:
                    other.actor.signal.remote(self.signals[self._forwarded])
                self._forwarded += 1
            self._give_up_unreachable()
            is_fixed = not isinstance(self.workers, tuple)
            if is_fixed and self._lost and time.monotonic() - self._lost_at > _LOST_S:
                return  # nobody waits longer for a node that Ray has given up
            if time.monotonic() >= self._next_look and not (self._is_ending or self.signals):
                self._next_look = time.monotonic() + _LOOK_S
                self._use_new_nodes()

    def _is_running(self) -> bool:
        """Return whether the end of an agent is waited for.

        An elastic job that is over waits for none that Ray does not reach, once its error or rank
        0's value is there.
        """
        has_outcome = any(
            end.is_over and (end.value is not None or end.error is not None) for end in self._ends
        )
        is_over = isinstance(self.workers, tuple) and has_outcome
        return any(
            kind == "run" and not (is_over and part.unreachable_since is not None)
            for kind, part in self._pending.values()
        )

    def _note_end(self, reference: Any, part: _Part) -> None:
        import ray

        try:
            end = ray.get(reference)
            part.unreachable_since = None
        except ray.exceptions.RayTaskError as error:
            raise LockstepError(f"the agent on {part.name} failed: {error.cause!r}") from error
        except ray.exceptions.ActorUnavailableError:
            self._note_unreachable(part)
            end = None
        except ray.exceptions.RayError as error:
            self._forget(part, describe_loss(part.name, f"{type(error).__name__} {error}"))
            return
        if end is None:
            self._pending[part.actor.wait.remote(_OUTPUT_S)] = ("run", part)
            return
        self._ends.append(end)
        self._is_ending = self._is_ending or end.is_over or end.error is not None
        self._again_at[part.key] = time.monotonic() + _AGAIN_S

    def _note_unreachable(self, part: _Part) -> None:
        """Ray does not reach an agent, and does not know yet whether that, or its node, is lost."""
        if part.unreachable_since is None:
            part.unreachable_since = time.monotonic()
            self._screen.show(
                [
                    f"lockstep: Ray does not reach the agent on {part.name}; waiting up to "
                    f"{_UNREACHABLE_S:g} s until Ray says whether it is lost"
                ]
            )

    def _give_up_unreachable(self) -> None:
        now = time.monotonic()
        for part in list(self._parts):
            since = part.unreachable_since
            if since is not None and now - since > _UNREACHABLE_S:
                self._pending = {
                    reference: (kind, other)
                    for reference, (kind, other) in self._pending.items()
                    if other is not part
                }
                limit = f"{_UNREACHABLE_S:g} s"
                self._forget(part, f"agent on {part.name} could not be reached for {limit}")

    def _forget(self, part: _Part, lost: str) -> None:
        """The agent of a node is lost; those of an elastic job know that already, and go on."""
        if part not in self._parts:
            return
        self._parts.remove(part)
        self._again_at[part.key] = time.monotonic() + _AGAIN_S
        self._lost.append((part, lost))
        self._lost_at = self._lost_at or time.monotonic()
        if not isinstance(self.workers, tuple):
            for other in self._parts:
                other.actor.end.remote(f"its {lost}")

    def _note_output(self, reference: Any, part: _Part) -> None:
        import ray

        try:
            items, part.address = ray.get(reference)
            part.unreachable_since = None
        except ray.exceptions.ActorUnavailableError:
            self._note_unreachable(part)
            items = []
        except ray.exceptions.RayError as error:
            self._forget(part, describe_loss(part.name, f"{type(error).__name__} {error}"))
            return
        self._screen.show(items)
        if items or any(kind == "run" and other is part for kind, other in self._pending.values()):
            self._pending[part.actor.poll.remote(_OUTPUT_S)] = ("poll", part)

    def _use_new_nodes(self) -> None:
        """Start agents on nodes that have room, and that no agent of this job is on, up to the most
        workers of an elastic job.
        """
        if not isinstance(self.workers, tuple):
            return
        # the room of a node that Ray does not reach is free: the agents keep to the most workers
        parts = [part for part in self._parts if part.unreachable_since is None]
        addresses = [part.address for part in parts if part.address is not None]
        room = self.workers[1] - sum(part.slots for part in parts)
        if not addresses or room <= 0:
            return
        used = {part.key for part in self._parts}
        now = time.monotonic()
        nodes = [
            node
            for node in find_nodes()
            if node.key not in used and self._again_at.get(node.key, 0.0) <= now
        ]
        free = {node.key: capacity(node.free, self.placement.resources) for node in nodes}
        names = {node.key: node.name for node in nodes}
        for key, slots in spread(free, room).items():
            part = self._make_part(key, names[key], slots)
            self._run_part(part, self._config(*addresses[0]), addresses)

    def finish(self) -> bytes | None:
        """Return the value of rank 0, or raise the error of the job."""
        import ray

        for reference, (kind, part) in list(self._pending.items()):  # the last output
            if kind != "poll" or part.unreachable_since is not None:
                continue
            with suppress(ray.exceptions.RayError):
                self._screen.show(ray.get(reference, timeout=2 * _OUTPUT_S)[0])
                self._screen.show(ray.get(part.actor.poll.remote(0), timeout=_OUTPUT_S)[0])
        self._screen.close()
        error = choose_error(self._ends)
        if self._lost and not self.signals and not isinstance(self.workers, tuple):
            self._raise_lost_agent(error)
        if error is not None:
            raise error
        value = next((end.value for end in self._ends if end.value is not None), None)
        if self._lost and value is None:
            raise_signal(self.signals, "with all nodes of the job")
            what = "all agents of the job were lost, and the state of the training with them"
            if self._ends:
                what = "rank 0 has returned no value, or it was lost with its agent"
            raise LockstepError(f"{what}: {self._lost[-1][1]}")
        return value

    def _raise_lost_agent(self, error: BaseException | None) -> None:
        """Raise the loss of a node of a fixed job, unless a worker of another one failed before."""
        part, lost = self._lost[0]
        is_cause = (
            isinstance(error, WorkerError) and error.worker_traceback and not error.in_collective
        )
        if is_cause and not getattr(error, "report_json", ""):
            return
        failure = WorkerError(part.first_rank, "exit", f"its {lost}")
        failure.host = part.name
        failure.report_json = getattr(error, "report_json", "")
        raise failure

    def remove(self) -> None:
        """Remove all actors and the placement group."""
        import ray
        from ray.util.placement_group import remove_placement_group

        self._screen.close()
        with suppress(Exception):  # the cluster is gone
            for part in self._parts:
                ray.kill(part.actor)
            if self._group is not None:
                remove_placement_group(self._group)
