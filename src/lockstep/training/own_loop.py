"""`prepare`: data parallelism for a training loop that keeps its own forward and backward
passes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader
from typing_extensions import Never, Self

from .. import arguments
from ..communicator import init
from ..data.loader import Batch, Loader
from ..data.torch_dataloaders import dataloader_batch_size, dataloader_settings
from ..errors import ConfigError, unexpected_argument
from ..flight_recorder import note_samples, recorded_collectives
from ..other_names import in_training
from ..parallel.determinism import DeterminismSettings
from ..parallel.module_sync import move_module, sync_module
from ..parallel.nested import map_tensors
from ..parallel.randomness import preserve_generators, seed_shard
from ..parallel.unsupported_layers import check_supported
from . import bodies
from .all_gradients import AllGradients
from .batch_buffers import BatchBuffers
from .batch_parts import BatchParts, Shard
from .body_losses import BodyLosses
from .mixed_samples import FirstBatch
from .model_changes import ModelChanges
from .model_state import UserState
from .once_a_batch import OnceABatch
from .precision import Precision, full_precision
from .prepared_optimizer import PreparedOptimizer
from .recovery import recovery_of
from .repeated_batches import RepeatedBatches
from .step_arguments import check_threads

__all__ = ["PreparedLoader", "prepare"]


def prepare(
    *objects: Any,
    virtual_workers: int | None = None,
    max_grad_norm: float | None = None,
    precision: str = "fp32",
    seed: int = 0,
    threads: int | None = None,
    state: Mapping[str, Any] | None = None,
    **unknown: Never,
) -> Any:
    """Prepare models, optimizers, loaders and schedulers, so that a loop written for one device
    trains on all workers.

    The loop keeps its own forward and backward passes, losses and optimizers::

        model, optimizer, loader = lockstep.prepare(model, optimizer, loader)
        for epoch in range(10):
            for inputs, targets in loader:                  # this worker's part of each global
            batch
                optimizer.zero_grad() loss = loss_fn(model(inputs), targets)      # the mean over
                this part loss.backward() mean = optimizer.step(loss=loss)            # with the
                mean gradient over the global batch if optimizer.stepped:                       #
                this body has completed a step
                    losses.append(mean)

    Each object is changed in place, except that a `DataLoader` becomes a `PreparedLoader`:

    - A model is moved to the worker's device and gets rank 0's values.
    - The batch size of a loader is that of the *global* batch, which all workers share.
    - ``optimizer.step()`` first sums the gradients over the workers. Each worker's gradient is
      weighted by its samples, so that the sum is the gradient of the mean over the global batch.
      For a mean over something else, such as tokens, give the denominator of this worker's loss:
      ``optimizer.step(count=tokens)``. A part whose count is 0 adds nothing, unless all terms of
      its loss are divided by one number, such as ``count.clamp(min=1)``: its sum is added then. If
      nothing counts in the whole batch, that is an error. Parameters without a gradient get one of
      zeros.
    - ``optimizer.step(loss=loss)`` returns the mean loss over the global batch, a 0-dim tensor, in
      the body that completes a step, and None in others; ``optimizer.stepped`` says which it is.
    - Gradients of several batches may be accumulated before one step, as on one device, and zeroed
      in any way: ``optimizer.zero_grad()``, ``model.zero_grad()`` or ``p.grad = None``.
    - Several loaders in one loop, as in ``zip(labelled, unlabelled)``, give the parts of one step.
      Their batches must be divided into equal shares: batch sizes that are multiples of the number
      of workers.
    - A scheduler or an `AveragedModel` acts once a step, and the buffers of an average are those of
      the global batch.

    With `virtual_workers`, each global batch is cut into so many shards, and the results have the
    same bits at any number of workers. A worker with several shards runs the body of the loop once
    for each of them; what acts once a step does nothing but in the last one. A loop in which a
    model is updated and used again within one batch, as in a GAN, says which part of it belongs to
    which optimizer::

        for batch in loader.batches():
            for images, _ in optimizer_d.shards(batch):     # this worker's shards
                ...
                optimizer_d.step()
            for images, _ in optimizer_g.shards(batch):
                ...
                optimizer_g.step()

    `shards` also takes a global batch that every worker has: tensors, nested in tuples, lists and
    mappings, or a number of samples, of which it yields slices. The global random generators are
    seeded for each shard, and restored after the last one.

    **What is an error, on one worker too**: gradients changed by hand between ``backward()`` and
    ``step()``; a step of an optimizer that was not given; a loss that is a sum over samples;
    without virtual workers, one that compares samples with each other (see `whole_batch`), a number
    that a model adds to it and that is no mean over samples (a term that balances experts), weights
    that are changed between two backward passes of a body, and cross entropy with class weights or
    ignored labels in a step without count=; with virtual workers, a scheduler or an `AveragedModel`
    that was not given and acts in each shard, and hyperparameters that differ from shard to shard.
    Hyperparameters are compared over the ranks as well, and several workers refuse forward passes
    that change parameters. Losses and models are looked at in batch 0, 1, 2, 4, … 1,024 and every
    1,024th (inputs that are computed from the loader's, from batch 1 on), changes of
    ``p.grad.data`` and ``p.data`` before step 0, 1, 2, 4 and so on.

    **What is not checked**, and may depend on the number of workers:

    - a sum that is multiplied or divided, e.g. by a fixed batch size, and a sum of products such as
      ``(log_prob * advantage).sum()``: divide by ``len(inputs)``, the samples of this part;
    - a number that a model keeps as an attribute, or that is part of a step with a count;
      statistics of the batch within a model;
    - of a part whose count is 0, a sum that is not zero beside terms that are not divided;
    - a loss that compares samples through a model's methods or parts, a compiled model, a selection
      (``topk``) or numbers without a gradient, such as advantages normalised over the batch, and
      one with fewer than 4 samples in a part; without count=, another mean over something else than
      samples, such as tokens;
    - gradients that the loop computes itself (``p.grad = ...``), changes between two backward
      passes of one body, and hooks of parameters: each sees the samples of one part;
    - turns of the loop that are counted by hand, with virtual workers: count where
      ``optimizer.stepped`` is true; the same holds for averages of other classes than
      `AveragedModel`, and schedulers that are none of torch;
    - data that differ from process to process where the loop makes them, and numbers that it draws,
      without virtual workers;
    - buffers after ``break`` in the body that completes a step: they are those of one's own part.
      Leave the loop at the beginning of the next body, or after the last one.

    ``lockstep verify SCRIPT`` runs a loop on several numbers of workers and compares.

    **In an elastic job** (``lockstep run --elastic``) a loop over a prepared loader with one
    optimizer goes on after the loss of a worker: the workers that are left get the same batch
    again. In a body that the loss has interrupted, ``optimizer.step()`` returns None and
    ``optimizer.stepped`` is false, and what acts once a step does nothing, as in a shard that is
    not the last one. Workers join between two batches: they run the program from its beginning,
    with no batches in epochs that are over, and get model, optimizer, prepared schedulers and
    averages, and `state` from the others. Loops that cannot be repeated are started again from the
    beginning of the program, which rank 0 says; see the page on elastic training.

    Args:
        objects: any number of modules, optimizers over their parameters, `DataLoader`s or
            `lockstep.Loader`s, learning-rate schedulers of these optimizers that are stepped once a
            batch, and `AveragedModel`s.
        virtual_workers: number of shards of each global batch; as many as there are workers when
            None.
        max_grad_norm: maximum 2-norm of each optimizer's whole gradient, which is then in
            ``optimizer.grad_norm``; `math.inf` measures it only.
        precision: "fp32", or "bf16": forward passes run with autocast, and floating outputs are
            converted to float32.
        seed: the seed of the order of samples and of random draws within shards.
        threads: with virtual workers, threads within an operation on the CPU; 1 when None.
        state: what else the bodies of the loop change, by name, and workers that join an elastic
            job need: objects with ``state_dict()`` and ``load_state_dict()``, or dicts.

    Returns:
        The objects in the order given; a single one is not put into a tuple.

    Raises:
        ConfigError: for invalid arguments.
        MismatchError: if the workers' models differ.
        TypeError: for an argument of another name; the error says what it is here.
    """
    if unknown:
        name = next(iter(unknown))
        raise unexpected_argument(
            "prepare", name, in_training(name, "prepare"), arguments.keyword_names(prepare)
        )
    loop = _OwnLoop(
        objects, virtual_workers, max_grad_norm, precision, seed, threads, UserState(state)
    )
    prepared = tuple(loop.prepare_one(given) for given in objects)
    return prepared[0] if len(prepared) == 1 else prepared


class PreparedLoader:
    """A loader for a loop of one's own, see `prepare`: yields the data of this worker's shards of
    each global batch.

    While gradients are disabled, as in an evaluation, it yields each sample of the data set on one
    worker only; a worker may then have fewer batches than others, or none. `lockstep.evaluate` sums
    over the workers.

    Args:
        loop: what was prepared together.
        loader: loads the global batches.
    """

    def __init__(self, loop: _OwnLoop, loader: Loader) -> None:
        self._loop = loop
        self.loader = loader

    def __len__(self) -> int:
        """Global batches in an epoch; the number of optimizer steps."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the next epoch: epoch 0, then 1, and so on, from the loaded position in the
        first.

        In the body of a loop over another prepared loader, as in ``zip(labelled, unlabelled)``, it
        yields the same shard of its own batches, which must be divided into the same shares.
        """
        for batch in self.batches():
            is_second = self._loop.parts.current is not None and torch.is_grad_enabled()
            yield from self._loop.shards_beside(batch) if is_second else self._loop.shards(batch)

    def batches(self) -> Iterator[Batch]:
        """Iterate over the global batches of the next epoch, for `shards` of the optimizers."""
        bodies.watch()  # classes of schedulers may have been defined since
        for batch in self._loop.repeats.batches(self.loader):
            self._loop.parts.source = self.loader
            yield batch
        for optimizer in self._loop.optimizers.values():
            optimizer.settle()

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


class _OwnLoop:
    """What was prepared together, and the loop over the shards of a batch, whose bodies are the
    user's.

    Attributes:
        comm: of the workers.
        model: all models that are trained, as one module.
        max_grad_norm: see `prepare`.
        user_state: what else the bodies change.
        parts: the shards of each batch.
        buffers: those of the models, within a batch.
        repeats: the batches that run again in an elastic job.
        gradients: those of all optimizers.
        losses: what the bodies compute.
        once_a_batch: schedulers and averages, and when they act.
        once_a_step: the same objects, which have a state.
        optimizers: by the id of the optimizer that `prepare` was given.
    """

    repeats: RepeatedBatches
    optimizers: dict[int, PreparedOptimizer]

    def __init__(
        self,
        objects: tuple[Any, ...],
        virtual_workers: int | None,
        max_grad_norm: float | None,
        precision: str,
        seed: int,
        threads: int | None,
        user_state: UserState,
    ) -> None:
        self.comm = init()
        self.user_state = user_state
        expected = (
            "modules, optimizers, DataLoaders or lockstep.Loaders, and learning-rate schedulers"
        )
        for given in objects:
            arguments.instance(
                "objects", given, (nn.Module, Optimizer, Loader, DataLoader, LRScheduler), expected
            )
        averages = [given for given in objects if isinstance(given, AveragedModel)]
        models = [
            given
            for given in objects
            if isinstance(given, nn.Module) and not isinstance(given, AveragedModel)
        ]
        schedulers = [given for given in objects if isinstance(given, LRScheduler)]
        optimizers = [given for given in objects if isinstance(given, Optimizer)]
        has_loader = any(isinstance(given, (Loader, DataLoader)) for given in objects)
        if not models:
            raise ConfigError(
                "objects", "at least one module, whose parameters are trained", found="none"
            )
        if max_grad_norm is not None:
            arguments.number("max_grad_norm", max_grad_norm, above=0)
        check_threads(threads, virtual_workers)
        if precision == "fp16":
            hint = (
                "Its losses must be scaled before the backward pass: lockstep.TrainStep does that."
            )
            raise ConfigError("precision", "fp32 or bf16 with prepare()", precision, hint)
        self.parts = BatchParts(self.comm, virtual_workers)
        self.max_grad_norm = max_grad_norm
        self._seed = seed
        self._precision = Precision(precision, self.comm.device)
        self._determinism = (
            DeterminismSettings(self.comm.device, threads) if self.parts.exact else None
        )
        self._models = models
        self._averages = averages
        self.model: nn.Module = models[0] if len(models) == 1 else nn.ModuleList(models)
        self._prepare_model()
        self._changes = ModelChanges(self.model)
        self._has_described = (
            self.parts.exact or self.comm.size == 1
        )  # what of the model depends on the division
        recovery = recovery_of(self.comm, can_regroup=len(optimizers) == 1 and has_loader)
        self.buffers = BatchBuffers(
            self.model, averages, self.parts, is_elastic=not recovery.has_fixed_workers
        )
        self.repeats = RepeatedBatches(self, recovery, len(optimizers))
        prepared = {id(optimizer) for optimizer in optimizers}
        self.gradients = AllGradients(self.model, self.parts, prepared, has_loader)
        self.losses = BodyLosses(models, self.parts)
        self.once_a_step: Sequence[Any] = [*schedulers, *averages]
        self.once_a_batch = OnceABatch(
            self.model, self.parts, self.repeats, prepared, schedulers, averages
        )
        self.optimizers = {
            id(optimizer): PreparedOptimizer(optimizer, self) for optimizer in optimizers
        }
        bodies.watch()

    def _prepare_model(self) -> None:
        if self.parts.exact:
            check_supported(self.model, self.comm.device)
        for module in (self.model, *self._averages):
            move_module(module, self.comm.device)
            sync_module(module, self.comm)
        if self._determinism is not None and self.comm.size > 1 and not self.comm.is_joining:
            self._determinism.check_same(self.comm)

    def prepare_one(self, given: Any) -> Any:
        """Return what `prepare` returns for one of its objects."""
        if isinstance(given, nn.Module):
            if self._precision.name != "fp32":
                given.forward = partial(_forward_with_autocast, given.forward, self._precision)
        elif isinstance(given, Optimizer):
            self.optimizers[id(given)].install()
        elif isinstance(given, LRScheduler):
            self.once_a_batch.prepare(given)
        else:
            loader = self._loader(given)
            self.repeats.most_workers = min(self.repeats.most_workers, loader.global_batch_size)
            return PreparedLoader(self, loader)
        return given

    def _loader(self, given: Loader | DataLoader[Any]) -> Loader:
        wanted = self.parts.virtual_workers if self.parts.exact else None
        if isinstance(given, Loader):
            if given.virtual_workers != wanted:
                raise ConfigError(
                    "virtual_workers", f"{wanted}, as given to prepare()", given.virtual_workers
                )
            return given
        size = dataloader_batch_size(given) or 1
        settings = dataloader_settings(given, "loader", size, warns=self.comm.rank == 0)
        return Loader(
            **settings,
            global_batch_size=size,
            seed=self._seed,
            comm=self.comm,
            virtual_workers=wanted,
        )

    def regroup(self) -> None:
        """Adapt to the communicator's new workers, which have the same state."""
        self._has_described = True
        self.parts.regroup()
        for optimizer in self.optimizers.values():
            optimizer.regroup()

    def shards(self, batch: Any) -> Iterator[Any]:
        """Yield the data of each of this worker's shards of a global batch, while its passes
        run.
        """
        if not torch.is_grad_enabled():
            yield from (data for _, data, samples in self.parts.of(batch)[0] if samples)
            return
        if self.parts.current is not None:
            raise ConfigError(
                "shards",
                "one loop over the shards of a batch at a time",
                found="one inside another",
            )
        key = self.parts.begin_pass(batch)
        self.losses.begin_batch(self.parts.passes_before(batch))
        self.once_a_batch.begin_batch()
        with ExitStack() as stack:
            if self._determinism is not None:
                stack.enter_context(self._determinism.applied())
            stack.enter_context(preserve_generators(self.comm.device))
            stack.callback(self.repeats.leave_bodies)
            stack.callback(self._leave_body)
            self._look_at_model()
            while not (yield from self._bodies(batch, key)):
                # That of this worker among those that there are now.
                recovery = self.repeats.recovery
                batch = recovery.read(partial(recovery.part_of, batch))
            self.once_a_batch.end_batch()

    def _look_at_model(self) -> None:
        """Give all workers rank 0's values of new parameters."""
        if self._changes.found():
            self.repeats.recovery.run(self._prepare_model)
            self._changes.note()
            self.buffers.renew()

    def _bodies(self, batch: Any, key: int) -> Generator[Any, None, bool]:
        """Yield the data of each shard; returns False if the workers have changed meanwhile, and
        before the step.
        """
        parts, total = self.parts.of(batch)
        if not any(samples for *_, samples in parts):  # each worker must take part in each step
            parts = [(self.parts.local[0], self.parts.stand_in(batch), 0)]
        numbers = [number for number, *_ in parts]
        empty = [shard for shard in self.parts.local if shard not in numbers]
        left_out = self.parts.left_out(batch)
        self.repeats.begin_bodies()
        for optimizer in self.optimizers.values():
            optimizer.begin_batch(empty)
        for position, (number, data, samples) in enumerate(parts):
            last = position == len(parts) - 1
            several = len(self.parts.local) > 1
            missing = left_out if last or left_out is None else 0
            shard = Shard(number, samples, samples / total, last, several, total, missing)
            self._begin_body(shard, data, first=position == 0)
            seed_shard(self._seed, key, number, self.comm.device)
            first_batch = self._first_batch(total)
            yield data
            if self.repeats.is_abandoned:
                self._leave_body()
                for optimizer in self.optimizers.values():
                    optimizer.abandon()
                self.repeats.abandon_bodies()
                return False
            self.repeats.end_body()
            if first_batch is not None:
                self._has_described = True
                first_batch.tell()
            self.buffers.end_shard(shard)
            self.gradients.check_deferred_step()
            for optimizer in self.optimizers.values():
                optimizer.end_shard(shard)
            self._leave_body()
        if not self.repeats.end_bodies():
            self.buffers.end(total, left_out)
        for optimizer in self.optimizers.values():
            optimizer.end_batch()
        note_samples(sum(samples for *_, samples in parts))
        return True

    def _begin_body(self, shard: Shard, data: Any, first: bool) -> None:
        self.parts.current = shard
        bodies.begin(self)
        if not first:
            self.buffers.restore()
        for optimizer in self.optimizers.values():
            optimizer.begin_shard(shard, first)
        shard.collectives = recorded_collectives()
        self.repeats.begin_body()
        self.losses.begin_body(shard, data)

    def _leave_body(self) -> None:
        """End the running body, or leave it; nothing happens if there is none."""
        self.parts.current = None
        self.gradients.forget_deferred_step()
        bodies.end(self)
        self.losses.end_body()

    def _first_batch(self, samples: int) -> FirstBatch | None:
        """Return what watches the first body, in a batch of `samples`; told after it, as it sets
        the layers' modes.
        """
        if self._has_described:
            return None
        return FirstBatch(self.model, self.comm, samples, called=self._models, own_hooks=True)

    def shards_beside(self, batch: Any) -> Iterator[Any]:
        """Yield the data of a second loader's batch in the bodies of the first one, which says what
        the parts weigh.

        Raises:
            ConfigError: if the two batches are divided into other shares.
        """
        self.repeats.do_not_repeat("several loaders in one loop")
        parts, total = self.parts.of(batch)
        for number, data, samples in parts or [
            (self.parts.local[0], self.parts.stand_in(batch), 0)
        ]:
            shard = self.parts.current
            if (
                shard is None
                or number != shard.number
                or samples * shard.total != shard.samples * total
            ):
                first = "none" if shard is None else f"{shard.samples} of {shard.total}"
                workers = "workers" if not self.parts.exact else "virtual workers"
                raise ConfigError(
                    "loader",
                    "a second loader in a body whose batches are divided into the same shares as "
                    "the first one's",
                    found=f"{samples} of its {total} samples beside {first}",
                    hint=f"Use batch sizes that are multiples of the number of {workers} "
                    f"({self.parts.virtual_workers}), drop_last=True for both, and one batch "
                    "of each in a body. Or a single data set whose samples are pairs of both.",
                )
            yield data


def _forward_with_autocast(
    forward: Callable[..., Any], precision: Precision, *args: Any, **kwargs: Any
) -> Any:
    with precision.autocast():
        output = forward(*args, **kwargs)
    return map_tensors(full_precision, output)
