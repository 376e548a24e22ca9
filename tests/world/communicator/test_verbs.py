"""Every verb gives what MPI defines, on one to four ranks over every transport."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.communicator import Communicator, wait_all
from lockstep.communicator.collectives import blocking_all_reduce
from lockstep.errors import ConfigError, TransportError
from support.hosts import pretending
from support.pool import Pool
from support.verbs import DTYPES, LAYOUTS, VERBS, Call, defined

TRANSPORTS = ("gloo", "shm")
LARGEST = 4


@st.composite
def calls(draw: st.DrawFn) -> Call:
    """Any verb, with a dtype and an operation that fit each other, in the whole or in a part of the
    communicator.
    """
    dtype = draw(st.sampled_from(DTYPES))
    some = st.lists(st.integers(0, 2), min_size=LARGEST, max_size=LARGEST).map(tuple)
    return Call(
        draw(st.sampled_from(sorted(VERBS))),
        dtype,
        draw(st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple)),
        draw(st.sampled_from([(), (3,), (2, 3), (0,)])),
        draw(st.sampled_from(defined(dtype))),
        *(draw(st.integers(0, 3)), draw(st.integers(0, 99)), draw(st.sampled_from(LAYOUTS))),
        *(draw(st.booleans()), draw(st.booleans())),
        *(draw(some), draw(some)) if draw(st.integers(0, 3)) == 0 else ((), ()),
    )


def program(sequence: list[Call], waits: list[int]) -> None:
    """Call all in order; after each, wait for as many of those under way as `waits` says, the
    oldest last.
    """
    comm = Communicator()
    under_way: list[Callable[[], None]] = []
    for call, count in zip(sequence, waits, strict=True):
        if call.colors:
            in_a_part(comm, call)
        else:
            under_way.append(VERBS[call.verb](comm, call))
        for _ in range(min(count, len(under_way))):
            under_way.pop()()
    for check in under_way:
        check()


def in_a_part(comm: Communicator, call: Call) -> None:
    """Those of one color, in the order of (key, rank); color 0 stands for none."""
    colors, keys = call.colors[: comm.size], call.keys[: comm.size]
    color = colors[comm.rank]
    part = comm.split(color or None, keys[comm.rank])
    assert (part is None) == (color == 0)
    if part is not None:
        with part:
            members = sorted(
                (keys[rank], rank) for rank in range(comm.size) if colors[rank] == color
            )
            assert (part.size, members[part.rank][1]) == (len(members), comm.rank)
            VERBS[call.verb](part, call)()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size", range(1, LARGEST + 1))
@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
    ],
)
@given(sequence=st.lists(calls(), min_size=4, max_size=12), data=st.data())
def test_any_program(
    pool: Pool, transport: str, size: int, sequence: list[Call], data: st.DataObject
) -> None:
    waits = data.draw(st.lists(st.integers(0, 3), min_size=len(sequence), max_size=len(sequence)))
    pool.run(program, sequence, waits, workers=size, backend=transport)


def every_dtype_and_operation(size: int) -> list[Call]:
    """Each verb in each of its forms, and each operation on each dtype, once."""
    forms = itertools.product(sorted(VERBS), (False, True), (False, True))
    made = [
        Call(
            verb,
            DTYPES[number % len(DTYPES)],
            (3, 0, 1),
            (2,),
            defined(DTYPES[number % len(DTYPES)])[0],
            root=number,
        )
        for number, (verb, _, _) in enumerate(forms)
    ]
    reductions = [
        Call(verb, dtype, (3, 1), op=op, root=size - 1)
        for dtype in DTYPES
        for op in defined(dtype)
        for verb in ("allreduce", "reduce", "reduce_scatter")
    ]
    return made + reductions


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size", [1, 3])
def test_every_dtype_and_operation(pool: Pool, transport: str, size: int) -> None:
    sequence = every_dtype_and_operation(size)
    pool.run(program, sequence, [1] * len(sequence), workers=size, backend=transport)


def between_hosts(sequence: list[Call]) -> None:
    with pretending("ABA"):
        dist.init_process_group("shm")
        program(sequence, [1] * len(sequence))


def test_between_hosts(pool: Pool) -> None:
    pool.run(between_hosts, every_dtype_and_operation(3), workers=3, init=False)


def test_alone() -> None:
    """Without any process group."""
    comm = Communicator()
    assert (comm.rank, comm.size, comm.group, comm.node, comm.nodes) == (0, 1, None, 0, 1)
    for call in every_dtype_and_operation(1):
        VERBS[call.verb](comm, call)()
    assert comm.split(None) is None
    with comm.split(3) as part, part.dup() as twin:
        assert (twin.size, twin.allgather_object("x")) == (1, ["x"])


# --- what else a caller can rely on
# ------------------------------------------------------------------------------


def requests() -> None:
    comm = Communicator()
    ahead, behind = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    out = [torch.zeros(2) for _ in range(4)]
    receiving = [comm.irecv(each, behind, tag) for tag, each in enumerate(out)]
    sending = [
        comm.isend(torch.full((2,), float(10 * comm.rank + tag)), ahead, tag)
        for tag in (3, 1, 2, 0)
    ]
    assert wait_all(receiving) == [behind] * 4
    wait_all(sending)
    assert all(request.test() for request in (*receiving, *sending))
    assert [each[0].item() for each in out] == [10 * behind + tag for tag in range(4)]
    # a request is asked before its message can be there, and again when it is
    waiting = comm.irecv(out[0], ahead, 7)
    assert not waiting.test()
    comm.barrier()
    sent = comm.isend(torch.full((2,), 5.0), behind, 7)
    while not waiting.test():
        pass
    assert (waiting.wait(), waiting.wait(), out[0].tolist()) == (ahead, ahead, [5, 5])
    sent.wait()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_requests(pool: Pool, transport: str) -> None:
    pool.run(requests, workers=2, backend=transport)


def to_oneself() -> None:
    comm = Communicator()
    first, second = torch.zeros(2), torch.zeros(1, 2)
    with pytest.raises(TransportError, match=f"rank {comm.rank} waits for a message from itself"):
        comm.dup().recv(first, comm.rank)
    value = torch.ones(2)
    comm.send(value, comm.rank)
    value.zero_()  # it has been sent
    comm.send(torch.full((2,), 2.0), comm.rank)
    later = comm.irecv(torch.zeros(2), comm.rank, tag=1)
    assert not later.test()
    assert (comm.recv(first, comm.rank), comm.recv(second, comm.rank)) == (comm.rank, comm.rank)
    assert (first.tolist(), second.tolist()) == ([1, 1], [[2, 2]])
    comm.send(torch.zeros(2), comm.rank, tag=1)
    assert later.test() and later.wait() == comm.rank
    comm.send(torch.zeros(3), comm.rank)
    with pytest.raises(
        ConfigError, match=r"the size and dtype of the message \(3 × torch.float32\), got 2 ×"
    ):
        comm.recv(first, comm.rank)


def test_messages_to_oneself(pool: Pool) -> None:
    pool.run(to_oneself, workers=2, backend="shm")


def gradients() -> None:
    """Parameters are changed in place, and results have no history."""
    comm = Communicator()
    weight = torch.nn.Parameter(torch.full((2, 3), float(comm.rank + 1)))
    assert comm.broadcast(weight, 1) is weight and weight.is_leaf
    assert comm.allreduce(weight.mT, "mean").tolist() == [[2.0, 2.0]] * 3
    assert comm.allreduce(weight, "mean") is weight and weight.is_leaf
    assert comm.broadcast(weight.mT).tolist() == [[2.0, 2.0]] * 3
    assert not comm.allgather(weight * 2)[0].requires_grad
    flipped = torch.tensor([1 + 1j, 2 - 1j]).conj()
    assert comm.allreduce(flipped).tolist() == [2 - 2j, 4 + 2j]
    assert comm.broadcast(torch.full((1,), complex(comm.rank, 1)).conj()).tolist() == [-1j]


def again() -> None:
    """A second all-reduce of a dtype takes a shorter way, which is for plain tensors only."""
    comm = Communicator()
    size = comm.size
    for _ in range(2):
        for shape in ((), (0,), (1,), (2, 3)):
            plain = torch.full(shape, 2.0)
            assert comm.allreduce(plain) is plain
            assert torch.equal(plain, torch.full(shape, 2.0 * size))
        weight = torch.nn.Parameter(torch.full((2, 3), 2.0))
        assert comm.allreduce(weight, "sum").tolist() == [[2.0 * size] * 3] * 2
        assert comm.allreduce(weight.detach().mT, "max").shape == (3, 2)
        hidden = torch.full((2, 3), 2.0, requires_grad=True)
        assert comm.allreduce(hidden) is hidden and hidden.is_leaf
        negated = torch.tensor([1 + 2j]).conj().imag
        assert negated.is_contiguous() and negated.is_neg()
        assert comm.allreduce(negated).tolist() == [-2.0 * size]
        every_second = torch.arange(6.0)[::2]
        assert comm.allreduce(every_second).tolist() == [0.0, 2.0 * size, 4.0 * size]
        assert comm.allreduce(torch.tensor([True, False]), "xor").tolist() == [size % 2 == 1, False]
        assert comm.allreduce(torch.ones(2, dtype=torch.int16)).tolist() == [size, size]
        for op in (["sum"], "average"):
            with pytest.raises(ConfigError, match="op: expected one of sum, mean"):
                comm.allreduce(torch.ones(1), op)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="at most 16 dimensions"):
            comm.allreduce(torch.ones([1] * 17))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_all_reduces_of_a_dtype_that_came_before(pool: Pool, transport: str) -> None:
    pool.run(again, workers=3, backend=transport)


def test_the_options_of_a_blocking_all_reduce() -> None:
    """What Python reads of options that were made before is what C++ reads."""
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
        prepared = blocking_all_reduce(op)
        assert dist.AllreduceOptions.reduceOp.__get__(prepared) == prepared.reduceOp == op
        assert dist.AllreduceOptions.asyncOp.__get__(prepared) is prepared.asyncOp is False


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_tensors_with_gradients_and_conjugates(pool: Pool, transport: str) -> None:
    pool.run(gradients, workers=2, backend=transport)


def large_halves() -> None:
    """Their sum is more than the largest of their dtype."""
    values = torch.tensor([60_000.0, -65_504.0], dtype=torch.float16)
    assert Communicator().allreduce(values, "mean").tolist() == [60_000, -65_504]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_mean_does_not_overflow(pool: Pool, transport: str) -> None:
    pool.run(large_halves, workers=3, backend=transport)
