"""Gradients, and a few numbers beside them, summed over the shards of a global batch in one order
on any worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn

from .. import observers
from ..communicator import Communicator
from ..errors import ConfigError
from .bucket_exchange import (
    BucketExchange,
    OwnerExchange,
    PiecesInFlight,
    SubtreeLayout,
    gather_sum,
)
from .gradient_buckets import (
    ALONE,
    BUCKET,
    Bucket,
    GradientExchange,
    GradientHooks,
    Gradients,
    group_parameters,
    refuse_further_pass,
)
from .shards import bounds, check_virtual_workers
from .tree_sum import Node, TreeSum
from .weight_gradients import Product, Sum, Value, WeightGradients

__all__ = ["Reducer"]


class Reducer:
    """Sums gradients, and a few numbers beside them, over the shards of a global batch.

    A step's batch is cut into `virtual_workers` shards, each with its own passes. A worker computes
    a contiguous range of them, and the gradients of all shards are added in the binary tree over
    their numbers (`lockstep.parallel.tree_sum`), within a worker and across workers. A step is
    `begin`; for each of this worker's shards, in order, `open`, its forward passes, `add`, its
    backward passes, and `close`; then `finish`, after which ``.grad`` holds the sums. `shards` does
    all but `add` for a loop over it.

    A parameter without a gradient in a shard adds nothing; one without a gradient in the whole step
    gets one of zeros. Trained parameters may be others in each step, in the same way on all
    workers.

    Args:
        comm: communicator over the workers.
        virtual_workers: number of shards of a global batch.
        one_pass: whether each shard makes one backward pass at most, and its gradients begin as
            None. Then autograd adds the second shard of a pair to the first, in place, and buckets
            are sent while the last shard's pass runs. Otherwise a shard's gradients are whatever is
            in ``.grad`` when it is closed.
        exchange: makes another exchange for a bucket, by which those of several workers find each
            other: a bucket is sent as soon as it is complete, on each worker in an order of its
            own. None for exchanges over `comm`, which all workers start in one order.
        owner_of: the rank of the owner of each parameter, who alone gets its sum; on the others its
            gradient is None after a step. None if all workers get all sums.

    Attributes:
        local_shards: the numbers of this worker's shards.
        shard: the number of the shard whose passes run, or have run last.
        sums: the sums of the numbers passed to `add`, after a step; None without any.

    Raises:
        ConfigError: for fewer virtual workers than workers.
    """

    def __init__(
        self,
        comm: Communicator,
        virtual_workers: int,
        *,
        one_pass: bool,
        exchange: Callable[[Bucket], GradientExchange] | None = None,
        owner_of: Mapping[torch.Tensor, int] | None = None,
    ) -> None:
        self.comm = comm
        self.one_pass = one_pass
        self.virtual_workers = check_virtual_workers(virtual_workers, comm.size)
        self.local_shards = range(*bounds(self.virtual_workers, comm.size, comm.rank))
        self.shard = -1
        self.sums: torch.Tensor | None = None
        self._layout = SubtreeLayout(comm, self.virtual_workers)
        # The gradients of the only shard stay where they are: they are the sums, or other workers'
        # are added to them.
        self._in_place = self.virtual_workers == 1 and not one_pass
        self._any_order = exchange is not None
        self._exchange = exchange
        self._has_exchanges = exchange is not None or comm.size > 1
        self._pieces = PiecesInFlight()
        self._owner_of = owner_of
        self._trained: list[nn.Parameter] = []
        self._buckets: list[Bucket] = []
        self._hooks = GradientHooks()
        self._weight_gradients = WeightGradients()
        self._products: dict[nn.Parameter, Value] = {}  # of shards that are not in the tree yet
        self._numbers: TreeSum[torch.Tensor] = self._layout.tree()
        self._wait_for_sums: Callable[[], torch.Tensor] | None = None
        self._sent = 0  # buckets of this step
        self._known_order = False
        self._step: object = None

    def shards(self, trained: list[nn.Parameter]) -> Iterator[int]:
        """Yield the numbers of this worker's shards, whose passes run in the body of the loop over
        them.

        Args:
            trained: the parameters, see `begin`.

        Raises:
            ConfigError: see `begin` and `close`.
        """
        step = self._step = object()
        self.begin(trained)
        try:
            for shard in self.local_shards:
                self.open(shard)
                yield shard
                if self._step is not step:
                    raise ConfigError(
                        "reducer",
                        "one loop over it at a time",
                        found="another one, begun inside of it",
                    )
                self.close()
            self.finish()
        finally:
            # The generator of an abandoned loop may be finalized during a later loop.
            if self._step is step:
                self.abandon()

    def begin(
        self, trained: list[nn.Parameter], groups: Sequence[Sequence[nn.Parameter]] | None = None
    ) -> None:
        """Begin a step; what an unfinished one has summed is dropped.

        Args:
            trained: the parameters whose gradients are summed, in the same order on every worker.
            groups: the same parameters in lists of those that are sent together; None for buckets
                of a size and an order that the reducer chooses. They are looked at when `trained`
                has changed.

        Raises:
            ConfigError: with `one_pass`, if a parameter has a hook of
                `register_post_accumulate_grad_hook`.
        """
        if len(trained) != len(self._trained) or any(
            p is not q for p, q in zip(trained, self._trained, strict=True)
        ):
            # Backward passes mostly reach the last parameters first; the real order is known after
            # one step.
            self._trained = list(trained)
            self._known_order = groups is not None
            if groups is None:
                self._make_buckets(trained[::-1])
            else:
                self._set_buckets([self._make_bucket(group) for group in groups])
        self._pieces.abandon()
        self._numbers.clear()
        self.sums = None
        self._wait_for_sums = None
        self._sent = 0
        self._products.clear()
        for bucket in self._buckets:
            bucket.tree.clear()
            bucket.pending = len(bucket.parameters)
            bucket.is_sent = False
        if self.one_pass:
            self.abandon()
            self._hooks.refuse_other_hooks(trained)
            for p in trained:
                p.grad = None

    def _exchange_of(self, bucket: Bucket) -> GradientExchange:
        """Return the exchange of a bucket over the workers."""
        if self._exchange is not None:
            return self._exchange(bucket)
        if self._owner_of is None:
            return BucketExchange(bucket, self._layout, self._pieces)
        owner = self._owner_of[bucket.parameters[0]]
        return OwnerExchange(bucket, self._layout, self._pieces, owner)

    def _make_buckets(self, order: list[nn.Parameter]) -> None:
        """Group parameters, in the order in which gradients arrive, into buckets."""
        limit = BUCKET if self._has_exchanges else None
        alone = ALONE if self._has_exchanges else None
        groups = group_parameters(order, limit, alone, self._owner_of)
        self._set_buckets([self._make_bucket(group) for group in groups])

    def _make_bucket(self, parameters: Sequence[nn.Parameter]) -> Bucket:
        return Bucket(parameters, self.virtual_workers)

    def _set_buckets(self, buckets: list[Bucket]) -> None:
        """Use `buckets` from now on, each with an exchange of its own."""
        self._buckets = buckets
        if self._has_exchanges:
            for bucket in buckets:
                bucket.exchange = self._exchange_of(bucket)

    def open(
        self,
        shard: int,
        passes: int | None = None,
        on_further_pass: Callable[[], None] = refuse_further_pass,
    ) -> None:
        """Begin the passes of `shard`, the next one of this worker's.

        Args:
            shard: its number.
            passes: how many backward passes it makes; then the buckets of the last shard are sent
                while its last pass runs. None, without `one_pass`, if that is not known.
            on_further_pass: called when a parameter gets a gradient after those passes.
        """
        self.shard = shard
        second = self._is_second(shard)
        if not second:
            for bucket in self._buckets:
                bucket.release()
        if self.one_pass:
            passes = 1
            self._hooks.record_versions(self._trained if second else [])
        if passes is not None and shard == self.local_shards[-1] and self._has_exchanges:
            self._hooks.expect(self._buckets, self._send_ready, passes, on_further_pass)

    def _is_second(self, shard: int) -> bool:
        """Return whether the gradients of `shard` are added to those of its sibling, which this
        worker has computed.

        Autograd adds the second gradient of a pair to the first: that is the lowest level of the
        tree.
        """
        return self.one_pass and shard % 2 == 1 and shard - 1 in self.local_shards

    def leaves_of(self, loss: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the leaves whose gradients the only backward pass of the open shard has to
        compute, as the ``inputs`` of `torch.autograd.backward`; none for all.

        The gradients of the other leaves, weights of large linear layers, are computed later for
        all shards of this worker at once, with the same bits; see
        `lockstep.parallel.weight_gradients`.

        Args:
            loss: of the shard, right before its backward pass.
        """
        if not self.one_pass or len(self.local_shards) == 1:
            return ()
        return self._weight_gradients.leaves_of(loss, self._trained, self._note_product)

    def _note_product(self, weight: nn.Parameter, product: Product) -> None:
        first = self._products.get(weight)  # of the other shard of a pair
        self._products[weight] = product if first is None else Sum(first, product)
        self._hooks.note(weight)

    def add(self, numbers: torch.Tensor) -> None:
        """Add numbers of this shard, such as its loss, to a sum in the same tree; call it before
        the backward pass.

        Args:
            numbers: 1-d floating tensor, of the same size in every shard; overwritten with partial
                sums.

        Raises:
            ConfigError: if gradients of the last shard have been sent already.
        """
        if self._sent:
            hint = "Call add() between the forward and the backward pass."
            raise ConfigError(
                "numbers",
                "numbers before the backward pass of their shard",
                found="some after it",
                hint=hint,
            )
        self._numbers.push((self.shard, 1), numbers)
        if self.shard == self.local_shards[-1] and self.comm.size > 1:
            self._wait_for_sums = gather_sum(self._numbers.partial_sums, self._layout)

    def close(self) -> None:
        """Add the gradients of the open shard to the sums, and set them to None; the sums are sent
        after the last one.

        Raises:
            ConfigError: for a sparse gradient, and with `one_pass` for several backward passes.
        """
        if self.one_pass:
            self._hooks.check_one_pass(self._trained)
            if self.shard % 2 == 0 and self.shard + 1 in self.local_shards:
                return
        if self._in_place and not self._has_exchanges:
            return
        for bucket in self._buckets:
            if not bucket.is_sent:
                self._collect(bucket)

    def _collect(self, bucket: Bucket) -> None:
        """Move a bucket's gradients into its tree, and send the partial sums after the last
        shard.
        """
        shard = self.shard
        if self._in_place:
            self._send(bucket, [((shard, 1), [p.grad for p in bucket.parameters])])
            return
        node = (shard - 1, 2) if self._is_second(shard) else (shard, 1)
        bucket.collect(node, self._products)
        if self._has_exchanges and shard == self.local_shards[-1]:
            self._send(bucket, bucket.partial_sums())
            if self._owner_of is None:
                bucket.retire()
            else:
                bucket.clear()

    def _send(self, bucket: Bucket, partial_sums: list[tuple[Node, Gradients]]) -> None:
        assert bucket.exchange is not None
        bucket.exchange.start(partial_sums)
        bucket.is_sent = True
        self._sent += 1

    def _send_ready(self, complete: Bucket) -> None:
        """Send a bucket that is complete; where all workers send in one order, those whose turn it
        is.
        """
        if self._any_order:
            self._collect(complete)
            return
        while self._sent < len(self._buckets) and not self._buckets[self._sent].pending:
            self._collect(self._buckets[self._sent])

    @property
    def is_sending(self) -> bool:
        """Whether gradients of this step have been sent, and `finish` has not been called."""
        return self._sent > 0

    def abandon(self) -> None:
        """Take no more notice of gradients, and of messages under way, until the next `open`."""
        self._hooks.remove()
        self._weight_gradients.forget()
        self._pieces.abandon()  # what they do on arrival refers to them

    def finish(self) -> None:
        """Set the gradient of each parameter to its sum over all shards of all workers, and
        `sums`.
        """
        if not self._any_order:  # otherwise the next step needs them at once
            self._hooks.remove()
        with observers.active().reducing(self.comm.size):
            if self._in_place and not self._has_exchanges:
                for p in self._trained:
                    if p.grad is None:
                        p.grad = torch.zeros_like(p)
            else:
                self._set_gradients()
            if self._wait_for_sums is not None:
                self.sums = self._wait_for_sums()
            elif self._numbers.partial_sums:
                self.sums = self._numbers.total()
        self._sent = 0
        if self.one_pass and not self._known_order:
            self._known_order = True
            if self._has_exchanges:
                self._reorder_buckets(self._hooks.order)

    def _set_gradients(self) -> None:
        for bucket in self._buckets:
            if bucket.exchange is not None:
                bucket.exchange.add_up()
        for bucket in self._buckets:
            if bucket.exchange is None:
                # -0.0 as with several workers, see `BucketExchange`.
                sums: Gradients = [
                    torch.full_like(p, -0.0) if gradient is None else gradient
                    for p, gradient in zip(bucket.parameters, bucket.total(), strict=True)
                ]
            else:
                sums = bucket.exchange.wait()
            for p, gradient in zip(bucket.parameters, sums, strict=True):
                p.grad = gradient
            bucket.tree.clear()

    def _reorder_buckets(self, arrived: list[nn.Parameter]) -> None:
        """Rebuild the buckets in the order in which gradients have arrived on rank 0."""
        position = {id(p): number for number, p in enumerate(self._trained)}
        order = list(
            dict.fromkeys([*(position[id(p)] for p in arrived), *reversed(range(len(position)))])
        )
        rank0_order = self.comm.broadcast(
            torch.tensor(order, dtype=torch.int64, device=self.comm.device)
        )
        self._make_buckets([self._trained[number] for number in rank0_order.tolist()])
