"""What becomes of a watched call: it is recorded, compared, refused or fails; the ranks live in one
process.
"""

# torch's stubs give the methods of a group other signatures
# mypy: disable-error-code="override,assignment,call-arg,arg-type"

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from lockstep.errors import ConfigError, DesyncError, TransportError
from lockstep.flight_recorder import FlightRecorder, RecorderReader, call_writer
from lockstep.flight_recorder.layout import DEPTH, rank_file
from lockstep.watchdog import delivery
from lockstep.watchdog.call_sites import CallSites
from lockstep.watchdog.delivery import find_gone_rank, is_rejection, is_transport_error
from lockstep.watchdog.mismatch import describe_difference
from lockstep.watchdog.monitor import GroupMonitor
from lockstep.watchdog.process_groups import WatchedWork, watch_group
from lockstep.watchdog.program import Program
from lockstep.watchdog.report import Finding
from lockstep.watchdog.shared_state import GraphCaptures, Limits
from lockstep.watchdog.signatures import Signatures
from lockstep.watchdog.states import wait_in


class Work(dist.Work):
    """One that has ended, perhaps with an error."""

    error: BaseException | None = None

    def wait(self, timeout: Any = None) -> bool:
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        return True


class Group(dist.ProcessGroup):
    """A group in which nothing is sent; `act` is what its next call does."""

    def __init__(self) -> None:
        super().__init__(0, 2)
        self.act: Callable[[], Any] = Work
        self.keywords: dict[str, Any] = {}

    def allreduce(self, tensors: Any, opts: Any = None, **keywords: Any) -> Any:
        self.keywords = keywords
        return self.act()

    def barrier(self, opts: Any = None) -> Any:
        return self.act()

    def send(self, tensors: Any, rank: int, tag: int = 0) -> Any:
        return self.act()

    recv = send


class BlockingOpGroup(Group):
    """A group whose `allreduce` need not read the options of a blocking call; `given` is what it
    got.
    """

    takes_blocking_op = ("allreduce",)

    def __init__(self) -> None:
        super().__init__()
        self.given: list[int | None] = []

    def allreduce(self, tensors: Any, opts: Any = None, blocking_op: int | None = None) -> Any:
        self.given.append(blocking_op)
        return self.act()


class Rank:
    """A rank of two, with all that a call needs of its session."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.recorder = FlightRecorder(folder, rank, 2, "here", "program")
        texts = self.recorder.texts
        self.found: list[Finding] = []
        self.session = SimpleNamespace(
            error=None,
            recorder=self.recorder,
            rank=rank,
            uneven_batches=0,
            signatures=Signatures(texts.intern),
            call_sites=CallSites(texts.intern),
            lock=threading.RLock(),
            last_poll=time.monotonic() + 1e6,
            waiting_threads=set(),
            enter_wait=lambda thread: None,
            keeps_log=False,
            captures=GraphCaptures(),
            blocking=lambda *args: nullcontext(),
            current_wait=lambda: None,
            own_reader=RecorderReader(rank_file(folder, rank)),
            fail=self.found.append,
            folder=folder,
            limits=Limits(False, 5.0, 600.0, False),
            check=lambda: None,
            raise_root_cause=self.raise_root_cause,
        )
        self.explained: list[BaseException] = []
        self.group: Any = watch_group(Group())

    def raise_root_cause(self, error: BaseException, ranks: Any = None) -> None:
        self.explained.append(error)

    def join(self, other: RecorderReader) -> None:
        self.session.peers = {other.rank: other}
        self.monitor = self.group.watchdog_monitor = GroupMonitor(
            cast("Any", self.session), "g", "", (0, 1), 1
        )
        self.monitors = [self.monitor]

    def close(self) -> None:
        self.session.own_reader.close()
        for each in self.session.peers.values():
            each.close()
        self.recorder.close()

    def all_reduce(self, size: int = 4, **options: Any) -> Any:
        return self.group.allreduce(
            [torch.ones(size)], blocking(dist.AllreduceOptions()), **options
        )

    def barrier(self) -> Any:
        return self.group.barrier(opts=blocking(dist.BarrierOptions()))


def blocking(options: Any) -> Any:
    options.asyncOp = False
    return options


@pytest.fixture(params=["native", "python"])
def ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Two ranks; the second has the native extension, if it is installed, or has it not."""
    made = [Rank(tmp_path, 0)]
    if request.param == "python":
        monkeypatch.setattr(call_writer, "_native", None)
    made.append(Rank(tmp_path, 1))
    for rank, other in ((0, 1), (1, 0)):
        made[rank].join(RecorderReader(rank_file(tmp_path, other)))
    yield made
    for each in made:
        each.close()


def refuse() -> Any:
    raise ValueError("not these")


def test_a_call_is_compared_with_that_of_the_rank_that_came_first(ranks: list[Rank]) -> None:
    ranks[0].all_reduce()
    ranks[1].all_reduce()
    assert not ranks[0].found + ranks[1].found
    ranks[0].all_reduce()
    ranks[1].all_reduce(5)
    assert len(ranks[1].found) == 1
    assert not ranks[0].found


def test_a_call_is_not_compared_with_the_one_whose_place_it_takes(ranks: list[Rank]) -> None:
    """A record lies where that of an earlier collective was, until it is written."""
    for number in range(DEPTH + 3):
        for rank in ranks[:: 1 if number % 2 else -1]:
            rank.all_reduce(1 + number % 5)
    assert not ranks[0].found + ranks[1].found


def test_calls_that_every_rank_refuses_are_no_collectives(ranks: list[Rank]) -> None:
    """One rank may have gone on when another is still to see its call refused."""
    one, other = ranks
    for rank in (one, other):
        for size in (4, 5):
            rank.group.act = refuse
            with pytest.raises(ValueError, match="not these"):
                rank.all_reduce(size)
            assert not rank.monitor.pending
        rank.group.act = Work
        rank.barrier()
        assert not rank.found
    other.all_reduce()  # and later ones are compared as before
    one.all_reduce(5)
    assert len(one.found) == 1


def test_a_call_that_is_about_to_be_refused_is_compared_with_none(ranks: list[Rank]) -> None:
    one, other = ranks
    one.group.act = refuse
    with pytest.raises(ValueError, match="not these"):
        one.all_reduce(4)
    other.monitor.enter("all_reduce", ())  # not refused yet
    one.group.act = Work
    one.barrier()
    assert not one.found


def test_a_call_that_only_one_rank_refuses_parts_them(ranks: list[Rank]) -> None:
    one, other = ranks
    one.group.act = refuse
    with pytest.raises(ValueError, match="not these"):
        one.all_reduce()
    one.group.act = Work
    one.barrier()
    other.all_reduce()
    assert not other.found
    own = other.session.own_reader.raw(1)
    assert own is not None
    other.monitor.peers.compare_all(replace(own, entered=time.monotonic() - 6))  # still in it
    assert len(other.found) == 1


def test_a_rank_is_in_no_call_that_has_failed(ranks: list[Rank]) -> None:
    def fail() -> Any:
        raise RuntimeError("broken")

    for rank in ranks:
        rank.group.act = fail
        with pytest.raises(RuntimeError, match="broken"):
            rank.all_reduce()
        assert rank.monitor.first_pending() is None
        assert [str(error) for error in rank.explained] == ["broken"]
        rank.group.act = Work
        rank.barrier()
    assert not ranks[1].found


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_has_failed_before_it_is_waited_for_is_explained(
    ranks: list[Rank], asynchronous: bool
) -> None:
    rank, failed = ranks[0], Work()
    failed.error = RuntimeError("Connection closed by peer")
    rank.group.act = lambda: failed
    with pytest.raises(RuntimeError, match="closed"):
        rank.group.allreduce([torch.ones(1)]).wait() if asynchronous else rank.all_reduce()
    assert rank.explained == [failed.error]


def test_a_backend_that_takes_the_reduce_op_gets_that_of_blocking_calls(ranks: list[Rank]) -> None:
    group: Any = watch_group(BlockingOpGroup())
    group.watchdog_monitor = ranks[0].monitor
    maximum = dist.AllreduceOptions()
    maximum.reduceOp = dist.ReduceOp.MAX
    group.allreduce([torch.ones(4)], maximum)  # not blocking
    group.allreduce([torch.ones(4)], blocking(maximum))
    group.allreduce([torch.ones(4)], blocking(dist.AllreduceOptions()))
    group.allreduce(["no tensor"], blocking(maximum))
    assert group.given == [None, hash(dist.ReduceOp.MAX), hash(dist.ReduceOp.SUM), None]


def test_keywords_reach_the_backend_as_such(ranks: list[Rank]) -> None:
    ranks[0].all_reduce(timeout=3)
    assert ranks[0].group.keywords == {"timeout": 3}


@pytest.mark.parametrize("peer", [2, -1])
def test_a_message_to_a_rank_that_is_none_is_refused(ranks: list[Rank], peer: int) -> None:
    for call, name in ((ranks[0].group.send, "dst"), (ranks[0].group.recv, "src")):
        with pytest.raises(ConfigError, match=f"{name}.*a rank from 0 to 1"):
            call([torch.ones(1)], peer, 0)
    assert ranks[0].recorder.count == 0


def test_the_end_of_an_operation_that_nobody_waits_for_is_recorded(ranks: list[Rank]) -> None:
    future: torch.futures.Future[Any] = torch.futures.Future()

    class Pending(Work):
        def is_completed(self) -> bool:
            return future.done()

        def get_future(self) -> Any:
            return future

    rank = ranks[0]
    rank.session.keeps_log = rank.monitor.completes_on_host = True
    rank.group.act = Pending
    work = rank.group.allreduce([torch.ones(1)])
    assert isinstance(work, WatchedWork)
    work.get_future()
    future.set_result(None)
    (record,) = rank.session.own_reader.records()
    assert record.left is not None
    rank.recorder.leave(1, 0.5)
    assert rank.session.own_reader.records() == [record]  # not when it was noticed


class Queued(Work):
    """One for which only a stream waits: `wait` returns at once."""

    def __init__(self) -> None:
        super().__init__()
        self.done, self.asked = False, 0

    def is_completed(self) -> bool:
        self.asked += 1
        return self.done


def queue(rank: Rank, asynchronous: bool) -> Queued:
    work, options = Queued(), dist.AllreduceOptions()
    rank.group.act, options.asyncOp = lambda: work, asynchronous
    called = rank.group.allreduce([torch.ones(4, device="meta")], options)
    if asynchronous:
        called.wait()
        called.wait()
    return work


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_a_stream_waits_for_is_in_the_record_until_it_has_ended(
    ranks: list[Rank], asynchronous: bool
) -> None:
    """The program waits for the device later, where nobody sees it."""
    rank = ranks[0]
    works = [queue(rank, asynchronous) for _ in range(2)]
    assert [work.asked for work in works] == [0, 0], "a step asks no device"
    first = rank.monitor.first_pending()
    assert first is not None
    assert (first.sequence, rank.monitor.peers.missing(first.sequence)) == (1, [1])
    assert [record.left for record in rank.session.own_reader.records()] == [None, None]
    works[0].done = True
    first = rank.monitor.first_pending()
    assert first is not None
    assert first.sequence == 2
    works[1].done = True
    assert rank.monitor.first_pending() is None
    assert all(record.left is not None for record in rank.session.own_reader.records())


def test_on_the_cpu_what_has_been_waited_for_has_ended(ranks: list[Rank]) -> None:
    rank = ranks[0]
    rank.group.act = Queued
    rank.all_reduce()
    rank.group.allreduce([torch.ones(4)]).wait()
    assert not rank.monitor.pending


def test_a_stream_that_waits_for_a_collective_keeps_none_of_its_tensors(
    ranks: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    event = SimpleNamespace(query=lambda: False)
    stream = SimpleNamespace(record_event=lambda: event)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("meta"))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: stream)
    work = weakref.ref(queue(ranks[0], True))
    ranks[0].group.act = Work
    assert work() is None
    assert ranks[0].monitor.first_pending() is not None
    event.query = lambda: True
    assert ranks[0].monitor.first_pending() is None


def test_a_device_that_has_failed_is_not_queried_again(ranks: list[Rank]) -> None:
    work = queue(ranks[0], False)
    work.is_completed = refuse  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="not these"):
        ranks[0].monitor.first_pending()
    work.is_completed = fail_on_device  # type: ignore[method-assign]
    assert ranks[0].monitor.first_pending() is None


def fail_on_device() -> Any:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_message_that_a_stream_waits_for_is_in_the_record(ranks: list[Rank]) -> None:
    rank, work = ranks[0], Queued()
    rank.group.act = lambda: work
    rank.group.send([torch.ones(1, device="meta")], 1, 0).wait()
    assert not rank.monitor.pending_receives
    rank.group.recv([torch.ones(1, device="meta")], 1, 0).wait()
    assert [each.number for each in rank.monitor.pending_receives] == [2]
    assert not work.asked
    work.done = True
    rank.monitor.reap_completed()
    assert not rank.monitor.pending_receives


class Graph:
    fails = False

    def capture_begin(self, pool: int = 0) -> None:
        if self.fails:
            raise RuntimeError("operation not permitted")

    def capture_end(self) -> None:
        if self.fails:
            raise RuntimeError("operation failed due to a previous error during capture")


def test_no_device_is_queried_while_a_graph_is_captured(
    ranks: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A query from any thread makes the capture fail; what is captured runs when the graph does."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    rank = ranks[0]
    captures = rank.session.captures
    replaced, before, graph = captures.replacements(), queue(rank, True), Graph()
    graph.capture_begin(pool=3)
    captured = [queue(rank, asynchronous) for asynchronous in (False, True)]
    rank.group.act = lambda: captured[0]
    late = rank.group.allreduce([torch.ones(4, device="meta")])
    assert rank.monitor.first_pending() is not None
    assert [each.sequence for each in rank.monitor.pending] == [1]
    assert [work.asked for work in (before, *captured)] == [0, 0, 0]
    graph.capture_end()
    late.wait()
    before.done = True
    assert rank.monitor.first_pending() is None
    assert [work.asked for work in (before, *captured)] == [1, 0, 0]
    for each in reversed(replaced):
        each.undo()
    Graph().capture_begin()
    assert not captures.are_open


def test_a_capture_that_fails_or_is_dropped_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    captures = GraphCaptures()
    replaced, graph = captures.replacements(), Graph()
    monkeypatch.setattr(Graph, "fails", True)
    for call in (graph.capture_begin, graph.capture_end):
        with pytest.raises(RuntimeError, match="operation"):
            call()
        assert not captures.are_open
        monkeypatch.setattr(Graph, "fails", False)
        graph.capture_begin()
        monkeypatch.setattr(Graph, "fails", True)
        assert captures.are_open
    del graph, call
    assert not captures.are_open
    for each in reversed(replaced):
        each.undo()


def receive(rank: Rank, count: int) -> None:
    for _ in range(count):
        rank.group.recv([torch.ones(1)], 1, 0)


def test_the_first_of_several_receives_waits_for_one_message_only(ranks: list[Rank]) -> None:
    one, other = ranks
    receive(one, 3)
    raws = list(one.session.own_reader.raws())
    sender = one.session.peers[1]
    assert [wait_in(one.session.own_reader, raw).is_matched_by(0, sender) for raw in raws] == [
        False,
        False,
        False,
    ]
    other.group.send([torch.ones(1)], 0, 0)
    assert [wait_in(one.session.own_reader, raw).is_matched_by(0, sender) for raw in raws] == [
        True,
        False,
        False,
    ]


def test_a_rank_that_has_exited_is_the_culprit_of_collectives_it_belongs_to(
    ranks: list[Rank],
) -> None:
    one, other = ranks
    one.session.health = SimpleNamespace(poll=lambda: {1}, gone={1})
    one.all_reduce()
    finding = find_gone_rank(cast("Any", one.session), one.monitors, (0, 1))
    assert finding is not None
    assert "waited for it in all_reduce(float32[4], sum) at " in finding.sentence
    assert (finding.key, finding.sequence) == (one.monitor.key, 1)
    assert find_gone_rank(cast("Any", one.session), one.monitors, (0,)) is None
    one.session.health = SimpleNamespace(poll=set, gone=set())
    other.recorder.set_phase("left")
    assert find_gone_rank(cast("Any", one.session), one.monitors, (0,)) is None
    finding = find_gone_rank(cast("Any", one.session), one.monitors)
    assert finding is not None
    assert finding.kind == "left"


def test_a_rank_waits_in_what_has_failed_until_that_is_explained(ranks: list[Rank]) -> None:
    """A wait inside C++ is noticed when it has failed, and the operation seems to have ended."""
    one, seen = ranks[0], list[Any]()
    one.group.act = Work
    one.group.allreduce([torch.ones(4)]).wait()
    assert one.monitor.first_pending() is None

    def look() -> bool:
        (record,) = one.session.own_reader.records()
        seen.append((one.monitor.first_pending(), record.left, one.session.own_reader.phase))
        one.session.error = DesyncError("found")
        return True

    one.session.poll_report, one.session.program = look, Program(one.recorder)
    one.session.rendezvous = SimpleNamespace(hosts=((0, 1),))
    with pytest.raises(DesyncError, match="found"):
        delivery.await_root_cause(
            cast("Any", one.session),
            one.monitors,
            RuntimeError("shm: between hosts (Gloo): Connection closed"),
        )
    ((first, left, phase),) = seen
    assert first is not None
    assert (first.sequence, left, phase) == (1, None, "waits")
    assert one.monitor.first_pending() is None
    assert one.session.own_reader.phase == "runs"


@pytest.mark.parametrize(
    "error, refused, of_transport",
    [
        (ConfigError("root", "one", 2), True, False),
        (RuntimeError("ProcessGroupGloo::broadcast: invalid root rank: 9"), True, False),
        (RuntimeError("Cannot use ReduceOp.AVG with Gloo"), True, False),
        (
            RuntimeError(
                "[/x/third_party/gloo/gloo/transport/tcp/pair.cc:5] Connection closed by peer"
            ),
            False,
            True,
        ),
        (RuntimeError("Timed out waiting 1000ms for recv operation to complete"), False, True),
        (TransportError("shm: the process of rank 1 has ended"), False, True),
        (DesyncError("diverged"), False, True),
        (RuntimeError("CUDA out of memory"), False, False),
    ],
)
def test_errors_of_arguments_are_distinguished_from_those_of_the_transport(
    error: BaseException, refused: bool, of_transport: bool
) -> None:
    assert (is_rejection(error), is_transport_error(error)) == (refused, of_transport)


def record(rank: Rank, what: str, place: str, name: str = "") -> Any:
    rank.all_reduce()
    raw = rank.session.own_reader.raw(rank.recorder.count)
    assert raw is not None
    return replace(rank.session.own_reader.record(raw), what=what, call_site=place, name=name)


def test_the_likely_cause_depends_on_the_lines_and_names(ranks: list[Rank]) -> None:
    first, second = "all_reduce(float32[4], sum)", "all_reduce(float32[2], sum)"
    for places, names, words in (
        (("a.py:5", "a.py:7"), ("", ""), "only some ranks take"),
        (("a.py:5", "a.py:5"), ("loss", "accuracy"), "only some ranks take"),
        (("a.py:5", "a.py:5"), ("", ""), "different shapes"),
    ):
        calls = [
            record(ranks[0], *each) for each in zip((first, second), places, names, strict=True)
        ]
        assert words in describe_difference("desync", (0, 1), (calls[0], calls[1])).cause
    told = describe_difference("batches", (0, 1), (calls[0], calls[1]))
    assert "skipped a batch" in told.cause
    assert "same number of batches" in told.advice


class Together:
    """Around one of c10d's groups: as with NCCL, messages that are not begun as one would wait for
    ever.
    """

    def __init__(self, group: Any) -> None:
        self.inner = group
        self.calls: list[str] = []
        self.is_open = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(supports_coalescing=True)

    def _start_coalescing(self, device: torch.device) -> None:
        self.calls.append(f"start on {device}")
        self.is_open = True

    def _end_coalescing(self, device: torch.device) -> Work:
        self.calls.append(f"end on {device}")
        self.is_open = False
        return Work()

    def send(self, tensors: Any, rank: int, tag: int = 0) -> None:
        assert self.is_open, "a send that begins alone"
        self.calls.append(f"send to {rank}")

    def recv(self, tensors: Any, rank: int, tag: int = 0) -> None:
        assert self.is_open, "a receive that begins alone"
        self.calls.append(f"receive from {rank}")


def test_messages_that_belong_together_are_begun_as_one(
    ranks: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group around one of c10d's own is none of its class, by which torch goes."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from lockstep.watchdog.process_groups import replace_group

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        group = dist.group.WORLD
        made = watch_group(group)
        # since torch 2.15, for NCCL among others: what records the calls of a group keeps it alive
        recorders = {group: "recorder"}
        monkeypatch.setattr(
            dist.distributed_c10d._World, "pg_flight_recorder_hooks", recorders, raising=False
        )
        replace_group(group, made)
        assert recorders.keys() == {made}
        dist.distributed_c10d._update_default_pg(made)
        made._group = together = Together(group)
        made.watchdog_monitor = ranks[0].monitor
        number = ranks[0].recorder.count
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.irecv, torch.zeros(2), 1), dist.P2POp(dist.isend, torch.ones(2), 1)]
        )
        assert together.calls == ["start on cpu", "receive from 1", "send to 1", "end on cpu"]
        raws = [ranks[0].session.own_reader.raw(number + each) for each in (1, 2)]
        assert [raw.left for raw in raws] == [0.0, 0.0]  # type: ignore[union-attr]
        for work in works:
            work.wait()
        raws = [ranks[0].session.own_reader.raw(number + each) for each in (1, 2)]
        assert all(raw.left > 0 for raw in raws)  # type: ignore[union-attr]
        assert not ranks[0].monitor.coalesced
    finally:
        dist.destroy_process_group()


def test_calls_of_the_package_reach_the_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package does not import torch, and so finds them by the name of their module."""
    import lockstep.watchdog
    from lockstep.watchdog import patches

    seen: list[Any] = []
    for name in ("report_exception", "exclude_group"):
        monkeypatch.setattr(patches, name, seen.append)
    monkeypatch.setattr(patches, "report_exit", lambda: seen.append("left"))
    monkeypatch.setattr(
        patches, "watch_wait", lambda group, operation: nullcontext((group, operation))
    )
    error = ValueError("mine")
    lockstep.watchdog.report_exception(error)
    lockstep.watchdog.report_exit()
    lockstep.watchdog.exclude_group("group")
    assert seen == [error, "left", "group"]
    with lockstep.watchdog.watch_wait("group", "operation") as check:
        assert check == ("group", "operation")  # type: ignore[comparison-overlap]
