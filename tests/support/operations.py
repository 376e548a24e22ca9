"""Every operation of a process group as one function that calls it and knows what must come of
it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .conformance import Case

__all__ = [
    "MOVING",
    "OPERATIONS",
    "REDUCING",
    "all_gather_single",
    "perform",
    "reduce_scatter_single",
]

Check = Callable[[], None]
Started = tuple[list[Any], Check]

# The two older names bring a deprecation warning where the newer are there.
all_gather_single: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
reduce_scatter_single: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


def perform(operation: str, case: Case) -> None:
    """Call the operation, and check its results."""
    works, check = OPERATIONS[operation](case, False)
    for work in works:
        work.wait()
    check()


def _works(*works: Any) -> list[Any]:
    return [work for work in works if work is not None]


def _expect_all(case: Case, got: list[Tensor], expected: list[Tensor], what: str) -> None:
    for part, (one, other) in enumerate(zip(got, expected, strict=True)):
        case.expect(one, other, f"{what} {part}")


# --- what moves values
# ----------------------------------------------------------------------------------------


def broadcast(case: Case, later: bool) -> Started:
    tensor = case.place(case.bits(case.rank))
    work = dist.broadcast(tensor, case.global_rank(case.root), case.group, later)
    return _works(work), lambda: case.expect(tensor, case.bits(case.root))


def all_gather(case: Case, later: bool) -> Started:
    mine = case.place(case.bits(case.rank))
    parts = [case.blank() for _ in range(case.size)]
    work = dist.all_gather(parts, mine, case.group, later)

    def check() -> None:
        _expect_all(case, parts, [case.bits(rank) for rank in range(case.size)], "part")
        case.expect(mine, case.bits(case.rank), "input")

    return _works(work), check


def all_gather_tensor(case: Case, later: bool) -> Started:
    """The ranks' tensors put together along their first dimension."""
    out = case.blank((case.size * _rows(case)[0], *case.shape[1:]))
    mine = case.place(case.bits(case.rank, 0, _rows(case)))
    work = all_gather_single(out, mine, case.group, later)

    def check() -> None:
        case.expect(out, torch.cat([case.bits(rank, 0, _rows(case)) for rank in range(case.size)]))
        case.expect(mine, case.bits(case.rank, 0, _rows(case)), "input")

    return _works(work), check


def all_gather_rows(case: Case, later: bool) -> Started:
    """The ranks' tensors as the rows of one."""
    out = case.blank((case.size, *case.shape))
    work = all_gather_single(out, case.place(case.bits(case.rank)), case.group, later)
    return _works(work), lambda: case.expect(
        out, torch.stack([case.bits(rank) for rank in range(case.size)])
    )


def gather(case: Case, later: bool) -> Started:
    mine = case.place(case.bits(case.rank))
    parts = [case.blank() for _ in range(case.size)] if case.rank == case.root else None
    work = dist.gather(mine, parts, case.global_rank(case.root), case.group, later)

    def check() -> None:
        if parts is not None:
            _expect_all(case, parts, [case.bits(rank) for rank in range(case.size)], "part")
        case.expect(mine, case.bits(case.rank), "input")

    return _works(work), check


def scatter(case: Case, later: bool) -> Started:
    out = case.blank()
    parts = (
        [case.place(case.bits(case.root, part)) for part in range(case.size)]
        if case.rank == case.root
        else None
    )
    work = dist.scatter(out, parts, case.global_rank(case.root), case.group, later)
    return _works(work), lambda: case.expect(out, case.bits(case.root, case.rank))


def all_to_all(case: Case, later: bool) -> Started:
    parts = [case.place(case.bits(case.rank, part)) for part in range(case.size)]
    out = [case.blank() for _ in range(case.size)]
    work = dist.all_to_all(out, parts, case.group, later)

    def check() -> None:
        _expect_all(case, out, [case.bits(rank, case.rank) for rank in range(case.size)], "part")
        _expect_all(case, parts, [case.bits(case.rank, part) for part in range(case.size)], "input")

    return _works(work), check


def all_to_all_single(case: Case, later: bool) -> Started:
    mine = case.place(
        torch.cat([case.bits(case.rank, part, _rows(case)) for part in range(case.size)])
    )
    out = case.blank(mine.shape)
    work = dist.all_to_all_single(out, mine, group=case.group, async_op=later)

    def check() -> None:
        case.expect(
            out, torch.cat([case.bits(rank, case.rank, _rows(case)) for rank in range(case.size)])
        )

    return _works(work), check


def all_to_all_uneven(case: Case, later: bool) -> Started:
    """Rank r sends (r + 2p + seed) mod 4 rows to rank p; some send nothing to some."""

    def part(sender: int, receiver: int) -> Tensor:
        rows = (sender + 2 * receiver + case.seed) % 4
        return case.bits(sender, receiver, (rows, *case.shape[1:]))

    sent = [part(case.rank, other) for other in range(case.size)]
    received = [part(other, case.rank) for other in range(case.size)]
    out = case.blank((sum(len(one) for one in received), *case.shape[1:]))
    splits = [len(one) for one in received], [len(one) for one in sent]
    work = dist.all_to_all_single(out, case.place(torch.cat(sent)), *splits, case.group, later)
    return _works(work), lambda: case.expect(out, torch.cat(received))


def _rows(case: Case) -> tuple[int, ...]:
    return case.shape or (1,)


# --- what reduces values
# --------------------------------------------------------------------------------------


def all_reduce(case: Case, later: bool) -> Started:
    tensor = case.place(case.numbers(case.rank))
    work = dist.all_reduce(tensor, case.reduce_op, case.group, later)
    return _works(work), lambda: case.expect(
        tensor, case.folded([case.numbers(r) for r in range(case.size)])
    )


def reduce(case: Case, later: bool) -> Started:
    """The root's result alone is laid down; the others' tensors may hold anything afterwards."""
    tensor = case.place(case.numbers(case.rank))
    work = dist.reduce(tensor, case.global_rank(case.root), case.reduce_op, case.group, later)

    def check() -> None:
        if case.rank == case.root:
            case.expect(tensor, case.folded([case.numbers(rank) for rank in range(case.size)]))

    return _works(work), check


def reduce_scatter(case: Case, later: bool) -> Started:
    parts = [case.place(case.numbers(case.rank, part)) for part in range(case.size)]
    out = case.blank()
    work = dist.reduce_scatter(out, parts, case.reduce_op, case.group, later)

    def check() -> None:
        case.expect(out, case.folded([case.numbers(rank, case.rank) for rank in range(case.size)]))
        _expect_all(
            case, parts, [case.numbers(case.rank, part) for part in range(case.size)], "input"
        )

    return _works(work), check


def reduce_scatter_tensor(case: Case, later: bool) -> Started:
    """The input's first dimension is dealt out to the ranks."""

    def held(rank: int) -> Tensor:
        return torch.cat([case.numbers(rank, part, _rows(case)) for part in range(case.size)])

    mine, out = case.place(held(case.rank)), case.blank(_rows(case))
    work = reduce_scatter_single(out, mine, case.reduce_op, case.group, later)

    def check() -> None:
        case.expect(
            out,
            case.folded([case.numbers(rank, case.rank, _rows(case)) for rank in range(case.size)]),
        )
        case.expect(mine, held(case.rank), "input")

    return _works(work), check


def reduce_scatter_rows(case: Case, later: bool) -> Started:
    """Each rank gets one row of the sum of the inputs."""
    mine = case.place(torch.stack([case.numbers(case.rank, part) for part in range(case.size)]))
    out = case.blank()
    work = reduce_scatter_single(out, mine, case.reduce_op, case.group, later)
    return _works(work), lambda: case.expect(
        out, case.folded([case.numbers(rank, case.rank) for rank in range(case.size)])
    )


# --- between two ranks
# ----------------------------------------------------------------------------------------


def ring(case: Case, later: bool) -> Started:
    """Everyone sends to the next rank and receives from the one before."""
    after, before = (case.rank + 1) % case.size, (case.rank - 1) % case.size
    out, mine = case.blank(), case.place(case.bits(case.rank))
    sent = dist.isend(mine, case.global_rank(after), case.group, tag=case.seed)
    received = dist.irecv(out, case.global_rank(before), case.group, tag=case.seed)
    return _works(received, sent), lambda: case.expect(out, case.bits(before))


def batch(case: Case, later: bool) -> Started:
    """Everyone sends to everyone else, in one batch."""
    peers = [peer for peer in range(case.size) if peer != case.rank]
    out = {peer: case.blank() for peer in peers}
    ops = [dist.P2POp(dist.irecv, out[peer], case.global_rank(peer), case.group) for peer in peers]
    for peer in peers:
        mine = case.place(case.bits(case.rank, peer))
        ops.append(dist.P2POp(dist.isend, mine, case.global_rank(peer), case.group))
    works = dist.batch_isend_irecv(ops)
    return works, lambda: _expect_all(
        case, list(out.values()), [case.bits(p, case.rank) for p in peers], "from"
    )


def barrier(case: Case, later: bool) -> Started:
    work = dist.barrier(case.group, later)
    return _works(work), lambda: None


Operation = Callable[[Case, bool], Started]


def _named(*operations: Operation) -> dict[str, Operation]:
    return {operation.__name__: operation for operation in operations}


REDUCING = _named(all_reduce, reduce, reduce_scatter, reduce_scatter_tensor, reduce_scatter_rows)
MOVING = _named(
    broadcast,
    all_gather,
    all_gather_tensor,
    all_gather_rows,
    gather,
    scatter,
    all_to_all,
    all_to_all_single,
    all_to_all_uneven,
    ring,
    batch,
)
OPERATIONS = REDUCING | MOVING | _named(barrier)
