"""Batch samplers for a `Loader`: batches of samples of similar lengths, or of about the same number
of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from .. import arguments
from ..errors import ConfigError
from ..parallel.shards import steps_per_epoch

_MAX_INT32_SAMPLES = 1 << 31


def index_dtype(samples: int) -> torch.dtype:
    """Return the smallest dtype for indices of so many samples."""
    return torch.int32 if samples <= _MAX_INT32_SAMPLES else torch.int64


class LengthBatchSampler:
    """Global batches of samples of similar lengths, so that little is padded; for
    `Loader(batch_sampler=)`.

    Samples are shuffled, each pool of consecutive ones is sorted by length and cut into batches,
    and the batches are shuffled. Every sample is used once in an epoch, and only one batch may be
    smaller than the others.

    Args:
        lengths: the length of each sample, by index.
        global_batch_size: samples in a batch, over all workers.
        pool: number of batches that are sorted together; more make lengths more similar, and the
            order less random.

    Raises:
        ConfigError: an argument is invalid.
    """

    def __init__(self, lengths: Sequence[int], global_batch_size: int, pool: int = 50) -> None:
        self.global_batch_size = arguments.whole("global_batch_size", global_batch_size, least=1)
        self.pool = arguments.whole("pool", pool, least=1)
        self._lengths = _as_lengths(lengths)

    def __len__(self) -> int:
        """Batches in an epoch."""
        return steps_per_epoch(len(self._lengths), self.global_batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        """Iterate over the batches of an epoch, in an order drawn from torch's global generator."""
        return (batch.tolist() for batch in self.tensors())

    def tensors(self) -> list[torch.Tensor]:
        """Return what iterating yields as tensors of shape (samples of the batch,)."""
        batches: list[torch.Tensor] = []
        order = _permutation(len(self._lengths))
        for pool in torch.split(order, self.pool * self.global_batch_size):
            by_length = pool.index_select(0, _stable_order(self._lengths.index_select(0, pool)))
            batches += torch.split(by_length, self.global_batch_size)
        return [batches[number] for number in torch.randperm(len(batches)).tolist()]


class TokenBatchSampler:
    """Global batches of about the same number of tokens: of few long samples or of many short ones.

    Samples are sorted by length, and cut into batches that have at most so many tokens when they
    are padded to their longest sample. Each epoch shuffles samples of the same length, and the
    batches; every sample is used once.

    Args:
        lengths: the tokens of each sample, by index.
        global_batch_tokens: tokens in a batch with the padding, over all workers, at most.

    Attributes:
        global_batch_size: samples in the batch with the most; the `Loader` and the `Trainer` need
            it.

    Raises:
        ConfigError: an argument is invalid, or a sample has more tokens than a batch may have.
    """

    def __init__(self, lengths: Sequence[int], global_batch_tokens: int) -> None:
        global_batch_tokens = arguments.whole("global_batch_tokens", global_batch_tokens, least=1)
        self._lengths = _as_lengths(lengths)
        in_order = self._lengths.sort().values.tolist()
        if in_order[0] < 1 or in_order[-1] > global_batch_tokens:
            index = int(
                (self._lengths.argmin() if in_order[0] < 1 else self._lengths.argmax()).item()
            )
            found = f"{int(self._lengths[index])} tokens in sample {index}"
            raise ConfigError(
                "lengths",
                f"numbers from 1 to {global_batch_tokens} (global_batch_tokens)",
                found=found,
            )
        self._sizes = []
        size = 0
        for length in in_order:
            if (size + 1) * length > global_batch_tokens:
                self._sizes.append(size)
                size = 0
            size += 1
        self._sizes.append(size)
        self.global_batch_size = max(self._sizes)
        self.global_batch_tokens = global_batch_tokens

    def __len__(self) -> int:
        """Batches in an epoch."""
        return len(self._sizes)

    def __iter__(self) -> Iterator[list[int]]:
        """Iterate over the batches of an epoch, in an order drawn from torch's global generator."""
        return (batch.tolist() for batch in self.tensors())

    def tensors(self) -> list[torch.Tensor]:
        """Return what iterating yields as tensors of shape (samples of the batch,)."""
        shuffled = _permutation(len(self._lengths))
        by_length = shuffled.index_select(0, _stable_order(self._lengths.index_select(0, shuffled)))
        batches = torch.split(by_length, self._sizes)
        return [batches[number] for number in torch.randperm(len(batches)).tolist()]


def _as_lengths(lengths: Sequence[int]) -> torch.Tensor:
    """Return lengths as a tensor; of 16 bits if they fit, which are sorted in a tenth of the
    time.
    """
    numbers = torch.as_tensor(lengths)
    if numbers.dim() != 1 or not len(numbers):
        raise ConfigError(
            "lengths", "one number for each sample", found=f"shape {list(numbers.shape)}"
        )
    limits = torch.iinfo(torch.int16)
    whole = not numbers.is_floating_point() and numbers.dtype is not torch.bool
    small = whole and limits.min <= int(numbers.min()) and int(numbers.max()) <= limits.max
    return numbers.to("cpu", torch.int16) if small else numbers


def _permutation(samples: int) -> torch.Tensor:
    """Return a permutation from torch's global generator in the smallest dtype; the numbers are
    those of int64.
    """
    return torch.randperm(samples, dtype=index_dtype(samples))


def _stable_order(lengths: torch.Tensor) -> torch.Tensor:
    """Return the order that sorts `lengths`; NumPy's stable sort of 16 bits is a radix sort."""
    if lengths.dtype is torch.int16:
        return torch.from_numpy(np.argsort(lengths.numpy(), kind="stable"))
    return lengths.argsort(stable=True)
