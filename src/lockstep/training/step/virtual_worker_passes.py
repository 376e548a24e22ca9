"""The forward and backward passes of a step with virtual workers: separate passes for each of this
worker's shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ...data.loader import Batch
from ...errors import ConfigError
from ...parallel.gradient_buckets import separate_gradients
from ...parallel.invariant import Invariant
from ...parallel.joint_passes import JointPasses, run_joint_passes
from ...parallel.nested import map_tensors, narrow
from ...parallel.randomness import preserve_generators, seed_shard
from ...parallel.shards import bounds
from ..batch_parts import parts_of
from ..losses.loss import LossModule
from .precision import Precision
from .totals import StepInputs, make_totals

# Alignment of torch's allocations on the CPU in bytes; libraries choose kernels by the alignment of
# their inputs.
_ALIGN = 64

Parts = list[tuple[Any, int]]
"""This worker's shards: the data of each, and its number of samples."""


class ShardPasses:
    """Runs the passes of this worker's shards of a global batch, and sums their results over all
    workers.

    Args:
        strategy: the prepared strategy.
        seed: the seed of dropout and the like, keyed with the step and the shard.
    """

    def __init__(self, strategy: Invariant, seed: int) -> None:
        self._strategy = strategy
        self._seed = seed

    averaged_over = 1
    gives_means = False

    def run(self, step: StepInputs) -> torch.Tensor:
        """Run the passes, see `lockstep.training.step.train_step.Passes`.

        Raises:
            ConfigError: for a batch with another number of virtual workers.
        """
        strategy = self._strategy
        reducer = self._strategy.reducer
        parts = self.parts(step.batch)
        strategy.begin()
        if strategy.joint_layers:
            self._run_jointly(step, parts)
        else:
            self._run_in_sequence(step, parts)
        # Random numbers that are drawn between steps are the same on every worker.
        seed_shard(self._seed, step.number, strategy.virtual_workers, strategy.comm.device)
        assert reducer.sums is not None
        size = 3 + len(step.marks)
        samples = step.batch.global_size if step.batch.collated is None else reducer.sums[size]
        strategy.end(reducer.sums[size + 1 :], samples)
        return reducer.sums[:size]

    def _run_in_sequence(self, step: StepInputs, parts: Parts) -> None:
        """Run one shard after the other; each backward pass adds to the gradients."""
        strategy = self._strategy
        device = self._strategy.comm.device
        reducer = strategy.reducer
        buffers = strategy.buffers
        scale = step.precision.pass_scale(step.batch.global_size)
        for shard, part in zip(reducer.shards(strategy.trained()), parts, strict=True):
            if shard > reducer.local_shards.start:
                buffers.restore()
            seed_shard(self._seed, step.number, shard, device)
            totals = make_totals(step.marks)
            total = None  # of an empty shard
            if part[1]:
                total, count = step.precision.run_forward(step.loss, *part)
                totals.add(total, count)
            last = shard == reducer.local_shards[-1]
            of_buffers = buffers.numbers_of_shard(first=shard == 0, last=last)
            numbers = totals.tensor(step.requests if last else None, part[1], *(of_buffers or ()))
            if of_buffers is None:
                numbers = torch.cat(
                    [numbers, buffers.of_shard(part[1], first=shard == 0, last=last)]
                )
            reducer.add(numbers)
            if total is not None:
                step.precision.backward(total, scale, reducer.leaves_of)

    def _run_jointly(self, step: StepInputs, parts: Parts) -> None:
        """Run all shards with barriers at the layers that use all shards, and sum their results in
        order.
        """
        strategy = self._strategy
        comm = self._strategy.comm
        reducer = strategy.reducer
        buffers = strategy.buffers
        trained = strategy.trained()
        self._check_joint(step.precision, step.batch.global_size)
        shards = [
            shard for shard, (_, size) in zip(reducer.local_shards, parts, strict=True) if size
        ]

        def requests_of(shard: int) -> float | None:
            return step.requests if shard == reducer.local_shards[-1] else None

        def passes(shard: int) -> tuple[torch.Tensor, Sequence[torch.Tensor | None]]:
            seed_shard(self._seed, step.number, shard, comm.device)
            part = parts[shard - reducer.local_shards.start]
            totals = make_totals(step.marks)
            total, count = step.precision.run_forward(step.loss, *part)
            totals.add(total, count)
            of_buffers = buffers.of_shard(part[1], first=shard == 0, last=False)
            numbers = torch.cat([totals.tensor(requests_of(shard), part[1]), of_buffers])
            # In this thread, which waits at the barriers; not into .grad, which all shards share.
            with torch.autograd.set_multithreading_enabled(False):
                gradients = torch.autograd.grad(
                    total * (1 / step.batch.global_size), trained, allow_unused=True
                )
            return numbers, separate_gradients(trained, gradients)

        joint_passes = JointPasses(comm, strategy.virtual_workers, shards)
        bodies = [partial(passes, shard) for shard in shards]
        results = run_joint_passes(joint_passes, strategy.joint_layers, bodies, strategy.threads)
        if buffers.others_changed():
            hint = "Leave sync_batchnorm out, or the layer."
            expected = (
                "no layer but batch norm that changes buffers, with sync_batchnorm and virtual "
                "workers"
            )
            raise ConfigError("model", expected, found="another one", hint=hint)
        by_shard = dict(zip(shards, results, strict=True))
        no_buffers = torch.zeros_like(buffers.of_shard(0, first=False, last=False))
        for shard in reducer.shards(trained):
            if shard in by_shard:
                numbers, gradients = by_shard[shard]
            else:  # it has no samples
                totals = make_totals(step.marks).tensor(requests_of(shard), 0)
                numbers = torch.cat([totals, no_buffers])
                gradients = [None] * len(trained)
            reducer.add(numbers)
            for p, gradient in zip(trained, gradients, strict=True):
                if gradient is not None:
                    p.grad = gradient if p.grad is None else p.grad.add_(gradient)

    def _check_joint(self, precision: Precision, global_size: int) -> None:
        """Check that joint passes support the precision and the size of the global batch."""
        virtual_workers = self._strategy.virtual_workers
        size = self._strategy.comm.size
        if precision.name == "fp16":
            raise ConfigError(
                "precision", "fp32 or bf16, with sync_batchnorm and virtual workers", precision.name
            )
        if (least := bounds(virtual_workers, size, size - 1)[0] + 1) > global_size:
            hint = "Use fewer workers, or drop_last=True of the Loader."
            expected = (
                f"at least {least} samples in each batch, one for each worker, with "
                "sync_batchnorm and virtual workers"
            )
            raise ConfigError("global_batch_size", expected, global_size, hint)

    def repeat(
        self,
        loss: LossModule,
        precision: Precision,
        step: int,
        shard: int,
        part: tuple[Any, int],
        global_size: int,
    ) -> None:
        """Run the pass of one shard of any worker once more, with the same bits, after the passes
        of its step.

        Hooks of parameters see its gradients. Gradients, buffers and random generators are then as
        they were before.

        Args:
            loss: see `run`.
            precision: see `run`.
            step: the number of the step.
            shard: the number of the shard.
            part: its data, and the number of its samples, at least one.
            global_size: samples in the global batch.
        """
        strategy = self._strategy
        device = strategy.comm.device
        trained = strategy.trained()
        gradients = [p.grad for p in trained]
        reducer = strategy.reducer
        last_shard = reducer.shard
        with preserve_generators(device), strategy.buffers.restored():
            reducer.shard = shard  # which hooks of parameters ask for
            seed_shard(self._seed, step, shard, device)
            for p in trained:
                p.grad = None
            try:
                total, _ = precision.run_forward(loss, map_tensors(_aligned, part[0]), part[1])
                precision.backward(total, precision.pass_scale(global_size))
            finally:
                reducer.shard = last_shard
                for p, gradient in zip(trained, gradients, strict=True):
                    p.grad = gradient

    def parts(self, batch: Batch) -> Parts:
        """Return (data, samples) of each of this worker's shards."""
        reducer = self._strategy.reducer
        comm = self._strategy.comm
        if batch.virtual_workers != reducer.virtual_workers and (
            batch.virtual_workers is not None or comm.size > 1
        ):
            hint = "Make the Loader with the same virtual_workers= as the training."
            raise ConfigError(
                "batch",
                f"one in {reducer.virtual_workers} virtual workers",
                found=f"one in {batch.virtual_workers or 'none'}",
                hint=hint,
            )
        if batch.virtual_workers:
            parts = [(data, size) for _, data, size in parts_of(batch, comm)]
        else:
            ((_, whole, samples),) = parts_of(batch, comm)
            cuts = [
                bounds(samples, reducer.virtual_workers, shard) for shard in reducer.local_shards
            ]
            parts = [(narrow(whole, *cut, samples), cut[1] - cut[0]) for cut in cuts]
        return [(map_tensors(_aligned, data), size) for data, size in parts]


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, or a copy if its memory is not aligned as a new tensor's is."""
    strided = tensor.layout is torch.strided
    return tensor.clone() if strided and tensor.numel() and tensor.data_ptr() % _ALIGN else tensor
