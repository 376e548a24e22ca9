"""A job of a fixed number of workers on Ray: an actor for each rank, and one on each node that
supervises its ranks.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import environment
from ..errors import LockstepError
from ..interruption import collect_signals
from ..job.messages import HostDescription, HostFailure
from ..launcher.host_description import check_compatible, describe_host
from ..launcher.worker_options import WorkerOptions
from ..system.job_folders import temporary_job_folder
from ..topology import World
from .relay import Item, RelayedLog, Screen, forwarded_variables
from .resources import Placement, find_nodes, raise_signal, reserve

if TYPE_CHECKING:
    from ..job.messages import Failure
    from ..launcher.local import HostJob
    from ..launcher.worker import WorkerSetup
    from ..launcher.worker_status import WorkerResults

__all__ = ["describe_end", "describe_start", "places_of", "run_job"]

# What loads PyTorch is imported in the methods, after the actor's environment is set.


# --- In the actor of a rank
# -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankEnd:
    """How a rank ended: the pickled value of rank 0, or the report on its failure."""

    value: bytes | None = None
    report: Failure | None = None


class RankActor:
    """A rank of the job. Its function runs in the main thread, as signals and the watchdog's errors
    need it.

    Args:
        variables: of the environment.
    """

    def __init__(self, variables: Mapping[str, str]) -> None:
        environment.set_variables(variables)
        # as in any other worker; Ray's handler would end the actor
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        from ..launcher import worker  # loads PyTorch, while the other actors start

        self._main = worker.main

    def run(
        self, call: bytes, setup: WorkerSetup, local_rank: int, variables: Mapping[str, str]
    ) -> RankEnd:
        """Run the pickled call as a worker."""
        from functools import partial

        from ..job import client as job_client
        from ..launcher.worker_status import run_call

        environment.set_variables(variables)
        value: Any = None
        with suppress(SystemExit):  # after a report
            value = self._main(partial(run_call, call), setup, local_rank)
        client = job_client.current()
        return RankEnd(value, None if client is None else client.failure)


# --- In the actor of a node
# -------------------------------------------------------------------------------------------

_POLL_S = 0.2


@dataclass(frozen=True)
class HostPlace:
    """The ranks of one node, which are consecutive.

    Attributes:
        key: Ray's ID of the node.
        name: of its host.
        node: its number in the job.
        nodes: how many nodes the job has.
        first_rank: the first of its ranks.
        bundles: of the placement group, one for each of its ranks.
        ranks: how many ranks the job has.
    """

    key: str
    name: str
    node: int
    nodes: int
    first_rank: int
    bundles: tuple[int, ...]
    ranks: int

    def world(self, local_rank: int) -> World:
        """Return the place of a rank."""
        count = len(self.bundles)
        return World(
            self.first_rank + local_rank,
            self.ranks,
            local_rank,
            count,
            self.node,
            self.nodes,
            "lockstep",
        )


class HostActor:
    """Supervises the ranks of one node, as a launcher does: signals, output, the watchdog's files,
    and results.

    On the node of the driver that is done in the driver itself: a process that loads PyTorch would
    delay the ranks.

    Args:
        variables: of the environment, for an actor.
        screen: which shows the output at once, in the driver.
    """

    def __init__(self, variables: Mapping[str, str], screen: Screen | None = None) -> None:
        environment.set_variables(variables)
        self._log = RelayedLog(screen.show if screen is not None else None)
        self._stack = ExitStack()
        self._job: HostJob | None = None
        self._store: Any = None
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._is_over = False

    def describe(self, workers: int) -> tuple[HostDescription, str, int]:
        """Return the description of this host, its address, and its time."""
        import ray

        return describe_host(workers), ray.util.get_node_ip_address(), time.time_ns()

    def serve(self, address: str, several: bool) -> int:
        """Serve the store of the job's ranks; returns its port."""
        from ..stores import serve_store

        self._store = serve_store(address, several_hosts=several)
        return int(self._store.port)

    def open(
        self, place: HostPlace, options: WorkerOptions, address: str, port: int
    ) -> tuple[WorkerSetup, list[dict[str, str]]]:
        """Prepare for the ranks of this node.

        Args:
            place: of this node.
            options: of its workers.
            address, port: of the store.

        Returns:
            The setup of all ranks, and the variables of each.
        """
        from ..launcher import links, local, log_multiplexer, worker

        folder = self._stack.enter_context(temporary_job_folder())
        hosts = links.OneHost()
        hosts.node = place.node
        hosts.nodes = place.nodes
        self._stack.callback(hosts.close)
        first = place.first_rank
        log = self._log
        write = lambda rank, stream, line: log.write(first + rank, stream, line)  # noqa: E731
        output = self._stack.enter_context(
            log_multiplexer.pipe_output(folder, range(options.workers), write)
        )
        job = self._job = local.HostJob(
            folder, options, hosts, output, log.write_message, "ray", False
        )
        job.start_attempt(0, first)
        for local_rank in range(options.workers):
            job.workers.add(local_rank, None)
        setup = worker.WorkerSetup(folder, options.threads, output, folder.name, "")
        shared = environment.variables_for_workers(folder.name, options.threads, None)
        shared |= _network_variables(address, place.nodes) | job.watchdog.variables()
        self._thread = threading.Thread(
            target=self._supervise, name="lockstep supervisor", daemon=True
        )
        self._thread.start()
        worlds = [place.world(local_rank) for local_rank in range(options.workers)]
        return setup, [
            shared | environment.world_variables(world, address, port) for world in worlds
        ]

    def poll(self, seconds: float) -> list[Item]:
        """Return the ranks' output since the last call; waits for so long until there is some."""
        return self._log.take(seconds)

    def signal(self, number: int) -> None:
        """Forward a signal to the ranks."""
        if self._job is not None:
            self._job.signals.append(number)

    def end(self, failure: HostFailure | None) -> None:
        """The job cannot continue: let the ranks report, with the failure of another host if there
        is one.
        """
        self._is_over = True
        if failure is not None and self._job is not None:
            self._job.watchdog.deliver_failure(failure)

    def close(self) -> tuple[WorkerResults, set[int], str | None, list[Item]]:
        """Return the results after the last rank has ended, the ranks killed, the checkpoint and
        the output.
        """
        from ..system.processes import end_orphans

        job = self._job
        assert job is not None
        self._closing.set()
        if self._thread is not None:
            self._thread.join()  # it reads the connections of the ranks
        results = job.results()
        checkpoint = job.workers.checkpoint
        killed = {rank for rank, worker in job.workers.all.items() if worker.is_ended_here}
        left = end_orphans(job.folder.name, keep_children=True)
        if left:
            job.log(f"lockstep: ended processes that the ranks left running: {left}")
        job.watchdog.close()
        job.workers.close()
        self._stack.close()
        self._log.close()
        return results, killed, checkpoint, self._log.take(0)

    def release(self) -> None:
        """Remove what `close` has not."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        if self._job is not None:
            self._job.watchdog.close()
            self._job.workers.close()
        self._stack.close()

    def _supervise(self) -> None:
        """Forward signals, enforce deadlines, and release the failed ranks once all have
        reported.
        """
        job = self._job
        assert job is not None and job.supervisor is not None
        while not self._closing.is_set():
            job.turn(_POLL_S)
            job.watchdog.relay_messages()
            job.supervisor.check(is_over=self._is_over)
            if self._is_over and all(worker.has_reported for worker in job.workers.all.values()):
                unfinished = [
                    rank for rank, worker in job.workers.all.items() if not worker.is_finished
                ]
                job.workers.end(unfinished, signal.SIGKILL)


def _network_variables(address: str, nodes: int) -> dict[str, str]:
    """Return the variables that make Gloo and NCCL use the network of the first host."""
    from ..launcher.links import interface_with_address
    from ..stores import loopback_variables
    from ..system.heartbeat import address_towards

    if nodes == 1:
        return loopback_variables()
    name = None
    with suppress(OSError):
        name = interface_with_address(address_towards(address))
    return {} if name is None else {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}


# --- In the driver
# --------------------------------------------------------------------------------------------------

_OUTPUT_S = 5.0  # for which an actor waits for output before it answers
_TOLD_S = 1.0  # for ranks to find out themselves, with more details, what the driver knows
_CLOSE_S = 10.0
_LOST_S = 5.0  # in which Ray notices that the actor of a node is gone with its ranks


def places_of(bundles: Mapping[int, str], names: Mapping[str, str]) -> list[HostPlace]:
    """Return the ranks of each node, consecutive on each.

    Args:
        bundles: the nodes of a placement group's bundles.
        names: of the nodes.
    """
    on_node: dict[str, list[int]] = {}
    for bundle, key in sorted(bundles.items()):
        on_node.setdefault(key, []).append(bundle)
    places = []
    first = 0
    for node, (key, own) in enumerate(on_node.items()):
        places.append(
            HostPlace(key, names.get(key, key), node, len(on_node), first, tuple(own), len(bundles))
        )
        first += len(own)
    return places


def describe_end(message: str) -> tuple[int, str]:
    """Return the exit code of an actor's process, 0 if it is not known, and how it ended, from
    Ray's message.
    """
    code = re.search(r"exits? with an? exit code (\d+)", message)
    if code:
        return int(code[1]), ""
    if "OutOfMemory" in message or "ran low on memory" in message or "memory pressure" in message:
        return 0, "killed by Ray, because its node ran out of memory"
    return 0, (
        "its process died without a message: killed by a signal (as the kernel does when memory "
        "runs out, and kill -9), or ended by os._exit"
    )


def run_job(call: bytes, workers: int, placement: Placement) -> bytes | None:
    """Run the pickled call in an actor for each of so many ranks; returns the pickled value of rank
    0.

    Raises:
        as `lockstep.ray.launch`.
    """
    signals: list[int] = []
    with collect_signals(signals):
        job = _Job(workers, placement, signals)
        try:
            job.start(call)
            job.watch()
            return job.finish()
        finally:
            job.remove()


class _Job:
    """A job as the driver sees it.

    Args:
        workers: number of ranks.
        placement: of each.
        signals: that this process receives; a handler appends.
    """

    def __init__(self, workers: int, placement: Placement, signals: list[int]) -> None:
        self._workers = workers
        self._placement = placement
        self._signals = signals
        self._screen = Screen()
        self._group: Any = None
        self._places: list[HostPlace] = []
        self._hosts: list[Any] = []
        self._ranks: list[Any] = []
        self._offsets: list[int] = []
        self._pending: dict[Any, tuple[str, int]] = {}
        self._ends: dict[int, RankEnd] = {}
        self._deaths: dict[int, tuple[int, str]] = {}
        self._lost: set[int] = set()  # hosts
        self._forwarded = 0
        self._failed_at = 0.0
        self._is_told = False

    # --- start

    def start(self, call: bytes) -> None:
        """Start all actors, and the call in those of the ranks."""
        import ray
        from ray.util.placement_group import placement_group_table

        self._group = reserve(self._workers, self._placement.resources, self._signals)
        names = {node.key: node.name for node in find_nodes()}
        self._places = places_of(placement_group_table(self._group)["bundles_to_node_id"], names)
        self._make_actors()
        hosts = self._get(
            [self._ask(place.node, "describe", len(place.bundles)) for place in self._places]
        )
        self._offsets = [
            at - time.time_ns() for _, _, at in hosts
        ]  # one after the other, but within milliseconds
        check_compatible([describe_host(0), *(host for host, _, _ in hosts)])
        several = len(hosts) > 1
        address = hosts[0][1] if several else "127.0.0.1"
        (port,) = self._get([self._ask(0, "serve", address, several)])
        self._open(ray.put(call), address, port)

    def _make_actors(self) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        variables = forwarded_variables(self._placement.worker_threads)
        rank_actor = ray.remote(RankActor)
        host_actor = ray.remote(HostActor)
        own = _node_of_driver()
        for place in self._places:
            strategies = [
                PlacementGroupSchedulingStrategy(self._group, bundle) for bundle in place.bundles
            ]
            for strategy in strategies:
                options = self._placement.options() | {"scheduling_strategy": strategy}
                self._ranks.append(rank_actor.options(**options).remote(variables))
            if place.key == own:
                self._hosts.append(HostActor({}, self._screen))
                continue
            host = host_actor.options(
                num_cpus=0, max_concurrency=4, scheduling_strategy=strategies[0]
            )
            self._hosts.append(host.remote(variables))

    def _open(self, call: Any, address: str, port: int) -> None:
        threads = self._placement.worker_threads
        grace = self._placement.grace
        options = [
            WorkerOptions(len(place.bundles), threads, grace, exit_grace=grace)
            for place in self._places
        ]
        opened = [
            self._ask(place.node, "open", place, options[place.node], address, port)
            for place in self._places
        ]
        for place, (setup, variables) in zip(self._places, self._get(opened), strict=True):
            for local_rank, own in enumerate(variables):
                rank = place.first_rank + local_rank
                self._pending[self._ranks[rank].run.remote(call, setup, local_rank, own)] = (
                    "rank",
                    rank,
                )
        for number, host in enumerate(self._hosts):
            if not isinstance(host, HostActor):
                self._pending[host.poll.remote(_OUTPUT_S)] = ("host", number)

    def _ask(self, number: int, what: str, *arguments: Any) -> Any:
        """Call a method of what supervises a node; returns a reference to its answer."""
        import ray

        method = getattr(self._hosts[number], what)
        if isinstance(self._hosts[number], HostActor):
            return ray.put(method(*arguments))
        return method.remote(*arguments)

    def _get(self, references: Sequence[Any]) -> list[Any]:
        """Return what actors answer at the start, which a signal ends."""
        import ray

        waiting = list(references)
        while waiting:
            _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=_POLL_S)
            raise_signal(self._signals, "before the workers had started")
        try:
            return list(ray.get(list(references)))
        except ray.exceptions.RayError as error:
            raise LockstepError(describe_start(error)) from error

    # --- while it runs

    def watch(self) -> None:
        """Show output, forward signals, and note how ranks end, until all have."""
        import ray

        while any(kind == "rank" for kind, _ in self._pending.values()):
            ready, _ = ray.wait(list(self._pending), timeout=_POLL_S)
            for reference in ready:
                kind, number = self._pending.pop(reference)
                (self._note_rank if kind == "rank" else self._note_output)(reference, number)
            while self._forwarded < len(self._signals):
                self._tell_hosts("signal", self._signals[self._forwarded])
                self._forwarded += 1
            if (
                self._failed_at
                and not self._is_told
                and time.monotonic() - self._failed_at > _TOLD_S
            ):
                self._is_told = True
                self._tell_hosts("end", self._first_death())

    def _note_rank(self, reference: Any, rank: int) -> None:
        import ray

        try:
            end = self._ends[rank] = ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            raise LockstepError(f"rank {rank} could not be run: {error.cause!r}") from error
        except ray.exceptions.RayError as error:
            self._deaths[rank] = describe_end(f"{type(error).__name__} {error}")
            self._note_failure()
            return
        if end.report is not None:
            # its connections end, as those of any other process that has failed
            ray.kill(self._ranks[rank])
            if not end.report.stopped:
                self._note_failure()

    def _note_failure(self) -> None:
        if not self._failed_at:
            self._failed_at = time.monotonic()
            self._tell_hosts("end", None)

    def _note_output(self, reference: Any, number: int) -> None:
        import ray

        try:
            self._screen.show(ray.get(reference))
            self._pending[self._hosts[number].poll.remote(_OUTPUT_S)] = ("host", number)
        except ray.exceptions.RayError:
            self._lost.add(number)
            self._note_failure()
            place = self._places[number]
            for actor in self._ranks[place.first_rank :][: len(place.bundles)]:
                ray.kill(actor)  # nobody supervises it any more, if it is still there

    def _tell_hosts(self, what: str, argument: Any) -> None:
        for number in range(len(self._hosts)):
            if number not in self._lost:
                self._ask(number, what, argument)

    def _first_death(self) -> HostFailure | None:
        """Return the death of a rank of which the other hosts may not know; None if there is
        none.
        """
        for rank, (_, how) in self._deaths.items():
            place = self._place(rank)
            reason = (
                f"its node {place.name} was lost"
                if place.node in self._lost
                else how or "its process ended"
            )
            return HostFailure(rank, "exit", reason, host=place.name, time=time.time_ns())
        return None

    def _place(self, rank: int) -> HostPlace:
        return next(place for place in reversed(self._places) if place.first_rank <= rank)

    # --- the end

    def finish(self) -> bytes | None:
        """Return the value of rank 0, or raise the error of the job."""
        import ray

        for actor in self._ranks:
            ray.kill(actor)
        closed = [self._ask(place.node, "close") for place in self._places]
        found = [self._results(place, closed[place.node]) for place in self._places]
        self._screen.close()
        from ..errors import WorkerError
        from ..launcher.worker_status import combine, raise_failure

        try:
            raise_failure(combine([results for results, _ in found], self._signals))
        except LockstepError as error:
            error.checkpoint = error.checkpoint or next(
                (saved for _, saved in found if saved), None
            )
            failed = error if isinstance(error, WorkerError) else error.__cause__
            if isinstance(failed, WorkerError) and len(self._places) > 1:
                failed.host = self._place(failed.rank).name
            raise
        return self._ends[0].value

    def _results(self, place: HostPlace, closed: Any) -> tuple[WorkerResults, str | None]:
        """Return what is known of the ranks of a node, and the newest checkpoint that they have
        saved.
        """
        import ray

        from ..launcher.worker_status import FORCED_EXIT_CODE, WorkerResults

        first = place.first_rank
        count = len(place.bundles)
        checkpoint = None
        killed: set[int] = set()
        try:
            results, killed, checkpoint, items = ray.get(
                closed, timeout=_CLOSE_S if place.node not in self._lost else _LOST_S
            )
            self._screen.show(items)
            offset = self._offsets[place.node]
            reports = [_at(report, report.time - offset) for report in results.reports]
            results = replace(results, reports=reports, dead_since=results.dead_since - offset)
        except ray.exceptions.RayError:
            self._lost.add(place.node)
            reports = [
                end.report
                for rank, end in self._ends.items()
                if end.report and self._place(rank) is place
            ]
            results = WorkerResults(reports, workers=count, first_rank=first)
        deaths = {
            rank - first: end for rank, end in self._deaths.items() if first <= rank < first + count
        }
        deaths = {rank: end for rank, end in deaths.items() if rank not in killed}
        lost = f"its node {place.name} was lost" if place.node in self._lost else ""
        codes = {rank: code for rank, (code, _) in deaths.items() if code}
        report = results.watchdog_report
        if self._signals:
            codes |= dict.fromkeys(deaths, -self._signals[0])
        elif report is not None:
            gone = {row.rank for row in report.ranks if row.state in ("died", "lost")}
            codes |= {rank: FORCED_EXIT_CODE for rank in deaths if first + rank not in gone}
        dead = [rank for rank in [*results.dead_ranks, *deaths] if rank in deaths]
        ends = {rank: lost or how for rank, (_, how) in deaths.items()}
        results = replace(results, dead_ranks=list(dict.fromkeys(dead)), codes=codes, ends=ends)
        return results, checkpoint

    def remove(self) -> None:
        """Remove all actors and the placement group."""
        import ray
        from ray.util.placement_group import remove_placement_group

        self._screen.close()
        with suppress(Exception):  # the cluster is gone
            for actor in (
                *self._ranks,
                *(host for host in self._hosts if not isinstance(host, HostActor)),
            ):
                ray.kill(actor)
            if self._group is not None:
                remove_placement_group(self._group)
        for host in self._hosts:
            if isinstance(host, HostActor):
                host.release()


def _node_of_driver() -> str:
    """Return Ray's ID of this process's node; "" if this user's private folders may not be open to
    its actors.
    """
    import ray

    # under Ray Client there is none; the folder is not part of Ray's stable interface
    with suppress(Exception):
        folder = Path(ray._private.worker._global_node.get_session_dir_path())
        if folder.stat().st_uid == os.getuid():
            return str(ray.get_runtime_context().get_node_id())
    return ""


def _at(report: Failure, at: int) -> Failure:
    from msgspec import structs

    return structs.replace(report, time=at)


def describe_start(error: Exception) -> str:
    """Return why an actor could not be started, from Ray's error."""
    text = str(error).strip()
    if "No module named 'lockstep'" in text:
        return (
            "Lockstep is not installed on all nodes of the Ray cluster. Install the same version "
            "on each, or let Ray do it: ray.init(runtime_env={'pip': ['lockstep-train']})"
        )
    last = next(
        (line for line in reversed(text.splitlines()) if line.strip()), type(error).__name__
    )
    return f"the workers could not be started on Ray: {last.strip()}"
