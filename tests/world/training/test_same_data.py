"""Workers that have different data sets find out before the first batch; what is no difference is not refused."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import lockstep
from lockstep.communicator import init
from lockstep.data import Stream
from support.pool import Pool


def numbers(samples: int = 64, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 4, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 2, (samples,), generator=generator))


def make() -> tuple[nn.Module, torch.optim.Optimizer, nn.Module]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss()


def trainer(**options: Any) -> lockstep.Trainer:
    model, optimizer, loss = make()
    return lockstep.Trainer(model, optimizer, loss, 16, callbacks=[], **options)


def own_loop(data: Any) -> None:
    model, optimizer, loss = make()
    model, optimizer, loader = lockstep.prepare(model, optimizer, torch.utils.data.DataLoader(data, 16, shuffle=True))
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()


def read(data: Any, **options: Any) -> list[Any]:
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # lets ranks of the pool start some
    with lockstep.Loader(data, 16, **options) as loader:
        return [batch.data for batch in loader]


WAYS: dict[str, Callable[[Any], Any]] = {
    "fit": lambda data: trainer().fit(data, epochs=1),
    "virtual workers": lambda data: trainer(virtual_workers=4).fit(data, epochs=1),
    "validate": lambda data: trainer().fit(numbers(), epochs=1, validate=data),
    "Trainer.evaluate": lambda data: trainer().evaluate(data),
    "Trainer.predict": lambda data: trainer().predict(data),
    "evaluate": lambda data: lockstep.evaluate(make()[0], lockstep.Loader(data, 16), nn.CrossEntropyLoss()),
    "predict": lambda data: lockstep.predict(make()[0], lockstep.Loader(data, 16, shuffle=False)),
    "prepare": own_loop,
    "Loader": read,
    "a batch sampler": lambda data: read(data, batch_sampler=[[0, 1], [2, 3]]),
}
NAMES = {"fit": "the training data", "virtual workers": "the training data", "validate": "the data of validate="}


def errors(pool: Pool, way: str, data: Callable[[int], Any], workers: int = 2) -> list[str]:
    def body(data: Callable[[int], Any]) -> str:
        try:
            WAYS[way](data(init().rank))
        except lockstep.errors.MismatchError as error:
            return str(error)
        return ""

    return pool.run(body, data, workers=workers)


@pytest.mark.parametrize("way", WAYS)
def test_other_samples_are_an_error_on_every_rank(pool: Pool, way: str) -> None:
    first, other = errors(pool, way, lambda rank: numbers(seed=rank))
    name = NAMES.get(way, "the data set")
    assert first == other
    assert first.startswith(f"{name} (TensorDataset): sample 0 differs, in its element [0], on ranks 0 and 1. ")


@pytest.mark.parametrize("way", ["fit", "validate", "Loader"])
def test_other_lengths_are_named(pool: Pool, way: str) -> None:
    found = errors(pool, way, lambda rank: numbers(64 + (rank == 2)), workers=3)
    said = f"{NAMES.get(way, 'the data set')} (TensorDataset) differs among the workers: "
    said += "rank 0 has 64 samples, rank 2 has 65. "
    assert len(set(found)) == 1
    assert found[0].startswith(said)


def drawn_labels(rank: int) -> Any:
    return TensorDataset(
        torch.zeros(500, 4), torch.randint(0, 2, (500,), generator=torch.Generator().manual_seed(rank))
    )


def test_labels_that_each_process_draws(pool: Pool) -> None:
    found = errors(pool, "fit", drawn_labels)
    assert all(", in its element [1], on ranks 0 and 1" in text for text in found)


@pytest.mark.parametrize(("setting", "value"), [("seed", 1), ("shuffle", False), ("global_batch_size", 8)])
def test_settings_that_differ(pool: Pool, setting: str, value: Any) -> None:
    def body() -> str:
        options: dict[str, Any] = {"global_batch_size": 16} | ({setting: value} if init().rank else {})
        with pytest.raises(lockstep.errors.MismatchError) as caught:
            next(iter(lockstep.Loader(numbers(), **options)))
        return str(caught.value)

    assert all(text.startswith(f"{setting} of the loader of the data set") for text in pool.run(body))


# --- What is no difference --------------------------------------------------------------------------------------------


class Augmented(Dataset[Any]):
    """Draws from the global generators, which are seeded for each sample."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        noise = torch.randn(4) + random.random() + float(np.random.rand())
        return noise, index % 2


class RandomByItself(Dataset[Any]):
    """Draws from a generator of its own, on half of the samples, or changes its labels by rank as well."""

    def __init__(self, seed: int | None, labels: int = 0) -> None:
        self.own, self.labels = np.random.default_rng(seed), labels

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        image = torch.arange(4.0) + index
        return image.flip(0) if self.own.random() < 0.5 else image, (index + self.labels) % 2


class Odd(Dataset[Any]):
    """Samples of which some raise an exception, and which hold an object that says nothing but its address."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        if index % 3 == init().rank:
            raise OSError("not on this host")
        return {"object": object(), "file": f"/scratch/{init().rank}/{index}.png", "set": {"a", "b"}}


def draws(data: Any) -> list[float]:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    if data is not None:
        read(data)
    return [torch.rand(1).item(), random.random(), float(np.random.rand())]


def test_augmentation_by_seeded_generators_is_the_same_on_every_rank(pool: Pool) -> None:
    assert pool.run(draws, Augmented()) == pool.run(draws, None)


def messages(data: Callable[[int], Any], **options: Any) -> list[str]:
    """Return what was logged while the data were read, by two loaders after one another."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lockstep")
    logger.addHandler(handler)
    try:
        for _ in range(2):
            read(data(init().rank), **options)
    finally:
        logger.removeHandler(handler)
    return said


@pytest.mark.leaks("the pipe of a resource tracker that loader processes need")
@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("processes", [0, 1])
def test_what_is_random_by_itself_is_said_once(pool: Pool, same: bool, processes: int) -> None:
    def body() -> list[str]:
        class Own(RandomByItself):
            pass

        Own.__name__ = f"Own{same}{processes}"  # once in a process, and these are kept
        return messages(lambda rank: Own(7 if same else 7 + rank), num_workers=processes)

    first, other = pool.run(body)
    assert other == []
    assert len(first) == 1
    assert first[0].startswith(
        f"the data set (Own{same}{processes}): samples are random by themselves ([0]): read again"
    )


def test_labels_beside_what_is_random_by_itself_are_compared(pool: Pool) -> None:
    found = errors(pool, "Loader", lambda rank: RandomByItself(None, labels=rank))
    assert all(", in its element [1], on ranks 0 and 1" in text for text in found)


def test_a_generator_of_the_data_set_is_where_it_was(pool: Pool) -> None:
    def body() -> bool:
        data, alone = RandomByItself(7), RandomByItself(7)
        next(iter(lockstep.Loader(data, 16, shuffle=False)))
        for index in range(8):  # this worker's samples of the batch
            alone[index]
        return bool(data.own.random() == alone.own.random())

    assert pool.run(body) == [True, True]


def test_samples_that_cannot_be_read_are_left_to_the_training(pool: Pool) -> None:
    def body() -> list[str]:
        loader = lockstep.Loader(Odd(), 2, batch_sampler=[[2, 5], [8, 11]], collate_fn=lambda samples: samples)
        return [batch.data[0]["file"] for batch in loader]

    assert pool.run(body) == [["/scratch/0/2.png", "/scratch/0/8.png"], ["/scratch/1/5.png", "/scratch/1/11.png"]]


class FileOpenedLate(Dataset[Any]):
    """Opens its file when it is first read; a fork would share the position in it with all loader processes."""

    def __init__(self, path: str, rank: int = 0) -> None:
        self.path, self.file, self.rank = path, None, rank
        self.parent = os.getpid()

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        assert os.getpid() != self.parent, "read in the parent"
        if self.file is None:
            self.file = Path(self.path).open("rb")  # type: ignore[assignment]  # noqa: SIM115
        self.file.seek(index)  # type: ignore[attr-defined]
        return torch.tensor(self.file.read(1)[0] + self.rank), index  # type: ignore[attr-defined]


@pytest.mark.leaks("the pipe of a resource tracker that loader processes need")
@pytest.mark.parametrize("differs", [False, True])
def test_loader_processes_read_the_samples_and_their_parent_does_not(pool: Pool, tmp_path: Path, differs: bool) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(range(64)))

    def body(path: str) -> Any:
        data = FileOpenedLate(path, init().rank * differs)
        try:
            batches = read(data, num_workers=2)
        except lockstep.errors.MismatchError as error:
            return str(error)
        assert data.file is None
        return all(bool((values == numbers).all()) for values, numbers in batches)

    found = pool.run(body, str(path))
    if differs:
        assert all(": sample 0 differs, in its element [0], on ranks 0 and 1" in text for text in found)
    else:
        assert found == [True, True]


def test_a_loader_on_some_ranks_alone_asks_no_others(pool: Pool) -> None:
    def body() -> int:
        comm = init()
        if comm.rank == 1:  # made here only, and not read
            lockstep.Loader(numbers(40), 16)
        with comm.split(color=comm.rank // 2) as part:
            if comm.rank < 2:
                return sum(batch.size for batch in lockstep.Loader(numbers(40), 16, comm=part))
            return sum(batch.size for batch in lockstep.Loader(numbers(50, seed=1), 16, comm=part))

    assert pool.run(body, workers=3) == [20, 20, 50]


def test_a_data_set_is_compared_once_with_a_loader(pool: Pool) -> None:
    class Counted(Dataset[Any]):
        def __init__(self) -> None:
            self.read = 0

        def __len__(self) -> int:
            return 32

        def __getitem__(self, index: int) -> Any:
            self.read += 1
            return torch.zeros(4), 0

    def body() -> list[int]:
        data = Counted()
        loader = lockstep.Loader(data, 16)
        found = []
        for _ in range(3):
            before = data.read
            for _ in loader:
                pass
            found.append(data.read - before)
        return found

    assert pool.run(body) == [[16 + 36, 16, 16]] * 2
    assert pool.run(body, workers=1) == [[32, 32, 32]]


# --- Iterable data sets and streams -----------------------------------------------------------------------------------


class Records(IterableDataset[Any]):
    """Yields numbers, one of which depends on the rank."""

    def __init__(self, differs_at: int | None, rank: int) -> None:
        self.differs_at, self.rank = differs_at, rank

    def __iter__(self) -> Iterator[Any]:
        for number in range(64):
            yield torch.full((4,), float(number)), self.rank if number == self.differs_at else 0


@pytest.mark.parametrize(("differs_at", "said"), [(0, "its first sample"), (5, "its sample 5")])
def test_samples_of_the_first_batch_of_an_iterable_data_set(pool: Pool, differs_at: int, said: str) -> None:
    found = errors(pool, "fit", lambda rank: Records(differs_at, rank))
    assert all(text.startswith(f"Records: {said} differs on ranks 0 and 1.") for text in found)


def test_an_iterable_data_set_without_samples_on_one_rank(pool: Pool) -> None:
    class Nothing(Records):
        def __iter__(self) -> Iterator[Any]:
            return iter(()) if self.rank else super().__iter__()

    found = errors(pool, "Loader", lambda rank: Nothing(None, rank))
    assert all("the number of its samples differs on ranks 0 and 1" in text for text in found)


def test_parts_that_several_workers_read_are_compared(pool: Pool) -> None:
    found = errors(pool, "Loader", lambda rank: lockstep.data.Substreams(Records(3, rank), 3))
    assert all(text.startswith("Records: its sample 3 of part 1 differs on ranks 0 and 1.") for text in found)


@pytest.mark.leaks("the pipe of a resource tracker that loader processes need")
@pytest.mark.parametrize("processes", [0, 2])
def test_streams_of_other_contents(pool: Pool, tmp_path: Path, processes: int) -> None:
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        rows = [json.dumps({"x": [1.0] * 4, "y": (index + rank) % 2}) for index in range(64)]
        (tmp_path / str(rank) / "0.jsonl").write_text("\n".join(rows))

    def body(folder: str, differs: bool) -> str:
        data = Stream(f"{folder}/{init().rank * differs}/0.jsonl", map=lambda row: (torch.tensor(row["x"]), row["y"]))
        try:
            read(data, num_workers=processes)
        except lockstep.errors.MismatchError as error:
            return str(error)
        return ""

    assert pool.run(body, str(tmp_path), False) == ["", ""]
    found = pool.run(body, str(tmp_path), True)
    assert all(", in its element [1], on ranks 0 and 1" in text for text in found)
