"""What is wrong with a call is said before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lockstep.communicator import Communicator
from lockstep.errors import ConfigError, MismatchError, TransportError
from lockstep.topology import World
from support.pool import Pool

TRANSPORTS = ("gloo", "shm")

T = torch.ones(2)
WRONG: dict[str, tuple[str, Callable[[Communicator], Any]]] = {
    "too few parts": (
        "parts: expected 2 tensors, one for each rank, got 1 on rank 0",
        lambda c: c.alltoall([T]),
    ),
    "too many": ("parts: expected 2 tensors, .*, got 3 on rank 0", lambda c: c.scatter([T] * 3)),
    "none": (
        "parts: expected a list of 2 tensors, got NoneType on rank 0",
        lambda c: c.scatter(None),
    ),
    "another dtype": (
        r"parts\[1\]: expected torch.float32 on cpu, as the others, got torch.int64 on cpu on rank 0",
        lambda c: c.reduce_scatter([T, T.long()]),
    ),
    "another device": (
        "tensor: expected a tensor on a device that .* carries",
        lambda c: c.allreduce(T.to("meta")),
    ),
    "out of another shape": (
        r"out\[0\]: expected the shape \(2,\), got \(3,\) on rank 0",
        lambda c: c.allgather(T, out=[torch.ones(3)] * 2),
    ),
    "out of another dtype": (
        "out: expected torch.float32",
        lambda c: c.scatter([T, T], out=T.int()),
    ),
    "out of a part's shape": (
        "out: expected the shape",
        lambda c: c.reduce_scatter([T, T], out=torch.ones(3)),
    ),
    "out without a part": (r"out: expected 2 tensors, .*, got 0", lambda c: c.gather(T, out=[])),
    "root": (
        "root: expected a rank of this communicator, 0 to 1, got 2 on rank 0 of 2",
        lambda c: c.broadcast(T, 2),
    ),
    "negative root": ("root: expected a rank", lambda c: c.gather_object(1, -1)),
    "root by name": (
        "root: expected a whole number, got 'first'",
        lambda c: c.reduce(T, root="first"),
    ),
    "dest": ("dest: expected a rank", lambda c: c.send(T, 2)),
    "source": ("source: expected a rank", lambda c: c.irecv(T, 2)),
    "tag": ("tag: expected 0 to", lambda c: c.isend(T, 1, -1)),
    "no operation": (
        "op: expected one of sum, mean, .*, got 'total'",
        lambda c: c.allreduce(T, "total"),
    ),
    "mean of integers": (
        r"op: expected what is defined for torch.int64 \(sum, product, .*\), got 'mean' .*Convert the tensor first",
        lambda c: c.allreduce(T.long(), "mean"),
    ),
    "bits of floats": (
        "op: expected what is defined for torch.float32",
        lambda c: c.reduce(T, "and"),
    ),
    "sum of bools": (
        r"op: .* torch.bool \(and, or, xor\), got 'sum'",
        lambda c: c.allreduce(T.bool()),
    ),
    "float8": (r"op: .*\(nothing\)", lambda c: c.allreduce(T.to(torch.float8_e5m2))),
    "no tensor": (
        "tensor: expected a tensor, got list on rank 0 of 2. The methods whose",
        lambda c: c.allreduce([1]),
    ),
    "no tensor among the parts": (
        r"parts\[1\]: expected a tensor, got int",
        lambda c: c.scatter([T, 1]),
    ),
    "no numbers": (
        "tensor: expected a dtype of plain",
        lambda c: c.broadcast(torch.empty(2, dtype=torch.bits8)),
    ),
    "sparse": ("tensor: expected a dense tensor", lambda c: c.broadcast(T.to_sparse())),
    "dimensions": (
        "tensor: expected at most 16 dimensions, got 17",
        lambda c: c.allgather(torch.ones([1] * 17)),
    ),
    "counts": (
        "counts: expected 2 numbers of rows that add up to 2, got",
        lambda c: c.scatter(T, counts=[1, 2]),
    ),
    "counts of a list": (
        "counts: expected none beside",
        lambda c: c.alltoall([T, T], counts=[2, 2]),
    ),
    "nothing to deal out": (
        "parts: expected a first dimension",
        lambda c: c.scatter(torch.tensor(1.0)),
    ),
    "values": ("values: expected a list of 2 values", lambda c: c.scatter_object([1])),
    "unpicklable": (
        r"value: expected one that can be pickled, got function \(",
        lambda c: c.allgather_object(lambda: 1),
    ),
    "color": ("color: expected a whole number, got 'red'", lambda c: c.split("red")),
    "not to be freed": ("communicator: expected one made by split or dup", lambda c: c.free()),
}


def wrong(name: str) -> None:
    """Rank 0 errs, and the others know nothing of it: what they send and receive next is right."""
    comm = Communicator()
    if comm.rank == 0:
        said, call = WRONG[name]
        with pytest.raises(ConfigError, match=said):
            call(comm)


def all_wrong(names: list[str]) -> None:
    for name in names:
        wrong(name)
        comm = Communicator()
        assert comm.allgather_object(name) == [name] * 2
        assert comm.allreduce(torch.ones(3)).tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("said", "call"),
    [
        (
            "tag: expected 0, as NCCL does not tell messages apart, got 3 on rank 0 of 2",
            lambda c: c.send(T, 1, 3),
        ),
        (
            "source: expected a rank, as NCCL does not receive from any, got None",
            lambda c: c.recv(T),
        ),
        (
            "op: expected one that NCCL has, got 'xor' .*Reduce it on the CPU",
            lambda c: c.reduce(T.int(), "xor"),
        ),
    ],
)
def test_what_nccl_lacks(said: str, call: Callable[[Communicator], Any]) -> None:
    comm = Communicator.at(World(0, 2, 0, 2), torch.device("cpu"))
    comm._arguments.backends = {"cpu": "nccl"}
    with pytest.raises(ConfigError, match=said):
        call(comm)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_errors_are_reported_before_anything_is_sent(pool: Pool, transport: str) -> None:
    pool.run(all_wrong, list(WRONG), workers=2, backend=transport)


def different_kinds() -> str:
    """It is seen on every rank, as the shapes are told first."""
    comm = Communicator()
    with pytest.raises(MismatchError) as caught:
        comm.allgather(torch.zeros(2, dtype=torch.float64 if comm.rank else torch.float32))
    with pytest.raises(MismatchError):
        comm.gather(torch.zeros(2, dtype=torch.float64 if comm.rank else torch.float32))
    assert comm.allgather_object(comm.rank) == [0, 1]
    return str(caught.value)


def test_ranks_with_different_dtypes(pool: Pool) -> None:
    said = pool.run(different_kinds, workers=2, backend="shm")
    assert said[0] == said[1]
    assert "rank 0: torch.float32 on the CPU; rank 1: torch.float64 on the CPU" in said[0]


def with_another_dtype(verb: str) -> list[str]:
    """The same number of bytes on both ranks, where no shapes are told beforehand."""
    comm = Communicator()
    mine = torch.ones(6) if comm.rank == 0 else torch.ones(3, dtype=torch.float64)
    out = [torch.empty_like(mine) for _ in range(2)]
    calls = {
        "broadcast": lambda: comm.broadcast(mine, 0),
        "message": lambda: comm.send(mine, 1) if comm.rank == 0 else comm.recv(mine, 0),
        "sendrecv": lambda: comm.sendrecv(mine, 1 - comm.rank, out[0], 1 - comm.rank),
        "allgather": lambda: comm.allgather(mine, out=out),
        "gather": lambda: comm.gather(mine, out=out if comm.rank == 0 else []),
        "scatter": lambda: comm.scatter([mine, mine] if comm.rank == 0 else None, out=out[0]),
        "alltoall": lambda: comm.alltoall([mine, mine], out=out),
    }
    try:
        calls[verb]()
    except TransportError as error:
        return [str(error)]
    return []


@pytest.mark.parametrize(
    "verb", ["broadcast", "message", "sendrecv", "allgather", "gather", "scatter", "alltoall"]
)
def test_ranks_with_different_dtypes_of_as_many_bytes(pool: Pool, verb: str) -> None:
    said = [
        text
        for texts in pool.run(with_another_dtype, verb, workers=2, backend="shm")
        for text in texts
    ]
    assert said
    for text in said:
        assert "float32" in text and "float64" in text and "rank 0" in text and "rank 1" in text
