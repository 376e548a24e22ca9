"""A data set in sharded files: which blocks are read, by whom, how often; positions, other numbers
of workers.
"""

from __future__ import annotations

import os
import pickle
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from lockstep.communicator import Communicator
from lockstep.data.loader import Batch, Loader
from lockstep.data.stream import Stream
from lockstep.data.torch_dataloaders import dataloader_settings
from lockstep.errors import CheckpointError, ConfigError, DataError
from lockstep.topology import World

CPU = torch.device("cpu")


def rank_of(rank: int, size: int) -> Communicator:
    return Communicator.at(World(rank, size, rank, size), CPU)


class Made:
    """A reader of samples that no file holds: sample i of a file is the number i.

    It writes down which process has read which block.
    """

    def __init__(self, log: Path, blocks: int, samples: int = 20) -> None:
        self.log, self._blocks, self._samples = log, blocks, samples

    def blocks(self, path: Path) -> tuple[Sequence[int], Sequence[int]]:
        return [self._samples] * self._blocks, range(self._blocks)

    def read(self, path: Path, place: tuple[int, ...]) -> Sequence[Any]:
        with self.log.open("a") as log:
            log.write(f"{os.getpid()} {place[0]}\n")
        return range(place[0] * self._samples, (place[0] + 1) * self._samples)

    def read_by(self) -> dict[int, list[int]]:
        """The blocks that each process has read since the last call, in order."""
        found: dict[int, list[int]] = {}
        for line in self.log.read_text().splitlines() if self.log.exists() else ():
            process, block = map(int, line.split())
            found.setdefault(process, []).append(block)
        self.log.unlink(missing_ok=True)
        return found


@pytest.fixture
def log(tmp_path: Path) -> Path:
    (tmp_path / "made.x").touch()
    return tmp_path / "log"


def made(log: Path, blocks: int, samples: int = 20, **options: Any) -> tuple[Made, Stream]:
    reader = Made(log, blocks, samples)
    return reader, Stream(log.with_name("made.x"), reader, **{"shuffle_window": 400, **options})


def indices(batches: Iterator[Batch]) -> list[list[int]]:
    found = []
    for batch in batches:
        assert batch.indices.tolist() == batch.data.tolist()
        found.append(batch.indices.tolist())
    return found


@pytest.mark.parametrize(
    "options", [{}, {"shuffle": False}, {"drop_last": True}, {"virtual_workers": 4}]
)
def test_the_same_batches_at_any_number_of_workers(log: Path, options: dict[str, Any]) -> None:
    _, stream = made(log, 50)
    expected = Loader(stream, 64, comm=rank_of(0, 1), **options).order(2).split(64)
    for size in (1, 2, 3):
        loaders = [Loader(stream, 64, comm=rank_of(rank, size), **options) for rank in range(size)]
        steps = list(zip(*(loader.epoch(2) for loader in loaders), strict=True))
        assert len(steps) == len(loaders[0]) == (15 if "drop_last" in options else 16)
        for step, parts in enumerate(steps):
            assert torch.cat([part.indices for part in parts]).equal(expected[step])
            for part in parts:
                data = torch.cat(list(part.data)) if part.virtual_workers else part.data
                assert data.equal(part.indices)


def test_a_last_batch_with_fewer_samples_than_workers(log: Path) -> None:
    _, stream = made(log, 13, 5)
    lasts = [list(Loader(stream, 64, comm=rank_of(rank, 3)).epoch(0))[-1] for rank in range(3)]
    assert [(last.size, last.data.shape[0], last.global_size) for last in lasts] == [
        (1, 1, 1),
        (0, 0, 1),
        (0, 0, 1),
    ]


def test_from_three_workers_to_two_in_mid_epoch(log: Path) -> None:
    _, stream = made(log, 50)
    before = [Loader(stream, 64, comm=rank_of(rank, 3)) for rank in range(3)]
    running = [loader.epoch(1) for loader in before]
    seen = [sample for _ in range(5) for epoch in running for sample in next(epoch).data.tolist()]
    states = [loader.state_dict() for loader in before]
    assert (
        states[0] == states[1] == states[2] and states[0]["epoch"] == 1 and states[0]["step"] == 5
    )

    after = [Loader(made(log, 50)[1], 64, comm=rank_of(rank, 2)) for rank in range(2)]
    for loader in after:
        loader.load_state_dict(pickle.loads(pickle.dumps(states[0])))
    for parts in zip(*(loader.epoch(1) for loader in after), strict=True):
        seen += [sample for part in parts for sample in part.data.tolist()]
    assert seen == Loader(stream, 64, comm=rank_of(0, 1)).order(1).tolist()


def test_resuming_at_sample_10_000_000_reads_nothing_before_it(log: Path) -> None:
    reader, stream = made(log, 12_000, 1000, shuffle_window=8192)
    loader = Loader(stream, 250, comm=rank_of(0, 1))
    loader.load_state_dict({**loader.state_dict(), "epoch": 3, "step": 40_000})
    epoch = loader.epoch(3)
    found = [next(epoch) for _ in range(8)]
    order = stream.epoch_order(250, 0, 3, True)
    assert [batch.step for batch in found] == [*range(40_000, 40_008)]
    expected = [order.part(step, 0, 250).tolist() for step in range(40_000, 40_008)]
    assert [batch.data.tolist() for batch in found] == expected
    ((_, read),) = reader.read_by().items()
    assert 32 <= len(read) == len(set(read)) <= 64  # one or two for each of 32 lanes
    assert set(read) <= set(order.blocks(40_000, 0, 250).tolist())


@pytest.mark.parametrize(("workers", "processes"), [(1, 0), (2, 0), (4, 0), (1, 2), (2, 2)])
def test_blocks_are_read_once_by_one_process_of_one_worker(
    log: Path, workers: int, processes: int
) -> None:
    blocks = 400
    reader, stream = made(log, blocks)
    readers: list[list[int]] = []  # of each process, the blocks that it has read
    for rank in range(workers):
        with Loader(stream, 64, num_workers=processes, comm=rank_of(rank, workers)) as loader:
            assert len(indices(loader.epoch(0))) == 125
        by_process = reader.read_by()
        assert len(by_process) == max(1, processes)
        readers += by_process.values()
    numbers = [len(read) for read in readers]
    assert max(numbers) < 1.2 * min(numbers)
    times = Counter(block for read in readers for block in read)
    assert times.keys() == set(range(blocks)) and max(times.values()) == 2
    # 32 lanes have 31 borders, each of which may cut a block
    assert sum(count == 2 for count in times.values()) <= 31


def test_a_worker_keeps_the_blocks_of_a_window_alone(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, stream = made(log, 400, shuffle_window=640)
    readers = []
    monkeypatch.setattr(
        stream, "reader", lambda: readers.append(Stream.reader(stream)) or readers[-1]
    )
    for _ in Loader(stream, 64, comm=rank_of(0, 2)).epoch(0):
        # 16 lanes, each with a window of 20 samples: at most two blocks of 20
        assert len(readers[0]._blocks) <= 32
    assert len(readers) == 1


def test_an_evaluation_in_mid_epoch_does_not_make_the_training_read_again(log: Path) -> None:
    reader, stream = made(log, 100)
    training = Loader(stream, 64, comm=rank_of(0, 1)).epoch(0)
    for _ in range(3):
        next(training)
    reader.read_by()
    indices(Loader(stream, 64, shuffle=False, comm=rank_of(0, 1)).epoch(0))
    ((_, read),) = reader.read_by().items()
    assert read == [*range(100)]
    next(training)
    assert reader.read_by() == {}


def test_an_epoch_that_was_left_in_the_middle_leaves_nothing_to_the_next(log: Path) -> None:
    _, stream = made(log, 30)
    with Loader(stream, 64, num_workers=2, comm=rank_of(0, 1)) as loader:
        left, following = loader.epoch(0), loader.epoch(1)
        next(left)
        found = [next(following).data.tolist()]
        with pytest.raises(
            ConfigError, match=r"one epoch at a time .* before the last batch of epoch 0"
        ):
            next(left)
        found += [batch.data.tolist() for batch in following]
    assert found == indices(Loader(stream, 64, comm=rank_of(0, 1)).epoch(1))


def test_a_data_loader_of_torch_over_a_stream(log: Path) -> None:
    _, stream = made(log, 30)
    given = dataloader_settings(DataLoader(stream, batch_size=64, shuffle=True), "train", 64)
    prefetch, dataset = given.pop("prefetch"), given.pop("dataset")
    found = indices(Loader(dataset, 64, prefetch=prefetch, comm=rank_of(0, 1), **given).epoch(1))
    assert found == indices(Loader(stream, 64, comm=rank_of(0, 1)).epoch(1))


# --- samples
# --------------------------------------------------------------------------------------------------


class Augmented:
    """Samples of many kinds, with random draws."""

    def __call__(self, number: int) -> dict[str, Any]:
        return {
            "number": number,
            "noise": torch.rand(2, 3, dtype=torch.float64).T,
            "half": torch.rand(3).to(torch.bfloat16),
            "nothing": torch.zeros(0),
            "one": torch.tensor(number / 3),
            "array": np.random.rand(number % 3 + 1),
            "python": random.random(),
            "text": list(f"é{number}".encode()),
        }


def collate(samples: list[Any]) -> Any:
    draws = torch.rand(1)
    return [draws, *samples]


@pytest.mark.parametrize("processes", [1, 2])
def test_samples_and_draws_are_the_same_in_loader_processes(log: Path, processes: int) -> None:
    _, stream = made(log, 10, map=Augmented())
    state = torch.get_rng_state()
    alone = [
        batch.data for batch in Loader(stream, 32, collate_fn=collate, comm=rank_of(0, 1)).epoch(1)
    ]
    with Loader(
        stream, 32, collate_fn=collate, num_workers=processes, comm=rank_of(0, 1)
    ) as loader:
        loaded = [batch.data for batch in loader.epoch(1)]
    assert torch.equal(state, torch.get_rng_state())
    assert len(alone) == len(loaded) == 7
    torch.testing.assert_close(loaded, alone, rtol=0, atol=0)
    loaded[0][1]["array"][0] = loaded[0][1]["noise"][0, 0] = 1.0  # they can be written to
    by_number = {sample["number"]: sample["noise"] for data in alone for sample in data[1:]}
    other = {
        sample["number"]: sample["noise"]
        for batch in Loader(stream, 20, collate_fn=collate, comm=rank_of(1, 2)).epoch(1)
        for sample in batch.data[1:]
    }
    assert len(other) == 100 and all(
        torch.equal(noise, by_number[number]) for number, noise in other.items()
    )


def fail_at_7(number: int) -> int:
    if number == 7:
        raise KeyError("label")
    return number


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_function_that_fails_is_named_with_the_record(log: Path, num_workers: int) -> None:
    _, stream = made(log, 3, map=fail_at_7)
    said = r"made\.x: record 7 \(sample 7 of the stream\): KeyError: 'label', at test_stream.py:\d+ in fail_at_7"
    with (
        Loader(stream, 30, num_workers=num_workers, comm=rank_of(0, 1)) as loader,
        pytest.raises(DataError, match=said),
    ):
        list(loader)


def unsendable(number: int) -> Any:
    return lambda: number


def test_samples_that_cannot_be_sent_by_a_loader_process_are_one_line(log: Path) -> None:
    _, stream = made(log, 3, map=unsendable)
    with Loader(stream, 30, num_workers=2, collate_fn=list, comm=rank_of(0, 1)) as loader:
        with pytest.raises(
            DataError, match=r"samples of Stream cannot leave a loader process: .*use one loader"
        ) as caught:
            list(loader)
        assert "\n" not in str(caught.value)
    with Loader(stream, 30, collate_fn=list, comm=rank_of(0, 1)) as loader:
        assert next(iter(loader)).data[0]() >= 0


# --- bad input
# ------------------------------------------------------------------------------------------------


def test_a_stream_shorter_than_a_global_batch_is_refused_unless_it_is_not_shuffled(
    log: Path,
) -> None:
    _, stream = made(log, 3)
    with pytest.raises(
        ConfigError,
        match=r"global_batch_size: expected at most .* Stream\(.*made.x: 60 samples\), got 64",
    ):
        Loader(stream, 64, comm=rank_of(0, 1))
    assert len(indices(Loader(stream, 64, shuffle=False, comm=rank_of(0, 1)).epoch(0))) == 1


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"shuffle_window": 500}, "shuffle_window was 400, here it is 500"),
        ({"lanes": 16}, "lanes was 32, here it is 16"),
        ({"blocks": 25, "samples": 40}, "files was '1 from made.x, .*, here it is"),
    ],
)
def test_a_position_in_other_files_is_refused(log: Path, other: dict[str, Any], said: str) -> None:
    saved = Loader(made(log, 50)[1], 64, comm=rank_of(0, 1)).state_dict()
    blocks, samples = other.pop("blocks", 50), other.pop("samples", 20)
    loader = Loader(made(log, blocks, samples, **other)[1], 64, comm=rank_of(0, 1))
    with pytest.raises(CheckpointError, match=said):
        loader.load_state_dict(saved)


def test_a_position_in_files_that_were_moved_is_restored(log: Path, tmp_path: Path) -> None:
    saved = Loader(made(log, 50)[1], 64, comm=rank_of(0, 1)).state_dict()
    (tmp_path / "new").mkdir()
    log.with_name("made.x").rename(tmp_path / "new" / "made.x")
    Loader(made(tmp_path / "new" / "log", 50)[1], 64, comm=rank_of(0, 1)).load_state_dict(saved)


def test_a_file_that_has_changed_since_is_an_error(log: Path) -> None:
    _, stream = made(log, 5)
    assert stream[3] == 3
    log.with_name("made.x").write_text("more")
    with pytest.raises(
        DataError,
        match=r"made\.x: block 4 \(records 80 to 99\): .*changed since its samples were counted",
    ):
        stream[-1]


class Fewer(Made):
    def read(self, path: Path, place: tuple[int, ...]) -> Sequence[Any]:
        return super().read(path, place)[:-1]


def test_a_block_with_another_number_of_samples_is_an_error(log: Path) -> None:
    with pytest.raises(
        DataError, match=r"block 2 \(records 40 to 59\): ValueError: 19 samples, expected 20"
    ):
        Stream(log.with_name("made.x"), Fewer(log, 3))[41]


def test_indices_by_hand(log: Path) -> None:
    reader, stream = made(log, 10)
    assert (stream[0], stream[-1], list(stream)) == (0, 199, [*range(200)])
    with pytest.raises(IndexError):
        stream[200]
    assert [*reader.read_by().values()] == [[0, 9, *range(1, 10)]]
