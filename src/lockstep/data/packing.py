"""Packing: token sequences of different lengths, put together into rows of one length, so that
nothing is padded.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from .. import arguments
from ..activity import Activity
from ..errors import ConfigError, DataError

_IGNORED = -100  # the label that losses of torch, and so models of Hugging Face, do not count


class PackedSequences(Dataset[Any]):
    """A map-style data set of rows of `length` tokens, each of them made of whole sequences of a
    data set.

    A row is a dict of int64 tensors of shape (length,), as causal language models of Transformers
    take them:

    - "input_ids": the tokens of the sequences, one behind another.
    - "position_ids": 0, 1, 2, … for each sequence. Transformers sees by them where a sequence
      begins, and lets no token attend to one of another sequence, if the batch has no
      "attention_mask".
    - "labels": the labels of the sequences, or else their tokens; -100, which is not counted, for
      the first token of each sequence, which nothing comes before, and for what is left of the row.

    Which sequences make up a row depends on the lengths alone, so the rows are the same on every
    worker and in every epoch; a `Loader` shuffles them. Best fit decreasing: each sequence, the
    longest first, goes into the fullest row that has room for it.

    Args:
        dataset: a map-style data set. A sample is a sequence of token ids, or a mapping with
            "input_ids" and maybe "labels".
        length: tokens in a row.
        lengths: number of tokens in each sample; by default, the samples are read once to count
            them.
        pad: the token that fills rows.

    Raises:
        ConfigError: an argument is invalid, or a sequence does not fit into a row; names the
            sample.
    """

    def __init__(
        self, dataset: Any, length: int, lengths: Sequence[int] | None = None, pad: int = 0
    ) -> None:
        length = arguments.whole("length", length, least=2)
        if lengths is None:
            with Activity(f"lockstep: counting the tokens of {type(dataset).__name__}"):
                lengths = [
                    len(_sequence(dataset[index], index)[0]) for index in range(len(dataset))
                ]
        if len(lengths) != len(dataset):
            raise ConfigError(
                "lengths", f"one for each of {len(dataset)} samples", found=f"{len(lengths)}"
            )
        self.dataset = dataset
        self.length = length
        self._pad = pad
        self.rows = pack(lengths, length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = {
            "input_ids": torch.full((self.length,), self._pad),
            "position_ids": torch.zeros(self.length, dtype=torch.int64),
            "labels": torch.full((self.length,), _IGNORED),
        }
        end = 0
        for sample in self.rows[index]:
            tokens, labels = _sequence(self.dataset[sample], sample)
            start = end
            end = end + len(tokens)
            if end > self.length:
                raise DataError(f"sample {sample}: {len(tokens)} tokens, more than `lengths` says")
            row["input_ids"][start:end] = tokens
            row["position_ids"][start:end] = torch.arange(len(tokens))
            row["labels"][start + 1 : end] = labels[1:]
        row["position_ids"][end:] = torch.arange(self.length - end)
        return row


def _sequence(sample: Any, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens of a sample, and its labels.

    Raises:
        DataError: it has none, or as many labels as tokens it has not.
    """
    mapping = isinstance(sample, Mapping)
    try:
        tokens = torch.as_tensor(sample["input_ids"] if mapping else sample, dtype=torch.int64)
        labels = (
            torch.as_tensor(sample["labels"], dtype=torch.int64)
            if mapping and "labels" in sample
            else tokens
        )
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        problem = (
            f"sample {index}: expected token ids, or a mapping with 'input_ids', got "
            f"{type(sample).__name__}"
        )
        raise DataError(f"{problem}: {error}") from None
    if tokens.dim() != 1 or labels.shape != tokens.shape:
        shapes = f"{list(tokens.shape)} and {list(labels.shape)}"
        raise DataError(
            f"sample {index}: expected a sequence of token ids, and as many labels, got shapes "
            f"{shapes}"
        )
    return tokens, labels


def pack(lengths: Sequence[int], length: int) -> list[list[int]]:
    """Return for each row the samples in it, in their order; rows are in the order of their first
    samples.

    Args:
        lengths: number of tokens in each sample; one without any is left out.
        length: tokens in a row.

    Raises:
        ConfigError: a sample is longer than a row.
    """
    for index, size in enumerate(lengths):
        if size > length:
            hint = "Cut it, or give a larger length."
            raise ConfigError(
                "length", f"at least {size}, the tokens of sample {index}", length, hint
            )
    rows: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # the rows by the tokens that they have room for
    rooms: list[int] = []  # those numbers, sorted
    for index in sorted(
        (index for index, size in enumerate(lengths) if size), key=lambda index: -lengths[index]
    ):
        at = bisect_left(rooms, lengths[index])
        if at == len(rooms):
            room = length
            row = len(rows)
            rows.append([])
        else:
            room = rooms[at]
            row = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[at]
        rows[row].append(index)
        left = room - lengths[index]
        if left and left not in with_room:
            insort(rooms, left)
        if left:
            with_room.setdefault(left, []).append(row)
    return sorted(map(sorted, rows))
