"""Calls beside their pre-flight checks: whatever ranks do that are out of step, nothing arrives
that does not fit.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.errors import DesyncError
from lockstep.watchdog.preflight import PreflightCheck
from lockstep.watchdog.shared_state import PendingCall

CHECK = -1  # what a check calls; others are fingerprints
LIMIT_S = 30.0


class Work(dist.Work):
    """An operation of one rank, which completes when all ranks have started it."""

    def __init__(self) -> None:
        super().__init__()
        self.future: torch.futures.Future[Any] = torch.futures.Future()
        self._has_ended = threading.Lock()

    def end(self, error: Exception | None = None) -> None:
        """End, unless it has ended."""
        if not self._has_ended.acquire(blocking=False):
            return
        if error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(error)

    def wait(self, timeout: Any = None) -> bool:
        self.future.wait()
        return True

    def is_completed(self) -> bool:
        return bool(self.future.done())

    def get_future(self) -> Any:
        return self.future


class Network:
    """As Gloo's: what the ranks start as their n-th operation belongs together, whatever it is.

    Attributes:
        misfits: what different ranks have called as their n-th operation.
    """

    def __init__(self, size: int) -> None:
        self.size, self.misfits = size, cast("list[set[int]]", [])
        self.lock = threading.RLock()
        self.failed = False
        self._started: list[dict[int, tuple[int, Any, Work]]] = []
        self._counts = [0] * size

    def start(self, rank: int, call: int, words: Any = None) -> Work:
        """Start the next operation of a rank."""
        work = Work()
        with self.lock:
            if self.failed:
                work.end(RuntimeError("Connection closed by peer"))
                return work
            number, self._counts[rank] = self._counts[rank], self._counts[rank] + 1
            if number == len(self._started):
                self._started.append({})
            ranks = self._started[number]
            ranks[rank] = call, words, work
            calls = {each for each, _, _ in ranks.values()}
            if len(calls) > 1:
                self.misfits.append(calls)
            done = list(ranks.values()) if len(ranks) == self.size and len(calls) == 1 else []
            if done and words is not None:
                combined = done[0][1].clone()
                for _, other, _ in done[1:]:
                    combined |= other
                for _, other, _ in done:
                    other.copy_(combined)
        for _, _, each in done:
            each.end()
        return work

    def fail(self) -> None:
        """End all operations, as the report of a desync does."""
        with self.lock:
            self.failed = True
            works = [work for ranks in self._started for _, _, work in ranks.values()]
        for work in works:
            work.end(RuntimeError("Connection closed by peer"))


class Group:
    """What a check needs of one rank's group."""

    def __init__(self, network: Network, rank: int) -> None:
        self.network, self.rank = network, rank

    def allreduce_unwatched(self, tensors: Sequence[torch.Tensor], opts: Any) -> Work:
        return self.network.start(self.rank, CHECK, tensors[0])

    def allreduce_beside(self, tensor: torch.Tensor, opts: Any, found: Any) -> Any:
        work = self.allreduce_unwatched([tensor], opts)
        return lambda _: work


@dataclass
class Rank:
    """A rank that runs a program; `done` are the calls whose results it has used."""

    network: Network
    rank: int
    done: list[int] = field(default_factory=list)
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self.calls: list[int] = []
        state: Any = SimpleNamespace(
            rank=self.rank,
            error=None,
            uneven_batches=0,
            limits=SimpleNamespace(strict=False),
            own_reader=SimpleNamespace(raw=self.raw),
            check=self.check_error,
        )
        swaps: Any = SimpleNamespace(has_announced=lambda own, sequence: False)
        ranks = tuple(range(self.network.size))
        self.check = PreflightCheck(
            Group(self.network, self.rank), state, 1, ranks, swaps, lambda work: None
        )
        patched: Any = self.check
        patched._exchange_calls = lambda pending, mine: None
        patched.compare_calls = self.refuse

    def raw(self, number: int) -> Any:
        return SimpleNamespace(
            sequence=number,
            fingerprint=self.calls[number - 1],
            line=1,
            batch=-1,
            loop=0,
            name=0,
            rejected=0,
        )

    def check_error(self) -> None:
        if self.network.failed:
            raise RuntimeError("Connection closed by peer")

    def refuse(self, pending: PendingCall, calls: Any, digest: Any) -> None:
        self.network.fail()
        raise DesyncError("they differ")

    def run(self, program: Sequence[tuple[int, bool]]) -> None:
        """Make calls, (fingerprint, whether it blocks), and wait for those that do not block at the
        next that does.
        """
        open_calls: list[tuple[int, Any, Any]] = []
        try:
            for call, blocks in program:
                self.calls.append(call)
                pending = PendingCall(len(self.calls), len(self.calls), 0.0)

                def start(call: int = call) -> Work:
                    return self.network.start(self.rank, call)

                if not blocks:
                    open_calls.append((call, *self.check.start(pending, start, can_wait=True)))
                    continue
                work = self.check.run(pending, start, "all_reduce")
                work.wait()
                self.finish(open_calls)
                self.done.append(call)
            self.finish(open_calls)
        except Exception as error:
            self.error = error
            self.network.fail()

    def finish(self, open_calls: list[tuple[int, Any, Any]]) -> None:
        for call, work, check in open_calls:
            if check is not None:
                check.wait()
            work.wait()
            self.done.append(call)
        open_calls.clear()


def run(programs: Sequence[Sequence[tuple[int, bool]]]) -> tuple[Network, list[Rank]]:
    network = Network(len(programs))
    ranks = [Rank(network, rank) for rank in range(network.size)]

    def program_of(rank: Rank) -> None:
        rank.run(programs[rank.rank])
        if len(programs[rank.rank]) < max(map(len, programs)):
            network.fail()  # it has left the others, which the watchdog notices

    threads = [threading.Thread(target=program_of, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive(), "it hangs"
    return network, ranks


CALLS = st.tuples(st.integers(1, 4), st.booleans())
LOOPS = st.lists(CALLS, min_size=1, max_size=4)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(LOOPS, min_size=1, max_size=3), st.integers(1, 5), st.integers(2, 3))
def test_ranks_that_call_the_same_come_to_the_end(loops: list[Any], turns: int, size: int) -> None:
    program = [call for loop in loops for call in loop * turns]
    network, ranks = run([program] * size)
    assert not network.misfits
    for rank in ranks:
        assert rank.error is None
        assert len(rank.done) == len(program)


@settings(deadline=None, max_examples=400, suppress_health_check=[HealthCheck.too_slow])
@given(LOOPS, st.integers(1, 6), st.data())
def test_nothing_arrives_that_does_not_fit(
    loop: list[Any], turns: int, data: st.DataObject
) -> None:
    """One rank calls something else at some turn, or nothing more, or leaves one out, and goes on
    as it likes.
    """
    program = loop * turns
    at = data.draw(st.integers(0, len(program) - 1))
    how = data.draw(st.sampled_from(["another", "more", "left out", "end"]))
    another = data.draw(CALLS.filter(lambda call: call[0] != program[at][0]))
    rest = {
        "another": program[at + 1 :],
        "more": program[at:],
        "left out": program[at + 1 :],
        "end": [],
    }[how]
    other = [*program[:at], *([another] if how in ("another", "more") else []), *rest]
    network, ranks = run([other, *[program] * data.draw(st.integers(1, 2))])
    assert not network.misfits
    same = [call for call, _ in program][
        : next(_differing([c for c, _ in other], [c for c, _ in program]))
    ]
    for rank in ranks:
        assert len(rank.done) <= len(same), (
            "a value was used of a call in which they differ, or after it"
        )


def _differing(one: Sequence[int], other: Sequence[int]) -> Any:
    for number, (first, second) in enumerate(zip(one, other, strict=False)):
        if first != second:
            yield number
    yield min(len(one), len(other))


def test_without_the_guard_something_would_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """The network sees what the guard is for: here every call starts beside its check."""
    from lockstep.watchdog.preflight import ExpectedCalls

    def always(self: ExpectedCalls, fingerprint: int) -> bool:
        return True

    monkeypatch.setattr(ExpectedCalls, "note", always)
    networks = [run([[(1, True), (2, True)], [(1, True), (3, True)]])[0] for _ in range(100)]
    assert any({2, 3} in network.misfits for network in networks), (
        "in one where no rank was so late that all was over"
    )
