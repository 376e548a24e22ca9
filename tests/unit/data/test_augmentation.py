"""Augmentation depends on (seed, epoch, sample), and on nothing else."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset

from lockstep.communicator import Communicator
from lockstep.data.loader import Loader
from lockstep.errors import DataError
from lockstep.topology import World

N = 23
Draws = dict[int, tuple[float, ...]]


class Noisy(Dataset[Any]):
    """Every sample is a draw from each of the three generators."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        # The low 24 bits of the first number of each twister: equal if torch's and NumPy's had one
        # seed.
        drawn = [
            float(torch.rand(())),
            np.random.randint(1 << 24) / (1 << 24),
            random.random(),
            float(torch.rand(())),
        ]
        return torch.tensor(drawn, dtype=torch.float64), index


def drawn(
    size: int = 1,
    epoch: int = 0,
    first: int = 0,
    seed: int = 0,
    dataset: Any = None,
    **options: Any,
) -> Draws:
    """By sample, what the ranks of a job of `size` drew from step `first` on."""
    found: Draws = {}
    for rank in range(size):
        comm = Communicator.at(World(rank, size, rank, size), torch.device("cpu"))
        loader = Loader(dataset or Noisy(), 5, seed=seed, comm=comm, **options)
        loader.load_state_dict({**loader.state_dict(), "epoch": epoch, "step": first})
        for batch in loader.epoch(epoch):
            found |= {int(i): tuple(values.tolist()) for values, i in zip(*batch.data, strict=True)}
        loader.close()
    return found


ALONE = drawn()


def test_every_sample_has_draws_of_its_own() -> None:
    assert len(ALONE) == N
    for generator in range(4):
        assert len({values[generator] for values in ALONE.values()}) == N
    assert all(len(set(values)) == 4 for values in ALONE.values())


@pytest.mark.parametrize("size", [2, 3])
def test_the_number_of_workers_does_not_matter(size: int) -> None:
    assert drawn(size) == ALONE


@pytest.mark.parametrize("num_workers", [1, 2])
def test_the_number_of_loader_processes_does_not_matter(num_workers: int) -> None:
    assert drawn(num_workers=num_workers) == ALONE


def test_the_state_of_the_program_does_not_matter() -> None:
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    assert drawn() == ALONE


def test_resuming_within_an_epoch_draws_what_an_uninterrupted_run_draws() -> None:
    straight = drawn(epoch=3)
    rest = drawn(epoch=3, first=2)
    assert len(rest) == N - 10
    assert all(straight[index] == values for index, values in rest.items())
    assert drawn(epoch=3, first=2, num_workers=2) == rest


def test_seed_and_epoch_matter() -> None:
    others = [drawn(epoch=1), drawn(seed=1), drawn(seed=1 << 40)]
    for other in others:
        assert not {value for values in other.values() for value in values} & {
            value for values in ALONE.values() for value in values
        }


def test_it_holds_behind_a_subset() -> None:
    class Later(Noisy):
        def __len__(self) -> int:
            return 2 * N

    assert drawn(2, dataset=Subset(Later(), range(N))) == ALONE


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_programs_own_generators_are_left_alone(num_workers: int) -> None:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    loader = Loader(
        Noisy(), 5, num_workers=num_workers, comm=Communicator.at(World(), torch.device("cpu"))
    )
    for _ in loader.epoch(0):
        # as dropout in the step between would find it
        assert torch.equal(torch.get_rng_state(), before[0])
        assert random.getstate() == before[1]
        assert np.array_equal(np.random.get_state()[1], before[2][1])
    loader.close()


def test_they_are_left_alone_by_an_error_too() -> None:
    class Failing(Noisy):
        def __getitem__(self, index: int) -> Any:
            super().__getitem__(index)
            raise RuntimeError("damaged")

    before = torch.get_rng_state(), random.getstate()
    with pytest.raises(DataError, match="damaged"):
        drawn(dataset=Failing())
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
