"""What reads a format of files with samples, the formats that are known, and what their readers
have in common.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..registry import Registry

Blocks = tuple[Sequence[int] | NDArray[np.int64], Sequence[Any] | NDArray[np.int64]]
"""The blocks of a file: the number of samples in each, and the place of each, which is an integer
or a tuple of integers.
"""

READERS = Registry(
    "read",
    {
        "jsonl": "lockstep.data.formats.json_lines:JsonLines",
        "parquet": "lockstep.data.formats.parquet:Parquet",
        "arrow": "lockstep.data.formats.arrow:Arrow",
        "tar": "lockstep.data.formats.tar_files:Tar",
        "bin": "lockstep.data.formats.token_files:Tokens",
        "mds": "lockstep.data.formats.mds:Mds",
    },
)
# the formats by the ends of files' names; an index of MDS has a name of its own
FORMAT_OF_SUFFIX = {
    ".jsonl": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".tar": "tar",
    ".bin": "bin",
}

# a run of records ends after this many bytes, or after its number of records
_BLOCK_BYTES = 4 << 20


class ShardReader(Protocol):
    """Reads the samples of a file in blocks: samples that lie together and are read together.

    An exception of a method ends the run with one line that names the file and the block. A reader
    is pickled for loader processes. It may have an attribute `index_name`, a text that says in
    which way `blocks` divides a file: then the result of `blocks` is kept in a file, and used again
    as long as size, modification time and that text are the same.
    """

    def blocks(self, path: Path) -> Blocks:
        """Return the sizes of the blocks of a file, in samples, and their places: what `read` needs
        to find them.

        Args:
            path: the path of a file.
        """

    def read(self, path: Path, place: tuple[int, ...]) -> Sequence[Any]:
        """Return the samples of the block at `place`; they may be decoded when they are taken from
        the sequence.

        Args:
            path: the path of a file.
            place: the place of a block, as `blocks` has returned it.
        """


class Decoded(Sequence[Any]):
    """Records of which each is decoded when it is taken."""

    def __init__(self, records: Sequence[Any], decode: Callable[[Any], Any]) -> None:
        self._records = records
        self._decode = decode

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: Any) -> Any:
        return self._decode(self._records[index])


def read_range(path: Path, start: int, stop: int) -> bytes:
    """Return the bytes from `start` to before `stop` of a file.

    Raises:
        ValueError: if it has fewer.
    """
    with path.open("rb") as file:
        file.seek(start)
        data = file.read(stop - start)
    if len(data) != stop - start:
        raise ValueError(f"ends at byte {start + len(data)}, within the block")
    return data


class Runs:
    """Groups records that follow each other in a file into blocks.

    Args:
        samples: the most records in a block.

    Attributes:
        sizes: the number of records in each block.
        places: where each block begins and ends in the file, in bytes.
    """

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self.sizes: list[int] = []
        self.places: list[tuple[int, int]] = []
        self._start = self._count = 0

    def add(self, stop: int) -> None:
        """Add a record that ends at byte `stop`."""
        self._count += 1
        if self._count == self._samples or stop - self._start >= _BLOCK_BYTES:
            self.end(stop)

    def end(self, stop: int) -> None:
        """End the current block at byte `stop`."""
        if self._count:
            self.sizes.append(self._count)
            self.places.append((self._start, stop))
        self._start = stop
        self._count = 0
