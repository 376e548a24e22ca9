"""Gradients summed over the shards of a global batch in one order, whichever worker computes which shard."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from .. import communicator
from ..communicator import Communicator
from ..errors import ConfigError, MismatchError
from ..flight_recorder import named
from .fingerprints import checksum_of
from .gradient_buckets import Bucket, GradientHooks, Gradients, make_buckets
from .nested import sample_count, tensors_of
from .randomness import generator_states, seed_count, set_generator_states
from .shards import DEFAULT_VIRTUAL_WORKERS, bounds, check_virtual_workers
from .tree_sum import Node, TreeSum, is_left_fold, nodes

__all__ = ["BucketExchange", "OrderedReducer", "SubtreeLayout", "gather_sum", "make_exchanges", "set_sums"]


# --- Tree sum over workers --------------------------------------------------------------------------------------------

_GRADIENTS = "gradient all-reduce"  # what the watchdog calls these collectives
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
        self.comm, self.virtual_workers = comm, virtual_workers
        self.by_rank = [nodes(*bounds(virtual_workers, comm.size, rank), virtual_workers) for rank in range(comm.size)]
        self.local = self.by_rank[comm.rank]
        self._is_left_fold = is_left_fold(self.by_rank, virtual_workers)

    def is_plain_sum(self, tensor: torch.Tensor) -> bool:
        """Return whether an all-reduce of tensors like `tensor` adds in the order of the tree.

        For two workers it does if each holds one subtree. For more, only the process group knows its order of
        summation: the name of the backend does not determine it. A group without `sums_in_rank_order` is assumed to
        use another order.
        """
        if not self._is_left_fold or self.comm.size == 2:
            return self._is_left_fold
        in_rank_order: Callable[..., bool] | None = getattr(self.comm.group, "sums_in_rank_order", None)
        return in_rank_order is not None and in_rank_order(tensor.device, tensor.dtype)

    def tree(self) -> TreeSum[torch.Tensor]:
        """Return an empty tree sum of tensors; additions are in place of the left operand."""
        return TreeSum(self.virtual_workers, lambda left, right: left.add_(right))

    def add_rows(self, rows: list[torch.Tensor]) -> torch.Tensor:
        """Return the tree sum of `rows`, one tensor for each subtree of all workers, in order."""
        tree = self.tree()
        for node, row in zip((node for subtrees in self.by_rank for node in subtrees), rows, strict=True):
            tree.push(node, row)
        return tree.total()


class BucketExchange:
    """Sums one bucket's gradients over the workers, in persistent buffers.

    Each worker adds up one slice of the bucket: an all-to-all sends it that slice of every subtree, and an all-gather
    distributes the sums. Where the all-reduce adds in the order of the tree, one all-reduce does both.

    Args:
        bucket: the bucket.
        layout: the subtrees of each worker.
    """

    def __init__(self, bucket: Bucket, layout: SubtreeLayout) -> None:
        first, rows, size = bucket.parameters[0], len(layout.local), layout.comm.size
        self._layout, self._plain = layout, layout.is_plain_sum(first)
        self._slice = -(-bucket.numel // size)
        # Zeros, because the gaps between parameters are sent and added as well.
        self._local = torch.zeros(rows, self._slice * size, dtype=first.dtype, device=first.device)
        # Through .data each has a version of its own, by which a change of one gradient is told from that of another.
        self._views = [[view.data for view in bucket.views(row)] for row in self._local]
        self._sent = self._local if rows == 1 else self._local.new_empty(size, rows, self._slice)
        rows_received = 0 if self._plain else sum(len(subtrees) for subtrees in layout.by_rank)
        self._received = self._local.new_empty(rows_received, self._slice)
        self._work: Any = None

    def start(self, partial_sums: list[tuple[Node, Gradients]]) -> None:
        """Start to send the sums over this worker's subtrees."""
        with named(_GRADIENTS):
            self._start(partial_sums)

    def _start(self, partial_sums: list[tuple[Node, Gradients]]) -> None:
        for views, (_, gradients) in zip(self._views, partial_sums, strict=True):
            copy_gradients(gradients, views)
        layout, group = self._layout, self._layout.comm.group
        if self._plain:
            self._work = dist.all_reduce(self._local, group=group, async_op=True)
            return
        if len(partial_sums) > 1:  # make the values for each rank contiguous
            for number, row in enumerate(self._local):
                self._sent[:, number].copy_(row.view(layout.comm.size, self._slice))
        receive_sizes = [len(subtrees) * self._slice for subtrees in layout.by_rank]
        send_sizes = [len(partial_sums) * self._slice] * layout.comm.size
        received, sent = self._received.view(-1), self._sent.view(-1)
        self._work = dist.all_to_all_single(received, sent, receive_sizes, send_sizes, group=group, async_op=True)

    def add_up(self) -> None:
        """Add up this worker's slice, and start to gather all slices."""
        if self._plain:
            return
        self._work.wait()
        total = self._layout.add_rows(list(self._received.unbind()))
        with named(_GRADIENTS):
            self._work = _all_gather(self._local[0], total, group=self._layout.comm.group, async_op=True)

    def wait(self) -> list[torch.Tensor]:
        """Wait for the sums, and return one for each parameter of the bucket."""
        self._work.wait()
        self._work = None
        return self._views[0]


def copy_gradients(gradients: Gradients, views: list[torch.Tensor]) -> None:
    """Copy `gradients` into `views`; a missing gradient becomes -0.0, which changes no number it is added to."""
    pairs = [(view, gradient) for view, gradient in zip(views, gradients, strict=True) if gradient is not None]
    if pairs:
        torch._foreach_copy_([view for view, _ in pairs], [gradient for _, gradient in pairs])
    for view, gradient in zip(views, gradients, strict=True):
        if gradient is None:
            view.fill_(-0.0)


# Bytes of a bucket: large enough to amortise the latency of a message, small enough that the first one is sent early.
_BUCKET = 4 << 20


def make_exchanges(
    parameters: Sequence[nn.Parameter], layout: SubtreeLayout
) -> tuple[list[Bucket], list[BucketExchange]]:
    """Group `parameters`, in the order in which gradients arrive, into buckets; returns them with their exchanges.

    On a single worker there are no exchanges.
    """
    distributed = layout.comm.size > 1
    make = partial(Bucket, virtual_workers=layout.virtual_workers)
    buckets = make_buckets(parameters, _BUCKET if distributed else None, make)
    return buckets, [BucketExchange(bucket, layout) for bucket in buckets] if distributed else []


def set_sums(buckets: list[Bucket], exchanges: list[BucketExchange]) -> None:
    """Set the gradient of each parameter to the sum over all shards, after all exchanges have started."""
    for exchange in exchanges:
        exchange.add_up()
    for number, bucket in enumerate(buckets):
        sums = exchanges[number].wait() if exchanges else bucket.tree.total()
        for p, gradient in zip(bucket.parameters, sums, strict=True):
            # -0.0 as with several workers, see `copy_gradients`.
            p.grad = torch.full_like(p, -0.0) if gradient is None else gradient
        bucket.tree.clear()


def gather_sum(partial_sums: list[tuple[Node, torch.Tensor]], layout: SubtreeLayout) -> Callable[[], torch.Tensor]:
    """Start the tree sum of small tensors over the workers; returns a function that waits for it and returns it.

    Args:
        partial_sums: this worker's subtrees, with 1-d tensors of one size and dtype on all workers.
        layout: the subtrees of each worker.
    """
    local, comm = [value for _, value in partial_sums], layout.comm
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
        return layout.add_rows([row for subtrees, of_rank in by_rank for row in of_rank[: len(subtrees)]])

    return finish


# --- Reducer ----------------------------------------------------------------------------------------------------------


class OrderedReducer:
    """Computes the same bits in the gradients at any number of workers, in a custom training loop.

    A step's global batch is cut into `virtual_workers` shards, each with its own forward and backward pass. A worker
    computes a contiguous range of shards, and the gradients of all shards are added in the binary tree over their
    numbers (`lockstep.parallel.tree_sum`), within a worker and across workers. One iteration over the reducer
    computes the sum of one step::

        reducer = lockstep.invariance.OrderedReducer(model.parameters(), virtual_workers=8)
        for step, (inputs, labels) in enumerate(global_batches):    # the same batches on every worker
            for shard in reducer:                                   # this worker's shards, in order
                part = reducer.part((inputs, labels), shard)        # slice(start, stop) of the samples
                lockstep.invariance.seed_shard(seed, step, shard)              # for dropout and the like
                loss = F.cross_entropy(model(inputs[part]), labels[part], reduction="sum") / len(inputs)
                loss.backward()
            optimizer.step()                                        # .grad is the sum over all shards

    If `seed_shard` was called in the loop, the global random generators are restored after it, so that a shuffling
    `DataLoader` keeps drawing the same order on every worker. The batches that the workers pass to `part` are compared.

    The reducer discards earlier gradients. A shard makes at most one backward pass. A parameter without a gradient in a
    shard adds nothing; one without a gradient in the whole step gets a gradient of zeros. Complete buckets are sent
    while the last shard's backward pass runs. Parameters may be frozen and unfrozen between steps, in the same way on
    all workers.

    Args:
        parameters: the parameters whose gradients are summed, in the same order on every worker.
        virtual_workers: number of shards of a global batch.
        comm: communicator over the workers; that of `lockstep.init()` when None.
        bare: neither restore the random generators nor compare the batches.

    Attributes:
        local_shards: the numbers of this worker's shards.
        shard: the number of the shard whose passes run, or have run last.
        sums: the sums of the numbers passed to `add`, after a step; None without any.

    Raises:
        ConfigError: for fewer virtual workers than workers.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        virtual_workers: int = DEFAULT_VIRTUAL_WORKERS,
        comm: communicator.Communicator | None = None,
        *,
        bare: bool = False,
    ) -> None:
        self.comm = comm or communicator.init()
        self.virtual_workers = check_virtual_workers(virtual_workers, self.comm.size)
        self.local_shards = range(*bounds(self.virtual_workers, self.comm.size, self.comm.rank))
        self.sums: torch.Tensor | None = None
        self._parameters = list(parameters)
        self._layout = SubtreeLayout(self.comm, self.virtual_workers)
        self._trained: list[nn.Parameter] = []
        self._buckets: list[Bucket] = []
        self._exchanges: list[BucketExchange] = []
        self._hooks = GradientHooks()
        self._numbers: TreeSum[torch.Tensor] = self._layout.tree()
        self._wait_for_sums: Callable[[], torch.Tensor] | None = None
        self.shard, self._sent, self._known_order = -1, 0, False
        self._iteration: object = None
        self._in_progress = False
        self._generators = None if bare else _GeneratorGuard(self.comm.device)
        self._batch_check = None if bare or self.comm.size == 1 else _BatchCheck(self.comm)

    def part(self, batch: Any, shard: int) -> slice:
        """Return the samples of a global batch that belong to `shard`; empty if there are fewer samples than shards.

        Args:
            batch: the global batch, equal on every worker: tensors with their samples in the first dimension, nested in
                tuples, lists and mappings. If it is the number of samples, only that number is compared.
            shard: the number of the shard.
        """
        samples = batch if isinstance(batch, int) else sample_count(batch)
        if self._batch_check is not None:
            self._batch_check.record(batch, samples)
        return slice(*bounds(samples, self.virtual_workers, shard))

    def trained(self) -> list[nn.Parameter]:
        """Return the parameters that require a gradient now."""
        return [p for p in self._parameters if p.requires_grad]

    def __iter__(self) -> Iterator[int]:
        """Iterate over this worker's shards of one step; after the loop, gradients are the sums over all shards.

        Raises:
            ConfigError: if a shard has several backward passes or a sparse gradient, or a parameter has a hook of
                `register_post_accumulate_grad_hook`.
            MismatchError: on every worker, if the workers passed different global batches to `part`. On devices other
                than the CPU the check runs at steps 0, 1, 2, 4, 8 and so on, because it waits for the device.
        """
        iteration = self._iteration = object()
        self._begin()
        try:
            for shard in self.local_shards:
                self._begin_shard(shard)
                yield shard
                if self._iteration is not iteration:
                    raise ConfigError("reducer", "one loop over it at a time", found="another one, begun inside of it")
                self._end_shard(shard)
            self._end()
        finally:
            # The generator of an abandoned loop may be finalized during a later loop.
            if self._iteration is iteration:
                self._hooks.remove()
                if self._generators is not None:
                    self._generators.restore()

    def add(self, numbers: torch.Tensor) -> None:
        """Add numbers of this shard, such as its loss, to a sum in the same tree; call it before the backward pass.

        Args:
            numbers: 1-d floating tensor, of the same size in every shard; overwritten with partial sums.

        Raises:
            ConfigError: if gradients of the last shard have been sent already.
        """
        if self._sent:
            hint = "Call add() between the forward and the backward pass."
            raise ConfigError(
                "numbers", "numbers before the backward pass of their shard", found="some after it", hint=hint
            )
        self._numbers.push((self.shard, 1), numbers)
        if self.shard == self.local_shards[-1] and self.comm.size > 1:
            self._wait_for_sums = gather_sum(self._numbers.partial_sums, self._layout)

    def _begin(self) -> None:
        trained = self.trained()
        if [id(p) for p in trained] != [id(p) for p in self._trained]:
            # Backward passes mostly reach the last parameters first; the real order is known after one step.
            self._trained, self._known_order = trained, False
            self._make_buckets(trained[::-1])
        elif self._in_progress:  # communication of an abandoned loop may still write to the old buffers
            self._make_buckets([p for bucket in self._buckets for p in bucket.parameters])
        self._in_progress = True
        self._hooks.remove()
        if self._generators is not None:
            self._generators.save()
        self._hooks.refuse_other_hooks(trained)
        self._numbers.clear()
        self.sums, self._wait_for_sums, self._sent = None, None, 0
        for bucket in self._buckets:
            bucket.tree.clear()
            bucket.pending = len(bucket.parameters)
        for p in trained:
            p.grad = None

    def _make_buckets(self, order: list[nn.Parameter]) -> None:
        self._buckets, self._exchanges = make_exchanges(order, self._layout)

    def _begin_shard(self, shard: int) -> None:
        self.shard = shard
        # Autograd adds the second gradient of a pair to the first: that is the lowest level of the tree.
        second = self._is_second(shard)
        self._hooks.record_versions(self._trained if second else [])
        if not second:
            for bucket in self._buckets:
                bucket.release()
        if shard == self.local_shards[-1] and self.comm.size > 1:
            self._hooks.register(self._buckets, self._send_ready)

    def _is_second(self, shard: int) -> bool:
        """Return whether `shard` is the second of a pair of siblings that this worker computes."""
        return shard % 2 == 1 and shard - 1 in self.local_shards

    def _end_shard(self, shard: int) -> None:
        self._hooks.check_one_pass(self._trained)
        if shard % 2 == 0 and shard + 1 in self.local_shards:
            return
        for number in range(self._sent, len(self._buckets)):
            self._collect(number)

    def _collect(self, number: int) -> None:
        """Move a bucket's gradients into its tree, and send the partial sums after the last shard."""
        bucket, shard = self._buckets[number], self.shard
        bucket.collect((shard - 1, 2) if self._is_second(shard) else (shard, 1))
        if self._exchanges and shard == self.local_shards[-1]:
            self._exchanges[number].start(bucket.tree.partial_sums)
            bucket.retire()
            self._sent = number + 1

    def _send_ready(self) -> None:
        """Send the complete buckets, in the same order on all workers."""
        while self._sent < len(self._buckets) and not self._buckets[self._sent].pending:
            self._collect(self._sent)

    def _end(self) -> None:
        order = self._hooks.remove()
        set_sums(self._buckets, self._exchanges)
        if self._wait_for_sums is not None:
            self.sums = self._wait_for_sums()
        elif self._numbers.partial_sums:
            self.sums = self._numbers.total()
        self._in_progress = False
        if self._batch_check is not None:
            self._batch_check.compare()
        if not self._known_order:
            self._known_order = True
            if self._exchanges:
                self._reorder_buckets(order)

    def _reorder_buckets(self, arrived: list[nn.Parameter]) -> None:
        """Rebuild the buckets in the order in which gradients have arrived on rank 0."""
        position = {id(p): number for number, p in enumerate(self._trained)}
        order = list(dict.fromkeys([*(position[id(p)] for p in arrived), *reversed(range(len(position)))]))
        rank0_order = self.comm.broadcast(torch.tensor(order, dtype=torch.int64, device=self.comm.device))
        gradients = [p.grad for p in self._trained]
        self._make_buckets([self._trained[number] for number in rank0_order.tolist()])
        for p, gradient in zip(self._trained, gradients, strict=True):
            p.grad = gradient  # a view of the old buckets


class _GeneratorGuard:
    """Restores the global random generators after a step whose shards were seeded with `seed_shard`.

    Args:
        device: the device of the model; its generator is included.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._seed_count = device, 0
        self._states: tuple[Any, ...] | None = None

    def save(self) -> None:
        """Save the states at the beginning of a step."""
        self.restore()  # of an abandoned loop
        self._states, self._seed_count = generator_states(self._device), seed_count()

    def restore(self) -> None:
        """Restore the saved states; without a call of `seed_shard` the generators keep what they have drawn."""
        if self._states is not None and seed_count() != self._seed_count:
            set_generator_states(self._states)
        self._states = None


class _BatchCheck:
    """Checks that all workers take their shards from the same global batches.

    Args:
        comm: communicator over the workers, at least two.
    """

    def __init__(self, comm: communicator.Communicator) -> None:
        self._comm, self._steps, self._samples = comm, 0, 0
        self._checksum: torch.Tensor | None = None
        self._differ: torch.Tensor | bool = False

    def record(self, batch: Any, samples: int) -> None:
        """Compute the checksum of a step's first `batch`."""
        if self._checksum is None:
            tensors = [torch.tensor(samples)] if isinstance(batch, int) else tensors_of(batch)
            self._checksum, self._samples = checksum_of(tensors).to(self._comm.device), samples

    def compare(self) -> None:
        """Compare the checksums at the end of a step; called by every worker.

        Raises:
            MismatchError: on every worker, if the batches differ.
        """
        checksum = self._checksum
        # A worker that has not called `part` contributes less than any checksum.
        missing = torch.full((2,), -(1 << 62), dtype=torch.int64, device=self._comm.device)
        extremes = self._comm.allreduce(missing if checksum is None else torch.stack([checksum, -checksum]), "max")
        self._differ = ((extremes.sum() != 0) & (extremes[0] >= 0)) | self._differ
        due = extremes.device.type == "cpu" or self._steps & (self._steps - 1) <= 0
        step, self._steps, self._checksum = self._steps, self._steps + 1, None
        if due and bool(self._differ):
            self._raise_mismatch(step, None if checksum is None else int(checksum))

    def _raise_mismatch(self, step: int, checksum: int | None) -> NoReturn:
        by_rank = self._comm.allgather_object((checksum, self._samples))
        first, *others = [(rank, *theirs) for rank, theirs in enumerate(by_rank) if theirs[0] is not None]
        other = next((theirs for theirs in others if theirs[1:] != first[1:]), None)
        if other is None:
            where = f"two ranks differ, before step {step} of the reducer"
        else:
            ranks = f"rank {first[0]} ({first[2]} samples) and rank {other[0]} ({other[2]})"
            where = f"{ranks} differ, at step {step} of the reducer"
        raise MismatchError(
            f"the workers take their shards from different global batches: those of {where}. Every worker "
            "must iterate over the same global batches: seed every rank alike before a shuffling DataLoader is made, "
            "call lockstep.invariance.seed_shard before each shard's forward pass, and draw no random numbers on some "
            "ranks only; or give the DataLoader its own generator."
        )
