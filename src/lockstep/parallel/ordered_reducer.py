"""`OrderedReducer`: the same bits in the gradients of a training loop of one's own, at any number
of workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch import nn

from .. import arguments, communicator, observers
from ..errors import MismatchError
from .fingerprints import checksum_of
from .nested import sample_count, tensors_of
from .randomness import generator_states, seed_count, set_generator_states
from .reducer import Reducer
from .shards import DEFAULT_VIRTUAL_WORKERS, bounds


class OrderedReducer:
    """Computes the same bits in the gradients at any number of workers, in a custom training loop.

    A step's global batch is cut into `virtual_workers` shards, each with its own forward and
    backward pass. A worker computes a contiguous range of shards, and the gradients of all shards
    are added in the binary tree over their numbers (`lockstep.parallel.tree_sum`), within a worker
    and across workers. One iteration over the reducer computes the sum of one step:

        reducer = lockstep.invariance.OrderedReducer(model.parameters(), virtual_workers=8)
        for step, (inputs, labels) in enumerate(global_batches):  # the same on every worker
            for shard in reducer:                                 # this worker's, in order
                part = reducer.part((inputs, labels), shard)      # a slice of samples
                lockstep.invariance.seed_shard(seed, step, shard)  # for dropout and the like
                losses = F.cross_entropy(model(inputs[part]), labels[part], reduction="none")
                (losses.sum() / len(inputs)).backward()
            optimizer.step()                                      # with the sum over all shards

    If `seed_shard` was called in the loop, the global random generators are restored after it, so
    that a shuffling `DataLoader` keeps drawing the same order on every worker. The batches that the
    workers pass to `part` are compared.

    The reducer discards earlier gradients. A shard makes at most one backward pass. A parameter
    without a gradient in a shard adds nothing; one without a gradient in the whole step gets a
    gradient of zeros. Complete buckets are sent while the last shard's backward pass runs.
    Parameters may be frozen and unfrozen between steps, in the same way on all workers.

    Args:
        parameters: the parameters whose gradients are summed, in the same order on every worker.
        virtual_workers: number of shards of a global batch.
        comm: communicator over the workers; that of `lockstep.init()` when None.
        bare: neither restore the random generators nor compare the batches.

    Attributes:
        local_shards: the numbers of this worker's shards.

    Raises:
        ConfigError: for fewer virtual workers than workers, or something else than parameters.
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
        self._reducer = Reducer(self.comm, virtual_workers, one_pass=True)
        self.virtual_workers = self._reducer.virtual_workers
        self.local_shards = self._reducer.local_shards
        expected = "parameters, as from model.parameters()"
        arguments.instance("parameters", parameters, Iterable, expected)
        self._parameters = [
            arguments.instance("parameters", p, torch.Tensor, expected) for p in parameters
        ]
        self._steps: Iterator[int] | None = None
        self._generators = None if bare else _GeneratorGuard(self.comm.device)
        self._batch_check = None if bare or self.comm.size == 1 else _BatchCheck(self.comm)

    @property
    def shard(self) -> int:
        """The number of the shard whose passes run, or have run last."""
        return self._reducer.shard

    @property
    def sums(self) -> torch.Tensor | None:
        """The sums of the numbers passed to `add`, after a step; None without any."""
        return self._reducer.sums

    def part(self, batch: Any, shard: int) -> slice:
        """Return the samples of a global batch that belong to `shard`; empty if there are fewer
        samples than shards.

        Args:
            batch: the global batch, equal on every worker: tensors with their samples in the first
                dimension, nested in tuples, lists and mappings. If it is the number of samples,
                only that number is compared.
            shard: the number of the shard.
        """
        samples = batch if isinstance(batch, int) else sample_count(batch)
        if self._batch_check is not None:
            self._batch_check.record(batch, samples)
        start, stop = bounds(samples, self.virtual_workers, shard)
        observers.active().note_part(samples, stop - start)
        return slice(start, stop)

    def trained(self) -> list[nn.Parameter]:
        """Return the parameters that require a gradient now."""
        return [p for p in self._parameters if p.requires_grad]

    def __iter__(self) -> Iterator[int]:
        """Iterate over this worker's shards of one step; after the loop, gradients are the sums
        over all shards.

        Raises:
            ConfigError: if a shard has several backward passes or a sparse gradient, or a parameter
                has a hook of `register_post_accumulate_grad_hook`.
            MismatchError: on every worker, if the workers passed different global batches to
                `part`. On devices other than the CPU the check runs at steps 0, 1, 2, 4, 8 and so
                on, because it waits for the device.
        """
        observers.active().begin_ordered_step(self.virtual_workers)
        self._steps = steps = self._reducer.shards(self.trained())
        if self._generators is not None:
            self._generators.save()
        try:
            yield from steps
            if self._batch_check is not None:
                self._batch_check.compare()
        finally:
            # The generator of an abandoned loop may be finalized during a later loop.
            if self._steps is steps and self._generators is not None:
                self._generators.restore()

    def add(self, numbers: torch.Tensor) -> None:
        """Add numbers of this shard, such as its loss, to a sum in the same tree; call it before
        the backward pass.

        Args:
            numbers: 1-d floating tensor, of the same size in every shard; overwritten with partial
                sums.

        Raises:
            ConfigError: if gradients of the last shard have been sent already.
        """
        self._reducer.add(numbers)


class _GeneratorGuard:
    """Restores the global random generators after a step whose shards were seeded with
    `seed_shard`.

    Args:
        device: the device of the model; its generator is included.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seed_count = 0
        self._states: tuple[Any, ...] | None = None

    def save(self) -> None:
        """Save the states at the beginning of a step."""
        self.restore()  # of an abandoned loop
        self._states = generator_states(self._device)
        self._seed_count = seed_count()

    def restore(self) -> None:
        """Restore the saved states; without a call of `seed_shard` the generators keep what they
        have drawn.
        """
        if self._states is not None and seed_count() != self._seed_count:
            set_generator_states(self._states)
        self._states = None


class _BatchCheck:
    """Checks that all workers take their shards from the same global batches.

    Args:
        comm: communicator over the workers, at least two.
    """

    def __init__(self, comm: communicator.Communicator) -> None:
        self._comm = comm
        self._steps = 0
        self._samples = 0
        self._checksum: torch.Tensor | None = None
        self._differ: torch.Tensor | bool = False

    def record(self, batch: Any, samples: int) -> None:
        """Compute the checksum of a step's first `batch`."""
        if self._checksum is None:
            tensors = [torch.tensor(samples)] if isinstance(batch, int) else tensors_of(batch)
            self._checksum = checksum_of(tensors).to(self._comm.device)
            self._samples = samples

    def compare(self) -> None:
        """Compare the checksums at the end of a step; called by every worker.

        Raises:
            MismatchError: on every worker, if the batches differ.
        """
        checksum = self._checksum
        # A worker that has not called `part` contributes less than any checksum.
        missing = torch.full((2,), -(1 << 62), dtype=torch.int64, device=self._comm.device)
        extremes = self._comm.allreduce(
            missing if checksum is None else torch.stack([checksum, -checksum]), "max"
        )
        self._differ = ((extremes.sum() != 0) & (extremes[0] >= 0)) | self._differ
        due = extremes.device.type == "cpu" or self._steps & (self._steps - 1) <= 0
        step = self._steps
        self._steps = self._steps + 1
        self._checksum = None
        if due and bool(self._differ):
            self._raise_mismatch(step, None if checksum is None else int(checksum))

    def _raise_mismatch(self, step: int, checksum: int | None) -> NoReturn:
        by_rank = self._comm.allgather_object((checksum, self._samples))
        first, *others = [
            (rank, *theirs) for rank, theirs in enumerate(by_rank) if theirs[0] is not None
        ]
        other = next((theirs for theirs in others if theirs[1:] != first[1:]), None)
        if other is None:
            where = f"two ranks differ, before step {step} of the reducer"
        else:
            ranks = f"rank {first[0]} ({first[2]} samples) and rank {other[0]} ({other[2]})"
            where = f"{ranks} differ, at step {step} of the reducer"
        raise MismatchError(
            f"the workers take their shards from different global batches: those of {where}. "
            "Every worker must iterate over the same global batches: seed every rank alike before "
            "a shuffling DataLoader is made, call lockstep.invariance.seed_shard before each "
            "shard's forward pass, and draw no random numbers on some ranks only; or give the "
            "DataLoader its own generator."
        )
