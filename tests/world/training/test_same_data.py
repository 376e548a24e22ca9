"""Workers that have different data sets find out before the next epoch; what is no difference is
not refused.
"""

from __future__ import annotations

import ctypes
import json
import logging
import multiprocessing
import os
import random
import time
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
    model, optimizer, loader = lockstep.prepare(
        model, optimizer, torch.utils.data.DataLoader(data, 16, shuffle=True)
    )
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
    "evaluate": lambda data: lockstep.evaluate(
        make()[0], lockstep.Loader(data, 16), nn.CrossEntropyLoss()
    ),
    "predict": lambda data: lockstep.predict(make()[0], lockstep.Loader(data, 16, shuffle=False)),
    "prepare": own_loop,
    "Loader": read,
    "a batch sampler": lambda data: read(data, batch_sampler=[[0, 1], [2, 3]]),
}
NAMES = {
    "fit": "the training data",
    "virtual workers": "the training data",
    "validate": "the data of validate=",
}


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
    assert first.startswith(
        f"{name} (TensorDataset): sample 0 differs, in its element [0], on ranks 0 and 1. "
    )


@pytest.mark.parametrize("way", ["fit", "validate", "Loader"])
def test_other_lengths_are_named(pool: Pool, way: str) -> None:
    found = errors(pool, way, lambda rank: numbers(64 + (rank == 2)), workers=3)
    said = f"{NAMES.get(way, 'the data set')} (TensorDataset) differs among the workers: "
    said += "rank 0 has 64 samples, rank 2 has 65. "
    assert len(set(found)) == 1
    assert found[0].startswith(said)


def drawn_labels(rank: int) -> Any:
    return TensorDataset(
        torch.zeros(500, 4),
        torch.randint(0, 2, (500,), generator=torch.Generator().manual_seed(rank)),
    )


def test_labels_that_each_process_draws(pool: Pool) -> None:
    found = errors(pool, "fit", drawn_labels)
    assert all(", in its element [1], on ranks 0 and 1" in text for text in found)


@pytest.mark.parametrize(
    ("setting", "value"), [("seed", 1), ("shuffle", False), ("global_batch_size", 8)]
)
def test_settings_that_differ(pool: Pool, setting: str, value: Any) -> None:
    def body() -> str:
        options: dict[str, Any] = {"global_batch_size": 16} | (
            {setting: value} if init().rank else {}
        )
        with pytest.raises(lockstep.errors.MismatchError) as caught:
            next(iter(lockstep.Loader(numbers(), **options)))
        return str(caught.value)

    assert all(
        text.startswith(f"{setting} of the loader of the data set") for text in pool.run(body)
    )


# --- What is no difference
# --------------------------------------------------------------------------------------------


class Augmented(Dataset[Any]):
    """Draws from the global generators, which are seeded for each sample."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        noise = torch.randn(4) + random.random() + float(np.random.rand())
        return noise, index % 2


class RandomByItself(Dataset[Any]):
    """Draws from a generator of its own, on half of the samples, or changes its labels by rank as
    well.
    """

    def __init__(self, seed: int | None, labels: int = 0) -> None:
        self.own, self.labels = np.random.default_rng(seed), labels

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        image = torch.arange(4.0) + index
        return image.flip(0) if self.own.random() < 0.5 else image, (index + self.labels) % 2


class Odd(Dataset[Any]):
    """Samples of which some raise an exception, and which hold an object that says nothing but its
    address.
    """

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        if index % 3 == init().rank:
            raise OSError("not on this host")
        return {
            "object": object(),
            "file": f"/scratch/{init().rank}/{index}.png",
            "set": {"a", "b"},
        }


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
        loader = lockstep.Loader(
            Odd(), 2, batch_sampler=[[2, 5], [8, 11]], collate_fn=lambda samples: samples
        )
        return [batch.data[0]["file"] for batch in loader]

    assert pool.run(body) == [
        ["/scratch/0/2.png", "/scratch/0/8.png"],
        ["/scratch/1/5.png", "/scratch/1/11.png"],
    ]


class FileOpenedLate(Dataset[Any]):
    """Opens its file when it is first read; a fork would share the position in it with all loader
    processes.
    """

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
def test_loader_processes_read_the_samples_and_their_parent_does_not(
    pool: Pool, tmp_path: Path, differs: bool
) -> None:
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
        assert all(
            ": sample 0 differs, in its element [0], on ranks 0 and 1" in text for text in found
        )
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


def test_how_many_samples_are_read_to_compare(pool: Pool) -> None:
    class Counted(Dataset[Any]):
        def __init__(self) -> None:
            self.read = 0

        def __len__(self) -> int:
            return 32

        def __getitem__(self, index: int) -> Any:
            self.read += 1
            return torch.zeros(4), 0

    def body() -> list[int]:
        data = Counted()  # of 32 samples
        loader = lockstep.Loader(data, 16)
        found = []
        for _ in range(3):
            before = data.read
            for _ in loader:
                pass
            found.append(data.read - before - 32 // init().size)
        return found

    first, other = pool.run(body)
    assert first == other
    assert first[:2] == [36, 6]
    assert first[2] <= 6
    assert pool.run(body, workers=1) == [[0, 0, 0]]


# --- Later epochs
# --------------------------------------------------------------------------------------------------


class Changing(Dataset[Any]):
    """A data set that a program changes between epochs, or that changes as it is read."""

    def __init__(
        self, keeps: bool = False, draws: bool = False, own: np.random.Generator | None = None
    ) -> None:
        self.inputs, self.labels = numbers().tensors[0], [number % 2 for number in range(64)]
        self.keeps, self.draws, self.own = keeps, draws, own
        self.kept: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Any:
        if index in self.kept:
            return self.kept[index]
        values = self.inputs[index]
        if self.draws:
            values = values + torch.randn(4)
        if self.own is not None:
            values = values + float(self.own.random())
        if self.keeps:
            self.kept[index] = values, self.labels[index]
        return values, self.labels[index]


def redraw(data: Changing, epoch: int, rank: int) -> None:
    if epoch:
        data.inputs = (
            data.inputs + torch.from_numpy(np.random.default_rng().random((64, 4))).float()
        )


def relabel(data: Changing, epoch: int, rank: int) -> None:
    data.labels = [(label + rank * epoch) % 2 for label in data.labels]


def append(data: Changing, epoch: int, rank: int) -> None:
    if rank == 1 and epoch == 1:
        data.inputs, data.labels = torch.cat([data.inputs, torch.ones(1, 4)]), [*data.labels, 1]


def alike_on_all(data: Changing, epoch: int, rank: int) -> None:
    data.inputs = data.inputs + torch.randn(64, 4, generator=torch.Generator().manual_seed(epoch))


def nothing(data: Changing, epoch: int, rank: int) -> None:
    pass


LATER: dict[str, tuple[Callable[[], Changing], Callable[[Changing, int, int], None], str]] = {
    "inputs that each process draws": (
        Changing,
        redraw,
        "differs, in its element [0], on ranks 0 and 1",
    ),
    "labels of each process": (
        Changing,
        relabel,
        "differs, in its element [1], on ranks 0 and 1 (",
    ),
    "a sample appended on one rank": (Changing, append, "rank 0 has 64 samples, rank 1 has 65"),
    "draws that are kept": (
        lambda: Changing(keeps=True, draws=True),
        nothing,
        "differs, in its element [0]",
    ),
    "draws of an own generator that are kept": (
        lambda: Changing(keeps=True, own=np.random.default_rng(0)),
        nothing,
        "differs, in its element [0]",
    ),
    "changes that are the same": (Changing, alike_on_all, ""),
    "values that are kept": (lambda: Changing(keeps=True), nothing, ""),
    "draws that are not kept": (lambda: Changing(draws=True), nothing, ""),
}


@pytest.mark.parametrize("case", LATER)
def test_data_that_change_after_the_first_epoch(pool: Pool, case: str) -> None:
    make_data, change, said = LATER[case]

    def body() -> tuple[int, str]:
        data = make_data()
        loader = lockstep.Loader(data, 16)
        for epoch in range(4):
            change(data, epoch, init().rank)
            try:
                for _ in loader:
                    pass
            except lockstep.errors.MismatchError as error:
                return epoch, str(error)
        return 4, ""

    first, other = pool.run(body)
    assert first == other
    assert first[0] == (1 if said else 4)
    assert said in first[1]


@pytest.mark.leaks("the pipe of a resource tracker that loader processes need")
def test_what_a_loader_process_keeps_is_compared(pool: Pool) -> None:
    def body() -> str:
        try:
            with lockstep.Loader(Changing(keeps=True, draws=True), 16, num_workers=1) as loader:
                multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
                for _ in range(3):
                    for _ in loader:
                        pass
        except lockstep.errors.MismatchError as error:
            return str(error)
        return ""

    assert all("keep no random draw of a sample" in text for text in pool.run(body))


@pytest.mark.parametrize("call", ["evaluate", "predict"])
def test_each_evaluation_compares(pool: Pool, call: str) -> None:
    def body() -> str:
        data, (model, _, loss) = Changing(), make()
        loader = lockstep.Loader(data, 16, shuffle=False)

        def run() -> Any:
            return (
                lockstep.evaluate(model, loader, loss)
                if call == "evaluate"
                else lockstep.predict(model, loader)
            )

        run()
        relabel(data, 1, init().rank)
        with pytest.raises(lockstep.errors.MismatchError) as caught:
            run()
        return str(caught.value)

    assert all("in its element [1], on ranks 0 and 1" in text for text in pool.run(body))


def test_later_comparisons_leave_generators_where_they_are(pool: Pool) -> None:
    def body() -> bool:
        found = []
        for compares in (True, False):
            torch.manual_seed(3)
            random.seed(3)
            np.random.seed(3)
            if compares:
                loader = lockstep.Loader(Augmented(), 16)
                for _ in range(3):
                    next(iter(loader.epoch(1)))
            found.append((torch.rand(1).item(), random.random(), float(np.random.rand())))
        return bool(found[0] == found[1])

    assert pool.run(body) == [True, True]


# --- What is of the process, and not of the data
# ----------------------------------------------------------------------


class Meta:
    def __init__(self, value: Any) -> None:
        self.value = value


class OfTheProcess(Dataset[Any]):
    def __init__(self, make_sample: Callable[[int, int], Any]) -> None:
        self.make_sample, self.rank = make_sample, init().rank

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return self.make_sample(index, self.rank)


IMAGE = torch.arange(16.0)
OF_THE_PROCESS: dict[str, tuple[Callable[[int, int], Any], str]] = {
    "attribute": (
        lambda index, rank: {"x": IMAGE, "meta": Meta(rank)},
        "['meta'].value an attribute that differs: 0 ",
    ),
    "nested": (
        lambda index, rank: {"x": IMAGE, "meta": Meta({"pid": [rank, "a"]})},
        "['meta'].value['pid'][0] an attribute that differs: 0 ",
    ),
    "pointer": (
        lambda index, rank: {"x": IMAGE, "pointer": ctypes.c_void_p(1000 + rank)},
        "['pointer'] an attribute that differs: c_void_p(1000) ",
    ),
    "path": (
        lambda index, rank: {"x": IMAGE, "path": f"/tmp/{rank}{index}.png"},
        "['path'] the path of a file that differs: '/tmp/0",
    ),
}


@pytest.mark.parametrize("case", OF_THE_PROCESS)
def test_what_may_be_of_the_process_is_said_once(pool: Pool, case: str) -> None:
    make_sample, expected = OF_THE_PROCESS[case]

    def body() -> list[str]:
        class Own(OfTheProcess):
            pass

        Own.__name__ = f"Own {case}"
        return messages(lambda rank: Own(make_sample), collate_fn=lambda samples: len(samples))

    first, other = pool.run(body)
    assert other == []
    assert len(first) == 1
    assert expected in first[0]


REFUSED: dict[str, tuple[Callable[[int, int], Any], str]] = {
    "text": (
        lambda index, rank: {"x": IMAGE, "label": f"cat{rank}"},
        "['label'], on ranks 0 and 1 ('cat0' and 'cat1')",
    ),
    "label like a path": (
        lambda index, rank: {"x": IMAGE, "label": f"/m/01yr{rank}"},
        "['label'], on ranks 0 and 1 (",
    ),
    "path alone": (lambda index, rank: (f"/tmp/{rank}.png", index % 2), "[0], on ranks 0 and 1 ("),
    "path of another image": (
        lambda index, rank: (f"/tmp/{rank}.png", IMAGE + rank),
        "[0], on ranks 0 and 1 (",
    ),
    "number": (
        lambda index, rank: {"x": IMAGE, "rank": rank},
        "['rank'], on ranks 0 and 1 (0 and 1)",
    ),
    "tensor of an object": (
        lambda index, rank: Meta({"x": IMAGE + rank}),
        ".value['x'], on ranks 0 and 1. ",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_of_the_data_is_refused(pool: Pool, case: str) -> None:
    make_sample, expected = REFUSED[case]

    def body() -> str:
        with pytest.raises(lockstep.errors.MismatchError) as caught:
            read(OfTheProcess(make_sample), collate_fn=lambda samples: len(samples))
        return str(caught.value)

    assert all(expected in text for text in pool.run(body))


def test_a_clock_in_a_sample_is_random_by_itself(pool: Pool) -> None:
    def body() -> list[str]:
        data = OfTheProcess(lambda index, rank: {"x": IMAGE, "read": time.time() + 100 * rank})
        return messages(lambda rank: data)

    first, other = pool.run(body)
    assert other == []
    assert [
        text.startswith("the data set (OfTheProcess): samples are random by themselves (['read'])")
        for text in first
    ] == [True]


# --- Collate functions
# ------------------------------------------------------------------------------------------------


class Sequences(Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return torch.arange(1.0, 2 + index % 5) + index, index % 2


def stacked(samples: list[Any]) -> torch.Tensor:
    return torch.stack([torch.as_tensor(sample[0]) for sample in samples])


def standardised(samples: list[Any]) -> Any:
    return stacked(samples) - stacked(samples).mean(0), torch.tensor(
        [label for _, label in samples]
    )


def mixed(samples: list[Any]) -> Any:
    return {"x": 0.5 * (stacked(samples) + stacked(samples)[torch.randperm(len(samples))])}


def in_place(samples: list[Any]) -> Any:
    for values, _ in samples:
        values += 1
    return stacked(samples), torch.tensor([label for _, label in samples])


def by_norm(samples: list[Any]) -> Any:
    return stacked(sorted(samples, key=lambda sample: float(sample[0].norm())))


def padded(samples: list[Any]) -> Any:
    return torch.nn.utils.rnn.pad_sequence([values for values, _ in samples], batch_first=True)


def masked(samples: list[Any]) -> Any:
    x = stacked(samples)
    return {
        "x": x,
        "of": torch.arange(len(x)),
        "size": torch.tensor(float(len(x))),
        "all": [len(x)] * len(x),
    }


COLLATES: dict[str, tuple[Callable[[list[Any]], Any], Callable[[], Any], str]] = {
    "standardised": (
        standardised,
        numbers,
        "other values of a batch than of its halves (in its element [0])",
    ),
    "mixed": (mixed, numbers, "collate_fn draws random numbers"),
    "in place": (in_place, numbers, ""),
    "sorted": (by_norm, numbers, ""),
    "padded": (padded, Sequences, ""),
    "indices": (masked, numbers, ""),
    "an exception": (
        lambda samples: masked(samples) if len(samples) == 8 else samples[10],
        numbers,
        "",
    ),
}


@pytest.mark.parametrize("case", COLLATES)
def test_collate_functions_that_depend_on_the_division_are_said(pool: Pool, case: str) -> None:
    collate, make_data, expected = COLLATES[case]

    def body(**options: Any) -> list[str]:
        from lockstep.data import same_data

        same_data._said.clear()
        return messages(lambda rank: make_data(), collate_fn=collate, **options)

    first, other = pool.run(body)
    assert other == []
    assert len(first) == bool(expected)
    assert all(expected in text for text in first)
    assert pool.run(body, workers=1) == [[]]
    if expected:
        assert pool.run(body, virtual_workers=4) == [[], []]


def test_the_comparison_of_a_collate_function_changes_neither_it_nor_the_samples(
    pool: Pool,
) -> None:
    class Counting:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, samples: list[Any]) -> Any:
            self.calls += 1
            return in_place(samples)

    def body() -> tuple[int, float]:
        rows, collate = torch.zeros(64, 4), Counting()
        read([(row, 0) for row in rows], collate_fn=collate)
        return collate.calls, float(rows.sum())

    assert pool.run(body) == [(4, 32 * 4)] * 2  # this worker's four parts, of eight samples each


# --- Iterable data sets and streams
# -----------------------------------------------------------------------------------


class Records(IterableDataset[Any]):
    """Yields numbers, one of which depends on the rank."""

    def __init__(self, differs_at: int | None, rank: int) -> None:
        self.differs_at, self.rank = differs_at, rank

    def __iter__(self) -> Iterator[Any]:
        for number in range(64):
            yield torch.full((4,), float(number)), self.rank if number == self.differs_at else 0


@pytest.mark.parametrize(("differs_at", "said"), [(0, "its first sample"), (5, "its sample 5")])
def test_samples_of_the_first_batch_of_an_iterable_data_set(
    pool: Pool, differs_at: int, said: str
) -> None:
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
    assert all(
        text.startswith("Records: its sample 3 of part 1 differs on ranks 0 and 1.")
        for text in found
    )


@pytest.mark.leaks("the pipe of a resource tracker that loader processes need")
@pytest.mark.parametrize("processes", [0, 2])
def test_streams_of_other_contents(pool: Pool, tmp_path: Path, processes: int) -> None:
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        rows = [json.dumps({"x": [1.0] * 4, "y": (index + rank) % 2}) for index in range(64)]
        (tmp_path / str(rank) / "0.jsonl").write_text("\n".join(rows))

    def body(folder: str, differs: bool) -> str:
        data = Stream(
            f"{folder}/{init().rank * differs}/0.jsonl",
            map=lambda row: (torch.tensor(row["x"]), row["y"]),
        )
        try:
            read(data, num_workers=processes)
        except lockstep.errors.MismatchError as error:
            return str(error)
        return ""

    assert pool.run(body, str(tmp_path), False) == ["", ""]
    found = pool.run(body, str(tmp_path), True)
    assert all(", in its element [1], on ranks 0 and 1" in text for text in found)
