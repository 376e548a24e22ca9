"""Gradients summed over the shards of a global batch in one order, whichever worker computes which shard."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from .. import communicator
from ..data.nested import tensors_of
from ..errors import ConfigError, MismatchError
from ..fingerprints import checksum_of
from ..randomness import draw_on, drawn_so_far, times_seeded
from ..shard_count import DEFAULT_SHARDS, shard_count
from ..shards import bounds
from ..tree import Node, TreeSum
from .arriving import Arrivals
from .buckets import Bucket, grouped
from .exchange import BucketExchange, Places, gather_sum

__all__ = ["OrderedReducer"]

# Bytes of a bucket: large enough to hide what a message costs, small enough that the first one leaves early.
_BUCKET = 4 << 20


class OrderedReducer:
    """Leaves the same bits in the gradients at any number of workers, for a training loop of one's own.

    A step's global batch is cut into `shards` parts, each with a forward and a backward pass of its own. A worker goes
    through a contiguous run of them, and the gradients of all are added in the binary tree over their numbers
    (`lockstep.tree`), inside a worker as across workers. Going over the reducer makes one step's sum::

        reducer = lockstep.OrderedReducer(model.parameters(), shards=8)
        for step, (inputs, labels) in enumerate(global_batches):    # the same batches on every worker
            for shard in reducer:                                   # this worker's shards, in order
                part = reducer.part((inputs, labels), shard)        # slice(start, stop) of the samples
                lockstep.seed_shard(seed, step, shard)              # for dropout and the like
                loss = F.cross_entropy(model(inputs[part]), labels[part], reduction="sum") / len(inputs)
                loss.backward()
            optimizer.step()                                        # .grad is the sum over all shards

    After the loop the global generators are as they were before it, if `seed_shard` was called in it: a `DataLoader`
    that shuffles draws the same order on every worker, if it did so before. What workers give to `part` is compared.

    Gradients that there were before are dropped. A shard makes one backward pass, or none; a parameter without a
    gradient in a shard adds nothing, and one without any in the whole step has a gradient of zeros. While the last
    shard's backward pass runs, buckets that are complete are sent. Parameters may be frozen and unfrozen between
    steps, on all workers alike.

    Args:
        parameters: those whose gradients are summed, the same ones in the same order on every worker.
        shards: into how many parts a global batch is cut; True is 8.
        comm: the workers; those of `lockstep.init()` when None.
        bare: leave generators and batches to the caller.

    Attributes:
        here: the numbers of this worker's shards.
        sums: what was given to `add`, summed, after a step; None without.

    Raises:
        ConfigError: for fewer shards than workers.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        shards: int = DEFAULT_SHARDS,
        comm: communicator.Communicator | None = None,
        *,
        bare: bool = False,
    ) -> None:
        self.comm = comm or communicator.init()
        self.shards = shard_count(shards, self.comm.size)
        self.here = range(*bounds(self.shards, self.comm.size, self.comm.rank))
        self.sums: torch.Tensor | None = None
        self._every = list(parameters)
        self._places = Places(self.comm, self.shards)
        self._trained: list[nn.Parameter] = []
        self._buckets: list[Bucket] = []
        self._exchanges: list[BucketExchange] = []
        self._arrivals = Arrivals()
        self._numbers: TreeSum[torch.Tensor] = self._places.tree()
        self._waiting_sum: Callable[[], torch.Tensor] | None = None
        self._shard, self._sent, self._known_order = -1, 0, False
        self._current: object = None
        self._under_way = False
        self._generators = None if bare else _Generators(self.comm.device)
        self._batches = None if bare or self.comm.size == 1 else _Batches(self.comm)

    def part(self, batch: Any, shard: int) -> slice:
        """Which of a global batch's samples are those of `shard`; none where there are fewer samples than shards.

        Args:
            batch: the global batch, the same on every worker: tensors with their samples in the first dimension, nested
                in tuples, lists and mappings. Where it is only the number of samples, only that is compared.
            shard: the number of the shard.
        """
        samples = batch if isinstance(batch, int) else _samples(batch)
        if self._batches is not None:
            self._batches.note(batch, samples)
        return slice(*bounds(samples, self.shards, shard))

    def trained(self) -> list[nn.Parameter]:
        """The parameters that gradients are summed for, as they are now."""
        return [p for p in self._every if p.requires_grad]

    def __iter__(self) -> Iterator[int]:
        """This worker's shards of one step; when the loop has ended, gradients are the sums over those of all workers.

        Raises:
            ConfigError: when a shard has had several backward passes, or a sparse gradient, or a parameter has a hook
                of `register_post_accumulate_grad_hook`.
            MismatchError: on every worker, when they have given different global batches to `part`. Off the CPU it
                is looked for at steps 0, 1, 2, 4, 8 and so on, as the host would wait for the device at each.
        """
        current = self._current = object()
        self._begin()
        try:
            for shard in self.here:
                self._open(shard)
                yield shard
                if self._current is not current:
                    raise ConfigError("reducer", "one loop over it at a time", found="another one, begun inside of it")
                self._close(shard)
            self._end()
        finally:
            # A loop that was left early may be found here much later, when there is another one.
            if self._current is current:
                self._arrivals.stop()
                if self._generators is not None:
                    self._generators.give_back()

    def add(self, numbers: torch.Tensor) -> None:
        """Give numbers of this shard, such as its loss, to be summed in the same tree; called before its backward pass.

        Args:
            numbers: 1-d floating tensor, of the same size in every shard; its memory is used for sums.

        Raises:
            ConfigError: when gradients of the last shard are on their way already.
        """
        if self._sent:
            hint = "Call add() between the forward and the backward pass."
            raise ConfigError(
                "numbers", "numbers before the backward pass of their shard", found="some after it", hint=hint
            )
        self._numbers.push((self._shard, 1), numbers)
        if self._shard == self.here[-1] and self.comm.size > 1:
            self._waiting_sum = gather_sum(self._numbers.held, self._places)

    def _begin(self) -> None:
        trained = self.trained()
        if [id(p) for p in trained] != [id(p) for p in self._trained]:
            # Backward passes mostly come by the last parameters first; the true order is known after one step.
            self._trained, self._known_order = trained, False
            self._lay_out(trained[::-1])
        elif self._under_way:  # a loop was left early, and its buffers may still be written to
            self._lay_out([p for bucket in self._buckets for p in bucket.parameters])
        self._under_way = True
        self._arrivals.stop()
        if self._generators is not None:
            self._generators.keep()
        self._arrivals.refuse_other_hooks(trained)
        self._numbers.clear()
        self.sums, self._waiting_sum, self._sent = None, None, 0
        for bucket in self._buckets:
            bucket.tree.clear()
            bucket.waiting = len(bucket.parameters)
        for p in trained:
            p.grad = None

    def _lay_out(self, order: list[nn.Parameter]) -> None:
        several = self.comm.size > 1
        self._buckets = grouped(order, _BUCKET if several else None, partial(Bucket, shards=self.shards))
        self._exchanges = [BucketExchange(bucket, self._places) for bucket in self._buckets] if several else []

    def _open(self, shard: int) -> None:
        self._shard = shard
        # Autograd itself adds the second gradient of a pair to the first: that is the lowest level of the tree.
        second = self._is_second(shard)
        self._arrivals.expect(self._trained if second else [])
        if not second:
            for bucket in self._buckets:
                bucket.release()
        if shard == self.here[-1] and self.comm.size > 1:
            self._arrivals.listen(self._buckets, self._send_ready)

    def _is_second(self, shard: int) -> bool:
        return shard % 2 == 1 and shard - 1 in self.here

    def _close(self, shard: int) -> None:
        self._arrivals.check_one_pass(self._trained)
        if shard % 2 == 0 and shard + 1 in self.here:
            return
        for number in range(self._sent, len(self._buckets)):
            self._take(number)

    def _node(self) -> Node:
        return (self._shard - 1, 2) if self._is_second(self._shard) else (self._shard, 1)

    def _take(self, number: int) -> None:
        bucket = self._buckets[number]
        bucket.take(self._node())
        if self._exchanges and self._shard == self.here[-1]:
            self._exchanges[number].start(bucket.tree.held)
            bucket.retire()
            self._sent = number + 1

    def _send_ready(self) -> None:
        """Send the buckets that are complete, in the order that is the same on all workers."""
        while self._sent < len(self._buckets) and not self._buckets[self._sent].waiting:
            self._take(self._sent)

    def _end(self) -> None:
        order = self._arrivals.stop()
        for exchange in self._exchanges:
            exchange.add_up()
        for number, bucket in enumerate(self._buckets):
            sums = self._exchanges[number].wait() if self._exchanges else bucket.tree.total()
            for p, gradient in zip(bucket.parameters, sums, strict=True):
                # -0.0 as where there are several workers: the number that changes none it is added to.
                p.grad = torch.full_like(p, -0.0) if gradient is None else gradient
            bucket.tree.clear()
        if self._waiting_sum is not None:
            self.sums = self._waiting_sum()
        elif self._numbers.held:
            self.sums = self._numbers.total()
        self._under_way = False
        if self._batches is not None:
            self._batches.compare()
        if not self._known_order:
            self._known_order = True
            if self._exchanges:
                self._take_order(order)

    def _take_order(self, arrived: list[nn.Parameter]) -> None:
        """Put buckets in the order in which gradients have arrived on rank 0."""
        place = {id(p): number for number, p in enumerate(self._trained)}
        order = list(dict.fromkeys([*(place[id(p)] for p in arrived), *reversed(range(len(place)))]))
        agreed = self.comm.broadcast(torch.tensor(order, dtype=torch.int64, device=self.comm.device))
        kept = [p.grad for p in self._trained]
        self._lay_out([self._trained[number] for number in agreed.tolist()])
        for p, gradient in zip(self._trained, kept, strict=True):
            p.grad = gradient  # in the memory of the buckets of before


class _Generators:
    """The global generators as a step found them, where its shards were seeded each by itself.

    Args:
        device: that of the model, whose generator is one of them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._seeded = device, 0
        self._states: tuple[Any, ...] | None = None

    def keep(self) -> None:
        """A step begins."""
        self.give_back()  # of a loop that was left early and is still there
        self._states, self._seeded = drawn_so_far(self._device), times_seeded()

    def give_back(self) -> None:
        """A step has ended. Without seeds of its own it has drawn on, and shall not draw the same in the next one."""
        if self._states is not None and times_seeded() != self._seeded:
            draw_on(self._states)
        self._states = None


class _Batches:
    """Sees that all workers take their shards from the same global batches.

    Args:
        comm: the workers, two at least.
    """

    def __init__(self, comm: communicator.Communicator) -> None:
        self._comm, self._steps, self._samples = comm, 0, 0
        self._number: torch.Tensor | None = None
        self._apart: torch.Tensor | bool = False

    def note(self, batch: Any, samples: int) -> None:
        """A shard has been taken from `batch`; the first of a step is looked at."""
        if self._number is None:
            tensors = [torch.tensor(samples)] if isinstance(batch, int) else tensors_of(batch)
            self._number, self._samples = checksum_of(tensors).to(self._comm.device), samples

    def compare(self) -> None:
        """A step has ended; every worker comes here.

        Raises:
            MismatchError: on all of them, when they differ.
        """
        number = self._number
        # a worker that has not called `part` says less than any number
        nothing = torch.full((2,), -(1 << 62), dtype=torch.int64, device=self._comm.device)
        extremes = self._comm.allreduce(nothing if number is None else torch.stack([number, -number]), "max")
        self._apart = ((extremes.sum() != 0) & (extremes[0] >= 0)) | self._apart
        due = extremes.device.type == "cpu" or self._steps & (self._steps - 1) <= 0
        step, self._steps, self._number = self._steps, self._steps + 1, None
        if due and bool(self._apart):
            self._fail(step, None if number is None else int(number))

    def _fail(self, step: int, number: int | None) -> None:
        every = self._comm.allgather_object((number, self._samples))
        first, *others = [(rank, *theirs) for rank, theirs in enumerate(every) if theirs[0] is not None]
        other = next((theirs for theirs in others if theirs[1:] != first[1:]), None)
        who = "two ranks" if other is None else f"rank {first[0]} ({first[2]} samples) and rank {other[0]} ({other[2]})"
        when = f"at step {step} of the reducer" if other is not None else f"before step {step} of the reducer"
        raise MismatchError(
            f"the workers take their shards from different global batches: those of {who} differ, {when}. Every worker "
            "goes through the same global batches: seed alike on every rank before a DataLoader that shuffles is made, "
            "call lockstep.seed_shard before each shard's forward pass, and draw no other numbers on some ranks only; "
            "or give the DataLoader a generator of its own."
        )


def _samples(batch: Any) -> int:
    """How many a batch has.

    Raises:
        ConfigError: when that cannot be told.
    """
    sizes = {tensor.shape[0] for tensor in tensors_of(batch) if tensor.dim()}
    if len(sizes) != 1:
        expected = "a global batch whose tensors have all their samples in the first dimension, or their number"
        raise ConfigError(
            "batch", expected, found=f"first dimensions {sorted(sizes)}" if sizes else type(batch).__name__
        )
    return sizes.pop()
