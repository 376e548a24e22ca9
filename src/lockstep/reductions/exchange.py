"""The tree sum of flat tensors over workers, each of which holds the sums over its own subtrees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..communicator import Communicator
from ..shards import bounds
from ..tree import Node, TreeSum, is_left_fold, nodes
from .buckets import Bucket, Gradients

__all__ = ["BucketExchange", "Places", "gather_sum"]

# The name since torch 2.13, and before.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Places:
    """Which subtrees each worker holds when it has gone through its shards.

    Args:
        comm: the workers, two at least.
        shards: the leaves, at least as many as workers.

    Attributes:
        comm: those.
        shards: their number.
        all: the subtrees of each worker, in rank order.
        mine: those of this one.
    """

    def __init__(self, comm: Communicator, shards: int) -> None:
        self.comm, self.shards = comm, shards
        self.all = [nodes(*bounds(shards, comm.size, rank), shards) for rank in range(comm.size)]
        self.mine = self.all[comm.rank]
        self._fold = is_left_fold(self.all, shards)

    def is_plain_sum(self, tensor: torch.Tensor) -> bool:
        """Whether the transport's own sum over the workers of what is like `tensor` is the tree.

        Of two numbers any sum is. Of more, only the process group itself knows in what order it adds: the name of its
        backend does not tell, and a group that says nothing is taken to have an order of its own.
        """
        if not self._fold or self.comm.size == 2:
            return self._fold
        asked: Callable[..., bool] | None = getattr(self.comm.group, "sums_in_rank_order", None)
        return asked is not None and asked(tensor.device, tensor.dtype)

    def tree(self) -> TreeSum[torch.Tensor]:
        """A sum of tensors over the leaves, in the memory of the left ones."""
        return TreeSum(self.shards, lambda left, right: left.add_(right))

    def fold(self, rows: list[torch.Tensor]) -> torch.Tensor:
        """The sum of one tensor for each subtree of all workers, in order."""
        tree = self.tree()
        for node, row in zip((node for run in self.all for node in run), rows, strict=True):
            tree.push(node, row)
        return tree.total()


class BucketExchange:
    """Sums one bucket's gradients over the workers, in buffers that stay.

    Every worker sends each other one the slice that this one adds up, of every subtree it holds; the sums are
    gathered. Two workers that hold one subtree each just sum.

    Args:
        bucket: whose gradients they are.
        places: who holds which subtrees.
    """

    def __init__(self, bucket: Bucket, places: Places) -> None:
        first, held, size = bucket.parameters[0], len(places.mine), places.comm.size
        self._places, self._plain = places, places.is_plain_sum(first)
        self._slice = -(-bucket.numel // size)
        # Zeros: the gaps between parameters are sent and added as well.
        self._own = torch.zeros(held, self._slice * size, dtype=first.dtype, device=first.device)
        self._views = [bucket.views(row) for row in self._own]
        self._sent = self._own if held == 1 else self._own.new_empty(size, held, self._slice)
        rows = 0 if self._plain else sum(len(run) for run in places.all)
        self._received = self._own.new_empty(rows, self._slice)
        self._work: Any = None

    @property
    def result(self) -> list[torch.Tensor]:
        """The sums, once `finish` has been called and what it returned waited for."""
        return self._views[0]

    def start(self, held: list[tuple[Node, Gradients]]) -> None:
        """Begin to send this worker's subtrees."""
        for views, (_, gradients) in zip(self._views, held, strict=True):
            fill(views, gradients)
        places, group = self._places, self._places.comm.group
        if self._plain:
            self._work = dist.all_reduce(self._own, group=group, async_op=True)
            return
        if len(held) > 1:  # what goes to one rank lies together
            for number, row in enumerate(self._own):
                self._sent[:, number].copy_(row.view(places.comm.size, self._slice))
        coming = [len(run) * self._slice for run in places.all]
        going = [len(held) * self._slice] * places.comm.size
        received, sent = self._received.view(-1), self._sent.view(-1)
        self._work = dist.all_to_all_single(received, sent, coming, going, group=group, async_op=True)

    def add_up(self) -> None:
        """Add up this worker's slice, and begin to gather those of all."""
        if self._plain:
            return
        self._work.wait()
        part = self._places.fold(list(self._received.unbind()))
        self._work = _all_gather(self._own[0], part, group=self._places.comm.group, async_op=True)

    def wait(self) -> list[torch.Tensor]:
        """The sums, one for each parameter of the bucket."""
        self._work.wait()
        self._work = None
        return self._views[0]


def fill(views: list[torch.Tensor], gradients: Gradients) -> None:
    """Copy `gradients` to their places; where there is none, -0.0 is what changes no number that it is added to."""
    there = [(view, gradient) for view, gradient in zip(views, gradients, strict=True) if gradient is not None]
    if there:
        torch._foreach_copy_([view for view, _ in there], [gradient for _, gradient in there])
    for view, gradient in zip(views, gradients, strict=True):
        if gradient is None:
            view.fill_(-0.0)


def gather_sum(held: list[tuple[Node, torch.Tensor]], places: Places) -> Callable[[], torch.Tensor]:
    """Start the tree sum of few numbers, of which every worker gets all; calling what is returned waits for it.

    Args:
        held: this worker's subtrees, with 1-d tensors of one size and dtype on all workers.
        places: who holds which.
    """
    own, comm = [value for _, value in held], places.comm
    if places.is_plain_sum(own[0]):
        return comm.allreduce_async(own[0])
    most = max(len(run) for run in places.all)
    mine = own[0].new_zeros(most, own[0].numel())
    torch._foreach_copy_(list(mine[: len(own)].unbind()), own)
    table = own[0].new_empty(comm.size * most, own[0].numel())
    work: Any = _all_gather(table, mine, group=comm.group, async_op=True)

    def finish() -> torch.Tensor:
        work.wait()
        by_rank = table.view(comm.size, most, -1).unbind()
        return places.fold([row for run, rows in zip(places.all, by_rank, strict=True) for row in rows[: len(run)]])

    return finish
