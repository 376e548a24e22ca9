"""`prepare`: data parallelism for a training loop that keeps its own forward and backward
passes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import Never, Self

from ... import arguments
from ...data.loader import Batch, Loader
from ...errors import unexpected_argument
from ...other_names import LOADER_NAMES, hint_in, in_training
from ..model_state import UserState
from .prepared_loop import PreparedLoop, watch_torch

__all__ = ["PreparedLoader", "prepare"]

_log = logging.getLogger(__name__)


def prepare(
    *objects: Any,
    virtual_workers: int | None = None,
    max_grad_norm: float | None = None,
    precision: str = "fp32",
    seed: int = 0,
    threads: int | None = None,
    state: Mapping[str, Any] | None = None,
    shard_optimizer: bool = False,
    **unknown: Never,
) -> Any:
    """Prepare models, optimizers, loaders and schedulers, so that a loop written for one device
    trains on all workers.

    The loop keeps its own forward and backward passes, losses and optimizers:

        model, optimizer, loader = lockstep.prepare(model, optimizer, loader)
        for epoch in range(10):
            for inputs, targets in loader:              # this worker's part of each global batch
                optimizer.zero_grad()
                loss = loss_fn(model(inputs), targets)  # the mean over this part
                loss.backward()
                mean = optimizer.step(loss=loss)        # with the mean gradient of the global batch
                if optimizer.stepped:                   # this body has completed a step
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
    which optimizer:

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

    **What is said at the start**, on several workers: the samples of a global batch and of each
    worker's part, and the learning rate. Neither is multiplied or divided by the number of workers;
    a program that does so itself gets other results on another number of them.

    **What is not checked**, and may depend on the number of workers:

    - a learning rate, a batch size or a loss that the program multiplies or divides by the number
      of workers;
    - a sum that is multiplied or divided by another number than the samples of the whole batch
      (which is an error, or said once where it may be a factor times ``len(inputs)``), and a sum of
      products such as ``(log_prob * advantage).sum()``: divide by ``len(inputs)``, the samples of
      this part;
    - targets that were computed from those of the batch in another way than by a factor and an
      offset, and are broadcast in a difference that the program writes itself;
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
        shard_optimizer: divide the state of each optimizer among the workers: each updates the
            tensors that it owns, and gives their values to the others, with the same bits as
            without and less memory. After a step a worker has the gradients of its own tensors
            alone, and no later body may add to them. ``optimizer.state_dict()`` is a part of the
            state. ``optimizer.full_state_dict()``, which all workers call outside of the bodies of
            a batch, returns all of it; a part is refused by ``load_state_dict()``, also in another
            run.

    Returns:
        The objects in the order given; a single one is not put into a tuple.

    Raises:
        ConfigError: for invalid arguments; with `shard_optimizer`, for an optimizer whose update of
            one tensor depends on others.
        MismatchError: if the workers' models differ.
        TypeError: for an argument of another name; the error says what it is here.

    Examples:
        >>> import torch, lockstep
        >>> train, _ = lockstep.data.digits()
        >>> loader = torch.utils.data.DataLoader(train, batch_size=64, shuffle=True)
        >>> model = lockstep.models.mlp()
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        >>> model, optimizer, loader = lockstep.prepare(model, optimizer, loader)
        >>> for inputs, targets in loader:
        ...     optimizer.zero_grad()
        ...     loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        ...     loss.backward()
        ...     mean = optimizer.step(loss=loss)
        >>> mean.shape
        torch.Size([])
    """
    if unknown:
        name = next(iter(unknown))
        raise unexpected_argument(
            "prepare", name, in_training(name, "prepare"), arguments.keyword_names(prepare)
        )
    loop = PreparedLoop(
        objects,
        virtual_workers,
        max_grad_norm,
        precision,
        seed,
        threads,
        UserState(state),
        shard_optimizer,
    )
    prepared: list[Any] = []
    for user_object in objects:
        if isinstance(user_object, (Loader, DataLoader)):
            prepared.append(PreparedLoader(loop, loop.loader(user_object)))
        else:
            loop.change(user_object)
            prepared.append(user_object)
    comm = loop.comm
    if comm.size > 1 and comm.rank == 0 and not comm.is_joining:
        loaders = [loader.loader for loader in prepared if isinstance(loader, PreparedLoader)]
        optimizers = [optimizer for optimizer in prepared if isinstance(optimizer, Optimizer)]
        virtual_workers = loop.parts.virtual_workers if loop.parts.exact else None
        _log.warning("%s", _start_line(comm.size, virtual_workers, loaders, optimizers))
    return prepared[0] if len(prepared) == 1 else tuple(prepared)


def _start_line(
    workers: int,
    virtual_workers: int | None,
    loaders: Sequence[Loader],
    optimizers: Sequence[Optimizer],
) -> str:
    """Return what rank 0 says at the start of a loop on several workers: numbers that a program may
    have multiplied or divided by the number of workers.
    """
    parts = []
    for loader in loaders:
        batch = loader.global_batch_size
        of_worker = batch // workers if batch % workers == 0 else f"{batch // workers} or more"
        parts.append(f"a global batch of {batch} samples, {of_worker} for each worker")
    for optimizer in optimizers:
        rates = dict.fromkeys(f"{float(g['lr']):.4g}" for g in optimizer.param_groups if "lr" in g)
        if rates:
            parts.append(f"{type(optimizer).__name__} with learning rate {', '.join(rates)}")
    divided = f"{workers} workers"
    if virtual_workers is not None:
        divided += f", {virtual_workers} virtual workers"
    parts.append(
        "each loss must be a mean over the samples of its part, or over what "
        "optimizer.step(count=...) counts"
    )
    return f"lockstep.prepare() on {divided}: {'; '.join(parts)}"


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

    def __init__(self, loop: PreparedLoop, loader: Loader) -> None:
        self._loop = loop
        self.loader = loader

    def __len__(self) -> int:
        """Global batches in an epoch; the number of optimizer steps."""
        return len(self.loader)

    if not TYPE_CHECKING:  # a type checker knows the attributes

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}"
                f"{hint_in(LOADER_NAMES, name)}",
                name=name,
                obj=self,
            )

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
        watch_torch()  # classes of schedulers may have been defined since
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
