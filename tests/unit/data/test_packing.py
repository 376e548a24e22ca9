"""Packing: every sequence once, whole, in rows of one length that are nearly full."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from lockstep.data import PackedSequences
from lockstep.data.packing import pack
from lockstep.errors import ConfigError, DataError


@pytest.mark.parametrize("seed", range(20))
def test_every_sequence_is_in_one_row(seed: int) -> None:
    draw = random.Random(seed)
    length = draw.randrange(2, 40)
    lengths = [draw.randrange(0, length + 1) for _ in range(draw.randrange(0, 60))]
    rows = pack(lengths, length)
    assert sorted(index for row in rows for index in row) == [
        index for index, size in enumerate(lengths) if size
    ]
    assert all(0 < sum(lengths[index] for index in row) <= length for row in rows)
    fullest = sorted(sum(lengths[index] for index in row) for row in rows)
    assert all(low + high > length for low, high in pairwise(fullest))  # no two rows fit into one


def test_little_is_left_free() -> None:
    draw = random.Random(0)
    lengths = [draw.randrange(1, 513) for _ in range(20_000)]
    assert sum(lengths) / (512 * len(pack(lengths, 512))) > 0.99


SEQUENCES: list[Any] = [
    [1, 2, 3],
    torch.tensor([4, 5]),
    {"input_ids": [6, 7, 8], "labels": [-100, 17, 18]},
    [9],
]


def test_a_row() -> None:
    rows = PackedSequences(SEQUENCES, 6, pad=50)
    assert rows.rows == [[0, 2], [1, 3]]
    found = default_collate([rows[0], rows[1]])
    assert found["input_ids"].tolist() == [[1, 2, 3, 6, 7, 8], [4, 5, 9, 50, 50, 50]]
    assert found["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2], [0, 1, 0, 0, 1, 2]]
    assert found["labels"].tolist() == [
        [-100, 2, 3, -100, 17, 18],
        [-100, 5, -100, -100, -100, -100],
    ]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: PackedSequences(SEQUENCES, 1),
            ConfigError,
            "length: expected a whole number of at least 2, got 1",
        ),
        (
            lambda: PackedSequences(SEQUENCES, 2),
            ConfigError,
            "length: expected at least 3, the tokens of sample 0",
        ),
        (
            lambda: PackedSequences(SEQUENCES, 4, [1]),
            ConfigError,
            "lengths: expected one for each of 4 samples, got 1",
        ),
        (
            lambda: PackedSequences([[[1]]], 4),
            DataError,
            r"sample 0: .* got shapes \[1, 1\] and \[1, 1\]",
        ),
        (
            lambda: PackedSequences([{"ids": [1]}], 4),
            DataError,
            "sample 0: expected token ids, or a mapping with 'inp",
        ),
        (
            lambda: PackedSequences(["text"], 4),
            DataError,
            "sample 0: expected token ids, .* got str",
        ),
        (
            lambda: PackedSequences([{"input_ids": [1], "labels": [1, 2]}], 4),
            DataError,
            "as many labels, got shapes",
        ),
        (
            lambda: PackedSequences(SEQUENCES, 5, [1, 1, 1, 1])[0],
            DataError,
            "sample 2: 3 tokens, more than `lengths`",
        ),
    ],
)
def test_bad_input(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()
