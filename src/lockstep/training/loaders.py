"""Loaders of global batches, from what users give: a data set, a Loader or a DataLoader."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from ..communicator import Communicator
from ..data.loader import Loader
from ..data.torch_dataloaders import dataloader_batch_size, dataloader_settings
from ..errors import ConfigError

_ROLES = {"train": "the training data", "validate": "the data of validate="}  # in messages


def loader_of(
    dataloader: DataLoader[Any],
    comm: Communicator,
    seed: int = 0,
    virtual_workers: int | None = None,
) -> Loader:
    """Return a loader of the samples of a `DataLoader` of torch.

    Its batch size is that of the global batch.

    Args:
        dataloader: the `DataLoader`.
        comm: of the workers.
        seed: the seed of the order of samples.
        virtual_workers: number of shards of each global batch; None for a part for each worker.

    Raises:
        ConfigError: see `dataloader_settings`.
    """
    size = dataloader_batch_size(dataloader) or 1
    settings = dataloader_settings(dataloader, "loader", size, warns=comm.rank == 0)
    return Loader(
        **settings, global_batch_size=size, seed=seed, comm=comm, virtual_workers=virtual_workers
    )


class TrainerLoaders:
    """Makes the loaders of a trainer.

    Args:
        comm: of the workers.
        global_batch_size: samples in one step, over all workers.
        seed: the seed of the order of samples.
        num_workers: data loader processes for each worker.
        virtual_workers: number of shards of each global batch; None for a part for each worker.
    """

    def __init__(
        self,
        comm: Communicator,
        global_batch_size: int,
        seed: int,
        num_workers: int,
        virtual_workers: int | None,
    ) -> None:
        self._comm = comm
        self._global_batch_size = global_batch_size
        self._seed = seed
        self._num_workers = num_workers
        self._virtual_workers = virtual_workers
        # (argument, batch size) of a DataLoader: once each
        self._warned_of: set[tuple[str, int | None]] = set()

    @contextmanager
    def opened(self, dataset: Any, argument: str) -> Iterator[Loader]:
        """Return a context with the loader of `make`; at its end one that was made is closed."""
        loader = self.make(dataset, argument)
        try:
            yield loader
        finally:
            if loader is not dataset:
                loader.close()

    def make(self, dataset: Any, argument: str) -> Loader:
        """Return a loader of global batches; a `Loader` is returned unchanged.

        Args:
            dataset: what the user has given.
            argument: the name of the argument as which it was given: "train" for data that are
                shuffled.

        Raises:
            ConfigError: for something else, naming the argument.
        """
        loader = dataset
        if isinstance(dataset, (str, bytes, Path)):
            hint = 'Files of samples are read by lockstep.data.Stream("data/*.jsonl").'
            raise ConfigError(argument, "a data set, a Loader or a DataLoader", dataset, hint)
        if not isinstance(loader, Loader):
            try:
                loader = self._of(dataset, argument)
            except ConfigError as error:
                if error.argument != "dataset":
                    raise
                raise ConfigError(
                    argument, error.expected, error.got, error.hint, found=error.found
                ) from None
        loader.plan.role = _ROLES.get(argument, loader.plan.role)
        return loader

    def _of(self, dataset: Any, argument: str) -> Loader:
        settings: dict[str, Any] = {
            "dataset": dataset,
            "shuffle": argument == "train",
            "num_workers": self._num_workers,
        }
        if isinstance(dataset, DataLoader):
            warns = self._comm.rank == 0 and (argument, dataset.batch_size) not in self._warned_of
            self._warned_of.add((argument, dataset.batch_size))
            of_loader = dataloader_settings(dataset, argument, self._global_batch_size, warns)
            settings = of_loader | {"num_workers": of_loader["num_workers"] or self._num_workers}
        return Loader(
            **settings,
            global_batch_size=self._global_batch_size,
            seed=self._seed,
            comm=self._comm,
            virtual_workers=self._virtual_workers,
        )
