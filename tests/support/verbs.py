"""Every verb of a communicator as one function that calls it and compares with what MPI defines,
told in NumPy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.communicator import Communicator, Request

from .conformance import lay_out

__all__ = ["DTYPES", "LAYOUTS", "OPERATIONS", "VERBS", "Call", "defined"]

LAYOUTS = ("contiguous", "transposed", "strided", "offset")
WHOLE = ("uint8", "int8", "int16", "int32", "int64", "uint16", "uint32")
REAL = ("float16", "float32", "float64")
DTYPES = ("bool", *WHOLE, *REAL, "complex64", "complex128")
OPERATIONS: dict[str, Callable[..., Any]] = {
    "sum": np.add,
    "mean": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def defined(dtype: str) -> tuple[str, ...]:
    """The operations that MPI, or for means this library, defines for a dtype."""
    if dtype == "bool":
        return "and", "or", "xor"
    if dtype.startswith("complex"):
        return "sum", "mean"
    return (
        ("sum", "mean", "product", "min", "max")
        if dtype in REAL
        else ("sum", "product", "min", "max", "and", "xor")
    )


@dataclass(frozen=True)
class Call:
    """One call of a verb by all ranks; what each of them holds follows from it.

    Attributes:
        verb: among `VERBS`.
        dtype: of the tensors.
        rows: lengths of parts; rank r's part for rank p has `rows[(r + p) % len(rows)]`, or
            `rows[0]` where all agree.
        tail: the other dimensions.
        op: the operation, where there is one.
        root: taken modulo the number of ranks.
        seed: another seed, other values.
        layout: how tensors lie in memory.
        given: whether the tensors to be filled are passed in.
        later: whether the verb is only started.
        colors: where not empty, the call is made in a part of the communicator: this rank's color
            is that of its rank.
        keys: the order in that part.
    """

    verb: str
    dtype: str = "float32"
    rows: tuple[int, ...] = (2,)
    tail: tuple[int, ...] = ()
    op: str = "sum"
    root: int = 0
    seed: int = 0
    layout: str = "contiguous"
    given: bool = False
    later: bool = False
    colors: tuple[int, ...] = ()
    keys: tuple[int, ...] = ()

    def array(self, rank: int, part: int = 0, rows: int | None = None) -> Any:
        """What `rank` holds for `part`: small numbers, so that all sums and products are exact."""
        shape = (self.count(rank, part) if rows is None else rows, *self.tail)
        draw = np.random.default_rng((self.seed, rank, part))
        low = 0 if self.dtype.startswith("u") or self.dtype == "bool" else -3
        values = draw.integers(low, 2 if self.dtype == "bool" else 4, shape)
        return (values + 1j * values[::-1] if self.dtype.startswith("c") else values).astype(
            self.dtype
        )

    def count(self, rank: int, part: int) -> int:
        """The rows that `rank` has for `part`."""
        return self.rows[(rank + part) % len(self.rows)]

    def tensor(self, array: Any) -> Tensor:
        """The array in a tensor of the call's layout."""
        return lay_out(torch.from_numpy(np.ascontiguousarray(array)), self.layout)

    def blank(self, array: Any) -> Tensor:
        """A tensor to be overwritten by `array`."""
        return self.tensor(np.ones_like(array))

    def folded(self, arrays: Sequence[Any]) -> Any:
        """The reduction of what the ranks hold."""
        total = functools.reduce(OPERATIONS[self.op], arrays)
        return (total / len(arrays)).astype(self.dtype) if self.op == "mean" else total

    def same(self, got: Any, expected: Any) -> None:
        """Compare a tensor with an array; means may be rounded."""
        assert isinstance(got, Tensor), (self, got)
        assert (tuple(got.shape), got.numpy().dtype) == (expected.shape, expected.dtype), (
            self,
            got.shape,
            got.dtype,
        )
        close = (
            np.allclose(got.numpy(), expected, rtol=2e-3)
            if self.op == "mean"
            else (got.numpy() == expected).all()
        )
        assert close, (self, got, expected)

    def same_all(self, got: Any, expected: Sequence[Any]) -> None:
        """Compare a list of tensors."""
        assert isinstance(got, list) and len(got) == len(expected), (self, got)
        for one, other in zip(got, expected, strict=True):
            self.same(one, other)

    def ask(self, verb: Any, *args: Any, **options: Any) -> Callable[[], Any]:
        """Call the verb; what comes back gives its result."""
        if not self.later:
            result = verb(*args, **options)
            return lambda: result
        request = getattr(verb.__self__, "i" + verb.__name__)(*args, **options)
        assert isinstance(request, Request)
        return request.wait


Check = Callable[[], None]


def broadcast(comm: Communicator, call: Call) -> Check:
    root, tensor = call.root % comm.size, call.tensor(call.array(comm.rank, rows=call.rows[0]))
    result = call.ask(comm.broadcast, tensor, root)

    def check() -> None:
        assert result() is tensor
        call.same(tensor, call.array(root, rows=call.rows[0]))

    return check


def scatter(comm: Communicator, call: Call) -> Check:
    root, size = call.root % comm.size, comm.size
    parts = [call.array(root, part) for part in range(size)]
    out = call.blank(parts[comm.rank]) if call.given else None
    mine = [call.tensor(part) for part in parts] if comm.rank == root else None
    result = call.ask(comm.scatter, mine, root, out=out)

    def check() -> None:
        assert out is None or result() is out
        call.same(result(), parts[comm.rank])

    return check


def scatter_counts(comm: Communicator, call: Call) -> Check:
    """One tensor, dealt out by counts or as evenly as it can be."""
    root, size = call.root % comm.size, comm.size
    whole = np.concatenate([call.array(root, part) for part in range(size)])
    counts = [call.count(root, part) for part in range(size)] if call.given else None
    parts = (
        np.split(whole, np.cumsum(counts)[:-1])
        if counts is not None
        else np.array_split(whole, size)
    )
    result = call.ask(
        comm.scatter, call.tensor(whole) if comm.rank == root else None, root, counts=counts
    )
    return lambda: call.same(result(), parts[comm.rank])


def gather(comm: Communicator, call: Call) -> Check:
    root, all_of_them = call.root % comm.size, [call.array(rank) for rank in range(comm.size)]
    mine, out = call.tensor(all_of_them[comm.rank]), None
    if call.given:
        out = [call.blank(each) for each in all_of_them] if comm.rank == root else []
    result = call.ask(comm.gather, mine, root, out=out)

    def check() -> None:
        if comm.rank == root:
            call.same_all(result(), all_of_them)
            call.same_all(out or result(), all_of_them)
        else:
            assert result() is None
        call.same(mine, all_of_them[comm.rank])

    return check


def allgather(comm: Communicator, call: Call) -> Check:
    all_of_them = [call.array(rank) for rank in range(comm.size)]
    out = [call.blank(each) for each in all_of_them] if call.given else None
    result = call.ask(comm.allgather, call.tensor(all_of_them[comm.rank]), out=out)

    def check() -> None:
        call.same_all(result(), all_of_them)
        call.same_all(out or result(), all_of_them)

    return check


def alltoall(comm: Communicator, call: Call) -> Check:
    expected = [call.array(rank, comm.rank) for rank in range(comm.size)]
    out = [call.blank(each) for each in expected] if call.given else None
    mine = [call.tensor(call.array(comm.rank, part)) for part in range(comm.size)]
    result = call.ask(comm.alltoall, mine, out=out)

    def check() -> None:
        call.same_all(result(), expected)
        call.same_all(out or result(), expected)

    return check


def allreduce(comm: Communicator, call: Call) -> Check:
    rows, tensor = call.rows[0], call.tensor(call.array(comm.rank, rows=call.rows[0]))
    result = call.ask(comm.allreduce, tensor, call.op)

    def check() -> None:
        assert result() is tensor
        call.same(tensor, call.folded([call.array(rank, rows=rows) for rank in range(comm.size)]))

    return check


def reduce(comm: Communicator, call: Call) -> Check:
    rows, root = call.rows[0], call.root % comm.size
    tensor = call.tensor(call.array(comm.rank, rows=rows))
    result = call.ask(comm.reduce, tensor, call.op, root)

    def check() -> None:
        assert result() is (tensor if comm.rank == root else None)
        if comm.rank == root:
            call.same(
                tensor, call.folded([call.array(rank, rows=rows) for rank in range(comm.size)])
            )
        else:
            call.same(tensor, call.array(comm.rank, rows=rows))

    return check


def reduce_scatter(comm: Communicator, call: Call) -> Check:
    """A list of parts or one tensor with counts; their sizes depend on the part alone."""

    def held(rank: int) -> list[Any]:
        return [call.array(rank, part, call.count(0, part)) for part in range(comm.size)]

    expected = call.folded([held(rank)[comm.rank] for rank in range(comm.size)])
    mine = [call.tensor(part) for part in held(comm.rank)]
    if call.given:
        out = call.blank(expected)
        whole, counts = torch.cat(mine), [len(part) for part in mine]
        result = call.ask(comm.reduce_scatter, whole, call.op, counts=counts, out=out)
    else:
        result = call.ask(comm.reduce_scatter, mine, call.op)

    def check() -> None:
        call.same(result(), expected)
        call.same_all(mine, held(comm.rank))
        assert not call.given or result() is out

    return check


def ring(comm: Communicator, call: Call) -> Check:
    """Each rank sends to one further on, perhaps to itself, and receives from as far back."""
    ahead, behind = (comm.rank + call.root) % comm.size, (comm.rank - call.root) % comm.size
    mine, expected = call.tensor(call.array(comm.rank)), call.array(behind)
    out = call.blank(expected)
    if call.later:
        receiving, sending = comm.irecv(out, behind, call.seed), comm.isend(mine, ahead, call.seed)

        def check() -> None:
            while not receiving.test():
                pass
            assert (receiving.wait(), sending.wait()) == (behind, None)
            call.same(out, expected)

        return check
    assert comm.sendrecv(mine, ahead, out, behind, tag=call.seed) == behind
    return lambda: call.same(out, expected)


def collect(comm: Communicator, call: Call) -> Check:
    """Rank `root` receives from any rank as often as there are others; every message comes once."""
    root, rows = call.root % comm.size, call.rows[0]
    if comm.rank != root:
        comm.send(call.tensor(call.array(comm.rank, rows=rows)), root, 1000 + call.seed)
    sources = [root]
    while comm.rank == root and len(sources) < comm.size:
        out = call.blank(call.array(0, rows=rows))
        sources.append(comm.recv(out, tag=1000 + call.seed))
        call.same(out, call.array(sources[-1], rows=rows))
    assert comm.rank != root or sorted(sources) == list(range(comm.size))
    comm.barrier()  # before anybody sends the next of these
    return lambda: None


def objects(comm: Communicator, call: Call) -> Check:
    """All verbs for values."""

    def value(rank: int, part: int = 0) -> Any:
        return {"rank": rank, "text": "x" * (100 * part), "array": call.array(rank, part).tolist()}

    me, size, root = comm.rank, comm.size, call.root % comm.size
    everyone = [value(rank) for rank in range(size)]
    assert comm.broadcast_object(value(me), root) == value(root)
    assert comm.scatter_object(
        [value(root, part) for part in range(size)] if me == root else None, root
    ) == value(root, me)
    assert comm.gather_object(value(me), root) == (everyone if me == root else None)
    assert comm.allgather_object(value(me)) == everyone
    assert comm.alltoall_object([value(me, part) for part in range(size)]) == [
        value(rank, me) for rank in range(size)
    ]
    if me:
        comm.send_object(value(me), 0, tag=2000 + call.seed)
    else:
        got = [comm.recv_object(tag=2000 + call.seed) for _ in range(size - 1)]
        assert sorted(each["rank"] for each in got) == list(range(1, size))
    comm.barrier()
    return lambda: None


def barrier(comm: Communicator, call: Call) -> Check:
    result = call.ask(comm.barrier)

    def check() -> None:
        assert result() is None

    return check


Verb = Callable[[Communicator, Call], Check]
VERBS: dict[str, Verb] = {
    verb.__name__: verb
    for verb in (
        *(broadcast, scatter, scatter_counts, gather, allgather, alltoall),
        *(allreduce, reduce, reduce_scatter),
        *(ring, collect, objects, barrier),
    )
}
