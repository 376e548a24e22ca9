"""What every kind of data set is to a `Loader`: a source of this worker's part of each global batch
of an epoch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from .. import devices
from .batch_plan import BatchPlan, PartOfBatch
from .fetching import Fetcher


class Source(ABC):
    """One kind of data set, as a `Loader` reads it.

    Args:
        dataset: the data set, or what reads it for loader processes.
        plan: of the batches.

    Attributes:
        plan: of the batches.
        samples: samples in the data set; 0 if their number is known when an epoch of it has ended.
        most_processes: how many loader processes have something to do; None for any number.
        fetcher: loads what is asked for.
    """

    fetcher: Fetcher

    # Whether a batch takes a request to each loader process, and this process makes it of the
    # samples.
    in_parts = False

    def __init__(self, dataset: Any, plan: BatchPlan) -> None:
        self.plan = plan
        self.samples = 0
        self.most_processes: int | None = None
        self._dataset = dataset

    def open(self, processes: int, prefetch: int) -> None:
        """Prepare to load with so many processes, which load so many batches ahead."""
        plan = self.plan
        pin = devices.pins_memory(plan.comm.device)
        self.fetcher = Fetcher(
            self._dataset, plan.collate_fn, processes, prefetch, pin, self.in_parts
        )

    @property
    @abstractmethod
    def steps(self) -> int | None:
        """Steps in an epoch; None if that is not known yet."""

    @abstractmethod
    def __len__(self) -> int:
        """Steps in an epoch.

        Raises:
            TypeError: if that is not known yet.
        """

    @abstractmethod
    def order(self, epoch: int) -> torch.Tensor:
        """Return the samples of an epoch in the order in which they form global batches, see
        `Loader.order`.
        """

    @abstractmethod
    def batches(self, epoch: int, first: int) -> Iterator[PartOfBatch]:
        """Yield this worker's part of each global batch of an epoch, from step `first` on."""

    @abstractmethod
    def loop(self, epoch: int, first: int) -> tuple[int, int]:
        """Return a number of the loop over these batches, and that of the epoch's first batch in
        it.

        The watchdog compares which batch of which loop the workers are at.
        """

    @abstractmethod
    def has_ended(self, step: int) -> bool:
        """Return whether the batch before `step` was the last one of its epoch."""

    def end_epoch(self, epoch: int, steps: int) -> None:  # noqa: B027 - most kinds know it beforehand
        """Note that an epoch has ended, after so many steps."""

    @abstractmethod
    def settings(self) -> Mapping[str, Any]:
        """Return what a position depends on, by name, beside the plan."""

    def digests(self) -> dict[int, str]:
        """Return digests of some samples at fixed places, see `Loader.sample_digests`; none by
        default.
        """
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return what a position has beside epoch and step."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - most positions have nothing beside
        """Load the position of a loader's state."""

    @abstractmethod
    def stand_in(self) -> Any:
        """Return collated data for a worker that must run a pass although it has no samples.

        It is a sample twice, because batch norm refuses a single one.
        """
