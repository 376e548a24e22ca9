"""An elastic job on Ray: an actor on each node runs the launcher of that host, and nodes come and
go as it trains.
"""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import environment
from ..errors import LockstepError, WorkerError
from ..interruption import collect_signals
from ..job.messages import HostDescription
from ..launcher.host_description import check_compatible, describe_host
from ..launcher.options import JobOptions
from ..launcher.script import Script
from ..system.socket_folders import short_base
from .relay import Item, RelayedLog, Screen, forwarded_variables
from .resources import Placement, capacity, find_nodes, raise_signal, spread, wait_for_slots

if TYPE_CHECKING:
    from ..launcher.elastic_host import ElasticHost
    from ..launcher.elastic_node import Listener

__all__ = ["choose_error", "run_job"]

# What loads PyTorch is imported in the methods, after the actor's environment is set.


# --- In the actor of a node
# -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call(Script):
    """A pickled call as the program of the workers of a host; rank 0 leaves its value in a file.

    Attributes:
        folder: with the call, and then with the value.
    """

    folder: Path = Path()

    def run(self) -> None:
        """Run it in this process."""
        from ..communicator.initialization import current
        from ..launcher.worker_status import run_stored_call

        def find_rank() -> int:
            comm = current()  # which knows the rank of a worker after others were lost
            return environment.find_world().rank if comm is None else comm.rank

        run_stored_call(self.folder / "call", self.folder / "value", find_rank)


@dataclass(frozen=True)
class NodeEnd:
    """How the part of a node ended.

    Attributes:
        value: of rank 0, pickled, if it ran there.
        error: of the job.
        cause: of the error.
        is_over: whether the job is over on all nodes.
    """

    value: bytes | None = None
    error: BaseException | None = None
    cause: BaseException | None = None
    is_over: bool = False


class NodeActor:
    """Runs the launcher of one host of an elastic job.

    Args:
        variables: of the environment.
    """

    def __init__(self, variables: Mapping[str, str]) -> None:
        environment.set_variables(variables)
        self._log = RelayedLog()
        self._host: ElasticHost | None = None
        self._listener: Listener | None = None
        self._address: tuple[str, int] | None = None

    def describe(self) -> HostDescription:
        """Return the description of this host."""
        return describe_host(0)

    def listen(self) -> tuple[str, int]:
        """Listen for the launchers of the other hosts; returns the address."""
        import ray

        from ..launcher.elastic_node import Listener

        self._listener = Listener(ray.util.get_node_ip_address())
        return self._listener.address, self._listener.port

    def run(
        self, call: bytes, config: JobOptions, slots: int, addresses: list[tuple[str, int]]
    ) -> NodeEnd:
        """Run this host's part of the job.

        Args:
            call: pickled.
            config: of this host.
            slots: the most workers here.
            addresses: of launchers of the job; those of this one, if it founds the job.
        """
        with tempfile.TemporaryDirectory(prefix="lockstep-ray-", dir=short_base()) as name:
            folder = Path(name)
            error = None
            (folder / "call").write_bytes(call)
            try:
                self._take_part(Call("function", folder=folder), config, slots, addresses)
            except (LockstepError, KeyboardInterrupt) as raised:
                error = raised
            finally:
                self._log.close()
            value = None
            with suppress(FileNotFoundError):
                value = (folder / "value").read_bytes()
            cause = error.__cause__ if error is not None else None
            return NodeEnd(value, error, cause, self._host is not None and self._host.knows_outcome)

    def _take_part(
        self, call: Call, config: JobOptions, slots: int, addresses: list[tuple[str, int]]
    ) -> None:
        from ..launcher.elastic_node import found_job, join_job
        from ..launcher.fork_server import prepare_workers
        from ..launcher.local import elastic_setup

        prepare_workers(config, slots)
        setup = elastic_setup(call, config, slots, self._log)
        if self._listener is not None:
            found_job(config, setup, slots, self._listener, self._watch)
        else:
            join_job(addresses, config, setup, slots, self._watch, config.start_timeout)

    def _watch(self, host: ElasticHost | None) -> None:
        self._host = host or self._host
        if host is not None:
            self._address = host.mesh.own.address, host.mesh.own.port

    def poll(self, seconds: float) -> tuple[list[Item], tuple[str, int] | None]:
        """Return the output since the last call, and where this launcher listens, if it takes
        part.
        """
        return self._log.take(seconds), self._address

    def signal(self, number: int) -> None:
        """Forward a signal to the whole job."""
        if self._host is not None:
            self._host.job_signals.append(number)


# --- In the driver
# --------------------------------------------------------------------------------------------------

_POLL_S = 0.2
_OUTPUT_S = 1.0  # for which an actor waits for output before it answers
_LOOK_S = 1.0  # between two looks for nodes
_AGAIN_S = 10.0  # until a node whose actor was lost is used again, if it is still there
_START_S = 120.0  # for all nodes to take part


def choose_error(ends: list[NodeEnd]) -> BaseException | None:
    """Return the error of the job with its cause: the one of the node that knows which worker
    failed.
    """
    failed = [end for end in ends if end.error is not None]
    knows = [
        end
        for end in failed
        if isinstance(end.error, WorkerError) or isinstance(end.cause, WorkerError)
    ]
    over = [end for end in failed if end.is_over]
    for end in (*knows, *over, *failed):
        assert end.error is not None
        end.error.__cause__ = end.cause
        return end.error
    return None


def run_job(call: bytes, limits: tuple[int, int], placement: Placement) -> bytes | None:
    """Run the pickled call in an elastic job of the least to the most workers; returns the pickled
    value of rank 0.

    Raises:
        as `lockstep.ray.launch`.
    """
    signals: list[int] = []
    with collect_signals(signals):
        job = _Job(call, limits, placement, signals)
        try:
            job.start()
            job.watch()
            return job.finish()
        finally:
            job.remove()


@dataclass
class _Part:
    """What the driver knows of a node: its actor, its slots, and where its launcher listens."""

    key: str
    actor: Any
    slots: int
    name: str
    address: tuple[str, int] | None = None


@dataclass
class _Job:
    """An elastic job as the driver sees it.

    Args:
        call: pickled.
        limits: the least and the most workers.
        placement: of each.
        signals: that this process receives; a handler appends.
    """

    call: bytes
    limits: tuple[int, int]
    placement: Placement
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

    def start(self) -> None:
        """Start the actors of all nodes that have room, and the job in them."""
        import ray

        self._variables = forwarded_variables(self.placement.worker_threads)
        self._variables["LOCKSTEP_JOB_KEY"] = secrets.token_hex(16)
        least, most = self.limits
        slots = wait_for_slots(least, most, self.placement.resources, self.signals)
        names = {node.key: node.name for node in find_nodes()}
        self._reference = ray.put(self.call)
        parts = [self._make_part(key, names.get(key, key), count) for key, count in slots.items()]
        try:
            check_compatible(
                [describe_host(0), *ray.get([part.actor.describe.remote() for part in parts])]
            )
            address, port = ray.get(parts[0].actor.listen.remote())
        except ray.exceptions.RayError as error:
            from .rank_actors import describe_start

            raise LockstepError(describe_start(error)) from error
        config = self._config(address, port)
        for node, part in enumerate(parts):
            own = replace(config, nnodes=len(parts), node_rank=node)
            self._run_part(part, own, [(address, port)])

    def _config(self, address: str, port: int) -> JobOptions:
        threads = self.placement.worker_threads
        grace = self.placement.grace
        return JobOptions(
            ("function",),
            elastic=self.limits,
            threads=threads,
            grace=grace,
            master_addr=address,
            master_port=port,
            quiet=True,
            start_timeout=_START_S,
        )

    def _make_part(self, key: str, name: str, slots: int) -> _Part:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        options = self.placement.options(slots) | {"max_concurrency": 4}
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(key, soft=False)
        actor = ray.remote(NodeActor).options(**options).remote(self._variables)
        part = _Part(key, actor, slots, name)
        self._parts.append(part)
        return part

    def _run_part(self, part: _Part, config: JobOptions, addresses: list[tuple[str, int]]) -> None:
        self._pending[part.actor.run.remote(self._reference, config, part.slots, addresses)] = (
            "run",
            part,
        )
        self._pending[part.actor.poll.remote(_OUTPUT_S)] = ("poll", part)

    # --- while it runs

    def watch(self) -> None:
        """Show output, forward signals, and use nodes that are added, until the job is over on all
        nodes.
        """
        import ray

        while any(kind == "run" for kind, _ in self._pending.values()):
            ready, _ = ray.wait(list(self._pending), timeout=_POLL_S)
            for reference in ready:
                kind, part = self._pending.pop(reference)
                (self._note_end if kind == "run" else self._note_output)(reference, part)
            while self._forwarded < len(self.signals):
                self._forward(self.signals[self._forwarded])
                self._forwarded += 1
            if time.monotonic() >= self._next_look and not (self._is_ending or self.signals):
                self._next_look = time.monotonic() + _LOOK_S
                self._use_new_nodes()

    def _note_end(self, reference: Any, part: _Part) -> None:
        import ray

        try:
            end = ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            raise LockstepError(f"the launcher on {part.name} failed: {error.cause!r}") from error
        except ray.exceptions.RayError:
            self._forget(part)
            return
        self._ends.append(end)
        self._is_ending = self._is_ending or end.is_over or end.error is not None
        self._again_at[part.key] = time.monotonic() + _AGAIN_S

    def _forget(self, part: _Part) -> None:
        """The actor of a node is lost; the launchers of the others know that already."""
        if part in self._parts:
            self._parts.remove(part)
            self._again_at[part.key] = time.monotonic() + _AGAIN_S

    def _note_output(self, reference: Any, part: _Part) -> None:
        import ray

        try:
            items, part.address = ray.get(reference)
        except ray.exceptions.RayError:
            self._forget(part)
            return
        self._screen.show(items)
        if items or any(kind == "run" and other is part for kind, other in self._pending.values()):
            self._pending[part.actor.poll.remote(_OUTPUT_S)] = ("poll", part)

    def _forward(self, number: int) -> None:
        for part in self._parts:
            part.actor.signal.remote(number)

    def _use_new_nodes(self) -> None:
        """Start actors on nodes that have room, and that no actor of this job is on, up to the most
        workers.
        """
        addresses = [part.address for part in self._parts if part.address is not None]
        room = self.limits[1] - sum(part.slots for part in self._parts)
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

    # --- the end

    def finish(self) -> bytes | None:
        """Return the value of rank 0, or raise the error of the job."""
        import ray

        for reference, (_, part) in list(self._pending.items()):  # the last output
            with suppress(ray.exceptions.RayError):
                self._screen.show(ray.get(reference, timeout=2 * _OUTPUT_S)[0])
                self._screen.show(ray.get(part.actor.poll.remote(0), timeout=_OUTPUT_S)[0])
        self._screen.close()
        error = choose_error(self._ends)
        if error is not None:
            raise error
        if not self._ends:
            self._raise_lost()
        return next((end.value for end in self._ends if end.value is not None), None)

    def _raise_lost(self) -> None:
        raise_signal(self.signals, "with all nodes of the job")
        raise LockstepError(
            "all nodes of the job were lost, and the state of the training with them"
        )

    def remove(self) -> None:
        """Remove all actors."""
        import ray

        self._screen.close()
        with suppress(Exception):  # the cluster is gone
            for part in self._parts:
                ray.kill(part.actor)
