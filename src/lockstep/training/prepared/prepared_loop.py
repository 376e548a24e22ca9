"""A loop of `prepare`: what was prepared together, its bodies, and torch's calls within them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from ... import arguments
from ...communicator import init
from ...data.loader import Loader
from ...errors import ConfigError
from ...flight_recorder import note_samples, note_step, recorded_collectives
from ...parallel.determinism import DeterminismSettings
from ...parallel.module_sync import move_module, sync_module
from ...parallel.nested import map_tensors
from ...parallel.randomness import preserve_generators, seed_shard
from ...parallel.sync_batchnorm import SyncBatchNorm, WorkerExchange
from ...parallel.unsupported_layers import check_supported, check_synchronised
from ..batch_parts import BatchParts, Shard
from ..divided_batches import FirstBatch
from ..loaders import loader_of
from ..model_state import UserState
from ..recovery import recovery_of
from ..step.model_changes import ModelChanges
from ..step.precision import Precision, full_precision
from ..step.step_arguments import check_threads
from .all_gradients import AllGradients
from .batch_buffers import BatchBuffers
from .body_losses import BodyLosses
from .once_a_batch import OnceABatch
from .prepared_optimizer import PreparedOptimizer
from .repeated_batches import RepeatedBatches


class PreparedLoop:
    """What was prepared together, and the loop over the shards of a batch, whose bodies are the
    user's.

    Attributes:
        comm: of the workers.
        model: all models that are trained, as one module.
        max_grad_norm: see `prepare`.
        shards_optimizers: whether the state of each optimizer is to be divided among the workers.
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
        shard_optimizer: bool,
    ) -> None:
        self.comm = init()
        self.user_state = user_state
        expected = (
            "modules, optimizers, DataLoaders or lockstep.Loaders, and learning-rate schedulers"
        )
        for user_object in objects:
            arguments.instance(
                "objects",
                user_object,
                (nn.Module, Optimizer, Loader, DataLoader, LRScheduler),
                expected,
            )
        averages = [
            user_object for user_object in objects if isinstance(user_object, AveragedModel)
        ]
        models = [
            user_object
            for user_object in objects
            if isinstance(user_object, nn.Module) and not isinstance(user_object, AveragedModel)
        ]
        schedulers = [
            user_object for user_object in objects if isinstance(user_object, LRScheduler)
        ]
        optimizers = [user_object for user_object in objects if isinstance(user_object, Optimizer)]
        has_loader = any(isinstance(user_object, (Loader, DataLoader)) for user_object in objects)
        if not models:
            raise ConfigError(
                "objects", "at least one module, whose parameters are trained", found="none"
            )
        for model in models:
            if isinstance(model, DistributedDataParallel):
                raise ConfigError(
                    "objects",
                    "the model itself, whose gradients are summed over the workers by prepare()",
                    found="a DistributedDataParallel, which sums them as well",
                    hint="Leave DistributedDataParallel out, or give the model that it wraps: "
                    "model.module.",
                )
        if max_grad_norm is not None:
            arguments.number("max_grad_norm", max_grad_norm, above=0)
        arguments.flag("shard_optimizer", shard_optimizer, none="False")
        check_threads(threads, virtual_workers)
        if precision == "fp16":
            hint = (
                "Its losses must be scaled before the backward pass: lockstep.TrainStep does that."
            )
            raise ConfigError("precision", "fp32 or bf16 with prepare()", precision, hint)
        self.parts = BatchParts(self.comm, virtual_workers)
        self.max_grad_norm = max_grad_norm
        self.shards_optimizers = shard_optimizer
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
        # what of the model depends on the division
        self._has_described = self.parts.exact or self.comm.size == 1
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
        watch_torch()

    def _prepare_model(self) -> None:
        if self.parts.exact:
            check_supported(self.model, self.comm.device)
        self.synchronised_layers = check_synchronised(self.model, not self.parts.exact)
        for layer in self.synchronised_layers:
            if isinstance(layer, SyncBatchNorm) and isinstance(layer.exchange, WorkerExchange):
                layer.exchange.weight = _weight_of_part
        for module in (self.model, *self._averages):
            move_module(module, self.comm.device)
            sync_module(module, self.comm)
        if self._determinism is not None and self.comm.size > 1 and not self.comm.is_joining:
            self._determinism.check_same(self.comm)

    def change(self, replacement: nn.Module | Optimizer | LRScheduler) -> None:
        """Change a model or an optimizer that `prepare` was given in place; schedulers stay as they
        are.
        """
        if isinstance(replacement, nn.Module):
            if self._precision.name != "fp32":
                replacement.forward = partial(
                    _forward_with_autocast, replacement.forward, self._precision
                )
        elif isinstance(replacement, Optimizer):
            self.optimizers[id(replacement)].install()

    def loader(self, user_loader: Loader | DataLoader[Any]) -> Loader:
        """Return the loader of global batches for one that `prepare` was given.

        Raises:
            ConfigError: for a `Loader` with another number of virtual workers.
        """
        virtual_workers = self.parts.virtual_workers if self.parts.exact else None
        if not isinstance(user_loader, Loader):
            loader = loader_of(user_loader, self.comm, self._seed, virtual_workers)
        elif user_loader.virtual_workers == virtual_workers:
            loader = user_loader
        else:
            expected = f"{virtual_workers}, as given to prepare()"
            raise ConfigError("virtual_workers", expected, user_loader.virtual_workers)
        self.repeats.most_workers = min(self.repeats.most_workers, loader.global_batch_size)
        return loader

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
        self.repeats.follow()
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
        if self._changes.has_changed():
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
        note_step()
        return True

    def _begin_body(self, shard: Shard, data: Any, first: bool) -> None:
        self.parts.current = shard
        _running.append(self)
        if not first:
            self.buffers.restore()
        for optimizer in self.optimizers.values():
            optimizer.begin_shard(shard, first)
        for layer in self.synchronised_layers:
            if isinstance(layer, SyncBatchNorm):
                layer.absent = not shard.samples
        shard.collectives = recorded_collectives()
        self.repeats.begin_body()
        self.losses.begin_body(shard, data)

    def _leave_body(self) -> None:
        """End the running body, or leave it; nothing happens if there is none."""
        self.parts.current = None
        for layer in self.synchronised_layers:
            if isinstance(layer, SyncBatchNorm):
                layer.absent = False
        self.gradients.forget_deferred_step()
        if self in _running:
            _running.remove(self)
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


_running: list[PreparedLoop] = []


def running_loop() -> PreparedLoop | None:
    """Return the loop whose body runs now; None outside."""
    return _running[-1] if _running else None


def _weight_of_part() -> float:
    """Return this worker's part of the batch in the body that runs now, as a multiple of the mean
    part; 1 outside.

    A layer asks for that of whichever loop runs: several may have been prepared with its model.
    """
    loop = running_loop()
    if loop is None or loop.parts.current is None:
        return 1.0
    shard = loop.parts.current
    return shard.samples * loop.comm.size / shard.total


# A loop of one's own calls torch directly, so that there is no object to ask. These are wrapped,
# once in a process; outside the bodies of prepared loops a wrapper is one comparison.
_MARK = "_lockstep_watched"


def watch_torch() -> None:
    """Wrap the calls that a prepared loop is told of; once more for classes of schedulers defined
    since then.
    """
    if not hasattr(torch.autograd.backward, _MARK):
        torch.autograd.backward = _marked(_watched_backward, torch.autograd.backward)
        register_optimizer_step_pre_hook(_watched_optimizer)
    if not hasattr(AveragedModel.update_parameters, _MARK):
        original = AveragedModel.update_parameters
        AveragedModel.update_parameters = _marked(_watched_update, original)  # type: ignore[method-assign]
    for kind in _classes(LRScheduler):
        step = vars(kind).get("step")
        if step is not None and not hasattr(step, _MARK):
            kind.step = _marked(_watched_step, step)


def _classes(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    for subclass in kind.__subclasses__():
        yield from _classes(subclass)


def _marked(replacement: Callable[..., Any], original: Any) -> Any:
    @wraps(original)
    def watched(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs) if _running else original(*args, **kwargs)

    setattr(watched, _MARK, True)
    return watched


def _watched_backward(
    original: Any, tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any
) -> Any:
    roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    is_plain = grad_tensors is None and len(args) < 4 and kwargs.get("inputs") is None
    told = [(loop.gradients, loop.losses.refusals(roots)) for loop in _running] if is_plain else []
    result = original(tensors, grad_tensors, *args, **kwargs)
    for gradients, refusals in told:
        gradients.note_backward(refusals)
    return result


def _watched_optimizer(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    for loop in _running:
        loop.gradients.check_optimizer(optimizer)


def _watched_step(original: Any, scheduler: LRScheduler, *args: Any, **kwargs: Any) -> None:
    if all(loop.once_a_batch.lets_step(scheduler) for loop in _running):
        original(scheduler, *args, **kwargs)


def _watched_update(original: Any, average: AveragedModel, model: Any) -> None:
    _running[-1].once_a_batch.update_average(average, model, partial(original, average, model))
