"""A `DataLoader` of torch in `fit`, `evaluate` and `validate=`: what of it is used, and what is
refused, and why.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

import lockstep
from lockstep.data.loader import Loader
from lockstep.errors import ConfigError

_DRAWS = torch.Generator().manual_seed(0)  # the same in loader processes that import this file
DATA = TensorDataset(
    torch.randn(20, 4, generator=_DRAWS), torch.randint(0, 3, (20,), generator=_DRAWS)
)


def trainer(**options: Any) -> lockstep.Trainer:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return lockstep.Trainer(model, optimizer, nn.CrossEntropyLoss(), 8, callbacks=[], **options)


def pairs_reversed(samples: list[Any]) -> Any:
    inputs, targets = zip(*samples, strict=True)
    return torch.stack(inputs).flip(1), torch.stack(targets)


def fingerprint(train: Any, **options: Any) -> str:
    made = trainer(**options)
    made.fit(train, 2, validate=DATA)
    return lockstep.fingerprint(made.model)


def test_training_is_that_on_its_data_set(caplog: pytest.LogCaptureFixture) -> None:
    assert fingerprint(DataLoader(DATA, 8, shuffle=True)) == fingerprint(DATA)
    assert not caplog.records
    assert fingerprint(DataLoader(DATA, 4, shuffle=True)) == fingerprint(DATA)
    assert (
        "batch_size=4 of the DataLoader of the training data is not used: a step has the 8 samples"
        in caplog.text
    )


def test_its_collate_function_order_and_last_batch_are_used() -> None:
    with trainer().loader(DataLoader(DATA, 8, collate_fn=pairs_reversed, drop_last=True)) as loader:
        assert (loader.shuffle, len(loader)) == (False, 2)
        inputs, targets = next(iter(loader))
        assert torch.equal(inputs, DATA.tensors[0][:8].flip(1)) and torch.equal(
            targets, DATA.tensors[1][:8]
        )
    assert fingerprint(DataLoader(DATA, 8, shuffle=True, collate_fn=pairs_reversed)) != fingerprint(
        DATA
    )


def test_its_processes_are_used() -> None:
    data = TensorDataset(
        torch.randn(20, 4)
    )  # not DATA: a fork server would keep it in shared memory
    loader = trainer().loader(DataLoader(data, 8, shuffle=True, num_workers=1, prefetch_factor=3))
    with loader:
        assert loader.num_workers == 1
        assert len(list(loader)) == 3


def test_evaluations() -> None:
    made = trainer()
    expected = made.evaluate(DATA)
    assert made.evaluate(DataLoader(DATA, 8)) == expected
    alone = lockstep.evaluate(made.model, DataLoader(DATA, 8), nn.CrossEntropyLoss())
    assert alone == lockstep.evaluate(
        made.model, Loader(DATA, 8, shuffle=False), nn.CrossEntropyLoss()
    )
    (row,) = made.fit(DataLoader(DATA, 8, shuffle=True), 1, validate=DataLoader(DATA, 8))
    assert row["val_loss"] == made.evaluate(DATA)["loss"]


def test_a_batch_sampler_of_torch_is_what_its_arguments_are() -> None:
    made = trainer()
    given = DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 8, drop_last=True))
    with made.loader(given, shuffle=False) as loader:
        assert [batch.size for batch in loader] == [8, 8]
    alone = lockstep.evaluate(made.model, given, nn.CrossEntropyLoss())
    assert alone == lockstep.evaluate(
        made.model, DataLoader(DATA, 8, drop_last=True), nn.CrossEntropyLoss()
    )


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(DATA)


def test_one_over_an_iterable_data_set() -> None:
    made = trainer()
    (row,) = made.fit(DataLoader(Stream(), 8), 1, validate=DataLoader(Stream(), 8, num_workers=1))
    assert made.step.steps_done == 3
    assert row["val_loss"] == made.evaluate(DATA)["loss"]
    with made.loader(DataLoader(Stream(), 8, drop_last=True)) as loader:
        assert [batch.size for batch in loader] == [8, 8]
        assert len(loader) == 2


REFUSED: dict[str, tuple[Any, str]] = {
    "a sampler": (
        lambda: DataLoader(DATA, 8, sampler=WeightedRandomSampler([1.0] * 20, 20)),
        "DataLoader with a WeightedRandomSampler. Lockstep divides each global batch .* To keep the sampler: "
        r"lockstep.Loader\(dataset, global_batch_size, batch_sampler=torch.utils.data.BatchSampler\(sampler",
    ),
    "a DistributedSampler": (
        lambda: DataLoader(DATA, 8, sampler=torch.utils.data.DistributedSampler(DATA, 2, 0)),
        "DataLoader with a DistributedSampler.*leave a DistributedSampler out",
    ),
    "draws with replacement": (
        lambda: DataLoader(DATA, 8, sampler=RandomSampler(DATA, replacement=True)),
        "DataLoader with a RandomSampler",
    ),
    "a part of the samples": (
        lambda: DataLoader(DATA, 8, sampler=RandomSampler(DATA, num_samples=10)),
        "DataLoader with a RandomSampler",
    ),
    "a sampler in another order": (
        lambda: DataLoader(DATA, 8, sampler=type("Reversed", (SequentialSampler,), {})(DATA)),
        "DataLoader with a Reversed",
    ),
    "a batch sampler": (
        lambda: DataLoader(DATA, batch_sampler=[[0, 1], [2]]),
        "DataLoader with a list. Lockstep divides .* takes one that yields the indices of global "
        "batches",
    ),
    "a BatchSampler of a sampler": (
        lambda: DataLoader(
            DATA, batch_sampler=BatchSampler(WeightedRandomSampler([1.0] * 20, 20), 8, False)
        ),
        "DataLoader with a WeightedRandomSampler. Lockstep divides each global batch",
    ),
    "a BatchSampler of some indices": (
        lambda: DataLoader(DATA, batch_sampler=BatchSampler(range(19, -1, -1), 8, False)),
        "DataLoader with a range. Lockstep divides each global batch",
    ),
    "a BatchSampler of fewer samples": (
        lambda: DataLoader(
            DATA, batch_sampler=BatchSampler(SequentialSampler(range(10)), 8, False)
        ),
        "DataLoader with a SequentialSampler",
    ),
    "no batches": (
        lambda: DataLoader(DATA, batch_size=None),
        "batch_size=None. Pass the data set itself",
    ),
    "a generator": (
        lambda: (each for each in DATA),
        "train: expected an iterable data set, got a generator",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_divided_among_workers_is_refused(case: str) -> None:
    make, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        trainer().fit(make(), 1)


def test_the_error_names_the_argument() -> None:
    loader = DataLoader(DATA, 8, sampler=WeightedRandomSampler([1.0] * 20, 20))
    with pytest.raises(
        ConfigError, match=r"^train: expected a data set, or a DataLoader with shuffle=True"
    ):
        trainer().fit(loader, 1)
    with pytest.raises(ConfigError, match=r"^validate: "):
        trainer().fit(DATA, 1, validate=loader)
    with pytest.raises(ConfigError, match=r"^loader: "):
        lockstep.evaluate(nn.Linear(4, 3), loader, nn.CrossEntropyLoss())


def test_an_ignored_worker_init_fn_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        trainer().loader(DataLoader(DATA, 8, worker_init_fn=print)).close()
    assert "worker_init_fn of the DataLoader of the training data is not called" in caplog.text


def test_batches_unpack_and_a_loader_is_an_iterable_of_epochs() -> None:
    loader = Loader(Subset(DATA, range(10)), 5, seed=3)
    epochs = [[indices for batch in loader for indices in batch.indices.tolist()] for _ in range(2)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs) and epochs[0] != epochs[1]
    for inputs, targets in loader:
        assert inputs.shape == (5, 4) and targets.shape == (5,)


def test_batches_of_shards_and_of_single_tensors_do_not_unpack() -> None:
    with pytest.raises(TypeError, match=r"with virtual_workers, Batch\.data is a list of shards"):
        iter(next(iter(Loader(DATA, 8, virtual_workers=2))))
    with pytest.raises(TypeError, match=r"Batch\.data is a Tensor, not a tuple: use batch\.data"):
        iter(next(iter(Loader(torch.randn(8, 2), 8))))


def test_the_class_of_a_loss_is_not_its_instance() -> None:
    model = nn.Linear(4, 3)
    with pytest.raises(
        ConfigError, match=r"got the class CrossEntropyLoss. Create an instance: CrossEntropyLoss\("
    ):
        lockstep.Trainer(model, torch.optim.SGD(model.parameters(), 0.1), nn.CrossEntropyLoss, 8)  # type: ignore[arg-type]
