"""The settings of a `DataLoader` of torch, with which a `Loader` loads the same samples."""

from __future__ import annotations

import logging
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from ..errors import ConfigError
from .indexed_source import length_of
from .iterable import is_iterable

_log = logging.getLogger(__name__)


def dataloader_settings(
    loader: DataLoader[Any], argument: str, global_batch_size: int, warns: bool = True
) -> dict[str, Any]:
    """Return the arguments of a `Loader` that loads the same samples as a `DataLoader` of torch.

    Its data set, collate function, order, drop_last and number of processes are used. Its batch
    size is not: all workers share the global batch.

    Args:
        loader: the `DataLoader`.
        argument: the argument that it was given as; that of training data is "train".
        global_batch_size: of the `Loader`.
        warns: whether to log warnings of what is not used: another batch size, a `worker_init_fn`.

    Raises:
        ConfigError: if it has a sampler or a batch sampler of its own, whose order cannot be
            divided among workers, or does not form batches.
    """
    batches = loader.batch_sampler
    # Of a loader that was given a BatchSampler, the sampler and drop_last are the defaults, which
    # are not used.
    settings_of = batches if type(batches) is BatchSampler else loader
    sampler = settings_of.sampler
    expected = "a data set, or a DataLoader with shuffle=True or shuffle=False"
    if batches is None:
        hint = "Pass the data set itself: Lockstep forms the batches."
        raise ConfigError(argument, expected, found="a DataLoader with batch_size=None", hint=hint)
    own_collate = loader.collate_fn is not default_collate
    iterable = is_iterable(loader.dataset)
    in_order = type(sampler) is SequentialSampler and len(sampler) == length_of(loader.dataset)
    shuffled = (
        argument == "train"
        if iterable
        else type(sampler) is RandomSampler
        and not sampler.replacement
        and len(sampler) == length_of(loader.dataset)
    )
    if not iterable and (type(batches) is not BatchSampler or not (in_order or shuffled)):
        kind = type(sampler if type(batches) is BatchSampler else batches).__name__
        raise ConfigError(
            argument, expected, found=f"a DataLoader with a {kind}", hint=_instead_of(loader)
        )
    if warns:
        _warn_of_unused(loader, argument, global_batch_size)
    return {
        "dataset": loader.dataset,
        "collate_fn": loader.collate_fn if own_collate else None,
        "shuffle": shuffled,
        "drop_last": settings_of.drop_last,
        "num_workers": loader.num_workers,
        "prefetch": loader.num_workers * (loader.prefetch_factor or 2)
        if loader.num_workers
        else None,
    }


def dataloader_batch_size(loader: DataLoader[Any]) -> int | None:
    """Return the number of samples of a batch of a `DataLoader`; None where its batches have no
    fixed one.
    """
    batches = loader.batch_sampler
    return batches.batch_size if type(batches) is BatchSampler else loader.batch_size


def _instead_of(loader: DataLoader[Any]) -> str:
    """Return what to do instead of giving a `DataLoader` with the sampler or batch sampler that it
    has.
    """
    why = (
        "Lockstep divides each global batch among the workers itself, in an order that depends on "
        "seed and epoch alone"
    )
    batches = loader.batch_sampler
    if isinstance(
        batches.sampler if type(batches) is BatchSampler else loader.sampler, DistributedSampler
    ):
        return f"{why}: leave a DistributedSampler out."
    if type(loader.batch_sampler) is not BatchSampler:
        return (
            f"{why}: lockstep.Loader(batch_sampler=) takes one that yields the indices of global "
            "batches."
        )
    return (
        f"{why}. To keep the sampler: lockstep.Loader(dataset, global_batch_size, "
        "batch_sampler=torch.utils.data.BatchSampler(sampler, global_batch_size, "
        "drop_last=False)), which draws anew in each epoch."
    )


def _warn_of_unused(loader: DataLoader[Any], argument: str, global_batch_size: int) -> None:
    roles = {"train": " of the training data", "validate": " of validate="}
    name = f"the DataLoader{roles.get(argument, '')}"
    if (size := dataloader_batch_size(loader)) != global_batch_size:
        noun = "a step" if argument == "train" else "a batch of an evaluation"
        used = f"{noun} has the {global_batch_size} samples of global_batch_size, over all workers"
        _log.warning("batch_size=%s of %s is not used: %s", size, name, used)
    if loader.worker_init_fn is not None:
        _log.warning(
            "worker_init_fn of %s is not called: random generators are seeded for each sample", name
        )
