"""Iterable data sets on one worker: order, parts, positions, and what a data set is told and must
keep to.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from lockstep.data import Loader, Substreams
from lockstep.errors import CheckpointError, ConfigError, DataError

ALONE: Any = SimpleNamespace(rank=0, size=1, group=None, device=torch.device("cpu"))


class Numbers(IterableDataset[Any]):
    """(number, random draw), divided among the loader processes that it is told of."""

    def __init__(self, samples: int) -> None:
        self.samples, self.epoch, self.opened, self.yielded = samples, 0, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        self.opened += 1
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(first, self.samples, step):
            self.yielded += 1
            yield torch.tensor([number + 1000 * self.epoch, int(torch.randint(1 << 30, ()))])


class WithState(Numbers):
    """Goes on where its `load_state_dict` says."""

    at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]

    def __iter__(self) -> Iterator[Any]:
        self.opened += 1
        for number in range(self.at, self.samples):
            self.at, self.yielded = number + 1, self.yielded + 1
            yield torch.tensor([number, 0])
        self.at = 0


class Shuffled(WithState):
    """Keeps samples that its state does not have, as a shuffled data set of `datasets` does."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        buffer = type("BufferShuffledExamplesIterable", (), {})()
        self._ex_iterable = SimpleNamespace(ex_iterables=[SimpleNamespace(ex_iterable=buffer)])


def loader(dataset: Any, size: int = 8, **options: Any) -> Loader:
    return Loader(dataset, size, comm=ALONE, **options)


def numbers(made: Loader, epoch: int = 0) -> list[list[int]]:
    with made:
        return [batch.data[:, 0].tolist() for batch in made.epoch(epoch)]


def test_its_order_is_that_of_the_data_set() -> None:
    made = loader(Numbers(20))
    assert made.steps is None
    with pytest.raises(TypeError, match="the number of steps in an epoch of Numbers is not known"):
        len(made)
    parts = list(made)
    assert [(part.step, part.size, part.global_size) for part in parts] == [
        (0, 8, 8),
        (1, 8, 8),
        (2, 4, 4),
    ]
    assert torch.cat([part.data[:, 0] for part in parts]).tolist() == list(range(20))
    assert torch.cat([part.indices for part in parts]).tolist() == list(range(20))
    assert (made.position, made.steps) == ((1, 0), 3)
    assert [batch.data[0, 0].item() for batch in made] == [
        1000,
        1008,
        1016,
    ]  # `set_epoch` is called


def test_draws_depend_on_seed_epoch_and_sample_alone() -> None:
    def draws(made: Loader, epoch: int = 0) -> list[int]:
        with made:
            return [draw for batch in made.epoch(epoch) for draw in batch.data[:, 1].tolist()]

    expected = draws(loader(Numbers(20)))
    assert draws(loader(Numbers(20), 5)) == expected == draws(loader(Numbers(20), num_workers=1))
    assert (
        len(
            set(expected)
            | set(draws(loader(Numbers(20)), 1))
            | set(draws(loader(Numbers(20), seed=1)))
        )
        == 60
    )


def test_the_caller_keeps_its_random_numbers() -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    next(iter(loader(Numbers(20))))
    assert torch.rand(1) == expected


@pytest.mark.parametrize("processes", [0, 2])
def test_each_batch_has_a_share_of_each_part(processes: int) -> None:
    made = loader(Substreams(Numbers(36), 3), num_workers=processes)
    *first, last = numbers(made)
    # Three, three and two samples of the parts, which have twelve each: the first one ends after
    # four batches.
    assert first[0] == [0, 3, 6, 1, 4, 7, 2, 5]
    assert first[3] == [27, 30, 33, 28, 31, 34, 20, 23]
    assert last == [26, 29, 32, 35]
    assert sorted(sum(first, last)) == list(range(36))


def test_no_more_loader_processes_than_parts_are_started() -> None:
    assert loader(Numbers(20), num_workers=4).num_workers == 1
    assert loader(Substreams(Numbers(20), 3), num_workers=4).num_workers == 3


@pytest.mark.parametrize(
    ("make", "parts"), [(Numbers, 1), (Numbers, 3), (WithState, 1), (Shuffled, 1)]
)
def test_every_position_leads_to_the_rest_of_the_epoch(make: Any, parts: int) -> None:
    expected = numbers(loader(Substreams(make(37), parts)))
    for done in range(1, len(expected)):
        left = loader(Substreams(make(37), parts))
        batches = iter(left)
        for _ in range(done):
            next(batches)
        dataset = make(37)
        resumed = loader(Substreams(dataset, parts))
        resumed.load_state_dict(left.state_dict())
        assert [batch.data[:, 0].tolist() for batch in resumed] == expected[done:]
        if make is WithState:
            assert (
                dataset.yielded == 0
            )  # a copy of it was read, as a state stays in what it is loaded into


def test_a_state_is_used_and_nothing_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    monkeypatch.setattr(
        torch, "tensor", lambda values: read.append(values[0]) or torch.as_tensor(values)
    )
    left = loader(WithState(37))
    batches = iter(left)
    for _ in range(3):
        next(batches)
    state, resumed = left.state_dict(), loader(WithState(37))
    read.clear()
    resumed.load_state_dict(state)
    list(resumed)
    assert read == list(range(24, 37))
    read.clear()
    list(resumed.epoch(0))  # and the state is gone with the epoch
    assert read == list(range(37))


def test_the_position_after_the_last_batch_is_that_of_a_whole_epoch() -> None:
    made = loader(Numbers(16))
    batches = iter(made)
    next(batches)
    assert not made.ended
    next(batches)
    assert made.ended
    resumed = loader(Numbers(16))
    resumed.load_state_dict(made.state_dict())
    assert resumed.ended
    assert list(resumed) == []
    assert resumed.position == (1, 0)


class Divided(Numbers):
    """Has fewer samples, or others, when it is read again."""

    def __init__(self, samples: list[list[int]]) -> None:
        super().__init__(0)
        self.lists = samples

    def __iter__(self) -> Iterator[Any]:
        self.opened += 1
        return (torch.tensor([number, 0]) for number in self.lists[self.opened - 1])


@pytest.mark.parametrize(
    ("again", "message"),
    [
        (range(12), "Divided: 12 samples, where 16 had been read before the run was resumed"),
        (range(1, 21), "Divided: its first sample is another one than before the run was resumed"),
    ],
)
def test_a_data_set_that_differs_when_it_is_read_again(again: Any, message: str) -> None:
    dataset = Divided([list(range(20)), list(again)])
    left = loader(dataset)
    batches = iter(left)
    next(batches), next(batches)
    resumed = loader(dataset)
    resumed.load_state_dict(left.state_dict())
    with pytest.raises(DataError, match=message):
        list(resumed)


def test_an_epoch_of_another_length_is_said(caplog: pytest.LogCaptureFixture) -> None:
    made = loader(Divided([list(range(20)), list(range(30))]))
    assert [len(list(made)), len(list(made))] == [3, 4]
    assert "epoch 1 has 4 steps, the one before had 3" in caplog.text


class Failing(Numbers):
    def __iter__(self) -> Iterator[Any]:
        for number, sample in enumerate(super().__iter__()):
            if number == 5:
                raise OSError("shard-3.tar is damaged")
            yield sample


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (Numbers(0), {}, "Numbers: no samples"),
        (Substreams(Numbers(0), 2), {}, "Numbers: no samples"),
        (Numbers(5), {}, "Numbers: 5 samples, less than one global batch of 8"),
        (Substreams(Numbers(5), 2), {}, "Numbers: 5 samples, less than one global batch of 8"),
        (
            Numbers(5),
            {"drop_last": True, "shuffle": False},
            "Numbers: 5 samples, less than one global batch of 8",
        ),
        (
            Failing(20),
            {},
            r"^Failing: sample 5: OSError: shard-3.tar is damaged, at test_iterable.py:\d+ in __iter__",
        ),
        (
            Failing(20),
            {"num_workers": 1},
            r"^Failing: sample 5: OSError: .* \(in loader process 0\)$",
        ),
        (
            Substreams(Failing(20), 2),
            {},
            r"^Failing \(part 0 of 2\): sample 5: OSError: shard-3.tar is damaged",
        ),
    ],
)
def test_bad_data(dataset: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message), loader(dataset, **options) as made:
        list(made)


def test_less_than_a_batch_can_be_evaluated() -> None:
    assert numbers(loader(Numbers(5), shuffle=False)) == [[0, 1, 2, 3, 4]]
    assert loader(Numbers(5)).stand_in()[:, 0].tolist() == [0, 0]


WITH_FILES = Numbers(3)
WITH_FILES.num_shards = 2  # type: ignore[attr-defined]
SPLIT = Numbers(3)
SPLIT._distributed = SimpleNamespace(rank=0, world_size=2)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Substreams(Numbers(3), 0), "parts: expected a whole number of at least 1, got 0"),
        (lambda: Substreams([1, 2], 2), "dataset: expected an iterable data set, got list"),
        (
            lambda: Substreams(WITH_FILES, 3),
            "parts: expected at most 2, the number of files of the data set, got 3",
        ),
        (
            lambda: loader(SPLIT),
            "expected the whole data set on every worker, got a part of it. Leave split_dataset",
        ),
        (
            lambda: loader(iter([1])),
            "dataset: expected an iterable data set, got a list_iterator. Each epoch reads it",
        ),
        (
            lambda: loader(Substreams(Numbers(9), 9)),
            "at least one sample for each of 9 parts of the data set, got 8",
        ),
        (
            lambda: loader(Numbers(9), batch_sampler=[[1]]),
            "batch_sampler: expected None, got list. An iterable data",
        ),
        (
            lambda: loader(Numbers(9)).order(0),
            "dataset: expected a map-style data set, whose samples have indices, got Numbers",
        ),
    ],
)
def test_bad_arguments(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_another_number_of_parts_is_another_order() -> None:
    state = loader(Substreams(Numbers(9), 2)).state_dict()
    with pytest.raises(CheckpointError, match="parts was 2, here it is 4"):
        loader(Substreams(Numbers(9), 4)).load_state_dict(state)


def test_webdataset_sees_the_part_and_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("webdataset.utils")
    module.pytorch_worker_info = lambda group=None: (1, 3, 0, 1)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "webdataset.utils", module)
    seen = []

    class Web(Numbers):
        def __iter__(self) -> Iterator[Any]:
            seen.append(module.pytorch_worker_info())
            yield from super().__iter__()

    list(loader(Substreams(Web(16), 2)))
    assert seen == [(0, 1, 0, 2), (0, 1, 1, 2)]
    assert module.pytorch_worker_info() == (1, 3, 0, 1)
