"""Tensors of every kind: views, gaps between elements, memory that inputs and outputs share, and
autograd's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from support.conformance import Case, Ranks, lay_out
from support.operations import all_gather_single, perform, reduce_scatter_single

only_shm = pytest.mark.parametrize("transport", ["shm"])


# --- gaps
# --------------------------------------------------------------------------------------------------


def write_into(out: Tensor) -> list[Callable[[], object]]:
    """Calls that write to `out`, a tensor of four rows."""
    size = dist.get_world_size()
    dense = torch.zeros(out.shape)
    whole = torch.zeros(size * len(out), *out.shape[1:])
    return [
        lambda: dist.all_reduce(out),
        lambda: dist.reduce(out, 1),
        lambda: dist.broadcast(out, 0),
        lambda: dist.all_gather(
            [out if rank == 1 else dense.clone() for rank in range(size)], dense
        ),
        lambda: dist.scatter(out, [dense] * size if dist.get_rank() == 1 else None, 1),
        lambda: dist.reduce_scatter(out, [dense] * size),
        lambda: reduce_scatter_single(out, whole),
        lambda: dist.all_to_all(
            [out if rank == 1 else dense.clone() for rank in range(size)], [dense] * size
        ),
    ]


def gaps(layout: str) -> None:
    """After each call the memory around and between the tensor's elements holds what it held
    before.
    """
    for number, call in enumerate(write_into(torch.zeros(4, 3))):
        out = lay_out(torch.full((4, 3), 5.0), layout)
        call = write_into(out)[number]
        call()
        room = out._base
        assert room is not None
        out.zero_()
        assert room.sum() == room.numel() - out.numel(), f"call {number}: {room}"


def test_memory_around_a_tensor_is_left_alone(ranks: Ranks) -> None:
    ranks.run(gaps, "offset")


@only_shm
def test_memory_between_elements_is_left_alone(ranks: Ranks) -> None:
    ranks.run(gaps, "strided")


def stay_in_place(layout: str) -> None:
    """Results arrive in the tensor that was given, not in another one."""
    tensor = lay_out(torch.ones(2, 3), layout)
    place = tensor.data_ptr(), tensor.stride()
    dist.all_reduce(tensor)
    dist.broadcast(tensor, 1)
    assert (tensor.data_ptr(), tensor.stride()) == place
    assert tensor.eq(dist.get_world_size()).all()


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "offset"])
def test_results_arrive_in_the_tensor_given(ranks: Ranks, layout: str) -> None:
    ranks.run(stay_in_place, layout)


# --- views that share memory
# ----------------------------------------------------------------------------------


def gather_in_place() -> None:
    """As FSDP does: each rank's input is its own part of the output."""
    rank, size = dist.get_rank(), dist.get_world_size()
    case = Case((5,))
    expected = torch.cat([case.bits(peer) for peer in range(size)])
    out = torch.zeros(5 * size)
    out[5 * rank : 5 * (rank + 1)] = case.bits(rank)
    all_gather_single(out, out[5 * rank : 5 * (rank + 1)])
    case.expect(out, expected)
    rows = torch.zeros(size, 5)
    rows[rank] = case.bits(rank)
    dist.all_gather(list(rows), rows[rank])
    case.expect(rows.flatten(), expected)


def scatter_in_place() -> None:
    """As FSDP does: each rank's output is its own part of the input."""
    rank, size = dist.get_rank(), dist.get_world_size()
    case = Case((5,))
    whole = torch.cat([case.numbers(rank, part) for part in range(size)])
    out = whole[5 * rank : 5 * (rank + 1)]
    reduce_scatter_single(out, whole)
    case.expect(out, case.folded([case.numbers(peer, rank) for peer in range(size)]))


def one_tensor_in_many_places() -> None:
    """An input may stand in a list as often as one likes, and outputs may be parts of one
    tensor.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    mine, out = torch.full((3,), float(rank)), torch.zeros(size, 3)
    dist.all_to_all(list(out), [mine] * size)
    assert torch.equal(out, torch.arange(size).float()[:, None].expand(size, 3))
    total = torch.zeros(3)
    dist.reduce_scatter(total, [mine] * size)
    assert total.tolist() == [sum(range(size))] * 3
    parts = [torch.full((3,), 10.0 * part) for part in range(size)]
    dist.scatter(parts[1], parts if rank == 1 else None, 1)
    assert parts[1].tolist() == [10.0 * rank] * 3


@pytest.mark.parametrize("body", [gather_in_place, scatter_in_place, one_tensor_in_many_places])
def test_inputs_and_outputs_that_share_memory(ranks: Ranks, body: Callable[[], None]) -> None:
    ranks.run(body)


def expanded() -> None:
    """An input of stride 0: many elements in one place."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = torch.full((1, 3), float(rank)).expand(4, 3)
    rows = torch.arange(size).float().repeat_interleave(4)[:, None].expand(4 * size, 3)
    out = torch.zeros(4 * size, 3)
    all_gather_single(out, mine)
    assert torch.equal(out, rows)
    parts = [torch.zeros(4, 3) for _ in range(size)]
    dist.all_gather(parts, mine)
    assert torch.equal(torch.cat(parts), rows)
    dist.gather(mine, parts if rank == 0 else None, 0)
    dist.all_to_all(parts, [mine] * size)
    assert torch.equal(torch.cat(parts), rows)


def test_an_expanded_input(ranks: Ranks) -> None:
    ranks.run(expanded)


# --- lazy views
# -----------------------------------------------------------------------------------------------


def lazy_views() -> None:
    """Tensors that torch only marks as conjugated or negated count with the values that they show.

    c10d itself refuses conjugated tensors, except for gather.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    values = torch.tensor([1 + 2j, 3 - 1j])
    mine = (values * (rank + 1)).conj()
    parts = [torch.zeros_like(values) for _ in range(size)]
    dist.gather(mine, parts if rank == 1 else None, 1)
    if rank == 1:
        assert torch.equal(
            torch.stack(parts), torch.stack([values.conj() * (peer + 1) for peer in range(size)])
        )
    negated = mine.imag
    assert mine.is_conj() and negated.is_neg()
    dist.all_reduce(negated)
    assert negated.tolist() == [-2.0 * sum(range(size + 1)), 1.0 * sum(range(size + 1))]
    assert torch.equal(mine.imag, negated)
    one = torch.tensor([1 + 2j]).conj().imag  # whose memory has the other sign, and no gaps
    dist.all_reduce(one)
    assert one.tolist() == [-2.0 * size]


@only_shm
def test_conjugated_and_negated_views(ranks: Ranks) -> None:
    ranks.run(lazy_views)


# --- sparse tensors
# -------------------------------------------------------------------------------------------


def sparse_sums() -> None:
    """Of rows that differ from rank to rank, some twice on one rank, none on the first rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    held = []
    for peer in range(size):
        rows = torch.tensor([[2, peer, 2], [1, 0, 1]])[:, : 3 * (peer > 0)]
        values = torch.full((rows.shape[1], 2), peer + 1.0)
        held.append(torch.sparse_coo_tensor(rows, values, (4, 4, 2), check_invariants=True))
    expected = sum(part.to_dense() for part in held)
    for tensor in (held[rank].clone(), held[rank].clone().coalesce()):
        dist.all_reduce(tensor)
        assert tensor.is_sparse and torch.equal(tensor.to_dense(), expected)


def test_sparse_sums(ranks: Ranks) -> None:
    ranks.run(sparse_sums)


# --- autograd
# -------------------------------------------------------------------------------------------------


class Rows(Tensor):
    """A subclass without any behaviour of its own, as nn.Parameter is."""


def autograd() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    total = sum(range(1, size + 1))
    parameter = torch.nn.Parameter(torch.full((3,), rank + 1.0))
    with torch.no_grad():
        dist.all_reduce(parameter)
        dist.broadcast(parameter, 0)
    assert parameter.requires_grad and parameter.is_leaf and parameter.grad_fn is None
    assert parameter.tolist() == [total] * 3
    (parameter.sum() * (rank + 1)).backward()
    assert parameter.grad is not None
    dist.all_reduce(parameter.grad)
    assert parameter.grad.tolist() == [total] * 3
    dist.all_reduce(parameter.detach(), dist.ReduceOp.MAX)
    sub = torch.full((2,), rank + 1.0).as_subclass(Rows)
    dist.all_reduce(sub)
    assert sub.tolist() == [total] * 2
    with torch.inference_mode():
        perform("all_reduce", Case())
        perform("all_gather", Case())


def test_tensors_of_autograd(ranks: Ranks) -> None:
    ranks.run(autograd)


def with_gradients_on() -> None:
    """Collectives are no part of the graph: results do not require gradients, and leaves may be
    written to.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    total = float(sum(range(1, size + 1)))
    weight = torch.full((3,), rank + 1.0, requires_grad=True)
    mine = weight * 2
    parts = [torch.zeros(3) for _ in range(size)]
    for later in (False, True):
        finish(dist.all_gather(parts, mine, async_op=later))
        finish(dist.all_gather(parts, weight, async_op=later))
        assert not any(part.requires_grad for part in parts)
        leaf = torch.full((3,), rank + 1.0, requires_grad=True)
        finish(dist.all_reduce(leaf, async_op=later))
        finish(dist.broadcast(leaf, 0, async_op=later))
        assert leaf.is_leaf and leaf.tolist() == [total] * 3
        loss = (weight * 3).sum()
        loss.backward()
        finish(dist.all_reduce(loss, async_op=later))
        assert loss.item() == 9 * total


def in_inference_mode() -> None:
    """Operations under way do not depend on the modes of the thread that carries them out, or waits
    for them.
    """
    size = dist.get_world_size()
    with torch.inference_mode():
        tensor, other = torch.ones(1000), torch.ones(1000)
        parts = [torch.zeros(1000) for _ in range(size)]
        works = [
            dist.all_reduce(tensor, async_op=True),
            dist.all_gather(parts, other, async_op=True),
        ]
        finish(dist.broadcast(torch.ones(1000), 0, async_op=True))
        dist.barrier()
    for work in works:
        work.wait()
    dist.all_reduce(tensor)
    assert tensor.eq(size**2).all() and torch.cat(parts).eq(1).all()


def with_another_default_device() -> None:
    """As when a model is made on the device "meta"; what is made inside does not go there."""
    size = dist.get_world_size()
    tensor, parts = torch.ones(5), [torch.zeros(5) for _ in range(size)]
    whole, large = torch.zeros(5 * size), torch.ones(300_000)
    with torch.device("meta"):
        dist.all_reduce(tensor)
        dist.all_reduce(large)
        dist.broadcast(tensor, 1)
        dist.all_gather(parts, tensor)
        all_gather_single(whole, tensor)
        dist.all_to_all(parts, list(whole.view(size, 5)))
        dist.reduce_scatter(tensor, parts)
        dist.barrier()
    assert tensor.eq(size**2).all() and large.eq(size).all()


def finish(work: Any) -> None:
    if work is not None:
        work.wait()


@pytest.mark.parametrize(
    "body", [with_gradients_on, in_inference_mode, with_another_default_device]
)
def test_modes_of_autograd(ranks: Ranks, body: Callable[[], None]) -> None:
    ranks.run(body)
