"""`prepare`: data parallelism for a training loop that keeps its own forward and backward passes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader
from typing_extensions import Never, Self

from .. import arguments
from ..communicator import init
from ..data.loader import Batch, Loader, dataloader_batch_size, dataloader_settings
from ..errors import ConfigError, unexpected_argument
from ..flight_recorder import current, note_samples
from ..other_names import in_training
from ..parallel.buffers import Buffers
from ..parallel.determinism import DeterminismSettings
from ..parallel.fingerprints import checksum_of
from ..parallel.gradient_buckets import Gradients
from ..parallel.module_sync import move_module, sync_module
from ..parallel.nested import map_tensors, narrow, sample_count
from ..parallel.randomness import preserve_generators, seed_shard
from ..parallel.reducer import Reducer
from ..parallel.shards import bounds, check_virtual_workers, mix
from ..parallel.unsupported_layers import check_supported
from . import bodies
from .feed import copied
from .in_flight import LAG, HostCopy
from .loss_graphs import Refusal, divisor, refusal_of
from .mean_check import is_due
from .mixed_samples import FirstBatch
from .model_calls import ModelCalls
from .model_changes import ModelChanges
from .model_check import is_compiled
from .model_state import UserState
from .own_loop_state import OwnLoopState
from .precision import Precision, full_precision
from .prepared_optimizer import PreparedOptimizer
from .recovery import REGROUP, interrupt, recovery_of, repeat_by
from .shard_gradients import ShardGradients
from .step import check_threads
from .whole_batch import gather_rows

__all__ = ["PreparedLoader", "prepare"]

_log = logging.getLogger(__name__)

T = TypeVar("T")


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
    """Prepare models, optimizers, loaders and schedulers, so that a loop written for one device trains on all workers.

    The loop keeps its own forward and backward passes, losses and optimizers::

        model, optimizer, loader = lockstep.prepare(model, optimizer, loader)
        for epoch in range(10):
            for inputs, targets in loader:                  # this worker's part of each global batch
                optimizer.zero_grad()
                loss = loss_fn(model(inputs), targets)      # the mean over this part
                loss.backward()
                mean = optimizer.step(loss=loss)            # with the mean gradient over the global batch
                if optimizer.stepped:                       # this body has completed a step
                    losses.append(mean)

    Each object is changed in place, except that a `DataLoader` becomes a `PreparedLoader`:

    - A model is moved to the worker's device and gets rank 0's values.
    - The batch size of a loader is that of the *global* batch, which all workers share.
    - ``optimizer.step()`` first sums the gradients over the workers. Each worker's gradient is weighted by its samples,
      so that the sum is the gradient of the mean over the global batch. For a mean over something else, such as tokens,
      give the denominator of this worker's loss: ``optimizer.step(count=tokens)``. A part whose count is 0 adds
      nothing, unless all terms of its loss are divided by one number, such as ``count.clamp(min=1)``: its sum is added
      then. If nothing counts in the whole batch, that is an error. Parameters without a gradient get one of zeros.
    - ``optimizer.step(loss=loss)`` returns the mean loss over the global batch, a 0-dim tensor, in the body that
      completes a step, and None in others; ``optimizer.stepped`` says which it is.
    - Gradients of several batches may be accumulated before one step, as on one device, and zeroed in any way:
      ``optimizer.zero_grad()``, ``model.zero_grad()`` or ``p.grad = None``.
    - Several loaders in one loop, as in ``zip(labelled, unlabelled)``, give the parts of one step. Their batches must
      be divided into equal shares: batch sizes that are multiples of the number of workers.
    - A scheduler or an `AveragedModel` acts once a step, and the buffers of an average are those of the global batch.

    With `virtual_workers`, each global batch is cut into so many shards, and the results have the same bits at any
    number of workers. A worker with several shards runs the body of the loop once for each of them; what acts once a
    step does nothing but in the last one. A loop in which a model is updated and used again within one batch, as in a
    GAN, says which part of it belongs to which optimizer::

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

    **What is an error, on one worker too**: gradients changed by hand between ``backward()`` and ``step()``; a step of
    an optimizer that was not given; a loss that is a sum over samples; without virtual workers, one that compares
    samples with each other (see `whole_batch`), a number that a model adds to it and that is no mean over samples (a
    term that balances experts), weights that are changed between two backward passes of a body, and cross entropy with
    class weights or ignored labels in a step without count=; with virtual workers, a scheduler or an `AveragedModel`
    that was not given and acts in each shard, and hyperparameters that differ from shard to shard. Hyperparameters are
    compared over the ranks as well, and several workers refuse forward passes that change parameters. Losses and
    models are looked at in batch 0, 1, 2, 4, … 1,024 and every 1,024th (inputs that are computed from the loader's,
    from batch 1 on), changes of ``p.grad.data`` and ``p.data`` before step 0, 1, 2, 4 and so on.

    **What is not checked**, and may depend on the number of workers:

    - a sum that is multiplied or divided, e.g. by a fixed batch size, and a sum of products such as
      ``(log_prob * advantage).sum()``: divide by ``len(inputs)``, the samples of this part;
    - a number that a model keeps as an attribute, or that is part of a step with a count; statistics of the batch
      within a model;
    - of a part whose count is 0, a sum that is not zero beside terms that are not divided;
    - a loss that compares samples through a model's methods or parts, a compiled model, a selection (``topk``) or
      numbers without a gradient, such as advantages normalised over the batch, and one with fewer than 4 samples in a
      part; without count=, another mean over something else than samples, such as tokens;
    - gradients that the loop computes itself (``p.grad = ...``), changes between two backward passes of one body, and
      hooks of parameters: each sees the samples of one part;
    - turns of the loop that are counted by hand, with virtual workers: count where ``optimizer.stepped`` is true; the
      same holds for averages of other classes than `AveragedModel`, and schedulers that are none of torch;
    - data that differ from process to process where the loop makes them, and numbers that it draws, without virtual
      workers;
    - buffers after ``break`` in the body that completes a step: they are those of one's own part. Leave the loop at the
      beginning of the next body, or after the last one.

    ``lockstep verify SCRIPT`` runs a loop on several numbers of workers and compares.

    **In an elastic job** (``lockstep run --elastic``) a loop over a prepared loader with one optimizer goes on after
    the loss of a worker: the workers that are left get the same batch again. In a body that the loss has interrupted,
    ``optimizer.step()`` returns None and ``optimizer.stepped`` is false, and what acts once a step does nothing, as in
    a shard that is not the last one. Workers join between two batches: they run the program from its beginning, with no
    batches in epochs that are over, and get model, optimizer, prepared schedulers and averages, and `state` from the
    others. Loops that cannot be repeated are started again from the beginning of the program, which rank 0 says; see
    the page on elastic training.

    Args:
        objects: any number of modules, optimizers over their parameters, `DataLoader`s or `lockstep.Loader`s,
            learning-rate schedulers of these optimizers that are stepped once a batch, and `AveragedModel`s.
        virtual_workers: number of shards of each global batch; as many as there are workers when None.
        max_grad_norm: maximum 2-norm of each optimizer's whole gradient, which is then in ``optimizer.grad_norm``;
            `math.inf` measures it only.
        precision: "fp32", or "bf16": forward passes run with autocast, and floating outputs are converted to float32.
        seed: the seed of the order of samples and of random draws within shards.
        threads: with virtual workers, threads within an operation on the CPU; 1 when None.
        state: what else the bodies of the loop change, by name, and workers that join an elastic job need: objects with
            ``state_dict()`` and ``load_state_dict()``, or dicts.

    Returns:
        The objects in the order given; a single one is not put into a tuple.

    Raises:
        ConfigError: for invalid arguments.
        MismatchError: if the workers' models differ.
        TypeError: for an argument of another name; the error says what it is here.
    """
    if unknown:
        name = next(iter(unknown))
        raise unexpected_argument("prepare", name, in_training(name, "prepare"), arguments.keyword_names(prepare))
    job = _OwnLoop(objects, virtual_workers, max_grad_norm, precision, seed, threads, UserState(state))
    prepared = tuple(job.prepare_one(each) for each in objects)
    return prepared[0] if len(prepared) == 1 else prepared


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
        """Iterate over the next epoch: epoch 0, then 1, and so on, from the loaded position in the first.

        In the body of a loop over another prepared loader, as in ``zip(labelled, unlabelled)``, it yields the same
        shard of its own batches, which must be divided into the same shares.
        """
        for batch in self.batches():
            is_second = self._job.current is not None and torch.is_grad_enabled()
            yield from self._job.shards_beside(batch) if is_second else self._job.shards(batch)

    def batches(self) -> Iterator[Batch]:
        """Iterate over the global batches of the next epoch, for `shards` of the optimizers."""
        bodies.watch()  # classes of schedulers may have been defined since
        for batch in self._job.batches(self.loader):
            self._job.source = self.loader
            yield batch
        for optimizer in self._job.optimizers.values():
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
        user_state: UserState,
    ) -> None:
        self.comm, self.user_state = init(), user_state
        expected = "modules, optimizers, DataLoaders or lockstep.Loaders, and learning-rate schedulers"
        for given in objects:
            arguments.instance("objects", given, (nn.Module, Optimizer, Loader, DataLoader, LRScheduler), expected)
        if not any(isinstance(given, nn.Module) and not isinstance(given, AveragedModel) for given in objects):
            raise ConfigError("objects", "at least one module, whose parameters are trained", found="none")
        if max_grad_norm is not None:
            arguments.number("max_grad_norm", max_grad_norm, above=0)
        check_threads(threads, virtual_workers)
        if precision == "fp16":
            hint = "Its losses must be scaled before the backward pass: lockstep.TrainStep does that."
            raise ConfigError("precision", "fp32 or bf16 with prepare()", precision, hint)
        self.exact, self.seed = virtual_workers is not None, seed
        self._given_virtual_workers = virtual_workers
        self._divide()
        self._most = self.virtual_workers if self.exact else 1 << 30  # workers that there may be
        self.max_grad_norm, self._precision = max_grad_norm, Precision(precision, self.comm.device)
        self._determinism = DeterminismSettings(self.comm.device, threads) if self.exact else None
        self.averages = [each for each in objects if isinstance(each, AveragedModel)]
        self.schedulers = [each for each in objects if isinstance(each, LRScheduler)]
        self._models = [each for each in objects if isinstance(each, nn.Module) and not isinstance(each, AveragedModel)]
        self.model = self._models[0] if len(self._models) == 1 else nn.ModuleList(self._models)
        self._prepare_model()
        optimizers = [each for each in objects if isinstance(each, Optimizer)]
        loaders = [each for each in objects if isinstance(each, (Loader, DataLoader))]
        self._begin_recovery(len(optimizers), len(loaders))
        self._changes, self._buffers = ModelChanges(self.model), self._make_buffers()
        self._has_described = self.exact or self.comm.size == 1
        self.optimizers: dict[int, PreparedOptimizer] = {id(each): PreparedOptimizer(each, self) for each in optimizers}
        self.current: bodies.Shard | None = None
        self.counts = False  # whether a step has had a count
        self.source: Loader | None = None  # that of the latest batch
        self._batch_size = 0  # samples in the global batch
        self._passes: dict[Any, int] = {}  # how often `shards` has been called for the current batch
        self._deferred: list[tuple[nn.Parameter, Any, int]] = []
        self._after_batch: list[Callable[[], None]] = []
        self._looks = Counter[int]()  # at losses, by the number of the pass over a batch
        self._calls: ModelCalls | None = None  # of the running body, if its losses are looked at
        self._look_number = 0  # batches that were before it
        self._inputs_before: list[torch.Tensor] | None = None  # of models, in the body that was looked at before
        self._left: list[tuple[nn.Parameter, torch.Tensor, int]] = []  # gradients, if no optimizer was given
        self._collectives: int | None = None  # that were recorded before the running body
        self._updates = False  # whether the step of a prepared optimizer runs
        self._has_loader = bool(loaders)
        bodies.watch()

    def _divide(self) -> None:
        """Set the number of shards of a global batch, and those of this worker."""
        given, size = self._given_virtual_workers, self.comm.size
        self.virtual_workers = size if given is None else check_virtual_workers(given, size)
        self.local_shards = range(*bounds(self.virtual_workers, size, self.comm.rank))

    def _prepare_model(self) -> None:
        if self.exact:
            check_supported(self.model, self.comm.device)
        for module in (self.model, *self.averages):
            move_module(module, self.comm.device)
            sync_module(module, self.comm)
        if self._determinism is not None and self.comm.size > 1 and not self.comm.is_joining:
            self._determinism.check_same(self.comm)

    def _make_buffers(self) -> _BatchBuffers:
        return _BatchBuffers(self, nn.ModuleList([*self._models, *(each.module for each in self.averages)]))

    def _look_at_model(self) -> None:
        """Give all workers rank 0's values of new parameters."""
        if self._changes.found():
            self.recovery.run(self._prepare_model)
            self._changes.note()
            self._buffers = self._make_buffers()

    def _first_batch(self, samples: int) -> FirstBatch | None:
        """Return what watches the first body, in a batch of `samples`; told after it, as it sets the layers' modes."""
        if self._has_described:
            return None
        return FirstBatch(self.model, self.comm, samples, called=self._models, own_hooks=True)

    def prepare_one(self, given: Any) -> Any:
        """Return what `prepare` returns for one of its objects."""
        if isinstance(given, nn.Module):
            if self._precision.name != "fp32":
                given.forward = partial(_forward_with_autocast, given.forward, self._precision)
        elif isinstance(given, Optimizer):
            self.optimizers[id(given)].install()
        elif isinstance(given, LRScheduler):
            _in_last_shard_only(given, self._acts)
        else:
            loader = self._loader(given)
            self._most = min(self._most, loader.global_batch_size)
            return PreparedLoader(self, loader)
        return given

    def _loader(self, given: Loader | DataLoader[Any]) -> Loader:
        wanted = self.virtual_workers if self.exact else None
        if isinstance(given, Loader):
            if given.virtual_workers != wanted:
                raise ConfigError("virtual_workers", f"{wanted}, as given to prepare()", given.virtual_workers)
            return given
        size = dataloader_batch_size(given) or 1
        settings = dataloader_settings(given, "loader", size, warns=self.comm.rank == 0)
        return Loader(**settings, global_batch_size=size, seed=self.seed, comm=self.comm, virtual_workers=wanted)

    def _acts(self) -> bool:
        """Return whether what acts once a step acts now: outside of a batch, and in the last shard of one.

        Not in a body that runs again, because the workers have changed before its step.
        """
        return self.current is None or (self.current.last and not self.is_abandoned)

    # --- shards of a batch -------------------------------------------------------------------------------------------

    def shards(self, batch: Any) -> Iterator[Any]:
        """Yield the data of each of this worker's shards of a global batch, while its passes run."""
        if not torch.is_grad_enabled():
            yield from (data for _, data, samples in self._parts(batch)[0] if samples)
            return
        if self.current is not None:
            raise ConfigError("shards", "one loop over the shards of a batch at a time", found="one inside another")
        key, look, self._after_batch = self._key(batch), self._look(batch), []
        with ExitStack() as stack:
            if self._determinism is not None:
                stack.enter_context(self._determinism.applied())
            stack.enter_context(preserve_generators(self.comm.device))
            stack.callback(self._leave_batch)
            self._look_at_model()
            while not (yield from self._bodies(batch, key, look)):
                # That of this worker among those that there are now.
                batch = self.recovery.read(partial(self.recovery.part_of, batch))
            for call in self._after_batch:
                call()

    def _bodies(self, batch: Any, key: int, look: int | None) -> Generator[Any, None, bool]:
        """Yield the data of each shard; returns False if the workers have changed meanwhile, and before the step."""
        parts, total = self._parts(batch)
        if not any(samples for *_, samples in parts):  # each worker must take part in each step
            parts = [(self.local_shards[0], self._stand_in(batch), 0)]
        empty = [shard for shard in self.local_shards if shard not in [number for number, *_ in parts]]
        left_out = self._left_out(batch)
        self._batch_size = total
        self._begin_bodies()
        for optimizer in self.optimizers.values():
            optimizer.begin_batch(empty)
        for position, (number, data, samples) in enumerate(parts):
            last = position == len(parts) - 1
            several, missing = len(self.local_shards) > 1, left_out if last else left_out and 0
            shard = bodies.Shard(number, samples, samples / total, last, several, total, missing)
            self._begin_shard(shard, data, first=position == 0, look=look)
            seed_shard(self.seed, key, number, self.comm.device)
            first = self._first_batch(total)
            yield data
            if self.is_abandoned:
                self._abandon_bodies()
                return False
            self._look_at_body()
            if first is not None:
                self._has_described = True
                first.tell()
            self._buffers.end_shard(number, samples, last)
            self._end_shard()
        if not self._end_bodies():
            self._buffers.end(total, left_out)
        for optimizer in self.optimizers.values():
            optimizer.end_batch()
        note_samples(sum(samples for *_, samples in parts))
        return True

    def shards_beside(self, batch: Any) -> Iterator[Any]:
        """Yield the data of a second loader's batch in the bodies of the first one, which says what the parts weigh.

        Raises:
            ConfigError: if the two batches are divided into other shares.
        """
        self.do_not_repeat("several loaders in one loop")
        parts, total = self._parts(batch)
        for number, data, samples in parts or [(self.local_shards[0], self._stand_in(batch), 0)]:
            shard = self.current
            if shard is None or number != shard.number or samples * self._batch_size != shard.samples * total:
                first = "none" if shard is None else f"{shard.samples} of {self._batch_size}"
                workers = "workers" if not self.exact else "virtual workers"
                raise ConfigError(
                    "loader",
                    "a second loader in a body whose batches are divided into the same shares as the first one's",
                    found=f"{samples} of its {total} samples beside {first}",
                    hint=f"Use batch sizes that are multiples of the number of {workers} ({self.virtual_workers}), "
                    "drop_last=True for both, and one batch of each in a body. Or a single data set whose samples are "
                    "pairs of both.",
                )
            yield data

    def _begin_shard(self, shard: bodies.Shard, data: Any, first: bool, look: int | None) -> None:
        self.current = shard
        bodies.begin(self)
        if not first:
            self._buffers.restore()
        for optimizer in self.optimizers.values():
            optimizer.begin_shard(shard, first)
        self._collectives, self._collectives_of_operations = _recorded_collectives(), 0
        if look is not None and shard.samples:
            models = [model for model in self._models if not is_compiled(model)]
            # The shards of virtual workers are the same on any number of workers, and so is what is compared in them.
            compares, refuses_changes = not self.exact, self.exact or self.comm.size > 1
            before = self._inputs_before
            self._calls = ModelCalls(models, shard.samples, data, before, compares, refuses_changes)
            self._look_number = look

    def _end_shard(self) -> None:
        assert self.current is not None
        self.check_deferred_step()
        for optimizer in self.optimizers.values():
            optimizer.end_shard(self.current)
        self._leave()

    def _leave_batch(self) -> None:
        self._leave()
        self._has_bodies = False

    def _leave(self) -> None:
        self.current, self._deferred = None, []
        bodies.end(self)
        if self._calls is not None:
            self._calls.close()
            self._inputs_before = self._calls.inputs
            self._calls = None

    # --- elastic jobs -------------------------------------------------------------------------------------------------

    def _begin_recovery(self, optimizers: int, loaders: int) -> None:
        """Choose the recovery, and say so if nothing can be repeated."""
        self.recovery = recovery_of(self.comm, can_regroup=optimizers == 1 and loaders > 0)
        self._why_not = ""  # the loss of a worker starts all again, instead of a repeated batch
        self._is_tried = self.comm.is_joining  # whether a batch has shown that the loop can be repeated
        self._is_repeated = False  # whether the batch in progress is, so that its buffers are summed up in the step
        self._regrouped = self._began = 0  # how often the workers have changed: ever, and before the bodies that run
        self._has_bodies, self._has_stepped = False, False  # whether bodies run; whether their step is done
        self._collectives_of_operations = 0  # in the running body
        self._state: OwnLoopState | None = None  # of the loop that runs
        self._requests: list[HostCopy] = []  # of steps that have not been read yet
        if self.recovery.is_missing:
            several = f"{optimizers} optimizers" if optimizers != 1 else "no loader"
            self._say_not_repeated(several)
        elif not self.recovery.has_fixed_workers:
            repeat_by(self._repeat)  # evaluations before the first loop, too

    def _say_not_repeated(self, why: str) -> None:
        if self.comm.rank == 0 and not self.comm.is_joining:
            _log.warning(
                "lockstep.prepare() in an elastic job, with %s: no worker can join or leave, and the loss of a worker "
                "starts all workers again, from the beginning of the program",
                why,
            )

    def do_not_repeat(self, why: str) -> None:
        """Let the loss of a worker start all workers again from here on, because of something that the loop does."""
        if not self.recovery.has_fixed_workers and not self._why_not:
            if self.is_abandoned:
                expected = "a loop that does in each batch of an elastic job what it does in the first one"
                raise ConfigError("loop", expected, found=f"{why}, in a batch that is repeated")
            self._why_not = why
            self.recovery.suspend()
            self._say_not_repeated(why)

    @property
    def optimizer(self) -> Optimizer:
        """The only optimizer of a loop that can be repeated."""
        return self._only.optimizer

    @property
    def _only(self) -> PreparedOptimizer:
        (prepared,) = self.optimizers.values()
        return prepared

    @property
    def steps_done(self) -> int:
        """The number of its steps."""
        return self._only.steps_done

    @steps_done.setter
    def steps_done(self, steps: int) -> None:
        self._only.steps_done = steps

    @property
    def is_within_batch(self) -> bool:
        """Whether bodies of a batch run whose step has not been done."""
        return self._has_bodies and not self._has_stepped

    @property
    def is_abandoned(self) -> bool:
        """Whether the running body is one of a batch that has not been done before the workers have changed."""
        return self.is_within_batch and self._regrouped != self._began

    def batches(self, loader: Loader) -> Iterator[Batch]:
        """Yield the global batches of the next epoch of a loader."""
        if self.recovery.is_running and torch.is_grad_enabled():
            self.do_not_repeat("several loaders in one loop")
        if self.recovery.has_fixed_workers or self.recovery.is_running or not torch.is_grad_enabled():
            yield from copied(loader, iter(loader))
            return
        if loader.is_iterable:
            self.do_not_repeat("an iterable data set")
        repeat_by(self._repeat)
        state = self._state = OwnLoopState(self, loader)
        repeats = self._is_tried and not self._why_not
        with self.recovery.training(state, self._most, repeats=repeats, is_one_of_many=True) as takes_part:
            if takes_part:
                with suppress(GeneratorExit), self.recovery.until_all_have_ended():  # the loop may be left
                    yield from self._until_end(state, loader)
        self._state = None

    def _until_end(self, state: OwnLoopState, loader: Loader) -> Iterator[Batch]:
        """Yield the batches from the position of the loop on, and let workers join and leave after each of them."""
        for batch in state.feed.epoch(state.at[0]):
            state.at = batch.epoch, batch.step
            self._has_stepped = False
            yield batch
            state.at = batch.epoch, batch.step + 1
            if not self._is_tried and not self._has_stepped:
                self.do_not_repeat("a batch without a step of the optimizer")
            if not self._is_tried and not self._why_not:
                self.recovery.resume()
            self._is_tried = True
            requests = self._read_requests()
            if requests % REGROUP:
                interrupt(self.recovery, f"step {self.steps_done}")
            self.recovery.boundary(requests)

    def note_requests(self, requests: torch.Tensor) -> None:
        """Note the sum of the workers' requests in a step."""
        if self.recovery.repeats:
            self._requests.append(HostCopy(requests.detach().reshape(1)))

    def _read_requests(self) -> float:
        """Return the requests that have arrived; on a device those of a step that nothing waits for."""
        lag = 0 if self.comm.device.type == "cpu" else LAG
        found = 0.0
        while len(self._requests) > lag:
            found = max(found, self._requests.pop(0).read()[0])
        return found

    def _begin_bodies(self) -> None:
        """Prepare the bodies of a batch, which may run again."""
        if self._regrouped != self._began:
            self._buffers = self._make_buffers()
        self._began, self._has_bodies, self._has_stepped = self._regrouped, True, False
        self._is_repeated = self.recovery.repeats
        if self._state is not None and self._is_repeated:
            self._state.begin_batch()
        self._buffers.begin()

    def _abandon_bodies(self) -> None:
        """End the bodies of a batch that run again."""
        self._leave()
        self._has_bodies = False
        for optimizer in self.optimizers.values():
            optimizer.abandon()
        assert self._state is not None
        self._state.begin_again()

    def _look_at_body(self) -> None:
        """Look whether a body that has ended can be repeated."""
        if self.recovery.has_fixed_workers or self._why_not:
            return
        now, before = _recorded_collectives(), self._collectives
        is_same_group = self._regrouped == self._began and now is not None and before is not None
        if is_same_group and now - before > self._collectives_of_operations:  # type: ignore[operator]
            self.do_not_repeat("collectives in its bodies")
        if self._buffers.have_changed_since_step():
            if self._is_repeated:
                raise ConfigError(
                    "model",
                    "forward passes before optimizer.step() in each batch of an elastic job, as in the first one",
                    found="one after it, in training mode, which has changed buffers",
                )
            self.do_not_repeat("forward passes after the optimizer's step")

    def _end_bodies(self) -> bool:
        """End the bodies of a batch; returns whether the buffers have been set in the step."""
        self._has_bodies = False
        if self._is_repeated and not self._has_stepped:
            self.do_not_repeat("a batch without a step of the optimizer")
        return self._is_repeated and self._has_stepped

    def buffers_of_shard(self, shard: bodies.Shard) -> torch.Tensor | None:
        """Return what a shard has made of the buffers, if they are summed up in the step."""
        if not (self._is_repeated and self._has_bodies):
            return None
        return self._buffers.of_shard(shard.number, shard.samples, shard.last)

    def set_buffers(self, sums: torch.Tensor, samples: float | torch.Tensor) -> None:
        """Set the buffers in a step."""
        self._buffers.set(sums, samples)

    def attempt(self, step: Callable[[], T]) -> T | None:
        """Take the step of a batch; None if the workers have changed before it."""
        if self.recovery.has_fixed_workers:
            return step()
        if not self._has_bodies:
            self.do_not_repeat("a step outside of its bodies")
            return step()
        before = _recorded_collectives()
        done = self.recovery.attempt(step) if self._is_repeated else step()
        self._note_collectives(before)
        if done is not None:
            self._has_stepped = True
            self._buffers.note_step()
        return done

    def note_deferred(self) -> None:
        """Note that the step of a body is put off until this worker's last shard."""
        self._buffers.note_step()

    def _note_collectives(self, before: int | None) -> None:
        now = _recorded_collectives()
        if now is not None and before is not None:
            self._collectives_of_operations += now - before

    def _repeat(self, operation: Callable[[], Any]) -> Any:
        """Return the result of an evaluation, within a loop or beside loops; see `repeat_by`."""
        if self.recovery.is_running:
            before = _recorded_collectives()
            result = self.recovery.run(operation, meets=False)
            self._note_collectives(before)
            return result
        if getattr(self.comm, "keeps_values", True) is False:  # a part of another training
            return operation()
        state = OwnLoopState(self, None)
        repeats = not self._why_not
        with self.recovery.training(state, self._most, repeats=repeats, is_one_of_many=True) as takes_part:
            if takes_part:
                with self.recovery.until_all_have_ended():
                    state.result = self.recovery.run(operation, meets=False)
        return state.result

    def restore_buffers(self) -> None:
        """Restore the buffers of the beginning of the batch."""
        self._buffers.restore()

    def counters(self) -> dict[str, Any]:
        """Return what the loop has counted of batches and passes, for `set_counters`."""
        passes = {key: count for key, count in self._passes.items() if key is None}
        return {"passes": passes, "looks": dict(self._looks), "counts": self.counts}

    def set_counters(self, counters: dict[str, Any]) -> None:
        """Set what another worker has counted."""
        self._passes |= counters["passes"]
        self._looks, self.counts = Counter(counters["looks"]), counters["counts"]

    def regroup(self) -> None:
        """Adapt to the communicator's new workers, which have the same state."""
        self._regrouped += 1
        self._has_described = True
        self._requests.clear()
        self._divide()
        for optimizer in self.optimizers.values():
            optimizer.regroup()

    # --- what the body calls -----------------------------------------------------------------------------------------

    def whole_batch(self, output: torch.Tensor) -> torch.Tensor:
        """Return the rows of all workers for the running batch, see `whole_batch.whole_batch`."""
        if self.exact and self.virtual_workers > 1:
            raise ConfigError(
                "virtual_workers",
                "none in a loop that uses the whole batch at once",
                self.virtual_workers,
                "A worker computes its shards one after another, so that the outputs of all are never there at once.",
            )
        self.do_not_repeat("lockstep.whole_batch()")
        shard = self.current
        assert shard is not None
        rows = len(output) if output.dim() else 0
        if shard.samples and rows != shard.samples:
            hint = "Call it for each view of the samples: first, second = output.chunk(2)."
            raise ConfigError("output", f"{shard.samples} rows, one for each sample of this part", rows, hint)
        shard.whole_batch = True
        if self.comm.size == 1:
            return output
        if shard.left_out is None:
            cuts = [bounds(self._batch_size, self.comm.size, rank) for rank in range(self.comm.size)]
            sizes = [stop - start for start, stop in cuts]
        else:
            sizes = self.comm.allgather_object(shard.samples)
        return gather_rows(output, sizes, self.comm)

    def _look(self, batch: Any) -> int | None:
        """Return how many batches were before `batch` if its losses are looked at: not of each, as that costs time."""
        number = self._passes.get((batch.epoch, batch.step), 0) if isinstance(batch, Batch) else 0
        self._looks[number] += 1
        look = self._looks[number] - 1
        return look if is_due(look) else None

    def before_backward(self, roots: list[torch.Tensor]) -> Callable[[], None]:
        """Look at the losses of a backward pass; the returned function records what is wrong with them."""
        refusals: list[Refusal] = []
        shard, calls = self.current, self._calls
        if shard is not None:
            if self.counts or calls is not None:
                with suppress(RuntimeError):
                    shard.divisors += [divisor(root) for root in roots if root.grad_fn is not None]
            for root in roots:
                refusal = refusal_of(root, calls, self._look_number, same_on_all=shard.whole_batch or self.exact)
                if refusal is not None:
                    refusals.append(refusal)

        def record() -> None:
            if not self.optimizers:
                present = [(p, p.grad) for p in self.model.parameters()]
                self._left = [(p, gradient, gradient._version) for p, gradient in present if gradient is not None]
            for refusal in refusals:
                for optimizer in self.optimizers.values():
                    optimizer.refuse(refusal)

        return record

    def note_used(self, by: ShardGradients) -> None:
        """Note that a step has used gradients, which other optimizers may have as well."""
        for optimizer in self.optimizers.values():
            optimizer.note_used(by)

    @contextmanager
    def update(self) -> Iterator[None]:
        """Within it the step of a prepared optimizer runs, with the gradients of the global batch."""
        self._updates = True
        try:
            yield
        finally:
            self._updates = False
        for optimizer in self.optimizers.values():
            optimizer.note_step()

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Check that an optimizer which steps in a body was prepared, if it has parameters of a prepared model.

        If none was, the loop may sum the gradients itself.
        """
        if self._updates or id(optimizer) in self.optimizers or (not self.optimizers and self._may_be_summed()):
            return
        known = {id(p) for p in self.model.parameters()}
        if any(id(p) in known and p.grad is not None for group in optimizer.param_groups for p in group["params"]):
            raise ConfigError(
                "optimizer",
                "a step of optimizers that were given to lockstep.prepare()",
                found=f"one of {type(optimizer).__name__}, which was not: its gradients are those of one's own samples",
                hint="Give it to lockstep.prepare() too. One that steps with another one inside, as a SAM does, is "
                "written as two: the page on training has an example.",
            )

    def _may_be_summed(self) -> bool:
        """Return whether the loop may have summed gradients itself since the backward pass: changed, or sent them."""
        same = all(p.grad is gradient and p.grad._version == version for p, gradient, version in self._left)
        return self.comm.size == 1 or not same or self._collectives != _recorded_collectives()

    def check_scheduler(self, scheduler: LRScheduler) -> None:
        """Check that a scheduler of a prepared optimizer acts once a batch."""
        if id(scheduler.optimizer) not in self.optimizers:
            return
        if not any(each is scheduler for each in self.schedulers):
            if self.current is not None and not self.current.last:
                raise _not_given("scheduler", "scheduler.step()")
            self.do_not_repeat("a scheduler in its bodies that lockstep.prepare() was not given")
        elif self.is_within_batch:
            self.do_not_repeat("a scheduler that is stepped before the optimizer")

    def update_average(self, average: AveragedModel, model: Any, update: Callable[[], None]) -> None:
        """Update an average of a prepared model once a batch.

        The buffers of a model have their values of the global batch when the batch ends.
        """
        known = {id(p) for p in self.model.parameters()}
        if not any(id(p) in known for p in model.parameters()):
            update()
            return
        is_given = any(each is average for each in self.averages)
        if not is_given and self.current is not None and not self.current.last:
            raise _not_given("average", "update_parameters()")
        if not is_given:
            self.do_not_repeat("an AveragedModel in its bodies that lockstep.prepare() was not given")
        if not self._acts():
            return
        if self.is_within_batch:
            self.do_not_repeat("an AveragedModel that is updated before the optimizer's step")
        if self.virtual_workers == 1 or not any(True for _ in model.buffers()):
            update()
        elif average.use_buffers:
            self._after_batch.append(update)
        else:
            update()
            self._after_batch.append(partial(_copy_buffers, average, model))

    def look_at_repeated(self, gradients: Gradients) -> None:
        """Say so once, on rank 0, if no loader was given and the workers' first gradients are all the same."""
        if self._has_loader or self.comm.size == 1 or self.source is not None:
            return
        self._has_loader = True  # once
        present = [gradient.detach() for gradient in gradients if gradient is not None]
        digest = checksum_of(present).to(self.comm.device) if present else torch.zeros((), dtype=torch.int64)
        digest = digest.to(self.comm.device)
        largest, negated_smallest = self.comm.allreduce(torch.stack([digest, -digest]), "max")
        if present and bool(largest == -negated_smallest) and self.comm.rank == 0:
            _log.warning(
                "lockstep.prepare() was given no loader, and all %d workers have computed the same gradients: each of "
                "them repeats the same batches, and more workers make nothing faster. Give the DataLoader to "
                "lockstep.prepare(), or loop over optimizer.shards(batch).",
                self.comm.size,
            )

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


def _recorded_collectives() -> int | None:
    """Return how many collectives this process has called; None if they are not recorded."""
    return None if current.recorder is None else current.recorder.count


def _forward_with_autocast(forward: Callable[..., Any], precision: Precision, *args: Any, **kwargs: Any) -> Any:
    with precision.autocast():
        output = forward(*args, **kwargs)
    return map_tensors(full_precision, output)


# --- Schedulers and averages ------------------------------------------------------------------------------------------


def _in_last_shard_only(given: LRScheduler, acts: Callable[[], bool]) -> None:
    """Change a scheduler in place, so that its `step` does nothing unless `acts()`.

    It gets a class of its own. An attribute of the object would be part of its `state_dict()`, and could not be saved.
    """
    kind: Any = type(given)

    def step(self: Any, *args: Any, **kwargs: Any) -> None:
        if acts():
            kind.step(self, *args, **kwargs)

    def reduce(self: Any, protocol: Any) -> Any:  # a copy, or what is pickled, is of the class that others know
        parts: tuple[Any, ...] = object.__reduce_ex__(self, max(protocol, 2))  # type: ignore[assignment]
        return _new, (kind, *parts[1][1:]), *parts[2:]

    step._lockstep_watched = True  # type: ignore[attr-defined]  # the class's own step, which it calls, is watched
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    prepared: Any = type(kind.__name__, (kind,), {**names, "step": step, "__reduce_ex__": reduce})
    given.__class__ = prepared


def _new(kind: Any, *arguments: Any) -> Any:
    return kind.__new__(kind, *arguments)


def _not_given(what: str, call: str) -> ConfigError:
    """Return the error for an object that acts in a shard that is not the last one of a batch.

    Args:
        what: "scheduler" or "average".
        call: what the loop calls.
    """
    kind = "a learning-rate scheduler" if what == "scheduler" else "an AveragedModel"
    return ConfigError(
        what,
        f"{call} once a global batch",
        found=f"{kind} that lockstep.prepare() was not given, in each of several shards of a batch",
        hint=f"Give the {what} to lockstep.prepare() too, or call {call} only if optimizer.stepped.",
    )


def _copy_buffers(average: AveragedModel, model: nn.Module) -> None:
    """Copy the buffers of a model to its average, as `AveragedModel.update_parameters` does."""
    for ours, theirs in zip(average.module.buffers(), model.buffers(), strict=True):
        ours.detach().copy_(theirs.detach())


# --- Buffers --------------------------------------------------------------------------------------------------------


class _BatchBuffers:
    """The buffers that forward passes change, and what the shards of the running batch have made of them."""

    def __init__(self, job: _OwnLoop, model: nn.Module) -> None:
        self._shards = job.local_shards
        saves = len(self._shards) > 1 or not job.recovery.has_fixed_workers
        self._buffers = Buffers(model, job.comm, saves=saves, at_once=job.exact)
        self._reducer = Reducer(job.comm, job.virtual_workers, one_pass=False)  # of numbers alone
        self._of_shards: dict[int, torch.Tensor] = {}
        self._model, self._watches = job.model, not job.recovery.has_fixed_workers
        self._seen: list[int] | None = None  # versions after the step of a body

    def begin(self) -> None:
        """Save the buffers before a batch."""
        self._buffers.begin()
        self._of_shards, self._seen = {}, None

    def restore(self) -> None:
        """Restore them before the next shard."""
        self._buffers.restore()
        self._seen = None

    def of_shard(self, shard: int, samples: int, last: bool) -> torch.Tensor:
        """Return what the passes of a shard have made of them so far; empty if there are none."""
        self.end_shard(shard, samples, last)
        return self._of_shards[shard] if self._buffers else torch.zeros(0)

    def note_step(self) -> None:
        """Note that the step of a body was done, or put off."""
        self._seen = self._versions() if self._watches else None

    def have_changed_since_step(self) -> bool:
        """Return whether passes of the running body have changed them after its step."""
        return self._seen is not None and self._seen != self._versions()

    def _versions(self) -> list[int]:
        return [buffer._version for buffer in self._model.buffers()]

    def end_shard(self, shard: int, samples: int, last: bool) -> None:
        """Keep what the passes of a shard have made of them, unless that was done in its step."""
        if shard not in self._of_shards:
            self._of_shards[shard] = self._buffers.of_shard(samples, first=shard == 0, last=last)

    def end(self, samples: int, left_out: int | None) -> None:
        """Set them after the last shard, equally on every worker.

        Args:
            samples: samples of the global batch.
            left_out: those of this worker's shards that were left out, see `Shard`.
        """
        if not self._buffers:
            return
        zeros = torch.zeros_like(next(iter(self._of_shards.values())))
        self._reducer.begin([])
        for shard in self._shards:
            self._reducer.open(shard)
            missing = left_out or 0 if shard == self._shards[-1] else 0
            self._reducer.add(torch.cat([self._of_shards.get(shard, zeros), zeros.new_full((1,), missing)]))
            self._reducer.close()
        self._reducer.finish()
        sums = self._reducer.sums
        assert sums is not None
        self.set(sums[:-1], samples if left_out is None else samples - sums[-1])

    def set(self, sums: torch.Tensor, samples: float | torch.Tensor) -> None:
        """Set them to the sums over all shards, equally on every worker."""
        if self._buffers:
            self._buffers.set(sums, samples)
