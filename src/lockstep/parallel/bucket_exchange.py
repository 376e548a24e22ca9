"""How the gradients of a bucket are summed over the workers in the order of the tree, in the memory
in which autograd has left them.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..communicator import Communicator
from ..flight_recorder import named
from .gradient_buckets import Bucket, GradientExchange, Gradients
from .shards import bounds
from .tree_sum import Node, TreeSum, is_left_fold, nodes

_GRADIENTS = "gradient all-reduce"  # what the watchdog calls these collectives
_REDUCED = "gradient reduction"
# The first is the name since torch 2.13.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class SubtreeLayout:
    """The subtrees whose sums each worker holds after its shards.

    Args:
        comm: communicator over the workers, at least two.
        virtual_workers: number of leaves, at least as many as workers.

    Attributes:
        comm: the communicator.
        virtual_workers: the number of leaves.
        by_rank: the subtrees of each worker, in rank order.
        local: the subtrees of this worker.
    """

    def __init__(self, comm: Communicator, virtual_workers: int) -> None:
        self.comm = comm
        self.virtual_workers = virtual_workers
        self.by_rank = [
            nodes(*bounds(virtual_workers, comm.size, rank), virtual_workers)
            for rank in range(comm.size)
        ]
        self.local = self.by_rank[comm.rank]
        self._is_left_fold = is_left_fold(self.by_rank, virtual_workers)

    def is_plain_sum(self, tensor: torch.Tensor) -> bool:
        """Return whether an all-reduce of tensors like `tensor` adds in the order of the tree.

        For two workers it does if each holds one subtree. For more, only the process group knows
        its order of summation: the name of the backend does not determine it. A group without
        `sums_in_rank_order` is assumed to use another order.
        """
        if not self._is_left_fold or self.comm.size == 2:
            return self._is_left_fold
        in_rank_order: Callable[..., bool] | None = getattr(
            self.comm.group, "sums_in_rank_order", None
        )
        return in_rank_order is not None and in_rank_order(tensor.device, tensor.dtype)

    def tree(self) -> TreeSum[torch.Tensor]:
        """Return an empty tree sum of tensors; additions are in place of the left operand."""
        return TreeSum(self.virtual_workers, lambda left, right: left.add_(right))

    def add_rows(self, rows: list[torch.Tensor]) -> torch.Tensor:
        """Return the tree sum of `rows`, one tensor for each subtree of all workers, in order."""
        tree = self.tree()
        for node, row in zip(
            (node for subtrees in self.by_rank for node in subtrees), rows, strict=True
        ):
            tree.push(node, row)
        return tree.total()


# Bytes of gradients that are exchanged at once where no all-reduce adds in the order of the tree,
# and how many such pieces are under way. Their memory is all that an exchange needs beside the
# gradients.
_PIECE = 2 << 20
_PIECES = 4
# Bytes of gradients that have been sent to their owners and may not have arrived: beyond it, a
# backward pass waits.
_UNFINISHED = 64 << 20


class PiecesInFlight:
    """Pieces of gradients that are under way, of all buckets of a step: few at a time, and in the
    order in which they were sent.

    A piece makes two messages: its partial sums go to those that add them up, and the sums go to
    all. As the second one starts when the first one has arrived, when that happens must not depend
    on how fast messages are: all workers start their messages in one order.
    """

    def __init__(self) -> None:
        self._partial_sums: deque[tuple[Any, Callable[[], None]]] = deque()
        self._sums: deque[tuple[Any, Callable[[], None]]] = deque()
        self._whole: deque[tuple[Any, torch.Tensor | None]] = deque()
        self._whole_bytes = 0

    def add_whole(self, work: Any, memory: torch.Tensor | None) -> None:
        """Note a message, and keep the memory that is needed until it has arrived; of that there is
        a limited amount.
        """
        self._whole.append((work, memory))
        self._whole_bytes += 0 if memory is None else memory.nbytes
        while self._whole and (self._whole_bytes > _UNFINISHED or self._whole[0][0].is_completed()):
            self._take_whole()

    def _take_whole(self) -> None:
        work, memory = self._whole.popleft()
        work.wait()
        self._whole_bytes -= 0 if memory is None else memory.nbytes

    def add_partial_sums(self, work: Any, on_arrival: Callable[[], None]) -> None:
        """Note a message, whose values `on_arrival` adds up when too many others have been sent
        after it.
        """
        self._partial_sums.append((work, on_arrival))
        if len(self._partial_sums) > _PIECES:
            _take_first(self._partial_sums)

    def add_sums(self, work: Any, on_arrival: Callable[[], None]) -> None:
        """Note a message with sums, likewise."""
        self._sums.append((work, on_arrival))
        if len(self._sums) > _PIECES:
            _take_first(self._sums)

    def add_up(self) -> None:
        """Wait for all partial sums, and add them up."""
        while self._partial_sums:
            _take_first(self._partial_sums)

    def wait(self) -> None:
        """Wait for all sums."""
        while self._sums:
            _take_first(self._sums)
        while self._whole:
            self._take_whole()

    def abandon(self) -> None:
        """Forget the pieces of a step that was not completed."""
        self._partial_sums.clear()
        self._sums.clear()
        self._whole.clear()
        self._whole_bytes = 0


def _take_first(messages: deque[tuple[Any, Callable[[], None]]]) -> None:
    work, on_arrival = messages.popleft()
    work.wait()
    on_arrival()


class BucketExchange(GradientExchange):
    """Sums one bucket's gradients over the workers, in the memory of the gradients of this worker's
    first subtree.

    The gradient of a parameter that is alone in its bucket is sent from where autograd has left it.
    Others are copied together. Each worker adds up one slice of each piece of the bucket: an
    all-to-all sends it that slice of every subtree, and an all-gather distributes the sums. Where
    the all-reduce adds in the order of the tree, one all-reduce does both.

    Args:
        bucket: the bucket.
        layout: the subtrees of each worker.
        pieces: those of all buckets that are under way.
    """

    def __init__(self, bucket: Bucket, layout: SubtreeLayout, pieces: PiecesInFlight) -> None:
        self._bucket: Bucket = weakref.proxy(bucket)  # which has this exchange
        self._layout = layout
        self._pieces = pieces
        self._plain = layout.is_plain_sum(bucket.parameters[0])
        self._sums: Gradients = []
        self._work: Any = None

    def start(self, partial_sums: list[tuple[Node, Gradients]]) -> None:
        """Start to send the sums over this worker's subtrees."""
        rows: list[torch.Tensor] = []
        for _, gradients in partial_sums:
            row, views = _in_one_memory(self._bucket, gradients)
            if not rows:
                self._sums = views
            rows.append(row)
        with named(_GRADIENTS):
            if self._plain:
                group = self._layout.comm.group
                self._work = dist.all_reduce(rows[0], group=group, async_op=True)
                return
            size = self._layout.comm.size
            length = _PIECE // rows[0].element_size() // size * size  # slices of one length
            for start in range(0, rows[0].numel(), length):
                self._start_piece([row[start : start + length] for row in rows])

    def _start_piece(self, rows: list[torch.Tensor]) -> None:
        layout = self._layout
        size = layout.comm.size
        length = rows[0].numel()
        slice_length = -(-length // size)
        is_even = slice_length * size == length
        sent = rows[0]
        if len(rows) > 1 or not is_even:  # make the values for each rank contiguous
            sent = rows[0].new_empty(size, len(rows), slice_length)
            for number, row in enumerate(rows):
                padded = nn.functional.pad(row, (0, slice_length * size - length))
                sent[:, number].copy_(padded.view(size, slice_length))
        receive_sizes = [len(subtrees) * slice_length for subtrees in layout.by_rank]
        received = rows[0].new_empty(sum(map(len, layout.by_rank)), slice_length)
        work = dist.all_to_all_single(
            received.view(-1),
            sent.view(-1),
            receive_sizes,
            [len(rows) * slice_length] * size,
            group=layout.comm.group,
            async_op=True,
        )

        def add_up() -> None:
            total = layout.add_rows(list(received.unbind()))
            sums = rows[0] if is_even else rows[0].new_empty(slice_length * size)
            with named(_GRADIENTS):
                work = _all_gather(sums, total, group=layout.comm.group, async_op=True)

            def set_sums() -> None:
                if not is_even:
                    rows[0].copy_(sums[:length])

            self._pieces.add_sums(work, set_sums)

        self._pieces.add_partial_sums(work, add_up)

    def add_up(self) -> None:
        """Add up this worker's slices, and start to gather all slices."""
        self._pieces.add_up()

    def wait(self) -> Gradients:
        """Wait for the sums, and return one for each parameter of the bucket."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        self._pieces.wait()
        sums = self._sums
        self._sums = []
        return sums


class OwnerExchange(GradientExchange):
    """Sums one bucket's gradients over the workers, for the owner of its parameters alone.

    The additions are those of `BucketExchange`, in the same order. The sums are in the memory of
    the owner's own gradients; those of the others are freed as soon as they have been sent.

    Args:
        bucket: the bucket, whose parameters have one owner.
        layout: the subtrees of each worker.
        pieces: those of all buckets that are under way.
        owner: the rank of the owner.
    """

    def __init__(
        self, bucket: Bucket, layout: SubtreeLayout, pieces: PiecesInFlight, owner: int
    ) -> None:
        self._bucket: Bucket = weakref.proxy(bucket)  # which has this exchange
        self._layout = layout
        self._pieces = pieces
        self._owner = owner
        self._owns = layout.comm.rank == owner
        self._plain = layout.is_plain_sum(bucket.parameters[0])
        self._sums: Gradients = []

    def start(self, partial_sums: list[tuple[Node, Gradients]]) -> None:
        """Start to send the sums over this worker's subtrees."""
        rows: list[torch.Tensor] = []
        for _, gradients in partial_sums:
            row, views = _in_one_memory(self._bucket, gradients)
            if self._owns and not rows:
                self._sums = views
            rows.append(row)
        with named(_REDUCED):
            if self._plain:
                work = dist.reduce(
                    rows[0], group=self._layout.comm.group, group_dst=self._owner, async_op=True
                )
                self._pieces.add_whole(work, None if self._owns else rows[0])
                return
            length = _PIECE // rows[0].element_size()
            for start in range(0, rows[0].numel(), length):
                self._start_piece([row[start : start + length] for row in rows])

    def _start_piece(self, rows: list[torch.Tensor]) -> None:
        layout = self._layout
        length = rows[0].numel()
        sent = rows[0] if len(rows) == 1 else torch.cat(rows)
        send_sizes = [0] * layout.comm.size
        send_sizes[self._owner] = sent.numel()
        receive_sizes = [len(subtrees) * length if self._owns else 0 for subtrees in layout.by_rank]
        received = sent.new_empty(sum(receive_sizes))
        work = dist.all_to_all_single(
            received, sent, receive_sizes, send_sizes, group=layout.comm.group, async_op=True
        )

        def add_up() -> None:
            if self._owns:
                rows[0].copy_(layout.add_rows(list(received.view(-1, length).unbind())))

        self._pieces.add_partial_sums(work, add_up)

    def add_up(self) -> None:
        """Add up what this worker owns."""
        self._pieces.add_up()

    def wait(self) -> Gradients:
        """Wait for the sums, and return one for each parameter of the bucket at its owner; None for
        each elsewhere.
        """
        self._pieces.wait()
        sums = self._sums if self._owns else [None] * len(self._bucket.parameters)
        self._sums = []
        return sums


def _in_one_memory(bucket: Bucket, gradients: Gradients) -> tuple[torch.Tensor, Gradients]:
    """Return the gradients of a bucket as one flat tensor, and a view of it for each parameter.

    The gradient of a bucket's only parameter is not copied.
    """
    memory = bucket.memory_of(gradients)
    if memory is not None:
        return memory, gradients
    first = bucket.parameters[0]
    # Zeros, because the gaps between parameters are sent and added as well.
    flat = torch.zeros(bucket.numel, dtype=first.dtype, device=first.device)
    # Through .data each has a version of its own, by which a change of one gradient is told from
    # that of another.
    views = [view.data for view in bucket.views(flat)]
    _copy_gradients(gradients, views)
    return flat, list(views)


def _copy_gradients(gradients: Gradients, views: list[torch.Tensor]) -> None:
    """Copy `gradients` into `views`; a missing gradient becomes -0.0, which changes no number it is
    added to.
    """
    pairs = [
        (view, gradient)
        for view, gradient in zip(views, gradients, strict=True)
        if gradient is not None
    ]
    if pairs:
        torch._foreach_copy_([view for view, _ in pairs], [gradient for _, gradient in pairs])
    for view, gradient in zip(views, gradients, strict=True):
        if gradient is None:
            view.fill_(-0.0)


def gather_sum(
    partial_sums: list[tuple[Node, torch.Tensor]], layout: SubtreeLayout
) -> Callable[[], torch.Tensor]:
    """Start the tree sum of small tensors over the workers; returns a function that waits for it
    and returns it.

    Args:
        partial_sums: this worker's subtrees, with 1-d tensors of one size and dtype on all workers.
        layout: the subtrees of each worker.
    """
    local = [value for _, value in partial_sums]
    comm = layout.comm
    if layout.is_plain_sum(local[0]):
        with named("loss and sample count"):
            return comm.iallreduce(local[0]).wait
    rows = max(len(subtrees) for subtrees in layout.by_rank)
    padded = local[0].new_zeros(rows, local[0].numel())
    torch._foreach_copy_(list(padded[: len(local)].unbind()), local)
    gathered = local[0].new_empty(comm.size * rows, local[0].numel())
    with named("loss and sample count"):
        work: Any = _all_gather(gathered, padded, group=comm.group, async_op=True)

    def finish() -> torch.Tensor:
        work.wait()
        by_rank = zip(layout.by_rank, gathered.view(comm.size, rows, -1).unbind(), strict=True)
        return layout.add_rows(
            [row for subtrees, of_rank in by_rank for row in of_rank[: len(subtrees)]]
        )

    return finish
