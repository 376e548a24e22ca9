"""`prepare`: data parallelism for a training loop that keeps its own forward and backward passes."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from typing_extensions import Never, Self

from ..argument_checks import keyword_names
from ..communicator import init
from ..data.loader import Batch, Loader, dataloader_settings
from ..data.nested import map_tensors, narrow, sample_count
from ..errors import ConfigError, unexpected_argument
from ..flight_recorder import note_samples
from ..invariance.determinism import DeterminismSettings
from ..invariance.gradient_buckets import Bucket, Gradients
from ..invariance.ordered_reducer import BucketExchange, SubtreeLayout, gather_sum, make_exchanges, set_sums
from ..invariance.randomness import preserve_generators, seed_shard
from ..invariance.shards import bounds, check_virtual_workers, mix
from ..other_names import in_training
from ..strategies.base import accumulation_dtype
from ..strategies.buffers import MutatedBuffers
from ..strategies.invariant import ShardBuffers
from ..strategies.module_sync import sync_module
from ..strategies.unsupported_layers import check_supported
from .divided_batches import describe_division
from .model_changes import ModelChanges
from .precision import Precision, clip, full_precision, scale_gradients
from .replica_check import ReplicaCheck
from .step import check_max_grad_norm, check_threads, parameters_of, refuse_closure

__all__ = ["PreparedLoader", "prepare"]

_log = logging.getLogger(__name__)


def prepare(
    *objects: Any,
    virtual_workers: int | None = None,
    max_grad_norm: float | None = None,
    precision: str = "fp32",
    seed: int = 0,
    threads: int | None = None,
    **unknown: Never,
) -> Any:
    """Prepare models, optimizers, loaders and schedulers, so that a loop written for one device trains on all workers.

    The loop keeps its own forward and backward passes, losses and optimizers::

        model, optimizer, loader = lockstep.prepare(model, optimizer, loader)
        for epoch in range(10):
            for inputs, targets in loader:                  # this worker's part of each global batch
                optimizer.zero_grad()
                loss = loss_fn(model(inputs), targets)
                loss.backward()
                optimizer.step()                            # with the mean gradient over the global batch

    Each object is changed in place, except that a `DataLoader` becomes a `PreparedLoader`:

    - A model is moved to the worker's device and gets rank 0's values.
    - The batch size of a loader is that of the *global* batch, which all workers share.
    - ``optimizer.step()`` first sums the gradients over the workers. Each worker's gradient is weighted by its samples,
      so that the sum is the gradient of the mean over the global batch. For a mean over something else, such as tokens,
      give the denominator of this worker's loss: ``optimizer.step(count=tokens)``. With ``optimizer.step(loss=loss)``
      it returns the mean loss over the global batch, a 0-dim tensor. Parameters without a gradient get one of zeros.
    - Gradients of several batches may be accumulated before one step, as on one device.
    - ``optimizer.zero_grad()`` sets gradients to None.

    With `virtual_workers`, each global batch is cut into so many shards, and the results have the same bits at any
    number of workers. A worker with several shards runs the body of the loop once for each of them;
    ``optimizer.step()`` and ``scheduler.step()`` do nothing but in the last one, and return None. A loop in which a
    model is updated and used again within one batch, as in a GAN, says which part of it belongs to which optimizer::

        for batch in loader.batches():
            for images, _ in optimizer_d.shards(batch):     # this worker's shards
                ...
                optimizer_d.step()
            for images, _ in optimizer_g.shards(batch):
                ...
                optimizer_g.step()

    `shards` also takes a global batch that every worker has: tensors, nested in tuples, lists and mappings, or a number
    of samples, of which it yields slices. The global random generators are seeded for each shard, and restored after
    the last one.

    Args:
        objects: any number of modules, optimizers over their parameters, `DataLoader`s or `lockstep.Loader`s, and
            learning-rate schedulers of these optimizers that are stepped once a batch.
        virtual_workers: number of shards of each global batch; as many as there are workers when None.
        max_grad_norm: maximum 2-norm of each optimizer's whole gradient, which is then in ``optimizer.grad_norm``.
        precision: "fp32", or "bf16": forward passes run with autocast, and floating outputs are converted to float32.
        seed: the seed of the order of samples and of random draws within shards.
        threads: with virtual workers, threads within an operation on the CPU; 1 when None.

    Returns:
        The objects in the order given; a single one is not put into a tuple.

    Raises:
        ConfigError: for invalid arguments.
        MismatchError: if the workers' models differ.
        TypeError: for an argument of another name; the error says what it is here.
    """
    if unknown:
        name = next(iter(unknown))
        raise unexpected_argument("prepare", name, in_training(name, "prepare"), keyword_names(prepare))
    job = _OwnLoop(objects, virtual_workers, max_grad_norm, precision, seed, threads)
    prepared = tuple(job.prepare_one(each) for each in objects)
    return prepared[0] if len(prepared) == 1 else prepared


@dataclass(slots=True)
class _Shard:
    """The shard whose passes are running.

    Attributes:
        number: its number.
        weight: its share of the samples of the global batch; 0 if its data is a sample that stands in for none.
        last: whether it is this worker's last one.
        one_of_several: whether this worker has other shards of the same batch.
        total: samples of the global batch.
        left_out: in the last shard, the samples that a collate function has left out of this worker's shards; None if
            there is no such function.
    """

    number: int
    weight: float
    last: bool
    one_of_several: bool
    total: int = 1
    left_out: int | None = None


class PreparedLoader:
    """A loader for a loop of one's own, see `prepare`: yields the data of this worker's shards of each global batch.

    While gradients are disabled, as in an evaluation, it yields each sample of the data set on one worker only; a
    worker may then have fewer batches than others, or none. `lockstep.evaluate` sums over the workers.

    Args:
        job: what was prepared together.
        loader: loads the global batches.
    """

    def __init__(self, job: _OwnLoop, loader: Loader) -> None:
        self._job, self.loader = job, loader

    def __len__(self) -> int:
        """Global batches in an epoch; the number of optimizer steps."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the next epoch: epoch 0, then 1, and so on, from the loaded position in the first."""
        for batch in self.batches():
            yield from self._job.shards(batch)

    def batches(self) -> Iterator[Batch]:
        """Iterate over the global batches of the next epoch, for `shards` of the optimizers."""
        for batch in self.loader:
            self._job.source = self.loader
            yield batch

    @property
    def dataset(self) -> Any:
        """The data set."""
        return self.loader.dataset

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the current global batch; it fits any number of workers."""
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the position; the next loop over the loader begins there."""
        self.loader.load_state_dict(state)

    def close(self) -> None:
        """End the loader processes, if there are any."""
        self.loader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# --- What was prepared together -------------------------------------------------------------------------------------


class _OwnLoop:
    """The models, optimizers and loaders of one call of `prepare`, and the shard whose passes are running."""

    def __init__(
        self,
        objects: tuple[Any, ...],
        virtual_workers: int | None,
        max_grad_norm: float | None,
        precision: str,
        seed: int,
        threads: int | None,
    ) -> None:
        self.comm = init()
        _check_kinds(objects)
        check_max_grad_norm(max_grad_norm)
        check_threads(threads, virtual_workers)
        if precision == "fp16":
            hint = "Its losses must be scaled before the backward pass: lockstep.TrainStep does that."
            raise ConfigError("precision", "fp32 or bf16 with prepare()", precision, hint)
        self.exact, self.seed = virtual_workers is not None, seed
        self.virtual_workers = (
            self.comm.size if virtual_workers is None else check_virtual_workers(virtual_workers, self.comm.size)
        )
        self.local_shards = range(*bounds(self.virtual_workers, self.comm.size, self.comm.rank))
        self.max_grad_norm, self._precision = max_grad_norm, Precision(precision, self.comm.device)
        self._determinism = DeterminismSettings(self.comm.device, threads) if self.exact else None
        models = [each for each in objects if isinstance(each, nn.Module)]
        self.model = models[0] if len(models) == 1 else nn.ModuleList(models)
        self._prepare_model()
        self._changes, self._buffers = ModelChanges(self.model), _Buffers(self)
        self._has_described = self.exact or self.comm.rank != 0
        optimizers = [each for each in objects if isinstance(each, Optimizer)]
        self.optimizers = {id(each): _PreparedOptimizer(each, self) for each in optimizers}
        self.current: _Shard | None = None
        self.source: Loader | None = None  # that of the latest batch
        self._passes: dict[Any, int] = {}  # how often `shards` has been called for the current batch
        self._deferred: list[tuple[nn.Parameter, Any, int]] = []

    def _prepare_model(self) -> None:
        if self.exact:
            check_supported(self.model, self.comm.device)
        self.model.to(self.comm.device)
        sync_module(self.model, self.comm)
        if self._determinism is not None and self.comm.size > 1:
            self._determinism.check_same(self.comm)

    def _look_at_model(self) -> None:
        """Say once what depends on the number of workers, and give all workers rank 0's values of new parameters."""
        if not self._has_described:  # at the first batch, when the loop has set modes and hooks
            self._has_described = True
            if said := describe_division(self.model, self.comm.size, own_hooks=True):
                _log.warning("%s", said)
        if self._changes.found():
            self._prepare_model()
            self._changes.note()
            self._buffers = _Buffers(self)

    def prepare_one(self, given: Any) -> Any:
        """Return what `prepare` returns for one of its objects."""
        if isinstance(given, nn.Module):
            if self._precision.name != "fp32":
                given.forward = partial(_forward_with_autocast, given.forward, self._precision)
        elif isinstance(given, Optimizer):
            self.optimizers[id(given)].install()
        elif isinstance(given, LRScheduler):
            self._prepare_scheduler(given)
        else:
            return PreparedLoader(self, self._loader(given))
        return given

    def _loader(self, given: Loader | DataLoader[Any]) -> Loader:
        wanted = self.virtual_workers if self.exact else None
        if isinstance(given, Loader):
            if given.virtual_workers != wanted:
                raise ConfigError("virtual_workers", f"{wanted}, as given to prepare()", given.virtual_workers)
            return given
        size = given.batch_size or 1
        settings = dataloader_settings(given, "loader", size, warns=self.comm.rank == 0)
        return Loader(**settings, global_batch_size=size, seed=self.seed, comm=self.comm, virtual_workers=wanted)

    def _prepare_scheduler(self, scheduler: LRScheduler) -> None:
        step = scheduler.step

        def step_once(*args: Any, **kwargs: Any) -> None:
            if self.current is None or self.current.last:
                step(*args, **kwargs)

        scheduler.step = step_once  # type: ignore[method-assign]

    # --- shards of a batch -------------------------------------------------------------------------------------------

    def shards(self, batch: Any) -> Iterator[Any]:
        """Yield the data of each of this worker's shards of a global batch, while its passes run."""
        if self.current is not None:
            raise ConfigError("shards", "one loop over the shards of a batch at a time", found="one inside another")
        parts, total = self._parts(batch)
        if not torch.is_grad_enabled():
            yield from (data for _, data, samples in parts if samples)
            return
        key = self._key(batch)
        if not any(samples for *_, samples in parts):  # each worker must take part in each step
            parts = [(self.local_shards[0], self._stand_in(batch), 0)]
        empty = [shard for shard in self.local_shards if shard not in [number for number, *_ in parts]]
        left_out = self._left_out(batch)
        with ExitStack() as stack:
            if self._determinism is not None:
                stack.enter_context(self._determinism.applied())
            stack.enter_context(preserve_generators(self.comm.device))
            stack.callback(self._leave)
            self._look_at_model()
            self._buffers.begin()
            for optimizer in self.optimizers.values():
                optimizer.begin_batch(empty)
            for position, (number, data, samples) in enumerate(parts):
                last = position == len(parts) - 1
                several, missing = len(self.local_shards) > 1, left_out if last else left_out and 0
                shard = _Shard(number, samples / total, last, several, total, missing)
                self._begin_shard(shard, first=position == 0)
                seed_shard(self.seed, key, number, self.comm.device)
                yield data
                self._buffers.end_shard(number, samples)
                self._end_shard()
            self._buffers.end(total, left_out)
            note_samples(sum(samples for *_, samples in parts))

    def _begin_shard(self, shard: _Shard, first: bool) -> None:
        self.current = shard
        if not first:
            self._buffers.restore()
        for optimizer in self.optimizers.values():
            optimizer.begin_shard(shard, first)

    def _end_shard(self) -> None:
        assert self.current is not None
        self.check_deferred_step()
        for optimizer in self.optimizers.values():
            optimizer.end_shard(self.current)
        self._leave()

    def _leave(self) -> None:
        self.current, self._deferred = None, []

    def _parts(self, batch: Any) -> tuple[list[tuple[int, Any, int]], int]:
        """Return (number, data, samples) of each of this worker's shards that has samples, and the batch's samples."""
        if isinstance(batch, Batch):
            total = batch.global_size
            data = batch.data if batch.virtual_workers is not None else [batch.data]
        else:
            total = batch if isinstance(batch, int) else sample_count(batch)
            data = []
        cuts = [bounds(total, self.virtual_workers, shard) for shard in self.local_shards]
        if not data:
            numbers = isinstance(batch, int)
            data = [slice(*cut) if numbers else narrow(batch, *cut, total) for cut in cuts]
        collated = batch.collated if isinstance(batch, Batch) else None
        sizes = [stop - start for start, stop in cuts] if collated is None else collated
        parts = zip(self.local_shards, data, sizes, strict=True)
        return [(shard, part, size) for shard, part, size in parts if size], total

    def _left_out(self, batch: Any) -> int | None:
        """Return how many samples a collate function has left out of this worker's shards; None without one."""
        collated = batch.collated if isinstance(batch, Batch) else None
        return None if collated is None else batch.size - sum(collated)

    def _key(self, batch: Any) -> int:
        """Return the key of the random draws of a pass over `batch`."""
        where = (batch.epoch, batch.step) if isinstance(batch, Batch) else None
        if where is not None and where not in self._passes:
            self._passes = {key: count for key, count in self._passes.items() if key is None}
        self._passes[where] = number = self._passes.get(where, -1) + 1
        return mix((*(where or (1 << 32, 1 << 32)), number)) >> 1

    def _stand_in(self, batch: Any) -> Any:
        """Return data for a worker without samples; its gradients count nothing."""
        if isinstance(batch, int):
            return slice(0, 0)
        if not isinstance(batch, Batch):
            return narrow(batch, 0, 2, sample_count(batch))
        if self.source is None:
            raise ConfigError(
                "batch",
                "a sample for each worker in every batch",
                found=f"{batch.global_size} samples for {self.comm.size} workers",
                hint="Use drop_last=True, or fewer workers.",
            )
        return self.source.stand_in()

    # --- several shards on one worker --------------------------------------------------------------------------------

    def record_deferred_step(self) -> None:
        """Record all gradients when an optimizer's step is put off until this worker's last shard."""
        parameters = [p for optimizer in self.optimizers.values() for p in optimizer.parameters()]
        self._deferred = [(p, p.grad, -1 if p.grad is None else p.grad._version) for p in parameters]

    def check_deferred_step(self) -> None:
        """Check that no backward pass has run since a step was put off: it would have used the old parameters."""
        if any(p.grad is not None and (p.grad is not g or g._version != version) for p, g, version in self._deferred):
            raise ConfigError(
                "step",
                "no backward pass after an optimizer's step within one shard",
                found="one: this worker has several shards, and parameters are updated after the last of them",
                hint="Loop over loader.batches(), and for each optimizer over optimizer.shards(batch).",
            )


def _check_kinds(objects: tuple[Any, ...]) -> None:
    for given in objects:
        if not isinstance(given, (nn.Module, Optimizer, Loader, DataLoader, LRScheduler)):
            expected = "modules, optimizers, DataLoaders or lockstep.Loaders, and learning-rate schedulers"
            raise ConfigError("objects", expected, found=type(given).__name__)
    if not any(isinstance(given, nn.Module) for given in objects):
        raise ConfigError("objects", "at least one module, whose parameters are trained", found="none")


def _forward_with_autocast(forward: Callable[..., Any], precision: Precision, *args: Any, **kwargs: Any) -> Any:
    with precision.autocast():
        output = forward(*args, **kwargs)
    return map_tensors(full_precision, output)


# --- Buffers --------------------------------------------------------------------------------------------------------


class _Buffers:
    """The buffers that forward passes change: each shard starts with those of the beginning of the batch.

    Running statistics become the mean over the shards, weighted by samples; all others become those of shard 0.
    """

    def __init__(self, job: _OwnLoop) -> None:
        self._comm, self._layout = job.comm, SubtreeLayout(job.comm, job.virtual_workers)
        self._shards, self._present = job.local_shards, any(True for _ in job.model.buffers())
        self._statistics = ShardBuffers(job.model, job.comm.device)
        self._mutated = MutatedBuffers(job.model, job.comm, at_once=job.exact)
        self._sums: dict[int, torch.Tensor] = {}

    def begin(self) -> None:
        """Save the buffers before a batch."""
        if self._present:
            self._statistics.begin()
            self._mutated.snapshot()
            self._sums = {}

    def restore(self) -> None:
        """Restore them before the next shard."""
        if self._present:
            self._statistics.restore()

    def end_shard(self, shard: int, samples: int) -> None:
        """Keep what the passes of a shard have made of them."""
        if self._present:
            self._sums[shard] = self._statistics.shard_statistics(samples, first=shard == 0)

    def end(self, samples: int, left_out: int | None) -> None:
        """Set them after the last shard, equally on every worker.

        Args:
            samples: samples of the global batch.
            left_out: see `_Shard`, of the last one.
        """
        if not self._present:
            return
        changed = self._mutated.changed()
        tree, zeros = self._layout.tree(), torch.zeros_like(next(iter(self._sums.values())))
        for shard in self._shards:
            new = self._mutated.count_new(changed) if shard == self._shards[-1] else 0
            missing = left_out or 0 if shard == self._shards[-1] else 0
            tree.push((shard, 1), torch.cat([self._sums.get(shard, zeros), zeros.new_tensor([new, missing])]))
        sums = tree.total() if self._comm.size == 1 else gather_sum(tree.partial_sums, self._layout)()
        self._statistics.set_statistics(sums[:-2], samples if left_out is None else samples - sums[-1])
        if self._comm.size > 1:
            self._mutated.sync(changed, sums[-2])


# --- Optimizers -----------------------------------------------------------------------------------------------------


class _PreparedOptimizer:
    """Replaces `step` and `zero_grad` of an optimizer, and sums the gradients of its parameters over all shards.

    Each shard has gradients of its own, as if each were a process: a worker with several shards puts those of a shard
    into ``.grad`` while its passes run. Gradients that stay for a later batch are rescaled to the weight of the shard
    then, because the parts of a smaller batch may have other weights.
    """

    def __init__(self, optimizer: Optimizer, job: _OwnLoop) -> None:
        if hasattr(optimizer, "shards"):
            raise ConfigError("optimizer", "each optimizer in one call of prepare() only", found="one in two")
        refuse_closure(optimizer)
        self._optimizer, self._job = optimizer, job
        self._original_step, self._original_zero_grad = optimizer.step, optimizer.zero_grad
        self._layout = SubtreeLayout(job.comm, job.virtual_workers)
        self._replicas = ReplicaCheck(job.comm, job.model, optimizer, exact=job.exact)
        self._steps = 0
        self._trained: list[nn.Parameter] = []
        self._buckets: list[Bucket] = []
        self._exchanges: list[BucketExchange] = []
        self._hook: Any = None
        self._arrived: tuple[torch.Tensor, int] | None = None  # the gradient of one parameter, and its version
        self._own: dict[int, Gradients] = {}  # those that stay for a later batch, by shard
        self._weights: dict[int, float] = {}  # and the weights of their shards then
        self._left: list[tuple[torch.Tensor | None, int]] = []  # gradients at the beginning of the batch, with versions
        self._added_to_left = False  # whether a shard, but not all shards, has added to gradients of an earlier step
        self._aside: tuple[Gradients, float] | None = None
        self._empty: list[int] = []
        self._stepped: list[int] = []
        self._counted = False
        self._left_out_before = 0  # samples left out of batches whose gradients stay for a later one
        self._numbers = self._layout.tree()
        self._rates: list[Any] = []
        self._refresh()

    def install(self) -> None:
        """Replace the optimizer's methods."""
        optimizer: Any = self._optimizer

        def step(_: Optimizer, closure: Any = None, *, loss: Any = None, count: Any = None) -> torch.Tensor | None:
            return self.step(closure, loss, count)

        def zero_grad(_: Optimizer, set_to_none: bool = True) -> None:
            self.zero_grad()

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # schedulers of torch look for it
        optimizer.step, optimizer.zero_grad = MethodType(step, optimizer), MethodType(zero_grad, optimizer)
        optimizer.shards, optimizer.grad_norm = self._job.shards, None

    def parameters(self) -> list[nn.Parameter]:
        """Return the trained parameters."""
        return self._trained

    def _refresh(self) -> None:
        """Find out which parameters are trained now."""
        trained = [p for p in parameters_of(self._job.model, self._optimizer) if p.requires_grad]
        if [id(p) for p in trained] == [id(p) for p in self._trained]:
            return
        self._trained = trained
        self._buckets, self._exchanges = make_exchanges(trained[::-1], self._layout)
        if self._hook is not None:
            self._hook.remove()
        if trained:
            hook = partial(_record_gradient, weakref.ref(self))  # a cycle through a hook would never be freed
            self._hook = trained[0].register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def record_gradient(self, gradient: torch.Tensor) -> None:
        """Record the gradient of the first parameter as a backward pass has left it."""
        self._arrived = gradient, gradient._version

    # --- gradients of each shard -------------------------------------------------------------------------------------

    def begin_batch(self, empty: list[int]) -> None:
        """Begin a global batch, of which this worker's shards `empty` have no samples."""
        self._refresh()
        self._empty, self._stepped, self._aside, self._arrived, self._counted = empty, [], None, None, False
        self._numbers.clear()
        for bucket in self._buckets:
            bucket.tree.clear()
        self._left = [(p.grad, -1 if p.grad is None else p.grad._version) for p in self._trained]
        self._rates = [group["lr"] for group in self._optimizer.param_groups]

    def begin_shard(self, shard: _Shard, first: bool) -> None:
        """Put the gradients of `shard` into ``.grad``; those that an earlier step has left stay for the first one."""
        for bucket in self._buckets:
            bucket.release()
        if shard.one_of_several:
            own = self._own.pop(shard.number, None)
            if own is not None or not first:
                self._set_gradients(own or [None] * len(self._trained))
            if not first and any(
                gradient is not None and gradient._version != version for gradient, version in self._left
            ):
                self._added_to_left = True
        self._rescale(shard)
        if [group["lr"] for group in self._optimizer.param_groups] != self._rates:
            raise ConfigError(
                "scheduler",
                "a learning rate that changes once a global batch",
                found="one that changed between two shards of a batch",
                hint="Give the scheduler to lockstep.prepare() too.",
            )

    def _set_gradients(self, gradients: Gradients) -> None:
        for p, gradient in zip(self._trained, gradients, strict=True):
            p.grad = gradient

    def _rescale(self, shard: _Shard) -> None:
        """Rescale gradients from earlier batches to the weight that the shard has in this one."""
        before = self._weights.pop(shard.number, None)
        if before is None or before == shard.weight:
            return
        gradients = [p.grad for p in self._trained]
        if shard.weight == 0:
            self._aside = gradients, before
            self._set_gradients([None] * len(gradients))
        else:
            _multiply(gradients, before / shard.weight)

    def end_shard(self, shard: _Shard) -> None:
        """Keep the gradients of `shard` for a later batch, unless they were used."""
        if shard.number in self._stepped:
            return
        if self._stepped:
            raise self._incomplete()
        gradients, weight = [p.grad for p in self._trained], shard.weight
        if self._aside is not None:
            gradients, weight = self._aside
            self._set_gradients(gradients)
        if any(gradient is not None for gradient in gradients):
            self._weights[shard.number] = weight
            self._left_out_before += shard.left_out or 0
        if shard.one_of_several:
            self._own[shard.number] = gradients
            self._set_gradients([None] * len(gradients))
        self._arrived = None

    def zero_grad(self) -> None:
        """Set the gradients of the running shard to None; outside of a batch, those of all shards."""
        self._original_zero_grad(set_to_none=True)
        self._arrived = self._aside = None
        self._added_to_left = False
        if self._job.current is None or len(self._job.local_shards) == 1:
            self._left_out_before = 0
        if self._job.current is None:
            self._own.clear()
            self._weights.clear()

    # --- the step ----------------------------------------------------------------------------------------------------

    def step(self, closure: Any, loss: Any, count: Any) -> torch.Tensor | None:
        """Add the gradients of the running shard to the sum; after this worker's last one, update the parameters."""
        if closure is not None:
            hint = "It could call it any number of times, on each worker another."
            raise ConfigError("closure", "none for an optimizer of prepare()", found="one", hint=hint)
        shard = self._job.current or self._outside()
        self._check_step(shard, count)
        self._arrived = None
        self._collect(shard, loss, count)
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # as a scheduler's own wrapper does
        if not shard.last:
            self._job.record_deferred_step()
            return None
        sums = self._reduce()
        divisor = sums[1]
        if shard.left_out is not None and not self._counted:
            self._check_left_out(sums[7])
            divisor = (shard.total - sums[6]) / shard.total
        if (self._counted or shard.left_out is not None) and self._job.virtual_workers > 1:
            scale_gradients([p.grad for p in self._trained if p.grad is not None], 1 / divisor)
        if self._job.max_grad_norm is not None:
            self._optimizer.grad_norm = clip(self._trained, self._job.max_grad_norm)  # type: ignore[attr-defined]
        self._check_replicas(sums[2:6])
        self._original_step()
        self._steps += 1
        return None if loss is None else sums[0] / sums[1]

    def _check_left_out(self, left_out: torch.Tensor) -> None:
        """Check that no samples were left out of batches whose gradients are accumulated.

        Raises:
            ConfigError: on every worker, as the mean over what is left of each batch is not known any more.
        """
        self._left_out_before = 0
        if float(left_out):
            hint = "Or leave them out of the data set, or give count= in a step for each batch."
            expected = "a collate function that keeps all samples of batches whose gradients are accumulated"
            raise ConfigError("collate_fn", expected, found=f"one that left out {float(left_out):g}", hint=hint)

    def _outside(self) -> _Shard:
        """Return what stands for the shard of a step outside of a loop over a loader or `shards`."""
        job = self._job
        if job.virtual_workers != job.comm.size:
            hint = "Or use a loop over optimizer.shards(batch)."
            expected = "a step within a loop over the prepared loader, with virtual workers"
            raise ConfigError("step", expected, found="one outside", hint=hint)
        arrived = self._arrived
        self.begin_batch([])
        self._arrived = arrived  # the backward pass has run already
        return _Shard(job.comm.rank, 1 / job.comm.size, last=True, one_of_several=False)

    def _check_step(self, shard: _Shard, count: Any) -> None:
        self._job.check_deferred_step()
        if self._added_to_left:
            raise ConfigError(
                "gradients",
                "optimizer.zero_grad() in each shard, or after the step",
                found="gradients of an earlier step that a shard has added to",
            )
        if shard.number in self._stepped:
            raise ConfigError("step", "one step of an optimizer in each batch", found="two")
        if count is not None and shard.number in self._weights:
            hint = "Accumulate within one batch, or use means over samples."
            raise ConfigError("count", "no gradients of earlier batches in a step with count=", found="some", hint=hint)
        if self._stepped and (count is not None) != self._counted:
            raise ConfigError("count", "a count in each shard, or in none", found="one in some")
        if shard.last and len(self._stepped) + len(self._empty) + 1 < len(self._job.local_shards):
            raise self._incomplete()
        first = self._trained[0].grad if self._trained else None
        if self._arrived is not None and (first is not self._arrived[0] or first._version != self._arrived[1]):
            raise ConfigError(
                "gradients",
                "gradients that are not changed between backward() and step(), e.g. clipped or unscaled",
                found="others than backward() has left, which on several workers are those of one's own samples only",
                hint="Use max_grad_norm= of lockstep.prepare(), or optimizer.register_step_pre_hook(), which sees "
                "those of the global batch.",
            )

    def _incomplete(self) -> ConfigError:
        return ConfigError(
            "step",
            "a step of the optimizer in each shard of a batch, or in none",
            found="one in some: this worker has several shards of each batch, for which the loop's body runs in turn",
            hint="Count global batches, not turns of the loop.",
        )

    def _collect(self, shard: _Shard, loss: Any, count: Any) -> None:
        """Move the weighted gradients and numbers of `shard` into the trees."""
        marks = self._replicas.marks(self._steps) if shard.last else None
        device = self._job.comm.device
        weight = torch.tensor(0.0, dtype=accumulation_dtype(device), device=device)
        if shard.weight:
            weight = weight.fill_(shard.weight) if count is None else weight + count
        numbers = torch.zeros(8, dtype=weight.dtype, device=device)
        if loss is not None and shard.weight:
            numbers[0] = torch.as_tensor(loss).detach() * weight
        numbers[1] = weight
        if marks is not None:
            numbers[2 : 2 + len(marks)] = marks
        if shard.left_out is not None:
            accumulates = shard.number in self._weights or self._left_out_before
            numbers[6] = shard.left_out
            numbers[7] = self._left_out_before + (shard.left_out if accumulates else 0)
        self._numbers.push((shard.number, 1), numbers)
        self._counted = count is not None
        self._stepped.append(shard.number)
        self._weights.pop(shard.number, None)
        if self._job.virtual_workers > 1:
            self._weigh_gradients(shard, weight)
            for bucket in self._buckets:
                bucket.collect((shard.number, 1))
        if shard.last:
            for number in self._empty:
                self._numbers.push((number, 1), torch.zeros_like(numbers))
                earlier = self._own.pop(number, [None] * len(self._trained))
                _multiply(earlier, self._weights.pop(number, 0.0))
                self._set_gradients(earlier)
                for bucket in self._buckets:
                    bucket.collect((number, 1))

    def _weigh_gradients(self, shard: _Shard, weight: torch.Tensor) -> None:
        gradients = [p.grad for p in self._trained]
        if shard.weight == 0:  # of a sample that stands in for none, and may be anything
            gradients, before = self._aside or ([None] * len(gradients), 0.0)
            _multiply(gradients, before)
            self._set_gradients(gradients)
        elif self._counted:
            scale_gradients([gradient for gradient in gradients if gradient is not None], weight)
        else:
            _multiply(gradients, shard.weight)

    def _reduce(self) -> torch.Tensor:
        """Sum the gradients over all shards, and put the sums into ``.grad``; returns the sums of the numbers."""
        job = self._job
        finish = self._numbers.total if job.comm.size == 1 else gather_sum(self._numbers.partial_sums, self._layout)
        for bucket, exchange in zip(self._buckets, self._exchanges, strict=False):
            exchange.start(bucket.tree.partial_sums)
            bucket.retire()
        if job.virtual_workers > 1:
            set_sums(self._buckets, self._exchanges)
        for p in self._trained:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        return finish()

    def _check_replicas(self, marks: torch.Tensor) -> None:
        if self._job.comm.size > 1 and (marks.device.type == "cpu" or self._steps & (self._steps - 1) <= 0):
            self._replicas.settle(self._steps, marks.tolist())


def _record_gradient(optimizer: weakref.ref[_PreparedOptimizer], parameter: nn.Parameter) -> None:
    recorder = optimizer()
    if recorder is not None and parameter.grad is not None:
        recorder.record_gradient(parameter.grad)


def _multiply(gradients: Gradients, factor: float) -> None:
    present = [gradient for gradient in gradients if gradient is not None]
    if present:
        torch._foreach_mul_(present, factor)
