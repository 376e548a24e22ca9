"""Parquet files: a sample is a row, and a block is a row group."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ... import arguments
from ..shard_readers import Blocks
from .arrow import check_columns, rows_of


class Parquet:
    """Reads ``.parquet`` files with pyarrow: a sample is a row, a dict of Python values by column.

    A list of numbers is a NumPy array. A block is a row group, which is decoded as a whole.

    Args:
        columns: names of the columns that are read; None for all of them.

    Raises:
        ConfigError: pyarrow is not installed.
    """

    def __init__(self, columns: Sequence[str] | None = None) -> None:
        arguments.require_package("pyarrow", "Stream() of Parquet files", "streams")
        self._columns = None if columns is None else list(columns)

    def blocks(self, path: Path) -> Blocks:
        """Return the row groups, from the end of the file."""
        from pyarrow import parquet

        with parquet.ParquetFile(path) as file:
            check_columns(self._columns, file.schema_arrow.names)
            metadata = file.metadata
            rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        return rows, range(len(rows))

    def read(self, path: Path, place: tuple[int, ...]) -> Sequence[Any]:
        """Return the rows of a row group."""
        from pyarrow import parquet

        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            # Without threads: a loader process is one of several already.
            return rows_of(file.read_row_group(place[0], columns=self._columns, use_threads=False))
