"""JSON lines: a sample is the value on one line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..shard_readers import Blocks, Decoded, Runs, read_range


class JsonLines:
    """Reads ``.jsonl`` files: a sample is the value on one line; empty lines do not count."""

    index_name = "jsonl 1000"

    def blocks(self, path: Path) -> Blocks:
        """Return the blocks: runs of 1000 lines, or of 4 MiB."""
        runs = Runs(1000)
        stop = 0
        with path.open("rb") as file:
            for line in file:
                stop += len(line)
                if not _is_empty(line):
                    runs.add(stop)
        runs.end(stop)
        return runs.sizes, runs.places

    def read(self, path: Path, place: tuple[int, ...]) -> Sequence[Any]:
        """Return the values of the block's lines, which are parsed when they are taken."""
        lines = read_range(path, *place).split(b"\n")
        return Decoded([line for line in lines if not _is_empty(line)], json.loads)


def _is_empty(line: bytes) -> bool:
    return line in (b"", b"\r", b"\n", b"\r\n")
