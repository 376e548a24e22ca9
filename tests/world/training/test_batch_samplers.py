"""Batches of a user's own choice: every worker has its part of the same ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, WeightedRandomSampler

import lockstep
from lockstep.communicator import init
from lockstep.data import LengthBatchSampler
from support.outcome import RanksFailedError
from support.pool import Pool

TEXTS = [
    torch.randint(1, 20, (2 + index * 7 % 23,), generator=torch.Generator().manual_seed(index))
    for index in range(50)
]


class Texts(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return len(TEXTS)

    def __getitem__(self, index: int) -> Any:
        return TEXTS[index], int(TEXTS[index][0]) % 3


class MeanOfWords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(20, 8), nn.Linear(8, 3)

    def forward(self, texts: torch.Tensor) -> torch.Tensor:
        mask = (texts > 0).unsqueeze(-1)
        summed: torch.Tensor = (self.words(texts) * mask).sum(1)
        return self.out(summed / mask.sum(1))  # type: ignore[no-any-return]


def padded(samples: list[Any]) -> Any:
    texts, labels = zip(*samples, strict=True)
    return nn.utils.rnn.pad_sequence(list(texts), batch_first=True), torch.tensor(labels)


def train(
    virtual_workers: int | None,
    epochs: int,
    folder: str | None = None,
    resume: bool = False,
    weighted: bool = False,
) -> Any:
    torch.manual_seed(0)
    model = MeanOfWords()
    trainer = lockstep.Trainer(
        model,
        torch.optim.Adam(model.parameters(), 0.01),
        nn.CrossEntropyLoss(),
        8,
        virtual_workers=virtual_workers,
        run_dir=folder,
        callbacks=[lockstep.callbacks.Checkpoints("3steps")] if folder else [],
    )
    sampler: Any = LengthBatchSampler([len(text) for text in TEXTS], 8, pool=3)
    if weighted:
        draws = WeightedRandomSampler([1.0 + index % 3 for index in range(50)], 50)
        sampler = BatchSampler(draws, 8, drop_last=False)
    loader = lockstep.Loader(
        Texts(), 8, batch_sampler=sampler, collate_fn=padded, virtual_workers=virtual_workers
    )
    steps = {} if epochs else {"max_steps": 10}
    trainer.fit(loader, epochs or None, resume="latest" if resume else None, **steps)  # type: ignore[arg-type]
    return lockstep.fingerprint(model, trainer.optimizer), trainer.history[-1]["train_loss"]


def test_the_bits_are_the_same_at_any_number_of_workers(pool: Pool) -> None:
    fingerprints = {pool.run(train, 4, 2, workers=workers)[0][0] for workers in (1, 2, 3)}
    assert len(fingerprints) == 1
    losses = [pool.run(train, None, 2, workers=workers)[0][1] for workers in (1, 3)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_a_run_resumes_within_an_epoch_with_the_same_batches(pool: Pool, tmp_path: Path) -> None:
    whole = pool.run(train, 4, 2, workers=1)[0][0]
    pool.run(train, 4, 0, str(tmp_path / "run"), workers=2)  # ten steps, of seven in an epoch
    assert pool.run(train, 4, 2, str(tmp_path / "run"), True, workers=3)[0][0] == whole


def test_weights_of_torch_are_drawn_anew_in_each_epoch_and_alike_on_all_workers(
    pool: Pool, tmp_path: Path
) -> None:
    sampler = BatchSampler(
        WeightedRandomSampler([1.0 + index % 3 for index in range(50)], 50), 8, drop_last=False
    )
    with lockstep.Loader(Texts(), 8, batch_sampler=sampler) as loader:
        first, second = (loader.order(epoch).tolist() for epoch in range(2))
        torch.rand(3)  # other draws of the program
        assert first != second and first == loader.order(0).tolist()
    whole = pool.run(train, 4, 2, weighted=True, workers=1)[0][0]
    pool.run(train, 4, 0, str(tmp_path / "run"), weighted=True, workers=2)
    assert (
        pool.run(train, 4, 2, str(tmp_path / "run"), True, weighted=True, workers=2)[0][0] == whole
    )


class OtherOnEachRank:
    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[list[int]]:
        yield [0, 1]
        yield [2, 3 + init().rank]


def read() -> None:
    next(iter(lockstep.Loader(Texts(), 2, batch_sampler=OtherOnEachRank())))


def test_ranks_that_choose_other_batches_find_out(pool: Pool) -> None:
    with pytest.raises(
        RanksFailedError,
        match="MismatchError: batch_sampler: batch 1 of epoch 0 differs on ranks 0 and 1",
    ):
        pool.run(read, workers=2)
