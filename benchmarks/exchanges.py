"""The operations that `collectives.py` compares: how each is called, and what it must come to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist

ELEMENT = 4  # bytes of a float32


@dataclass(frozen=True)
class Verbs:
    """One library's calls, with the order of arguments that `torch.distributed` has.

    Attributes:
        view: what the calls take for a tensor.
    """

    view: Callable[[torch.Tensor], Any]
    all_reduce: Callable[[Any], object]
    broadcast: Callable[[Any, int], object]
    all_gather: Callable[[Any, Any], object]
    reduce_scatter: Callable[[Any, Any], object]
    all_to_all: Callable[[Any, Any], object]
    send: Callable[[Any, int], object]
    receive: Callable[[Any, int], object]
    barrier: Callable[[], object]


def torch_verbs() -> Verbs:
    """Of the default process group."""
    return Verbs(
        lambda tensor: tensor,
        dist.all_reduce,
        dist.broadcast,
        _first_of("all_gather_single", "all_gather_into_tensor"),
        _first_of("reduce_scatter_single", "reduce_scatter_tensor"),
        dist.all_to_all_single,
        dist.send,
        dist.recv,
        dist.barrier,
    )


def _first_of(*names: str) -> Any:
    """The newest name that this torch has: an older one warns at every call, which takes time."""
    return next(getattr(dist, name) for name in names if hasattr(dist, name))


def mpi_verbs() -> Verbs:
    """Of MPI's world, on the tensors' own memory."""
    from mpi4py import MPI  # type: ignore[import-not-found,import-untyped,unused-ignore]

    world: Any = MPI.COMM_WORLD
    return Verbs(
        lambda tensor: tensor.numpy(),
        partial(world.Allreduce, MPI.IN_PLACE),
        world.Bcast,
        lambda output, given: world.Allgather(given, output),
        lambda output, given: world.Reduce_scatter_block(given, output),
        lambda output, given: world.Alltoall(given, output),
        world.Send,
        world.Recv,
        world.Barrier,
    )


class Place:
    """One rank, with buffers that all its operations use, so that they are warm.

    Args:
        verbs: how it reaches the others.
        rank: its number.
        size: how many ranks there are.
        most: bytes of the largest buffer.
    """

    def __init__(self, verbs: Verbs, rank: int, size: int, most: int) -> None:
        self.verbs = verbs
        self.rank = rank
        self.size = size
        count = max(most // ELEMENT, size)
        # written to, or the system would give one page of zeros for them all
        self.source = torch.empty(count).fill_(0)
        self.result = torch.empty(count).fill_(0)

    def part(self, count: int) -> int:
        """Elements of one rank's part of `count`; at least one."""
        return max(count // self.size, 1)


@dataclass(frozen=True)
class Exchange:
    """One operation on buffers of one size.

    Attributes:
        call: carries it out once.
        source: what it reads.
        right: whether it has come to what it must, when each rank's source held its `pattern`.
        share: of a call's time, the part that is one operation.
    """

    call: Callable[[], object]
    source: torch.Tensor
    right: Callable[[], bool]
    share: float = 1.0


def pattern(rank: int, count: int, start: int = 0) -> torch.Tensor:
    """Elements `start` to `start + count` of what a rank gives: whole numbers, whose sums are
    exact.
    """
    return torch.arange(start, start + count, dtype=torch.float32).remainder_(97).add_(rank)


def _sum_of_patterns(size: int, count: int, start: int = 0) -> torch.Tensor:
    return pattern(0, count, start).mul_(size).add_(sum(range(size)))


def _all_reduce(at: Place, count: int) -> Exchange:
    data = at.source[:count]
    call = partial(at.verbs.all_reduce, at.verbs.view(data))
    return Exchange(call, data, lambda: torch.equal(data, _sum_of_patterns(at.size, count)))


def _broadcast(at: Place, count: int) -> Exchange:
    """The root changes with each call, so that none can run ahead of those that still receive the
    one before.
    """
    data = at.source[:count]
    roots = cycle(range(at.size))
    view = at.verbs.view(data)
    broadcast = at.verbs.broadcast
    return Exchange(
        lambda: broadcast(view, next(roots)), data, lambda: torch.equal(data, pattern(0, count))
    )


def _all_gather(at: Place, count: int) -> Exchange:
    part = at.part(count)
    given = at.source[:part]
    output = at.result[: part * at.size]

    def right() -> bool:
        return all(
            torch.equal(got, pattern(rank, part)) for rank, got in enumerate(output.chunk(at.size))
        )

    return Exchange(
        partial(at.verbs.all_gather, at.verbs.view(output), at.verbs.view(given)), given, right
    )


def _reduce_scatter(at: Place, count: int) -> Exchange:
    part = at.part(count)
    given = at.source[: part * at.size]
    output = at.result[:part]

    def right() -> bool:
        return torch.equal(output, _sum_of_patterns(at.size, part, at.rank * part))

    return Exchange(
        partial(at.verbs.reduce_scatter, at.verbs.view(output), at.verbs.view(given)), given, right
    )


def _all_to_all(at: Place, count: int) -> Exchange:
    part = at.part(count)
    given = at.source[: part * at.size]
    output = at.result[: part * at.size]

    def right() -> bool:
        own = at.rank * part
        return all(
            torch.equal(got, pattern(rank, part, own))
            for rank, got in enumerate(output.chunk(at.size))
        )

    return Exchange(
        partial(at.verbs.all_to_all, at.verbs.view(output), at.verbs.view(given)), given, right
    )


def _send_recv(at: Place, count: int) -> Exchange | None:
    """There and back between ranks 0 and 1; half of it is one message."""
    if at.rank > 1:
        return None
    data = at.source[:count]
    echo = at.result[:count]
    send = at.verbs.send
    receive = at.verbs.receive
    there = at.verbs.view(data)
    back = at.verbs.view(echo)
    other = 1 - at.rank

    def ask() -> None:
        send(there, other)
        receive(back, other)

    def answer() -> None:
        receive(back, other)
        send(back, other)

    call = answer if at.rank else ask
    return Exchange(call, data, lambda: torch.equal(echo, pattern(0, count)), share=0.5)


def _copy(at: Place, count: int) -> Exchange | None:
    """No exchange: what the memory does for one rank alone."""
    if at.rank > 0:
        return None
    data = at.source[:count]
    output = at.result[:count]
    return Exchange(
        partial(output.copy_, data), data, lambda: torch.equal(output, pattern(0, count))
    )


_EXCHANGES: dict[str, Callable[[Place, int], Exchange | None]] = {
    "all-reduce": _all_reduce,
    "broadcast": _broadcast,
    "all-gather": _all_gather,
    "reduce-scatter": _reduce_scatter,
    "all-to-all": _all_to_all,
    "send/recv": _send_recv,
    "copy": _copy,
}
OPERATIONS = [name for name in _EXCHANGES if name != "copy"]


def make_exchange(operation: str, at: Place, nbytes: int) -> Exchange | None:
    """An operation on buffers of `nbytes`; None where this rank has no part in it.

    For all-gather that is the result's size, for reduce-scatter and all-to-all the size of what
    each rank gives.
    """
    return _EXCHANGES[operation](at, nbytes // ELEMENT)
