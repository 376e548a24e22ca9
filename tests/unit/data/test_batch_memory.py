"""Parts of a batch are written beside each other into memory that is used again, but not while
anything refers to it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from lockstep.communicator import Communicator
from lockstep.data import Stream
from lockstep.data.batch_memory import BatchMemory, Lease, OpenPieces
from lockstep.data.between_processes import PackedSamples
from lockstep.data.loader import Loader
from lockstep.topology import World

ALONE = Communicator.at(World(), torch.device("cpu"))


def sample(number: int, size: int = 3) -> dict[str, Any]:
    return {
        "image": torch.full((size, 2), float(number)).t(),  # not in the order of its memory
        "flag": torch.tensor(number % 2 == 0),
        "half": torch.full((5,), number, dtype=torch.bfloat16),
        "array": np.full(7, number, np.int16),
        "none": torch.empty(0, 4),
        "label": number,
    }


def sent(memory: BatchMemory, lease: Lease, parts: list[list[Any]]) -> list[PackedSamples]:
    """The parts of a batch, each packed in a process of its own."""
    packed = []
    first = 0
    for part in parts:
        place = memory.place(lease, first)
        packed.append(PackedSamples.of(part, place, OpenPieces().of(place)))
        first += len(part)
    return packed


def is_within(tensor: torch.Tensor, lease: Lease) -> bool:
    memory = torch.from_numpy(lease.array)
    return 0 <= tensor.data_ptr() - memory.data_ptr() < len(memory)


def check_equal(batch: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, tensor in expected.items():
        assert torch.equal(batch[name], tensor) and batch[name].dtype == tensor.dtype, name
        assert batch[name].stride() == tensor.stride(), name


def test_parts_are_one_batch_without_a_copy() -> None:
    samples = [sample(number) for number in range(5)]
    packed = PackedSamples.of(samples)
    memory = BatchMemory()
    assert memory.lease(5) is None
    memory.learn(packed.sizes_of_sample)
    lease = memory.lease(5)
    assert lease is not None
    parts = sent(memory, lease, [samples[:2], samples[2:]])
    received = [sample for part in parts for sample in part.samples(lease.array)]
    batch = lease.collate()(received)
    check_equal(batch, default_collate(samples))
    in_memory = [name for name, tensor in batch.items() if is_within(tensor, lease)]
    assert in_memory == ["image", "flag", "half", "array"]


def test_samples_of_another_size_travel_by_themselves() -> None:
    memory = BatchMemory()
    memory.learn(PackedSamples.of([sample(0)]).sizes_of_sample)
    lease = memory.lease(3)
    assert lease is not None
    alike, other = sent(memory, lease, [[sample(0), sample(1)], [sample(2, size=4)]])
    shapes = [
        sample["image"].shape for part in (alike, other) for sample in part.samples(lease.array)
    ]
    assert shapes == [(2, 3), (2, 3), (2, 4)]
    with pytest.raises(RuntimeError, match="equal size"):
        lease.collate()([*alike.samples(lease.array), *other.samples(lease.array)])
    assert PackedSamples.of([sample(0), sample(2, size=4)]).sizes_of_sample == ()


def test_memory_is_used_again_when_nothing_refers_to_it() -> None:
    memory = BatchMemory()
    memory.learn((8,))
    lease = memory.lease(2)
    assert lease is not None
    first = lease.piece.number
    (packed,) = sent(memory, lease, [[torch.zeros(2), torch.ones(2)]])
    batch = lease.collate()(packed.samples(lease.array))
    assert is_within(batch, lease)
    row = batch[0].numpy()[1:]
    del lease, batch
    other = memory.lease(2)
    assert other is not None and other.piece.number != first  # a part of the batch is in use
    del row
    again = memory.lease(2)
    assert again is not None and again.piece.number == first
    larger = memory.lease(200)
    assert larger is not None and larger.piece.number not in (first, other.piece.number)


def test_a_piece_that_is_gone_is_not_opened(tmp_path: Path) -> None:
    memory = BatchMemory()
    memory.learn((8,))
    lease = memory.lease(2)
    assert lease is not None
    place = memory.place(lease, 0)
    opened = OpenPieces()
    assert opened.of(place) is opened.of(place) is not None
    memory.forget()
    del lease
    assert OpenPieces().of(place) is None
    # a file of the program that has got the same descriptor
    other = tmp_path / "other"
    other.write_bytes(bytes(16))
    assert OpenPieces().of(replace(place, path=str(other))) is None
    later = memory.lease(2)
    assert later is not None
    opened.of(memory.place(later, 0))
    assert opened.of(place) is None


def numbered(record: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((40,), record["number"]), torch.tensor(record["number"])


@pytest.mark.parametrize("virtual_workers", [None, 3])
def test_batches_that_are_kept_do_not_change(tmp_path: Path, virtual_workers: int | None) -> None:
    lines = [json.dumps({"number": number}) for number in range(198)]
    (tmp_path / "numbers.jsonl").write_text("\n".join(lines))
    data = Stream(tmp_path / "numbers.jsonl", map=numbered, shuffle_window=50)

    def epochs(processes: int) -> list[Any]:
        options: dict[str, Any] = {"num_workers": processes, "virtual_workers": virtual_workers}
        with Loader(data, 9, comm=ALONE, **options) as loader:
            return [batch.data for epoch in range(2) for batch in loader.epoch(epoch)]

    for batch, expected in zip(epochs(2), epochs(0), strict=True):
        pairs = zip(batch, expected, strict=True) if virtual_workers else [(batch, expected)]
        for (tensors, numbers), (expected_tensors, expected_numbers) in pairs:
            assert torch.equal(tensors, expected_tensors)
            assert torch.equal(numbers, expected_numbers)
