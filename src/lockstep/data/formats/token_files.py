"""Token files: tokens as numbers of one type, of which so many that follow each other are a
sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ... import arguments
from ..shard_readers import Blocks, Decoded


class Tokens:
    """Reads ``.bin`` files: tokens as numbers of one type, without a header.

    Sample i of a file is ``(tokens[i * n : (i + 1) * n], tokens[i * n + 1 : (i + 1) * n + 1])`` for
    n = `block_size`: inputs and targets, two int64 tensors of shape (n,). Tokens at the end that
    fill no sample are left out.

    Args:
        block_size: tokens in a sample.
        dtype: "uint16", "uint32", "int32" or "int64", in the byte order of this machine.

    Raises:
        ConfigError: an argument is invalid.
    """

    _TYPES = ("uint16", "uint32", "int32", "int64")

    def __init__(self, block_size: int | None = None, dtype: str = "uint16") -> None:
        expected = "the number of tokens in a sample of a .bin file"
        self.block_size = arguments.whole("block_size", block_size, least=1, expected=expected)
        self._dtype = np.dtype(arguments.choice("dtype", str(dtype), self._TYPES))
        # Blocks may be small: files of tokens are read at any place, without decoding.
        self._samples = max(1, (1 << 18) // (self.block_size * self._dtype.itemsize))

    def blocks(self, path: Path) -> Blocks:
        """Return the blocks: runs of samples of 256 KiB."""
        size = path.stat().st_size
        if size % self._dtype.itemsize:
            raise ValueError(
                f"its size of {size} bytes is no multiple of the {self._dtype.itemsize} of "
                f"{self._dtype}"
            )
        samples = max(0, size // self._dtype.itemsize - 1) // self.block_size
        starts = np.arange(0, samples, self._samples, dtype=np.int64)
        sizes = np.minimum(starts + self._samples, samples) - starts
        return sizes, np.stack([starts, sizes], 1)

    def read(self, path: Path, place: tuple[int, ...]) -> Sequence[Any]:
        """Return the samples of the block."""
        start, samples = place
        # A memory-mapped file that another program cuts would end this process with a signal;
        # reading raises an error.
        count = samples * self.block_size + 1
        offset = start * self.block_size * self._dtype.itemsize
        tokens = np.fromfile(path, self._dtype, count, offset=offset)
        if len(tokens) != count:
            raise ValueError(f"{len(tokens)} tokens, expected {count}")
        return Decoded(
            range(0, count - 1, self.block_size), lambda begin: self._sample(tokens, begin)
        )

    def _sample(self, tokens: NDArray[Any], begin: int) -> tuple[torch.Tensor, torch.Tensor]:
        block = torch.from_numpy(tokens[begin : begin + self.block_size + 1].astype(np.int64))
        return block[:-1], block[1:]
