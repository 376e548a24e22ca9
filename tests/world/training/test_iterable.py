"""Iterable data sets: the same batches at any number of workers, and in a run that is resumed by
others.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, get_worker_info

import lockstep
from lockstep.communicator import init
from lockstep.data import Substreams
from support.outcome import RanksFailedError
from support.pool import Pool


class Points(IterableDataset[Any]):
    """Noisy points in three classes, divided among the loader processes that it is told of."""

    def __init__(self, samples: int) -> None:
        self.samples, self.epoch = samples, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(first, self.samples, step):
            label = number * (self.epoch + 1) % 3
            yield torch.tensor([label, 1.0, number % 5]) + 0.1 * torch.randn(3), label, number


# (samples, global batch size, parts): with a last batch that is smaller, and smaller than the
# number of workers
STREAMS = [(37, 8, 1), (37, 8, 4), (40, 8, 4), (41, 6, 5), (33, 8, 3), (17, 8, 2)]


def read_all(virtual_workers: int | None = None, half: bool = False) -> list[dict[int, list[int]]]:
    """Return the samples of each batch of each stream; with `half`, of those behind a position in
    its middle.
    """
    comm, found = init(), []
    for samples, size, parts in STREAMS:
        dataset = Substreams(Points(samples), parts) if parts > 1 else Points(samples)
        loader = lockstep.Loader(dataset, size, virtual_workers=virtual_workers)
        if half:
            batches = iter(loader)
            for _ in range(samples // size - 1):
                next(batches)
            loader.load_state_dict(loader.state_dict())
        own = {}
        for batch in loader:
            shards = (
                [data for data in batch.data if data is not None]
                if virtual_workers
                else [batch.data]
            )
            own[batch.step] = [int(number) for shard in shards for number in shard[2]]
            assert len(own[batch.step]) == batch.size == len(batch.indices)
        by_rank = comm.allgather_object(own)
        found.append({step: [each for other in by_rank for each in other[step]] for step in own})
    return found


def test_batches_are_the_same_at_any_number_of_workers(pool: Pool) -> None:
    expected = pool.run(read_all, workers=1)[0]
    for (samples, size, _), batches in zip(STREAMS, expected, strict=True):
        assert sorted(chain(*batches.values())) == list(range(samples))
        assert [len(batch) for batch in batches.values()][:-1] == [size] * ((samples - 1) // size)
    for virtual_workers, workers in (None, 2), (4, 3), (None, 3):
        assert pool.run(read_all, virtual_workers, workers=workers)[0] == expected
    rest = [
        {step: batch for step, batch in batches.items() if step >= samples // size - 1}
        for (samples, size, _), batches in zip(STREAMS, expected, strict=True)
    ]
    assert pool.run(read_all, None, True, workers=2)[0] == rest


def train(folder: str, parts: int, epochs: int | None, resume: bool = False) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.1), nn.Linear(8, 3))
    trainer = lockstep.Trainer(
        model,
        torch.optim.Adam(model.parameters(), 0.01),
        lambda output, target: nn.functional.cross_entropy(output, target),
        50,
        virtual_workers=6,
        run_dir=f"{folder}/run" if resume or not epochs else None,
        callbacks=[lockstep.callbacks.Checkpoints("3steps")] if resume or not epochs else [],
        forward=lambda model, batch: (model(batch[0]), batch[1]),
    )
    steps = {} if epochs else {"max_steps": 6}
    data, test = Substreams(Points(430), parts) if parts > 1 else Points(430), Points(70)
    trainer.fit(data, epochs, validate=test, resume="latest" if resume else None, **steps)  # type: ignore[arg-type]
    return lockstep.fingerprint(model, trainer.optimizer), [
        row["val_loss"] for row in trainer.history
    ][-1]


@pytest.mark.parametrize("parts", [1, 6])
def test_three_workers_begin_and_two_resume(pool: Pool, tmp_path: Any, parts: int) -> None:
    whole = pool.run(train, str(tmp_path), parts, 2, workers=1)[0]
    pool.run(train, str(tmp_path), parts, None, workers=3)  # six steps, of nine in an epoch
    assert pool.run(train, str(tmp_path), parts, 2, True, workers=2) == [whole, whole]


class ByRank(Points):
    def __iter__(self) -> Iterator[Any]:
        return iter(list(super().__iter__())[init().rank :: init().size])


class Longer(Points):
    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()
        if init().rank:
            yield torch.zeros(3), 0, self.samples


@pytest.mark.parametrize(
    ("kind", "what"), [(ByRank, "its first sample"), (Longer, "the number of its samples")]
)
def test_workers_that_read_other_samples_find_out(
    pool: Pool, kind: type[Points], what: str
) -> None:
    def read() -> None:
        for _ in lockstep.Loader(kind(40), 8):
            pass

    with pytest.raises(
        RanksFailedError, match=f"MismatchError: {kind.__name__}: {what} differs on ranks . and ."
    ):
        pool.run(read, workers=2)
